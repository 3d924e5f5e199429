r"""Counts of an event -> lower bounds on epsilon and delta. Host, float64.

An event E is fixed before its counts are seen: ``hits`` of ``trials`` runs on
x fall in it, ``hits_prime`` of ``trials_prime`` runs on x'. Confidence limits
of the two probabilities give the least ratio that the counts still allow. A
bound exceeds the truth with probability at most ``significance``, which is
divided among all that is looked at: two limits, the directions and the events.
It assumes independent runs and nothing else, but for
`epsilon_lower_bound_assuming_gaussian_dp`, which says so in its name, and
`one_run_epsilon_lower_bound`, whose canaries are included by fair coins.

No bound from n runs a side exceeds `epsilon_ceiling`; print it beside the
bound, since one near its ceiling says only that the runs were too few.
`epsilon_point` is a point estimate and never a bound.

Example:
  >>> bound = epsilon_lower_bound(6_065, 2_231, 10_000, 10_000)
  >>> print(f'{bound.epsilon_lower:.3f} {bound.direction} {bound.event}')
  0.940 x hit
  >>> print(f'{epsilon_point(6_065, 2_231, 10_000, 10_000):.3f}')
  1.000
  >>> print(f'{epsilon_ceiling(10_000):.2f}')
  7.90

References:
  Jagielski et al. (2020), Auditing differentially private machine learning: how
    private is private SGD? <https://arxiv.org/abs/2006.07709>.
  Nasr et al. (2023), Tight auditing of differentially private machine learning
    <https://arxiv.org/abs/2302.07956>.
  Steinke, Nasr and Jagielski (2023), Privacy auditing with one (1) training run
    <https://arxiv.org/abs/2305.08846>.
  Dong, Roth and Su (2019), Gaussian differential privacy
    <https://arxiv.org/abs/1905.02383>.
  Meinshausen, Meier and Buehlmann (2009), P-values for high-dimensional
    regression <https://arxiv.org/abs/0811.2177>.
"""

from typing import NamedTuple

import numpy as np
from scipy import special

from jaxdp import confidence
from jaxdp.auditing import settings

_DIRECTIONS = {'x': ('x',), 'x_prime': ('x_prime',),
               'either': ('x', 'x_prime')}
_EVENTS = ('hit', 'miss')
_MOST_CORRECT = 2**26  # terms of a one-run p-value with delta, held at once


class EpsilonBound(NamedTuple):
  """What the counts prove, and by which ratio; arrays when counts are."""

  epsilon_lower: float  # in [0, inf)
  direction: str  # 'x' or 'x_prime': under which E itself is likelier
  event: str  # 'hit', E itself, or 'miss', likelier under the other input


class GaussianDpBound(NamedTuple):
  """A bound that holds for a mechanism known to be exactly Gaussian-DP."""

  epsilon_lower: float  # at the delta asked for
  mu_lower: float  # lower bound on mu, >= 0
  assumption: str = 'gaussian-dp'


def epsilon_ceiling(num_trials, *, delta=0., significance=.05, num_events=1,
                    num_directions=1):
  r"""The largest `epsilon_lower_bound` that ``num_trials`` runs can print.

  .. math::
    \ln \frac{a^{1/n} - \delta}{1 - a^{1/n}}, \quad
    a = \frac{\mathrm{significance}}{2 \cdot \mathrm{num\_events} \cdot
      \mathrm{num\_directions}}

  reached when every run on one input hits and none on the other; 0 where that
  is negative.

  Args:
    num_trials: :math:`n`, runs on each input, in ``[1, 2**53]``; may be an
      array.
    delta: of (epsilon, delta)-DP, in [0, 1).
    significance: probability that the bound is wrong, in [1e-12, 0.5).
    num_events: how many events are looked at, >= 1.
    num_directions: 1, or 2 for ``direction='either'``.

  Returns:
    float64 of the shape of ``num_trials``.

  Raises:
    ValueError: an argument is not whole or out of its range; it says which.

  Example:
    >>> print(epsilon_ceiling([10**4, 10**7]).round(2))
    [ 7.9  14.81]
  """
  settings.check_number('num_directions', num_directions, lambda x: x in (1, 2),
                        "1 or 2; 2 is for direction='either'")
  settings.check_delta(delta)
  n = settings.check_trials('num_trials', num_trials)
  log_low = np.log(_share(significance, num_events, num_directions)) / n
  # 1 - exp(log_low) would round to 0 long before 2**53.
  ratio = _log(np.exp(log_low) - delta) - np.log(-np.expm1(log_low))
  return settings.plain(np.maximum(ratio, 0.))


