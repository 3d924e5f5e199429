"""Enumerated laws against NumPy's recomputation and real draws."""

import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import auditing
from jaxdp.auditing import enumeration

_TOTAL = 2**23


def _uniforms():
  """All values of a float32 uniform, from its definition: k / 2**23."""
  bits = np.arange(_TOTAL, dtype=np.uint32) | np.uint32(0x3f800000)
  return bits.view(np.float32) - np.float32(1)


def _add_uniform(key, x):
  return x + jax.random.uniform(key)


def _laplace(key, x):
  return x + jax.random.laplace(key)


def _coin(key, x):
  return jnp.float32(jax.random.uniform(key) < x)


class EnumerateLawTest(parameterized.TestCase):

  @parameterized.parameters(.7, -1.3)
  def test_equals_every_draw_recomputed_in_numpy(self, x):
    law = auditing.enumerate_law(_add_uniform, np.float32(x))
    values, counts = np.unique(np.float32(x) + _uniforms(), return_counts=True)
    np.testing.assert_array_equal(law.values, values)
    np.testing.assert_array_equal(law.counts, counts)
    self.assertEqual(law.counts.sum(), _TOTAL)
    self.assertEqual((law.values.dtype, law.counts.dtype),
                     (np.float32, np.int64))
    # Another input has another law.
    other = np.unique(np.float32(x + .001) + _uniforms())
    self.assertFalse(np.array_equal(law.values, other))

  @parameterized.parameters(2**15, 2**18, 2**23)
  def test_a_coin_has_its_probability_exactly_for_any_batch(self, batch):
    law = auditing.enumerate_law(_coin, np.float32(.3), batch=batch)
    heads = np.count_nonzero(_uniforms() < np.float32(.3))
    self.assertEqual(law.values.tolist(), [0., 1.])
    self.assertEqual(law.counts.tolist(), [_TOTAL - heads, heads])

  def test_randomised_response_has_log_three_and_its_wrong_form_has_not(self):
    def respond(key, x):
      keep = jax.random.uniform(key) < x['keep']
      return jnp.where(keep, x['bit'], 1. - x['bit'])

    for keep, epsilon in ((.75, math.log(3)), (.8125, math.log(13 / 3))):
      laws = [auditing.enumerate_law(
          respond, {'keep': np.float32(keep), 'bit': np.float32(bit)})
              for bit in (0, 1)]
      self.assertAlmostEqual(auditing.exact_epsilon(*laws), epsilon, places=14)
      self.assertEqual(auditing.exact_delta(*laws, 0.), 2 * keep - 1)
      self.assertAlmostEqual(auditing.exact_delta(*laws, math.log(3)),
                             keep - 3 * (1 - keep), places=14)

  def test_without_noise_the_law_is_one_point_and_delta_is_one(self):
    copy = lambda key, x: x + 0. * jax.random.uniform(key)
    laws = [auditing.enumerate_law(copy, np.float32(x)) for x in (2, 3)]
    self.assertEqual(laws[0].values.tolist(), [2.])
    self.assertEqual(laws[0].counts.tolist(), [_TOTAL])
    self.assertEqual(auditing.exact_delta(*laws, 5.), 1.)

  def test_values_ascend_and_differ_by_bits(self):
    def fun(key, x):
      u = jax.random.uniform(key)
      signed = jnp.where(u < .25, -x, jnp.where(u < .5, x, -1.))
      return jnp.where(u < .75, signed, jnp.nan)

    law = auditing.enumerate_law(fun, np.float32(0.))
    np.testing.assert_array_equal(law.values, np.float32([-1, 0, 0, np.nan]))
    self.assertEqual(np.signbit(law.values[:3]).tolist(), [True, True, False])
    self.assertEqual(law.counts.tolist(), [_TOTAL // 4] * 4)

  def test_a_second_input_does_not_recompile(self):
    auditing.enumerate_law(_coin, np.float32(.5))
    before = enumeration._outputs._cache_size()
    auditing.enumerate_law(_coin, np.float32(.25))
    self.assertEqual(enumeration._outputs._cache_size(), before)

  @parameterized.parameters(
      (lambda key, x: x + jax.random.uniform(jax.random.split(key)[0]),
       'fun splits its key'),
      (lambda key, x: x + jax.random.uniform(jax.random.fold_in(key, 1)),
       'fun folds its key'),
      (lambda key, x: x + jax.random.randint(key, (), 0, 5), 'splits its key'),
      (lambda key, x: x + jax.random.uniform(key, (2,)).sum(),
       'fun draws 64 bits in 1 calls'),
      (lambda key, x: x + jax.random.uniform(key) + jax.random.normal(key),
       'fun draws 64 bits in 2 calls'),
      (lambda key, x: x + jax.random.uniform(key, (), jnp.bfloat16).astype(
          jnp.float32), 'fun draws (8|16) bits in 1 calls'),
      (lambda key, x: x + jnp.float32(jax.random.key_data(key)[0]),
       'fun reads the data of its key'),
      (lambda key, x: x + jax.random.uniform(jax.random.key(3)),
       'fun makes a key of its own'),
      (lambda key, x: x + jax.random.uniform(jax.random.wrap_key_data(
          jnp.zeros((2,), jnp.uint32))), 'fun makes a key of its own'),
      (lambda key, x: jax.pure_callback(
          lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x),
       'fun calls back to Python'),
      (lambda key, x: (jax.debug.print('{x}', x=x), x)[1], 'fun has side eff'),
      (lambda key, x: jnp.int32(0), 'fun returns .*int32'),
      (lambda key, x: x + jnp.zeros((1,)), r'fun returns .*shape=\(1,\)'),
      (lambda key, x: (x, x), 'fun returns'),
      (lambda key, x: 1. * x, 'fun draws nothing'),
      (lambda key, x: {}['q'], 'fun raises KeyError at .*_test.py:'),
      (lambda key, x: np.float32(float(x)), 'to be traced by JAX'),
      ('abc', "fun='abc'"),
      # However deep: under jit, in a loop, in a branch.
      (jax.jit(lambda key, x: x + jax.random.uniform(jax.random.split(key)[1])),
       'fun splits its key'),
      (lambda key, x: jax.lax.fori_loop(
          0, 2, lambda i, y: y + jax.random.normal(jax.random.fold_in(key, i)),
          x), 'fun folds its key'),
      (lambda key, x: jax.lax.cond(
          x > 0, lambda: jax.random.normal(jax.random.fold_in(key, 0)),
          lambda: x), 'fun folds its key'),
      # Everywhere, and at one draw of 2**23 only.
      (lambda key, x: x + jnp.float32(jax.random.bits(key) & 1),
       'low 9 bits of its word: draw 0 gives'),
      (lambda key, x: x + jnp.float32(jax.random.bits(key) < 0x40000101),
       'low 9 bits of its word: draw 2097152 gives 1.0 or 0.0'))
  def test_refuses_by_name_what_it_cannot_enumerate(self, fun, message):
    with self.assertRaisesRegex(ValueError, message):
      auditing.enumerate_law(fun, np.float32(0.))

  @parameterized.parameters('a', 2**70, (np.array([1, 'a'], object),), 1j)
  def test_refuses_an_x_that_is_no_number(self, x):
    with self.assertRaisesRegex(ValueError, 'x='):
      auditing.enumerate_law(lambda key, x: jax.random.uniform(key), x)

  def test_the_generator_itself_refuses_what_tracing_might_not_show(self):
    key = jax.random.wrap_key_data(jnp.zeros((1,), jnp.uint32),
                                   impl=enumeration._word_prng())
    for use, message in ((jax.random.split, 'splits'),
                         (lambda k: jax.random.fold_in(k, 1), 'folds'),
                         (lambda k: jax.random.bits(k, (2,)), 'draws 64 bits')):
      with self.assertRaisesRegex(ValueError, message):
        use(key)

  @parameterized.parameters(0, 3, 2**24, 2.**18, -4)
  def test_refuses_a_batch_that_is_no_power_of_two(self, batch):
    with self.assertRaisesRegex(ValueError, f'batch={batch}'):
      auditing.enumerate_law(_coin, np.float32(0.), batch=batch)


class FloatLaplaceTest(parameterized.TestCase):
  """x + Laplace(1) in float32, between 0 and 1: claimed 1, delta near one."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.laws = [auditing.enumerate_law(_laplace, np.float32(x)) for x in (0, 1)]
    keys = jax.random.split(jax.random.key(0), 20_000)
    cls.real = np.asarray(jax.jit(jax.vmap(_laplace, (0, None)))(
        keys, np.float32(1)))

  def test_one_output_in_ten_hides_its_input(self):
    self.assertEqual(auditing.exact_epsilon(*self.laws), math.inf)
    # Real arithmetic has delta zero here.
    delta = auditing.exact_delta(*self.laws, 1.)
    self.assertAlmostEqual(delta, .8939, places=4)

  def test_real_draws_lie_in_their_own_law_and_few_in_the_other(self):
    self.assertTrue(np.isin(self.real, self.laws[1].values).all())
    impossible = 1 - np.isin(self.real, self.laws[0].values).mean()
    # 20,000 draws: 3.3 standard deviations of .0022, a false alarm of 1e-3.
    self.assertAlmostEqual(impossible, .8939, delta=.0072)

  def test_their_distribution_is_that_of_the_draws_and_no_other(self):
    law = self.laws[1]
    cdf = np.cumsum(law.counts) / _TOTAL
    at = np.searchsorted(law.values, self.real, side='right')
    uniform = np.sort(np.concatenate([[0.], cdf])[at])
    # Kolmogorov-Smirnov at a false-alarm rate of 1e-3.
    limit = 1.95 / math.sqrt(len(self.real))
    grid = np.arange(1, len(uniform) + 1) / len(uniform)
    self.assertLess(np.abs(uniform - grid).max(), limit)
    shifted = np.searchsorted(law.values, self.real + .1, side='right')
    uniform = np.sort(np.concatenate([[0.], cdf])[shifted])
    self.assertGreater(np.abs(uniform - grid).max(), limit)

  def test_the_function_compiled_alone_gives_the_same_bits(self):
    alone = jax.jit(lambda key, x: x + 10. * jax.random.laplace(key))
    law = auditing.enumerate_law(alone, np.float32(1))
    draws = [float(alone(jax.random.key(i), np.float32(1))) for i in range(200)]
    self.assertTrue(np.isin(np.float32(draws), law.values).all())
    others = [float(alone(jax.random.key(i), np.float32(0)))
              for i in range(200)]
    self.assertLess(np.isin(np.float32(others), law.values).mean(), .5)


class LossTest(parameterized.TestCase):

  def _random(self, seed, num_values):
    generator = np.random.default_rng(seed)
    values = np.sort(generator.choice(20, num_values, replace=False))
    return auditing.Law(np.float32(values) - 7.5,
                        generator.integers(1, 9, size=num_values))

  @parameterized.product(seed=(0, 1, 2), epsilon=(0., .3, 2., 800.))
  def test_delta_is_the_sum_over_the_union_of_the_outputs(self, seed, epsilon):
    laws = [self._random(2 * seed + i, n) for i, n in enumerate((12, 9))]
    p, q = ({float(v): c / law.counts.sum() for v, c in zip(*law)}
            for law in laws)
    scale = math.exp(min(epsilon, 700.))
    sums = [sum(max(0., a[y] - scale * b.get(y, 0.)) for y in a)
            for a, b in ((p, q), (q, p))]
    delta = auditing.exact_delta(*laws, epsilon)
    self.assertAlmostEqual(delta, max(sums), places=14)
    self.assertAlmostEqual(
        delta, auditing.exact_delta(*laws[::-1], epsilon), places=14)
    if epsilon:  # at zero both are the total variation
      self.assertNotAlmostEqual(*sums, places=3)
    self.assertEqual(auditing.exact_epsilon(*laws), math.inf)

  @parameterized.parameters(0, 1, 2)
  def test_epsilon_is_the_largest_log_ratio_and_its_delta_is_zero(self, seed):
    law, law_prime = (self._random(seed + 5 * i, 20) for i in range(2))
    ratios = [abs(math.log(a / law.counts.sum() * law_prime.counts.sum() / b))
              for a, b in zip(law.counts, law_prime.counts)]
    epsilon = auditing.exact_epsilon(law, law_prime)
    self.assertAlmostEqual(epsilon, max(ratios), places=14)
    self.assertAlmostEqual(
        auditing.exact_delta(law, law_prime, epsilon), 0., places=15)
    self.assertGreater(
        auditing.exact_delta(law, law_prime, .99 * epsilon), 1e-4)
    self.assertEqual(auditing.exact_epsilon(law, law), 0.)
    self.assertEqual(auditing.exact_delta(law, law, 0.), 0.)

  def test_disjoint_laws_and_signed_zeros_are_told_apart_for_certain(self):
    law = auditing.Law(np.float32([-0.]), np.array([4]))
    law_prime = auditing.Law(np.float32([0.]), np.array([9]))
    self.assertEqual(auditing.exact_epsilon(law, law_prime), math.inf)
    self.assertEqual(auditing.exact_delta(law, law_prime, 10.), 1.)

  @parameterized.parameters(
      (np.float64([0, 1]), [1, 1], 'law_prime.values of dtype float64'),
      (np.float32([]), [], r'shape \(0,\)'),
      (np.float32([0, 1]), [1], r'law_prime.counts .* shape \(1,\)'),
      (np.float32([0, 1]), [.5, .5], 'float64'),
      (np.float32([0, 1]), [1, 0], 'counts holds 0'),
      (np.float32([1, 0]), [1, 1], 'must ascend'),
      (np.float32([1, 1]), [1, 1], 'must ascend'))
  def test_refuses_what_is_no_law(self, values, counts, message):
    good = auditing.Law(np.float32([0]), np.array([1]))
    bad = auditing.Law(values, np.array(counts))
    with self.assertRaisesRegex(ValueError, message):
      auditing.exact_delta(good, bad, 1.)
    with self.assertRaisesRegex(ValueError, message):
      auditing.exact_epsilon(good, bad)

  @parameterized.parameters(-.1, math.inf, math.nan)
  def test_refuses_an_epsilon_that_is_none(self, epsilon):
    law = auditing.Law(np.float32([0]), np.array([1]))
    with self.assertRaisesRegex(ValueError, f'epsilon={epsilon}'):
      auditing.exact_delta(law, law, epsilon)


if __name__ == '__main__':
  absltest.main()
