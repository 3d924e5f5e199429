r"""Mahalanobis mechanism: elliptical noise, then the nearest word.

.. math::
  y = \arg\min_u \|\phi(u) - \phi(w) - z\|_2, \quad
  p(z) \propto e^{-\epsilon \sqrt{z^T A^{-1} z}}, \quad
  A = \lambda \Sigma + (1 - \lambda) I

with :math:`\Sigma` the covariance of the table's vectors, scaled to trace D.
Noise is stretched along the axes on which the table is wide, so that it more
often reaches other words. With :math:`L L^T = A`, u uniform on the sphere and
r of law Gamma(D, 1/epsilon), :math:`z = r L u` has that density: r is the
norm of z *in the metric of A*. A direction scaled back to Euclidean length one
after L, or drawn from the ball, gives another density and no theorem.

*proved*: :math:`\sqrt{z^T A^{-1} z}` is a norm, so the noise density changes
by at most :math:`e^{\epsilon d(w, w')}` between two words, where d is the
distance of that norm; the nearest word (Euclidean) is post-processing.
Calibration is host, float64. L is then rounded to float32 and A *is* the
product of the rounded L: ``distances`` measures in it. The product r L u is
rounded on the device, which 'real arithmetic' stands for.

>>> import jax, numpy as np
>>> from jaxdp import embeddings
>>> table = embeddings.make_table(
...     ['cold', 'cool', 'warm', 'red'],
...     [[0., 0.], [1., .1], [5., 0.], [2., 1.]])
>>> params = calibrate(table, epsilon=2.)
>>> privatize(jax.random.key(0), np.int32([0, 0, 2]), params).shape
(3,)
>>> distances(np.int32([0]), params).round(2).tolist()  # to red: 2.24 in l2
[[0.0, 0.93, 4.6, 2.15]]

References: Xu et al. (2020b), "A differentially private text perturbation
method using a regularized Mahalanobis metric".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import multivariate_laplace

_ROWS = 256  # elements whose noise is stretched by one product
_THINNEST = 2.**-20  # least axis over the longest that float32 resolves


class Params(NamedTuple):
  """What the calibrated mechanism needs."""
  vectors: Any  # [V, D] float32
  factor: Any  # [D, D] float32, lower triangular L
  epsilon: Any  # [] float32, rounded down
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, mixing=0.2):
  """Calibrates the Mahalanobis mechanism.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget > 0 per unit Mahalanobis distance; see :func:`distances`.
    mixing: lambda in [0, 1], the weight of the covariance; 0 is the
      multivariate Laplace mechanism.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table, epsilon or mixing; vectors that do not span all D
      dimensions where mixing leaves no identity to hold them up.
  """
  epsilon = calibration.check_epsilon(epsilon)
  mixing = _check_mixing(mixing)
  vectors = calibration.check_table(table)
  factor = _factor(vectors, mixing)
  calibration.check_noise(epsilon, vectors,
                          stretch=float(np.linalg.norm(factor, 2)))
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='mahalanobis',
      unit='per unit Mahalanobis distance', relation=calibration.RELATION,
      status='proved',
      source='Xu et al. (2020b); Chatzikokolakis et al. (2013) for the norm',
      conditions=calibration.REAL_CONDITIONS)
  return Params(vectors, factor, calibration.float32_at_most(epsilon),
                guarantee)


def _check_mixing(mixing):
  if isinstance(mixing, bool) or not isinstance(
      mixing, (int, float, np.number)) or not 0 <= mixing <= 1:
    raise ValueError(f'mixing={mixing!r} must be a number in [0, 1]; it is the '
                     'weight of the covariance')
  return float(mixing)


def _factor(vectors, mixing):
  """Returns L with L L^T = mixing * Sigma + (1 - mixing) * I, float32."""
  num, dim = vectors.shape
  mean = vectors.mean(axis=0, dtype=np.float64)
  covariance = np.zeros((dim, dim))
  for start in range(0, num, 4096):
    centred = vectors[start:start + 4096] - mean
    covariance += centred.T @ centred
  sigma = covariance * (dim / np.trace(covariance))
  matrix = mixing * sigma + (1 - mixing) * np.eye(dim)
  axes = np.linalg.eigvalsh(matrix)
  if axes[0] <= _THINNEST**2 * axes[-1]:
    raise ValueError(
        f'mixing={mixing} leaves a singular matrix: the table of {num} vectors '
        f'spans fewer than D={dim} dimensions, so noise of their covariance '
        'would be flat; use a smaller mixing, such as 0.2')
  return np.linalg.cholesky(matrix).astype(np.float32)


def privatize(key, ids, params, start=0):
  """Replaces each word by the one nearest to its noisy vector.

  Guarantee: ``params.guarantee``, per text; not covered: float32 rounding of
  the noise, its missing tails (about 2**-23 a coordinate) and the generator.

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
  noise = _noise(keys, jnp.asarray(params.factor), params.epsilon)
  nearest, _ = neighbors.nearest(vectors[ids.reshape(-1)] + noise, vectors)
  return nearest.reshape(ids.shape)


def _noise(keys, factor, epsilon):
  """Returns r L u for each key, float32 [B, D]."""
  return _stretched(samplers.map_elements(
      lambda k: samplers.multivariate_laplace(
          k, factor.shape[:1], epsilon=epsilon), keys), factor)


def _stretched(noise, factor):
  """Returns L z for each row z, to the bit whatever the number of rows."""
  num, dim = noise.shape
  # Products of one shape: how a product is rounded depends on its shape, and
  # the batch must not show in the result.
  padded = jnp.pad(noise, ((0, -num % _ROWS), (0, 0)))
  out = jax.lax.map(
      lambda rows: jax.lax.dot_general(
          rows, factor, (((1,), (1,)), ((), ())),
          precision=jax.lax.Precision.HIGHEST),
      padded.reshape(-1, _ROWS, dim))
  return out.reshape(-1, dim)[:num]


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V], for D = 1.

  On a line A is a number and the law is that of ``multivariate_laplace``.

  Raises:
    ValueError: D > 1; use ``deniability.measure`` or an audit by trials.
  """
  rate = float(params.epsilon) / float(params.factor[0, 0])
  return multivariate_laplace.log_prob(ids, multivariate_laplace.Params(
      params.vectors, rate, params.guarantee))


def distances(ids, params):
  r"""Returns the guarantee's metric, host float64 [B, V].

  .. math::  d(w, w') = \sqrt{(\phi - \phi')^T (L L^T)^{-1} (\phi - \phi')}
  """
  factor = np.asarray(params.factor, np.float64)
  # As L^-1 x for each row x: sums of squares, so no distance is negative.
  whitened = np.linalg.solve(
      factor, np.asarray(params.vectors, np.float64).T).T
  return calibration.l2_distances(ids, whitened)