def epsilon_lower_bound(hits, hits_prime, trials, trials_prime, *, delta=0.,
                        significance=.05, num_events=1, direction='either'):
  r"""Bounds epsilon from below by the counts of one event.

  Direction 'x' (E is likelier under x) takes two one-sided Clopper-Pearson
  limits and, at no further cost, both ratios that follow from them:

  .. math::
    \max\left(\ln \frac{p_{lo} - \delta}{p'_{hi}},
      \ln \frac{1 - p'_{hi} - \delta}{1 - p_{lo}}, 0\right)

  with each limit at ``significance / (2 num_events num_directions)``;
  'either' is the larger of both directions and has ``num_directions = 2``.
  It is 0 where nothing is shown, and never infinite.

  Guarantee: exceeds the epsilon of a mechanism that is (epsilon, delta)-DP for
  this pair with probability at most ``significance``, over all
  ``num_events`` events together. Runs are independent and the event is fixed
  without these counts; the largest bound of several events is a bound only if
  ``num_events`` counts them all.

  Args:
    hits: runs on x in the event, whole numbers in ``[0, trials]``; the four
      counts broadcast.
    hits_prime: runs on x' in the event, in ``[0, trials_prime]``.
    trials: runs on x, in ``[1, 2**53]``.
    trials_prime: runs on x', in ``[1, 2**53]``.
    delta: of (epsilon, delta)-DP, in [0, 1).
    significance: probability that the bound is wrong, in [1e-12, 0.5).
    num_events: how many events share the significance, >= 1.
    direction: 'x' or 'x_prime', fixed beforehand, or 'either'.

  Returns:
    :class:`EpsilonBound`: a float and two strings, or arrays of the broadcast
    shape. Where ``epsilon_lower`` is 0 the strings name the best ratio all the
    same.

  Raises:
    ValueError: an argument is not whole or out of its range; it says which.

  Example:
    >>> bound = epsilon_lower_bound([0, 50], [90, 50], 100, 100)
    >>> print(bound.epsilon_lower.round(2), bound.direction[0], bound.event[0])
    [2.94 0.  ] x_prime hit

  References: Jagielski et al. (2020), section 4; Nasr et al. (2023), section 4.
  """
  if not isinstance(direction, str) or direction not in _DIRECTIONS:
    raise ValueError(f'direction={direction!r} must be one of '
                     f'{", ".join(map(repr, _DIRECTIONS))}')
  settings.check_delta(delta)
  first, second = settings.check_counts(hits, hits_prime, trials, trials_prime)
  directions = _DIRECTIONS[direction]
  share = _share(significance, num_events, len(directions))
  ratios, names = [], []
  for name in directions:
    sides = (first, second) if name == 'x' else (second, first)
    low, high, low_miss, high_miss = _limits(*sides, share)
    ratios += [_log(low - delta) - np.log(high),
               _log(low_miss - delta) - np.log(high_miss)]
    names += [(name, event) for event in _EVENTS]
  best = np.argmax(ratios, axis=0)
  epsilon = np.maximum(np.max(ratios, axis=0), 0.)
  if np.isnan(epsilon).any():
    raise RuntimeError('the limits of the counts have lost their digits; use a '
                       'larger significance or fewer events')
  names = np.array(names)
  if not best.ndim:
    return EpsilonBound(float(epsilon), *map(str, names[best]))
  return EpsilonBound(epsilon, names[best, 0], names[best, 1])


