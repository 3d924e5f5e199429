"""Same-key replay on mechanisms whose sensitivity is known."""

import math
import warnings

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import auditing

_N = 8
_ZEROS, _ONES = jnp.zeros(_N), jnp.ones(_N)


def _laplace(key, x):
  """Noise on each coordinate, jitted once for all tests."""
  return x + jax.random.laplace(key, x.shape)


_LAPLACE = jax.jit(_laplace)


def _replay(fun, claimed, x=_ZEROS, x_prime=_ONES, seed=0, **settings):
  return auditing.replay(fun, x, x_prime, key=jax.random.key(seed),
                         claimed_sensitivity=claimed, **settings)


class ReplayTest(parameterized.TestCase):

  @parameterized.parameters((1, _N), (2, math.sqrt(_N)), (np.inf, 1.))
  def test_measures_the_distance_of_the_signals(self, order, expected):
    result = _replay(_LAPLACE, expected, order=order)
    self.assertAlmostEqual(result.sensitivity, expected, delta=1e-4)
    self.assertEqual(result.claimed, expected)
    self.assertEqual(result[2:], ('not violated', True, ''))
    result = _replay(_LAPLACE, .99 * expected, order=order)
    self.assertEqual(result.verdict, 'violated')

  def test_finds_noise_for_one_coordinate_on_many(self):
    result = _replay(_LAPLACE, 1.)
    self.assertAlmostEqual(result.sensitivity, _N, delta=1e-4)
    self.assertEqual(result.verdict, 'violated')
    self.assertEqual(_replay(_laplace, 1.), result)  # jitted or not

  def test_finds_the_wrong_norm_of_a_clipped_signal(self):
    def clipped(key, x):
      x = x * jnp.minimum(1., 1. / jnp.linalg.norm(x))
      return x + jax.random.laplace(key, x.shape) * 2.
    result = _replay(clipped, 2., x=-3. * _ONES)
    self.assertAlmostEqual(result.sensitivity, 2 * math.sqrt(_N), delta=1e-4)
    self.assertEqual(result.verdict, 'violated')
    right = _replay(clipped, 2., x=-3. * _ONES, order=2)
    self.assertEqual(right.verdict, 'not violated')

  def test_all_leaves_count_together(self):
    def tree(key, x):
      return {'a': x['a'] + jax.random.normal(key), 'b': [
          2. * x['b'] + jax.random.normal(key, (2, 2))]}
    zero = {'a': jnp.zeros(()), 'b': jnp.zeros((2, 2))}
    one = {'a': jnp.ones(()), 'b': jnp.ones((2, 2))}
    result = _replay(tree, 9., zero, one)
    self.assertAlmostEqual(result.sensitivity, 9., delta=1e-4)
    self.assertEqual(result.verdict, 'not violated')
    self.assertEqual(_replay(tree, 8.9, zero, one).verdict, 'violated')

  def test_says_where_it_does_not_apply(self):
    def multiplied(key, x):
      return (1. + x) * jax.random.laplace(key, x.shape)
    result = _replay(multiplied, 1e-3)
    self.assertEqual((result.verdict, result.noise_cancels),
                     (None, False))
    self.assertIn('does not apply', result.note)
    same = _replay(_LAPLACE, 1., x_prime=_ZEROS)
    self.assertIsNone(same.verdict)
    self.assertIn('are equal', same.note)

  def test_more_keys_show_what_two_may_not(self):
    @jax.jit
    def rare(key, x):  # adds the signal a second time in one run of four
      key, other = jax.random.split(key)
      again = jax.random.bernoulli(other, .25).astype(x.dtype)
      return x + again * x + jax.random.normal(key, x.shape)
    self.assertFalse(_replay(rare, 100., num_keys=20).noise_cancels)

  def test_is_deterministic_and_depends_on_its_key(self):
    results = [_replay(_LAPLACE, 1., seed=s, num_keys=3) for s in (0, 0, 1)]
    self.assertEqual(results[0], results[1])
    self.assertNotEqual(results[0].sensitivity, results[2].sensitivity)

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  def test_rounding_of_the_output_is_no_violation(self, dtype):
    def coarse(key, x):
      return (x + 50. * jax.random.laplace(key, x.shape)).astype(dtype)
    coarse = jax.jit(coarse)
    results = [_replay(coarse, _N / 3, x_prime=_ONES / 3, seed=seed)
               for seed in range(5)]
    for result in results:
      self.assertEqual(result[2:], ('not violated', True, ''))
    # Rounding does move the difference: without slack this were a violation.
    self.assertGreater(max(r.sensitivity for r in results), 1.001 * _N / 3)

  def test_an_ignored_key_is_warned_about(self):
    with self.assertWarnsRegex(UserWarning, 'same output for 2 different keys'):
      result = _replay(lambda key, x: 1. * x, 1.)
    self.assertEqual(result.verdict, 'violated')
    self.assertEqual(result.sensitivity, _N)
    with self.assertWarnsRegex(UserWarning, 'for 4 different keys'):
      result = _replay(lambda key, x: 0. * x, 1., num_keys=4)
    self.assertIsNone(result.verdict)
    self.assertIn('no noise', result.note)

  def test_a_used_key_warns_of_nothing(self):
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      _replay(_LAPLACE, 1.)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ({'claimed': 0.}, 'claimed_sensitivity=0.0'),
      ({'claimed': -1.}, 'claimed_sensitivity=-1.0'),
      ({'claimed': math.nan}, 'claimed_sensitivity=nan'),
      ({'claimed': math.inf}, 'claimed_sensitivity=inf'),
      ({'claimed': 1., 'num_keys': 0}, 'num_keys=0'),
      ({'claimed': 1., 'num_keys': 1.5}, 'num_keys=1.5'),
      ({'claimed': 1., 'num_keys': math.nan}, 'num_keys=nan'),
      ({'claimed': 1., 'num_keys': 100_001}, 'num_keys=100001'),
      ({'claimed': 1., 'order': .5}, 'order=0.5'),
      ({'claimed': 1., 'order': math.nan}, 'order=nan'))
  def test_settings_are_refused_by_name(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      _replay(_laplace, **settings)

  def test_functions_keys_and_empty_outputs_are_refused(self):
    for fun in (lambda key, x: None, lambda key, x: jnp.zeros(0)):
      with self.assertRaisesRegex(ValueError, 'no numbers'):
        _replay(fun, 1.)
    with self.assertRaisesRegex(ValueError, 'fun raises KeyError at .*_test'):
      _replay(lambda key, x: {}['q'], 1.)
    with self.assertRaisesRegex(ValueError, "fun='abc'"):
      _replay('abc', 1.)
    with self.assertRaisesRegex(ValueError, 'key=0'):
      auditing.replay(_LAPLACE, _ZEROS, _ONES, key=0, claimed_sensitivity=1.)

  def test_outputs_without_a_difference_are_refused(self):
    with self.assertRaisesRegex(ValueError, r"int32 at \['ids'\]"):
      _replay(lambda key, x: {'ids': x.astype(jnp.int32)}, 1.)
    with self.assertRaisesRegex(ValueError, 'not finite at its output'):
      _replay(lambda key, x: x / 0., 1.)
    for other in (jnp.ones(_N + 1), jnp.ones((2, _N // 2))):
      with self.assertRaisesRegex(ValueError, r'shapes \(8,\) for x and'):
        _replay(_laplace, 1., x_prime=other)


if __name__ == '__main__':
  absltest.main()
