r"""K-ary randomised response with integer probabilities.

.. math::  P(y \mid x) = \frac{e^\epsilon [y = x] + [y \ne x]}{e^\epsilon+K-1}

The mass of a lie is rounded up to an integer over :math:`2^{64}`, so the ratio
never passes :math:`e^\epsilon`. Calibration and the estimator are on the host,
the draw on the device.

>>> import jax
>>> params = calibrate_randomized_response(num_categories=4, epsilon=1.)
>>> y = randomized_response(jax.random.key(0), jax.numpy.full(20_000, 2),
...                         params)
>>> abs(estimate_frequencies(y, params) - [0, 0, 1, 0]).max() < 0.05
np.True_

References: Warner (1965); Kairouz et al. (2016), Discrete distribution
estimation under local privacy.
"""

import decimal
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp.mechanisms.numeric import laws

_MAX_CATEGORIES = 2**20


class RandomizedResponseParams(NamedTuple):
  """What calibrated randomised response needs; K categories."""
  thresholds: Any  # [K - 1, 2] uint32, cumulative masses of y - x modulo K
  max_log_ratio: Any  # float64, rounded up
  guarantee: guarantees.Guarantee

  @property
  def num_categories(self):
    """K."""
    return self.thresholds.shape[0] + 1

  def masses(self, x):
    """Returns Pr(output | x) * 2**64, exactly, uint64 ``[..., K]``. Host.

    Raises:
      ValueError: x is not integer or out of range.
    """
    laws.check_index('x', x, self.num_categories)
    x = np.asarray(x, np.int64)[..., None]
    shift = (np.arange(self.num_categories) - x) % self.num_categories
    return laws.masses(self.thresholds)[shift]

  def log_prob(self, x):
    """Returns log Pr(output = column | x), host float64 ``[..., K]``.

    Raises:
      ValueError: x is not integer or out of range.
    """
    return laws.log_probabilities(self.masses(x))


def calibrate_randomized_response(*, num_categories, epsilon):
  """Calibrates k-ary randomised response. Host.

  Guarantee: *proved*, without 'real arithmetic': pure DP between any two
  values of one entry, the other entries equal; delta 0. Its epsilon is the
  exact log-ratio rounded up, never above ``epsilon``. Not covered: the
  generator, and time.

  Args:
    num_categories: K in [2, 2**20].
    epsilon: budget > 0; above about 44 the 64 random bits are the limit.

  Returns:
    RandomizedResponseParams.

  Raises:
    ValueError: a bad K or epsilon, or an epsilon so near 0 that 64 bits
      cannot tell the truth from a lie.

  References: Kairouz et al. (2016), k-ary randomised response.
  """
  if (isinstance(num_categories, bool)
      or not isinstance(num_categories, (int, np.integer))
      or not 2 <= num_categories <= _MAX_CATEGORIES):
    raise ValueError(f'num_categories={num_categories!r} must be an integer '
                     f'in [2, {_MAX_CATEGORIES}]')
  epsilon = laws.positive('epsilon', epsilon, 'it is a budget for each entry')
  others = int(num_categories) - 1
  with decimal.localcontext(laws.CONTEXT):
    # Rounding e^epsilon down rounds the lie's mass up.
    odds = decimal.Decimal(min(epsilon, 100.)).exp().next_minus()
    exact = laws.TOTAL / (odds + others)
    lie = int(exact.to_integral_value(decimal.ROUND_CEILING))
  truth = laws.TOTAL - others * lie
  if truth <= lie:
    raise ValueError(f'epsilon={epsilon!r} is too small for {others + 1} '
                     'categories and 64 random bits; use a larger one')
  log_ratio = laws.log_rounded_up((truth, lie))
  assert log_ratio <= epsilon, (log_ratio, epsilon)
  return RandomizedResponseParams(
      thresholds=laws.thresholds([truth] + [lie] * others),
      max_log_ratio=log_ratio, guarantee=guarantees.Guarantee(
          epsilon=log_ratio, metric=guarantees.ADJACENCY,
          relation='any two values of one entry, the other entries equal',
          status='proved', source='Kairouz et al. (2016), k-ary randomised '
          'response, with integer masses', conditions=(
              guarantees.INTEGER_GRID, guarantees.IDEAL_RANDOM_BITS)))


def randomized_response(key, x, params):
  """Keeps each category or replaces it by another one. Device.

  Guarantee: ``params.guarantee``, for each entry.

  Args:
    key: typed key; consumed.
    x: integer array of any shape, in [0, K).
    params: RandomizedResponseParams.

  Returns:
    int32 of x's shape, in [0, K).

  Raises:
    ValueError: x is not integer, or concrete and out of range. Traced values
      are clamped, which keeps the guarantee.
  """
  laws.check_index('x', x, params.num_categories)
  return _randomized_response(key, jnp.asarray(x), params.thresholds)


@jax.jit
def _randomized_response(key, x, thresholds):
  num = thresholds.shape[0] + 1
  x = jnp.clip(x.astype(jnp.int32), 0, num - 1)
  return (x + laws.draw(key, x.shape, thresholds)) % num


def estimate_frequencies(outputs, params):
  r"""Returns unbiased category frequencies of the inputs, float64 ``[K]``.

  .. math::  \hat f_v = (c_v / N - q) / (p - q)

  with the exact p and q of the integer law. Entries sum to 1 and may be
  negative: truncating them would bias the estimate. Host.

  Args:
    outputs: integer array of N >= 1 outputs, any shape.
    params: RandomizedResponseParams.

  Raises:
    ValueError: outputs are empty, not integer, or out of range.

  References: Kairouz et al. (2016), empirical estimator.
  """
  outputs = np.asarray(outputs)
  laws.check_index('outputs', outputs, params.num_categories)
  if not outputs.size:
    raise ValueError('outputs is empty; there is nothing to count')
  counts = np.bincount(outputs.reshape(-1), minlength=params.num_categories)
  truth, lie = (int(mass) for mass in laws.masses(params.thresholds)[:2])
  size = int(outputs.size)
  # Integers up to the last division: p - q is tiny at a small epsilon.
  return np.array([(int(count) * laws.TOTAL - lie * size)
                   / ((truth - lie) * size) for count in counts])