def epsilon_point(hits, hits_prime, trials, trials_prime, *, delta=0.):
  r"""The plug-in epsilon of one event: the largest of four observed ratios.

  .. math::
    \max\left(\ln \frac{\hat p - \delta}{\hat p'},
      \ln \frac{\hat p' - \delta}{\hat p},
      \ln \frac{1 - \hat p - \delta}{1 - \hat p'},
      \ln \frac{1 - \hat p' - \delta}{1 - \hat p}, 0\right)

  A point estimate: it is infinite when one count is zero, too large on average
  when epsilon is near zero, and proves nothing. 0/0 contributes nothing.

  Args:
    hits, hits_prime, trials, trials_prime: as in `epsilon_lower_bound`.
    delta: of (epsilon, delta)-DP, in [0, 1).

  Returns:
    float64 in ``[0, inf]`` of the broadcast shape.

  Raises:
    ValueError: an argument is not whole or out of its range; it says which.

  Example:
    >>> print(epsilon_point([0, 20], [10, 10], 100, 100).round(3))
    [  inf 0.693]

  References: Habernal (2022), How reparametrization trick broke
  differentially-private text representation learning, section 4.
  """
  settings.check_delta(delta)
  (k, n), (k_prime, n_prime) = settings.check_counts(
      hits, hits_prime, trials, trials_prime)
  hit = (k / n, k_prime / n_prime)
  miss = ((n - k) / n, (n_prime - k_prime) / n_prime)
  best = np.zeros(k.shape)
  for p, q in (hit, hit[::-1], miss, miss[::-1]):
    with np.errstate(divide='ignore', invalid='ignore'):
      # fmax skips NaN: 0/0, and a probability below delta.
      best = np.fmax(best, np.log((p - delta) / q))
  return settings.plain(best)


def delta_lower_bound(hits, hits_prime, trials, trials_prime, epsilon, *,
                      significance=.05):
  r"""Bounds delta at a given epsilon from below, E likelier under x.

  .. math::
    \max\left(0, p_{lo} - e^\epsilon p'_{hi},
      (1 - p'_{hi}) - e^\epsilon (1 - p_{lo})\right)

  with one-sided Clopper-Pearson limits at ``significance / 2`` each. One pair
  of limits serves every epsilon, so the whole curve holds at once.

  Guarantee: for a mechanism that is (epsilon, delta)-DP on this pair, exceeds
  delta with probability at most ``significance``; runs independent, the event
  fixed without these counts. For the other direction exchange x and x'.

  Args:
    hits, hits_prime, trials, trials_prime: as in `epsilon_lower_bound`.
    epsilon: >= 0 and finite; broadcasts against the counts.
    significance: probability that the bound is wrong, in [1e-12, 0.5).

  Returns:
    float64 in [0, 1) of the broadcast shape.

  Raises:
    ValueError: an argument is not whole or out of its range; it says which.

  Example:
    >>> print(delta_lower_bound(90, 0, 100, 100, [0., 1., 3.]).round(3))
    [0.788 0.725 0.096]
  """
  epsilon = settings.check_floats('epsilon', epsilon)
  if not np.all((epsilon >= 0.) & np.isfinite(epsilon)):
    raise ValueError(f'epsilon={epsilon} must be finite and not negative')
  sides = settings.check_counts(hits, hits_prime, trials, trials_prime)
  low, high, low_miss, high_miss = _limits(*sides, _share(significance, 1, 1))
  with np.errstate(over='ignore'):  # an infinite product shows no delta
    hit = low - np.exp(epsilon) * high
    miss = low_miss - np.exp(epsilon) * high_miss
  return settings.plain(np.maximum(np.maximum(hit, miss), 0.))


def epsilon_lower_bound_assuming_gaussian_dp(
    false_positives, negatives, false_negatives, positives, *, delta,
    significance=.05):
  r"""Bounds epsilon of a mechanism that IS Gaussian-DP; invalid for others.

  .. math::
    \mu_{lo} = \max(0, \Phi^{-1}(1 - FPR_{hi}) - \Phi^{-1}(FNR_{hi})), \quad
    \delta = \Phi\left(\frac{\mu}{2} - \frac{\epsilon}{\mu}\right)
      - e^\epsilon \Phi\left(-\frac{\mu}{2} - \frac{\epsilon}{\mu}\right)

  One operating point stands for the whole trade-off curve, so a few thousand
  runs give what counts alone cannot.

  Guarantee: exceeds the epsilon at ``delta`` with probability at most
  ``significance`` ONLY IF the trade-off curve of the two inputs is that of two
  unit Gaussians at some distance mu (one Gaussian mechanism, no subsampling).
  It is NOT valid without this assumption: on the Laplace mechanism with epsilon
  1 it says 4.39 at delta 1e-5 after 35,000 runs, and tends to 4.53. The result
  carries the assumption.

  Args:
    false_positives: runs on x' that the test gave to x; all four broadcast.
    negatives: runs on x', in ``[1, 2**53]``.
    false_negatives: runs on x that the test gave to x'.
    positives: runs on x, in ``[1, 2**53]``.
    delta: in (0, 1); at 0 no Gaussian has a finite epsilon.
    significance: probability that the bound is wrong, in [1e-12, 0.5).

  Returns:
    :class:`GaussianDpBound`, float64 of the broadcast shape.

  Raises:
    ValueError: an argument is not whole or out of its range; it says which.

  Example:
    >>> bound = epsilon_lower_bound_assuming_gaussian_dp(
    ...     303, 1000, 303, 1000, delta=1e-5)
    >>> print(f'{bound.epsilon_lower:.2f} {bound.assumption}')
    3.71 gaussian-dp

  References: Nasr et al. (2023), section 4; Dong et al. (2019), Corollary 2.13.
  """
  delta = settings.check_number(
      'delta', delta, lambda x: 0. < x < 1., 'one number in (0, 1); at delta=0 '
      'no Gaussian mechanism has a finite epsilon')
  (fp, n), (fn, p) = settings.check_counts(
      false_positives, false_negatives, negatives, positives,
      ('false_positives', 'false_negatives', 'negatives', 'positives'))
  share = _share(significance, 1, 1)
  _, fpr = confidence.clopper_pearson(fp, n, significance=share, side='upper')
  _, fnr = confidence.clopper_pearson(fn, p, significance=share, side='upper')
  # Clipped, never the absolute value: a test worse than chance shows nothing.
  mu = np.maximum(-special.ndtri(fpr) - special.ndtri(fnr), 0.)
  return GaussianDpBound(settings.plain(_gaussian_epsilon(mu, delta)),
                         settings.plain(mu))


