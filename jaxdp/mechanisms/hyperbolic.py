r"""Hyperbolic mechanism: noise in the Poincare ball, then the nearest word.

.. math::
  d_H(x, y) = \mathrm{arcosh}\left(
      1 + \frac{2 \|x - y\|^2}{(1 - \|x\|^2)(1 - \|y\|^2)}\right), \quad
  p(y \mid x) \propto e^{-\epsilon d_H(x, y)}

with respect to hyperbolic volume, which grows as :math:`e^{(D - 1) r}`: the
density exists for :math:`\epsilon > D - 1` only. Made for Poincare embeddings
of few dimensions, whose vectors lie inside the unit ball.

*proved*: every point of hyperbolic space looks the same, so the normaliser
does not depend on x, the density changes by at most
:math:`e^{\epsilon d_H(x, x')}`, and the nearest word is post-processing.

The draw is exact, where the paper runs a Markov chain: the distance r from x
has density :math:`\propto \sinh(r)^{D-1} e^{-\epsilon r}`, so :math:`e^{-2r}`
has law Beta((epsilon - D + 1) / 2, D); a point at that distance from the
origin in a uniform direction is carried to x by Mobius addition, an isometry.
Draws are float32; the geometry and the search are float64 on the device.

>>> import jax, numpy as np
>>> from jaxdp import embeddings
>>> table = embeddings.make_table(
...     ['animal', 'cat', 'dog'], [[0., 0.], [.8, .1], [.7, .5]])
>>> params = calibrate(table, epsilon=3.)
>>> privatize(jax.random.key(0), np.int32([0, 0, 2]), params).shape
(3,)
>>> distances(np.int32([0]), params).round(2).tolist()
[[0.0, 2.23, 2.59]]

References: Feyisetan et al. (2019), "Leveraging hierarchical representations
for preserving privacy and utility in text"; Nickel & Kiela (2017) for the
embeddings; Ungar (2008) for Mobius addition.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import multivariate_laplace

_MOST_SQ_NORM = (1 - 2.**-24)**2  # of the largest float32 below 1
_BLOCK = 2**21  # scores of one block of queries, 16 MB in float64
_INT32_MAX = np.iinfo(np.int32).max


class Params(NamedTuple):
  """What the calibrated mechanism needs."""
  vectors: Any  # [V, D] float32, inside the unit ball
  gamma_shape: Any  # [] float32, (epsilon - D + 1) / 2 > 0, rounded down
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon):
  """Calibrates the hyperbolic mechanism.

  Args:
    table: EmbeddingTable of at least two distinct words; vectors of norm below
      1, which is a Poincare embedding.
    epsilon: budget > D - 1 per unit hyperbolic distance.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table or epsilon; a vector outside the ball; epsilon of
      D - 1 or less.
  """
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  _check_ball(vectors, table.words)
  dim = vectors.shape[1]
  gamma_shape = calibration.float32_at_most((epsilon - dim + 1) / 2)
  if not gamma_shape > 0:
    raise ValueError(
        f'epsilon={epsilon} must exceed D - 1 = {dim - 1}: hyperbolic volume '
        'grows too fast for less; use a larger epsilon or an embedding of '
        'fewer dimensions')
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='hyperbolic',
      unit='per unit hyperbolic distance', relation=calibration.RELATION,
      status='proved', source='Feyisetan et al. (2019)',
      conditions=calibration.REAL_CONDITIONS)
  return Params(vectors, gamma_shape, guarantee)


def _check_ball(vectors, words):
  sq_norms = np.sum(np.square(vectors, dtype=np.float64), axis=1)
  outside = np.flatnonzero(sq_norms > _MOST_SQ_NORM)
  if len(outside):
    row = int(outside[0])
    raise ValueError(
        f'table: {len(outside)} vectors lie outside the unit ball, the first '
        f'row {row} ({words[row]!r}) of norm {math.sqrt(sq_norms[row]):.9g}; '
        'a Poincare embedding has norms below 1, and float32 resolves them up '
        'to 1 - 2**-24, a distance of 17.3 from the origin')


def privatize(key, ids, params, start=0):
  """Replaces each word by the one nearest, in d_H, to its noisy point.

  Guarantee: ``params.guarantee``, per text; not covered: the missing float32
  tails of the noise (about 2**-23 of its mass), float64 rounding and the
  generator. A noisy point whose norm rounds to 1 is kept there: distances to
  it are infinite, but which word is nearest has a limit, and the search takes
  that limit.

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
  keys = samplers.element_keys(key, samplers.VECTOR_NOISE, start, ids.size)
  direction, log_growth = _draw(keys, vectors.shape[1], params.gamma_shape)
  with jax.enable_x64(True):
    noisy = _move(vectors[ids.reshape(-1)], direction, log_growth)
    nearest = _nearest(noisy, vectors)
  return nearest.reshape(ids.shape)


