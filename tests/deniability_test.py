"""Tests of jaxdp.deniability against laws written down in this file."""

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
from scipy import stats

from jaxdp import deniability
from jaxdp import embeddings
from jaxdp import guarantees
from jaxdp import mechanisms
from jaxdp import samplers

ALARM = 1e-3  # false-alarm rate of a test, shared among its comparisons
LAW = np.float64([
    [.70, .20, .05, .04, .01],
    [.10, .40, .30, .15, .05],
    [.00, .00, 1.0, .00, .00],
    [.25, .25, .25, .15, .10],
    [.02, .03, .05, .10, .80],
])


class Params(NamedTuple):
  """Params of the toy mechanism."""
  law: Any
  guarantee: Any = None


@jax.jit
def _draw_law(key, ids, params, start=0):
  keys = samplers.element_keys(key, samplers.OUTCOME, start, ids.size)
  uniform = jax.vmap(jax.random.uniform)(keys)
  cumulative = jnp.cumsum(params.law[ids], axis=1)
  below = cumulative[:, :-1] <= uniform[:, None]
  return below.sum(axis=1, dtype=jnp.int32)


def _log_law(ids, params):
  with np.errstate(divide='ignore'):
    return np.log(np.asarray(params.law, np.float64))[ids]


def _copy(key, ids, params, start=0):
  del key, params, start
  return ids


TOY = SimpleNamespace(privatize=_draw_law, log_prob=_log_law)
COPY = SimpleNamespace(privatize=_copy, log_prob=None)
PARAMS = Params(LAW.astype(np.float32))


def _unchanged_p_values(counts, num_runs, law):
  return [
      stats.binomtest(int(count), num_runs, p).pvalue
      for count, p in zip(counts, np.diag(law))
  ]


