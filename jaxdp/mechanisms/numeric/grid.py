r"""Laplace noise on a grid, with an epsilon that float rounding cannot touch.

The input is rounded to multiples of ``grid``, noise :math:`n` grid steps wide
is added with probability near

.. math::  P(n) \propto q^{|n|}, \quad q = e^{-grid / scale},

and the sum is clamped to ``[low, high]``. The probabilities are integers over
:math:`2^{64}`. Rounding a CDF down to them would be unsound: at 20 scales one
unit is 1e-8 of a cell, and two inputs one step apart would differ by more than
``exp(grid / scale)``. So each mass is the one before it, times q, rounded *up*
(:math:`m_{n+1} = \lceil q m_n \rceil`), and what the clamp collects at the
end of the table is at least its geometric sum: no ratio of neighbours passes
:math:`1 / q`, and no cell is empty however wide the range.

Calibration is on the host, in integers; :func:`grid_laplace` on the device.

>>> import jax
>>> params = calibrate_grid_laplace(scale=2., grid=0.25, low=-8., high=8.)
>>> float(grid_laplace(jax.random.key(0), 1.1, params)) % 0.25
0.0
>>> params.guarantee.epsilon <= 0.5, params.outputs.shape
(True, (65,))

References: Ghosh et al. (2009), truncated geometric mechanism; Mironov (2012).
"""

import decimal
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp.mechanisms.numeric import laws

RELATION = ('arrays of equal shape; distance is the sum of the absolute '
            'differences of their entries, each rounded to the grid and '
            'clamped to [low, high]')
CONDITIONS = (guarantees.INTEGER_GRID, guarantees.IDEAL_RANDOM_BITS)

_MAX_STEPS = 2**20  # a table of 16 MiB
_EXACT_STEPS = 2**24  # float32 holds every multiple of the grid up to here
_FRACTION_BITS = 128  # of q, rounded up


class GridLaplaceParams(NamedTuple):
  """What calibrated grid noise needs; R = high - low steps."""
  thresholds: Any  # [2R, 2] uint32, cumulative masses of noise -R, ..., R
  offset: Any  # [] int32, R: the index of no noise
  low: Any  # [] int32, in grid steps
  high: Any  # [] int32, in grid steps
  grid: Any  # [] float32, a power of two, in the data's unit
  steps_per_unit: Any  # [] float32, 1 / grid
  max_log_ratio: Any  # float64, inputs one step apart, rounded up
  guarantee: guarantees.Guarantee

  @property
  def outputs(self):
    """The declared outputs low, low + grid, ..., high, float64 [R + 1]."""
    return np.arange(int(self.low), int(self.high) + 1) * float(self.grid)

  def masses(self, x):
    """Returns Pr(output | x) * 2**64, exactly, uint64 ``[..., R + 1]``.

    Host; x is rounded as :func:`grid_laplace` rounds it.

    Raises:
      ValueError: x is not finite or out of range.
    """
    _check_inputs(x, self)
    steps = np.asarray(x, np.float32).astype(np.float64) / float(self.grid)
    start = np.rint(steps).astype(np.int64)[..., None] - int(self.low)
    cumulative = laws.cumulative_masses(self.thresholds)
    reach = int(self.offset)
    cell = np.arange(reach + 1) - start + reach
    out = laws.masses(self.thresholds)[cell]
    out[..., :1] = cumulative[reach - start]
    out[..., -1:] = np.uint64(0) - cumulative[2 * reach - start - 1]
    return out

  def log_prob(self, x):
    """Returns log Pr(output = column | x), host float64 ``[..., R + 1]``.

    Columns are ``outputs``; the law is what :func:`grid_laplace` draws.

    Raises:
      ValueError: x is not finite or out of range.
    """
    return laws.log_probabilities(self.masses(x))


def calibrate_grid_laplace(*, scale, grid, low, high):
  r"""Calibrates Laplace noise on a grid. Host.

  Guarantee: *proved*, without 'real arithmetic'. Metric 'l1', per unit
  distance, delta 0; epsilon is the exact largest log-ratio of two inputs one
  step apart over ``grid``, rounded up, at most ``1 / scale``. A longer
  distance is a path of steps. Inputs off the grid are covered at the distance
  of what they round to, at most one step an entry more than their own. Not
  covered: the generator, and time (memory is read where the draw falls).

  Args:
    scale: noise scale b > 0, in the data's unit; at most 2**20 grid steps.
    grid: step, a power of two in [2**-100, 2**100], in the data's unit.
    low: smallest input and output, a multiple of grid.
    high: largest input and output, a multiple of grid above low; at most
      2**20 steps above it.

  Returns:
    GridLaplaceParams. Its noise is within ``2**-62 R (b + grid) / grid`` of
    the discrete Laplace law in total variation, for R = (high - low) / grid.

  Raises:
    ValueError: a bad scale, a grid that is no power of two, ends out of order
      or off the grid, or a range that needs too large a table or more than
      float32 holds.

  References: Ghosh et al. (2009); Mironov (2012).
  """
  scale = laws.positive('scale', scale, 'it is in the unit of the data')
  grid = _check_grid(grid)
  low, high = _in_steps('low', low, grid), _in_steps('high', high, grid)
  reach = high - low
  if reach < 1 or reach > _MAX_STEPS:
    raise ValueError(f'low={low * grid!r}, high={high * grid!r} are {reach} '
                     f'grid steps apart; they must be 1 to {_MAX_STEPS}')
  if scale > _MAX_STEPS * grid:
    raise ValueError(f'scale={scale!r} is more than {_MAX_STEPS} grid steps; '
                     f'use a grid coarser than {grid!r}')
  masses = _noise_masses(_decay_rounded_up(scale, grid), reach)
  ratio = laws.largest_ratio(_neighbour_pairs(masses))
  guarantee = guarantees.Guarantee(
      epsilon=laws.log_rounded_up(ratio, per=grid), metric='l1',
      relation=RELATION, status='proved', source='Ghosh et al. (2009), '
      'truncated geometric mechanism, every ratio of the integer law compared',
      conditions=CONDITIONS)
  return GridLaplaceParams(
      thresholds=laws.thresholds(masses), offset=np.int32(reach),
      low=np.int32(low), high=np.int32(high), grid=np.float32(grid),
      steps_per_unit=np.float32(1 / grid),
      max_log_ratio=laws.log_rounded_up(ratio), guarantee=guarantee)


