"""Bounds from counts against scipy.stats, mpmath, enumeration and a peer."""

import importlib.util
import itertools
import math
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import mpmath
import numpy as np
from scipy import stats

from jaxdp import auditing
from jaxdp.auditing import bounds

_MISSING = importlib.util.find_spec('jax_privacy') is None


def _limit_low(k, n, tail):
  return stats.beta.ppf(tail, k, n - k + 1) if k else 0.


def _limit_high(k, n, tail):
  return stats.beta.isf(tail, k + 1, n - k) if k < n else 1.


def _ratio(numerator, denominator):
  if numerator <= 0:
    return -math.inf
  return math.log(numerator / denominator) if denominator else math.inf


def _one_direction(k, n, k_prime, n_prime, delta, tail):
  """The two ratios of direction 'x', one count pair at a time."""
  low, high = _limit_low(k, n, tail), _limit_high(k_prime, n_prime, tail)
  return (_ratio(low - delta, high), _ratio(1 - high - delta, 1 - low))


def _oracle(k, n, k_prime, n_prime, delta, tail, direction):
  """(epsilon, {(direction, event) that attain it}) by the definition."""
  ratios = {}
  if direction in ('x', 'either'):
    hit, miss = _one_direction(k, n, k_prime, n_prime, delta, tail)
    ratios |= {('x', 'hit'): hit, ('x', 'miss'): miss}
  if direction in ('x_prime', 'either'):
    hit, miss = _one_direction(k_prime, n_prime, k, n, delta, tail)
    ratios |= {('x_prime', 'hit'): hit, ('x_prime', 'miss'): miss}
  best = max(ratios.values())
  return max(best, 0.), {name for name, ratio in ratios.items()
                         if ratio >= best - 1e-9}


class CeilingTest(parameterized.TestCase):

  @parameterized.parameters((10**4, 7.905), (10**5, 10.21), (10**6, 12.51),
                            (5 * 10**6, 14.12), (10**7, 14.81), (10**8, 17.12))
  def test_is_what_the_literature_of_ten_million_runs_prints(self, n, expected):
    # The printed digits are the half unit.
    self.assertAlmostEqual(auditing.epsilon_ceiling(n), expected, delta=5.1e-3)

  @parameterized.product(n=(1, 2, 10, 10**4, 10**9, 2**53),
                         delta=(0., 1e-9, .3), events=(1, 1000),
                         directions=(1, 2))
  def test_equals_its_formula_to_fifty_digits(self, n, delta, events,
                                              directions):
    with mpmath.workdps(50):
      power = (mpmath.mpf('.05') / (2 * events * directions)) ** (
          mpmath.mpf(1) / n)
      ratio = (power - mpmath.mpf(delta)) / (1 - power)
      expected = float(mpmath.log(ratio)) if ratio > 1 else 0.
    got = auditing.epsilon_ceiling(n, delta=delta, num_events=events,
                                   num_directions=directions)
    self.assertAlmostEqual(got, expected, delta=1e-13 * max(1., expected))

  @parameterized.product(direction=('x', 'either'), delta=(0., .1))
  def test_is_the_largest_bound_of_all_counts(self, direction, delta):
    k, k_prime = np.mgrid[:21, :21]
    bound = auditing.epsilon_lower_bound(
        k, k_prime, 20, 20, delta=delta, direction=direction, num_events=3)
    ceiling = auditing.epsilon_ceiling(
        20, delta=delta, num_events=3,
        num_directions=2 if direction == 'either' else 1)
    self.assertAlmostEqual(bound.epsilon_lower.max(), ceiling, delta=1e-13)
    self.assertAlmostEqual(bound.epsilon_lower[20, 0], ceiling, delta=1e-13)
    self.assertGreater(ceiling, .5)

  @parameterized.parameters(10**4, 10**8, 2**53)
  def test_is_reached_by_total_separation_at_any_number_of_runs(self, n):
    bound = auditing.epsilon_lower_bound(n, 0, n, n, direction='x')
    self.assertAlmostEqual(
        bound.epsilon_lower, auditing.epsilon_ceiling(n), delta=1e-12)

  def test_keeps_the_shape_of_its_runs(self):
    self.assertEqual(auditing.epsilon_ceiling([[10, 20, 30]]).shape, (1, 3))
    self.assertEqual(np.ndim(auditing.epsilon_ceiling(10)), 0)