class MeasureTest(parameterized.TestCase):

  def test_unchanged_is_binomial_and_silent_noise_is_seen(self):
    num_runs = 2_000
    ids = np.arange(5)

    def smallest(mechanism):
      rows = deniability.measure(
          jax.random.key(1), mechanism, ids, PARAMS, num_runs=num_runs
      )
      counts = np.rint(rows.unchanged * num_runs)
      return min(_unchanged_p_values(counts, num_runs, LAW))

    self.assertGreater(smallest(TOY), ALARM / 5)
    self.assertLess(smallest(COPY), ALARM / 5)

  def test_support_has_the_exact_mean_and_no_other(self):
    num_runs, num_words = 20, 600
    ids = np.repeat(np.int32([0, 1, 3, 4]), num_words)
    rows = deniability.measure(
        jax.random.key(2), TOY, ids, PARAMS, num_runs=num_runs
    )
    measured = rows.support.reshape(4, num_words).mean(axis=1)
    # Seeing one word makes seeing another less likely, so the variance of a
    # distinct count is at most the sum of its indicators' variances.
    missed = (1 - LAW[[0, 1, 3, 4]])**num_runs
    stderr = np.sqrt((missed * (1 - missed)).sum(axis=1) / num_words) / num_runs
    limit = stats.norm.isf(ALARM / 4 / 2)
    right = deniability.exact(TOY, np.int32([0, 1, 3, 4]), PARAMS, num_runs)
    self.assertLess(np.abs((measured - right.support) / stderr).max(), limit)
    other = Params(LAW * .95 + .01)
    wrong = deniability.exact(TOY, np.int32([0, 1, 3, 4]), other, num_runs)
    self.assertGreater(np.abs((measured - wrong.support) / stderr).max(), limit)

  @parameterized.parameters(
      ('tem', 2., 4.), ('santext', 2., 4.),
      ('truncated_gumbel', 30., 1e9), ('gumbel_exponential', 14., 16.))
  def test_real_mechanisms_match_their_exact_law(self, name, epsilon, other):
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(30, 4)).astype(np.float32)
    table = embeddings.EmbeddingTable(
        tuple(f'w{i}' for i in range(30)), vectors
    )
    mechanism = mechanisms.get(name)
    num_runs, ids = 500, np.arange(30)
    params = mechanism.calibrate(table, epsilon=epsilon)
    wrong = mechanism.calibrate(table, epsilon=other)
    rows = deniability.measure(
        jax.random.key(4), mechanism, ids, params, num_runs=num_runs
    )
    counts = np.rint(rows.unchanged * num_runs)
    p_values = [
        min(_unchanged_p_values(counts, num_runs,
                                np.exp(mechanism.log_prob(ids, law))))
        for law in (params, wrong)
    ]
    self.assertGreater(p_values[0], ALARM / 30)
    self.assertLess(p_values[1], ALARM / 30)

  @parameterized.parameters(1, 7, 40, 97, 280, 1_000)
  def test_the_split_into_chunks_never_shows(self, chunk_size):
    ids = np.int32([0, 1, 2, 3, 4, 4, 0])
    measure = lambda n, **kw: deniability.measure(
        jax.random.key(5), TOY, ids[:n], PARAMS, num_runs=40, **kw
    )
    whole = measure(7)
    for a, b in zip(whole, measure(7, chunk_size=chunk_size)):
      np.testing.assert_array_equal(a, b)
    for a, b in zip(whole, measure(3, chunk_size=chunk_size)):
      np.testing.assert_array_equal(a[:3], b)

  def test_element_index_is_word_position_times_runs_plus_run(self):
    def index(key, ids, params, start=0):
      del key, params
      low = samplers.split_index(start)[1]
      return (low + jnp.arange(ids.size)).astype(jnp.int32)

    mechanism = SimpleNamespace(privatize=index)
    seen = []

    def record(block, draws):
      seen.append(draws)
      return original(block, draws)

    original = deniability._count
    self.enter_context(
        absltest.mock.patch.object(deniability, '_count', record)
    )
    deniability.measure(
        jax.random.key(0), mechanism, np.zeros(9, np.int32), None,
        num_runs=8, chunk_size=20,
    )
    np.testing.assert_array_equal(
        np.concatenate(seen), np.arange(72).reshape(9, 8)
    )

  def test_copy_is_always_unchanged_with_one_word_of_support(self):
    rows = deniability.measure(
        jax.random.key(6), COPY, np.int32([4, 2]), None, num_runs=250
    )
    np.testing.assert_array_equal(rows.unchanged, [1, 1])
    np.testing.assert_array_equal(rows.support, [1 / 250, 1 / 250])
    np.testing.assert_array_equal(rows.unchanged_stderr, [0, 0])
    np.testing.assert_array_equal(rows.support_stderr, [0, 0])

  def test_counts_equal_a_python_set_and_counter(self):
    draws = np.random.default_rng(7).integers(0, 50, size=(20, 33))
    draws = draws.astype(np.int32)
    block = draws[:, 5].copy()
    unchanged, support, singletons = deniability._count(block, draws)
    for i, row in enumerate(draws.tolist()):
      self.assertEqual(unchanged[i], row.count(block[i]))
      self.assertEqual(support[i], len(set(row)))
      self.assertEqual(singletons[i], sum(row.count(y) == 1 for y in set(row)))

  def test_support_stderr_covers_the_spread_over_repetitions(self):
    ids = np.full(800, 1, np.int32)
    rows = deniability.measure(
        jax.random.key(8), TOY, ids, PARAMS, num_runs=25
    )
    spread = rows.support.std(ddof=1)
    stated = np.sqrt((rows.support_stderr**2).mean())
    # The jackknife is biased upwards; the chi-square factor is for 800 words.
    low = math.sqrt(stats.chi2.ppf(ALARM, 799) / 799)
    self.assertGreater(stated, spread * low)
    self.assertLess(stated, 3 * spread)

  def test_another_epsilon_does_not_compile_again(self):
    traces = []

    @jax.jit
    def privatize(key, ids, params, start=0):
      traces.append(None)
      return _draw_law(key, ids, params, start)

    mechanism = SimpleNamespace(privatize=privatize)
    for epsilon in (1., 2., 3.):
      guarantee = guarantees.Guarantee(
          epsilon=epsilon, status='claimed', source='toy'
      )
      deniability.measure(
          jax.random.key(0), mechanism, np.arange(5),
          PARAMS._replace(guarantee=guarantee), num_runs=10, chunk_size=16,
      )
    self.assertLen(traces, 1)

  def test_a_release_under_the_same_key_shares_no_noise(self):
    num_runs = 400
    ids = np.full(num_runs, 3, np.int32)
    released = np.asarray(_draw_law(jax.random.key(9), ids, PARAMS))
    rows = deniability.measure(
        jax.random.key(9), TOY, ids[:1], PARAMS, num_runs=num_runs
    )
    self.assertNotEqual(rows.unchanged[0], (released == 3).mean())

  def test_ids_outside_the_table_are_refused_and_not_clamped(self):
    table = embeddings.EmbeddingTable(('a', 'b'), np.float32([[0.], [1.]]))
    mechanism = mechanisms.get('santext')
    params = mechanism.calibrate(table, epsilon=1.)
    with self.assertRaisesRegex(ValueError, 'ids holds 2'):
      deniability.measure(
          jax.random.key(0), mechanism, np.int32([0, 2]), params, num_runs=4
      )

  @parameterized.parameters(
      ({'num_runs': 0}, 'num_runs=0 must be at least 1'),
      ({'num_runs': 5, 'chunk_size': 0}, 'chunk_size=0 must be at least 1'),
      ({'num_runs': 5, 'ids': np.zeros((2, 2), np.int32)}, 'must be \\[B\\]'),
      ({'num_runs': 5, 'ids': np.zeros(0, np.int32)}, 'must be \\[B\\]'),
      ({'num_runs': 2.5}, 'num_runs=2.5 must be .* an int'),
      ({'num_runs': True}, 'num_runs=True must be .* an int'),
      ({'num_runs': 5, 'chunk_size': 2.}, 'chunk_size=2.0 must be .* an int'),
      ({'num_runs': 5, 'ids': [3.9]}, 'ids has dtype float64'),
      ({'num_runs': 5, 'ids': [True]}, 'ids has dtype bool'),
      ({'num_runs': 5, 'ids': [2**32 + 3]}, f'ids holds {2**32 + 3}'),
      ({'num_runs': 5, 'ids': [-1]}, 'ids holds -1'),
  )
  def test_bad_arguments_are_named(self, settings, message):
    ids = settings.pop('ids', np.arange(2))
    with self.assertRaisesRegex(ValueError, message):
      deniability.measure(jax.random.key(0), TOY, ids, PARAMS, **settings)