def grid_laplace(key, x, params):
  """Adds grid noise to every entry and clamps to the declared range. Device.

  x is taken as float32, clamped to ``[low, high]`` and rounded to the grid,
  ties to the even multiple: exactly, since the grid is a power of two. A
  traced NaN counts as ``low``. Every entry takes 64 random bits of its own.

  Guarantee: ``params.guarantee``, see :func:`calibrate_grid_laplace`.

  Args:
    key: typed key; consumed.
    x: real array of any shape, in the data's unit.
    params: GridLaplaceParams.

  Returns:
    float32 of x's shape: multiples of the grid in ``[low, high]``.

  Raises:
    ValueError: a concrete x that is not finite or lies out of range. Traced
      values are clamped, which keeps the guarantee.
  """
  _check_inputs(x, params)
  return _grid_laplace(key, jnp.asarray(x, jnp.float32), params._replace(
      guarantee=None, max_log_ratio=None))


@jax.jit
def _grid_laplace(key, x, params):
  low, high = params.low, params.high
  clamped = jnp.clip(jnp.where(jnp.isnan(x), -jnp.inf, x),
                     low * params.grid, high * params.grid)
  steps = jnp.round(clamped * params.steps_per_unit).astype(jnp.int32)
  noise = laws.draw(key, x.shape, params.thresholds) - params.offset
  return jnp.clip(steps + noise, low, high) * params.grid


def _check_inputs(x, params):
  """Raises ValueError for concrete x that the mechanism does not cover."""
  laws.check_real('x', x)
  if laws.is_traced(x, params.low, params.high, params.grid):
    return
  x = np.asarray(x).astype(np.float64)
  low, high = (float(end) * float(params.grid)
               for end in (params.low, params.high))
  bad = x[~((x >= low) & (x <= high))]
  if bad.size:
    raise ValueError(f'x holds {bad.flat[0]}; the calibrated range is [{low}, '
                     f'{high}]: clamp x first, or calibrate a wider range')


def _check_grid(grid):
  grid = laws.positive('grid', grid, 'it is a power of two such as 2.**-8')
  if math.frexp(grid)[0] != 0.5 or not 2.**-100 <= grid <= 2.**100:
    raise ValueError(f'grid={grid!r} must be a power of two in [2**-100, '
                     '2**100]: only then is rounding x to it exact')
  return grid


def _in_steps(name, value, grid):
  """Returns an end of the range as an integer number of grid steps."""
  steps = float(value) / grid  # exact: a power of two
  if not abs(steps) <= _EXACT_STEPS:  # NaN too
    raise ValueError(f'{name}={value!r} must be within 2**24 grid steps of 0, '
                     'which float32 holds; use a coarser grid or shift x')
  if not steps.is_integer():
    raise ValueError(f'{name}={value!r} must be a multiple of grid={grid!r}')
  return int(steps)


def _decay_rounded_up(scale, grid):
  """Returns an integer above 2**128 exp(-grid / scale), by 2 at most."""
  with decimal.localcontext(laws.CONTEXT):
    exponent = -decimal.Decimal(grid) / decimal.Decimal(scale)
    # An exponent this low leaves masses of 1 all the same; it must not trap.
    value = max(exponent, decimal.Decimal(-1000)).exp()
    return int(value * 2**_FRACTION_BITS) + 1


def _noise_masses(decay, reach):
  """Masses of noise -R, ..., R, Python ints of sum 2**64.

  The ends hold all noise at or beyond R, which the clamp cannot tell apart.
  """
  one = 2**_FRACTION_BITS
  center = laws.TOTAL * (one - decay) // (one + decay)
  while True:
    side, tail = _side(max(center, 1), decay, reach)
    excess = side[0] + 2 * (sum(side[1:]) + tail) - laws.TOTAL
    if excess <= 0:
      break
    center -= max(1, excess * (one - decay) // (one + decay))
  # What is left goes to both ends: T_k / T_{k+1} only falls.
  right = tail + (-excess) // 2
  left = tail - excess - (-excess) // 2
  return [left, *side[:0:-1], *side, right]


def _side(center, decay, reach):
  """Masses m_0, ..., m_{R-1} and the tail T_R, each rounded up."""
  side = [center]
  for _ in range(reach - 1):
    side.append(-(-side[-1] * decay >> _FRACTION_BITS))
  return side, -(-side[-1] * decay // (2**_FRACTION_BITS - decay))


def _neighbour_pairs(masses):
  """Yields the masses of one output for two inputs one step apart."""
  reach = len(masses) // 2
  yield from itertools.pairwise(masses[1:-1])  # inside the range
  for tails in (masses, masses[::-1]):  # what the clamp collects
    below = tails[0]
    for mass in tails[1:reach + 1]:
      yield below, below + mass
      below += mass