class EpsilonLowerBoundTest(parameterized.TestCase):

  @parameterized.product(direction=('x', 'x_prime', 'either'), delta=(0., .07),
                         events=(1, 5))
  def test_equals_the_definition_for_all_counts(self, direction, delta, events):
    n, n_prime = 9, 12
    k, k_prime = np.mgrid[:n + 1, :n_prime + 1]
    got = auditing.epsilon_lower_bound(
        k, k_prime, n, n_prime, delta=delta, significance=.2,
        num_events=events, direction=direction)
    tail = .2 / (2 * events * (2 if direction == 'either' else 1))
    shown = 0
    for i, j in itertools.product(range(n + 1), range(n_prime + 1)):
      epsilon, names = _oracle(i, n, j, n_prime, delta, tail, direction)
      self.assertAlmostEqual(got.epsilon_lower[i, j], epsilon, delta=1e-12)
      self.assertIn((got.direction[i, j], got.event[i, j]), names)
      shown += epsilon > 0
    self.assertGreater(shown, 5)

  def test_scalars_give_a_float_and_two_strings(self):
    bound = auditing.epsilon_lower_bound(90, 10, 100, 100)
    self.assertIs(type(bound.epsilon_lower), float)
    self.assertEqual(bound[1:], ('x', 'hit'))
    self.assertTrue(all(type(name) is str for name in bound[1:]))

  def test_exchange_of_inputs_exchanges_the_direction(self):
    one = auditing.epsilon_lower_bound(70, 20, 100, 90)
    other = auditing.epsilon_lower_bound(20, 70, 90, 100)
    self.assertEqual(one.epsilon_lower, other.epsilon_lower)
    self.assertEqual((one.direction, other.direction), ('x', 'x_prime'))

  def test_complement_exchanges_event_and_direction(self):
    one = auditing.epsilon_lower_bound(70, 20, 100, 90)
    other = auditing.epsilon_lower_bound(30, 70, 100, 90)
    self.assertEqual(one.epsilon_lower, other.epsilon_lower)
    self.assertEqual((one[1:], other[1:]), (('x', 'hit'), ('x_prime', 'miss')))

  def test_both_directions_cost_what_their_share_says(self):
    either = auditing.epsilon_lower_bound(70, 20, 100, 100, significance=.1)
    alone = auditing.epsilon_lower_bound(
        70, 20, 100, 100, significance=.05, direction='x')
    self.assertEqual(either.epsilon_lower, alone.epsilon_lower)
    many = auditing.epsilon_lower_bound(
        70, 20, 100, 100, significance=.4, num_events=8, direction='x')
    self.assertEqual(many.epsilon_lower, alone.epsilon_lower)

  def test_no_counts_at_either_end_are_infinite_or_negative(self):
    ends = np.array([0, 1, 49, 50])
    for delta in (0., .5, .999):
      bound = auditing.epsilon_lower_bound(
          ends[:, None], ends, 50, 50, delta=delta).epsilon_lower
      self.assertTrue(np.all(np.isfinite(bound) & (bound >= 0.)))

  def test_complement_keeps_its_digits_where_both_are_nearly_sure(self):
    # 1 - p is 1e-12 and 3e-12: subtraction from one would leave 4 digits.
    n = 10**15
    bound = auditing.epsilon_lower_bound(
        n - 1_000, n - 3_000, n, n, direction='x', significance=.1)
    flipped = auditing.epsilon_lower_bound(
        3_000, 1_000, n, n, direction='x', significance=.1)
    self.assertAlmostEqual(bound.epsilon_lower, flipped.epsilon_lower,
                           delta=1e-13)
    self.assertEqual(bound.event, 'miss')

  @parameterized.parameters((.5, .1), (.9, .6), (.05, .05), (1., .4), (.2, 0.))
  def test_exceeds_the_truth_no_more_than_stated_by_enumeration(
      self, p, p_prime):
    truth = max(_ratio(*r) for r in (
        (p, p_prime), (p_prime, p), (1 - p, 1 - p_prime), (1 - p_prime, 1 - p)))
    n, n_prime = 25, 40
    k, k_prime = np.mgrid[:n + 1, :n_prime + 1]
    mass = stats.binom.pmf(k, n, p) * stats.binom.pmf(k_prime, n_prime, p_prime)
    for significance in (.02, .2, .45):
      bound = auditing.epsilon_lower_bound(
          k, k_prime, n, n_prime, significance=significance).epsilon_lower
      self.assertLessEqual(mass[bound > truth].sum(), significance)

  def test_coverage_of_many_events_needs_their_number(self):
    # Fifteen independent events of ratio e: the largest of their bounds.
    num, events, n, n_prime = 2_000, 15, 400, 10**7
    generator = np.random.default_rng(20)
    p = .3
    hits = generator.binomial(n, p, (num, events))
    hits_prime = generator.binomial(n_prime, p / math.e, (num, events))
    # False alarm of this test: 1e-3.
    allowed = stats.binom.isf(1e-3, num, .1)

    def exceeded(num_events):
      bound = auditing.epsilon_lower_bound(
          hits, hits_prime, n, n_prime, significance=.1, direction='x',
          num_events=num_events)
      return int((bound.epsilon_lower.max(1) > 1.).sum())

    divided = exceeded(events)
    self.assertLessEqual(divided, allowed)
    self.assertGreater(exceeded(1), allowed)
    # Not valid only because it is loose: one limit uses its half of .1.
    self.assertGreater(divided, .02 * num)

  def test_sees_a_violation_with_enough_runs(self):
    generator = np.random.default_rng(3)
    hits = generator.binomial(10**5, .6, 100)
    hits_prime = generator.binomial(10**5, .2, 100)
    bound = auditing.epsilon_lower_bound(hits, hits_prime, 10**5, 10**5)
    self.assertTrue(np.all(bound.epsilon_lower > .95 * math.log(3)))


