"""One StoBatch step: what it learns from and who computes it."""

import dataclasses
import functools
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp import guarantees
from jaxdp import models
from jaxdp.training import certificates
from jaxdp.training import parallel
from jaxdp.training import releases
from jaxdp.training import stobatch

_SIZE = 12  # records of a batch


def make_config(mode, **settings):
  fields = dict(mode=mode, num_examples=96, batch_size=_SIZE, attack_steps=2,
                optimizer='sgd', learning_rate=.05, reconstruction_rate=1e-4,
                reconstruction='published', clip_norm=1.)
  return stobatch.published('digits', **(fields | settings))


def make_batch(key, config, state, num_trainers=1, num_shards=1):
  """Released records; shard j of a trainer takes j, j + M, ..."""
  rng = np.random.default_rng(0)
  scales = stobatch.calibrate(config, state.params['encoder']['kernel'])
  images = rng.uniform(-1, 1, (96 * 2, 8, 8, 1)).astype(np.float32)
  labels = rng.integers(10, size=96 * 2).astype(np.int32)
  ids = np.arange(2 * num_trainers * _SIZE).reshape(2, num_trainers, -1)
  shards = lambda a: a.reshape(num_trainers, -1, num_shards).swapaxes(1, 2)
  release = jax.jit(functools.partial(releases.release, calibration=scales))
  halves = []
  for half in ids:
    half = shards(half)
    flat = release(key, images=images[half.ravel()],
                   labels=labels[half.ravel()],
                   ids=half.ravel().astype(np.int32))
    halves.append(jax.tree.map(
        lambda leaf, s=half.shape: leaf.reshape(*s, *leaf.shape[1:]), flat))
  parts = np.broadcast_to(np.arange(_SIZE, dtype=np.int32) * 3 // _SIZE,
                          (num_trainers, _SIZE))
  return stobatch.Batch(
      *halves, assignment=shards(parts), trainer=np.broadcast_to(
          np.arange(num_trainers, dtype=np.int32)[:, None],
          (num_trainers, num_shards)))


@functools.cache
def make_run(config, num_trainers=1, num_shards=1, backend='vmap',
             num_devices=None):
  devices = None if num_devices is None else jax.devices()[:num_devices]
  return parallel.map_trainers(
      stobatch.make_train_step(config), num_trainers=num_trainers,
      num_shards=num_shards, backend=backend, devices=devices,
      donate_state=False)


def one_step(config, key=None, **changes):
  key = jax.random.key(0) if key is None else key
  state = stobatch.init(key, config)._replace(**changes)
  batch = make_batch(key, config, state)
  return state, make_run(config)(key, state, batch)


def distance(first, second):
  return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(
      jax.tree.leaves(first), jax.tree.leaves(second)))


