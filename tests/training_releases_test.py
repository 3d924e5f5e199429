"""What leaves the release: its law, its sharing, and what an audit finds."""

import dataclasses

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxdp import auditing
from jaxdp import guarantees
from jaxdp.training import moments
from jaxdp.training import releases

_PAPER = releases.Calibration(
    mode='paper', image_shape=(4, 4, 2), hidden_shape=(2, 2, 3), num_classes=5,
    num_last=6, input_scale=32.27, hidden_scale=64.5, label_scale=2.,
    label_epsilon=.1, input_epsilon=.06, gamma=8., gamma_x=2., norm=.5)
_SOUND = dataclasses.replace(_PAPER, mode='sound', label_scale=0.,
                             hidden_scale=0., label_epsilon=1.)
_RELEASE = jax.jit(releases.release, static_argnums=1)


def records(num=64, seed=0):
  rng = np.random.default_rng(seed)
  return (jnp.float32(rng.uniform(-1, 1, (num, 4, 4, 2))),
          jnp.int32(rng.integers(5, size=num)),
          jnp.arange(num, dtype=jnp.int32))


class SharingTest(parameterized.TestCase):

  def test_differences_survive_in_paper_mode_and_not_in_sound_mode(self):
    images, labels, ids = records()
    key = jax.random.key(1)
    for calibration, is_exposed in ((_PAPER, True), (_SOUND, False)):
      noisy = _RELEASE(key, calibration, images, labels, ids).images
      gap = (noisy[0] - noisy[1]) - (images[0] - images[1])
      # float32 rounds x + noise near 300 by 3e-5.
      self.assertEqual(bool(jnp.all(jnp.abs(gap) < 2e-4)), is_exposed)
      self.assertGreater(float(jnp.min(jnp.abs(noisy - images))), 0.)

  def test_channels_share_a_draw_only_where_asked(self):
    images, labels, ids = records(8)
    key = jax.random.key(2)
    for calibration, is_shared in (
        (_PAPER, False), (_SOUND, False),
        (dataclasses.replace(_PAPER, channel_copies=True), True)):
      noise = _RELEASE(key, calibration, images, labels, ids).images - images
      gap = jnp.abs(noise[..., 0] - noise[..., 1])
      self.assertEqual(bool(jnp.all(gap < 2e-4)), is_shared)

  def test_a_record_gets_the_same_noise_in_every_batch_and_order(self):
    images, labels, ids = records()
    key = jax.random.key(3)
    for calibration in (_PAPER, _SOUND):
      whole = _RELEASE(key, calibration, images, labels, ids)
      order = jnp.array([40, 3, 17])
      part = _RELEASE(key, calibration, images[order], labels[order],
                      ids[order])
      np.testing.assert_array_equal(part.images, whole.images[order])
      np.testing.assert_array_equal(part.targets, whole.targets[order])

  def test_128_bit_keys_are_used_whole(self):
    images, labels, ids = records(4)
    outputs = []
    for words in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 9, 3, 4]):
      key = jax.random.wrap_key_data(jnp.uint32(words), impl='threefry4x32')
      outputs.append(np.asarray(_RELEASE(key, _SOUND, images, labels,
                                         ids).images))
    self.assertFalse(np.array_equal(outputs[0], outputs[1]))
    self.assertFalse(np.array_equal(outputs[0], outputs[2]))