class EpsilonPointTest(parameterized.TestCase):

  @parameterized.parameters(0., .2)
  def test_equals_the_four_ratios_for_all_counts(self, delta):
    n, n_prime = 5, 7
    k, k_prime = np.mgrid[:n + 1, :n_prime + 1]
    got = auditing.epsilon_point(k, k_prime, n, n_prime, delta=delta)
    for i, j in itertools.product(range(n + 1), range(n_prime + 1)):
      p, q, r, s = i / n, j / n_prime, (n - i) / n, (n_prime - j) / n_prime
      ratios = [_ratio(a - delta, b)
                for a, b in ((p, q), (q, p), (r, s), (s, r))]
      self.assertAlmostEqual(got[i, j], max(0., *ratios), delta=1e-14)

  def test_zero_over_zero_contributes_nothing(self):
    self.assertEqual(auditing.epsilon_point(0, 0, 5, 5), 0.)
    self.assertEqual(auditing.epsilon_point(5, 5, 5, 5), 0.)
    self.assertEqual(auditing.epsilon_point(0, 0, 5, 5, delta=.1), 0.)

  def test_one_empty_count_is_infinite_and_its_bound_is_not(self):
    self.assertEqual(auditing.epsilon_point(0, 3, 100, 100), math.inf)
    bound = auditing.epsilon_lower_bound(0, 3, 100, 100)
    self.assertLess(bound.epsilon_lower, 1.)


class DeltaLowerBoundTest(parameterized.TestCase):

  def test_equals_the_definition_for_all_counts(self):
    n, n_prime = 9, 12
    k, k_prime = np.mgrid[:n + 1, :n_prime + 1]
    for epsilon in (0., .3, 2.):
      got = auditing.delta_lower_bound(k, k_prime, n, n_prime, epsilon,
                                       significance=.2)
      for i, j in itertools.product(range(n + 1), range(n_prime + 1)):
        low, high = _limit_low(i, n, .1), _limit_high(j, n_prime, .1)
        factor = math.exp(epsilon)
        self.assertAlmostEqual(
            got[i, j],
            max(0., low - factor * high, 1 - high - factor * (1 - low)),
            delta=1e-13)
    self.assertGreater(
        auditing.delta_lower_bound(9, 0, 9, 12, 1., significance=.2), .1)

  @parameterized.parameters((80, 20), (99, 60), (100, 0))
  def test_is_the_inverse_of_the_epsilon_bound(self, k, k_prime):
    for delta in (1e-6, .05, .2):
      epsilon = auditing.epsilon_lower_bound(
          k, k_prime, 100, 100, delta=delta, direction='x').epsilon_lower
      self.assertGreater(epsilon, 0.)
      self.assertAlmostEqual(
          auditing.delta_lower_bound(k, k_prime, 100, 100, epsilon), delta,
          delta=1e-13)

  def test_one_direction_only_and_no_overflow(self):
    self.assertEqual(auditing.delta_lower_bound(10, 90, 100, 100, 0.), 0.)
    np.testing.assert_array_equal(
        auditing.delta_lower_bound(100, 0, 100, 100, [800., 1e9]), 0.)


