"""Audits by trials: valid, sharp, never infinite, and loud about bad input."""

import json
from typing import NamedTuple
from unittest import mock
import warnings

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp import auditing
from jaxdp import samplers
from jaxdp.auditing import scores
from jaxdp.auditing import trials

_ZERO, _ONE = np.float32(0.), np.float32(1.)


def _laplace(key, x):
  return x + samplers.laplace(key, x.shape, scale=1.)


def _half_noise(key, x):
  return x + samplers.laplace(key, x.shape, scale=.5)


def _coordinates(key, x, num):
  """Laplace noise for the l1 distance 8 of two inputs in 8 dimensions."""
  return x[None] + samplers.laplace(key, (num, 8), scale=8.)


def _log_ratio(y):
  return jnp.sum(jnp.clip(2 * y - 1, -1., 1.)) / y.size


def _audit(fun=_laplace, x=_ZERO, x_prime=_ONE, *, seed=0, num_trials=20_000,
           **settings):
  return auditing.audit(fun, x, x_prime, key=jax.random.key(seed),
                        num_trials=num_trials, **settings)


class AuditTest(parameterized.TestCase):

  def test_laplace_is_found_to_99_percent_and_not_exceeded(self):
    result = _audit(num_trials=2_000_000, claim=1.)
    self.assertBetween(result.epsilon_lower, .985, 1.)
    self.assertEqual(result.verdict, 'not violated')
    self.assertLess(abs(result.epsilon_point - 1.), .02)

  def test_half_the_noise_is_a_violation(self):
    result = _audit(_half_noise, claim=1.)
    self.assertEqual(result.verdict, 'violated')
    self.assertBetween(result.epsilon_lower, 1., 2.)

  def test_no_noise_gives_the_ceiling_and_never_infinity(self):
    with self.assertWarnsRegex(UserWarning, 'may ignore its key'):
      result = _audit(lambda key, x: x, num_trials=10_000)
    self.assertEqual(result.epsilon_point, np.inf)
    self.assertAlmostEqual(result.epsilon_lower, result.ceiling, places=9)
    low = stats.beta.ppf(.025, 5000, 1)  # all of 5,000 under one input
    high = stats.beta.ppf(.975, 1, 5000)  # none of 5,000 under the other
    self.assertAlmostEqual(result.ceiling, np.log(low / high), places=6)
    self.assertLen(result.notes, 1)

  def test_nothing_but_nan_is_refused_and_some_is_no_ignored_key(self):
    with self.assertRaisesRegex(ValueError, 'gave NaN for all'):
      _audit(lambda key, x: x + np.nan * jax.random.normal(key), claim=1.)
    with self.assertWarnsRegex(UserWarning, 'NaN score'):
      result = _audit(lambda key, x: jnp.where(x > .5, jnp.nan, 0.), claim=1.)
    self.assertLen(result.notes, 1)
    self.assertEqual(result.verdict, 'violated')

  def test_a_result_is_plain_python(self):
    result = _audit(num_trials=np.int64(20_000), claim=np.float32(1.))
    json.dumps(result._asdict())
    self.assertIs(type(result.num_trials), int)

  def test_counts_do_not_show_where_device_calls_end(self):
    run = trials.Runner(lambda key, x, _: _laplace(key, x), lambda y, _: y)
    args = (jax.random.key(0), samplers.TRIAL, _ZERO, None, None,
            np.float32([[.5]]), 0, 3_000)
    with mock.patch.object(trials, '_PER_CALL', 1_024):
      parts = run.count(*args)
    np.testing.assert_array_equal(parts, run.count(*args))
    self.assertLessEqual(trials._PER_CALL, 2**24)  # or no interrupt is heard

  def test_counts_are_those_of_a_host_loop_over_the_same_keys(self):
    result = _audit(num_trials=3_000, selection='fixed', thresholds=.5,
                    direction='x_prime')
    for purpose, x, hits in ((samplers.TRIAL, _ZERO, result.hits),
                             (samplers.TRIAL_PRIME, _ONE, result.hits_prime)):
      keys = samplers.element_keys(jax.random.key(0), purpose, 0, 3_000)
      y = jax.vmap(lambda k: _laplace(k, x))(keys)
      self.assertEqual(hits, int(np.sum(np.asarray(y) >= .5)))
    low = stats.beta.ppf(.025, result.hits_prime,
                         3_000 - result.hits_prime + 1)
    high = stats.beta.ppf(.975, result.hits + 1, 3_000 - result.hits)
    miss = np.log((1 - high) / (1 - low))
    self.assertAlmostEqual(result.epsilon_lower,
                           max(np.log(low / high), miss), places=9)

  @parameterized.parameters(
      dict(selection='fixed', thresholds=.5),
      dict(selection='bonferroni', thresholds=(0., .5, 1.)),
      dict(selection='split'), dict(selection='multisplit'))
  def test_every_selection_catches_half_the_noise(self, **settings):
    result = _audit(_half_noise, num_trials=40_000, claim=1., **settings)
    self.assertEqual(result.verdict, 'violated')
    self.assertEqual(result.selection, settings['selection'])
    self.assertLess(result.epsilon_lower, 2.)

  @parameterized.parameters('split', 'fixed')
  def test_a_truth_is_exceeded_no_more_often_than_stated(self, selection):
    self._check_coverage(selection, 40)

  @parameterized.parameters('multisplit', 'bonferroni')
  @pytest.mark.slow
  def test_a_truth_is_exceeded_no_more_often_by_many_events(self, selection):
    self._check_coverage(selection, 60)

  def _check_coverage(self, selection, seeds):
    """A binomial test over the seeds, 1e-3 false alarm."""
    settings = {'bonferroni': dict(thresholds=(-1., 0., .5, 1., 2.)),
                'fixed': dict(thresholds=1.)}.get(selection, {})
    lower = [_audit(seed=seed, num_trials=4_000, significance=.2,
                    selection=selection, **settings).epsilon_lower
             for seed in range(seeds)]
    exceeded = sum(e > 1. for e in lower)
    self.assertLessEqual(exceeded, stats.binom.isf(1e-3, seeds, .2))
    self.assertGreater(np.mean(lower), .5)

  def test_delta_takes_its_part(self):
    pure = _audit(num_trials=200_000)
    approximate = _audit(num_trials=200_000, delta=.1)
    self.assertLess(approximate.epsilon_lower, pure.epsilon_lower)
    # The best event of Laplace noise at delta: P' - delta over P at t >= 1.
    tail = np.linspace(-3, 6, 1001)
    p_prime = stats.laplace.sf(tail, loc=1.)
    best = np.log((p_prime - .1).clip(1e-9) / stats.laplace.sf(tail)).max()
    self.assertBetween(approximate.epsilon_lower, .8 * best, best)

  def test_devices_and_chunks_do_not_show(self):
    one, eight = (_audit(num_trials=50_001, num_devices=n) for n in (1, 8))
    self.assertEqual(one, eight)

  def test_common_noise_counts_the_same_trials_on_both_inputs(self):
    settings = dict(num_trials=5_000, selection='fixed', thresholds=.5)
    apart, shared = (_audit(common_noise=c, **settings) for c in (False, True))
    self.assertEqual(apart.hits, shared.hits)
    self.assertNotEqual(apart.hits_prime, shared.hits_prime)
    keys = samplers.element_keys(jax.random.key(0), samplers.TRIAL, 0, 5_000)
    y = np.asarray(jax.vmap(lambda k: _laplace(k, _ONE))(keys))
    self.assertEqual(shared.hits_prime, int(np.sum(y >= .5)))

  def test_a_second_audit_of_the_same_function_compiles_nothing(self):
    traced = []

    def fun(key, x):
      traced.append(1)
      return _laplace(key, x)

    _audit(fun)
    before = len(traced)
    _audit(fun, seed=1, x_prime=np.float32(2.))
    # eval_shape looks again at the function; nothing is compiled.
    self.assertLessEqual(len(traced) - before, 2)

  def test_a_changed_state_of_an_equal_function_is_audited_anew(self):
    class Mechanism:
      scale = 1.

      def run(self, key, x):
        return x + samplers.laplace(key, x.shape, scale=self.scale)

    mechanism = Mechanism()
    self.assertEqual(_audit(mechanism.run, claim=1.).verdict, 'not violated')
    mechanism.scale = .2
    self.assertEqual(_audit(mechanism.run, claim=1.).verdict, 'violated')

  def test_equal_named_tuples_of_two_classes_are_two_mechanisms(self):
    class Sound(NamedTuple):
      scale: float

      def __call__(self, key, x):
        return x + samplers.laplace(key, x.shape, scale=self.scale)

    class Silent(NamedTuple):
      scale: float

      def __call__(self, key, x):
        return x + 0. * samplers.laplace(key, x.shape, scale=self.scale)

    self.assertEqual(_audit(Sound(1.), claim=1.).verdict, 'not violated')
    with self.assertWarns(UserWarning):  # the noise is gone, and it shows
      self.assertEqual(_audit(Silent(1.), claim=1.).verdict, 'violated')

  def test_trials_of_one_call_that_share_noise_are_refused(self):
    fun = lambda key, x, num: jnp.broadcast_to(_laplace(key, x), (num,))
    with self.assertRaisesRegex(ValueError, 'noise of its own'):
      _audit(fun, vectorized=True)

  def test_a_vectorised_function_gives_as_good_a_bound(self):
    fun = lambda key, x, num: x + samplers.laplace(key, (num,), scale=1.)
    result = _audit(fun, num_trials=2_000_000, vectorized=True)
    self.assertBetween(result.epsilon_lower, .985, 1.)

  def test_a_dictionary_of_outputs_is_audited(self):
    fun = lambda key, x: {'a': jnp.int32(0), 'b': _half_noise(key, x)}
    result = _audit(fun, score=lambda y: y['b'], claim=1.)
    self.assertEqual(result.verdict, 'violated')

  def test_untraceable_functions_run_in_a_host_loop(self):
    def fun(key, x):
      seed = int(np.asarray(jax.random.key_data(key))[1])
      return float(x) + np.random.default_rng(seed).laplace(scale=.25)

    with self.assertWarnsRegex(UserWarning, 'cannot be traced'):
      result = _audit(fun, num_trials=1_500, claim=1.)
    self.assertEqual(result.verdict, 'violated')

  def test_nan_outputs_are_told_and_used(self):
    fun = lambda key, x: jnp.where(x > .5, jnp.nan, _laplace(key, x))
    with self.assertWarnsRegex(UserWarning, 'NaN'):
      result = _audit(fun, claim=1.)
    self.assertEqual(result.verdict, 'violated')
    self.assertGreater(result.epsilon_lower, 5.)

  def test_infinite_outputs_are_used(self):
    fun = lambda key, x: jnp.where(x > .5, jnp.inf, _laplace(key, x))
    self.assertGreater(_audit(fun).epsilon_lower, 5.)