class LawTest(parameterized.TestCase):

  def test_sound_noise_is_laplace_of_the_scale_on_every_entry(self):
    images, labels, ids = (jnp.zeros((4096, 4, 4, 2)), jnp.zeros(4096, int),
                           jnp.arange(4096))
    noise = np.asarray(_RELEASE(jax.random.key(4), _SOUND, images, labels,
                                ids).images).ravel()
    law = stats.laplace(scale=_SOUND.input_scale)
    self.assertGreater(stats.kstest(noise, law.cdf).pvalue, 1e-3)
    for wrong in (.95, 1.05):
      self.assertLess(stats.kstest(
          noise, stats.laplace(scale=wrong * _SOUND.input_scale).cdf).pvalue,
                      1e-3)

  def test_paper_noise_has_the_published_scales(self):
    draw = jax.jit(jax.vmap(
        lambda key: releases.draw_noise(key, _PAPER)))
    noise = draw(jax.random.split(jax.random.key(5), 2000))
    for values, scale in ((noise.inputs, 32.27), (noise.hidden, 64.5),
                          (noise.label, 2.)):
      values = np.asarray(values).ravel()
      self.assertGreater(
          stats.kstest(values, stats.laplace(scale=scale).cdf).pvalue, 1e-3)
      self.assertLess(stats.kstest(
          values, stats.laplace(scale=1.1 * scale).cdf).pvalue, 1e-3)

  def test_a_sum_over_a_batch_has_the_noise_of_one_draw(self):
    # m records with chi / m each: the sum is chi, of scale m times a record's.
    size = 8
    images, labels, ids = records(size)

    def sum_of_noise(key):
      released = releases.release(key, _PAPER, images, labels, ids)
      return jnp.sum(released.images - images, 0)

    keys = jax.random.split(jax.random.key(12), 500)
    sums = np.asarray(jax.jit(jax.vmap(sum_of_noise))(keys))
    draws = jax.jit(jax.vmap(lambda k: releases.draw_noise(k, _PAPER)))(keys)
    np.testing.assert_allclose(sums, size * draws.inputs, atol=1e-2)
    hidden = np.asarray(draws.hidden)[:, None] * np.ones((1, size, 1, 1, 1))
    for values, scale in ((sums, size * 32.27),
                          (np.sum(hidden / 2., 1), size * 64.5 / 2.)):
      values = values.ravel()
      self.assertGreater(
          stats.kstest(values, stats.laplace(scale=scale).cdf).pvalue, 1e-3)
      self.assertLess(stats.kstest(
          values, stats.laplace(scale=1.1 * scale).cdf).pvalue, 1e-3)

  def test_sound_mode_shares_nothing_between_records(self):
    noise = releases.draw_noise(jax.random.key(6), _SOUND)
    for shared in (noise.inputs, noise.hidden, noise.label):
      np.testing.assert_array_equal(shared, 0.)
    self.assertEqual(float(noise.input_scale), np.float32(32.27))

  def test_targets_are_unbiased_and_labels_are_flipped(self):
    num = 20_000
    labels = jnp.full(num, 3)
    images = jnp.zeros((num, 4, 4, 2))
    targets = np.asarray(_RELEASE(jax.random.key(7), _SOUND, images, labels,
                                  jnp.arange(num)).targets)
    odds = np.e  # label_epsilon = 1
    truth, lie = odds / (odds + 4), 1 / (odds + 4)
    error = np.sqrt(truth * (1 - truth) / num) / (truth - lie)
    np.testing.assert_allclose(targets.mean(0), np.eye(5)[3], atol=4 * error)
    kept = np.mean(targets.argmax(1) == 3)
    self.assertLess(abs(kept - truth), 4 * np.sqrt(truth * (1 - truth) / num))

  def test_paper_targets_are_the_exact_labels(self):
    images, labels, ids = records()
    targets = _RELEASE(jax.random.key(8), _PAPER, images, labels, ids).targets
    np.testing.assert_array_equal(targets, np.eye(5)[np.asarray(labels)])

  def test_sound_mode_clips_what_lies_outside(self):
    far = jnp.full((1, 4, 4, 2), 1e6).at[0, 0, 0, 0].set(jnp.nan)
    noisy = _RELEASE(jax.random.key(9), _SOUND, far, jnp.zeros(1, int),
                     jnp.zeros(1, int)).images
    self.assertLess(float(jnp.max(jnp.abs(noisy))),  # a NaN fails this too
                    1. + 25 * _SOUND.input_scale)