@pytest.mark.slow
class StepTest(parameterized.TestCase):

  @parameterized.parameters('paper', 'sound')
  def test_a_step_moves_both_parts_and_reports(self, mode):
    config = make_config(mode)
    state, (after, info) = one_step(config)
    self.assertEqual(int(after.step), 1)
    for part in ('encoder', 'tail'):
      self.assertGreater(distance(state.params[part], after.params[part]), 0.)
    self.assertTrue(all(np.isfinite(float(v)) for v in info))
    self.assertBetween(float(info.attack_bound), 0., config.max_attack_bound)
    self.assertEqual(mode == 'paper', bool(after.batch_stats))

  def test_the_first_layer_learns_from_the_reconstruction_alone(self):
    config = make_config('sound', clip_norm=None)
    state, (after, _) = one_step(config)
    # Another last layer changes every classification gradient.
    params = jax.tree.map(jnp.copy, state.params)
    params['tail']['last']['kernel'] *= 3.
    _, (other, _) = one_step(dataclasses.replace(config, adversarial_weight=0.),
                             params=params)
    _, (same, _) = one_step(dataclasses.replace(config, adversarial_weight=0.))
    np.testing.assert_array_equal(
        other.params['encoder']['bias'], same.params['encoder']['bias'])
    self.assertGreater(distance(after.params['tail'], other.params['tail']), 0.)

  def test_label_noise_adds_its_constant_once(self):
    config = make_config('paper', clip_norm=None)
    state, (after, _) = one_step(config)
    quiet = state.noise._replace(label=jnp.zeros_like(state.noise.label))
    _, (without, _) = one_step(config, noise=quiet)
    gap = (after.params['tail']['last']['kernel']
           - without.params['tail']['last']['kernel'])
    np.testing.assert_allclose(gap, .05 * state.noise.label, rtol=1e-3,
                               atol=1e-4)

  def test_sound_mode_has_no_noise_in_the_loss(self):
    state, _ = one_step(make_config('sound'))
    np.testing.assert_array_equal(state.noise.label, 0.)
    np.testing.assert_array_equal(state.noise.inputs, 0.)
    self.assertGreater(float(state.noise.input_scale), 0.)

  @parameterized.parameters(
      dict(official_clean_adversarial=True),
      dict(official_softmax_taylor=True), dict(official_initial_norm=True),
      dict(reconstruction='official'), dict(reconstruction='clipped'),
      dict(channel_copies=False, adversarial_weight=.5),
      dict(attack_steps=1),
      dict(max_attack_bound=.1), dict(clip_norm=.1), dict(norm='group'))
  def test_every_setting_changes_the_step(self, **setting):
    # Both parts move by what float32 shows: no clip, and a small rate for the
    # encoder, whose gradient under so much noise is a million times larger.
    base = make_config('paper', clip_norm=None, reconstruction_rate=1e-9)
    _, (after, _) = one_step(base)
    _, (other, _) = one_step(dataclasses.replace(base, **setting))
    self.assertGreater(distance(after.params, other.params), 1e-6)

  def test_microbatches_give_the_whole_batch(self):
    config = make_config('sound')
    _, (whole, _) = one_step(config)
    _, (parts, _) = one_step(dataclasses.replace(config, num_microbatches=3))
    # Attack sizes and starts are keyed by trainer and example, so the same
    # adversarial examples meet in another order of sums.
    self.assertLess(distance(whole.params, parts.params), 2e-6)

  def test_adversarial_examples_stay_in_the_ball_of_the_released_source(self):
    config = make_config('sound')
    key = jax.random.key(0)
    state = stobatch.init(key, config)
    batch = jax.tree.map(lambda a: jnp.asarray(a)[0, 0],
                         make_batch(key, config, state))
    attacked = stobatch.adversarial_examples(
        key, config, state, batch, attack_bound=.3)
    gap = np.abs(np.asarray(attacked - batch.source.images))
    # At 1,000 and more a float32 is 6e-5 apart.
    self.assertLess(gap.max(), .3 + 1e-3)
    self.assertGreater(gap.max(), .2)

  def test_a_dense_first_layer_trains_too(self):
    _, (after, info) = one_step(make_config('sound', first_layer='dense'))
    self.assertEqual(int(after.step), 1)
    self.assertTrue(np.isfinite(float(info.loss)))


