"""One step gives the same state on every layout of trainers and shards."""

import functools
import os
import pathlib
import socket
import subprocess
import sys
import warnings
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxdp import samplers
from jaxdp.training import checkpoints
from jaxdp.training import parallel

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SPEC = jax.sharding.PartitionSpec
_NUM_STEPS, _RATE, _CLIP, _SCALE = 20, .5, .4, .01
_FEATURES, _CLASSES, _EXAMPLES = 5, 3, 8  # examples of one trainer


class _State(NamedTuple):
  """A linear softmax and its step."""
  params: dict
  step: jax.Array


def _loss(params, batch):
  logits = batch['x'] @ params['w'] + params['b'][None]
  log_probs = jax.nn.log_softmax(logits)
  return -jnp.mean(jnp.take_along_axis(log_probs, batch['y'][:, None], 1))


def _noise(key, trainer, step):
  """A trainer's own noise, by its id and the step's."""
  key = jax.random.fold_in(key, 64 * step + trainer)
  draw = jax.random.uniform(key, (_FEATURES + 1, _CLASSES), minval=-1.)
  return {'w': _SCALE * draw[1:], 'b': _SCALE * draw[0]}


def _step(key, state, batch):
  loss, grads = jax.value_and_grad(_loss)(state.params, batch)
  loss, grads = parallel.mean_over_shards((loss, grads))
  norm = jnp.sqrt(sum(jnp.sum(g ** 2) for g in grads.values()))
  factor = jnp.minimum(1., _CLIP / norm)
  noise = parallel.mean_over_shards(  # all alike; the batch is a shard's
      _noise(key, batch['trainer'], state.step))
  grads = {name: factor * g + noise[name] for name, g in grads.items()}
  loss, grads, norm = parallel.mean_over_trainers((loss, grads, norm))
  params = {name: p - _RATE * grads[name] for name, p in state.params.items()}
  return _State(params, state.step + 1), {'loss': loss, 'norm': norm}


def _key():
  return jax.random.fold_in(jax.random.key(3), samplers.TRAIN)


def _start():
  """The first state, on the host."""
  params = {'w': np.zeros((_FEATURES, _CLASSES), np.float32),
            'b': np.zeros(_CLASSES, np.float32)}
  return _State(params, np.int32(0))


def _batch(num_trainers, num_shards):
  """Fixed data whose trainers disagree, so that clips bite differently."""
  rng = np.random.default_rng(7)
  x = rng.normal(size=(num_trainers, _EXAMPLES, _FEATURES))
  x = x * np.linspace(.1, 3., num_trainers)[:, None, None]
  y = rng.integers(0, _CLASSES, (num_trainers, _EXAMPLES))
  split = lambda a: a.reshape(num_trainers, num_shards, -1, *a.shape[2:])
  trainer = np.broadcast_to(
      np.arange(num_trainers, dtype=np.int32)[:, None],
      (num_trainers, num_shards))
  return {'x': split(x).astype(np.float32),
          'y': split(y).astype(np.int32), 'trainer': trainer}


def _run(run, num_trainers, num_shards):
  key, state, info = _key(), _start(), None
  batch = run.place(_batch(num_trainers, num_shards))
  for _ in range(_NUM_STEPS):
    state, info = run(key, state, batch)
  return state, info


@functools.cache
def _oracle(num_trainers, clip_the_sum=False):
  """The same training, trainer after trainer, in NumPy float64."""
  batch = {k: v[:, 0] for k, v in _batch(num_trainers, 1).items()}
  params = {k: v.astype(np.float64) for k, v in _start().params.items()}
  noise = jax.vmap(jax.vmap(_noise, (None, 0, None)), (None, None, 0))
  noise = jax.jit(noise)(_key(), np.arange(8), np.arange(_NUM_STEPS))
  noise = {k: np.asarray(v, np.float64) for k, v in noise.items()}
  clipped = 0
  for step in range(_NUM_STEPS):
    raw = []
    for i in range(num_trainers):
      x, y = batch['x'][i].astype(np.float64), batch['y'][i]
      logits = x @ params['w'] + params['b'][None]
      probs = np.exp(logits - logits.max(1, keepdims=True))
      probs /= probs.sum(1, keepdims=True)
      residual = (probs - np.eye(_CLASSES)[y]) / len(y)
      raw.append({'w': x.T @ residual, 'b': residual.sum(0)})
    if clip_the_sum:
      total = {k: sum(g[k] for g in raw) for k in params}
      raw = [total] * num_trainers
    mean = {k: np.zeros_like(v) for k, v in params.items()}
    for i, grads in enumerate(raw):
      norm = np.sqrt(sum((g ** 2).sum() for g in grads.values()))
      clipped += norm > _CLIP
      for k, g in grads.items():
        mean[k] += (g * min(1., _CLIP / norm) + noise[k][step, i]
                    ) / num_trainers
    params = {k: p - _RATE * mean[k] for k, p in params.items()}
  return params, clipped