class ExactTest(parameterized.TestCase):

  @parameterized.parameters([[3.9]], [[2**32 + 3]], [[True]], [[-1]])
  def test_ids_that_are_no_positions_are_refused(self, ids):
    mechanism = SimpleNamespace(log_prob=lambda ids, params: np.zeros((1, 9)))
    with self.assertRaisesRegex(ValueError, 'ids'):
      deniability.exact(mechanism, ids, None, 5)

  def test_counts_may_be_numpy_ints_and_no_floats(self):
    mechanism = SimpleNamespace(
        log_prob=lambda ids, params: np.log(np.full((1, 4), .25)))
    with self.assertRaisesRegex(ValueError, 'num_runs=5.0'):
      deniability.exact(mechanism, [1], None, 5.)
    rows = deniability.exact(mechanism, np.int64([1]), None, np.int32(1))
    np.testing.assert_allclose(rows.support, 1.)

  @parameterized.parameters(1, 2, 4)
  def test_support_equals_enumeration_of_every_run(self, num_runs):
    law = np.float64([[.5, .3, .2], [.1, .1, .8], [1., 0., 0.]])
    rows = deniability.exact(TOY, np.arange(3), Params(law), num_runs)
    for w in range(3):
      expected = sum(
          math.prod(law[w, list(runs)]) * len(set(runs))
          for runs in itertools.product(range(3), repeat=num_runs)
      )
      # A sum of 3 terms of a few roundings each.
      self.assertAlmostEqual(rows.support[w], expected / num_runs, delta=1e-15)
    np.testing.assert_allclose(rows.unchanged, np.diag(law), rtol=1e-15)

  def test_tiny_and_nearly_certain_words_keep_their_digits(self):
    logp = np.float64([[-1e-13, -30., -700., -np.inf]])
    mechanism = SimpleNamespace(log_prob=lambda ids, params: logp)
    rows = deniability.exact(mechanism, np.int32([1]), None, 1_000)
    with mpmath.workdps(400):
      expected = mpmath.fsum(
          1 - (1 - mpmath.exp(mpmath.mpf(float(x))))**1_000 for x in logp[0]
      )
      one_word = 1 - (1 - mpmath.exp(mpmath.mpf(-30.)))**1_000
    np.testing.assert_allclose(
        rows.support[0], float(expected) / 1_000, rtol=1e-15
    )
    np.testing.assert_allclose(
        deniability._expected_support(logp[:, 1:], 1_000)[0], float(one_word),
        rtol=1e-14,
    )

  def test_a_mechanism_without_a_law_names_the_other_route(self):
    with self.assertRaisesRegex(ValueError, 'deniability.measure'):
      deniability.exact(COPY, np.int32([0]), None, 10)

  def test_blocks_of_words_never_show(self):
    ids = np.int32([3, 1, 4, 0, 2, 2])
    whole = deniability.exact(TOY, ids, PARAMS, 50)
    self.enter_context(
        absltest.mock.patch.object(deniability, '_EXACT_BYTES', 80)
    )
    for a, b in zip(whole, deniability.exact(TOY, ids, PARAMS, 50)):
      np.testing.assert_array_equal(a, b)