def _gaussian_delta(epsilon, mu):
  """delta(epsilon) of Gaussian DP, 60 digits."""
  with mpmath.workdps(60):
    epsilon, mu = mpmath.mpf(float(epsilon)), mpmath.mpf(float(mu))
    return (mpmath.ncdf(-epsilon / mu + mu / 2)
            - mpmath.exp(epsilon) * mpmath.ncdf(-epsilon / mu - mu / 2))


class GaussianDpTest(parameterized.TestCase):

  @parameterized.product(counts=((300, 1000), (5, 10**6), (0, 10**8),
                                 (497_000, 10**6)),
                         delta=(1e-12, 1e-5, .01))
  def test_epsilon_solves_its_equation(self, counts, delta):
    k, n = counts
    bound = auditing.epsilon_lower_bound_assuming_gaussian_dp(
        k, n, k, n, delta=delta)
    fpr = stats.beta.isf(.025, k + 1, n - k)
    self.assertAlmostEqual(bound.mu_lower, -2 * stats.norm.ppf(fpr),
                           delta=1e-9)
    if _gaussian_delta(0., bound.mu_lower) <= delta:
      self.assertEqual(bound.epsilon_lower, 0.)
      return
    # delta falls by this factor over 1e-9 of epsilon, at least.
    self.assertGreater(_gaussian_delta(bound.epsilon_lower - 1e-8,
                                       bound.mu_lower), delta)
    self.assertLess(_gaussian_delta(bound.epsilon_lower + 1e-8,
                                    bound.mu_lower), delta)

  def test_carries_its_assumption_and_keeps_shapes(self):
    bound = auditing.epsilon_lower_bound_assuming_gaussian_dp(
        [10, 20], 100, 30, [[100], [200]], delta=1e-5)
    self.assertEqual(bound.assumption, 'gaussian-dp')
    self.assertEqual(bound.epsilon_lower.shape, (2, 2))
    self.assertTrue(np.all(bound.epsilon_lower > 0.))

  @parameterized.parameters((500, 500), (900, 800), (1000, 1000), (1000, 0),
                            (0, 1000))
  def test_chance_or_worse_shows_nothing(self, fp, fn):
    # The absolute value of mu would show a large epsilon at (900, 800).
    bound = auditing.epsilon_lower_bound_assuming_gaussian_dp(
        fp, 1000, fn, 1000, delta=1e-5)
    self.assertEqual((bound.epsilon_lower, bound.mu_lower), (0., 0.))

  def test_is_wrong_on_laplace_as_its_documentation_says(self):
    # Laplace of epsilon 1, threshold in the middle: both errors exp(-.5) / 2.
    for n, epsilon in ((35_000, 4.39), (10**10, 4.53)):
      k = round(n * math.exp(-.5) / 2)
      bound = auditing.epsilon_lower_bound_assuming_gaussian_dp(
          k, n, k, n, delta=1e-5)
      self.assertAlmostEqual(bound.epsilon_lower, epsilon, delta=.01)

  def test_coverage_on_a_gaussian(self):
    mu, threshold, num = 1., .7, 2_500
    generator = np.random.default_rng(5)
    fp = generator.binomial(10**7, stats.norm.sf(threshold), num)
    fn = generator.binomial(500, stats.norm.cdf(threshold - mu), num)
    lower = auditing.epsilon_lower_bound_assuming_gaussian_dp(
        fp, 10**7, fn, 500, delta=1e-5, significance=.1).mu_lower
    allowed = stats.binom.isf(1e-3, num, .1)
    self.assertLessEqual((lower > mu).sum(), allowed)
    # A mu that is a seventh smaller is exceeded: the bound has power.
    self.assertGreater((lower > .85 * mu).sum(), allowed)


def _naive_p_value(m, r, v, epsilon, delta):
  law = stats.binom(r, 1 / (1 + math.exp(-epsilon)))
  i = np.arange(1, m + 1)
  worst = max((law.cdf(v - 1) - law.cdf(v - i - 1)) / i)
  return min(1., law.sf(v - 1) + 2 * m * delta * worst)


