"""Integer laws on numbers: exact masses, exact ratios, and what is drawn."""

import fractions
import itertools
import math
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.stats

from jaxdp import guarantees
from jaxdp import samplers
from jaxdp import threefry
from jaxdp.mechanisms import numeric
from jaxdp.mechanisms.numeric import adept_repairs
from jaxdp.mechanisms.numeric import laws

_FALSE_ALARM = 1e-3
_TOTAL = 2**64
_NUM = 1_000_000  # one shape: one compilation a mechanism
_laplace = jax.jit(numeric.grid_laplace)
_adept = jax.jit(numeric.adept)


def _chi_square(outcomes, masses):
  """P-value of outcome indices; cells expecting under 10 are pooled."""
  counts = np.bincount(outcomes, minlength=len(masses))
  expected = np.asarray(masses, np.float64) * (outcomes.size / _TOTAL)
  rare = expected < 10
  observed = np.append(counts[~rare], counts[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  if expected[-1] < 10:
    observed, expected = observed[:-1], expected[:-1]
    expected = expected * observed.sum() / expected.sum()
  return scipy.stats.chisquare(observed, expected).pvalue


def _log(a, b):
  with mpmath.workdps(60):
    return mpmath.log(mpmath.mpf(int(a)) / int(b))


def _steepest(rows, distance):
  """Largest |log ratio| / distance over all inputs and outputs, mpmath."""
  best = mpmath.mpf(0)
  with mpmath.workdps(60):
    for i, j in itertools.combinations(range(len(rows)), 2):
      ratios = (fractions.Fraction(max(a, b), min(a, b))
                for a, b in zip(rows[i], rows[j]))
      worst = max(ratios)
      best = max(best, _log(worst.numerator, worst.denominator)
                 / distance(i, j))
  return best


def _ints(masses):
  return [[int(mass) for mass in row] for row in masses]


def _small_laplace(scale=1.):
  return numeric.calibrate_grid_laplace(scale=scale, grid=0.125, low=-4.,
                                        high=4.)


def _scores():
  return np.random.default_rng(0).uniform(0, 2, (5, 9))


_GRIDS = (  # scale, grid, low, high: usual, rare tails, flat, two outputs
    (1., 0.125, -2., 2.), (0.3, 0.25, -1., 8.), (0.01, 0.5, 0., 6.),
    (1e-9, 1., 0., 3.), (700., 1., -9., 11.), (3., 2., 0., 2.),
    (1 / 3, 2.**-5, 1., 2.))


class IntegerLawTest(parameterized.TestCase):

  def test_masses_and_thresholds_are_each_other_s_inverse(self):
    masses = [1, 2**63 - 3, 5, 2**32, 2**63 - 2**32 - 3]
    cuts = laws.thresholds(masses)
    self.assertEqual(cuts.dtype, np.uint32)
    self.assertEqual(laws.masses(cuts).tolist(), masses)

  def test_bits_on_both_sides_of_each_threshold_fall_where_they_should(self):
    masses = [1, 2**32 - 1, 2**40, 3, 2**63, 7]
    masses.append(_TOTAL - sum(masses))
    cuts = laws.thresholds(masses)
    edges = list(itertools.accumulate(masses))[:-1]
    bits = [0, _TOTAL - 1] + [e + d for e in edges for d in (-1, 0, 1)]
    words = np.array([divmod(b, 2**32) for b in bits], np.uint32).T
    with mock.patch.object(threefry, 'words', return_value=jnp.asarray(words)):
      out = laws.draw(None, (len(bits),), cuts)
    expected = [sum(edge <= b for edge in edges) for b in bits]
    self.assertEqual(out.tolist(), expected)

  @parameterized.parameters(2, 9, 300)
  def test_the_search_draws_what_counting_every_threshold_draws(self, num):
    masses = [_TOTAL // num] * (num - 1)
    cuts = laws.thresholds(masses + [_TOTAL - sum(masses)])
    out = laws.draw(jax.random.key(1), (1000,), cuts)
    counted = samplers.categorical(jax.random.key(1), (1000,), thresholds=cuts)
    np.testing.assert_array_equal(out, counted)
    self.assertGreater(len(set(out.tolist())), min(num - 1, 200))

  @parameterized.parameters(
      (2, 1), (2**64 - 1, 1), (10**18 + 1, 10**18), (3 * 10**18, 10**18 + 7))
  def test_a_logarithm_is_rounded_up_by_one_ulp_at_most(self, a, b):
    value, exact = laws.log_rounded_up((a, b)), _log(a, b)
    self.assertGreaterEqual(value, exact)
    self.assertLess(math.nextafter(value, 0), exact)
    self.assertEqual(laws.log_rounded_up((b, b)), 0.)


class GridLaplaceTest(parameterized.TestCase):

  @parameterized.parameters(*_GRIDS)
  def test_no_pair_of_inputs_passes_epsilon_and_one_attains_it(
      self, scale, grid, low, high):
    params = numeric.calibrate_grid_laplace(scale=scale, grid=grid, low=low,
                                            high=high)
    rows = _ints(params.masses(params.outputs))
    for row in rows:
      self.assertEqual(sum(row), _TOTAL)
      self.assertGreaterEqual(min(row), 1)
    steepest = _steepest(rows, lambda i, j: abs(i - j) * grid)
    epsilon = params.guarantee.epsilon
    self.assertGreaterEqual(epsilon, steepest)
    self.assertLess(math.nextafter(epsilon, 0), steepest)
    self.assertLessEqual(epsilon, math.nextafter(1 / scale, math.inf))
    self.assertAlmostEqual(params.max_log_ratio / (epsilon * grid), 1,
                           places=14)

  @parameterized.parameters(*_GRIDS)
  def test_masses_are_the_clamped_noise_counted_by_hand(
      self, scale, grid, low, high):
    params = numeric.calibrate_grid_laplace(scale=scale, grid=grid, low=low,
                                            high=high)
    noise = [int(m) for m in laws.masses(params.thresholds)]
    steps = int((high - low) / grid)
    self.assertEqual(int(params.offset), steps)
    rows = _ints(params.masses(params.outputs))
    for x in range(steps + 1):
      expected = [0] * (steps + 1)
      for n, mass in zip(range(-steps, steps + 1), noise):
        expected[min(max(x + n, 0), steps)] += mass
      self.assertEqual(rows[x], expected)

  @parameterized.parameters((1., 0.125, 4.), (3., 0.25, 8.), (0.5, 0.25, 4.))
  def test_the_law_is_discrete_laplace_noise_clamped(self, scale, grid, high):
    params = numeric.calibrate_grid_laplace(scale=scale, grid=grid, low=-high,
                                            high=high)
    reach = int(params.offset)
    with mpmath.workdps(50):
      q = mpmath.exp(-mpmath.mpf(grid) / mpmath.mpf(scale))
      law = [q**abs(n) * (1 - q) / (1 + q) for n in range(-reach, reach + 1)]
      law[0] = law[-1] = q**reach / (1 + q)
      self.assertLess(abs(sum(law) - 1), 1e-45)
      masses = [int(m) for m in laws.masses(params.thresholds)]
      distance = sum(abs(m - p * _TOTAL) for m, p in zip(masses, law)) / 2
      self.assertLess(distance / _TOTAL,
                      2.**-62 * reach * (scale + grid) / grid)

  def test_a_grid_of_256_a_unit_has_epsilon_one_to_the_last_digit(self):
    params = numeric.calibrate_grid_laplace(scale=1., grid=2.**-8, low=-10.,
                                            high=10.)
    self.assertEqual(params.thresholds.shape, (10240, 2))
    self.assertEqual(params.guarantee.epsilon, 1.)  # golden; at most 1 + 1e-11
    self.assertEqual(params.max_log_ratio, 2.**-8)
    masses = laws.masses(params.thresholds)
    self.assertEqual(masses.min(), 74551562)  # golden, 20 scales out

  def test_rounding_a_cdf_down_instead_would_break_the_promise(self):
    grid, reach = 2.**-8, 5120
    with mpmath.workdps(40):
      q = mpmath.exp(-mpmath.mpf(grid))
      below = [int(mpmath.floor(q**n / (1 + q) * _TOTAL))  # F(-n)
               for n in range(reach, reach - 40, -1)]
    cells = np.diff(np.array(below, dtype=object))
    worst = max(_log(max(a, b), min(a, b)) / grid
                for a, b in zip(cells[1:], cells[:-1]))
    self.assertGreater(worst, 1 + 1e-6)

  def test_the_guarantee_says_integers_and_not_real_arithmetic(self):
    guarantee = _small_laplace().guarantee
    self.assertEqual(guarantee.status, 'proved')
    self.assertEqual((guarantee.metric, guarantee.unit, guarantee.delta),
                     ('l1', 'per unit distance', 0.))
    self.assertCountEqual(
        guarantee.conditions,
        [guarantees.INTEGER_GRID, guarantees.IDEAL_RANDOM_BITS])

  @parameterized.parameters(0., 3.5)
  def test_a_million_draws_match_log_prob_and_reject_another_scale(self, x):
    params = _small_laplace()
    out = numeric.grid_laplace(jax.random.key(3), np.full(_NUM, x), params)
    index = np.asarray(out / 0.125 + 32, np.int64)
    np.testing.assert_array_equal(params.outputs[index], out)
    law = np.exp(params.log_prob(x)) * _TOTAL
    self.assertGreater(_chi_square(index, law), _FALSE_ALARM)
    wrong = _small_laplace(1.05).masses(x)
    self.assertLess(_chi_square(index, wrong), _FALSE_ALARM)

  @pytest.mark.slow
  def test_ten_million_draws_of_the_fine_grid_match_log_prob(self):
    grid = {'grid': 2.**-8, 'low': -10., 'high': 10.}
    params = numeric.calibrate_grid_laplace(scale=1., **grid)
    total = [numeric.grid_laplace(jax.random.key(i), np.full(_NUM, 1.25),
                                  params) for i in range(10)]
    index = np.asarray(np.concatenate(total) * 256 + 2560, np.int64)
    self.assertGreater(_chi_square(index, params.masses(1.25)), _FALSE_ALARM)
    wrong = numeric.calibrate_grid_laplace(scale=1.01, **grid).masses(1.25)
    self.assertLess(_chi_square(index, wrong), _FALSE_ALARM)

  def test_shape_jit_and_vmap_do_not_show(self):
    params = _small_laplace()
    x = np.linspace(-4, 4, 24).astype(np.float32)
    key = jax.random.key(0)
    out = numeric.grid_laplace(key, x, params)
    self.assertEqual(out.dtype, jnp.float32)
    self.assertGreater(float(jnp.std(out - x)), 0.3)
    other = numeric.grid_laplace(key, x.reshape(2, 3, 4), params)
    np.testing.assert_array_equal(other.reshape(-1), out)
    np.testing.assert_array_equal(_laplace(key, x, params), out)
    keys = jax.random.split(key, 2)
    batched = jax.vmap(numeric.grid_laplace, (0, None, None))(keys, x, params)
    for one, row in zip(keys, batched):
      np.testing.assert_array_equal(row, numeric.grid_laplace(one, x, params))
    self.assertFalse(bool((batched[0] == batched[1]).all()))
    self.assertEqual(numeric.grid_laplace(key, 1., params).shape, ())
    self.assertEqual(numeric.grid_laplace(key, np.zeros((0, 2)), params).shape,
                     (0, 2))

  def test_inputs_round_to_the_grid_with_ties_to_even(self):
    params = _small_laplace(1e-6)
    x = np.array([-2.5, -1.5, -0.5, 0.49, 0.5, 1.5, 2.5, 2.51] * 3) / 8
    rounded = np.array([-2., -2., 0., 0., 0., 2., 2., 3.] * 3) / 8
    np.testing.assert_array_equal(  # noise has probability 2**-57 here
        numeric.grid_laplace(jax.random.key(0), x, params), rounded)
    np.testing.assert_array_equal(params.masses(x), params.masses(rounded))

  def test_traced_inputs_out_of_range_are_clamped_and_concrete_refused(self):
    params = _small_laplace()
    key = jax.random.key(5)
    wild = np.float32([-np.inf, -4.001, 4.001, 3e38, np.inf, np.nan] * 4)
    tame = np.float32([-4., -4., 4., 4., 4., -4.] * 4)
    np.testing.assert_array_equal(_laplace(key, wild, params),
                                  numeric.grid_laplace(key, tame, params))
    for value in wild[:6].tolist():
      with self.assertRaisesRegex(ValueError, 'x holds'):
        numeric.grid_laplace(key, np.array([0., value]), params)
      with self.assertRaisesRegex(ValueError, 'x holds'):
        params.log_prob(value)
    with self.assertRaisesRegex(ValueError, 'dtype'):
      numeric.grid_laplace(key, np.array([True]), params)

  def test_a_vector_spends_the_sum_of_its_distances(self):
    params = _small_laplace()
    x, other = np.array([0., 1., -3.]), np.array([0.5, -1., -3.])
    gap = np.abs(params.log_prob(x) - params.log_prob(other)).max(-1).sum()
    bound = params.guarantee.epsilon * np.abs(x - other).sum()
    self.assertLessEqual(gap, bound + 1e-12)  # float64 logs
    self.assertGreater(gap, 0.99 * bound)

  @parameterized.parameters(
      ('scale', 0.), ('scale', -1.), ('scale', math.nan), ('scale', math.inf),
      ('scale', '1'), ('scale', 2.**18 + 1), ('grid', 0.), ('grid', 0.3),
      ('grid', 3.), ('grid', -0.25), ('grid', math.nan), ('grid', 2.**-101),
      ('low', 4.), ('low', 5.), ('low', -0.1), ('low', math.nan),
      ('low', -math.inf), ('high', 4.1), ('high', 2.**23), ('high', 2.**18),
      ('high', math.inf), ('high', math.nan))
  def test_bad_settings_are_refused_by_name(self, name, value):
    settings = {'scale': 1., 'grid': 0.25, 'low': -4., 'high': 4.}
    with self.assertRaisesRegex(ValueError, name):
      numeric.calibrate_grid_laplace(**settings | {name: value})


class GridExponentialTest(parameterized.TestCase):

  @parameterized.product(epsilon=(2.**-20, 0.5, 3., 200.))
  def test_no_pair_of_inputs_passes_epsilon(self, epsilon):
    params = numeric.calibrate_grid_exponential(_scores(), epsilon=epsilon,
                                                sensitivity=2.)
    rows = _ints(params.masses(np.arange(5)))
    for row in rows:
      self.assertEqual(sum(row), _TOTAL)
      self.assertGreaterEqual(min(row), 2**32)
    steepest = _steepest(rows, lambda i, j: 1)
    self.assertGreaterEqual(params.guarantee.epsilon, steepest)
    self.assertLess(math.nextafter(params.guarantee.epsilon, 0), steepest)
    self.assertLessEqual(params.guarantee.epsilon, epsilon)
    self.assertNotIn(guarantees.REAL_ARITHMETIC, params.guarantee.conditions)
    self.assertTrue(params.guarantee.is_pure)

  def test_the_law_is_the_exponential_mechanism(self):
    logits = _scores() * 3. / 4.
    law = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    params = numeric.calibrate_grid_exponential(_scores(), epsilon=3.,
                                                sensitivity=2.)
    ours = np.exp(params.log_prob(np.arange(5)))
    distance = np.abs(ours - law).sum(-1).max() / 2
    self.assertLess(distance, 9 * 2.**-32 + 2.**-30)

  def test_opposite_inputs_spend_nearly_all_of_epsilon(self):
    params = numeric.calibrate_grid_exponential(
        np.array([[1.] + [0.] * 999, [0.] + [1.] * 999]), epsilon=1.,
        sensitivity=1.)
    # e^(1/2) from the weight, nearly e^(1/2) from the normaliser.
    self.assertGreater(params.guarantee.epsilon, 0.99)
    self.assertLess(params.guarantee.epsilon, 1.)

  def test_a_million_draws_match_log_prob_and_reject_another_epsilon(self):
    make = numeric.calibrate_grid_exponential
    params = make(_scores(), epsilon=3., sensitivity=2.)
    ids = np.arange(_NUM) % 5
    out = np.asarray(numeric.grid_exponential(jax.random.key(0), ids, params))
    wrong = make(_scores(), epsilon=3. / 1.05, sensitivity=2.)
    for i in (0, 4):
      mine = out[ids == i]
      law = np.exp(params.log_prob(i)) * _TOTAL
      self.assertGreater(_chi_square(mine, law), _FALSE_ALARM)
      self.assertLess(_chi_square(mine, wrong.masses(i)), _FALSE_ALARM)

  def test_shape_jit_and_vmap_do_not_show(self):
    params = numeric.calibrate_grid_exponential(_scores(), epsilon=3.,
                                                sensitivity=2.)
    key, ids = jax.random.key(0), np.arange(24, dtype=np.int32) % 5
    out = numeric.grid_exponential(key, ids, params)
    self.assertEqual(out.dtype, jnp.int32)
    other = numeric.grid_exponential(key, ids.reshape(4, 6), params)
    np.testing.assert_array_equal(other.reshape(-1), out)
    wild = np.where(ids == 4, 99, np.where(ids == 0, -7, ids))
    jitted = jax.jit(numeric.grid_exponential)(key, wild, params)
    np.testing.assert_array_equal(jitted, out)
    keys = jax.random.split(key, 2)
    rows = jax.vmap(numeric.grid_exponential, (0, None, None))(keys, ids,
                                                               params)
    np.testing.assert_array_equal(
        rows[1], numeric.grid_exponential(keys[1], ids, params))

  def test_bad_settings_are_refused_by_name(self):
    make = numeric.calibrate_grid_exponential
    good = {'scores': _scores(), 'epsilon': 1., 'sensitivity': 2.}
    for name, value, word in (
        ('scores', [1., 2.], 'scores'), ('scores', [[1.]], 'scores'),
        ('scores', [[1., math.nan]], 'scores'),
        ('scores', np.zeros((1, 2**16 + 1)), 'scores'),
        ('epsilon', 0., 'epsilon'), ('epsilon', 1e-9, 'epsilon'),
        ('epsilon', math.nan, 'epsilon'), ('epsilon', math.inf, 'epsilon'),
        ('sensitivity', 0., 'sensitivity'), ('sensitivity', 1., 'sensitivity')):
      with self.assertRaisesRegex(ValueError, word):
        make(**good | {name: value})
    params = make(**good)
    for ids in ([5], [-1], [0.]):
      with self.assertRaisesRegex(ValueError, 'ids'):
        numeric.grid_exponential(jax.random.key(0), np.array(ids), params)


class RandomizedResponseTest(parameterized.TestCase):

  @parameterized.product(num=(2, 3, 10), epsilon=(1e-6, 0.1, 1., 7.3, 60.))
  def test_the_ratio_stays_below_epsilon_and_near_it(self, num, epsilon):
    params = numeric.calibrate_randomized_response(num_categories=num,
                                                   epsilon=epsilon)
    rows = _ints(params.masses(np.arange(num)))
    for x, row in enumerate(rows):
      self.assertEqual(sum(row), _TOTAL)
      self.assertGreaterEqual(min(row), 1)
      self.assertEqual(row.index(max(row)), x)
    steepest = _steepest(rows, lambda i, j: 1)
    stated = params.guarantee.epsilon
    self.assertGreaterEqual(stated, steepest)
    self.assertLess(math.nextafter(stated, 0), steepest)
    self.assertLessEqual(steepest, mpmath.mpf(epsilon))
    self.assertLessEqual(stated, epsilon)
    if epsilon < 10:  # one unit of the least mass, either way
      self.assertGreaterEqual(stated, epsilon - num / float(min(rows[0])))
    self.assertNotIn(guarantees.REAL_ARITHMETIC, params.guarantee.conditions)

  def test_the_law_is_k_ary_randomised_response(self):
    params = numeric.calibrate_randomized_response(num_categories=4,
                                                   epsilon=1.5)
    law = np.where(np.eye(4), math.exp(1.5), 1.) / (math.exp(1.5) + 3)
    np.testing.assert_allclose(np.exp(params.log_prob(np.arange(4))), law,
                               rtol=1e-14)

  def test_a_million_draws_match_log_prob_and_reject_another_epsilon(self):
    make = numeric.calibrate_randomized_response
    params = make(num_categories=5, epsilon=1.)
    x = np.full(_NUM, 3)
    out = np.asarray(numeric.randomized_response(jax.random.key(0), x, params))
    law = np.exp(params.log_prob(3)) * _TOTAL
    self.assertGreater(_chi_square(out, law), _FALSE_ALARM)
    wrong = make(num_categories=5, epsilon=1 / 1.05).masses(3)
    self.assertLess(_chi_square(out, wrong), _FALSE_ALARM)

  def test_the_estimate_has_the_right_expectation_for_every_input(self):
    params = numeric.calibrate_randomized_response(num_categories=6,
                                                   epsilon=0.7)
    of_output = np.stack([numeric.estimate_frequencies([y], params)
                          for y in range(6)])
    expected = np.exp(params.log_prob(np.arange(6))) @ of_output
    np.testing.assert_allclose(expected, np.eye(6), atol=1e-13)

  def test_the_estimate_of_drawn_outputs_is_near_and_the_raw_counts_not(self):
    params = numeric.calibrate_randomized_response(num_categories=5,
                                                   epsilon=1.)
    truth = np.array([0.4, 0.3, 0.2, 0.1, 0.])
    x = np.repeat(np.arange(5), (truth * _NUM).astype(int))
    out = numeric.randomized_response(jax.random.key(2), x, params)
    estimate = numeric.estimate_frequencies(out, params)
    p, q = np.exp(params.log_prob(0))[:2]
    share = truth * p + (1 - truth) * q
    deviation = np.sqrt(share * (1 - share) / _NUM) / (p - q)
    # Normal, five entries, both sides: 4 deviations fail with 3e-4.
    np.testing.assert_array_less(np.abs(estimate - truth), 4 * deviation)
    raw = np.bincount(np.asarray(out)) / _NUM
    self.assertGreater(np.abs(raw - truth).max(), 40 * deviation.max())
    self.assertAlmostEqual(estimate.sum(), 1., places=12)

  def test_shape_jit_and_vmap_do_not_show(self):
    params = numeric.calibrate_randomized_response(num_categories=5,
                                                   epsilon=1.)
    key, x = jax.random.key(0), np.arange(24, dtype=np.uint8) % 5
    out = numeric.randomized_response(key, x, params)
    self.assertEqual(out.dtype, jnp.int32)
    self.assertTrue(0 < int((out != x).sum()) < 24)
    other = numeric.randomized_response(key, x.reshape(4, 6), params)
    np.testing.assert_array_equal(other.reshape(-1), out)
    wild = np.where(x == 4, 99, np.where(x == 0, -7, x.astype(np.int32)))
    jitted = jax.jit(numeric.randomized_response)(key, wild, params)
    np.testing.assert_array_equal(jitted, out)
    keys = jax.random.split(key, 2)
    rows = jax.vmap(numeric.randomized_response, (0, None, None))(keys, x,
                                                                  params)
    np.testing.assert_array_equal(
        rows[1], numeric.randomized_response(keys[1], x, params))

  @parameterized.parameters(
      ('num_categories', 1), ('num_categories', 2.), ('num_categories', True),
      ('num_categories', 2**20 + 1), ('epsilon', 0.), ('epsilon', -1.),
      ('epsilon', math.nan), ('epsilon', math.inf), ('epsilon', 1e-19))
  def test_bad_settings_are_refused_by_name(self, name, value):
    with self.assertRaisesRegex(ValueError, name):
      numeric.calibrate_randomized_response(
          **{'num_categories': 3, 'epsilon': 1.} | {name: value})

  def test_bad_inputs_and_outputs_are_refused(self):
    params = numeric.calibrate_randomized_response(num_categories=3,
                                                   epsilon=1.)
    for x in ([3], [-1], [1.], [True]):
      with self.assertRaisesRegex(ValueError, 'x h'):
        numeric.randomized_response(jax.random.key(0), np.array(x), params)
      with self.assertRaisesRegex(ValueError, 'outputs'):
        numeric.estimate_frequencies(np.array(x), params)
    with self.assertRaisesRegex(ValueError, 'empty'):
      numeric.estimate_frequencies(np.zeros(0, int), params)


def _delta_oracle(multiplier, epsilon):
  """Balle & Wang (2018), Theorem 8, at 60 digits."""
  s, epsilon = mpmath.mpf(multiplier), mpmath.mpf(epsilon)
  return (mpmath.ncdf(1 / (2 * s) - epsilon * s)
          - mpmath.exp(epsilon) * mpmath.ncdf(-1 / (2 * s) - epsilon * s))


class AdeptTest(parameterized.TestCase):

  @parameterized.parameters(
      (1., 1e-5), (0.1, 1e-6), (10., 1e-9), (50., 1e-3), (0.01, 0.4),
      (1e-6, 1e-12), (3., 0.999))
  def test_the_gaussian_is_as_narrow_as_delta_allows(self, epsilon, delta):
    ours = adept_repairs.gaussian_noise_multiplier(epsilon, delta)
    with mpmath.workdps(60):
      self.assertLessEqual(_delta_oracle(ours, epsilon), delta)
      narrower = ours * (1 - mpmath.mpf(1e-7))
      self.assertGreater(_delta_oracle(narrower, epsilon), delta)

  @parameterized.parameters(*adept_repairs.FORMS)
  def test_noise_has_the_scale_of_the_farthest_pair_of_rows(self, norm, noise):
    delta = 1e-5 if noise == 'gaussian' else 0.
    params = numeric.calibrate_adept(
        clip=1.7, epsilon=0.9, num_dimensions=16, norm=norm, noise=noise,
        delta=delta)
    corner = np.ones(16) / np.linalg.norm(np.ones(16), 1 if norm == 'l1' else 2)
    rows = np.stack([corner, np.eye(16)[0]]) * 1.7
    order = 2 if noise == 'gaussian' else 1
    farthest = 2 * np.linalg.norm(rows, order, axis=1).max()
    if noise == 'gaussian':
      self.assertLessEqual(
          _delta_oracle(float(params.scale) / farthest, 0.9), delta)
      expected = scipy.stats.norm
    else:
      self.assertGreaterEqual(float(params.scale) * 0.9, farthest * (1 - 1e-15))
      self.assertAlmostEqual(float(params.scale) * 0.9 / farthest, 1, places=6)
      expected = scipy.stats.laplace
    residual = np.asarray(numeric.adept(
        jax.random.key(1), np.zeros((5000, 16)), params)).ravel()
    scale = float(params.scale)
    right = scipy.stats.kstest(residual, expected(scale=scale).cdf).pvalue
    wrong = scipy.stats.kstest(residual,
                               expected(scale=scale * 1.05).cdf).pvalue
    self.assertGreater(right, _FALSE_ALARM)
    self.assertLess(wrong, _FALSE_ALARM)
    self.assertEqual(
        (params.guarantee.status, params.guarantee.delta,
         params.guarantee.epsilon, params.guarantee.metric),
        ('proved', delta, 0.9, guarantees.ADJACENCY))
    self.assertIn(guarantees.REAL_ARITHMETIC, params.guarantee.conditions)

  @parameterized.parameters('l1', 'l2')
  def test_rows_are_clipped_in_direction_and_small_rows_left(self, norm):
    params = numeric.calibrate_adept(clip=2., epsilon=1., num_dimensions=3,
                                     norm=norm)._replace(scale=np.float32(0))
    x = np.float32([[0, 0, 0], [0.1, -0.2, 0.3], [3, -4, 12], [3e38] * 3,
                    [-3e38, 3e38, 1e37], [1e-30, 0, 0], [2, 0, 0]])
    out = np.asarray(numeric.adept(jax.random.key(0), x, params), np.float64)
    norms = np.linalg.norm(x.astype(np.float64), 1 if norm == 'l1' else 2,
                           axis=1)
    factor = np.minimum(1, 2 / np.maximum(norms, 1e-300))
    np.testing.assert_allclose(out, x * factor[:, None].astype(np.float64),
                               rtol=1e-6)  # four float32 roundings

  def test_traced_rows_that_are_not_finite_stay_within_the_clip(self):
    params = numeric.calibrate_adept(clip=2., epsilon=1., num_dimensions=3)
    params = params._replace(scale=np.float32(0))
    x = np.zeros((7, 3), np.float32)
    x[:2] = [np.nan, 1., 0.], [np.inf, 0., -np.inf]
    out = _adept(jax.random.key(0), x, params)
    np.testing.assert_allclose(out[:2], [[0., 1., 0.], [1., 0., -1.]],
                               rtol=1e-6)  # four float32 roundings
    for row in x[:2]:
      with self.assertRaisesRegex(ValueError, 'x holds'):
        numeric.adept(jax.random.key(0), row, params)

  def test_shape_jit_and_vmap_do_not_show(self):
    params = numeric.calibrate_adept(clip=2., epsilon=1., num_dimensions=3)
    key, x = jax.random.key(0), np.ones((7, 3), np.float32)
    out = numeric.adept(key, x, params)
    np.testing.assert_allclose(_adept(key, x, params), out, rtol=1e-5)
    keys = jax.random.split(key, 2)
    rows = jax.vmap(numeric.adept, (0, None, None))(keys, x, params)
    np.testing.assert_allclose(rows[1], numeric.adept(keys[1], x, params),
                               rtol=1e-5)
    self.assertFalse(np.allclose(rows[0], rows[1]))

  @parameterized.parameters(
      ('clip', 0.), ('clip', math.nan), ('clip', 1e39), ('epsilon', 0.),
      ('epsilon', math.inf), ('epsilon', 1e-45), ('num_dimensions', 0),
      ('num_dimensions', 2.5), ('norm', 'linf'), ('noise', 'gumbel'),
      ('noise', 'gaussian'), ('delta', 0.1), ('delta', math.nan))
  def test_bad_settings_are_refused_by_name(self, name, value):
    word = 'scale' if value == 1e-45 else name
    with self.assertRaisesRegex(ValueError, word):
      numeric.calibrate_adept(
          **{'clip': 1., 'epsilon': 1., 'num_dimensions': 3} | {name: value})

  @parameterized.parameters(0., 1., -0.1, math.nan)
  def test_the_gaussian_needs_a_delta(self, delta):
    with self.assertRaisesRegex(ValueError, 'delta'):
      numeric.calibrate_adept(clip=1., epsilon=1., num_dimensions=3, norm='l2',
                              noise='gaussian', delta=delta)

  def test_bad_rows_are_refused(self):
    params = numeric.calibrate_adept(clip=2., epsilon=1., num_dimensions=3)
    for x in (np.ones((2, 4)), 1., np.array([1., math.nan, 0.]),
              np.array([1e39, 0., 0.]), np.ones(3) * 1j):
      with self.assertRaisesRegex(ValueError, 'x h'):
        numeric.adept(jax.random.key(0), x, params)
