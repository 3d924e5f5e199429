"""Tests of experiments.datasets.batches and .augment: keys, laws, order."""

import collections

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments.datasets import augment
from experiments.datasets import batches
from jaxdp import samplers
from jaxdp import threefry

_KEY = jax.random.key(20)
_FALSE_ALARM = 1e-3


def _uniform_pvalue(values, num_values):
  """Chi-square test that integers are uniform on [0, num_values)."""
  return stats.chisquare(np.bincount(values, minlength=num_values)).pvalue


class FixedBatchesTest(parameterized.TestCase):

  @parameterized.parameters((36, 1), (36, 9), (36, 36))
  def test_batches_hold_each_example_once(self, num, size):
    ids = batches.fixed_batches(_KEY, num, size)
    self.assertEqual((ids.shape, ids.dtype), ((num // size, size), np.int32))
    self.assertEqual(sorted(ids.ravel().tolist()), list(range(num)))
    self.assertNotEqual(ids.ravel().tolist(), list(range(num)))
    np.testing.assert_array_equal(
        ids, batches.fixed_batches(_KEY, num, size))

  @parameterized.parameters(8, 7)
  def test_a_remainder_is_refused_or_dropped_aloud(self, size):
    left = 36 % size
    with self.assertRaisesRegex(
        ValueError, f"num_examples=36 leaves {left} over in batches of {size}"):
      batches.fixed_batches(_KEY, 36, size)
    with self.assertLogs('absl', 'INFO') as logs:
      ids = batches.fixed_batches(_KEY, 36, size, remainder='drop')
    self.assertIn(f'{left} of 36 examples dropped', logs.output[0])
    self.assertEqual(ids.shape, (36 // size, size))
    self.assertLen(set(ids.ravel().tolist()), 36 - left)

  def test_settings_out_of_range_are_refused(self):
    for size in (0, 37):
      with self.assertRaisesRegex(ValueError, f'batch_size={size} must lie'):
        batches.fixed_batches(_KEY, 36, size)
    with self.assertRaisesRegex(ValueError, "remainder='pad' must be"):
      batches.fixed_batches(_KEY, 36, 8, remainder='pad')

  def test_keys_place_an_example_uniformly(self):
    places = [int(np.argmax(batches.fixed_batches(
        jax.random.key(seed), 36, 9).ravel() == 0)) for seed in range(720)]
    self.assertGreater(_uniform_pvalue(places, 36), _FALSE_ALARM)
    # A law that leaves example 0 in place one time in ten would be seen.
    wrong = np.where(np.arange(720) % 10 == 0, 0, places)
    self.assertLess(_uniform_pvalue(wrong, 36), _FALSE_ALARM)

  def test_a_wide_key_is_used_whole(self):
    data = [jnp.array(words, jnp.uint32) for words in ([1, 2, 3, 4],
                                                       [1, 2, 3, 5],
                                                       [0, 2, 3, 4])]
    drawn = [batches.fixed_batches(
        jax.random.wrap_key_data(words, impl='threefry4x32'), 36, 9)
             for words in data]
    self.assertLen({ids.tobytes() for ids in drawn}, 3)


class ScheduleTest(parameterized.TestCase):
  """Nine batches, four local trainers, two of them active."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.steps = np.arange(1500)
    run = jax.jit(jax.vmap(lambda step: batches.schedule(_KEY, 9, 2, step)))
    cls.trainers, cls.benign, cls.source = map(np.asarray, run(cls.steps))

  def test_each_trainer_holds_the_same_two_batches_for_ever(self):
    held = collections.defaultdict(set)
    for trainer, benign, source in zip(
        self.trainers.ravel(), self.benign.ravel(), self.source.ravel()):
      held[int(trainer)].add((int(benign), int(source)))
    self.assertEqual(sorted(held), [0, 1, 2, 3])
    self.assertTrue(all(len(pairs) == 1 for pairs in held.values()), held)
    batch_ids = [batch for pairs in held.values() for pair in pairs
                 for batch in pair]
    self.assertLen(set(batch_ids), 8)  # the ninth has no partner
    self.assertNotEqual(batch_ids, sorted(batch_ids))

  def test_a_batch_keeps_one_role(self):
    self.assertFalse(set(self.benign.ravel()) & set(self.source.ravel()))

  def test_trainers_are_drawn_uniformly_without_replacement(self):
    self.assertEqual(self.trainers.shape, (1500, 2))
    self.assertTrue((self.trainers[:, 0] != self.trainers[:, 1]).all())
    ordered_pairs = self.trainers[:, 0] * 4 + self.trainers[:, 1]
    codes = np.searchsorted(np.unique(ordered_pairs), ordered_pairs)
    self.assertGreater(_uniform_pvalue(codes, 12), _FALSE_ALARM)
    wrong = np.where(self.steps % 10 == 0, 0, codes)
    self.assertLess(_uniform_pvalue(wrong, 12), _FALSE_ALARM)

  def test_a_step_does_not_depend_on_those_before_it(self):
    for step in (900, 1, np.int64(1499), jnp.int32(0)):
      drawn = batches.schedule(_KEY, 9, 2, step)
      for found, wanted in zip(
          drawn, (self.trainers, self.benign, self.source)):
        self.assertEqual(found.dtype, jnp.int32)
        np.testing.assert_array_equal(found, wanted[int(step)])

  def test_another_key_pairs_other_batches(self):
    drawn = [batches.schedule(jax.random.key(seed), 9, 2, 5)
             for seed in range(4)]
    self.assertLen({np.stack(arrays).tobytes() for arrays in drawn}, 4)

  def test_all_trainers_may_be_active(self):
    trainers, benign, source = batches.schedule(_KEY, 9, 4, 3)
    self.assertEqual(sorted(trainers.tolist()), [0, 1, 2, 3])
    self.assertLen({*benign.tolist(), *source.tolist()}, 8)

  def test_one_trainer_takes_the_batches_in_turn(self):
    drawn = [batches.schedule(_KEY, 3, 1, step) for step in range(4)]
    self.assertEqual([[int(array[0]) for array in arrays] for arrays in drawn],
                     [[0, 0, 1], [0, 1, 2], [0, 2, 0], [0, 0, 1]])

  def test_one_trainer_of_many_may_keep_its_roles(self):
    drawn = [batches.schedule(_KEY, 9, 1, step, roles='fixed')
             for step in range(30)]
    self.assertTrue(all(array.shape == (1,) for array in drawn[0]))
    roles = [{int(arrays[role][0]) for arrays in drawn} for role in (1, 2)]
    self.assertLen(roles[0], 4)
    self.assertFalse(roles[0] & roles[1])

  def test_settings_out_of_range_are_refused(self):
    for num, found in ((5, 'num_trainers=5 must lie between 1 and 4.*'
                        'num_batches=9'), (0, 'num_trainers=0')):
      with self.assertRaisesRegex(ValueError, found):
        batches.schedule(_KEY, 9, num, 0)
    with self.assertRaisesRegex(ValueError, 'between 1 and 0'):
      batches.schedule(_KEY, 1, 1, 0)
    with self.assertRaisesRegex(ValueError, 'is for one trainer, not'):
      batches.schedule(_KEY, 9, 2, 0, roles='rotating')
    with self.assertRaisesRegex(ValueError, "roles='x' must be"):
      batches.schedule(_KEY, 9, 2, 0, roles='x')
    with self.assertRaisesRegex(ValueError, 'step=-1 must lie'):
      batches.schedule(_KEY, 9, 2, -1)


class _Source:
  """An iterator that counts what was taken, and may break."""

  def __init__(self, num, broken_at=None):
    self.num, self.broken_at = num, broken_at
    self.taken, self.is_closed = 0, False

  def __iter__(self):
    return self

  def __next__(self):
    if self.taken == self.broken_at:
      raise OSError('the disk is gone')
    if self.taken == self.num:
      raise StopIteration
    self.taken += 1
    return {'x': np.full(8, self.taken), 'step': np.int32(self.taken)}

  def close(self):
    self.is_closed = True


class PrefetchTest(parameterized.TestCase):

  @parameterized.parameters(1, 3, 99)
  def test_items_come_in_order_and_on_the_device(self, size):
    source = _Source(7)
    found = []
    with jax.transfer_guard_host_to_device('disallow'):
      for item in batches.prefetch(source, size):
        self.assertIsInstance(item['x'], jax.Array)
        self.assertLessEqual(source.taken - len(found), size)
        found.append(item)
    self.assertEqual([int(item['step']) for item in found],
                     [1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(found[6]['x'], np.full(8, 7))
    self.assertTrue(source.is_closed)

  def test_the_next_items_are_taken_before_they_are_asked_for(self):
    source = _Source(7)
    items = batches.prefetch(source, 3)
    self.assertEqual(source.taken, 0)
    next(items)
    self.assertEqual(source.taken, 3)
    next(items)
    self.assertEqual(source.taken, 4)

  def test_an_error_comes_after_the_items_before_it(self):
    source = _Source(7, broken_at=3)
    items = batches.prefetch(source, 5)
    self.assertEqual([int(next(items)['step']) for _ in range(3)], [1, 2, 3])
    with self.assertRaisesRegex(OSError, 'the disk is gone'):
      next(items)
    self.assertTrue(source.is_closed)
    with self.assertRaises(StopIteration):
      next(items)

  def test_closing_early_closes_the_source(self):
    source = _Source(7)
    items = batches.prefetch(source)
    next(items)
    items.close()
    self.assertTrue(source.is_closed)
    self.assertEqual(source.taken, 2)

  def test_items_are_spread_as_the_sharding_says(self):
    mesh = jax.make_mesh((8,), ('shard',),
                         axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.P('shard'))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    item = next(batches.prefetch(
        _Source(1), sharding={'x': spread, 'step': whole}))
    self.assertEqual(item['x'].sharding, spread)
    self.assertLen(item['x'].addressable_shards, 8)
    self.assertEqual(item['step'].sharding, whole)

  def test_nothing_comes_of_nothing(self):
    self.assertEqual(list(batches.prefetch([])), [])
    with self.assertRaisesRegex(ValueError, 'size=0 must be at least 1'):
      batches.prefetch([], 0)


@pytest.mark.slow
class AugmentTest(parameterized.TestCase):
  """One set of 600 images of 5 x 5 x 3 whose pixels are all different."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.ids = np.arange(100, 700, dtype=np.int32)
    pixels = np.random.Generator(np.random.Philox(3)).permuted(
        np.tile(np.linspace(-1, 1, 75, dtype=np.float32), (600, 1)), axis=1)
    cls.images = pixels.reshape(600, 5, 5, 3)
    cls.cropped = cls.run_all(flip=True, pad=1, crop=4)
    cls.bright = cls.run_all(brightness=(.25, 1.25), channels=augment.BLUE)

  @classmethod
  def run_all(cls, epoch=7, key=_KEY, **settings):
    return np.asarray(augment.augment(
        key, jnp.asarray(cls.images), jnp.asarray(cls.ids), epoch, **settings))

  def draws(self, cropped):
    """(flip, top, left) of each image, found by trying all of them."""
    padded = np.pad(self.images, ((0, 0), (1, 1), (1, 1), (0, 0)),
                    constant_values=-1)
    flipped = padded[:, :, ::-1]
    found = []
    for index, image in enumerate(cropped):
      matches = [
          (flip, top, left) for flip, view in enumerate((padded, flipped))
          for top in range(4) for left in range(4)
          if np.array_equal(view[index, top:top + 4, left:left + 4], image)]
      self.assertLen(matches, 1)
      found.append(matches[0])
    return np.array(found)

  def test_an_image_is_flipped_and_shifted_uniformly(self):
    self.assertEqual(self.cropped.shape, (600, 4, 4, 3))
    codes = self.draws(self.cropped) @ [16, 4, 1]
    self.assertGreater(_uniform_pvalue(codes, 32), _FALSE_ALARM)
    wrong = np.where(np.arange(600) % 10 == 0, 0, codes)
    self.assertLess(_uniform_pvalue(wrong, 32), _FALSE_ALARM)

  def test_results_do_not_depend_on_the_batch(self):
    run = lambda rows: np.asarray(augment.augment(
        _KEY, jnp.asarray(self.images[rows]), jnp.asarray(self.ids[rows]), 7,
        flip=True, pad=1, crop=4))
    for rows in (np.arange(40), np.arange(560, 600), np.arange(40)[::-1] * 13):
      np.testing.assert_array_equal(run(rows), self.cropped[rows])

  def test_epochs_ids_and_keys_draw_afresh_and_repeat(self):
    settings = {'flip': True, 'pad': 1, 'crop': 4}
    drawn = self.draws(self.cropped)
    for other in (self.run_all(8, **settings),
                  self.run_all(key=jax.random.key(21), **settings)):
      shared = np.mean((self.draws(other) == drawn).all(axis=1))
      self.assertBetween(shared, 0, .08)  # 1/32 and 6 deviations of luck
    np.testing.assert_array_equal(self.run_all(7, **settings), self.cropped)
    np.testing.assert_array_equal(
        self.run_all(jnp.int32(7), **settings), self.cropped)

  def test_only_the_blue_channel_is_scaled_by_a_uniform_factor(self):
    np.testing.assert_array_equal(self.bright[..., :2], self.images[..., :2])
    blue, was = self.bright[..., 2], self.images[..., 2]
    self.assertLessEqual(np.abs(blue).max(), 1)
    inside = (np.abs(blue) < 1) & (np.abs(was) > .2)
    ratio = np.where(inside, blue / np.where(inside, was, 1), np.nan)
    factors = np.nanmedian(ratio, axis=(1, 2))
    np.testing.assert_allclose(
        blue, np.clip(was * factors[:, None, None], -1, 1), atol=2**-22)
    law = stats.uniform(.25, 1.)
    self.assertGreater(stats.kstest(factors, law.cdf).pvalue, _FALSE_ALARM)
    wrong = stats.uniform(.25, .9)
    self.assertLess(stats.kstest(factors, wrong.cdf).pvalue, _FALSE_ALARM)

  def test_switching_one_change_on_leaves_the_others(self):
    both = self.run_all(flip=True, pad=1, crop=4, brightness=(.25, 1.25),
                        channels=augment.BLUE)
    np.testing.assert_array_equal(both[..., :2], self.cropped[..., :2])
    self.assertFalse(np.array_equal(both[..., 2], self.cropped[..., 2]))

  def test_brightness_of_all_channels_stays_in_range(self):
    bright = self.run_all(brightness=(1.5, 1.5))
    np.testing.assert_array_equal(
        bright, np.clip(self.images * np.float32(1.5), -1, 1))

  def test_nothing_asked_for_changes_nothing(self):
    np.testing.assert_array_equal(self.run_all(), self.images)

  def test_the_released_settings_give_28_of_32(self):
    images = jnp.zeros((2, 32, 32, 3))
    changed = augment.augment(_KEY, images, jnp.arange(2), 0,
                              **augment.PHAN20_CIFAR10)
    self.assertEqual(changed.shape, (2, 28, 28, 3))

  def test_the_stream_is_that_of_its_purpose_and_id(self):
    @jax.jit
    def draw(ids):
      key = samplers.id_keys(_KEY, samplers.AUGMENT, ids)[2]
      return threefry.words(jax.random.fold_in(key, 7), (3,))
    word = draw(self.ids[:3])[0][1]
    factor = .25 + int(word) / 2**32
    np.testing.assert_allclose(
        self.bright[2, ..., 2],
        np.clip(self.images[2, ..., 2] * factor, -1, 1), atol=2**-22)

  def test_the_middle_is_cropped_for_tests(self):
    middle = augment.center_crop(self.images, 3)
    np.testing.assert_array_equal(middle, self.images[:, 1:4, 1:4])
    np.testing.assert_array_equal(augment.center_crop(self.images, 2),
                                  self.images[:, 1:3, 1:3])
    with self.assertRaisesRegex(ValueError, r'side=6 must lie in \[1, 5\]'):
      augment.center_crop(self.images, 6)

  @parameterized.parameters(
      ({'crop': 6}, 'crop=6 must lie'), ({'crop': 0}, 'crop=0 must lie'),
      ({'pad': -1}, 'pad=-1'),
      ({'brightness': (1.25, .25)}, 'must be .low, high'),
      ({'brightness': (-1, 1)}, 'must be .low, high'),
      ({'channels': (2,)}, 'need brightness'),
      ({'channels': (3,), 'brightness': (1, 1)}, 'channels=.3,. must be'))
  def test_settings_out_of_range_are_refused(self, settings, found):
    with self.assertRaisesRegex(ValueError, found):
      self.run_all(**settings)

  def test_unscaled_images_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'uint8 must be scaled'):
      augment.augment(_KEY, np.zeros((1, 5, 5, 3), np.uint8), np.zeros(1, int),
                      0)


if __name__ == '__main__':
  absltest.main()