def _gap(params, other):
  return max(np.abs(np.asarray(params[k], np.float64) - other[k]).max()
             for k in other)


def of_process(address, num_processes, process_id, directory):
  """One process of the run over several; writes what it ended with."""
  parallel.initialize(address, int(num_processes), int(process_id))
  run = parallel.map_trainers(_step, num_trainers=8, backend='shard_map')
  mine = parallel.local_trainers(8)
  batch = {k: v[list(mine)] for k, v in _batch(8, 1).items()}
  state = _start()
  with checkpoints.Checkpoints(f'{directory}/run', {'rate': _RATE}) as store:
    for i in range(_NUM_STEPS):
      if i == _NUM_STEPS // 2:
        store.save(i, state)
        store.wait()
        state = run(_key(), state, batch)[0]  # thrown away
        i, state = store.restore_latest(state)
      state, _ = run(_key(), state, batch)
  np.savez(f'{directory}/{process_id}.npz', mine=list(mine),
           num_processes=jax.process_count(), num_devices=jax.device_count(),
           step=np.asarray(state.step.addressable_data(0)),
           **{k: np.asarray(v.addressable_data(0))
              for k, v in state.params.items()})


def _wrong(num_trainers, check_vma):
  """The mean over trainers of a local gradient, by a shard_map of its own."""
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()), 'trainer')
  batch = {k: v[:, 0] for k, v in _batch(num_trainers, 1).items()}

  def of_device(params, batch):
    grads = jax.grad(_loss)(params, jax.tree.map(lambda x: x[0], batch))
    return jax.lax.pmean(grads, 'trainer')

  return jax.jit(jax.shard_map(
      of_device, mesh=mesh, in_specs=(_SPEC(), _SPEC('trainer')),
      out_specs=_SPEC(), check_vma=check_vma))(_start().params, batch)


