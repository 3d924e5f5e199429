r"""The largest shift of a noise that keeps a Rényi divergence within a bound.

Host code, NumPy float64. Two facts meet here. A law whose top class differs
from that of a law with top probabilities p > q is at least
:func:`least_divergence` away from it (Li et al. (2019), Lemma 1). Noise shifted
by s scales is :math:`D_\alpha(s)` away from itself. So a shift keeps the top
class while its divergence is smaller, at ANY order; :func:`best_order` looks
for the order that allows the largest shift.

>>> gap = least_divergence(.99, .01, np.array([1.5, 3.]))
>>> [f'{s:.3f}' for s in laplace_shift(np.array([1.5, 3.]), gap)]
['3.292', '3.821']

References: Li et al. (2019), Certified adversarial robustness with additive
noise; Mironov (2017), Rényi differential privacy; Bun and Steinke (2016),
Concentrated differential privacy: simplifications, extensions, and lower
bounds.
"""

import math

import numpy as np

from jaxdp.guarantees import accounting

# Orders minus 1 that are searched, and the rounds: 33 points, then 17 around
# the best, twice. A coarse search loses some radius and never gains.
_LOG_EXCESS = (math.log(1e-2), math.log(1e5))
_ROUNDS = (33, 17, 17)
_NEWTON_STEPS = 8
# Above the rounding of the divergence's bound; costs at most 2e-6 scales.
_SLACK = 1e-12


def best_order(p, q, shift_fn):
  """Returns the largest ``shift_fn(order, divergence)`` over orders, ``[P]``.

  Args:
    p, q: float64 ``[P]``, the top two probabilities, ``p > q``.
    shift_fn: function of float64 arrays ``[P, n]`` of orders and divergences;
      returns the largest shift within that divergence at that order.
  """
  ends = np.broadcast_to(_LOG_EXCESS, (len(p), 2))
  best, rows = np.zeros(len(p)), np.arange(len(p))
  for num in _ROUNDS:
    log_excess = np.linspace(ends[:, 0], ends[:, 1], num, axis=-1)
    order = 1. + np.exp(log_excess)
    shift = shift_fn(order, least_divergence(p[:, None], q[:, None], order))
    at = np.argmax(shift, axis=-1)
    best = np.maximum(best, shift[rows, at])
    ends = np.stack([log_excess[rows, np.maximum(at - 1, 0)],
                     log_excess[rows, np.minimum(at + 1, num - 1)]], axis=-1)
  return best


def least_divergence(p, q, order):
  r"""Returns the least divergence of a law whose top class is another one.

  .. math::
    -\ln\left(1 - p - q + 2 \left(\tfrac12 p^{1 - \alpha}
      + \tfrac12 q^{1 - \alpha}\right)^{1 / (1 - \alpha)}\right)

  It grows with p and falls with q wherever p > q, also where bounds add up to
  more than 1. Lowered by 1e-12 against rounding.

  Args:
    p: top probability, or a lower bound, in (0, 1]; broadcasts.
    q: second probability, or an upper bound, in [0, p); broadcasts.
    order: :math:`\alpha > 1`; broadcasts.

  References: Li et al. (2019), Lemma 1.
  """
  power = 1. - order
  with np.errstate(divide='ignore'):  # log 0 is meant: q = 0, and then p = 1
    log_mean = (np.logaddexp(power * np.log(p), power * np.log(q))
                - math.log(2.)) / power
    mean = np.exp(log_mean)
    rest = (1. - p) + (2. * mean - q)
    # Near 0 the difference is exact as it stands, near 1 its complement is.
    gap = np.where(rest < .5, -np.log(rest), -np.log1p(2. * mean - p - q))
  return np.maximum(gap - _SLACK, 0.)


def laplace_shift(order, divergence):
  """Returns the largest shift over scale of Laplace noise within a divergence.

  Newton's method on the square root of the divergence, which is concave: every
  step stays below the root. The start is proved (what is s-DP has divergence at
  most s and order s^2 / 2), the end is checked.

  Args:
    order: above 1; broadcasts.
    divergence: at least 0, may be infinite; broadcasts.

  References: Mironov (2017), Proposition 6; Bun and Steinke (2016),
  Proposition 3.3.
  """
  finite = np.isfinite(divergence) & (divergence > 0.)
  target = np.where(finite, divergence, 1.)
  start = shift = np.maximum(target, np.sqrt(2. * target / order))
  for _ in range(_NEWTON_STEPS):
    now = accounting.laplace_rdp(order, shift)
    rate = -(2. * order - 1.) * shift
    slope = -order * np.expm1(rate) / (order + (order - 1.) * np.exp(rate))
    step = 2. * (np.sqrt(target * now) - now) / slope
    shift = np.maximum(shift + step, start)
  shift = shift * (1. - _SLACK)
  shift = np.where(accounting.laplace_rdp(order, shift) <= target, shift, start)
  return np.where(finite, shift, np.where(divergence > 0., np.inf, 0.))