def one_run_epsilon_lower_bound(num_canaries, num_guesses, num_correct, *,
                                delta=0., significance=.05):
  r"""Bounds epsilon from one run with many canaries.

  The claim epsilon is rejected when its p-value is at most ``significance``,

  .. math::
    P(B \ge v) + 2 m \delta \max_{1 \le i \le m} \frac{P(v - i \le B < v)}{i},
    \quad B \sim \mathrm{Bin}(r, e^\epsilon / (1 + e^\epsilon))

  and the bound is the largest epsilon below which every claim is rejected.

  Guarantee: exceeds epsilon with probability at most ``significance`` if each
  canary was included by its own fair coin, the mechanism is (epsilon,
  delta)-DP for adding or removing one, and guesses were made from the output
  alone. The number of guesses may depend on the output; choosing it by the
  number correct may not.

  With ``delta`` above 0 it takes O(v) time and memory, at most O(m): some
  seconds and a few GB at the most that is taken, 2**26 right guesses.

  Args:
    num_canaries: :math:`m`, canaries that had a coin, >= 1.
    num_guesses: :math:`r`, canaries not abstained on, in ``[0, m]``.
    num_correct: :math:`v`, guesses that were right, in ``[0, r]``.
    delta: of (epsilon, delta)-DP, in [0, 1).
    significance: probability that the bound is wrong, in [1e-12, 0.5).

  Returns:
    A float in ``[0, inf)``.

  Raises:
    ValueError: an argument is not whole or out of its range; it says which;
      more than 2**26 right guesses with ``delta``.

  Example:
    >>> print(f'{one_run_epsilon_lower_bound(1000, 100, 100):.2f}')
    3.49

  References: Steinke et al. (2023), Theorem 5.2 and appendix D.
  """
  settings.check_delta(delta)
  settings.check_significance(significance)
  m = settings.check_whole('num_canaries', num_canaries, 1,
                           settings.MAX_COUNT)
  r = settings.check_whole('num_guesses', num_guesses, 0, m)
  v = settings.check_whole('num_correct', num_correct, 0, r)
  if delta and v > _MOST_CORRECT:
    raise ValueError(f'num_correct={v} with delta={delta} takes {v} terms for '
                     'each of some 60 p-values; at most 2**26 are taken: use '
                     'fewer canaries, or delta=0')
  p_value = _one_run_p_value(m, r, v, float(delta))
  if v == 0 or p_value(0.) > significance:
    return 0.
  low, high = 0., 1.
  while p_value(high) <= significance:
    low, high = high, 2. * high
  # With S(j) = P(B >= j) and c = 2 m delta the p-value is the largest over i of
  # (1 - c/i) S(v) + (c/i) S(v - i). Each rises, or rises and then falls TO one,
  # so what is rejected is one interval and bisection cannot miss its end.
  while low < (middle := (low + high) / 2.) < high:
    low, high = ((middle, high) if p_value(middle) <= significance
                 else (low, middle))
  return low