class SummaryTest(parameterized.TestCase):

  def test_mean_spread_and_error_of_the_mean(self):
    mean, std, stderr = deniability.summarize([1., 2., 3., 6.])
    self.assertEqual(mean, 3.)
    self.assertAlmostEqual(std, math.sqrt(3.5))
    self.assertAlmostEqual(stderr, math.sqrt(14 / 3) / 2)

  def test_one_word_has_no_error_of_the_mean(self):
    self.assertTrue(math.isnan(deniability.summarize([.5]).stderr))


def _rows(a, b):
  return [(np.float64([x]), np.float64([y])) for x, y in zip(a, b)]


class CalibrateEpsilonTest(parameterized.TestCase):

  @parameterized.named_parameters(
      # q90 of N_w and q10 of S_w on 12,000 GloVe words, and the crossings.
      ('word', [.04, .45, .89, 1., 1.], [.95, .53, .12, .01, .01],
       10.47, 10.30, (10., 15.)),
      ('sense', [.00, .02, .08, .49, .98], [.96, .83, .61, .26, .03],
       25.36, 17.61, (15., 25.)),
  )
  def test_golden_curves(self, a, b, unchanged, support, bracket):
    result = deniability.calibrate_epsilon(
        _rows(a, b), [5., 10., 15., 25., 50.]
    )
    self.assertEqual(result.status, 'ok')
    self.assertAlmostEqual(result.epsilon_unchanged, unchanged, delta=.005)
    self.assertAlmostEqual(result.epsilon_support, support, delta=.005)
    self.assertEqual(result.epsilon, result.epsilon_support)
    self.assertEqual(result.bracket, bracket)

  @parameterized.named_parameters(
      ('unchanged_too_high', [.6, .9], [.9, .8], 'below_grid', (0., 2.)),
      ('support_too_low', [.1, .2], [.4, .3], 'below_grid', (0., 2.)),
      ('both_deniable', [.1, .2], [.9, .8], 'above_grid', (4., np.inf)),
  )
  def test_off_the_grid_is_said_and_not_guessed(self, a, b, status, bracket):
    result = deniability.calibrate_epsilon(_rows(a, b), [2., 4.])
    self.assertEqual(result.status, status)
    self.assertEqual(result.bracket, bracket)
    self.assertTrue(math.isnan(result.epsilon))

  def test_one_crossing_above_the_grid_leaves_the_other_in_force(self):
    result = deniability.calibrate_epsilon(
        _rows([.1, .2], [.75, .25]), [2., 8.]
    )
    self.assertEqual(result.status, 'ok')
    self.assertAlmostEqual(result.epsilon, 4.)  # half-way in log epsilon
    self.assertTrue(math.isnan(result.epsilon_unchanged))

  def test_a_point_at_the_threshold_is_the_crossing(self):
    result = deniability.calibrate_epsilon(
        _rows([.1, .5, .9], [.9, .8, .7]), [1., 3., 9.]
    )
    self.assertAlmostEqual(result.epsilon, 3.)
    last = deniability.calibrate_epsilon(_rows([.1, .5], [.9, .5]), [1., 3.])
    self.assertEqual((last.epsilon, last.status), (3., 'ok'))

  def test_curves_that_are_not_monotone_err_towards_smaller_epsilon(self):
    up_and_down = [.1, .7, .3, .9]
    result = deniability.calibrate_epsilon(
        _rows(up_and_down, [.9, .9, .9, .9]), [1., 2., 4., 8.]
    )
    self.assertEqual(result.bracket, (1., 2.))
    self.assertAlmostEqual(result.epsilon, 2.**(.4 / .6))

  def test_quantiles_are_taken_over_words(self):
    words = np.linspace(0., 1., 11)
    rows = [(words * .5, 1 - words * .5), (words, 1 - words)]
    # q90 of N_w: .45 then .9; q10 of S_w: .55 then .1.
    result = deniability.calibrate_epsilon(rows, [1., math.e])
    self.assertAlmostEqual(math.log(result.epsilon_unchanged), .05 / .45)
    self.assertAlmostEqual(math.log(result.epsilon_support), .05 / .45)
    median = deniability.calibrate_epsilon(rows, [1., math.e], quantile=.8)
    self.assertAlmostEqual(math.log(median.epsilon), .1 / .4)

  def test_a_function_of_epsilon_is_called_in_order_without_infinity(self):
    calls = []

    def curve(epsilon):
      calls.append(epsilon)
      return deniability.DeniabilityRows(
          np.float64([epsilon / 10]), np.float64([1 - epsilon / 10]), 0., 0.
      )

    result = deniability.calibrate_epsilon(curve, [8., np.inf, 2.])
    self.assertEqual(calls, [2., 8.])
    self.assertAlmostEqual(result.epsilon, 4.)

  @parameterized.parameters(
      ({'quantile': .5}, 'quantile=0.5'),
      ({'threshold': 1.}, 'threshold=1.0'),
      ({'epsilons': [0., 1.]}, 'positive'),
      ({'epsilons': [np.nan, 1.]}, 'positive'),
      ({'epsilons': [np.inf, np.inf]}, 'no finite'),
      ({'epsilons': [1.]}, '2 rows for 1 epsilons'),
  )
  def test_bad_arguments_are_named(self, settings, message):
    epsilons = settings.pop('epsilons', [1., 2.])
    with self.assertRaisesRegex(ValueError, message):
      deniability.calibrate_epsilon(
          _rows([.1, .2], [.9, .8]), epsilons, **settings
      )