@pytest.mark.slow
class LayoutsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('vmap', 8, 1, 'vmap', 1),
      ('pmap_of_8_devices', 8, 1, 'pmap', 8),
      ('pmap_of_4_devices_with_2_trainers_each', 8, 1, 'pmap', 4),
      ('shard_map_8x1', 8, 1, 'shard_map', 8),
      ('shard_map_of_4_devices_with_2_trainers_each', 8, 1, 'shard_map', 4),
      ('two_shards_vmap', 4, 2, 'vmap', 1),
      ('two_shards_pmap', 4, 2, 'pmap', 4),
      ('two_shards_shard_map_4x2', 4, 2, 'shard_map', 8),
      ('two_shards_shard_map_2x2_with_2_trainers_each', 4, 2, 'shard_map', 4))
  def test_every_layout_trains_to_the_oracles_state(
      self, num_trainers, num_shards, backend, num_devices):
    traces = []

    def step(key, state, batch):
      traces.append(batch['x'].shape)
      return _step(key, state, batch)

    run = parallel.map_trainers(
        step, num_trainers=num_trainers, num_shards=num_shards,
        backend=backend, devices=jax.devices()[:num_devices])
    state, info = _run(run, num_trainers, num_shards)
    expected, clipped = _oracle(num_trainers)
    # Both kinds of trainer occur, and the noise shows.
    self.assertBetween(clipped, 1, num_trainers * _NUM_STEPS - 1)
    # 20 steps of numbers near 1 in float32: 20 * 0.5 * a few 1e-7.
    self.assertLess(_gap(state.params, expected), 1e-5)
    self.assertGreater(
        _gap(state.params, _oracle(num_trainers, clip_the_sum=True)[0]), .05)
    self.assertEqual(int(state.step), _NUM_STEPS)
    self.assertEqual(traces, [(_EXAMPLES // num_shards, _FEATURES)])
    for leaf in jax.tree.leaves((state, info)):
      self.assertTrue(leaf.sharding.is_fully_replicated)
      self.assertLen(leaf.addressable_shards, num_devices)
      for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, leaf.addressable_data(0))

  def test_the_default_check_of_shard_map_multiplies_gradients_by_n(self):
    right, wrong = (_wrong(8, check)['w'] for check in (False, True))
    ratio = np.linalg.norm(wrong) / np.linalg.norm(right)
    self.assertAlmostEqual(ratio, 8., places=3)
    run = parallel.map_trainers(
        lambda key, state, batch: (state, parallel.mean_over_trainers(
            parallel.mean_over_shards(jax.grad(_loss)(state.params, batch)))),
        num_trainers=8, backend='shard_map')
    _, grads = run(jax.random.key(0), _start(), _batch(8, 1))
    np.testing.assert_allclose(grads['w'], right, atol=1e-7)

  @parameterized.parameters('vmap', 'pmap', 'shard_map')
  def test_a_state_that_trainers_do_not_share_is_refused(self, backend):
    forgets = lambda key, state, batch: (
        state - parallel.mean_over_shards(batch['x'].mean()), {})
    run = parallel.map_trainers(forgets, num_trainers=8, backend=backend)
    with self.assertRaisesRegex(ValueError, 'out_axes'):
      run(jax.random.key(0), np.float32(0.), _batch(8, 1))

  @parameterized.parameters('vmap', 'pmap', 'shard_map')
  def test_typed_keys_pass_in_the_state_and_the_batch(self, backend):
    keys = jax.random.split(jax.random.key(1), (8, 1))

    def step(key, state, batch):
      draw = jax.random.uniform(batch) + jax.random.uniform(key)
      return jax.random.fold_in(state, 1), parallel.mean_over_trainers(
          parallel.mean_over_shards(draw))

    run = parallel.map_trainers(step, num_trainers=8, backend=backend)
    state, mean = run(jax.random.key(0), jax.random.key(5), keys)
    expected = jax.vmap(jax.random.uniform)(keys[:, 0]).mean()
    self.assertAlmostEqual(
        float(mean), float(expected + jax.random.uniform(jax.random.key(0))),
        places=5)
    np.testing.assert_array_equal(
        jax.random.key_data(state),
        jax.random.key_data(jax.random.fold_in(jax.random.key(5), 1)))


@pytest.mark.slow
class BuffersTest(parameterized.TestCase):

  def _state(self):
    return {'a': jnp.ones((4, 4)), 'b': jnp.zeros(3)}

  def _runner(self, backend, **settings):
    def step(key, state, batch):
      del key
      mean = parallel.mean_over_trainers(parallel.mean_over_shards(batch))
      return jax.tree.map(lambda x: x + mean, state), mean
    return parallel.map_trainers(
        step, num_trainers=8, backend=backend, **settings)

  @parameterized.parameters('vmap', 'pmap', 'shard_map')
  def test_the_state_is_donated_without_a_warning_or_a_second_program(
      self, backend):
    key, batch = jax.random.key(0), np.arange(8.).reshape(8, 1)
    run = self._runner(backend)
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      state, _ = run(key, self._state(), batch)
      placed = run.place(batch)
      with jax.log_compiles(), self.assertNoLogs('jax', 'WARNING'):
        after, _ = run(key, state, placed)
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(state)))
    np.testing.assert_array_equal(after['b'], np.full(3, 7.))

  def test_the_state_stays_where_it_is_not_to_be_donated(self):
    run = self._runner('pmap', donate_state=False)
    key, batch = jax.random.key(0), np.arange(8.).reshape(8, 1)
    state, _ = run(key, self._state(), batch)
    run(key, state, batch)
    np.testing.assert_array_equal(state['b'], np.full(3, 3.5))

  @parameterized.parameters('pmap', 'shard_map')
  def test_a_state_from_elsewhere_is_copied_and_stays_whole(self, backend):
    state, host = self._state(), jax.tree.map(np.array, self._state())
    batch = np.arange(8.).reshape(8, 1)
    run = self._runner(backend)
    for first in (state, host):
      after, _ = run(jax.random.key(0), first, batch)
      run(jax.random.key(0), after, batch)
      np.testing.assert_array_equal(first['a'], np.ones((4, 4)))

  def test_a_state_that_holds_one_array_twice_can_be_donated(self):
    run = self._runner('vmap')
    key, batch = jax.random.key(0), np.arange(8.).reshape(8, 1)
    state, _ = run(key, self._state(), batch)
    after, _ = run(key, {**state, 'average': state['b']}, batch)
    np.testing.assert_array_equal(after['average'], after['b'])

  @parameterized.parameters(('pmap', 4, 2), ('shard_map', 8, 1))
  def test_a_batch_is_placed_once_by_rows(self, backend, num_devices, rows):
    run = self._runner(backend, devices=jax.devices()[:num_devices])
    placed = run.place({'x': np.zeros((8, 1, 6), np.float32)})
    self.assertIs(run.place(placed)['x'], placed['x'])
    for shard in placed['x'].addressable_shards:
      self.assertEqual(shard.data.shape, (rows, 1, 6))