class OneRunTest(parameterized.TestCase):

  @parameterized.parameters((100, 3.49), (1000, 5.81), (10_000, 8.11))
  def test_its_ceilings_are_known(self, r, expected):
    got = auditing.one_run_epsilon_lower_bound(r, r, r)
    self.assertAlmostEqual(got, expected, delta=5.1e-3)
    power = .05 ** (1 / r)
    self.assertAlmostEqual(got, math.log(power / (1 - power)), delta=1e-9)

  @parameterized.parameters(
      (100, 60, 45, 0.), (100, 60, 45, 1e-3), (100, 60, 60, 1e-3),
      (300, 40, 33, .02), (50, 50, 41, 1e-5), (50, 10, 10, 0.))
  def test_its_p_value_crosses_the_significance_there(self, m, r, v, delta):
    for significance in (.01, .05, .3):
      got = auditing.one_run_epsilon_lower_bound(
          m, r, v, delta=delta, significance=significance)
      if _naive_p_value(m, r, v, 0., delta) > significance:
        self.assertEqual(got, 0.)
      else:
        self.assertLessEqual(
            _naive_p_value(m, r, v, got - 1e-9, delta), significance)
        self.assertGreater(
            _naive_p_value(m, r, v, got + 1e-9, delta), significance)

  @parameterized.parameters((40, 40, 36, .1), (200, 30, 29, .02),
                            (60, 20, 20, .3))
  def test_what_is_rejected_is_one_interval(self, m, r, v, delta):
    # 2 m delta > 1: the p-value is not monotone, its crossing is one all the
    # same.
    grid = np.linspace(0., 6., 100)
    p_values = np.array([_naive_p_value(m, r, v, e, delta) for e in grid])
    for significance in (1e-4, .05, .3, .49):
      rejected = p_values <= significance
      self.assertLessEqual(np.abs(np.diff(rejected.astype(int))).sum(), 1)
      got = auditing.one_run_epsilon_lower_bound(
          m, r, v, delta=delta, significance=significance)
      # At got = 0 nothing is rejected or epsilon 0 alone.
      np.testing.assert_array_equal(rejected[1:], grid[1:] <= got)

  @parameterized.product(epsilon=(.5, 1., 3.), r=(20, 100))
  def test_exceeds_the_truth_no_more_than_stated_by_enumeration(
      self, epsilon, r):
    # Randomised response is the worst case: v is Bin(r, sigmoid(epsilon)).
    lower = np.array([auditing.one_run_epsilon_lower_bound(
        r, r, v, significance=.1) for v in range(r + 1)])
    self.assertTrue(np.all(np.diff(lower) >= 0.))
    mass = stats.binom.pmf(np.arange(r + 1), r, 1 / (1 + math.exp(-epsilon)))
    self.assertLessEqual(mass[lower > epsilon].sum(), .1)
    if r == 100:
      self.assertGreater(mass[lower > epsilon].sum(), .03)

  def test_no_guess_and_no_right_guess_show_nothing(self):
    for counts in ((5, 0, 0), (5, 5, 0), (10, 10, 5)):
      for delta in (0., .1):
        self.assertEqual(
            auditing.one_run_epsilon_lower_bound(*counts, delta=delta), 0.)

  def test_delta_and_more_canaries_only_lower_it(self):
    bound = auditing.one_run_epsilon_lower_bound
    pure = bound(1000, 100, 95)
    self.assertGreater(pure, bound(1000, 100, 95, delta=1e-5))
    self.assertGreater(bound(1000, 100, 95, delta=1e-5),
                       bound(10_000, 100, 95, delta=1e-5))