@pytest.mark.slow
class LayoutTest(parameterized.TestCase):
  """The same run on one device, eight devices, and shards."""

  def params_after(self, config, num_steps, num_trainers, num_shards=1,
                   backend='vmap', num_devices=None):
    key = jax.random.key(3)
    state = stobatch.init(key, config)
    batch = make_batch(key, config, state, num_trainers, num_shards)
    run = make_run(config, num_trainers, num_shards, backend, num_devices)
    for _ in range(num_steps):
      state, _ = run(key, state, batch)
    return jax.tree.map(np.asarray, state.params)

  def test_eight_trainers_on_one_and_on_eight_devices(self):
    config = make_config('sound')
    one = self.params_after(config, 20, 8)
    for backend in ('pmap', 'shard_map'):
      other = self.params_after(config, 20, 8, backend=backend, num_devices=8)
      self.assertLess(distance(one, other), 1e-5, backend)

  @parameterized.parameters('paper', 'sound')
  def test_shards_of_a_trainer_do_not_show(self, mode):
    config = make_config(mode)
    one = self.params_after(config, 5, 2)
    other = self.params_after(config, 5, 2, num_shards=2, backend='shard_map',
                              num_devices=4)
    self.assertLess(distance(one, other), 1e-5)

  def test_the_clip_is_of_each_trainer(self):
    config = make_config('sound', clip_norm=1e-3, learning_rate=1.,
                         reconstruction_rate=1.)
    key = jax.random.key(3)
    before = stobatch.init(key, config).params
    after = self.params_after(config, 1, 8)
    norm = np.sqrt(sum(float(np.sum((a - np.asarray(b))**2)) for a, b in zip(
        jax.tree.leaves(after), jax.tree.leaves(before))))
    self.assertLessEqual(norm, 1e-3 * 1.01)


@pytest.mark.slow
class PredictTest(parameterized.TestCase):

  def outputs(self, config, fresh, key=None):
    state = stobatch.init(jax.random.key(0), config)
    images = jnp.float32(np.random.default_rng(1).uniform(
        -1, 1, (6, 8, 8, 1)))
    predict = jax.jit(stobatch.make_predict(config), static_argnums=3)
    key = jax.random.key(5) if key is None else key
    return np.asarray(predict(key, state, images, fresh))

  @parameterized.parameters('paper', 'sound')
  def test_fresh_noise_changes_a_vote_and_nothing_else_does(self, mode):
    config = make_config(mode)
    vote = self.outputs(config, True)
    np.testing.assert_array_equal(vote, self.outputs(config, True))
    self.assertGreater(np.abs(
        vote - self.outputs(config, True, jax.random.key(6))).max(), 1e-3)
    run = self.outputs(config, False)
    np.testing.assert_array_equal(
        run, self.outputs(config, False, jax.random.key(6)))
    np.testing.assert_allclose(np.exp(run).sum(1), 1., rtol=1e-5)

  def test_inference_and_divisor_matter(self):
    base = self.outputs(make_config('paper'), True)
    for setting in (dict(inference='single'), dict(noise_divisor=7.)):
      self.assertGreater(np.abs(base - self.outputs(
          make_config('paper', **setting), True)).max(), 1e-3)

  def test_a_prediction_does_not_depend_on_its_batch_mates(self):
    config = make_config('paper')
    state = stobatch.init(jax.random.key(0), config)
    images = jnp.float32(np.random.default_rng(1).uniform(-1, 1, (6, 8, 8, 1)))
    predict = stobatch.make_predict(config)
    alone = predict(None, state, images[:1], False)
    np.testing.assert_allclose(
        predict(None, state, images, False)[:1], alone, atol=1e-5)
    official = dataclasses.replace(config, official_batch_statistics=True)
    mixed = stobatch.make_predict(official)
    self.assertGreater(float(jnp.max(jnp.abs(
        mixed(None, state, images, False)[:1]
        - mixed(None, state, images[:1], False)))), 1e-3)


