r"""The exponential mechanism over a public list, with integer probabilities.

.. math::  P(k \mid i) \propto e^{\epsilon u(i, k) / 2 \Delta}

The scores :math:`u` of every input and candidate are public. Masses are
integers over :math:`2^{64}`, none under :math:`2^{-32}`, so that rounding moves
a log-ratio by less than :math:`2^{-30}`; the law is built at an epsilon smaller
by that, and the exact largest ratio between any two inputs is what the
guarantee states. Calibration is on the host, the draw on the device.

>>> import jax
>>> params = calibrate_grid_exponential(
...     [[3., 1., 0.], [2., 2., 0.]], epsilon=2., sensitivity=1.)
>>> ids = jax.numpy.array([0, 1, 1])
>>> grid_exponential(jax.random.key(0), ids, params).shape
(3,)
>>> params.guarantee.epsilon < 2.
True

References: McSherry & Talwar (2007), Mechanism design via differential
privacy, Theorem 6; Ilvento (2020), Implementing the exponential mechanism with
base-2 differential privacy, on what float probabilities leak.
"""

import decimal
import fractions
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp.mechanisms.numeric import laws

_FLOOR = 2**32  # least mass: rounding by 1 is 2**-32 of it
_MARGIN = 2.**-30  # more than rounding can add to a log-ratio
_MAX_CANDIDATES = 2**16
_MAX_ENTRIES = 2**22


class GridExponentialParams(NamedTuple):
  """What a calibrated choice needs; N inputs, K candidates."""
  thresholds: Any  # [N, K - 1, 2] uint32
  max_log_ratio: Any  # float64, over any two inputs, rounded up
  guarantee: guarantees.Guarantee

  def masses(self, ids):
    """Returns Pr(candidate | id) * 2**64, exactly, uint64 ``[..., K]``. Host.

    Raises:
      ValueError: ids are not integer or out of range.
    """
    laws.check_index('ids', ids, self.thresholds.shape[0])
    return laws.masses(self.thresholds)[np.asarray(ids)]

  def log_prob(self, ids):
    """Returns log Pr(candidate = column | id), host float64 ``[..., K]``.

    Raises:
      ValueError: ids are not integer or out of range.
    """
    return laws.log_probabilities(self.masses(ids))


def calibrate_grid_exponential(scores, *, epsilon, sensitivity):
  """Calibrates the exponential mechanism on a list of inputs. Host.

  Guarantee: *proved*, without 'real arithmetic': pure DP between any two
  inputs of the list; delta 0. Its epsilon is the exact largest log-ratio,
  rounded up: at most ``epsilon``, and less where the scores allow. Not
  covered: the scores themselves, which are public; the generator; time.

  Args:
    scores: float ``[N, K]``, the score of K candidates for each of N inputs.
    epsilon: budget, at least 2**-20.
    sensitivity: the most a candidate's score differs between two inputs, in
      the unit of the scores.

  Returns:
    GridExponentialParams. Each row is within ``K 2**-32 + 2**-30`` of the
    exponential mechanism's law in total variation.

  Raises:
    ValueError: scores that are not finite ``[N >= 1, K >= 2]``, too many of
      them, a bad epsilon or sensitivity, or scores that differ by more than
      the sensitivity.

  References: McSherry & Talwar (2007), Theorem 6.
  """
  scores = _check_scores(scores)
  epsilon = laws.positive('epsilon', epsilon, 'it is a budget for each draw')
  if epsilon < 2.**-20:
    raise ValueError(f'epsilon={epsilon!r} must be at least 2**-20: below, 64 '
                     'random bits say little of the scores')
  sensitivity = _check_sensitivity(sensitivity, scores)
  masses = [_row_masses(row, epsilon, sensitivity) for row in scores.tolist()]
  columns = ((max(column), min(column)) for column in zip(*masses))
  log_ratio = laws.log_rounded_up(laws.largest_ratio(columns))
  assert log_ratio <= epsilon, (log_ratio, epsilon)
  return GridExponentialParams(
      thresholds=np.stack([laws.thresholds(row) for row in masses]),
      max_log_ratio=log_ratio, guarantee=guarantees.Guarantee(
          epsilon=log_ratio, metric=guarantees.ADJACENCY,
          relation='any two inputs of the list, the other entries equal',
          status='proved', source='McSherry & Talwar (2007), Theorem 6, with '
          'integer masses, every ratio compared', conditions=(
              guarantees.INTEGER_GRID, guarantees.IDEAL_RANDOM_BITS)))


def grid_exponential(key, ids, params):
  """Chooses a candidate for each input. Device.

  Guarantee: ``params.guarantee``, for each entry.

  Args:
    key: typed key; consumed.
    ids: integer array of any shape: which input of the list, in [0, N).
    params: GridExponentialParams.

  Returns:
    int32 of the shape of ids, in [0, K).

  Raises:
    ValueError: ids are not integer, or concrete and out of range. Traced ones
      are clamped, which keeps the guarantee.
  """
  laws.check_index('ids', ids, params.thresholds.shape[0])
  return _grid_exponential(key, jnp.asarray(ids), params.thresholds)


@jax.jit
def _grid_exponential(key, ids, thresholds):
  row = jnp.clip(ids.astype(jnp.int32), 0, thresholds.shape[0] - 1)
  return laws.draw(key, row.shape, thresholds, row)


def _check_scores(scores):
  scores = np.asarray(scores, np.float64)
  if scores.ndim != 2 or scores.shape[0] < 1 or scores.shape[1] < 2:
    raise ValueError(f'scores has shape {scores.shape}; pass [N >= 1, K >= 2], '
                     'one row an input')
  if scores.shape[1] > _MAX_CANDIDATES or scores.size > _MAX_ENTRIES:
    raise ValueError(f'scores has shape {scores.shape}; at most '
                     f'{_MAX_CANDIDATES} candidates and {_MAX_ENTRIES} entries')
  if not np.isfinite(scores).all():
    raise ValueError('scores holds NaN or infinity; give every candidate a '
                     'finite score')
  return scores


def _check_sensitivity(sensitivity, scores):
  """Returns a Fraction that no column of the scores exceeds."""
  sensitivity = laws.positive(
      'sensitivity', sensitivity, 'it is in the unit of the scores')
  spread = max(fractions.Fraction(high) - fractions.Fraction(low)
               for high, low in zip(scores.max(0).tolist(),
                                    scores.min(0).tolist()))
  # A float spread may pass its decimal value by an ulp: that is no error.
  if spread > fractions.Fraction(sensitivity) * (1 + fractions.Fraction(1e-9)):
    raise ValueError(f'sensitivity={sensitivity!r} is less than the scores of '
                     f'two inputs differ: {float(spread)!r}')
  return max(fractions.Fraction(sensitivity), spread)


def _row_masses(row, epsilon, sensitivity):
  """Integer masses of one input's law: a floor, and the law on top of it."""
  with decimal.localcontext(laws.CONTEXT):
    exact = [decimal.Decimal(score) for score in row]
    best = max(exact)
    rate = ((decimal.Decimal(epsilon) - decimal.Decimal(_MARGIN))
            * sensitivity.denominator / (2 * sensitivity.numerator))
    # Under e^-1000 the floor decides; a longer exponent must not trap.
    weights = [max((score - best) * rate, decimal.Decimal(-1000)).exp()
               for score in exact]
    room = (laws.TOTAL - _FLOOR * len(row)) / sum(weights)
    masses = [_FLOOR + int(weight * room) for weight in weights]
  masses[masses.index(max(masses))] += laws.TOTAL - sum(masses)
  return masses