class BayesVulnerabilityTest(parameterized.TestCase):

  def test_hand_made_channel(self):
    law = np.float64([[.8, .2], [.4, .6]])
    self.assertAlmostEqual(
        deniability.bayes_vulnerability(np.log(law), [.5, .5]), .4 + .3
    )
    self.assertAlmostEqual(
        deniability.bayes_vulnerability(np.log(law), [.9, .1]), .72 + .18
    )

  def test_a_constant_channel_leaves_the_prior_guess(self):
    law = np.log(np.full((3, 4), .25))
    self.assertAlmostEqual(
        deniability.bayes_vulnerability(law, [.2, .5, .3]), .5
    )

  def test_it_sees_the_invertible_mechanism_that_the_statistics_pass(self):
    # Every input draws uniformly from 200 words that no other input uses.
    law = np.zeros((3, 603))
    for w in range(3):
      law[w, 3 + 200 * w:203 + 200 * w] = 1 / 200
    rows = deniability.exact(TOY, np.arange(3), Params(law), 100)
    np.testing.assert_array_equal(rows.unchanged, [0, 0, 0])
    np.testing.assert_allclose(rows.support, 2 * (1 - .995**100), rtol=1e-13)
    with np.errstate(divide='ignore'):
      vulnerability = deniability.bayes_vulnerability(np.log(law), [1 / 3] * 3)
    self.assertAlmostEqual(vulnerability, 1.)

  def test_bad_arguments_are_named(self):
    with self.assertRaisesRegex(ValueError, 'prior of shape'):
      deniability.bayes_vulnerability(np.zeros((2, 2)), [1.])
    with self.assertRaisesRegex(ValueError, 'prior sums to 1.5'):
      deniability.bayes_vulnerability(np.zeros((2, 2)), [1., .5])


if __name__ == '__main__':
  absltest.main()