class AuditTest(parameterized.TestCase):
  """Neighbours of the paper's own kind: L1 distance at most 1."""

  def neighbours(self):
    images = np.zeros((2, 4, 4, 2), np.float32)
    other = images.copy()
    other[0, 0, 0, 0] = 1.
    return images, other

  def audit(self, calibration, claim):
    labels, ids = jnp.zeros(2, jnp.int32), jnp.arange(2)

    def fun(key, images):
      return releases.release(key, calibration, images, labels, ids).images

    first, second = self.neighbours()
    return auditing.audit(
        fun, first, second, key=jax.random.key(10), num_trials=20_000,
        claim=claim, score=lambda noisy: noisy[0, 0, 0, 0] - noisy[1, 0, 0, 0])

  def test_paper_mode_violates_its_own_claim(self):
    claim = _PAPER.input_epsilon / _PAPER.gamma_x  # Theorem 2, at L1 <= 1
    result = self.audit(_PAPER, claim)
    self.assertEqual(result.verdict, 'violated')
    self.assertGreater(result.epsilon_lower, .9 * result.ceiling)

  def test_sound_mode_stays_below_its_ledger(self):
    ledger = guarantees.laplace_vector_epsilon(
        dimension=32, shift=2., scale=_SOUND.input_scale, delta=0.)
    result = self.audit(_SOUND, ledger)
    self.assertEqual(result.verdict, 'not violated')

  def test_the_audit_sees_half_the_noise(self):
    # Metric DP at distance 1 is 1 / scale; a release with a tenth of the
    # scale must be caught, or the sound verdict means nothing.
    weak = dataclasses.replace(_SOUND, input_scale=.1)
    self.assertEqual(self.audit(weak, 1.).verdict, 'violated')


class CheckTest(parameterized.TestCase):

  @parameterized.parameters(
      (np.full((1, 4, 4, 2), 1.5), [0], 'must lie in'),
      (np.full((1, 4, 4, 2), np.nan), [0], 'must lie in'),
      (np.zeros((1, 4, 4, 2)), [5], 'labels has values'),
      (np.zeros((2, 4, 4, 2)), [0], 'labels'),
      (np.zeros((4, 4, 2)), [0], 'shape'))
  def test_refuses_what_the_sensitivity_does_not_cover(self, images, labels,
                                                       message):
    with self.assertRaisesRegex(ValueError, message):
      releases.check_records(images, labels, 5)


class MomentsTest(parameterized.TestCase):

  @staticmethod
  def patches(images):
    return images.reshape(len(images), 2, 16)  # two patches of 16

  def test_sums_are_exact_where_the_budget_is_huge(self):
    images = np.asarray(records(100)[0])
    got = moments.release(jax.random.key(11), self.patches,
                          [images[:60], images[60:]], epsilon=1e9)
    rows = images.reshape(-1, 16)
    np.testing.assert_allclose(got.first, rows.mean(0), atol=1e-5)
    np.testing.assert_allclose(got.second, rows.T @ rows / len(rows),
                               atol=1e-5)

  def test_a_record_that_is_no_number_counts_as_zero(self):
    images = np.asarray(records(20)[0])
    broken, zero = images.copy(), images.copy()
    broken[3], zero[3] = np.nan, 0.
    got, want = (moments.release(jax.random.key(13), self.patches, [chunk],
                                 epsilon=1.) for chunk in (broken, zero))
    for a, b in zip(got, want):
      np.testing.assert_array_equal(a, b)
      self.assertTrue(np.all(np.isfinite(a)))

  def test_noise_has_the_scale_of_the_sensitivity(self):
    num, per_image, d, epsilon = 50, 2, 16, 2.
    zeros = np.zeros((num, 4, 4, 2), np.float32)
    first, second = [], []
    for seed in range(40):
      got = moments.release(jax.random.key(seed), self.patches, [zeros],
                            epsilon=epsilon)
      np.testing.assert_array_equal(got.second, got.second.T)
      first.append(np.asarray(got.first) * num * per_image)
      second.append(np.asarray(got.second)[np.triu_indices(d)]
                    * num * per_image)
    for values, sensitivity in ((first, 2 * per_image * d),
                                (second, per_image * d * (d + 1))):
      law = stats.laplace(scale=2 * sensitivity / epsilon)
      values = np.concatenate(values)
      self.assertGreater(stats.kstest(values, law.cdf).pvalue, 1e-3)
      self.assertLess(stats.kstest(values, stats.laplace(
          scale=2. * 2. * sensitivity / epsilon).cdf).pvalue, 1e-3)

  @parameterized.parameters(0., -1., float('nan'))
  def test_refuses_a_budget_that_is_none(self, epsilon):
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      moments.release(jax.random.key(0), self.patches, [], epsilon=epsilon)

  def test_refuses_no_record(self):
    with self.assertRaisesRegex(ValueError, 'empty'):
      moments.release(jax.random.key(0), self.patches, [], epsilon=1.)