class MultiSplitTest(parameterized.TestCase):

  def test_is_the_median_over_the_first_axis(self):
    self.assertEqual(auditing.multi_split_bound([3., 1., 2.]), 2.)
    np.testing.assert_array_equal(
        auditing.multi_split_bound([[1., 0.], [2., 4.]]), [1.5, 2.])

  def test_needs_half_of_the_significance(self):
    # The worst dependence: with twice its share of the time, half of the
    # splits are wrong together.
    num, splits, significance = 4_000, 10, .1
    generator = np.random.default_rng(8)
    allowed = stats.binom.isf(1e-3, num, significance)

    def wrong(each):
      together = generator.random(num) < 2 * each
      chosen = np.argsort(generator.random((splits, num)), axis=0) < splits / 2
      exceeding = np.where(chosen & together, 9., .5)  # the truth is 1
      self.assertAlmostEqual((exceeding > 1.).mean(), each, delta=.01)
      return int((auditing.multi_split_bound(exceeding) > 1.).sum())

    self.assertLessEqual(wrong(significance / 2), allowed)
    self.assertGreater(wrong(significance), allowed)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ((-1, 0, 5, 5), 'hits=-1'), ((6, 0, 5, 5), r'hits=6.* \[0, trials=5\]'),
      ((.5, 0, 5, 5), 'hits=0.5 must be a whole'),
      ((math.nan, 0, 5, 5), 'hits=nan'), ((0, 6, 5, 5), 'hits_prime=6'),
      ((0, [0, -2], 5, 5), 'hits_prime=-2'), ((0, 0, 0, 5), 'trials=0'),
      ((0, 0, 5, 0), 'trials_prime=0'), ((0, 0, 5, 2.**54), r'prime=1\.8'),
      ((0, 0, 5.5, 5), 'trials=5.5'), ((0, 0, math.inf, 5), 'trials=inf'))
  def test_counts_are_refused_by_name(self, counts, message):
    for bound in (auditing.epsilon_lower_bound, auditing.epsilon_point,
                  lambda *c: auditing.delta_lower_bound(*c, 1.)):
      with self.assertRaisesRegex(ValueError, message):
        bound(*counts)

  def test_counts_that_do_not_broadcast_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'broadcast'):
      auditing.epsilon_lower_bound([1, 2], [1, 2, 3], 5, 5)

  @parameterized.parameters(0., .5, .95, -.1, math.nan, ([.1, .2],))
  def test_significance_is_refused_by_name(self, significance):
    for call in (
        lambda s: auditing.epsilon_ceiling(10, significance=s),
        lambda s: auditing.epsilon_lower_bound(1, 0, 5, 5, significance=s),
        lambda s: auditing.delta_lower_bound(1, 0, 5, 5, 0., significance=s),
        lambda s: auditing.epsilon_lower_bound_assuming_gaussian_dp(
            1, 5, 1, 5, delta=.1, significance=s),
        lambda s: auditing.one_run_epsilon_lower_bound(
            5, 5, 5, significance=s)):
      with self.assertRaisesRegex(ValueError, 'significance='):
        call(significance)

  @parameterized.parameters(-1e-9, 1., math.nan, ([.1, .2],))
  def test_delta_is_refused_by_name(self, delta):
    for call in (
        lambda d: auditing.epsilon_ceiling(10, delta=d),
        lambda d: auditing.epsilon_lower_bound(1, 0, 5, 5, delta=d),
        lambda d: auditing.epsilon_point(1, 0, 5, 5, delta=d),
        lambda d: auditing.epsilon_lower_bound_assuming_gaussian_dp(
            1, 5, 1, 5, delta=d),
        lambda d: auditing.one_run_epsilon_lower_bound(5, 5, 5, delta=d)):
      with self.assertRaisesRegex(ValueError, 'delta='):
        call(delta)

  def test_gaussian_dp_has_no_epsilon_at_delta_zero(self):
    with self.assertRaisesRegex(ValueError, 'no Gaussian'):
      auditing.epsilon_lower_bound_assuming_gaussian_dp(1, 5, 1, 5, delta=0.)
    with self.assertRaisesRegex(ValueError, 'false_negatives=6'):
      auditing.epsilon_lower_bound_assuming_gaussian_dp(1, 5, 6, 5, delta=.1)

  @parameterized.parameters(0, -1, 1.5, math.nan, math.inf, ([1, 2],))
  def test_num_events_is_refused_by_name(self, num_events):
    for call in (
        lambda e: auditing.epsilon_ceiling(10, num_events=e),
        lambda e: auditing.epsilon_lower_bound(1, 0, 5, 5, num_events=e)):
      with self.assertRaisesRegex(ValueError, 'num_events='):
        call(num_events)

  @parameterized.parameters(
      ((0, 0, 0), 'num_canaries=0'), ((5, 6, 0), 'num_guesses=6'),
      ((5, 4, 5), 'num_correct=5'), ((5, 4, -1), 'num_correct=-1'),
      ((5, 2.5, 1), 'num_guesses=2.5'), ((5, [1], 1), 'num_guesses='))
  def test_one_run_counts_are_refused_by_name(self, counts, message):
    with self.assertRaisesRegex(ValueError, message):
      auditing.one_run_epsilon_lower_bound(*counts)

  def test_other_settings_are_refused_by_name(self):
    with self.assertRaisesRegex(ValueError, "direction='both' must be one of"):
      auditing.epsilon_lower_bound(1, 0, 5, 5, direction='both')
    with self.assertRaisesRegex(ValueError, 'num_directions=3'):
      auditing.epsilon_ceiling(10, num_directions=3)
    for num_trials in (0, 2.5, math.nan):
      with self.assertRaisesRegex(ValueError, 'num_trials='):
        auditing.epsilon_ceiling(num_trials)
    for epsilon in (-1., math.inf, math.nan):
      with self.assertRaisesRegex(ValueError, 'epsilon='):
        auditing.delta_lower_bound(1, 0, 5, 5, epsilon)
    for splits in ([], 3., [1., math.inf], [1., -1.], [math.nan]):
      with self.assertRaisesRegex(ValueError, 'bounds'):
        auditing.multi_split_bound(splits)


