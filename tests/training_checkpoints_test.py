"""A killed run resumes to the same parameters; nothing foreign is loaded."""

import dataclasses
import logging
import math
import os
import pathlib
import signal
import subprocess
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import optax
from absl import logging as absl_logging
from absl.testing import parameterized

from jaxdp.training import checkpoints
from jaxdp.training import parallel

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_LAST = 14  # steps of a whole run


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inner:
  clip: float = 1.
  widths: tuple = (3, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
  rate: float = .1
  limit: float = math.inf
  name: str = 'digits'
  inner: _Inner = _Inner()


class _State(NamedTuple):
  params: dict
  opt_state: Any
  step: jax.Array


def _start():
  params = {'w': jnp.linspace(-1., 1., 12).reshape(4, 3), 'b': jnp.zeros(3)}
  return _State(params, optax.adam(.05).init(params), jnp.int32(0))


def _runner():
  """Noisy training whose every step depends on all steps before."""
  rule = optax.adam(.05)

  def step(key, state, batch):
    key = jax.random.fold_in(key, state.step)
    loss = lambda p: jnp.mean((batch @ p['w'] - jnp.sin(p['b'])[None]) ** 2)
    grads = jax.grad(loss)(state.params)
    grads = parallel.mean_over_trainers(parallel.mean_over_shards(grads))
    grads = {k: g + .1 * jax.random.normal(key, g.shape)
             for k, g in grads.items()}
    updates, opt_state = rule.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return _State(params, opt_state, state.step + 1), {}

  return parallel.map_trainers(step, num_trainers=2, backend='vmap')


def _batch(step):
  """The batch of a step: by its number, wherever the run started."""
  return np.random.default_rng(step).normal(size=(2, 1, 5, 4)).astype('f4')


def train(directory, last, notify=None):
  """Trains from the last checkpoint to ``last``, saving after each step."""
  run, state, first = _runner(), _start(), 0
  with checkpoints.Checkpoints(directory, _Config()) as store:
    if store.latest_step() is not None:
      first, state = store.restore_latest(state)
    for step in range(first, last):
      state, _ = run(jax.random.key(5), state, _batch(step))
      store.save(step + 1, state, metric=-abs(step - 2))
      if notify is not None:
        notify(step + 1)
  return first, state


def of_process(directory):
  """Trains for ever and tells what it has taken; it waits to be killed."""
  def tell(step):
    sys.stdout.write(f'{step}\n')
    sys.stdout.flush()
  train(directory, 10 ** 6, tell)


def _same(test, state, other):
  test.assertEqual(jax.tree.structure(state), jax.tree.structure(other))
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
    test.assertEqual(a.dtype, b.dtype)
    np.testing.assert_array_equal(a, b)


class _CheckpointsTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def _open(self, config=None, **settings):
    store = checkpoints.Checkpoints(
        self.directory, _Config() if config is None else config, **settings)
    self.addCleanup(store.close)
    return store


@pytest.mark.slow
class KilledTest(_CheckpointsTestCase):

  def _kill_at(self, step):
    """Runs until it reports a step, and kills it amid what it does then."""
    path = os.pathsep.join([str(_ROOT), str(_ROOT / 'tests')])
    script = ('import sys, training_checkpoints_test as test; '
              'test.of_process(sys.argv[1])')
    with subprocess.Popen(
        [sys.executable, '-c', script, self.directory], text=True,
        env={**os.environ, 'PYTHONPATH': path}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL) as process:
      try:
        for line in process.stdout:
          if int(line) >= step:
            break
      finally:
        process.send_signal(signal.SIGKILL)
    self.assertEqual(process.returncode, -signal.SIGKILL)

  def test_a_run_killed_twice_ends_with_the_parameters_of_one_that_was_not(
      self):
    for step in (4, 9):
      self._kill_at(step)
    first, state = train(self.directory, _LAST)
    # It went on, and not from further than it had told.
    self.assertBetween(first, 8, _LAST - 1)
    run, expected = _runner(), _start()
    for step in range(_LAST):
      expected, _ = run(jax.random.key(5), expected, _batch(step))
    moved = expected.params['w'] - _start().params['w']
    self.assertGreater(np.abs(moved).max(), .1)
    _same(self, state, expected)
    with self._open() as store:
      self.assertEqual((store.latest_step(), store.best_step()), (_LAST, 3))

  def test_a_save_that_was_cut_off_is_passed_over(self):
    store = self._open()
    store.save(1, _start())
    store.wait()
    whole = pathlib.Path(self.directory, '1')
    torn = pathlib.Path(self.directory, '2.orbax-checkpoint-tmp')
    for path in whole.rglob('*'):
      if path.is_file():  # every file is there, and half of it is missing
        data = path.read_bytes()
        copy = torn / path.relative_to(whole)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data[:len(data) // 2])
    again = self._open()
    self.assertEqual(again.latest_step(), 1)
    again.save(2, _start()._replace(step=jnp.int32(2)))
    step, state = again.restore_latest(_start())
    self.assertEqual((step, int(state.step)), (2, 2))


class KeptTest(_CheckpointsTestCase):

  def _save_all(self, store, metrics):
    for step, metric in enumerate(metrics):
      store.save(step, {'x': jnp.full(3, float(step))}, metric=metric)

  @parameterized.parameters(
      (1, (.1, .5, .3, .2), 1, [1, 3]), (1, (.1, .5, .5, .2), 2, [2, 3]),
      (2, (.1, .5, .3, .2), 1, [1, 2, 3]), (0, (.1, .5, .3, .2), 3, [3]),
      (1, (.1, .5, None, None), 1, [1, 3]),
      (1, (None, None, None), None, [2]), (1, (.1, .2, .7), 2, [2]))
  def test_the_last_and_the_best_stay(self, keep_best, metrics, best, kept):
    with self._open(keep_best=keep_best) as store:
      self._save_all(store, metrics)
    names = {int(p.name) for p in pathlib.Path(self.directory).iterdir()
             if p.name.isdigit()}
    self.assertEqual(names, set(kept))
    store = self._open(keep_best=keep_best)  # reads the metrics again
    self.assertEqual(store.latest_step(), len(metrics) - 1)
    self.assertEqual(store.best_step(), best)
    if best is not None:
      step, state = store.restore_best({'x': jnp.zeros(3)})
      np.testing.assert_array_equal(state['x'], np.full(3, float(step)))
      self.assertEqual(step, best)

  def test_what_was_not_kept_or_has_no_metric_is_not_found(self):
    store = self._open()
    like = {'x': jnp.zeros(3)}
    with self.assertRaisesRegex(FileNotFoundError, 'no checkpoint'):
      store.restore_latest(like)
    self._save_all(store, (None, None))
    with self.assertRaisesRegex(FileNotFoundError, r'step=0 .* \[1\]'):
      store.restore(0, like)
    with self.assertRaisesRegex(FileNotFoundError, 'with a metric'):
      store.restore_best(like)

  def test_the_state_may_be_overwritten_as_soon_as_save_returns(self):
    big = jnp.zeros((1 << 22,))  # 16 MiB: still being written when it changes
    add = jax.jit(lambda x: x + 1., donate_argnums=0)
    store = self._open()
    for step in range(1, 4):
      big = add(big)
      store.save(step, {'x': big})
      for _ in range(3):
        big = add(big)
      _, state = store.restore_latest({'x': big})
      np.testing.assert_array_equal(state['x'], 4. * step - 3.)

  def test_arrays_of_every_kind_come_back_bit_by_bit(self):
    state = {
        'key': jax.random.key(7), 'keys': jax.random.split(
            jax.random.key(8, impl='threefry4x32'), 3),
        'half': jnp.array([1.5, -0.], jnp.bfloat16), 'count': jnp.uint32(9),
        'empty': jnp.zeros((0, 2)), 'none': None, 'host': np.arange(3.),
        'flag': jnp.array([True, False]), 'nested': ({'a.b/c': jnp.ones(1)},)}
    store = self._open()
    store.save(3, state)
    _, back = store.restore_latest(state)
    data = lambda tree: jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(
            x.dtype, jax.dtypes.prng_key) else x, tree)
    _same(self, data(back), data(state))
    self.assertEqual(back['keys'].dtype, state['keys'].dtype)
    self.assertIsInstance(back['host'], np.ndarray)

  def test_restores_to_where_the_state_lies_now(self):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), 'x')
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    store = self._open()
    store.save(1, {'x': jnp.arange(8.)})
    like = jax.device_put({'x': jnp.zeros(8)}, there)
    _, state = store.restore_latest(like)
    self.assertEqual(state['x'].sharding, there)
    np.testing.assert_array_equal(state['x'].addressable_data(5), np.arange(8.))
    store.save(2, state)
    _, state = store.restore(2, jax.eval_shape(lambda: {'x': jnp.zeros(8)}))
    np.testing.assert_array_equal(state['x'], np.arange(8.))
    self.assertLen(state['x'].sharding.device_set, 1)


