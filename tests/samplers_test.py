import inspect
import math

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from jaxdp import samplers

_FALSE_ALARM = 1e-3
_NUM = 200_000


def _gumbel_cdf(scale, bound=math.inf):
  def cdf(x):
    f = lambda t: np.exp(-np.exp(-t / scale))
    low, high = f(-bound), f(bound)
    return (f(np.clip(x, -bound, bound)) - low) / (high - low)
  return cdf


class LawTest(parameterized.TestCase):

  def _accepts_and_rejects(self, draws, cdf, wrong_cdf):
    draws = np.asarray(draws, np.float64).reshape(-1)
    self.assertGreater(scipy.stats.kstest(draws, cdf).pvalue, _FALSE_ALARM)
    self.assertLess(scipy.stats.kstest(draws, wrong_cdf).pvalue, _FALSE_ALARM)

  @parameterized.product(scale=(0.3, 2.), jit=(True, False))
  def test_laplace_matches_its_cdf_and_no_other(self, scale, jit):
    draw = lambda k: samplers.laplace(k, (_NUM,), scale=scale)
    draws = (jax.jit(draw) if jit else draw)(jax.random.key(1))
    self._accepts_and_rejects(draws, scipy.stats.laplace(0, scale).cdf,
                              scipy.stats.laplace(0, scale * 1.05).cdf)

  def test_gumbel_matches_its_cdf_and_not_its_mirror(self):
    draws = samplers.gumbel(jax.random.key(2), (_NUM,), scale=2.)
    self._accepts_and_rejects(draws, scipy.stats.gumbel_r(0, 2.).cdf,
                              scipy.stats.gumbel_l(0, 2.).cdf)

  @parameterized.parameters((2., 3.), (1., 1.5), (0.3, 0.5), (0.2, 5.))
  def test_truncated_gumbel_matches_its_cdf_and_no_other(self, scale, bound):
    draws = samplers.truncated_gumbel(
        jax.random.key(3), (_NUM,), scale=scale, bound=bound)
    self._accepts_and_rejects(draws, _gumbel_cdf(scale, bound),
                              _gumbel_cdf(scale * 1.05, bound))
    self.assertLessEqual(float(jnp.abs(draws).max()), bound)

  def test_multivariate_laplace_takes_a_key_of_128_bits(self):
    key = jax.random.wrap_key_data(jnp.arange(4, dtype=jnp.uint32),
                                   impl='threefry4x32')
    draws = samplers.multivariate_laplace(key, (40, 50, 6), epsilon=2.)
    norms = np.linalg.norm(draws, axis=-1)
    self._accepts_and_rejects(norms, scipy.stats.gamma(6, scale=.5).cdf,
                              scipy.stats.gamma(6, scale=.55).cdf)
    self.assertLen(np.unique(norms), norms.size)

  def test_truncated_is_not_clipped(self):
    truncated = samplers.truncated_gumbel(
        jax.random.key(4), (_NUM,), scale=2., bound=3.)
    # Clipping would leave exp(-e^-1.5) off 1, a fifth of the mass, on 3.
    self.assertLess(float(jnp.mean(truncated > 2.999)), 1e-3)

  @parameterized.parameters(40., 4e3)
  def test_a_wide_truncated_gumbel_nears_the_uniform(self, scale):
    draws = np.asarray(samplers.truncated_gumbel(
        jax.random.key(5), (_NUM,), scale=scale, bound=1.), np.float64)
    # The density is e^{-x/b} up to 1 + O(1/b^2): KS distance under 1/(4b).
    self._accepts_and_rejects(
        draws, _gumbel_cdf(scale, 1.), scipy.stats.uniform(-1, 2.1).cdf)
    self.assertGreater(len(np.unique(draws)), 0.9 * _NUM)

  def test_gumbel_keeps_both_tails_where_jax_random_cuts_them(self):
    key = jax.random.key(6)
    ours = samplers.gumbel(key, (2_000_000,))
    # P(x < -2.85) = exp(-e^2.85) = 3e-8; P(x > 15) = 3e-7 is 0.6 expected.
    # The full-resolution fraction is checked where the mass can be counted.
    for cut, mass in ((-2.3, math.exp(-math.exp(2.3))),
                      (10., -math.expm1(-math.exp(-10.)))):
      seen = int(jnp.sum(ours < cut) if cut < 0 else jnp.sum(ours > cut))
      self.assertGreater(scipy.stats.binomtest(seen, 2_000_000, mass).pvalue,
                         _FALSE_ALARM)
    upper = np.unique(np.asarray(ours)[np.asarray(ours) > 9.])
    # 23-bit uniforms are 2^-23 apart: at 9 scales that is steps of 1e-3.
    self.assertGreater(len(upper), 0.99 * int(jnp.sum(ours > 9.)))

  def test_fractions_have_every_exponent_and_a_fair_side(self):
    # pylint: disable-next=protected-access
    upper, fraction = samplers._two_sided_uniform(
        jax.random.key(7), (4_000_000,), jnp.float32)
    exponent = -np.frexp(np.asarray(fraction))[1]
    counts = np.bincount(exponent, minlength=12)[:12]
    expected = 4_000_000 * 0.5 ** np.arange(1, 13)
    rest = 4_000_000 - counts.sum(), 4_000_000 - expected.sum()
    pvalue = scipy.stats.chisquare(np.append(counts, rest[0]),
                                   np.append(expected, rest[1])).pvalue
    self.assertGreater(pvalue, _FALSE_ALARM)
    heads = int(jnp.sum(upper))
    self.assertGreater(scipy.stats.binomtest(heads, 4_000_000).pvalue,
                       _FALSE_ALARM)

  @parameterized.parameters(1, 3, 50)
  def test_multivariate_laplace_has_gamma_norms_on_a_sphere(self, dim):
    draws = np.asarray(samplers.multivariate_laplace(
        jax.random.key(8), (40_000, dim), epsilon=10.), np.float64)
    norms = np.linalg.norm(draws, axis=1)
    law = lambda rate: scipy.stats.gamma(dim, scale=1 / rate).cdf
    self._accepts_and_rejects(norms, law(10.), law(10.5))
    directions = draws / norms[:, None]
    # Each coordinate of a uniform direction has mean 0 and variance 1 / D.
    error = np.abs(directions.mean(0)).max()
    self.assertLess(error, 5 / math.sqrt(40_000 * dim))

  def test_many_vectors_come_in_tiles_and_none_comes_twice(self):
    draws = np.asarray(samplers.multivariate_laplace(
        jax.random.key(8), (3, 30_001, 4), epsilon=1.))
    self.assertEqual(draws.shape, (3, 30_001, 4))
    self.assertLen(np.unique(draws.reshape(-1, 4), axis=0), 3 * 30_001)

  def test_multivariate_laplace_is_not_drawn_from_the_ball(self):
    dim = 3
    norms = np.linalg.norm(np.asarray(samplers.multivariate_laplace(
        jax.random.key(9), (40_000, dim), epsilon=1.)), axis=1)
    ball = (scipy.stats.gamma(dim).rvs(40_000, random_state=1)
            * np.random.default_rng(2).uniform(size=40_000) ** (1 / dim))
    self.assertLess(scipy.stats.ks_2samp(norms, ball).pvalue, _FALSE_ALARM)

  def test_infinite_epsilon_and_zero_scale_add_nothing(self):
    key = jax.random.key(10)
    self.assertEqual(float(jnp.abs(samplers.multivariate_laplace(
        key, (5, 4), epsilon=math.inf)).max()), 0.)
    self.assertEqual(float(jnp.abs(samplers.laplace(
        key, (5,), scale=0.)).max()), 0.)
    self.assertEqual(float(jnp.abs(samplers.truncated_gumbel(
        key, (5,), scale=0., bound=1.)).max()), 0.)

  @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
  def test_draws_have_the_dtype_asked_for_and_are_finite(self, dtype):
    for draw in (samplers.laplace(jax.random.key(0), (999,), dtype, scale=1.),
                 samplers.truncated_gumbel(jax.random.key(0), (999,), dtype,
                                           scale=1., bound=2.)):
      self.assertEqual(draw.dtype, dtype)
      self.assertTrue(bool(jnp.isfinite(draw).all()))

  def test_float64_draws_under_x64(self):
    with jax.enable_x64(True):
      draws = samplers.truncated_gumbel(jax.random.key(0), (_NUM,), jnp.float64,
                                        scale=1., bound=30.)
      self.assertEqual(draws.dtype, jnp.float64)
    self._accepts_and_rejects(draws, _gumbel_cdf(1., 30.), _gumbel_cdf(1.05))

  def test_vmap_equals_the_loop(self):
    keys = jax.random.split(jax.random.key(11), 4)
    draw = lambda k: samplers.truncated_gumbel(k, (7,), scale=1., bound=2.)
    np.testing.assert_allclose(jax.vmap(draw)(keys),
                               jnp.stack([draw(k) for k in keys]), atol=1e-6)