class RefusalsTest(parameterized.TestCase):

  @parameterized.parameters(
      (6, 1, 'pmap', None, r'devices=jax.devices\(\)\[:6\]'),
      (4, 1, 'pmap', None, 'num_trainers=4 cannot be shared'),
      (4, 1, 'shard_map', None, '8 devices'),
      (2, 3, 'shard_map', None, 'num_shards=3 shards'),
      (2, 2, 'shard_map', None, r'devices=jax.devices\(\)\[:4\]'),
      (0, 1, 'vmap', None, 'num_trainers=0'),
      (1, 0, 'vmap', None, 'num_shards=0'),
      (8, 1, 'jit', None, "backend='jit'"),
      (8, 1, 'pmap', [], r'devices=\[\]'))
  def test_layouts_that_do_not_divide_are_refused_with_advice(
      self, num_trainers, num_shards, backend, devices, message):
    with self.assertRaisesRegex(ValueError, message):
      parallel.map_trainers(
          _step, num_trainers=num_trainers, num_shards=num_shards,
          backend=backend, devices=devices)

  def test_vmap_takes_one_device(self):
    with self.assertRaisesRegex(ValueError, 'one device'):
      parallel.map_trainers(_step, num_trainers=8, backend='vmap',
                            devices=jax.devices())

  @parameterized.parameters(
      ((8, 2, 3), r'\(8, 1\)'), ((1, 8), r'\(8, 1\)'), ((8,), r'\(8, 1\)'))
  def test_batches_of_another_layout_are_refused(self, shape, message):
    run = parallel.map_trainers(_step, num_trainers=8, backend='vmap')
    with self.assertRaisesRegex(ValueError, message):
      run(jax.random.key(0), _start(), {'x': np.zeros(shape, np.float32)})

  def test_an_empty_batch_is_refused(self):
    run = parallel.map_trainers(_step, num_trainers=8, backend='vmap')
    with self.assertRaisesRegex(ValueError, 'no arrays'):
      run.place({})

  @parameterized.parameters(
      ((None, None, 1), 'alone'), (('a:1', 1, 1), 'alone'),
      ((None, 2, 0), 'coordinator_address'), (('a:1', 2, None), 'process_id'),
      (('a:1', 2, 2), r'\[0, num_processes=2\)'), (('a:1', 0, 0), 'at least'))
  def test_processes_that_contradict_each_other_are_refused(
      self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      parallel.initialize(*arguments)

  @parameterized.parameters(
      (8, 1, (0, 0, 1, 1), range(4, 8)), (4, 2, (0, 0, 1, 1), range(2, 4)),
      (6, 1, (0, 1, 1), range(2, 6)), (2, 4, (0, 0, 1, 1), 'num_shards=4'),
      (2, 2, (0, 1, 1, 0), 'several processes'),
      (6, 1, (1, 0, 1), 'one after the other'), (1, 1, (0,), 'process 1'))
  def test_each_process_feeds_the_trainers_of_its_devices(
      self, num_trainers, num_shards, owners, expected):
    devices = [mock.Mock(process_index=i) for i in owners]
    with (mock.patch.object(jax, 'process_count', lambda: 2),
          mock.patch.object(jax, 'process_index', lambda: 1)):
      if isinstance(expected, range):
        self.assertEqual(expected, parallel.local_trainers(
            num_trainers, num_shards, devices))
        return
      with self.assertRaisesRegex(ValueError, expected):
        parallel.local_trainers(num_trainers, num_shards, devices)

  def test_one_process_needs_no_network(self):
    parallel.initialize()
    parallel.initialize('a:1', 1, 0)
    self.assertEqual(parallel.local_trainers(8), range(8))


class AccumulateTest(parameterized.TestCase):

  def _params_and_batch(self, num):
    rng = np.random.default_rng(1)
    return (
        {'w': jnp.asarray(rng.normal(size=(64, 32)), jnp.float32),
         'v': jnp.asarray(rng.normal(size=(32,)), jnp.float32)},
        {'x': jnp.asarray(rng.normal(size=(num, 64)), jnp.float32),
         'trainer': jnp.int32(3)})

  def _grad(self, params, batch):
    def loss(params):
      hidden = jnp.tanh(batch['x'] @ params['w'])
      return jnp.mean((hidden @ params['v']) ** 2) + batch['trainer']
    return jax.value_and_grad(loss)(params)

  def test_equals_the_whole_batch_in_less_memory(self):
    params, batch = self._params_and_batch(4096)
    programs = [jax.jit(parallel.accumulate(self._grad, num)).lower(
        params, batch).compile() for num in (1, 16)]
    whole, parts = (program(params, batch) for program in programs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            # The sums of 4096 terms differ by sqrt(4096) roundings at most.
            a, b, rtol=0, atol=64 * 6e-8 * np.abs(a).max()), whole, parts)
    memory = [program.memory_analysis().temp_size_in_bytes
              for program in programs]
    self.assertLess(memory[1], memory[0] / 4)

  def test_a_result_that_is_no_mean_over_examples_is_not_the_whole_batchs(
      self):
    batch = jnp.array([1., 2., 3., 6.])
    worst = parallel.accumulate(lambda batch: {'max': batch.max()}, 2)
    self.assertEqual(float(worst(batch)['max']), 4.)  # (2 + 6) / 2

  def test_keeps_sums_of_half_precision_in_float32(self):
    batch = jnp.full((512, 1), 1.0078125, jnp.bfloat16)
    mean = parallel.accumulate(lambda batch: batch.mean(), 512)(batch)
    self.assertEqual(mean.dtype, jnp.bfloat16)
    self.assertEqual(float(mean), 1.0078125)

  @parameterized.parameters(3, 5)
  def test_parts_that_are_not_equal_are_refused(self, num):
    params, batch = self._params_and_batch(4)
    with self.assertRaisesRegex(ValueError, f'num_microbatches={num} equal'):
      parallel.accumulate(self._grad, num)(params, batch)

  def test_counts_are_refused_as_they_have_no_mean(self):
    with self.assertRaisesRegex(ValueError, "'right'.*int32"):
      parallel.accumulate(lambda batch: {'right': jnp.int32(1)}, 2)(
          jnp.zeros(4))
    with self.assertRaisesRegex(ValueError, 'num_microbatches=0'):
      parallel.accumulate(self._grad, 0)


