"""Checkpoints of a run: the last state and the best, whole or not at all.

Host; needs the extra ``checkpoint`` (orbax). A save copies the state to the
host, so that the next step may reuse its buffers, and writes in the background
into a directory that gets its name when it is whole: a run killed at any
moment resumes from the save before. A state and its step number are all that a
run needs, since keys are folded from steps and never stored.

>>> import tempfile
>>> import jax.numpy as jnp
>>> state = {'weights': jnp.arange(3.)}
>>> with tempfile.TemporaryDirectory() as directory:
...   with Checkpoints(directory, {'rate': .1}) as checkpoints:
...     checkpoints.save(20, state, metric=.9)
...   with Checkpoints(directory, {'rate': .1}) as checkpoints:
...     step, state = checkpoints.restore_latest(state)
>>> step, state['weights'].tolist()
(20, [0.0, 1.0, 2.0])

One run writes a directory at a time.
"""

import contextlib
import dataclasses
import json
import logging
import math
import operator
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

CONFIG_FILE = 'config.json'

_ABSENT = 'absent'
_NO_METRIC = 'Requested `tracked_metric`'  # a warning; here it is a choice


class Checkpoints:
  """The last checkpoint of a run and its best ones, in one directory."""

  def __init__(self, directory, config, *, keep_best=1):
    """Opens a directory, or makes it.

    Args:
      directory: holds ``config.json`` and one directory a step.
      config: dataclass or dict of all that determines the run, JSON values;
        nothing that may change at a restart, such as the number of devices.
      keep_best: how many checkpoints of the largest metric to keep beside the
        last; the later one of equals.

    Raises:
      ImportError: orbax is not installed.
      ValueError: the directory belongs to another config; names each field
        that differs. Or an argument has no meaning.
    """
    ocp = _orbax()
    if keep_best < 0:
      raise ValueError(f'keep_best={keep_best} must be at least 0')
    self._directory = os.path.abspath(os.fspath(directory))
    _claim(self._directory, config)
    self._args = ocp.args
    self._quiet = _Quiet()
    self._logger = logging.getLogger('absl')
    self._logger.addFilter(self._quiet)
    try:
      self._manager = _manager(ocp, self._directory, keep_best)
    except BaseException:
      self._logger.removeFilter(self._quiet)
      raise

  def save(self, step, state, metric=None):
    """Saves a state; returns once it may be overwritten.

    Args:
      step: number of steps taken, larger than that of any save before.
      state: tree of arrays; typed keys are stored with their kind. With
        several processes, each calls this with the same values.
      metric: larger is better; without it this one cannot be the best.

    Raises:
      ValueError: a leaf is not finite (the last good checkpoint stays) or is no
        array, the step is not new, or the metric is not finite.
    """
    step, latest = operator.index(step), self._manager.latest_step()
    if step < 0 or (latest is not None and step <= latest):
      raise ValueError(f'step={step} must be at least 0 and larger than the '
                       f'step saved last, {latest}')
    metrics = None if metric is None else {'metric': float(metric)}
    if metrics and not math.isfinite(metrics['metric']):
      raise ValueError(f'metric={metric} at step {step} must be finite')
    leaves = _named(state)
    arrays = {name: _owned(leaf) for name, leaf in leaves.items()
              if leaf.size}  # orbax refuses arrays without elements
    _check_finite(arrays, step)
    self._manager.save(step, metrics=metrics, args=self._args.Composite(
        state=self._args.StandardSave(arrays),
        leaves=self._args.JsonSave(_described(leaves))))

  def wait(self):
    """Waits until the save under way is on the disk; raises what it raised."""
    self._manager.wait_until_finished()

  def latest_step(self):
    """Returns the step of the last whole checkpoint, or None."""
    self.wait()
    return self._manager.latest_step()

  def best_step(self):
    """Returns the step of the largest metric, or None."""
    self.wait()
    return self._manager.best_step()

  def restore(self, step, state_like):
    """Reads one checkpoint.

    Args:
      step: a step that was kept, or None for the last.
      state_like: a state of the same run, say its initial one: arrays or
        ``jax.ShapeDtypeStruct``. Leaves go where its leaves lie.

    Returns:
      ``(step, state)``.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: leaves differ in name, shape or dtype.
    """
    latest = self.latest_step()
    step = latest if step is None else operator.index(step)
    kept = self._manager.all_steps()
    if step not in kept:
      raise FileNotFoundError(
          f'no checkpoint of step={step} in {self._directory}; it has those '
          f'of steps {sorted(kept)}')
    wanted = _named(state_like)
    _check_leaves(
        self._manager.restore(step, args=self._args.Composite(
            leaves=self._args.JsonRestore())).leaves, _described(wanted), step)
    arrays = self._manager.restore(step, args=self._args.Composite(
        state=self._args.StandardRestore(
            {name: _target(leaf) for name, leaf in wanted.items()
             if leaf.size}))).state
    return step, _unnamed(state_like, arrays)

  def restore_latest(self, state_like):
    """Reads the last checkpoint; see :meth:`restore`."""
    return self.restore(None, state_like)

  def restore_best(self, state_like):
    """Reads the checkpoint of the largest metric; see :meth:`restore`.

    Raises:
      FileNotFoundError: no checkpoint has a metric.
    """
    step = self.best_step()
    if step is None:
      raise FileNotFoundError(
          f'no checkpoint in {self._directory} was saved with a metric')
    return self.restore(step, state_like)

  def close(self):
    """Waits for the save under way and lets go of the directory."""
    try:
      self._manager.close()
    finally:
      self._logger.removeFilter(self._quiet)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()