class BadNumberTest(parameterized.TestCase):

  @parameterized.parameters(
      (samplers.laplace, {'scale': -1.}),
      (samplers.laplace, {'scale': math.nan}),
      (samplers.laplace, {'scale': np.float32([1, -1])}),
      (samplers.gumbel, {'scale': -1}), (samplers.gumbel, {'scale': math.nan}),
      (samplers.truncated_gumbel, {'scale': np.float32(-2), 'bound': 1.}),
      (samplers.truncated_gumbel, {'bound': 0., 'scale': 1.}),
      (samplers.truncated_gumbel, {'bound': math.nan, 'scale': 1.}),
      (samplers.multivariate_laplace, {'epsilon': 0.}),
      (samplers.multivariate_laplace, {'epsilon': -1}),
      (samplers.multivariate_laplace, {'epsilon': math.nan}),
      (samplers.truncated_poisson, {'rate': -1., 'low': 1, 'high': 9}),
      (samplers.truncated_poisson, {'rate': 0., 'low': 1, 'high': 9}),
      (samplers.truncated_poisson, {'rate': math.nan, 'low': 1, 'high': 9}),
      (samplers.truncated_poisson, {'rate': math.inf, 'low': 1, 'high': 9}))
  def test_a_number_out_of_range_is_refused_by_name(self, fun, settings):
    name = next(iter(settings))
    with self.assertRaisesRegex(ValueError, f'{name}=.*must be'):
      fun(jax.random.key(0), (3,), **settings)

  def test_traced_numbers_are_not_looked_at(self):
    shape = jax.eval_shape(
        lambda x: samplers.laplace(jax.random.key(0), (3,), scale=x), -1.)
    self.assertEqual(shape.shape, (3,))