def _draw(keys, dim, gamma_shape):
  """Returns directions, not of length one, [B, D] and log(e^2r - 1), [B]."""

  def draw(key):
    direction_key, radius_key = jax.random.split(key)
    return (jax.random.normal(direction_key, (dim,)),
            _log_growth(radius_key, dim, gamma_shape))

  return samplers.map_elements(draw, keys)


def _log_growth(key, dim, gamma_shape):
  """Draws log(e^2r - 1) of a hyperbolic radius r, float32."""
  # e^-2r = a / (a + b) of gammas a, b, and by logs no r is too large.
  shapes = jnp.stack([jnp.float32(gamma_shape), jnp.float32(dim)])
  log_a, log_b = jax.random.loggamma(key, shapes)
  return log_b - log_a


def _move(points, direction, log_growth):
  """Mobius addition of the points and the noise, float64 [B, D].

  With p = x + v, ``x (+) v = (|p|^2 x + (1 - |x|^2) p) / (|p|^2 + (1 - |x|^2)
  (1 - |v|^2))``: no term cancels near the boundary, as the usual form's do.
  """
  points = points.astype(jnp.float64)
  direction = direction.astype(jnp.float64)
  radius = jnp.log1p(jnp.exp(log_growth.astype(jnp.float64))) / 2
  norm = jnp.sqrt(_sq_norm(direction))
  moved = points + direction * (jnp.tanh(radius / 2) / norm)[:, None]
  gap = 1 - _sq_norm(points)
  noise_gap = jnp.cosh(radius / 2)**-2
  sq_moved = _sq_norm(moved)
  top = sq_moved[:, None] * points + gap[:, None] * moved
  return top / (sq_moved + gap * noise_gap)[:, None]


def _sq_norm(rows):
  return jnp.sum(rows * rows, axis=-1)


def _nearest(points, vectors):
  """The row least in d_H for each point, int32; ties to the lowest index.

  For one point y it is the row x of least ``|x - y|^2 / (1 - |x|^2)``. Products
  with a rounding bound name it; where they leave a choice, float64 differences
  with the whole table decide. Memory is a few blocks of ``_BLOCK`` scores.
  """
  table = vectors.astype(jnp.float64)
  num, (num_words, dim) = len(points), table.shape
  size = max(1, min(1024, num, _BLOCK // num_words))
  padded = jnp.pad(points, ((0, -num % size), (0, 0)))
  found = lax.map(lambda block: _nearest_block(block, table),
                  padded.reshape(-1, size, dim))
  return found.reshape(-1)[:num]


def _nearest_block(points, table):
  sq_norms, gap = _sq_norm(table), 1 - _sq_norm(table)
  products = lax.dot_general(points, table, (((1,), (1,)), ((), ())),
                             precision=lax.Precision.HIGHEST)
  sq_sum = _sq_norm(points)[:, None] + sq_norms[None]
  # Four times the D + 3 roundings of half a unit a score goes through.
  unit = (table.shape[1] + 3) * 2.**-51
  low = (sq_sum * (1 - unit) - 2 * products) / gap[None]
  found = _first_least(low)
  high = _sq_norm(points - table[found]) / gap[found] * (1 + unit)
  unsure = jnp.sum(low <= high[:, None], axis=1, dtype=jnp.int32) > 1
  index = jnp.arange(len(points), dtype=jnp.int32)

  # One row a turn: few rows come here, and each looks at the whole table.
  def redo(carry):
    found, left = carry
    row = jnp.min(jnp.where(left, index, _INT32_MAX))
    scores = _sq_norm(points[row][None] - table) / gap
    return found.at[row].set(_first_least(scores)), left & (index != row)

  return lax.while_loop(
      lambda carry: jnp.any(carry[1]), redo, (found, unsure))[0]


def _first_least(scores):
  # Not argmin, whose lowering from inside a jit fails for 64-bit types.
  least = jnp.min(scores, axis=-1, keepdims=True)
  index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
  index = jnp.broadcast_to(index, scores.shape)
  return jnp.min(jnp.where(scores == least, index, _INT32_MAX), axis=-1)


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V], for D = 1.

  In one dimension hyperbolic space is a line, with coordinate 2 artanh(x), and
  the law is that of ``multivariate_laplace`` on it.

  Raises:
    ValueError: D > 1; use ``deniability.measure`` or an audit by trials.
  """
  vectors = np.asarray(params.vectors, np.float64)
  epsilon = 2 * float(params.gamma_shape) + vectors.shape[1] - 1
  return multivariate_laplace.log_prob(ids, multivariate_laplace.Params(
      2 * np.arctanh(vectors), epsilon, params.guarantee))


def distances(ids, params):
  """Returns the guarantee's metric, d_H, host float64 [B, V]."""
  vectors = np.asarray(params.vectors, np.float64)
  ids = calibration.flat_ids(ids, len(vectors))
  gap = 1 - np.sum(vectors * vectors, axis=1)
  scale = np.sqrt(gap[ids])[:, None] * np.sqrt(gap)
  # arcosh(1 + 2 s^2) = 2 arsinh(s), which keeps small distances.
  return 2 * np.arcsinh(calibration.l2_distances(ids, vectors) / scale)