class _Quiet(logging.Filter):
  """Drops the dozens of lines that orbax writes about a save that went well."""

  def filter(self, record):
    if f'{os.sep}orbax{os.sep}' not in record.pathname:
      return True
    return (record.levelno >= logging.WARNING
            and not record.getMessage().startswith(_NO_METRIC))


def _orbax():
  try:
    import orbax.checkpoint as ocp
  except ImportError as error:
    raise ImportError(
        'checkpoints need orbax: pip install jaxdp[checkpoint]') from error
  return ocp


def _manager(ocp, directory, keep_best):
  metric_fn = operator.itemgetter('metric')
  policies = ocp.checkpoint_managers
  return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(
      best_fn=metric_fn, preservation_policy=policies.AnyPreservationPolicy([
          policies.LatestN(1),
          policies.BestN(get_metric_fn=metric_fn, n=keep_best,
                         keep_checkpoints_without_metrics=False)])))


def _claim(directory, config):
  """Writes the config of a new directory, or compares it with the old one."""
  config = _plain(config)
  path = os.path.join(directory, CONFIG_FILE)
  try:
    with open(path, encoding='utf-8') as file:
      old = json.load(file)
  except FileNotFoundError:
    # The other processes wait for the directory when they open it.
    if jax.process_index() == 0:
      os.makedirs(directory, exist_ok=True)
      _write_atomic(path, json.dumps(config, indent=2) + '\n')
    return
  except ValueError as error:
    raise ValueError(f'{path} is no JSON file; give another directory'
                     ) from error
  old, new = _flat(old), _flat(config)
  different = [
      f'{name} ({old.get(name, _ABSENT)!r} there, '
      f'{new.get(name, _ABSENT)!r} now)' for name in sorted({*old, *new})
      if not _equal(old.get(name, _ABSENT), new.get(name, _ABSENT))]
  if different:
    raise ValueError(f'{directory} holds checkpoints of another config: '
                     f'{", ".join(different)}; give another directory')


