"""Intervals by enumeration of the binomial, SciPy and the papers' formulas."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import scipy.stats

from jaxdp import confidence

_SIGNIFICANCES = (0.05, 0.2, 1e-3)


def _coverage(low, high, num_trials, probabilities):
  """P(low[k] <= p <= high[k]) with k binomial, for each p: by enumeration."""
  k = np.arange(num_trials + 1)
  pmf = scipy.stats.binom.pmf(k[None], num_trials, probabilities[:, None])
  inside = ((low[None] <= probabilities[:, None])
            & (probabilities[:, None] <= high[None]))
  return (pmf * inside).sum(axis=1)


def _worst_coverage(low, high, num_trials):
  """The least coverage over a grid and just outside each interval's ends."""
  ends = np.concatenate([low, high])
  probabilities = np.concatenate(
      [np.linspace(0., 1., 501), ends - 1e-9, ends + 1e-9])
  probabilities = np.clip(probabilities, 0., 1.)
  return _coverage(low, high, num_trials, probabilities).min()


def _bernoulli_moments(num_trials):
  """Sample mean and variance (ddof=1) of k ones among num_trials."""
  mean = np.arange(num_trials + 1) / num_trials
  return mean, mean * (1. - mean) * num_trials / (num_trials - 1)


class ClopperPearsonTest(parameterized.TestCase):

  @parameterized.product(
      num_trials=(1, 2, 7, 50, 200), significance=_SIGNIFICANCES,
      side=('two-sided', 'lower', 'upper'))
  def test_covers_every_probability_and_not_by_luck(
      self, num_trials, significance, side):
    k = np.arange(num_trials + 1)
    low, high = confidence.clopper_pearson(
        k, num_trials, significance=significance, side=side)
    worst = _worst_coverage(low, high, num_trials)
    self.assertGreaterEqual(worst, 1. - significance - 1e-12)
    if side != 'two-sided':
      # Tight at its own ends: probed 1e-9 outside, where the slope is below n.
      self.assertLess(worst, 1. - significance + 1e-6)
    if num_trials >= 50:
      low, high = confidence.clopper_pearson(
          k, num_trials, significance=2. * significance, side=side)
      worst = _worst_coverage(low, high, num_trials)
      self.assertLess(worst, 1. - significance)

  @parameterized.product(
      num_trials=(1, 10, 333, 100_000), significance=_SIGNIFICANCES)
  def test_agrees_with_scipy_on_every_side(self, num_trials, significance):
    counts = sorted({0, 1, num_trials // 3, num_trials - 1, num_trials})
    sides = {'two-sided': 'two-sided', 'lower': 'greater', 'upper': 'less'}
    for side, alternative in sides.items():
      for k in counts:
        expected = scipy.stats.binomtest(
            k, num_trials, alternative=alternative).proportion_ci(
                1. - significance, method='exact')
        got = confidence.clopper_pearson(
            k, num_trials, significance=significance, side=side)
        # SciPy's interval is a root found to an absolute 2e-12.
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=4e-12)

  def test_ends_solve_the_binomial_tails_at_a_tiny_significance(self):
    significance, n = 1e-30, 1000
    k = np.array([1, 20, 500, 900])
    low, high = confidence.clopper_pearson(k, n, significance=significance)
    np.testing.assert_allclose(
        scipy.stats.binom.sf(k - 1, n, low), significance / 2., rtol=1e-8)
    np.testing.assert_allclose(
        scipy.stats.binom.cdf(k, n, high), significance / 2., rtol=1e-8)

  @parameterized.parameters(1, 5, 1000)
  def test_all_or_nothing_has_a_closed_form(self, n):
    low, high = confidence.clopper_pearson([0, n], n, significance=0.05)
    root = 0.025**(1. / n)
    np.testing.assert_allclose(low, [0., root], rtol=1e-12)
    np.testing.assert_allclose(high, [1. - root, 1.], rtol=1e-12)

  def test_published_bounds_of_a_split_significance(self):
    # Votes of two classes of ten, each bound one-sided at 0.05 / 10.
    significance = 0.05 / 10
    for n, k_top, k_next, low, high in (
        (2000, 2000, 0, .99735, .00265), (1000, 1000, 0, .99472, .00528),
        (300, 280, 15, .88726, .09183)):
      got_low, _ = confidence.clopper_pearson(
          k_top, n, side='lower', significance=significance)
      _, got_high = confidence.clopper_pearson(
          k_next, n, side='upper', significance=significance)
      self.assertAlmostEqual(got_low, low, delta=6e-6)
      self.assertAlmostEqual(got_high, high, delta=6e-6)

  def test_arrays_broadcast_and_scalars_stay_scalars(self):
    low, high = confidence.clopper_pearson(
        np.arange(3)[:, None], np.array([5, 10]), significance=0.05)
    self.assertEqual((low.shape, high.shape), ((3, 2), (3, 2)))
    self.assertEqual((low.dtype, high.dtype), (np.float64, np.float64))
    one = confidence.clopper_pearson(2, 10, significance=0.05)
    self.assertEqual(np.ndim(one[0]), 0)
    np.testing.assert_array_equal(one, (low[2, 1], high[2, 1]))
    empty, _ = confidence.clopper_pearson([], 4, significance=0.05)
    self.assertEqual(empty.shape, (0,))

  @parameterized.parameters(
      (3, 2, 'successes=3'), (-1, 2, 'successes=-1'), (0.5, 2, 'successes=0.5'),
      (np.nan, 2, 'successes=nan'), ([1, 9], 8, 'successes=9'),
      (0, 0, 'trials=0'), (0, 2.5, 'trials=2.5'), (0, np.inf, 'trials=inf'),
      (0, 2.**54, 'trials=1.8'))
  def test_impossible_counts_are_refused_by_name(self, k, n, message):
    with self.assertRaisesRegex(ValueError, message):
      confidence.clopper_pearson(k, n, significance=0.05)


class HoeffdingTest(parameterized.TestCase):

  @parameterized.product(
      num_trials=(2, 30, 200), significance=_SIGNIFICANCES,
      side=('two-sided', 'lower', 'upper'))
  def test_covers_every_coin(self, num_trials, significance, side):
    mean, _ = _bernoulli_moments(num_trials)
    low, high = confidence.hoeffding(
        mean, num_trials, significance=significance, side=side)
    self.assertGreaterEqual(
        _worst_coverage(low, high, num_trials), 1. - significance - 1e-12)

  def test_half_the_width_would_not_cover(self):
    mean, _ = _bernoulli_moments(200)
    low, high = confidence.hoeffding(mean, 200, significance=0.05)
    low, high = (low + mean) / 2., (high + mean) / 2.
    self.assertLess(_worst_coverage(low, high, 200), 0.95)

  def test_width_solves_the_tail_bound(self):
    for significance in _SIGNIFICANCES:
      low, high = confidence.hoeffding(0.5, 1000, significance=significance)
      for deviation in (0.5 - low, high - 0.5):
        # Hoeffding (1963), eq. (2.3), for both sides.
        np.testing.assert_allclose(
            2. * np.exp(-2. * 1000 * deviation**2), significance, rtol=1e-10)

  def test_is_cut_to_the_unit_interval(self):
    low, high = confidence.hoeffding([0., 1.], 3, significance=0.05)
    self.assertEqual((low[0], high[1]), (0., 1.))

  @parameterized.parameters(
      (1.1, 5, 'mean=1.1'), (-.1, 5, 'mean=-0.1'), (np.nan, 5, 'mean=nan'),
      (.5, 0, 'trials=0'), ([.5, 2.], 5, 'mean=2.0'))
  def test_impossible_samples_are_refused_by_name(self, mean, n, message):
    with self.assertRaisesRegex(ValueError, message):
      confidence.hoeffding(mean, n, significance=0.05)


class EmpiricalBernsteinTest(parameterized.TestCase):

  @parameterized.product(
      num_trials=(2, 30, 400), significance=_SIGNIFICANCES,
      side=('two-sided', 'lower', 'upper'))
  def test_covers_every_coin(self, num_trials, significance, side):
    mean, variance = _bernoulli_moments(num_trials)
    low, high = confidence.empirical_bernstein(
        mean, variance, num_trials, significance=significance, side=side)
    self.assertGreaterEqual(
        _worst_coverage(low, high, num_trials), 1. - significance - 1e-12)

  def test_a_third_of_the_width_would_not_cover(self):
    mean, variance = _bernoulli_moments(400)
    low, high = confidence.empirical_bernstein(
        mean, variance, 400, significance=0.05)
    low, high = mean + (low - mean) / 3., mean + (high - mean) / 3.
    self.assertLess(_worst_coverage(low, high, 400), 0.95)

  def test_matches_the_theorem_on_a_sample(self):
    z = np.random.default_rng(0).beta(2., 5., size=100)
    n, significance = z.size, 0.1
    # Maurer and Pontil (2009): V_n is defined over pairs, delta per side.
    pairs = (z[:, None] - z[None, :])**2
    variance = pairs[np.triu_indices(n, 1)].sum() / (n * (n - 1))
    log_term = np.log(2. / (significance / 2.))
    deviation = (np.sqrt(2. * variance * log_term / n)
                 + 7. * log_term / (3. * (n - 1)))
    got = confidence.empirical_bernstein(
        z.mean(), z.var(ddof=1), n, significance=significance)
    np.testing.assert_allclose(
        got, (z.mean() - deviation, z.mean() + deviation), rtol=1e-12)

  def test_beats_hoeffding_only_where_the_docstring_says(self):
    def widths(variance, n):
      low, high = confidence.empirical_bernstein(
          0.5, variance, n, significance=0.05)
      other_low, other_high = confidence.hoeffding(0.5, n, significance=0.05)
      return high - low, other_high - other_low
    for variance, n, beats in (
        (0., 59, True), (0., 58, False), (0.2, 10**7, True),
        (0.211, 10**9, False)):
      bernstein, hoeffding = widths(variance, n)
      self.assertEqual(bernstein < hoeffding, beats)

  @parameterized.parameters(
      (.5, .1, 1, 'trials=1'), (.5, -.1, 9, 'variance=-0.1'),
      (.5, .3, 9, 'variance=0.3'), (.5, np.nan, 9, 'variance=nan'),
      (1.5, .1, 9, 'mean=1.5'), (.5, .1, [9, 2.5], 'trials=2.5'))
  def test_impossible_samples_are_refused_by_name(
      self, mean, variance, n, message):
    with self.assertRaisesRegex(ValueError, message):
      confidence.empirical_bernstein(mean, variance, n, significance=0.05)

  def test_the_largest_variance_of_a_sample_is_accepted(self):
    z = np.array([0., 1.])
    confidence.empirical_bernstein(
        z.mean(), z.var(ddof=1), 2, significance=0.05)


_INTERVALS = {
    'clopper_pearson':
        lambda **kw: confidence.clopper_pearson(300, 1000, **kw),
    'hoeffding': lambda **kw: confidence.hoeffding(0.3, 1000, **kw),
    'empirical_bernstein':
        lambda **kw: confidence.empirical_bernstein(0.3, 0.1, 1000, **kw),
}


@parameterized.parameters(*_INTERVALS)
class EveryIntervalTest(parameterized.TestCase):

  def test_significance_changes_the_result(self, name):
    interval = _INTERVALS[name]
    for side in ('two-sided', 'lower', 'upper'):
      widths = []
      for significance in (1e-9, 1e-3, 0.05, 0.2, 0.49):
        low, high = interval(significance=significance, side=side)
        widths.append(high - low)
      self.assertTrue(np.all(np.diff(widths) < 0.), msg=f'{side} {widths}')

  def test_two_sides_split_the_significance(self, name):
    interval = _INTERVALS[name]
    low, high = interval(significance=0.1)
    self.assertEqual(interval(significance=0.05, side='lower'), (low, 1.))
    self.assertEqual(interval(significance=0.05, side='upper'), (0., high))

  def test_bad_settings_are_refused_by_name(self, name):
    interval = _INTERVALS[name]
    for significance in (0., 0.5, 0.95, 1., -0.1, np.nan, np.array([.1, .2])):
      with self.assertRaisesRegex(ValueError, 'significance=.*one number in'):
        interval(significance=significance)
    with self.assertRaisesRegex(ValueError, "side='both' must be one of"):
      interval(significance=0.05, side='both')

  def test_significance_has_no_default(self, name):
    with self.assertRaises(TypeError):
      _INTERVALS[name]()


if __name__ == '__main__':
  absltest.main()
