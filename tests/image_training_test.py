"""A run on images: what it feeds, how it stops and goes on, what it says."""

import dataclasses
import itertools
import os
import stat
import types
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import image_evaluation
from experiments import image_training
from experiments import records
from experiments import train
from experiments.datasets import batches
from experiments.datasets import images as image_data
from jaxdp import models
from jaxdp.training import certificates
from jaxdp.training import stobatch

_DATA = image_data.load('digits', limit=96)


def make_run(mode='sound', num_steps=6, **settings):
  config = stobatch.published(
      'digits', mode=mode, num_examples=96, batch_size=12, attack_steps=1,
      **settings)
  return image_training.Run(
      method=config, dataset='digits', num_steps=num_steps, num_trainers=2,
      checkpoint_every=2, rows_every=2, limit=96)


def flag_values(out, **changes):
  values = dict(
      method='stobatch', mode='sound', dataset='digits', data_dir=None,
      epsilon=None, label_epsilon=None, epochs=.5, batch_size=12,
      learning_rate=None, settings='{"attack_steps": 1}', limit=96, flip=False,
      shift=0, trainers=2, shards=1, backend='vmap', checkpoint_every=2,
      attack_bound=.2, attack_steps=1, test_images=6, votes=4, out=out,
      seed=None, quick=False)
  return types.SimpleNamespace(**(values | changes))


class _Killed(BaseException):
  """As SIGKILL: nothing in the experiments may catch it."""


def _killing(fun, after):
  """`fun`, until it was called ``after`` times."""
  calls = itertools.count()

  def killed(*args):
    if next(calls) >= after:
      raise _Killed
    return fun(*args)

  return killed


class FeedTest(parameterized.TestCase):

  def test_no_record_is_fed_without_noise(self):
    run = make_run()
    key = jax.random.key(0)
    _, calibration = image_training.start(key, run, _DATA)
    batch = image_training.Feed(key, run, _DATA, calibration)(0)
    raw = image_data.scale(_DATA.train_images)
    for half in (batch.benign, batch.source):
      gap = np.abs(np.asarray(half.images) - raw[np.asarray(half.ids)])
      self.assertGreater(np.min(gap), 0.)
      self.assertGreater(np.mean(gap), .5 * calibration.input_scale)

  def test_a_record_is_released_the_same_way_in_every_step(self):
    run = make_run()
    key = jax.random.key(0)
    _, calibration = image_training.start(key, run, _DATA)
    feed = image_training.Feed(key, run, _DATA, calibration)
    seen = {}
    for step in range(6):
      batch = feed(step)
      for half in (batch.benign, batch.source):
        ids = np.asarray(half.ids).ravel()
        images = np.asarray(half.images).reshape(len(ids), -1)
        for i, image in zip(ids, images):
          np.testing.assert_array_equal(seen.setdefault(i, image), image)
    self.assertGreater(len(seen), 24)

  def test_flips_come_after_the_noise(self):
    run = dataclasses.replace(make_run(), flip=True)
    key = jax.random.key(0)
    _, calibration = image_training.start(key, run, _DATA)
    plain = image_training.Feed(key, make_run(), _DATA, calibration)(0)
    flipped = image_training.Feed(key, run, _DATA, calibration)(0)
    before = np.asarray(plain.benign.images).reshape(-1, 8, 8)
    after = np.asarray(flipped.benign.images).reshape(-1, 8, 8)
    turned = [np.array_equal(a, b[:, ::-1]) for a, b in zip(after, before)]
    same = [np.array_equal(a, b) for a, b in zip(after, before)]
    self.assertTrue(all(t != s for t, s in zip(turned, same)))
    self.assertTrue(any(turned) and any(same))


