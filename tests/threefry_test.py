"""The fused hash is Threefry-2x32, and short draws begin long ones."""

from absl.testing import parameterized
import jax
from jax.extend import random as extend_random
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp import threefry


class ThreefryTest(parameterized.TestCase):

  @parameterized.parameters(
      # Random123's known answers: counter words, key words, result.
      ((0, 0), (0, 0), (0x6b200159, 0x99ba4efe)),
      ((2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 1),
       (0x1cb996fc, 0xbb002be7)),
      ((0x243f6a88, 0x85a308d3), (0x13198a2e, 0x03707344),
       (0xc4923a9c, 0x483df7a0)))
  def test_known_answers(self, counter, key, want):
    got = threefry.threefry2x32(*(jnp.uint32(w) for w in (*key, *counter)))
    self.assertEqual(tuple(map(int, got)), want)

  @parameterized.parameters(
      # Random123's known answers for twenty rounds: counter, key, result.
      ((0,) * 4, (0,) * 4, (0x9c6ca96a, 0xe17eae66, 0xfc10ecd4, 0x5256a7d8)),
      ((2**32 - 1,) * 4, (2**32 - 1,) * 4,
       (0x2a881696, 0x57012287, 0xf6c7446e, 0xa16a6732)),
      ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
       (0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89),
       (0x59cd1dbb, 0xb8879579, 0x86b5d00c, 0xac8b6d84)))
  def test_known_answers_of_four_words(self, counter, key, want):
    got = threefry.threefry4x32(*(
        tuple(jnp.uint32(w) for w in four) for four in (key, counter)))
    self.assertEqual(tuple(map(int, got)), want)

  @parameterized.parameters('threefry2x32', 'threefry4x32')
  def test_an_entry_is_the_hash_of_its_place(self, impl):
    key = jax.random.key(9, impl=impl)
    high, low = threefry.words(key, (3, 50))
    at = jnp.uint32([149, 0, 77])
    for whole, some in zip((high, low), threefry.words_at(key, at)):
      np.testing.assert_array_equal(whole.ravel()[at], some)

  def test_equals_the_primitive_of_jax(self):
    key = jax.random.key(7)
    high, low = jax.jit(lambda k: threefry.words(k, (3, 50)))(key)
    first, second = jax.random.key_data(key)
    want = extend_random.threefry2x32_p.bind(
        jnp.full(150, first), jnp.full(150, second),
        jnp.zeros(150, jnp.uint32), jnp.arange(150, dtype=jnp.uint32))
    np.testing.assert_array_equal(high.ravel(), want[0])
    np.testing.assert_array_equal(low.ravel(), want[1])

  @parameterized.parameters('threefry2x32', 'threefry4x32')
  def test_a_shorter_draw_is_the_beginning_of_a_longer_one(self, impl):
    key = jax.random.key(1, impl=impl)
    for short, long in zip(threefry.words(key, (5,)),
                           threefry.words(key, (9,))):
      np.testing.assert_array_equal(short, long[:5])

  @parameterized.parameters('threefry4x32', 'rbg')
  def test_other_implementations_draw_their_own_bits(self, impl):
    key = jax.random.key(0, impl=impl)
    high, low = threefry.words(key, (1000,))
    self.assertEqual((high.dtype, low.shape), (jnp.uint32, (1000,)))
    self.assertFalse(bool((high == low).any()))
    other = threefry.words(jax.random.key(1, impl=impl), (1000,))[0]
    self.assertLess(int((high == other).sum()), 3)

  def test_an_entry_equals_the_draw_of_its_key(self):
    keys = samplers.element_keys(jax.random.key(3), samplers.CANDIDATE_NOISE,
                                 0, 6)
    for bound in (.5, 4., np.inf):
      rows = jax.vmap(lambda k, b=bound: samplers.truncated_gumbel(
          k, (7,), scale=1.3, bound=b))(keys)
      for i in (0, 6):
        np.testing.assert_array_equal(
            samplers.truncated_gumbel_entry(keys, i, scale=1.3, bound=bound),
            rows[:, i])

  @parameterized.parameters('threefry2x32', 'threefry4x32')
  def test_tiles_of_outcomes_never_show(self, impl):
    key, law = jax.random.key(5, impl=impl), np.full(20, .05)
    limits = samplers.thresholds(law)
    long = samplers.categorical(key, (3, 3000), thresholds=limits)
    high, low = threefry.words(key, (9000,))
    want = np.searchsorted(
        limits[:, 0] * 2.**32 + limits[:, 1],
        np.asarray(high) * 2.**32 + np.asarray(low), side='right')
    np.testing.assert_array_equal(np.ravel(long), want)

  def test_tiles_never_show(self):
    values = jnp.arange(9000, dtype=jnp.int32)
    keys = samplers.element_keys(jax.random.key(0), samplers.OUTCOME, 0, 9000)
    got = samplers.map_tiles(lambda k, v: (v + 1, jax.random.key_data(k)),
                             keys, values)
    np.testing.assert_array_equal(got[0], values + 1)
    np.testing.assert_array_equal(got[1], jax.random.key_data(keys))
