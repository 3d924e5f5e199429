r"""A test of a claimed epsilon that may stop at any time. Host, float64.

Pair t is one run on x and one on x'; E is an event fixed beforehand. Under
(epsilon, delta)-DP a bet of a fraction of the wealth on "E is likelier under x
than epsilon allows" has no positive expectation, so the wealth

.. math::
  M_t = \prod_{s \le t} \left(1 + \lambda_s (1\{y_s \in E\}
    - e^\epsilon 1\{y'_s \in E\} - \delta)\right), \quad
  0 \le \lambda_s \le \frac{1}{e^\epsilon + \delta},

with each :math:`\lambda_s` chosen from the pairs before s, is a non-negative
supermartingale: it ever reaches ``1 / significance`` with probability at most
``significance`` (Ville's inequality). So a gate may look after every pair and
stop at the first crossing. A gross violation takes a few dozen pairs, where a
fixed number of runs must be sized for the mildest one.

How :math:`\lambda_s` is chosen decides the power, never the validity. Here the
wealth starts divided among 32 constant bets, each smaller by a square root of
two, and :math:`\lambda_s` is their mean weighted by the wealth that each has
after pair s - 1: Cover's portfolio. It costs a few nats against the best
constant bet in hindsight, tunes nothing, and depends on the past through four
counts, which are the whole state.

Example:
  >>> rng = np.random.default_rng(0)
  >>> result = betting_test(rng.random(1000) < .6, rng.random(1000) < .1,
  ...                       epsilon=1.)
  >>> result.rejected, result.pairs_used
  (True, 202)

References:
  Waudby-Smith and Ramdas (2024), Estimating means of bounded random variables
    by betting <https://arxiv.org/abs/2010.09686>.
  Cover (1991), Universal portfolios
    <https://doi.org/10.1111/j.1467-9965.1991.tb00002.x>.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxdp.auditing import settings

_NUM_BETS = 32
_BLOCK = 4096  # pairs looked at together; bounds the memory, never shows


class BettingResult(NamedTuple):
  """What the bets have shown by the time they stopped."""

  rejected: bool  # the claim, at the significance
  pairs_used: int  # up to the first crossing, or all
  log_wealth: float  # nats, the path's largest, >= 0; exp(-it) is a p-value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bettor:
  """The streaming form of `betting_test`: feed pairs until it has rejected.

  Frozen: `update` returns the next state, and how the pairs are cut into
  blocks never shows. After a rejection nothing changes any more.

  Example:
    >>> bettor = Bettor(epsilon=1.)
    >>> for _ in range(100):
    ...   bettor = bettor.update(np.ones(10, bool), np.zeros(10, bool))
    ...   if bettor.rejected:
    ...     break
    >>> bettor.pairs_used
    18
  """

  epsilon: float  # claimed, >= 0; for metric DP times the distance of x and x'
  significance: float = .05  # probability of rejecting a true claim
  delta: float = 0.  # claimed, in [0, 1)
  counts: tuple = (0, 0, 0, 0)  # pairs with E under: x alone, both, x', neither
  pairs_used: int = 0
  log_wealth: float = 0.  # the largest so far
  rejected: bool = False

  def __post_init__(self):
    settings.check_number(
        'epsilon', self.epsilon, lambda x: 0. <= x < np.inf, 'one finite '
        'number, not negative; it is the claim to test')
    settings.check_significance(self.significance)
    settings.check_delta(self.delta)
    self._check_state()

  def _check_state(self):
    """Refuses a state that no pairs lead to."""
    pairs = settings.check_whole('pairs_used', self.pairs_used, 0,
                                 settings.MAX_COUNT)
    counts = settings.check_floats('counts', self.counts)
    if (counts.shape != (4,) or (counts < 0).any()
        or (counts != np.floor(counts)).any() or counts.sum() != pairs):
      raise ValueError(f'counts={self.counts!r} must be four whole numbers '
                       f'that sum to pairs_used={pairs}')
    settings.check_number('log_wealth', self.log_wealth,
                          lambda x: 0. <= x < np.inf,
                          'one finite number, not negative')
    rejected = settings.check_flag('rejected', self.rejected)
    if rejected != (self.log_wealth >= -np.log(self.significance)):
      raise ValueError(f'rejected={rejected} must say whether log_wealth='
                       f'{self.log_wealth} has reached -log(significance)')

  @property
  def result(self):
    """The :class:`BettingResult` so far."""
    return BettingResult(self.rejected, self.pairs_used, self.log_wealth)

  def update(self, hits, hits_prime):
    """Returns the state after more pairs, up to the first crossing.

    Args:
      hits: bool ``[T]``, whether the event happened on x, in time order.
      hits_prime: bool ``[T]``, whether it happened on x'.

    Returns:
      :class:`Bettor`; itself if it has rejected already.

    Raises:
      ValueError: the arrays are not bool, not ``[T]`` or of different lengths.
    """
    hits, hits_prime = _check_pairs(hits, hits_prime)
    bettor = self
    for start in range(0, len(hits), _BLOCK):
      if bettor.rejected:
        break
      block = slice(start, start + _BLOCK)
      bettor = bettor._bet(hits[block], hits_prime[block])
    return bettor

  def _bet(self, hits, hits_prime):
    """The state after one block."""
    outcomes = np.stack([hits & ~hits_prime, hits & hits_prime,
                         ~hits & hits_prime, ~hits & ~hits_prime], axis=1)
    # Only the first outcome makes wealth grow: elsewhere no path crosses.
    growing = np.flatnonzero(outcomes[:, 0])
    counts = np.array(self.counts) + np.cumsum(outcomes, axis=0)
    log_wealth = _log_sum(
        counts[growing] @ _log_factors(self.epsilon, self.delta) + _log_prior())
    crossed = np.flatnonzero(log_wealth >= -np.log(self.significance))
    last = growing[crossed[0]] if len(crossed) else len(hits) - 1
    seen = log_wealth[growing <= last]
    return dataclasses.replace(
        self, counts=tuple(counts[last].tolist()),
        pairs_used=self.pairs_used + int(last) + 1,
        log_wealth=float(max(self.log_wealth, seen.max(initial=0.))),
        rejected=bool(len(crossed)))


def betting_test(hits, hits_prime, *, epsilon, significance=.05, delta=0.):
  """Tests the claim epsilon by betting on pairs, and stops when it is refuted.

  Looks for one direction: the event likelier under x. Exchange the arguments
  for the other, negate both arrays for the complement; whoever runs several
  tests gives each its part of the significance.

  Guarantee: a mechanism that is (epsilon, delta)-DP for this pair of inputs is
  rejected with probability at most ``significance``, however many pairs are
  looked at. Pairs are independent of each other; the two runs of a pair need
  not be. The event is fixed before the first pair.

  Args:
    hits: bool ``[T]``, whether the event happened on x, in time order.
    hits_prime: bool ``[T]``, whether it happened on x'.
    epsilon: the claim for this pair, >= 0; for metric DP epsilon times the
      distance of x and x'.
    significance: probability that a true claim is rejected, in [1e-12, 0.5).
    delta: the claim's delta, in [0, 1).

  Returns:
    :class:`BettingResult`. Its ``log_wealth`` is the path's largest: its
    negative exponential is a p-value at any time.

  Raises:
    ValueError: the arrays are not bool, not ``[T]`` or of different lengths;
      an argument is out of its range.

  Example:
    >>> ones, zeros = np.ones(30, bool), np.zeros(30, bool)
    >>> betting_test(ones, zeros, epsilon=1.).pairs_used
    18
    >>> betting_test(ones, ones, epsilon=1.)
    BettingResult(rejected=False, pairs_used=30, log_wealth=0.0)

  References: Waudby-Smith and Ramdas (2024), section 4; Cover (1991).
  """
  bettor = Bettor(epsilon=epsilon, significance=significance, delta=delta)
  return bettor.update(hits, hits_prime).result


def _bets():
  """Bets as fractions of the largest that cannot lose more than all, [32]."""
  # Not the whole: that bettor is dead after the first hit on x' alone.
  return 2. ** (-np.arange(1, _NUM_BETS + 1) / 2.)


def _log_prior():
  """Log of the wealth that each bet starts with; large bets get more, [32]."""
  # A small bet runs for long, where a nat of prior costs relatively little.
  weights = 1. / np.arange(1, _NUM_BETS + 1)
  return np.log(weights / weights.sum())


def _log_factors(epsilon, delta):
  """Log of what one pair does to the wealth, [4, 32]; rows are outcomes."""
  # Everything over e^epsilon + delta, which may overflow.
  largest = np.exp(-epsilon) / (1. + delta * np.exp(-epsilon))
  gains = np.array([largest * (1. - delta), largest - 1., -1.,
                    -largest * delta])
  return np.log1p(gains[:, None] * _bets())


def _log_sum(log_wealth):
  """Log of the sum over bets; a third of the time of SciPy's logsumexp."""
  peak = log_wealth.max(axis=1)
  return peak + np.log(np.exp(log_wealth - peak[:, None]).sum(axis=1))


def _check_pairs(hits, hits_prime):
  hits = settings.check_array('hits', hits)
  hits_prime = settings.check_array('hits_prime', hits_prime)
  for name, value in (('hits', hits), ('hits_prime', hits_prime)):
    if value.dtype != bool or value.ndim != 1:
      raise ValueError(f'{name} of dtype {value.dtype} and shape {value.shape} '
                       'must be bool [T]: whether the event happened, in time '
                       'order')
  if len(hits) != len(hits_prime):
    raise ValueError(f'hits_prime of length {len(hits_prime)} must pair with '
                     f'hits of length {len(hits)}')
  return hits, hits_prime
