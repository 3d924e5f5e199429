r"""Multivariate Laplace mechanism: a noisy vector, then the nearest word.

.. math::
  y = \arg\min_u \|\phi(u) - \phi(w) - \kappa\|_2, \quad
  p(\kappa) \propto e^{-\epsilon \|\kappa\|_2}

*proved*: the noise density changes by at most :math:`e^{\epsilon d(w, w')}`
between two words, and the nearest word is post-processing. The mean noise norm
is D / epsilon: in 300 dimensions at epsilon 10 it is 30, far beyond most
neighbours. ``epsilon=inf`` adds no noise, returns the input and promises
nothing (status *none*).

References: Feyisetan et al. (2020), Section 3; Xu et al. (2020), Section 3.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import calibration


class Params(NamedTuple):
  """What the calibrated mechanism needs."""
  vectors: Any  # [V, D] float32
  epsilon: Any  # [] float32, rounded down
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon):
  """Calibrates the multivariate Laplace mechanism.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget > 0 per unit Euclidean distance; infinity for no noise.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table; an epsilon that is none, or so small that its
      noise overflows float32.
  """
  epsilon = calibration.check_epsilon(epsilon, allow_infinite=True)
  vectors = calibration.check_table(table)
  calibration.check_noise(epsilon, vectors)
  promised = not math.isinf(epsilon)
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='l2', unit='per unit distance',
      relation=calibration.RELATION,
      status='proved' if promised else 'none',
      source='Feyisetan et al. (2020), Theorem 1' if promised else (
          'no noise: the input is returned'),
      conditions=calibration.REAL_CONDITIONS)
  return Params(vectors, calibration.float32_at_most(epsilon), guarantee)


def privatize(key, ids, params, start=0):
  """Replaces each word by the one nearest to its noisy vector.

  Guarantee: ``params.guarantee``, per text; not covered: the missing float32
  tails of the noise (about 2**-23 a coordinate) and the generator.

  Args:
    key: typed key; consumed.
    ids: int32 word ids, any shape.
    params: Params of :func:`calibrate`.
    start: index of the first element; see ``samplers.split_index``.

  Returns:
    int32 ids of the same shape.

  Raises:
    ValueError: concrete ids that the table does not hold.
  """
  return calibration.run(_privatize, key, ids, params, params.vectors.shape[0],
                         start)


@jax.jit
def _privatize(key, ids, params, start):
  vectors = jnp.asarray(params.vectors)
  noisy = noisy_vectors(key, ids.reshape(-1), vectors, params.epsilon, start)
  nearest, _ = neighbors.nearest(noisy, vectors)
  return nearest.reshape(ids.shape)


def noisy_vectors(key, ids, vectors, epsilon, start):
  """Returns the vectors of ids [B] plus noise, float32 [B, D]. Jittable."""
  keys = samplers.element_keys(key, samplers.VECTOR_NOISE, start, ids.size)
  noise = samplers.map_elements(lambda k: samplers.multivariate_laplace(
      k, vectors.shape[1:], epsilon=epsilon), keys)
  return vectors[ids] + noise


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V], for D = 1.

  On a line the cells of the nearest word are intervals. In more dimensions
  they are polytopes and the law has no closed form.

  Raises:
    ValueError: D > 1; use ``deniability.measure`` or an audit by trials.
  """
  ids = calibration.flat_ids(ids, params.vectors.shape[0])
  vectors = np.asarray(params.vectors, np.float64)
  if vectors.shape[1] != 1:
    raise ValueError(
        f'log_prob has no closed form in D={vectors.shape[1]} dimensions; '
        'estimate it with jaxdp.deniability.measure or by auditing trials')
  line = vectors[:, 0]
  order = np.argsort(line)
  middle = (line[order][1:] + line[order][:-1]) / 2
  edges = np.concatenate([[-np.inf], middle, [np.inf]])
  shifted = edges[None] - line[ids][:, None]
  out = np.empty((len(shifted), len(line)))
  out[:, order] = log_interval(float(params.epsilon) * shifted)
  return out


def log_interval(edges):
  """Log mass of a unit Laplace between neighbouring edges [B, n] of a row."""
  low, high = edges[:, :-1], edges[:, 1:]
  # Mirror intervals right of 0 to the left tail, where the CDF is e^x / 2.
  mirrored = low > 0
  low, high = np.where(mirrored, -high, low), np.where(mirrored, -low, high)
  with np.errstate(divide='ignore', over='ignore', invalid='ignore'):
    one_side = high + np.log(-np.expm1(low - high)) - math.log(2)
    astride = np.log1p(-(np.exp(np.minimum(low, 0))
                         + np.exp(-np.maximum(high, 0))) / 2)
    straight = np.isinf(low) & (high <= 0)
    one_side = np.where(straight, high - math.log(2), one_side)
  return np.where((low < 0) & (high > 0), astride, one_side)


def distances(ids, params):
  """Returns the guarantee's metric, Euclidean, host float64 [B, V]."""
  return calibration.l2_distances(ids, params.vectors)
