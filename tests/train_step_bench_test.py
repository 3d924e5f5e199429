"""Benchmarks of the training step and of votes: checked, then timed."""

import functools
import json
import os
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from benchmarks import certify_bench
from benchmarks import harness
from benchmarks import stobatch_loop
from benchmarks import summary
from benchmarks import train_step_bench

# One shape for all tests of the step: the loop is compiled once.
_CASE = train_step_bench.Case(
    dataset='digits', mode='paper', batch_size=6, trainers=2, shards=2,
    attack_steps=2)
_VOTED = certify_bench.Case(dataset='digits', images=2)
_VOTES = 40
_TIMES = ('first_run_s', 'compile_s', 'median_cpu_s', 'median_wall_s', 'flops',
          'frac_compute', 'machine', 'role', 'n')


@functools.cache
def _loop():
  """What the loop needs: config, key, state, shares, jitted parts."""
  key, state, batch = train_step_bench.problem(_CASE)
  config = _CASE.config
  return (config, key, state, stobatch_loop.shares(config, batch),
          stobatch_loop.parts(config))


@functools.cache
def _right_step():
  config, key, state, held, do = _loop()
  return stobatch_loop.step(do, config, key, state, held)


def _without_momentum(do):
  def ascend(*args):
    *first, unused_decay, images, momentum = args
    return do.ascend(*first, 0., images, momentum)
  return do._replace(ascend=ascend)


def _by_running_statistics(do):
  return do._replace(statistics=lambda state, *batch: state.batch_stats)


def _starting_at_the_sources(do):
  return do._replace(start=lambda key, ids, images, bound: images)


def _of_one_size(do):
  return do._replace(draw=lambda key, step, trainer: do.draw(key, step, 0))


def _of_another_key(do):
  return do._replace(draw=lambda key, step, trainer: do.draw(
      jax.random.fold_in(key, 1), step, trainer))


@functools.cache
def _problem():
  return certify_bench.problem(_VOTED)


@functools.cache
def _counted():
  """Counts and logits of the loop over votes."""
  return certify_bench.naive(_problem(), _VOTES)


@pytest.mark.slow
class TrainStepBenchTest(parameterized.TestCase):

  def test_rows_have_rates_shares_and_ratios_and_are_summed_up(self):
    out = os.path.join(self.create_tempdir().full_path, 'rows.jsonl')
    harness.emit(train_step_bench.run_case(_CASE, 1, ('loop',)), out)
    mine, loop = rows = summary.rows_of([out])
    self.assertEqual((mine['impl'], loop['impl']), ('jaxdp', 'loop'))
    for row in rows:
      self.assertContainsSubset((*_TIMES, 'images_per_s', 'frac_conv'), row)
      self.assertEqual(row['images'], 2 * 2 * 6)
      self.assertGreater(min(row['images_per_s'], row['frac_conv']), 0.)
    self.assertEqual(mine['flops'], loop['flops'])
    self.assertGreater(min(mine['ratio_to_loop'], mine['compile_s']), 0.)
    self.assertLessEqual(loop['max_difference'], 1e-5)
    text = summary.table(rows)
    self.assertIn(mine['name'], text)
    self.assertIn(f"{mine['ratio_to_loop']:.2f} loop", text)
    self.assertNotIn(loop['name'], text)

  def test_what_is_not_jitted_is_checked_and_timed_apart(self):
    mine, eager = train_step_bench.run_case(_CASE, 1, ('unjitted',))
    self.assertEqual((mine['impl'], eager['impl']), ('jaxdp', 'unjitted'))
    self.assertContainsSubset((*_TIMES, 'images_per_s'), eager)
    self.assertGreater(mine['ratio_to_unjitted'], 0.)
    self.assertNotIn('frac_conv', eager)
    self.assertLessEqual(eager['max_difference'], 1e-5)

  @parameterized.parameters(
      _without_momentum, _by_running_statistics, _starting_at_the_sources,
      _of_one_size, _of_another_key)
  def test_a_step_with_another_attack_is_refused(self, wrong):
    config, key, state, held, do = _loop()
    other = stobatch_loop.step(wrong(do), config, key, state, held)
    with self.assertRaisesRegex(ValueError, 'parameters of the .* differ'):
      train_step_bench.check('x', state, _right_step(), other)

  def test_a_trainer_left_out_is_refused(self):
    config, key, state, held, do = _loop()
    other = stobatch_loop.step(do, config, key, state, held[:1])
    with self.assertRaisesRegex(ValueError, 'parameters of the .* differ'):
      train_step_bench.check('x', state, _right_step(), other)

  def test_a_step_that_moves_nothing_cannot_pass(self):
    state = _loop()[2]
    train_step_bench.check('x', state, _right_step(), _right_step())
    with self.assertRaisesRegex(ValueError, 'would not show'):
      train_step_bench.check('x', state, state, state)

  def test_shards_and_attacks_share_out_every_source_once(self):
    held = _loop()[3]
    ids = np.concatenate([
        np.concatenate([share.benign.ids, *(
            source.ids for source in share.sources.values())])
        for share in held])
    self.assertEqual(sorted(ids.tolist()), list(range(_CASE.images)))
    self.assertEqual([share.trainer for share in held], [0, 1])
    self.assertEqual([len(source.ids) for source in held[0].sources.values()],
                     [2, 2, 2])

  def test_operations_are_of_every_call_the_loop_makes(self):
    config, key, state, held, do = _loop()
    count = lambda run: stobatch_loop.operations(do, run)
    step = lambda shares: count(lambda do: stobatch_loop.step(
        do, config, key, state, shares))
    update = count(lambda do: do.update(state, state.params, state.batch_stats))
    two, one = step(held), step(held[:1])
    self.assertAlmostEqual(two - update, 2 * (one - update), delta=1e-6 * two)
    # An attack step is a forward and a backward pass of the network.
    model_flops = 2 * 16 * (9 * 16 + 9 * 16 * 32 + 32 * 64) + 2 * 64 * 10
    self.assertGreater(two, _CASE.images * model_flops)

  def test_quick_is_small_and_flags_are_the_case(self):
    values = mock.Mock(**_CASE._asdict(), quick=False)
    self.assertEqual(train_step_bench.case_of(values), _CASE)
    values.quick = True
    self.assertEqual(train_step_bench.case_of(values).dataset, 'digits')
    with self.assertRaisesRegex(ValueError, 'shards=4 .* batch_size=6'):
      train_step_bench.problem(_CASE._replace(shards=4))