class RefusedTest(_CheckpointsTestCase):

  def test_another_config_is_refused_by_every_field_that_differs(self):
    self._open().save(1, {'x': jnp.zeros(1)})
    self._open(_Config())
    self._open(dataclasses.asdict(_Config()))
    with self.assertRaises(ValueError) as caught:
      self._open(_Config(rate=.2, inner=_Inner(widths=(3, 4))))
    message = str(caught.exception)
    self.assertIn('rate (0.1 there, 0.2 now)', message)
    self.assertIn('inner.widths ([3, 2] there, [3, 4] now)', message)
    self.assertNotIn('name', message)
    with self.assertRaisesRegex(ValueError, r"name \('digits' there, 'absent'"):
      self._open({k: v for k, v in dataclasses.asdict(_Config()).items()
                  if k != 'name'})

  def test_a_config_of_numpy_numbers_and_nan_is_its_own(self):
    config = {'a': np.float32(.5), 'b': np.arange(2), 'c': math.nan}
    self._open(config)
    self._open({'a': .5, 'b': [0, 1], 'c': math.nan})
    with self.assertRaisesRegex(ValueError, 'JSON'):
      self._open({'a': object()})

  def test_a_broken_config_file_is_refused(self):
    path = pathlib.Path(self.directory, checkpoints.CONFIG_FILE)
    path.write_text('{"rate": 0.')
    with self.assertRaisesRegex(ValueError, 'config.json'):
      self._open()

  @parameterized.parameters(math.nan, math.inf)
  def test_a_state_that_is_not_finite_is_refused_and_the_last_stays(self, bad):
    store = self._open()
    store.save(1, {'a': {'w': jnp.zeros(3)}})
    for leaf in (jnp.array([0., bad, 0.]), np.array([bad]),
                 jnp.array([bad], jnp.bfloat16)):
      with self.assertRaisesRegex(ValueError, 'a.w is not finite at step 2'):
        store.save(2, {'a': {'w': leaf}})
    self.assertEqual(store.latest_step(), 1)

  def test_a_leaf_that_is_not_finite_on_one_device_only_is_refused(self):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), 'x')
    x = jax.device_put(np.where(np.arange(8) == 6, np.nan, 0.),
                       jax.sharding.NamedSharding(
                           mesh, jax.sharding.PartitionSpec('x')))
    with self.assertRaisesRegex(ValueError, 'not finite'):
      self._open().save(1, {'x': x})

  def test_steps_and_metrics_without_meaning_are_refused(self):
    store, state = self._open(), {'x': jnp.zeros(1)}
    store.save(5, state)
    for step in (5, 4, -1):
      with self.assertRaisesRegex(ValueError, f'step={step} .* 5'):
        store.save(step, state)
    for metric in (math.nan, math.inf):
      with self.assertRaisesRegex(ValueError, 'metric=.* must be finite'):
        store.save(6, state, metric=metric)
    with self.assertRaisesRegex(ValueError, 'leaf x=3 must be an array'):
      store.save(6, {'x': 3})
    with self.assertRaisesRegex(ValueError, 'keep_best=-1'):
      self._open(keep_best=-1)

  @parameterized.parameters(
      ({'x': jnp.zeros(4), 'k': jax.random.key(0)}, r'x \(float32\[3\] there'),
      ({'x': jnp.zeros(3, int), 'k': jax.random.key(0)}, r'int32\[3\] in'),
      ({'x': jnp.zeros(3)}, r'k \(key<fry>\[\] there, absent in state_like'),
      ({'x': jnp.zeros(3), 'k': jax.random.key(0, impl='rbg')}, 'k .*key<rbg>'),
      ({'x': jnp.zeros(3), 'k': jax.random.key(0), 'y': jnp.zeros(1)},
       r'y \(absent there'))
  def test_a_state_of_another_shape_is_refused(self, like, message):
    store = self._open()
    store.save(1, {'x': jnp.zeros(3), 'k': jax.random.key(0)})
    with self.assertRaisesRegex(ValueError, message):
      store.restore_latest(like)

  def test_without_orbax_it_says_what_to_install(self):
    with (_hidden('orbax.checkpoint'),
          self.assertRaisesRegex(ImportError, r'jaxdp\[checkpoint\]')):
      self._open()


class _hidden:
  """Makes a module impossible to import."""

  def __init__(self, name):
    self._name = name

  def __enter__(self):
    self._old = sys.modules.get(self._name)
    sys.modules[self._name] = None

  def __exit__(self, *error):
    if self._old is None:
      del sys.modules[self._name]
    else:
      sys.modules[self._name] = self._old


class QuietTest(_CheckpointsTestCase):

  def test_orbax_says_nothing_and_others_are_heard(self):
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    logger = logging.getLogger('absl')
    before = list(logger.filters)
    verbosity = absl_logging.get_verbosity()
    logger.addHandler(handler)
    absl_logging.set_verbosity(absl_logging.INFO)
    try:
      with warnings.catch_warnings():
        warnings.simplefilter('error')
        store = checkpoints.Checkpoints(self.directory, _Config())
        store.save(1, _start(), metric=1.)
        store.save(2, _start())
        absl_logging.info('a row')
        store.restore_latest(_start())
        store.close()
    finally:
      absl_logging.set_verbosity(verbosity)
      logger.removeHandler(handler)
    self.assertEqual([r.getMessage() for r in heard], ['a row'])
    self.assertEqual(before, logger.filters)