class SweepTest(parameterized.TestCase):

  def test_one_draw_of_the_noise_serves_every_parameter(self):
    fun = lambda key, x, epsilon: x + samplers.laplace(key, scale=1.) / epsilon
    epsilons = np.float32([.5, 1., 2.])
    swept = auditing.audit_sweep(
        fun, _ZERO, _ONE, epsilons, key=jax.random.key(3), num_trials=100_000,
        claims=[.5, 1., 1.5])
    self.assertEqual([r.verdict for r in swept],
                     ['not violated', 'not violated', 'violated'])
    alone = _audit(lambda key, x: fun(key, x, np.float32(1.)), seed=3,
                   num_trials=100_000, claim=1.)
    self.assertEqual(swept[1], alone)

  def test_bad_parameters_are_refused(self):
    fun = lambda key, x, p: x
    common = dict(key=jax.random.key(0), num_trials=1000)
    with self.assertRaisesRegex(ValueError, 'parameters'):
      auditing.audit_sweep(fun, _ZERO, _ONE, 1., **common)
    with self.assertRaisesRegex(ValueError, 'parameters'):
      auditing.audit_sweep(fun, _ZERO, _ONE, (np.ones(2), np.ones(3)), **common)
    with self.assertRaisesRegex(ValueError, 'learnt'):
      auditing.audit_sweep(fun, _ZERO, _ONE, np.ones(2), score='support',
                           **common)


