r"""The balls an attack may not leave: projections, steepest steps, starts.

Device, pure, jittable. Every function works on flattened examples
``[B, n]``; a bound is ``[B, 1]``. The *region* of an example x is the ball of
``attack_norm`` ('linf', 'l2' or 'l1') and radius ``bound`` around x, cut by a
box that holds x. Projections are onto that intersection, exactly, and not
first onto the ball and then onto the box: the second is a feasible point but
not the nearest, and attacks in l1 suffer for it.

>>> import jax.numpy as jnp
>>> region = make_region(jnp.zeros((1, 3)), jnp.array([[1.]]), 'l1', None, .75)
>>> y = project(jnp.array([[2., .375, -.1]]), region, 'l1')
>>> print(y.round(2))
[[0.75 0.25 0.  ]]

References: Duchi et al. (2008), "Efficient projections onto the l1-ball for
learning in high dimensions"; Tramer & Boneh (2019), "Adversarial training and
robustness for multiple perturbations", section 4; Croce & Hein (2021), "Mind
the box: l1-APGD for sparse adversarial attacks on image classifiers"; Barthe
et al. (2005), "A probabilistic approach to the geometry of the l_p^n-ball".
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

NORMS = ('linf', 'l2', 'l1')
_STEP_FRACTION = 0.01  # of the coordinates share an l1 step, as in SLIDE


class Region(NamedTuple):
  """Where an attack on x may go."""

  x: jax.Array  # [B, n]
  bound: jax.Array  # [B, 1]
  lower: jax.Array | None  # [B, n]; None is unbounded
  upper: jax.Array | None  # [B, n]


def check_norm(attack_norm):
  """Refuses an unknown norm."""
  if attack_norm not in NORMS:
    raise ValueError(f'attack_norm={attack_norm!r} must be one of {NORMS}')


def make_region(x, bound, attack_norm, low=None, high=None):
  """Returns the region of each example.

  Where x itself lies outside ``[low, high]`` the box grows to hold it: the
  attack never moves a coordinate further than its bound, not even back.

  Args:
    x: float ``[B, n]``.
    bound: ``[B, 1]``, > 0.
    attack_norm: one of NORMS.
    low, high: the box, broadcastable to ``[B, n]``; None is unbounded.
  """
  lower = None if low is None else jnp.minimum(
      x, jnp.broadcast_to(jnp.asarray(low, x.dtype), x.shape))
  upper = None if high is None else jnp.maximum(
      x, jnp.broadcast_to(jnp.asarray(high, x.dtype), x.shape))
  if attack_norm == 'linf':
    below, above = -_largest_sum(-x, bound), _largest_sum(x, bound)
    lower = below if lower is None else jnp.maximum(lower, below)
    upper = above if upper is None else jnp.minimum(upper, above)
  return Region(x, bound, lower, upper)


def _largest_sum(x, bound):
  """The largest float at most x + bound in real arithmetic."""
  # Rounding up would leave the ball by an ulp of x: the two-sum error tells.
  total = x + bound
  part = total - x
  error = (x - (total - part)) + (bound - part)
  return jnp.where(error < 0, jnp.nextafter(total, -jnp.inf), total)


def project(y, region, attack_norm):
  """Returns the nearest point of the region, float ``[B, n]``.

  In linf ``|result - x| <= bound`` holds exactly, as real numbers; in l2 and
  l1 up to rounding. The box holds exactly in every norm. NaN stays NaN.
  """
  if attack_norm == 'linf':
    return _into_box(y, region)
  moved = y - region.x
  reach = _room(moved, region.x, region)
  nearest = _nearest_l2 if attack_norm == 'l2' else _nearest_l1
  size = nearest(jnp.abs(moved), region.bound, reach)
  return _into_box(region.x + jnp.sign(moved) * size, region)


def inside(offset, region, attack_norm):
  """Returns x + offset scaled into the ball, then clipped to the box.

  A point of the region, not the nearest one: good for a start.
  """
  if attack_norm != 'linf':
    order = 2 if attack_norm == 'l2' else 1
    offset = _within(offset, region.bound, order)
  return _into_box(region.x + offset, region)


def _into_box(y, region):
  return jnp.clip(y, region.lower, region.upper)


def _room(direction, y, region):
  """How far y can go where direction points, ``[B, n]``; None: anywhere."""
  if region.lower is None and region.upper is None:
    return None
  up = jnp.inf if region.upper is None else region.upper - y
  down = jnp.inf if region.lower is None else y - region.lower
  return jnp.where(direction < 0, down, up)


def _nearest_l2(size, bound, reach):
  """min(t size, reach) with the largest t <= 1 of norm at most bound."""
  # Squares of sizes near 1e-20 are 0 in float32.
  scale = _nonzero(jnp.max(size, axis=1, keepdims=True))
  size, radius = size / scale, bound / scale
  if reach is None:
    length = jnp.sqrt(jnp.sum(size**2, axis=1, keepdims=True))
    return size * jnp.minimum(1., radius / _nonzero(length)) * scale
  reach = jnp.minimum(reach / scale, size)
  t = _common_factor(size, radius, reach)
  return _within(jnp.minimum(t * size, reach), radius, 2) * scale


def _common_factor(size, radius, reach):
  """The t of min(t size, reach), found among the points where one gives in."""
  stops = jnp.where(size > 0, reach / _nonzero(size), 1.)
  order = jnp.argsort(stops, axis=1)
  pick = lambda array: jnp.take_along_axis(array, order, axis=1)
  stops, stopped = pick(stops), jnp.cumsum(pick(reach)**2, axis=1)
  moving = jnp.flip(jnp.cumsum(jnp.flip(pick(size)**2, 1), axis=1), 1)
  rest = jnp.pad(moving, ((0, 0), (0, 1)))  # [B, n + 1]: k coordinates stopped
  stopped = jnp.pad(stopped, ((0, 0), (1, 0)))
  is_inside = stopped[:, 1:] + stops**2 * rest[:, 1:] <= radius**2
  count = jnp.sum(is_inside, axis=1, keepdims=True)
  at = lambda array: jnp.take_along_axis(array, count, axis=1)
  square = (radius**2 - at(stopped)) / _nonzero(at(rest))
  t = jnp.sqrt(jnp.clip(square, 0., 1.))
  return jnp.where(count == size.shape[1], 1., t)


def _nearest_l1(size, bound, reach):
  """clip(size - t, 0, reach) with the least t >= 0 of sum at most bound."""
  reach = size if reach is None else jnp.minimum(reach, size)
  # As t falls, a coordinate starts to move at its size and stops at its reach.
  turns = jnp.concatenate([size, size - reach], axis=1)
  order = jnp.argsort(-turns, axis=1)
  turns = jnp.take_along_axis(turns, order, axis=1)
  slopes = jnp.cumsum(jnp.where(order < size.shape[1], 1, -1), axis=1)
  gaps = turns[:, :-1] - turns[:, 1:]
  sums = jnp.pad(jnp.cumsum(slopes[:, :-1] * gaps, axis=1), ((0, 0), (1, 0)))
  last = jnp.sum(sums <= bound, axis=1, keepdims=True) - 1
  at = lambda array: jnp.take_along_axis(array, last, axis=1)
  fits = jnp.sum(reach, axis=1, keepdims=True) <= bound
  # Not size - t with t summed up: far from a small ball that rounds to zero.
  above = (size - at(turns)) + (bound - at(sums)) / jnp.maximum(at(slopes), 1)
  return _within(jnp.where(fits, reach, jnp.clip(above, 0., reach)), bound, 1)


def _within(size, bound, order):
  """Shrinks rows that are too long, if only by a rounding error."""
  length = jnp.linalg.norm(size, ord=order, axis=1, keepdims=True)
  return size * jnp.minimum(1., bound / _nonzero(length))


def steepest_step(gradient, y, length, region, attack_norm):
  """Returns the step of a length along which a linear loss grows most.

  linf: the sign. l2: the normalised gradient. l1: coordinates are served in
  the order of ``|gradient|``, each by at most ``length / q`` with q a hundredth
  of the coordinates rounded up; what the box does not let one use, the next
  gets. With q = 1 this is the exact steepest step; the hundredth and the equal
  shares are SLIDE's, without which an image needs thousands of steps. A zero
  gradient gives a zero step; a NaN gradient gives NaN, which shows, where a
  step of 0 would make a broken loss look robust.

  Args:
    gradient: float ``[B, n]``.
    y: the current points, ``[B, n]``.
    length: ``[B, 1]``, >= 0, in the norm of the attack.
    region: Region.
    attack_norm: one of NORMS.
  """
  if attack_norm == 'linf':
    return length * jnp.sign(gradient)
  unit = gradient / _nonzero(jnp.max(jnp.abs(gradient), 1, keepdims=True))
  if attack_norm == 'l2':
    norm = jnp.sqrt(jnp.sum(unit**2, axis=1, keepdims=True))
    return length * (unit / _nonzero(norm))
  return _l1_step(unit, length, _room(gradient, y, region))


def _l1_step(gradient, length, room):
  num_steepest = max(1, math.ceil(_STEP_FRACTION * gradient.shape[1]))
  share = length / num_steepest
  used = jnp.broadcast_to(share, gradient.shape)
  used = used if room is None else jnp.minimum(used, room)
  order = jnp.argsort(-jnp.abs(gradient), axis=1)
  ordered = jnp.take_along_axis(used, order, axis=1)
  before = jnp.cumsum(ordered, axis=1) - ordered
  # Past the box if need be: a coordinate pinned there must outweigh those that
  # the step raises instead, or the projection would pull it back with them.
  size = jnp.clip(length - before, 0., share)
  size = jnp.put_along_axis(jnp.zeros_like(size), order, size, axis=1,
                            inplace=False)
  return jnp.sign(gradient) * size


def uniform_in_ball(key, size, dtype, attack_norm):
  """Draws a point uniform in the unit ball of ``[size]``, float ``[size]``."""
  if attack_norm == 'linf':
    return jax.random.uniform(key, (size,), dtype, -1., 1.)
  direction_key, radius_key = jax.random.split(key)
  if attack_norm == 'l2':
    point = jax.random.normal(direction_key, (size,), dtype)
    radius = jax.random.uniform(radius_key, (), dtype) ** (1 / size)
    return point / _nonzero(jnp.linalg.norm(point)) * radius
  # A Laplace vector over its l1 norm plus one more exponential is uniform.
  point = jax.random.laplace(direction_key, (size,), dtype)
  rest = jax.random.exponential(radius_key, (), dtype)
  return point / (jnp.sum(jnp.abs(point)) + rest)


def _nonzero(x):
  return jnp.where(x == 0, jnp.ones_like(x), x)