@pytest.mark.slow
class CertifyBenchTest(parameterized.TestCase):

  def test_rows_have_rates_ratios_and_memory_at_two_sizes(self):
    out = os.path.join(self.create_tempdir().full_path, 'rows.jsonl')
    harness.emit(certify_bench.run_case(_VOTED, [30, 60], _VOTES, 1), out)
    with open(out, encoding='utf-8') as file:
      *rows, memory = map(json.loads, file)
    self.assertEqual([(row['impl'], row['votes']) for row in rows], [
        ('jaxdp', 30), ('naive', 30), ('jaxdp', 60), ('naive', _VOTES)])
    for row in rows:
      self.assertContainsSubset((*_TIMES, 'votes_per_s', 'votes_checked'), row)
      self.assertGreater(row['votes_per_s'], 0.)
    self.assertAlmostEqual(rows[2]['flops'], 2 * rows[0]['flops'])
    self.assertGreater(rows[0]['ratio_to_naive'], 0.)
    self.assertEqual(memory['peak_bytes_by_votes'],
                     {'30': rows[0]['peak_bytes'], '60': rows[2]['peak_bytes']})
    self.assertEqual(memory['votes_ratio'], 2.)
    self.assertIn(rows[0]['name'], summary.table(rows + [memory]))

  def test_the_product_of_two_passes_counts_as_the_loop_does(self):
    given = certify_bench.problem(_VOTED._replace(mode='paper'))
    counts, logits = certify_bench.naive(given, _VOTES)
    certify_bench.check('x', certify_bench.ours(given, _VOTES), counts, logits)

  def test_votes_of_another_key_or_range_are_refused(self):
    given = _problem()
    other = given._replace(key=jax.random.key(5))
    with self.assertRaisesRegex(ValueError, 'went to another class'):
      certify_bench.check('x', certify_bench.ours(other, _VOTES), *_counted())
    with self.assertRaisesRegex(ValueError, 'expected .* votes'):
      certify_bench.check(
          'x', certify_bench.ours(given, _VOTES - 1), *_counted())

  def test_one_vote_moved_is_refused_but_not_between_equal_logits(self):
    counts, logits = np.array([[3, 1]]), np.zeros((4, 1, 2))
    logits[:, 0, 0] = [1., 1., 1., -1.]
    moved = np.array([[2, 2]])
    with self.assertRaisesRegex(ValueError, '1 votes of 4'):
      certify_bench.check('x', moved, counts, logits)
    logits[0] = 0.
    self.assertEqual(certify_bench.check('x', moved, counts, logits), 1)

  def test_unanimous_votes_are_no_check(self):
    logits = np.tile([1., 0.], (4, 1, 1))
    with self.assertRaisesRegex(ValueError, 'would not show'):
      certify_bench.check('x', np.array([[4, 0]]), np.array([[4, 0]]), logits)

  def test_memory_that_grows_with_the_votes_shows(self):
    if harness.peak_bytes(lambda: None) is None:
      self.skipTest('this system does not tell the high-water mark')
    grow = lambda given, num: np.ones((num, 2**20), np.uint8)
    with mock.patch.object(certify_bench, 'ours', grow):
      few, many = certify_bench.peak_bytes(None, [4, 64]).values()
    self.assertBetween(many - few, 55 * 2**20, 65 * 2**20)

  def test_memory_is_bytes_for_each_further_vote_or_unknown(self):
    row = certify_bench.memory_row(_VOTED, {100: 1_000, 300: 5_000, 200: 7})
    self.assertEqual((row['extra_bytes_a_vote'], row['votes_ratio']), (10., 3.))
    unknown = certify_bench.memory_row(_VOTED, {100: None, 300: None})
    self.assertIsNone(unknown['extra_bytes_a_vote'])


if __name__ == '__main__':
  absltest.main()