class FreshNoiseTest(parameterized.TestCase):
  """What the network of a vote gets, by a network that hands it back."""

  def passes(self, config, fresh=True, num=1_024):
    """(noise of the run, images, [(inputs, hidden noise) of each pass])."""
    model = stobatch.network(config)
    rng, shape = np.random.default_rng(2), (num, *model.hidden_shape)
    noise = releases.Noise(
        inputs=jnp.float32(rng.normal(size=model.image_shape)),
        hidden=jnp.float32(rng.normal(size=model.hidden_shape)), label=None,
        input_scale=jnp.float32(3.), hidden_scale=jnp.float32(5.))
    images = jnp.float32(rng.uniform(-1, 1, (num, *model.image_shape)))
    seen = []

    def forward(model, state, images, hidden_noise, statistics):
      del model, state, statistics
      seen.append((np.asarray(images), np.asarray(
          jnp.broadcast_to(hidden_noise, shape))))
      return jnp.zeros((len(images), 10))

    state = stobatch.State(0, None, None, None, noise)
    with mock.patch.object(stobatch, '_forward', forward):
      stobatch.make_predict(config)(jax.random.key(7), state, images, fresh)
    noise = noise._replace(inputs=np.asarray(noise.inputs),
                           hidden=np.asarray(noise.hidden))
    return noise, np.asarray(images), seen

  def assert_law(self, values, scale):
    values = values.ravel()
    law = lambda factor: stats.laplace(scale=factor * scale).cdf
    self.assertGreater(stats.kstest(values, law(1.)).pvalue, 1e-3)
    for wrong in (.95, 1.05):
      self.assertLess(stats.kstest(values, law(wrong)).pvalue, 1e-3)

  @parameterized.parameters(1., 2., 10.)
  def test_one_pass_has_both_noises_around_the_draw_of_the_run(self, psi):
    config = make_config('paper', inference='single', noise_divisor=psi)
    noise, images, ((inputs, hidden),) = self.passes(config)
    self.assert_law(inputs - images - noise.inputs, 3. / psi)
    self.assert_law(hidden - noise.hidden, 5. / psi)

  def test_each_pass_of_a_product_has_one_of_them(self):
    config = make_config('paper', noise_divisor=4.)
    noise, images, (first, second) = self.passes(config)
    self.assert_law(first[0] - images - noise.inputs, 3. / 4.)
    self.assert_law(second[1] - noise.hidden, 5. / 4.)
    np.testing.assert_array_equal(
        first[1], np.broadcast_to(noise.hidden, first[1].shape))
    np.testing.assert_array_equal(second[0], images + noise.inputs)

  def test_every_entry_has_a_draw_of_its_own(self):
    config = make_config('paper', model='cifar10', inference='single',
                         channel_copies=True)
    noise, images, ((inputs, _),) = self.passes(config, num=4)
    fresh = inputs - images - noise.inputs
    self.assertGreater(np.abs(np.diff(fresh, axis=-1)).min(), 0.)
    self.assertGreater(np.abs(np.diff(fresh, axis=0)).min(), 0.)

  def test_without_fresh_noise_the_draw_of_the_run_is_all(self):
    noise, images, ((inputs, hidden),) = self.passes(
        make_config('paper'), fresh=False)
    np.testing.assert_array_equal(inputs, images + noise.inputs)
    np.testing.assert_array_equal(
        hidden, np.broadcast_to(noise.hidden, hidden.shape))


