"""What every word mechanism does on the host: checks, rounding, distances.

Nothing here is private by itself. Distances of a public table are public, so
computing them exactly costs no privacy (Xu et al. 2020, Algorithm 2).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import embeddings
from jaxdp import guarantees
from jaxdp import samplers

RELATION = ('texts of equal length; distance is the sum of the distances of '
            'the words at each position')
REAL_CONDITIONS = (guarantees.REAL_ARITHMETIC, guarantees.IDEAL_RANDOM_BITS)

_LARGEST = float(np.finfo(np.float32).max)
_FARTHEST = 1e18  # its square, and a few times that, are float32 numbers


def check_table(table):
  """Returns the table's float32 vectors [V, D], or raises ValueError."""
  if not (isinstance(table, tuple) and len(table) == 2):
    raise ValueError(f'table is of type {type(table).__name__}; it must be an '
                     'EmbeddingTable, as embeddings.load returns')
  table = embeddings.validate(table)
  if len(table.words) < 2:
    raise ValueError(f'table has {len(table.words)} word; a mechanism needs at '
                     'least 2 to choose from')
  return np.asarray(table.vectors, np.float32)


def check_epsilon(epsilon, *, allow_infinite=False):
  """Returns epsilon as a float that float32 can hold, or raises ValueError."""
  if isinstance(epsilon, (bool, np.bool_, str, bytes)):
    raise ValueError(f'epsilon={epsilon!r} is not a number; give a float')
  try:
    value = float(epsilon)
  except (TypeError, ValueError):
    raise ValueError(f'epsilon={epsilon!r} is not a number') from None
  except OverflowError:
    # Not shown: it has hundreds of digits.
    raise ValueError('epsilon is an integer beyond float64; it must lie in (0, '
                     f'{_LARGEST:.3g}]') from None
  if _LARGEST < value < math.inf:
    raise ValueError(f'epsilon={epsilon!r} is above the largest float32, '
                     f'{_LARGEST:.3g}; use a smaller budget')
  if not value > 0:
    raise ValueError(f'epsilon={epsilon!r} must be positive; it is a budget '
                     'per unit distance')
  if math.isinf(value) and not allow_infinite:
    raise ValueError('epsilon=inf promises nothing; use multivariate_laplace '
                     'with epsilon=inf for a run without noise')
  return value


def check_noise(epsilon, vectors, *, stretch=1.):
  """Refuses a budget whose multivariate Laplace noise overflows float32.

  The norm of the noise has law Gamma(D) / epsilon, above D + 40 sqrt(D) + 100
  over epsilon with probability under e^-100. With the longest vector it must
  stay where squared distances are finite.

  Args:
    epsilon: budget > 0, finite or not.
    vectors: float32 ``[V, D]``.
    stretch: most that the mechanism lengthens its noise.

  Raises:
    ValueError: names epsilon and the smallest that can be used, or the table
      if its vectors alone are too long.
  """
  wide = np.asarray(vectors, np.float64)
  longest = math.sqrt(np.einsum('vd,vd->v', wide, wide).max())
  if longest > _FARTHEST / 2:
    raise ValueError(f'table holds a vector of length {longest:.3g}, whose '
                     'squared distances overflow float32; scale the table')
  dim = wide.shape[1]
  reach = (dim + 40 * math.sqrt(dim) + 100) * max(stretch, 1.)
  least = reach / (_FARTHEST - longest)
  if epsilon < least:
    raise ValueError(f'epsilon={epsilon!r} is too small: its noise overflows '
                     f'float32; use at least {1.01 * least:.3g}')


def check_ids(ids, num_words):
  """Checks concrete word ids; traced ones are clamped by the gather.

  Raises:
    ValueError: ids of another dtype, or outside [0, num_words).
  """
  traced = isinstance(ids, jax.core.Tracer)
  ids = ids if traced else np.asarray(ids)
  if ids.size == 0:
    return
  if not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f'ids has dtype {ids.dtype}; word ids are integers')
  if traced:
    return
  low, high = int(ids.min()), int(ids.max())
  if low < 0 or high >= num_words:
    bad = low if low < 0 else high
    raise ValueError(f'ids holds {bad}; the table has words 0 to '
                     f'{num_words - 1}')


def run(privatize_fn, key, ids, params, num_words, start):
  """The host half of every ``privatize``: checks, then the jitted half.

  Args:
    privatize_fn: jitted ``(key, ids, params, start) -> ids``.
    key, ids, params, start: as the mechanism's ``privatize`` got them.
    num_words: ids lie in [0, num_words).

  Raises:
    ValueError: concrete ids that the table does not hold.
  """
  check_ids(ids, num_words)
  ids = jnp.asarray(ids, jnp.int32)
  if not ids.size:
    return ids
  # Without the static guarantee: another budget does not compile again.
  return privatize_fn(key, ids, params._replace(guarantee=None),
                      samplers.split_index(start))


def flat_ids(ids, num_words):
  """Returns concrete word ids as int64 [B], checked by :func:`check_ids`."""
  check_ids(ids, num_words)
  return np.asarray(ids).reshape(-1).astype(np.int64)


def float32_at_most(value):
  """The largest float32 not above value: a rate rounded so epsilon holds."""
  rounded = np.float32(value)
  if float(rounded) > value:
    rounded = np.nextafter(rounded, np.float32(0))
  return rounded


def l2_distances(ids, vectors):
  """Returns Euclidean distances to every word, float64 [B, V], in blocks.

  From differences, not from the Gram expansion, which cancels for near words.

  Raises:
    ValueError: ids of another dtype, or that the table does not hold.
  """
  vectors = np.asarray(vectors, np.float64)
  rows = vectors[flat_ids(ids, len(vectors))]
  block = max(1, 2**24 // vectors.size)
  parts = [np.sqrt(np.sum((rows[i:i + block, None] - vectors[None])**2, -1))
           for i in range(0, len(rows), block)]
  return np.concatenate(parts) if parts else np.zeros((0, len(vectors)))