def _plain(config):
  """The config as JSON would read it back."""
  fields = (dataclasses.asdict(config) if dataclasses.is_dataclass(config)
            else dict(config))

  def plain(value):
    if isinstance(value, np.generic | np.ndarray):
      return value.tolist()
    raise ValueError(f'config holds {value!r}, which JSON cannot; give '
                     'numbers, strings, lists and dicts')

  return json.loads(json.dumps(fields, default=plain))


def _flat(fields, prefix=''):
  """Nested fields by dotted names."""
  out = {}
  for name, value in fields.items():
    if isinstance(value, dict) and value:
      out.update(_flat(value, f'{prefix}{name}.'))
    else:
      out[f'{prefix}{name}'] = value
  return out


def _equal(a, b):
  return a == b or json.dumps(a) == json.dumps(b)  # NaN is not itself


def _write_atomic(path, text):
  handle, partial = tempfile.mkstemp(
      prefix=f'.{os.path.basename(path)}.', dir=os.path.dirname(path))
  try:
    with os.fdopen(handle, 'w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(partial)
    raise


def _named(tree):
  """The leaves of a tree by name, whatever its containers."""
  out = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator='.') or 'state'
    if not hasattr(leaf, 'dtype') or not hasattr(leaf, 'shape'):
      raise ValueError(f'state leaf {name}={leaf!r} must be an array; wrap it '
                       'in jnp.asarray')
    if name in out:
      raise ValueError(f'state has two leaves named {name}; rename one')
    out[name] = leaf
  return out


def _unnamed(tree, arrays):
  """The inverse of `_named`, with typed keys made again."""
  def leaf_of(name, leaf):
    if not leaf.size:
      return leaf if isinstance(leaf, np.ndarray) else jnp.zeros(
          leaf.shape, leaf.dtype)
    if _is_key(leaf):
      return jax.random.wrap_key_data(arrays[name], impl=_impl(leaf))
    return arrays[name]

  return jax.tree.unflatten(
      jax.tree.structure(tree),
      [leaf_of(name, leaf) for name, leaf in _named(tree).items()])


def _is_key(leaf):
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _impl(leaf):
  if isinstance(leaf, jax.Array):
    return jax.random.key_impl(leaf)
  return jax.random.key_impl(jnp.zeros((), leaf.dtype))


def _owned(leaf):
  """What of a leaf is written: plain arrays, keys as their data."""
  if isinstance(leaf, jax.Array):
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
  return np.array(leaf)


def _target(leaf):
  """Shape, dtype and place of the plain array behind a leaf."""
  if isinstance(leaf, np.ndarray | np.generic):
    return np.asarray(leaf)
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if _is_key(leaf):
    data = jax.eval_shape(
        jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if isinstance(leaf, jax.Array):
      sharding = jax.random.key_data(leaf).sharding
    leaf = data
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _described(leaves):
  """Shape and dtype of each leaf, the kind of a key included."""
  return {name: f'{leaf.dtype}{list(leaf.shape)}'
          for name, leaf in leaves.items()}


def _check_leaves(stored, wanted, step):
  """Refuses a state that a checkpoint does not fit."""
  different = [
      f'{name} ({stored.get(name, _ABSENT)} there, '
      f'{wanted.get(name, _ABSENT)} in state_like)'
      for name in sorted({*stored, *wanted})
      if stored.get(name) != wanted.get(name)]
  if different:
    raise ValueError(f'the checkpoint of step {step} does not fit state_like: '
                     f'{", ".join(different)}')


def _check_finite(arrays, step):
  """Refuses a state that a run could not go on from."""
  for name, leaf in arrays.items():
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      continue
    parts = ({str(s.index): s.data for s in leaf.addressable_shards}.values()
             if isinstance(leaf, jax.Array) else [leaf])
    if not all(np.isfinite(np.asarray(part)).all() for part in parts):
      raise ValueError(
          f'state leaf {name} is not finite at step {step}; the checkpoint '
          'saved last is kept: go on from it with a smaller step size')