class RadiiTest(parameterized.TestCase):
  """Radii of a calibration, without a network."""

  def mnist(self, **settings):
    config = stobatch.published(
        'mnist', mode='paper', num_examples=60_000,
        official_initial_norm=True, **settings)
    kernel = np.zeros((5, 5, 1, 32))
    kernel[0, 0, 0, 0] = .492859  # the spectral norm
    return config, stobatch.calibrate(config, kernel), kernel

  def test_the_published_factors_and_their_composition(self):
    setting = self.mnist()
    factors = certificates._published_divisors(*setting, attack_bound=.2)
    self.assertAlmostEqual(factors['kappa'], .2058, delta=1e-4)
    self.assertAlmostEqual(factors['phi'], .668, delta=1e-3)
    radius = certificates.radii(*setting, attack_bound=.2)['claimed']
    self.assertAlmostEqual(radius(np.e**2 / 10., .1), .1574, delta=1e-4)

  def test_a_claimed_ceiling_has_the_published_bounds(self):
    setting = self.mnist()
    row, = (row for row in certificates.ledger(
        *setting, num_samples=2_000, attack_bound=.2)
            if row['ledger'] == 'certified' and 'claimed' in row['part'])
    # 2,000 votes alike: .99735 and .00265, so 2.966 at robustness epsilon 1.
    self.assertAlmostEqual(row['radius'] / .157366, 2.966, delta=1e-3)
    proved = [certificates.correction(name) for name in certificates.RADII
              if name != 'claimed']
    self.assertEqual(set(proved), {'bonferroni'})

  @parameterized.parameters((False, 3.), (True, 1.))
  def test_the_channels_of_an_image_count_unless_asked(self, official, factor):
    config = stobatch.published(
        'cifar10', mode='paper', num_examples=50_000,
        official_input_sensitivity=official)
    kernel = np.ones((4, 4, 3, 128))
    scales = stobatch.calibrate(config, kernel)
    factors = certificates._published_divisors(
        config, scales, kernel, attack_bound=.2)
    self.assertAlmostEqual(
        factors['kappa'], scales.input_scale / (.2 * factor * 28 * 28),
        delta=1e-12)

  @parameterized.parameters((1e-3, 'laplace_renyi_linf'), (1e6, 'hidden_linf'))
  def test_one_pass_with_both_noises_has_the_larger_radius(self, scale, larger):
    config = make_config('sound', hidden_scale=scale)
    kernel = np.random.default_rng(3).normal(size=(3, 3, 1, 16))
    radii = certificates.radii(
        config, stobatch.calibrate(config, kernel), kernel)
    low, high = np.array([.6, .9, .999, .2]), np.array([.3, .05, .001, .5])
    best = radii['best_linf'](low, high)
    names = ('laplace_linf', 'laplace_renyi_linf', 'hidden_linf')
    np.testing.assert_array_equal(
        best, np.max([radii[name](low, high) for name in names], 0))
    np.testing.assert_array_equal(best, radii[larger](low, high))
    self.assertEqual(best[3], 0.)

  def test_one_noise_or_two_passes_have_no_best_of_two(self):
    sound, paper = make_config('sound'), make_config('paper')
    kernel = np.ones((3, 3, 1, 16))
    for config in (sound, paper):
      self.assertNotIn('best_linf', certificates.radii(
          config, stobatch.calibrate(config, kernel), kernel))
    single = dataclasses.replace(paper, inference='single')
    self.assertIn('best_linf', certificates.radii(
        single, stobatch.calibrate(single, kernel), kernel))

  @parameterized.parameters(
      ('paper', dict(), {'claimed', 'composed_linf'}),
      ('sound', dict(hidden_scale=2., noise_divisor=3.),
       {'laplace_l1', 'laplace_linf', 'laplace_renyi_linf', 'hidden_linf',
        'best_linf'}))
  def test_ceilings_say_what_they_rest_on(self, mode, settings, names):
    config = make_config(mode, **settings)
    kernel = np.ones((3, 3, 1, 16))
    rows = {row['part'].split(',')[0]: row for row in certificates.ledger(
        config, stobatch.calibrate(config, kernel), kernel)
            if row['ledger'] == 'certified'}
    self.assertEqual(set(rows), names)
    for name, row in rows.items():
      self.assertIn('certified at the clean input', row['reason'])
      self.assertIn(f'noise_divisor {config.noise_divisor:g}', row['reason'])
      self.assertContainsSubset(
          {'fresh independent noise on every entry at every vote',
           'real arithmetic', 'ideal random bits'}, row['conditions'], name)
      self.assertEqual((row['norm'], row['noise_divisor']), (
          'l1' if name == 'laplace_l1' else 'linf', config.noise_divisor))
      self.assertEqual(row.get('dimension'), None if name in (
          'laplace_l1', 'hidden_linf') else 64, name)
      self.assertEqual('operator_norm' in row, not name.startswith('laplace'))
    if mode == 'paper':  # 9 weights a unit, 16 units a map, times 16 maps
      self.assertEqual(rows['claimed']['operator_norm'], 9. * 16)
      self.assertBetween(rows['composed_linf']['operator_norm'],
                         .5 * 9 * 16 * 16, 9 * 16 * 16)