class DroppedTest(parameterized.TestCase):

  @parameterized.parameters(
      # records, batch, trainers; three batches are one pair and an odd one
      (96, 12, 1, 0), (96, 20, 1, 16), (96, 32, 1, 0), (96, 32, 2, 32))
  def test_records_that_are_never_fed_are_counted(self, num, size, trainers,
                                                  dropped):
    config = dataclasses.replace(make_run().method, num_examples=num,
                                 batch_size=size)
    run = dataclasses.replace(make_run(), method=config, num_trainers=trainers)
    self.assertEqual(run.num_dropped, dropped)
    row = train.run_row(run)
    self.assertEqual((row['num_dropped'], row['num_examples']), (dropped, num))
    self.assertIn(f'{dropped} of 96 records', train.summary([row]))
    if trainers == 1:
      fixed = batches.fixed_batches(jax.random.key(0), num, size,
                                    remainder='drop')
      self.assertEqual(num - fixed.size, dropped)

  @parameterized.parameters(dict(flip=True), dict(shift=1))
  def test_moved_images_do_not_lose_the_noise_of_their_old_place(self,
                                                                 **moved):
    config = stobatch.published(
        'digits', mode='paper', num_examples=96, batch_size=12,
        official_clean_adversarial=True)
    run = dataclasses.replace(make_run(), method=config)
    with self.assertRaisesRegex(
        ValueError, f'official_clean_adversarial.*{next(iter(moved))}='):
      dataclasses.replace(run, **moved)


@pytest.mark.slow
class RunTest(parameterized.TestCase):

  def out(self):
    return self.create_tempdir().full_path

  def params(self, trained):
    return jax.tree.leaves(trained.state.params)

  def test_a_stopped_run_goes_on_to_the_same_bits(self):
    key, run = jax.random.key(1), make_run()
    whole = image_training.train(key, run, _DATA, None)
    out = self.out()

    class Stop(Exception):
      pass

    original = image_training.Feed.__call__

    def stopping(feed, step):
      if step == 3:
        raise Stop
      return original(feed, step)

    image_training.Feed.__call__ = stopping
    try:
      with self.assertRaises(Stop):
        image_training.train(key, run, _DATA, out)
    finally:
      image_training.Feed.__call__ = original
    again = image_training.train(key, run, _DATA, out)
    self.assertEqual(again.num_steps, 4)  # from the checkpoint of step 2
    for a, b in zip(self.params(whole), self.params(again)):
      np.testing.assert_array_equal(a, b)

  def test_statistics_are_those_of_the_final_network(self):
    run = make_run('paper')
    key = jax.random.key(1)
    trained = image_training.train(key, run, _DATA, None)
    feed = image_training.Feed(key, run, _DATA, trained.calibration)
    statistics = stobatch.make_statistics(run.method)
    each = [statistics(key, trained.state, feed.batch(i)) for i in range(8)]
    want = jax.tree.map(lambda *parts: np.mean(parts, 0), *each)
    for a, b in zip(jax.tree.leaves(trained.state.batch_stats),
                    jax.tree.leaves(want)):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

  def test_another_config_is_refused(self):
    out = self.out()
    image_training.train(jax.random.key(1), make_run(num_steps=2), _DATA, out)
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      image_training.train(jax.random.key(1),
                           make_run(num_steps=2, epsilon=3.), _DATA, out)

  def test_a_loss_that_is_no_number_stops_the_run_by_step(self):
    out = self.out()
    run = make_run('paper', num_steps=40, learning_rate=1e30, optimizer='sgd',
                   reconstruction_optimizer='adam')
    with self.assertRaisesRegex(image_training.Diverged, 'step [0-9]+: '):
      image_training.train(jax.random.key(1), run, _DATA, out)

  def test_the_last_good_checkpoint_outlives_a_loss_that_is_no_number(self):
    key, run, out = jax.random.key(1), make_run(), self.out()
    whole = image_training.train(key, run, _DATA, None)
    feed = image_training.Feed.__call__

    def poisoned(self, step):
      batch = feed(self, step)
      images = batch.benign.images * (np.nan if step == 4 else 1.)
      return batch._replace(benign=batch.benign._replace(images=images))

    with mock.patch.object(image_training.Feed, '__call__', poisoned):
      with self.assertRaisesRegex(image_training.Diverged, '^step 5: loss is'):
        image_training.train(key, run, _DATA, out)
    start, _ = image_training.start(key, run, _DATA)
    kept = image_training._Keeper(run, out).resume(start)
    self.assertEqual(int(kept.step), 4)
    self.assertTrue(all(np.all(np.isfinite(leaf))
                        for leaf in jax.tree.leaves(kept.params)))
    again = image_training.train(key, run, _DATA, out)
    self.assertEqual(again.num_steps, 2)
    for a, b in zip(self.params(whole), self.params(again)):
      np.testing.assert_array_equal(a, b)

  def test_the_next_batch_is_fetched_while_a_step_runs(self):
    events, feed, row = [], image_training.Feed.__call__, image_training._row

    def feeding(self, step):
      events.append(('feed', step))
      return feed(self, step)

    def reading(step, *args):
      events.append(('read', step - 1))
      return row(step, *args)

    with mock.patch.object(image_training.Feed, '__call__', feeding), \
        mock.patch.object(image_training, '_row', reading):
      image_training.train(jax.random.key(1), make_run(num_steps=3), _DATA,
                           None)
    self.assertEqual(events, [('feed', 0), ('feed', 1), ('read', 0),
                              ('feed', 2), ('read', 1), ('read', 2)])

  def test_data_of_another_shape_or_number_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'num_examples=96'):
      image_training.check(make_run(), image_data.load('digits', limit=90))
    config = stobatch.published('mnist', mode='sound', num_examples=96,
                                batch_size=12)
    run = dataclasses.replace(make_run(), method=config)
    with self.assertRaisesRegex(ValueError, 'dataset='):
      image_training.check(run, _DATA)

  @parameterized.parameters(
      dict(num_steps=0), dict(num_trainers=0), dict(num_shards=5),
      dict(checkpoint_every=1.5))
  def test_refuses_by_name(self, **setting):
    with self.assertRaisesRegex(ValueError, next(iter(setting))):
      dataclasses.replace(make_run(), **setting)

  def test_more_trainers_than_pairs_of_batches_are_refused(self):
    run = dataclasses.replace(make_run(), num_trainers=5)
    with self.assertRaisesRegex(ValueError, 'num_trainers'):
      image_training.train(jax.random.key(0), run, _DATA, None)


class BinaryTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_a_run_ends_with_rows_ledgers_and_no_key(self):
    out = self.create_tempdir().full_path
    rows = train.execute(flag_values(out))
    kinds = {row['kind'] for row in rows}
    self.assertEqual(kinds, {'step', 'accuracy', 'certified', 'ledger', 'run'})
    self.assertEqual(rows[-1]['num_dropped'], 0)
    ledgers = {row['ledger']: row for row in rows if row['kind'] == 'ledger'}
    self.assertEqual(set(ledgers), {'claimed', 'standard', 'certified'})
    self.assertFalse(os.path.exists(os.path.join(out, 'key.resume')))
    text = train.summary(rows)
    for word in ('claimed', 'standard', 'certified', 'proved'):
      self.assertIn(word, text)
    self.assertNotIn('NOT met', text)  # the key came from the system
    again = train.execute(flag_values(out))
    self.assertEqual(rows, again)
    with self.assertRaisesRegex(ValueError, 'another config'):
      train.execute(flag_values(out, epsilon=3.))

  def test_a_run_killed_at_any_row_ends_with_all_of_them_and_no_key(self):
    # The network is not trained, its accuracy made up: what counts is the file.
    start = image_training.start(
        jax.random.key(0), train.run_of_flags(flag_values('unused'), 96), _DATA)

    def trained(key, run, data, out, file, backend):
      del key, data, out, backend
      image_training._write(file, {'kind': 'step', 'step': 2}, run)
      return image_training.Trained(*start, 0., 0)

    def accuracy(key, config, state, images, labels, cell):
      del key, config, state, images, labels
      return dataclasses.asdict(cell) | {'accuracy': .5, 'num_images': 6}

    def certified(key, config, calibration, state, images, labels, **unused):
      return [{'radius': name, 'attack_bound': .2, 'norm': 'linf',
               'status': 'proved', 'certified_accuracy': .5}
              for name in certificates.radii(config, calibration, None)]

    for owner, name, value in (
        (image_training, 'train', trained),
        (image_evaluation, 'accuracy', accuracy),
        (image_evaluation, 'certified', certified)):
      self.enter_context(mock.patch.object(owner, name, value))
    self.enter_context(mock.patch.object(train.image_data, 'load',
                                         lambda *args, **kwargs: _DATA))
    whole = train.execute(flag_values(self.create_tempdir().full_path))
    self.assertLen(whole, 24)
    for owner, name, count in ((records.Records, 'append', len(whole)),
                               (train, 'forget_key', 1)):
      for after in range(count):
        out = self.create_tempdir().full_path
        with mock.patch.object(owner, name, _killing(
            getattr(owner, name), after)), self.assertRaises(_Killed):
          train.execute(flag_values(out))
        rows = train.execute(flag_values(out))
        self.assertCountEqual(map(str, rows), map(str, whole), after)
        self.assertEqual(rows[-1], whole[-1])
        self.assertFalse(os.path.exists(os.path.join(out, 'key.resume')))

  def test_the_key_of_an_unfinished_run_is_kept_for_its_owner_alone(self):
    out = self.create_tempdir().full_path
    key = train.root_key(out, None, 'mine')
    path = os.path.join(out, 'key.resume')
    self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
    again = train.root_key(out, None, 'mine')
    np.testing.assert_array_equal(jax.random.key_data(key),
                                  jax.random.key_data(again))
    self.assertEqual(jax.random.key_data(key).size, 4)
    train.forget_key(out)
    self.assertFalse(np.array_equal(
        jax.random.key_data(key),
        jax.random.key_data(train.root_key(out, None, 'mine'))))

  def test_a_key_makes_noise_for_its_own_run_alone(self):
    out = self.create_tempdir().full_path
    run, other = make_run(), make_run(epsilon=3.)
    owner = train.owner_of(run, _DATA)
    data = dataclasses.replace(_DATA, train_images=_DATA.train_images[::-1])
    train.root_key(out, None, owner)
    for another in (train.owner_of(other, _DATA), train.owner_of(run, data)):
      self.assertNotEqual(owner, another)
      with self.assertRaisesRegex(ValueError, 'other settings'):
        train.root_key(out, None, another)

  def test_a_run_refused_for_its_key_leaves_the_directory_as_it_was(self):
    out = self.create_tempdir().full_path
    train.root_key(out, None, 'another')
    with self.assertRaisesRegex(ValueError, 'other settings'):
      train.execute(flag_values(out))
    self.assertEqual(os.listdir(out), ['key.resume'])

  def test_an_out_that_is_a_file_is_refused(self):
    out = self.create_tempfile().full_path
    with self.assertRaisesRegex(ValueError, 'out=.*is a file'):
      train.execute(flag_values(out))

  def test_a_run_does_not_go_on_under_another_key(self):
    out = self.create_tempdir().full_path
    os.makedirs(os.path.join(out, 'checkpoints'))
    with self.assertRaisesRegex(ValueError, 'second time'):
      train.root_key(out, None, 'mine')
    first, second = (train.run_of_flags(flag_values(out, seed=seed), 96)
                     for seed in (1, 2))
    with records.Records(os.path.join(out, 'rows.jsonl'), first):
      pass
    with self.assertRaisesRegex(ValueError, 'seed'):
      records.Records(os.path.join(out, 'rows.jsonl'), second)

  @parameterized.parameters(
      (dict(settings='[1]'), 'settings'), (dict(settings='{bad'), 'settings'),
      (dict(settings='{"depth": 3}'), 'depth'),
      (dict(settings='{"mode": "paper"}'), 'mode'),
      (dict(settings='{"delta": "x"}'), 'delta'),
      (dict(settings='{"attacks": 5}'), 'attacks'),
      (dict(settings='{"copies": 2}'), 'copies'),
      (dict(epsilon=-1.), 'epsilon'), (dict(label_epsilon=9.), 'label_epsilon'),
      (dict(mode='sound', settings='{"norm": "batch"}'), 'batch'),
      (dict(epochs=0.), 'epochs=0.0 must be .* > 0'),
      (dict(epochs=-1.), 'epochs=-1'), (dict(epochs=float('nan')), 'epochs'),
      (dict(epochs=float('inf')), 'epochs'), (dict(shards=5), 'num_shards'))
  def test_bad_flags_are_named(self, changes, name):
    with self.assertRaisesRegex(ValueError, name):
      train.run_of_flags(flag_values('unused', **changes), 96)

  @parameterized.parameters(
      dict(votes=0), dict(test_images=0), dict(attack_steps=-1),
      dict(attack_bound=0.), dict(attack_bound=float('nan')))
  def test_what_is_measured_is_checked_before_anything_is_trained(self, **bad):
    out = self.create_tempdir().full_path
    with self.assertRaisesRegex(ValueError, next(iter(bad))):
      train.execute(flag_values(out, **bad))
    self.assertEmpty(os.listdir(out))

  def test_epochs_that_are_not_given_are_ten_and_a_tenth_with_quick(self):
    for quick, steps in ((False, 40), (True, 4)):
      run = train.run_of_flags(
          flag_values('unused', epochs=None, quick=quick), 96)
      self.assertEqual(run.num_steps, steps)

  def test_rows_of_a_run_name_its_config(self):
    out = self.create_tempdir().full_path
    run = make_run()
    with records.Records(os.path.join(out, 'rows.jsonl'), run) as file:
      self.assertEqual(file.provenance['config']['method']['mode'], 'sound')


class EvaluationTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(deployment='mean'), dict(attack='cw'), dict(labels='none'),
      dict(network='other'))
  def test_refuses_by_name(self, **setting):
    with self.assertRaisesRegex(ValueError, next(iter(setting))):
      image_evaluation.Cell(**setting)

  def test_the_official_attack_knows_neither_noise_nor_statistics(self):
    run = make_run('paper')
    config, key = run.method, jax.random.key(0)
    state, _ = image_training.start(key, run, _DATA)
    state = state._replace(batch_stats=jax.tree.map(
        lambda leaf: leaf * 3. + 2., state.batch_stats))
    images = jnp.asarray(image_data.scale(_DATA.test_images[:8]))
    labels = jnp.asarray(_DATA.test_labels[:8])
    model = stobatch.network(config)
    start = models.images.init(key, model)['batch_stats']  # mean 0, variance 1

    def loss_fn(x):
      (_, logits), _ = models.images.classify(
          model, state.params['tail'], start,
          models.images.encode(model, state.params['encoder'], x))
      scores = jax.nn.log_softmax(logits)
      return -jnp.take_along_axis(scores, labels[:, None], 1).sum()

    want = jnp.clip(images + .2 * jnp.sign(jax.grad(loss_fn)(images)), -1., 1.)
    cell = image_evaluation.Cell(attack='fgsm', attack_bound=.2)
    got = {network: np.asarray(image_evaluation._attacked(
        key, config, state, images, labels, dataclasses.replace(
            cell, network=network))) for network in image_evaluation.NETWORKS}
    np.testing.assert_allclose(got['official'], want, atol=1e-6)
    self.assertGreater(np.mean(got['deployed'] != got['official']), .05)

  def test_paper_mode_shows_the_official_attack_beside_ours(self):
    for mode, num in (('sound', 10), ('paper', 18)):
      cells = train.cells(.2, 10, 200, make_run(mode).method)
      self.assertLen(set(cells), num)
      self.assertEqual(any(c.network == 'official' for c in cells),
                       mode == 'paper')