class ArgminTest(parameterized.TestCase):

  def test_three_values_match_the_integral(self):
    scale, bound, gap, num = 1., 2., 0.7, 100_000
    values = jnp.broadcast_to(jnp.array([0., gap, gap]), (num, 3))
    chosen = samplers.truncated_gumbel_argmin(
        jax.random.key(1), values, scale=scale, bound=bound)
    grid = np.linspace(-bound, bound, 200_001)
    cdf = _gumbel_cdf(scale, bound)
    mass = np.diff(cdf(grid))
    middle = (grid[1:] + grid[:-1]) / 2
    first = float(np.sum(mass * (1 - cdf(middle - gap))**2))
    seen = int(jnp.sum(chosen == 0))
    self.assertGreater(scipy.stats.binomtest(seen, num, first).pvalue,
                       _FALSE_ALARM)
    # Max-type Gumbel in an arg-min: the other tail gives another law.
    mirrored = float(np.sum(mass * cdf(middle + gap)**2))
    self.assertLess(scipy.stats.binomtest(seen, num, mirrored).pvalue,
                    _FALSE_ALARM)

  def test_infinite_values_are_never_chosen_and_ties_go_low(self):
    values = jnp.array([[jnp.inf, 3., jnp.inf]] * 100)
    chosen = samplers.truncated_gumbel_argmin(
        jax.random.key(2), values, scale=1., bound=1.)
    self.assertEqual(set(np.asarray(chosen).tolist()), {1})
    tied = samplers.truncated_gumbel_argmin(
        jax.random.key(2), jnp.zeros((4,)), scale=0., bound=1.)
    self.assertEqual(int(tied), 0)


