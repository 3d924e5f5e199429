r"""Von Mises-Fisher mechanism: a noisy direction, then the word it points at.

.. math::
  y = \arg\max_v \langle u(v), z \rangle, \quad
  p(z \mid w) \propto e^{\epsilon \langle u(w), z \rangle}, \quad
  \|z\| = \|u(w)\| = 1

with u(w) the word's vector scaled to length one; what is drawn and what is
compared are directions, and the lengths of the table's vectors are dropped.

*proved*: the normaliser is the same for every unit u, so between two words the
log density changes by :math:`\epsilon |\langle u - u', z \rangle| \le \epsilon
\|u - u'\|_2`, the chordal metric, at most 2; the word of largest cosine is
post-processing. The concentration kappa is epsilon.

A draw takes 1.53 tries on average at most, whatever the dimension and
epsilon. Calibration is host, float64; the draw is float32 on the device.

>>> import jax, numpy as np
>>> from jaxdp import embeddings
>>> table = embeddings.make_table(
...     ['north', 'east', 'north-east'], [[0., 1.], [2., 0.], [1., 1.]])
>>> params = calibrate(table, epsilon=4.)
>>> privatize(jax.random.key(0), np.int32([0, 0, 2]), params).shape
(3,)
>>> np.exp(log_prob(np.int32([0]), params)).round(3).tolist()
[[0.773, 0.017, 0.209]]

References: Weggenmann & Kerschbaum (2021), "Differential privacy for
directional data"; Wood (1994), "Simulation of the von Mises Fisher
distribution", after Ulrich (1984).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxdp import embeddings
from jaxdp import guarantees
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import calibration

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_NEGLIGIBLE = 45.  # e^-45 of an interval's largest density counts as none


class Params(NamedTuple):
  """What the calibrated mechanism needs."""
  vectors: Any  # [V, D] float32, rows of length one
  envelope: Any  # [] float32, Wood's b in (0, 1], rounded up
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon):
  """Calibrates the von Mises-Fisher mechanism.

  Args:
    table: EmbeddingTable of at least two distinct words, D >= 2; no zero
      vector, no two that point the same way.
    epsilon: budget > 0 per unit chordal distance, the concentration kappa.

  Returns:
    Params; its vectors have length one; its guarantee is *proved* for real
    arithmetic.

  Raises:
    ValueError: a bad table or epsilon; a vector that is zero, or two that
      coincide once scaled, by their rows; D = 1.
  """
  epsilon = calibration.check_epsilon(epsilon)
  calibration.check_table(table)
  vectors = calibration.check_table(embeddings.normalize(table))
  dim = vectors.shape[1]
  if dim < 2:
    raise ValueError(f'table has D={dim} dimension; directions take D >= 2')
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='chordal',
      unit='per unit chordal distance of the unit vectors',
      relation=calibration.RELATION, status='proved',
      source='Weggenmann & Kerschbaum (2021)',
      conditions=calibration.REAL_CONDITIONS)
  return Params(vectors, _envelope(epsilon, dim), guarantee)


def _envelope(epsilon, dim):
  """Wood's b, whose law is exactly that of concentration _concentration(b)."""
  ratio = 2 * epsilon / (dim - 1)
  exact = 1 / (ratio + math.hypot(1, ratio))
  # Up, so that the concentration is at most epsilon.
  rounded = np.float32(exact)
  if float(rounded) < exact:
    rounded = np.nextafter(rounded, np.float32(1))
  return np.maximum(rounded, np.finfo(np.float32).tiny)


def _concentration(envelope, dim):
  b = float(envelope)
  return (dim - 1) * (1 - b) * (1 + b) / (4 * b)