class LedgerTest(parameterized.TestCase):

  def rows(self, mode, **settings):
    config = make_config(mode, **settings)
    kernel = stobatch.init(jax.random.key(0), config).params['encoder'][
        'kernel']
    rows = certificates.ledger(config, stobatch.calibrate(config, kernel),
                               np.asarray(kernel), seeded=True)
    return {(row['ledger'], row['part']): row for row in rows}

  def test_paper_mode_claims_and_standard_accounting_gives_nothing(self):
    rows = self.rows('paper')
    claimed, standard = rows['claimed', 'total'], rows['standard', 'total']
    self.assertEqual((claimed['epsilon'], claimed['status']), (2., 'claimed'))
    self.assertEqual((standard['epsilon'], standard['status']),
                     (np.inf, 'none'))
    self.assertIn('normalisation', rows['standard', 'inputs']['reason'])

  def test_sound_mode_spends_its_budget_and_no_more(self):
    rows = self.rows('sound')
    total = rows['standard', 'total']
    self.assertEqual(total['status'], 'proved')
    self.assertLessEqual(total['epsilon'], 2. * (1 + 1e-9))
    self.assertGreater(total['epsilon'], 1.8)
    self.assertEqual(rows['claimed', 'total']['epsilon'], total['epsilon'])

  @parameterized.parameters('paper', 'sound')
  def test_a_seeded_key_is_said_not_to_be_secret(self, mode):
    for (ledger, _), row in self.rows(mode).items():
      if ledger != 'certified':
        self.assertIn('is not', row['conditions'][-1])

  def test_radii_say_how_they_stand(self):
    paper, sound = self.rows('paper'), self.rows('sound')
    status = lambda rows: {part.split(',')[0]: row['status'] for (
        ledger, part), row in rows.items() if ledger == 'certified'}
    self.assertEqual(status(paper), {'claimed': 'claimed',
                                     'composed_linf': 'proved'})
    self.assertEqual(set(status(sound)), {'laplace_l1', 'laplace_linf',
                                          'laplace_renyi_linf'})
    radius = {part.split(',')[0]: row['radius'] for (ledger, part), row in
              paper.items() if ledger == 'certified'}
    self.assertGreater(radius['claimed'], radius['composed_linf'])


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(
      ('paper', dict(epsilon=0.), 'epsilon'),
      ('paper', dict(epsilon=-1.), 'epsilon'),
      ('paper', dict(label_epsilon=2.), 'label_epsilon'),
      ('sound', dict(moments_epsilon=1.), 'moments_epsilon'),
      ('paper', dict(moments_epsilon=.1), 'moments_epsilon'),
      ('sound', dict(norm='batch'), 'batch'),
      ('sound', dict(official_clean_adversarial=True), 'official_clean'),
      ('sound', dict(channel_copies=True), 'channel_copies'),
      ('sound', dict(delta=1.), 'delta'),
      ('paper', dict(batch_size=97), 'batch_size'),
      ('paper', dict(batch_size=1.5), 'batch_size'),
      ('paper', dict(mode='safe'), 'mode'),
      ('paper', dict(attacks=('fgsm',)), 'attacks'),
      ('paper', dict(attacks=()), 'attacks'),
      ('paper', dict(learning_rate=float('inf')), 'learning_rate'),
      ('paper', dict(clip_norm=0.), 'clip_norm'),
      ('paper', dict(first_layer='dense', reconstruction='official'),
       'reconstruction'),
      ('paper', dict(noise_divisor=0.), 'noise_divisor'),
      ('paper', dict(noise_divisor=.99), 'noise_divisor=0.99 .*lower epsilon'),
      ('sound', dict(noise_divisor=.5), 'noise_divisor'),
      ('sound', dict(inference='product'),
       'inference=\'product\' with hidden_scale=0'),
      ('sound', dict(official_input_sensitivity=True), 'official_input'),
      ('paper', dict(hidden_scale=1.), 'hidden_scale'))
  def test_refuses_by_name(self, mode, settings, name):
    with self.assertRaisesRegex(ValueError, name):
      make_config(**({'mode': mode} | settings))

  def test_modes_fill_in_their_own_values(self):
    paper, sound = make_config('paper'), make_config('sound')
    self.assertEqual((paper.norm, paper.noise_divisor, paper.inference),
                     ('batch', 2., 'product'))
    self.assertEqual((sound.norm, sound.noise_divisor, sound.inference),
                     ('group', 1., 'single'))

  def test_mnist_has_the_scales_of_the_paper(self):
    config = stobatch.published('mnist', mode='paper', num_examples=60_000,
                                official_initial_norm=True)
    kernel = np.zeros((5, 5, 1, 32))
    kernel[0, 0, 0, 0] = .492859  # the spectral norm
    scales = stobatch.calibrate(config, kernel)
    self.assertAlmostEqual(scales.gamma, 8.038, delta=2e-3)
    self.assertAlmostEqual(scales.gamma_x, 1.98079, delta=1e-5)
    self.assertAlmostEqual(scales.input_epsilon, .06138, delta=1e-5)
    self.assertAlmostEqual(scales.input_scale, 32.27, delta=.01)
    self.assertAlmostEqual(scales.hidden_scale, 64.54, delta=.02)
    self.assertAlmostEqual(scales.label_scale, 512 / (2_499 * .1), delta=1e-9)
    # A batch's sums of x and of h / 2 have noise of Delta_R / epsilon_1 each.
    for total in (2_499 * scales.input_scale, 2_499 * scales.hidden_scale / 2):
      self.assertAlmostEqual(total, 4_950 / scales.input_epsilon, delta=1e-6)

  @parameterized.parameters(
      # gamma as quoted; epsilon_1, scales on pixels and on hidden units
      ('cifar10', 50_000, (4, 4, 3, 128), 18.8, .80, 6.41, 12.8),
      ('tiny_imagenet', 45_000, (7, 7, 3, 64), 139., 3.86, 8.69, 17.4))
  def test_larger_networks_have_the_scales_of_the_paper(
      self, name, num, shape, gamma, first, inputs, hidden):
    config = stobatch.published(name, mode='paper', num_examples=num,
                                official_initial_norm=True)
    model = stobatch.network(config)
    sensitivity = model.inputs_per_unit * (model.units_per_map + 2)
    kernel = np.zeros(shape)
    kernel[0, 0, 0, 0] = 2 * sensitivity / config.batch_size / gamma
    scales = stobatch.calibrate(config, kernel)
    self.assertAlmostEqual(scales.gamma, gamma, delta=1e-9)
    self.assertAlmostEqual(scales.input_epsilon, first, delta=.005)
    self.assertAlmostEqual(scales.input_scale, inputs, delta=.005)
    self.assertAlmostEqual(scales.hidden_scale, hidden, delta=.05)
    self.assertEqual((config.max_attack_bound, config.noise_divisor), (1., 10.))

  @parameterized.parameters(
      ('mnist', 7_840, 1.58), ('cifar10', 29_792, 3.13),
      ('tiny_imagenet', 90_112, .60))
  def test_all_maps_together_are_more_than_the_sensitivity_counts(
      self, name, joint, factor):
    model = models.images.get(name)
    # Replace-one, in L1, of the sums of x and of h / 2 over ALL maps.
    got = (2 * np.prod(model.image_shape)
           + model.units_per_map * model.num_maps)
    self.assertEqual(got, joint)
    counted = guarantees.stobatch_sensitivities(
        inputs_per_unit=model.inputs_per_unit,
        units_per_map=model.units_per_map, num_last=model.num_last)
    self.assertAlmostEqual(got / counted.reconstruction, factor, delta=.006)