class TruncatedPoissonTest(parameterized.TestCase):

  def test_golden_probabilities(self):
    four = samplers.truncated_poisson_probabilities(
        rate=math.log(4), low=1, high=4)
    np.testing.assert_allclose(four, [.346574, .240227, .111008, .302192],
                               atol=5e-7)
    hundred = samplers.truncated_poisson_probabilities(
        rate=math.log(100), low=1, high=100)
    np.testing.assert_allclose(hundred[[0, 1, 2, 99]],
                               [.0460517, .106038, .162774, .01], atol=5e-7)

  @parameterized.parameters((4.6, 1, 100), (2., 0, 3), (1., 2, 4), (3., 5, 5),
                            (0.01, 9, 12))
  def test_probabilities_sum_to_one_with_both_overflows_on_high(
      self, rate, low, high):
    pmf = samplers.truncated_poisson_probabilities(
        rate=rate, low=low, high=high)
    poisson = scipy.stats.poisson(rate)
    np.testing.assert_allclose(pmf.sum(), 1, atol=1e-14)
    overflow = poisson.cdf(low - 1) + poisson.sf(high - 1)
    np.testing.assert_allclose(pmf[-1], overflow, rtol=1e-12)
    np.testing.assert_allclose(pmf[:-1], poisson.pmf(np.arange(low, high)),
                               rtol=1e-12)

  def test_rerouted_mass_goes_to_high(self):
    pmf = samplers.truncated_poisson_probabilities(
        rate=4.6, low=1, high=100, max_value=8)
    poisson = scipy.stats.poisson(4.6)
    self.assertEqual(pmf[8:-1].sum(), 0)
    np.testing.assert_allclose(pmf[-1], poisson.pmf(0) + poisson.sf(8),
                               rtol=1e-12)

  def test_draws_match_the_law_and_not_rejection(self):
    num, high = 400_000, 20
    rate = math.log(high)
    draws = np.asarray(samplers.truncated_poisson(
        jax.random.key(1), (num,), rate=rate, low=1, high=high))
    counts = np.bincount(draws, minlength=high + 1)[1:]
    pmf = samplers.truncated_poisson_probabilities(rate=rate, low=1, high=high)
    pooled = lambda x: np.append(x[:10], [x[10:-1].sum(), x[-1]])
    self.assertGreater(scipy.stats.chisquare(
        pooled(counts), num * pooled(pmf)).pvalue, _FALSE_ALARM)
    resampled = pmf.copy()
    resampled[-1] = 0
    resampled /= resampled.sum()
    self.assertGreater(counts[-1], 0.9 * num * pmf[-1])
    self.assertEqual(resampled[-1], 0)

  @parameterized.parameters((0., 1, 4), (-1., 1, 4), (math.nan, 1, 4),
                            (1., 4, 3), (1., -1, 3))
  def test_bad_settings_are_refused(self, rate, low, high):
    with self.assertRaises(ValueError):
      samplers.truncated_poisson_probabilities(rate=rate, low=low, high=high)


class ThresholdTest(parameterized.TestCase):

  def test_thresholds_are_the_scaled_cumulative_sums(self):
    table = samplers.thresholds([0.5, 0.25, 0.25])
    np.testing.assert_array_equal(table, [[2**31, 0], [3 * 2**30, 0]])

  def test_a_rare_outcome_keeps_its_probability(self):
    rare = 1e-9
    table = samplers.thresholds([rare, 1 - rare]).astype(np.float64)
    np.testing.assert_allclose(
        (table[0, 0] * 2.**32 + table[0, 1]) * 2.**-64, rare, rtol=1e-9)

  def test_all_sixty_four_bits_are_compared(self):
    table = jnp.asarray(np.array([[5, 7], [5, 9]], np.uint32))
    high = jnp.array([4, 5, 5, 5, 6], jnp.uint32)
    low = jnp.array([2**32 - 1, 6, 7, 9, 0], jnp.uint32)
    np.testing.assert_array_equal(
        samplers.count_thresholds(high, low, table), [0, 0, 1, 2, 2])

  def test_draws_match_and_broadcast(self):
    p = np.array([[.1, .2, .7], [.6, .3, .1]])
    draws = np.asarray(samplers.categorical(
        jax.random.key(3), (50_000, 2), thresholds=samplers.thresholds(p)))
    for row in range(2):
      counts = np.bincount(draws[:, row], minlength=3)
      self.assertGreater(scipy.stats.chisquare(counts, 50_000 * p[row]).pvalue,
                         _FALSE_ALARM)
      self.assertLess(scipy.stats.chisquare(counts, 50_000 * p[1 - row]).pvalue,
                      _FALSE_ALARM)

  def test_one_outcome_needs_no_threshold(self):
    draws = samplers.categorical(jax.random.key(0), (5,),
                                 thresholds=samplers.thresholds([1.]))
    np.testing.assert_array_equal(draws, np.zeros(5))

  @parameterized.parameters([[0.5, 0.4]], [[-0.1, 1.1]], [[math.nan, 1.]])
  def test_laws_that_are_none_are_refused(self, p):
    with self.assertRaises(ValueError):
      samplers.thresholds(p)