def multi_split_bound(bounds):
  """Joins bounds from several random splits of the same runs: their median.

  Splitting runs into a part that chooses the event and a part that tests it
  makes the bound depend on the split. The median over S splits depends on it
  less, and costs a factor two: compute EACH bound at ``significance / 2``, and
  the median holds at ``significance``. When the median is wrong at least half
  of the bounds are, and by Markov's inequality at most twice one bound's
  probability of error allows it, however the splits depend on each other.

  Args:
    bounds: ``[S, ...]`` lower bounds, each at half of the significance of the
      result, finite and >= 0.

  Returns:
    float64 ``[...]``, the median over the first axis.

  Raises:
    ValueError: there is no bound, or one is negative or not finite.

  Example:
    >>> print(multi_split_bound([.9, 0., 1.1]))
    0.9

  References: Meinshausen et al. (2009), section 2, with quantile 1/2.
  """
  bounds = settings.check_floats('bounds', bounds)
  if bounds.ndim < 1 or not len(bounds):
    raise ValueError(f'bounds of shape {bounds.shape} must be [S, ...] with at '
                     'least one split')
  bad = ~(np.isfinite(bounds) & (bounds >= 0.))
  if np.any(bad):
    raise ValueError(f'bounds has an entry {bounds[bad][0]}; lower bounds are '
                     'finite and not negative')
  return settings.plain(np.median(bounds, axis=0))


def _limits(first, second, share):
  """p_lo, p'_hi, 1 - p'_hi and 1 - p_lo, none by subtraction from one."""
  (k, n), (k_prime, n_prime) = first, second

  def limits(k, n, side):
    return confidence.clopper_pearson(
        k, n, significance=share, side=side)[side == 'upper']

  return (limits(k, n, 'lower'), limits(k_prime, n_prime, 'upper'),
          limits(n_prime - k_prime, n_prime, 'lower'),
          limits(n - k, n, 'upper'))


def _gaussian_epsilon(mu, delta):
  """The largest epsilon whose delta is above `delta`, elementwise."""
  small = special.ndtr(mu / 2.) - special.ndtr(-mu / 2.) <= delta
  mu = np.where(small, 1., mu)
  low = np.zeros(mu.shape)
  # There the first term alone is `delta`.
  high = np.maximum(mu * (mu / 2. - special.ndtri(delta)), 0.)
  for _ in range(100):
    middle = (low + high) / 2.
    above = _gaussian_log_delta(middle, mu) > np.log(delta)
    low, high = np.where(above, middle, low), np.where(above, high, middle)
  return np.where(small, 0., low)


def _gaussian_log_delta(epsilon, mu):
  """Logarithm of delta(epsilon), without cancellation between large terms."""
  t = epsilon / mu - mu / 2.
  # e^epsilon phi(t + mu) = phi(t), so in the tail both terms share phi(t) and
  # only their Mills ratios are subtracted.
  tail = np.maximum(t, 0.)
  mills = special.erfcx(tail / np.sqrt(2.)) - special.erfcx(
      (tail + mu) / np.sqrt(2.))
  body = special.ndtr(-t) - np.exp(epsilon + special.log_ndtr(-t - mu))
  return np.where(t > 0., _log(mills / 2.) - tail * tail / 2., _log(body))


def _one_run_p_value(m, r, v, delta):
  """The p-value as a function of epsilon."""
  j = np.arange(v - 1, -1, -1.)  # v - i for i = 1 .. v; larger i add nothing
  log_choose = (special.gammaln(r + 1.) - special.gammaln(j + 1.)
                - special.gammaln(r - j + 1.))

  def p_value(epsilon):
    # P(B >= v), by the small probability so that a large epsilon keeps digits.
    tail = special.betaincc(r - v + 1., v, special.expit(-epsilon))
    if not delta:
      return tail
    log_right = special.log_expit(epsilon)
    log_wrong = special.log_expit(-epsilon)
    masses = np.exp(log_choose + j * log_right + (r - j) * log_wrong)
    worst = np.max(np.cumsum(masses) / (v - j))
    return min(tail + 2. * m * delta * worst, 1.)

  return p_value


def _log(x):
  """The logarithm, -inf where `x` is not positive."""
  with np.errstate(divide='ignore'):
    return np.log(np.maximum(x, 0.))


def _share(significance, num_events, num_directions):
  """What is left of `significance` for one confidence limit."""
  settings.check_significance(significance)
  events = settings.check_whole('num_events', num_events, 1, 2**40)
  return float(significance) / (2. * events * num_directions)