@pytest.mark.slow
class ProcessesTest(parameterized.TestCase):

  def test_two_processes_of_two_devices_end_where_one_device_does(self):
    directory = self.create_tempdir().full_path
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      address = f'127.0.0.1:{free.getsockname()[1]}'
    path = os.pathsep.join([str(_ROOT), str(_ROOT / 'tests')])
    env = {**os.environ, 'JAX_NUM_CPU_DEVICES': '2', 'JAX_PLATFORMS': 'cpu',
           'PYTHONPATH': path}
    script = ('import sys, training_parallel_test as test; '
              'test.of_process(*sys.argv[1:])')
    processes = [subprocess.Popen(
        [sys.executable, '-c', script, address, '2', str(i), directory],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for i in range(2)]
    try:
      for process in processes:
        output, _ = process.communicate(timeout=240)
        self.assertEqual(process.returncode, 0, output)
    finally:
      for process in processes:
        process.kill()
        process.stdout.close()
    run = parallel.map_trainers(_step, num_trainers=8, backend='vmap')
    state, _ = _run(run, 8, 1)
    for i in range(2):
      with np.load(f'{directory}/{i}.npz') as end:
        self.assertEqual((int(end['num_processes']), int(end['num_devices'])),
                         (2, 4))
        self.assertEqual(list(end['mine']), list(range(4 * i, 4 * i + 4)))
        self.assertEqual(int(end['step']), _NUM_STEPS)
        self.assertLess(
            _gap(state.params, {k: end[k] for k in state.params}), 1e-5)