class KeyTest(parameterized.TestCase):

  def test_every_sampler_takes_its_key_first(self):
    for name in ('laplace', 'multivariate_laplace', 'gumbel',
                 'truncated_gumbel', 'truncated_gumbel_argmin',
                 'truncated_poisson', 'categorical', 'element_keys'):
      parameters = list(inspect.signature(getattr(samplers, name)).parameters)
      self.assertEqual(parameters[0], 'key', name)

  def test_purposes_differ_and_are_all_listed(self):
    values = list(samplers.PURPOSES.values())
    self.assertLen(set(values), len(values))
    module = {n: v for n, v in vars(samplers).items()
              if n.isupper() and isinstance(v, int) and not n.startswith('_')}
    self.assertEqual(module, samplers.PURPOSES)

  @parameterized.parameters(0, 5, 2**32 - 3, 2**40 + 2**32 - 2)
  def test_chunks_continue_each_other(self, start):
    for key in (jax.random.key(1), samplers.secure_key()):
      whole = samplers.element_keys(key, samplers.OUTCOME, start, 6)
      later = samplers.element_keys(key, samplers.OUTCOME, start + 4, 2)
      np.testing.assert_array_equal(jax.random.key_data(whole[4:]),
                                    jax.random.key_data(later))

  def test_no_two_streams_meet(self):
    key = jax.random.key(2)
    data = [np.asarray(jax.random.key_data(
        samplers.element_keys(key, purpose, start, 500)))
            for purpose in samplers.PURPOSES.values()
            for start in (0, 2**32, 2**33)]
    rows = {tuple(row) for block in data for row in block}
    self.assertLen(rows, 500 * 3 * len(samplers.PURPOSES))

  def test_both_halves_of_a_wide_key_matter(self):
    words = np.arange(4, dtype=np.uint32)
    seen = set()
    for flip in range(5):
      changed = words.copy()
      if flip < 4:
        changed[flip] ^= 2**31
      key = jax.random.wrap_key_data(jnp.asarray(changed), impl='threefry4x32')
      seen.add(tuple(np.asarray(jax.random.key_data(samplers.element_keys(
          key, samplers.OUTCOME, 0, 1)))[0]))
    self.assertLen(seen, 5)

  def test_secure_keys_are_wide_and_differ(self):
    keys = [samplers.secure_key() for _ in range(3)]
    self.assertEqual(jax.random.key_data(keys[0]).size, 4)
    self.assertLen({tuple(np.asarray(jax.random.key_data(k))) for k in keys}, 3)
    self.assertEqual(jax.random.key_data(samplers.secure_key(64)).size, 2)
    with self.assertRaisesRegex(ValueError, 'bits'):
      samplers.secure_key(32)

  @parameterized.parameters(-1, 2**64)
  def test_a_start_out_of_range_is_refused(self, start):
    with self.assertRaisesRegex(ValueError, 'start'):
      samplers.split_index(start)

  @parameterized.parameters((5, 7), (2**32 - 3, 2), (2**32 - 3, 3),
                            (2**33 + 2**32 - 1, 2**32 - 1))
  def test_advancing_carries_into_the_high_half(self, start, steps):
    np.testing.assert_array_equal(
        samplers.advance(start, np.uint32(steps)),
        samplers.split_index(start + steps))

  def test_a_traced_start_gives_the_same_keys(self):
    key = jax.random.key(3)
    traced = jax.jit(lambda s: jax.random.key_data(
        samplers.element_keys(key, samplers.OUTCOME, s, 3)))(jnp.int32(7))
    plain = samplers.element_keys(key, samplers.OUTCOME, 7, 3)
    np.testing.assert_array_equal(traced, jax.random.key_data(plain))