def privatize(key, ids, params, start=0):
  """Replaces each word by the one that its noisy direction points at.

  Guarantee: ``params.guarantee``, per text; not covered: float32 rounding of
  the noise, its missing tails (about 2**-23 of its mass) and the generator.

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
  directions = samplers.map_elements(
      lambda k, mean: _von_mises_fisher(k, mean, envelope=params.envelope),
      keys, vectors[ids.reshape(-1)])
  # Among unit vectors the nearest is the one of largest cosine.
  nearest, _ = neighbors.nearest(directions, vectors)
  return nearest.reshape(ids.shape)


def _von_mises_fisher(key, mean, *, envelope):
  """Draws one direction about the unit vector ``mean``, float32 [D]."""
  tangent_key, angle_key = jax.random.split(key)
  tangent = jax.random.normal(tangent_key, (len(mean) - 1,))
  tangent = jnp.pad(tangent / jnp.linalg.norm(tangent), (1, 0))
  # Householder: exchanges the first axis and the mean, up to a sign, so what
  # was orthogonal to the axis becomes orthogonal to the mean.
  mirror = mean.at[0].add(jnp.where(mean[0] < 0, -1., 1.))
  # At a GPU's own precision, TF32, the proof would not cover the draw.
  dot = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
  tangent -= mirror * (2 * dot(mirror, tangent) / dot(mirror, mirror))
  versine, sine = _angle(angle_key, len(mean), jnp.float32(envelope))
  return mean + (sine * tangent - versine * mean)


def _angle(key, dim, b):
  r"""Draws (1 - cos, sin) of the angle to the mean, by rejection.

  Wood's proposal is a Mobius image of t, one coordinate of a uniform direction:
  :math:`1 - \cos = 2b (1 - t) / s` with :math:`s = 1 + t + b (1 - t)`. With
  :math:`x = (1 - b) t / s` it is accepted with probability
  :math:`(e^x (1 - x))^{D - 1} \le 1`, which is what Wood's constants come to
  for his b. Near the mean 1 - cos keeps digits that the cosine has not.
  """

  def propose(carry):
    trial, _, _ = carry
    draw_key, accept_key = jax.random.split(jax.random.fold_in(key, trial))
    ends = _coordinate_ends(draw_key, dim)
    x = (1 - b) / 2 * (ends[0] - ends[1]) / (ends[0] + b * ends[1])
    cost = -(dim - 1) * (x + jnp.log1p(-x))
    return trial + 1, ends, jax.random.exponential(accept_key) >= cost

  start = jnp.uint32(0), jnp.ones(2), jnp.bool_(False)
  _, (upper, lower), _ = jax.lax.while_loop(
      lambda carry: ~carry[2], propose, start)
  scale = 2 / (upper + b * lower)
  return scale * b * lower, scale * jnp.sqrt(b) * jnp.sqrt(upper * lower)


def _coordinate_ends(key, dim):
  """Draws (1 + t, 1 - t), t one coordinate of a uniform direction in D >= 2.

  Two coordinates have a uniform angle and a squared length 1 - u^(2/(D - 2));
  as sums of positive terms both ends keep their digits.
  """
  turn, u = jax.random.uniform(key, (2,))
  rest = jnp.exp(jnp.log1p(-u) * (2 / (dim - 2))) if dim > 2 else 0.
  length = jnp.sqrt(1 - rest)
  common = rest / (1 + length)
  half = jnp.pi * (turn + 2.**-24)  # the middle of its float32 cell, never 0
  return jnp.stack([common + 2 * length * jnp.cos(half)**2,
                    common + 2 * length * jnp.sin(half)**2])


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V], for D = 2.

  On a circle the words' cells are intervals of the angle; Gauss-Legendre on
  each, in logs. In more dimensions they are spherical polytopes.

  Raises:
    ValueError: D > 2; use ``deniability.measure`` or an audit by trials.
  """
  ids = calibration.flat_ids(ids, params.vectors.shape[0])
  vectors = np.asarray(params.vectors, np.float64)
  if vectors.shape[1] != 2:
    raise ValueError(
        f'log_prob has no closed form in D={vectors.shape[1]} dimensions; '
        'estimate it with jaxdp.deniability.measure or by auditing trials')
  angles = np.arctan2(vectors[:, 1], vectors[:, 0])
  order = np.argsort(angles)
  turned = np.append(angles[order], angles[order[0]] + 2 * np.pi)
  high = (turned[1:] + turned[:-1]) / 2
  low = np.append(high[-1] - 2 * np.pi, high[:-1])
  kappa = _concentration(params.envelope, 2)
  means = angles[ids]
  out = np.empty((len(means), len(angles)))
  for row, mean in zip(out, means):
    row[order] = _log_arcs(low - mean, high - mean, kappa)
  return out


def _log_arcs(low, high, kappa):
  """Log masses of a von Mises law about 0 in arcs, ends within 4 pi; [V]."""
  # Cut at the multiples of pi and folded onto [0, pi]: the density is even.
  half_turns = np.arange(-4, 4)
  left, right = (np.clip(ends[:, None] - np.pi * half_turns, 0, np.pi)
                 for ends in (low, high))
  near = np.where(half_turns % 2, np.pi - right, left)
  far = np.where(half_turns % 2, np.pi - left, right)
  sq_sine = np.sin(near / 2)**2 + _NEGLIGIBLE / max(2 * kappa, _NEGLIGIBLE / 2)
  far = np.minimum(far, 2 * np.arcsin(np.sqrt(np.minimum(sq_sine, 1))))
  half = np.maximum(far - near, 0)[..., None] / 2
  angle = near[..., None] + half * (1 + _NODES)
  with np.errstate(divide='ignore'):
    log_mass = special.logsumexp(
        np.log(half * _WEIGHTS) - 2 * kappa * np.sin(angle / 2)**2,
        axis=(1, 2))
  return log_mass - math.log(2 * math.pi * special.i0e(kappa))


def distances(ids, params):
  """Returns the guarantee's metric, chordal, host float64 [B, V]."""
  vectors = np.asarray(params.vectors, np.float64)
  vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  return calibration.l2_distances(ids, vectors)