@unittest.skipIf(_MISSING, 'jax_privacy is not installed: pip install '
                 'jax-privacy==2.0.0 to compare with it')
class PeerTest(parameterized.TestCase):
  """jax_privacy 2.0.0, whose canary scores are the indicator of the event."""

  def _auditor(self, k, n, k_prime, n_prime):
    from jax_privacy import auditing as peer
    scores = [np.r_[np.ones(hits), np.zeros(num - hits)]
              for hits, num in ((k, n), (k_prime, n_prime))]
    return (peer.CanaryScoreAuditor(*scores),
            peer.Explicit(threshold=.5))

  @parameterized.product(
      counts=((900, 1000, 100, 800), (1000, 1000, 0, 900),
              (999, 1000, 970, 980), (30, 60, 10, 700),
              (500, 1000, 500, 1000)),
      delta=(0., 1e-5, .05), significance=(.05, .01))
  def test_clopper_pearson_agrees(self, counts, delta, significance):
    k, n, k_prime, n_prime = counts
    auditor, threshold = self._auditor(*counts)
    want = auditor.epsilon_clopper_pearson(
        significance, delta, one_sided=False, threshold_strategy=threshold)
    got = auditing.epsilon_lower_bound(
        k, k_prime, n, n_prime, delta=delta, significance=significance,
        direction='x')
    self.assertAlmostEqual(got.epsilon_lower, want, delta=1e-9)

  @parameterized.product(counts=((95, 1000, 5, 1000), (60, 70, 0, 80),
                                 (700, 1000, 300, 1000)),
                         delta=(1e-12, 1e-5, 1e-3), significance=(.05, .01))
  def test_one_run_agrees(self, counts, delta, significance):
    k, n, k_prime, n_prime = counts
    auditor, threshold = self._auditor(*counts)
    want = auditor.epsilon_one_run(
        significance, delta, threshold_strategy=threshold)
    got = auditing.one_run_epsilon_lower_bound(
        n + n_prime, k + k_prime, k, delta=delta, significance=significance)
    self.assertAlmostEqual(got, want, delta=1e-6)

  @parameterized.parameters(1e-9, 1e-5, .01)
  def test_gaussian_dp_agrees_where_the_peer_is_valid(self, delta):
    auditor, _ = self._auditor(700, 1000, 200, 900)
    # It divides by its three operating points; two of them show nothing.
    want = auditor.epsilon_from_gdp(.05, delta, eps_tol=1e-12)
    got = auditing.epsilon_lower_bound_assuming_gaussian_dp(
        200, 900, 300, 1000, delta=delta, significance=.05 / 3)
    self.assertAlmostEqual(got.epsilon_lower, want, delta=1e-9)


class ModuleTest(absltest.TestCase):

  def test_every_public_name_is_exported(self):
    for name in ('epsilon_ceiling', 'epsilon_lower_bound', 'epsilon_point',
                 'delta_lower_bound', 'one_run_epsilon_lower_bound',
                 'epsilon_lower_bound_assuming_gaussian_dp', 'EpsilonBound',
                 'multi_split_bound', 'GaussianDpBound'):
      self.assertIs(getattr(auditing, name), getattr(bounds, name))


if __name__ == '__main__':
  absltest.main()