class ScoresTest(parameterized.TestCase):

  def test_linear_is_the_log_ratio_in_many_dimensions(self):
    x, x_prime = np.zeros(8, np.float32), np.ones(8, np.float32)
    settings = dict(num_trials=200_000, vectorized=True)
    linear = _audit(_coordinates, x, x_prime, score='linear', **settings)
    ratio = _audit(_coordinates, x, x_prime, score=_log_ratio, **settings)
    vote = _audit(_coordinates, x, x_prime, score='majority', selection='fixed',
                  **settings)
    # The best event of so few trials bounds it at .72 or so: 3,400 to 7,400 of
    # 175,000; a deviation of either count is .03.
    self.assertBetween(linear.epsilon_lower, .65, 1.)
    self.assertAlmostEqual(linear.epsilon_lower, ratio.epsilon_lower, delta=.1)
    self.assertLess(vote.epsilon_lower, .37)  # exact: 0.3655

  def test_the_vote_counts_nan_and_breaks_ties_to_zero(self):
    y = np.float32([[.5, .2], [.5, .7], [np.nan, 1.], [np.nan, -np.inf]])
    votes = [float(scores.majority(row, None)) for row in y]
    self.assertEqual(votes, [0., 1., 1., 0.])

  @parameterized.parameters(
      (np.float32(1.), 0.), (np.float32(1.5), -1.), (np.float32(6.), 1.),
      (np.float32(2.**-149), -149.), (np.float32(-.1), -27.),
      (np.int32(12), 2.), (np.float16(.25), -2.))
  def test_lowest_set_bit(self, x, exponent):
    self.assertEqual(float(scores.lowest_bit(x, None)), exponent)

  @parameterized.parameters('bits', 'support')
  def test_rounding_of_float_noise_is_found(self, score):
    """Sums in float32 leak which input they came from; the grid does not."""
    fun = lambda key, x: x + jax.random.laplace(key, x.shape)
    result = _audit(fun, num_trials=600_000, score=score, claim=1.)
    self.assertEqual(result.verdict, 'violated')

    def rounded(key, x):
      bits = jax.random.bits(key, (2,)) >> 8
      high, low = bits.astype(jnp.float32) * jnp.float32(2.**-24)
      return jnp.round(x) + jnp.floor(-jnp.log(1 - high)) - jnp.floor(
          -jnp.log(1 - low))

    result = _audit(rounded, num_trials=600_000, score=score, claim=1.)
    self.assertEqual(result.verdict, 'not violated')

  @pytest.mark.slow
  def test_the_classifier_finds_a_leak_that_no_threshold_shows(self):
    def fun(key, x):  # the sign of a product says which input it was
      pair = jax.random.normal(key, (2,))
      flipped = jnp.where(pair[0] * pair[1] > 0, 1., -1.)
      return pair * jnp.array([1., jnp.where(x > .5, 1., flipped)])

    result = _audit(fun, num_trials=60_000, score='classifier')
    blind = _audit(fun, num_trials=60_000, score=lambda y: y[0])
    self.assertGreater(result.epsilon_lower, 2.)
    self.assertLess(blind.epsilon_lower, .1)

  def test_fingerprints_are_equal_only_for_equal_bits(self):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(1000, 3)).astype(np.float32)
    mine = np.asarray(jax.vmap(scores.fingerprint)(y))
    self.assertLen(np.unique(mine), 1000)
    np.testing.assert_array_equal(mine, jax.vmap(scores.fingerprint)(y.copy()))

  def test_empty_supports_score_nothing(self):
    same = np.uint32([1, 2, 3])
    context = scores.support_context(same, same)
    value = scores.support(
        jax.lax.bitcast_convert_type(np.uint32(1), jnp.float32), context)
    self.assertEqual(float(value), 0.)


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(num_trials=0), 'num_trials'), (dict(num_trials=2.5), 'num_trials'),
      (dict(num_trials=9), 'at least'), (dict(delta=1.), 'delta'),
      (dict(delta=np.nan), 'delta'), (dict(significance=.5), 'significance'),
      (dict(score='best'), 'score'), (dict(selection='best'), 'selection'),
      (dict(direction='up'), 'direction'), (dict(claim=0.), 'claim'),
      (dict(claim=-1.), 'claim'), (dict(claim=np.nan), 'claim'),
      (dict(thresholds=1.), 'thresholds'), (dict(selection='fixed'),
                                            'thresholds'),
      (dict(selection='fixed', thresholds=(1., 2.)), 'thresholds'),
      (dict(selection='bonferroni', thresholds=np.nan), 'thresholds'),
      (dict(num_devices=99), 'num_devices'))
  def test_settings(self, settings, name):
    with self.assertRaisesRegex(ValueError, name):
      _audit(**settings)

  @parameterized.parameters(
      (np.zeros(2, np.float32), 'leaf'), (np.int32(1), 'leaf'),
      ({'a': _ONE}, 'structure'))
  def test_inputs_of_another_structure(self, x_prime, name):
    with self.assertRaisesRegex(ValueError, name):
      _audit(x_prime=x_prime)

  @parameterized.parameters(
      (np.int64(2**32), np.int64(0), '32 bits'),
      (np.float64(1e8), np.float64(1e8 + 1), '32 bits'), (_ONE, _ONE, 'equal'))
  def test_inputs_whose_difference_would_be_lost(self, x, x_prime, message):
    with self.assertRaisesRegex(ValueError, message):
      _audit(x=x, x_prime=x_prime)

  @parameterized.parameters(
      (dict(key=0), 'key'), (dict(delta='a'), 'delta'),
      (dict(claim='a'), 'claim'), (dict(significance=None), 'significance'),
      (dict(selection='bonferroni', thresholds=[[1.]]), 'thresholds'),
      (dict(selection='fixed', thresholds='a'), 'thresholds'),
      (dict(selection='fixed', thresholds=1e300), 'thresholds'),
      (dict(score=lambda y: float(y)), 'score raises'),
      (dict(num_devices='1'), 'num_devices'))
  def test_settings_of_another_type(self, settings, name):
    settings = dict(key=jax.random.key(0), num_trials=20_000) | settings
    with self.assertRaisesRegex(ValueError, name):
      auditing.audit(_laplace, _ZERO, _ONE, **settings)

  def test_functions_that_raise_are_named(self):
    def fun(key, x):
      raise KeyError('lost')

    with self.assertRaisesRegex(ValueError, 'KeyError'):
      _audit(fun)
    with self.assertRaisesRegex(ValueError, 'fun raises TypeError'):
      _audit(lambda key: 0.)

  def test_outputs_that_cannot_be_compared(self):
    x, x_prime = np.zeros(2, np.float32), np.ones(2, np.float32)
    with self.assertRaisesRegex(ValueError, "score='identity'"):
      _audit(x=x, x_prime=x_prime)
    with self.assertRaisesRegex(ValueError, 'complex'):
      _audit(lambda key, x: x + 1j)
    with self.assertRaisesRegex(ValueError, 'no array'):
      _audit(lambda key, x: ())
    with self.assertRaisesRegex(ValueError, 'one number a trial'):
      _audit(lambda key, x: x, x, x_prime, score=lambda y: y)
    with self.assertRaisesRegex(ValueError, "score='linear'"):
      _audit(lambda key, x: x[0], x, x_prime, score='linear')
    with self.assertRaisesRegex(ValueError, 'vectorized'):
      _audit(lambda key, x, num: x, vectorized=True)


class RunnerTest(parameterized.TestCase):

  def test_counts_of_many_thresholds_are_those_of_the_scores(self):
    run = trials.Runner(lambda key, x, _: _laplace(key, x), lambda y, _: y)
    looked = np.float32([np.linspace(3, -3, 40)])  # not sorted, over 16
    args = jax.random.key(0), samplers.TRIAL, _ZERO, None, None
    counts = run.count(*args, looked, 5, 20_000)
    seen = run.scores(*args, 5, 20_000)
    np.testing.assert_array_equal(
        counts, (seen[:, :, None] >= looked[:, None]).sum(axis=1))

  def test_the_index_carries_past_32_bits(self):
    run = trials.Runner(lambda key, x, _: _laplace(key, x), lambda y, _: y)
    args = jax.random.key(0), samplers.TRIAL, _ZERO, None, None
    start = 2**32 - 10_000
    whole = run.scores(*args, start, 30_000)
    parts = np.concatenate([run.scores(*args, start, 10_000),
                            run.scores(*args, 2**32, 20_000)], axis=1)
    np.testing.assert_array_equal(whole, parts)


if __name__ == '__main__':
  warnings.simplefilter('default')
  absltest.main()
