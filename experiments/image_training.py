"""One training run on images: feed, step, check, keep, go on. Host.

`experiments.train` and the figures of Phan et al. (2020) share it. A run is a
`Run` (what determines its result) and a key; the backend and the number of
devices never show in the result beyond rounding.

The loop releases a batch on its way to the device (``releases.release``), so
that no record enters a step unprotected; the noise of a record depends on the
run's key and the record's index alone, so every epoch sees the same release.

A breakpoint belongs in :func:`train`, at the line that calls ``run_step``.
"""

import dataclasses
import functools
import math
import os
import time
from typing import NamedTuple

from absl import logging
import jax
import numpy as np

from experiments import records
from experiments.datasets import augment
from experiments.datasets import batches
from experiments.datasets import images as image_data
from jaxdp.training import checkpoints
from jaxdp.training import layouts
from jaxdp.training import moments
from jaxdp.training import parallel
from jaxdp.training import releases
from jaxdp.training import stobatch

_LOG_SECONDS = 30.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What determines a run, its key apart.

  Attributes:
    method: stobatch.Config.
    dataset: name of ``datasets.images``.
    num_steps: T.
    num_trainers: N, trainers of a step.
    num_shards: M, parts of a trainer's batch.
    rows_every: steps between two rows of the training's progress.
    checkpoint_every: steps between two checkpoints.
    limit: first records of the training set that are used; None: all.
    flip: flips RELEASED images at random, each epoch anew: after the noise,
      so no record is counted twice.
    shift: pixels by which released images move at most, the same.
    seed: that the run's key comes from; None: the operating system. Going on
      under another key would release the records a second time.
  """
  method: stobatch.Config
  dataset: str
  num_steps: int
  num_trainers: int = 1
  num_shards: int = 1
  rows_every: int = 10
  checkpoint_every: int = 50
  limit: int | None = None
  flip: bool = False
  shift: int = 0
  seed: int | None = None

  def __post_init__(self):
    for name in ('num_steps', 'num_trainers', 'num_shards', 'rows_every',
                 'checkpoint_every'):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'{name}={value!r} must be an integer >= 1')
    if self.method.batch_size % self.num_shards:
      raise ValueError(
          f'num_shards={self.num_shards} must divide batch_size='
          f'{self.method.batch_size}; each shard takes an equal part')
    if self.method.official_clean_adversarial and (self.flip or self.shift):
      raise ValueError(
          f'official_clean_adversarial=True with flip={self.flip} or shift='
          f'{self.shift}: the noise is taken off a released image where it was '
          'put on, and a moved image has it elsewhere; leave one of them out')

  @property
  def num_dropped(self):
    """Records that are never trained on, as all batches have one size.

    Several trainers hold two batches each, so an odd one is left out too.
    """
    used = self.method.num_examples // self.method.batch_size
    if self.num_trainers > 1:
      used -= used % 2
    return self.method.num_examples - used * self.method.batch_size


class Diverged(RuntimeError):
  """The loss is not a number any more; the last checkpoint is kept."""


class Trained(NamedTuple):
  """A finished run."""
  state: stobatch.State
  calibration: releases.Calibration
  seconds: float  # of the steps made now, the first (compilation) left out
  num_steps: int  # made now


def fit(data, config):
  """Returns the data with images cut to the model's shape, about the middle.

  The published CIFAR-10 network takes 28 x 28 of 32 x 32 pixels; its code cuts
  a random window once for each record, which is one record all the same.
  """
  side = stobatch.network(config).image_shape[0]
  if data.train_images.shape[1] <= side:
    return data
  return dataclasses.replace(
      data, train_images=augment.center_crop(data.train_images, side),
      test_images=augment.center_crop(data.test_images, side))


def check(run, data):
  """Refuses data that a run's model or mechanism cannot take.

  Args:
    run: Run.
    data: datasets.images.Images; training images as uint8.

  Raises:
    ValueError: another image shape, number of records or of classes.
  """
  model = stobatch.network(run.method)
  shape, num = data.train_images.shape[1:], len(data.train_images)
  if shape != model.image_shape or data.num_classes != model.num_classes:
    raise ValueError(
        f'dataset={run.dataset!r} has images of shape {shape} in '
        f'{data.num_classes} classes and model={run.method.model!r} takes '
        f'{model.image_shape} in {model.num_classes}; choose its own model')
  if num != run.method.num_examples:
    raise ValueError(f'num_examples={run.method.num_examples} must be the '
                     f'{num} records of dataset={run.dataset!r}')
  for at in range(0, num, 4096):
    releases.check_records(image_data.scale(data.train_images[at:at + 4096]),
                           data.train_labels[at:at + 4096], model.num_classes)


class Feed:
  """Batches of a run, released on their way to the device.

  ``feed(step)`` is a stobatch.Batch with leaves ``[N, M, b / M, ...]``.
  """

  def __init__(self, key, run, data, calibration, trainers=None):
    """Fixes the batches; ``trainers`` are the rows this process feeds."""
    self._key, self._run, self._data = key, run, data
    self._rows = trainers or range(run.num_trainers)
    self._batches = batches.fixed_batches(
        key, run.method.num_examples, run.method.batch_size, remainder='drop')
    self._release = jax.jit(functools.partial(
        _release, calibration=calibration))

  def __call__(self, step):
    """The batches of one step."""
    run, rows = self._run, slice(self._rows.start, self._rows.stop)
    trainers, benign, source = (np.asarray(ids)[rows] for ids in (
        batches.schedule(self._key, len(self._batches), run.num_trainers,
                         step)))
    size = run.method.batch_size
    parts = np.arange(size, dtype=np.int32) * len(run.method.attacks) // size
    parts = self._shards(np.broadcast_to(parts, (len(trainers), size)))
    return stobatch.Batch(
        benign=self._half(benign, step), source=self._half(source, step),
        assignment=parts, trainer=np.broadcast_to(
            trainers[:, None], parts.shape[:2]))

  def batch(self, number):
    """One fixed batch, released: ``Released`` with leaves ``[b, ...]``."""
    ids = self._batches[number].astype(np.int32)
    return self._release(self._key, self._data.train_images[ids],
                         self._data.train_labels[ids].astype(np.int32), ids)

  @property
  def num_batches(self):
    return len(self._batches)

  def _shards(self, rows):
    """``[N, b]`` as ``[N, M, b / M]``; shard j takes j, j + M, ...

    So each attack of the ensemble gets the same records whatever M is, where
    M times their number divides b.
    """
    shards = self._run.num_shards
    return rows.reshape(len(rows), -1, shards).swapaxes(1, 2)

  def _half(self, chosen, step):
    """One half of every trainer's pair, ``[N, M, b / M, ...]``."""
    run = self._run
    ids = self._shards(self._batches[chosen])
    flat = ids.ravel().astype(np.int32)
    released = self._release(
        self._key, self._data.train_images[flat],
        self._data.train_labels[flat].astype(np.int32), flat)
    if run.flip or run.shift:
      epoch = step * run.num_trainers // len(self._batches)
      released = released._replace(images=augment.augment(
          self._key, released.images, flat, epoch, flip=run.flip,
          pad=run.shift))
    return jax.tree.map(
        lambda leaf: leaf.reshape(*ids.shape, *leaf.shape[1:]), released)


def _release(key, pixels, labels, ids, *, calibration):
  """Scales bytes to [-1, 1] and releases them; one compiled function."""
  return releases.release(key, calibration, image_data.scale(pixels), labels,
                          ids)


def start(key, run, data):
  """Returns the State before the first step and the scales of the run."""
  config = run.method
  state = stobatch.init(key, config)
  calibration = stobatch.calibrate(config, state.params['encoder']['kernel'])
  if config.moments_epsilon:
    patches = stobatch.patches_fn(config, state.params['encoder'])
    chunks = (image_data.scale(data.train_images[at:at + 1024])
              for at in range(0, len(data.train_images), 1024))
    state = state._replace(moments=moments.release(
        key, patches, chunks, epsilon=config.moments_epsilon))
  return state, calibration


def train(key, run, data, out, *, file=None, backend='vmap', devices=None):
  """Trains to the last step, from the last checkpoint where there is one.

  Args:
    key: typed key of the run; never stored by this function.
    run: Run.
    data: datasets.images.Images, as :func:`check` accepts them.
    out: directory; checkpoints go to OUT/checkpoints. None keeps none.
    file: records.Records that gets rows of ``kind`` 'step', or None.
    backend: see ``parallel.map_trainers``.
    devices: see ``parallel.map_trainers``.

  Returns:
    Trained.

  Raises:
    Diverged: the loss is not finite; names the step.
  """
  state, calibration = start(key, run, data)
  rows = range(run.num_trainers) if backend != 'shard_map' else (
      layouts.local_trainers(run.num_trainers, run.num_shards, devices))
  feed = Feed(key, run, data, calibration, rows)
  run_step = parallel.map_trainers(
      stobatch.make_train_step(run.method), num_trainers=run.num_trainers,
      num_shards=run.num_shards, backend=backend, devices=devices)
  keeper = _Keeper(run, out)
  state = keeper.resume(state)
  first, clock = int(state.step), _Clock()
  batch = None
  if first < run.num_steps:
    logging.info('steps %d to %d of %s; the first compiles for a while',
                 first + 1, run.num_steps, run.dataset)
  with keeper, records.Progress(run.num_steps, initial=first) as progress:
    for step in range(first, run.num_steps):
      state, info = run_step(key, state, batch or feed(step))
      # The next batch reaches the device while this step runs.
      if step + 1 < run.num_steps:
        batch = run_step.place(feed(step + 1))
      row = _row(step + 1, info, clock.tick(run))
      if step + 1 == run.num_steps:
        state = settled(key, run, state, feed)
      # In this order: after a kill the row's step may come again, a row that is
      # missing below a checkpoint never.
      _write(file, row, run)
      keeper.keep(step + 1, state, row)
      progress.update(1, f"loss={row['loss']:.4g} "
                         f"accuracy={row['accuracy']:.3f}")
  # On the host: what follows is one process's, whatever trained.
  state = jax.tree.map(np.asarray, state)
  return Trained(state, calibration, clock.seconds, run.num_steps - first)


def settled(key, run, state, feed):
  """Returns the state with the statistics of its final network.

  Means over the fixed batches as released; see ``stobatch.make_statistics``.
  A model without statistics is returned as it is.

  Args:
    key: typed key; of dropped units, where there are some.
    run: Run.
    state: after the last step.
    feed: Feed.
  """
  if not state.batch_stats:
    return state
  statistics = jax.jit(stobatch.make_statistics(run.method))
  here = jax.tree.map(np.asarray, state._replace(opt_state=None))
  every = [jax.tree.map(np.asarray, statistics(key, here, feed.batch(number)))
           for number in range(feed.num_batches)]
  return state._replace(batch_stats=jax.tree.map(
      lambda *parts: np.mean(parts, 0, dtype=np.float64).astype(np.float32),
      *every))


class _Clock:
  """Seconds of the steps, the first apart: it compiles."""

  def __init__(self):
    self._last, self.steps, self.seconds = time.monotonic(), 0, 0.

  def tick(self, run):
    """Counts a step; returns its images a second, None for the first."""
    now = time.monotonic()
    passed, self._last, self.steps = now - self._last, now, self.steps + 1
    if self.steps == 1:
      return None
    self.seconds += passed
    return 2 * run.num_trainers * run.method.batch_size / passed


def _row(step, info, speed):
  """The row of one step; stops a run whose loss is no number."""
  values = {name: float(value) for name, value in info._asdict().items()}
  if not all(map(math.isfinite, values.values())):
    bad = [name for name, v in values.items() if not math.isfinite(v)]
    raise Diverged(f'step {step}: {bad[0]} is {values[bad[0]]}; the last '
                   'checkpoint is kept: lower learning_rate or '
                   'reconstruction_rate, or set clip_norm')
  return {'kind': 'step', 'step': step, **values,
          'images_per_second': speed}


def _write(file, row, run):
  """Appends a step's row where it is due and not there already."""
  due = row['step'] % run.rows_every == 0 or row['step'] == run.num_steps
  if file is not None and due and (
      ('step', row['step']) not in file.done('kind', 'step')):
    file.append(row)


class _Keeper:
  """The checkpoints of a run; does nothing without a directory."""

  def __init__(self, run, out):
    self._run, self._store = run, None
    if out is not None:
      self._store = checkpoints.Checkpoints(
          os.path.join(out, 'checkpoints'), dataclasses.asdict(run))

  def resume(self, state):
    """The last checkpoint, or ``state`` where there is none."""
    if self._store is None or self._store.latest_step() is None:
      return state
    return self._store.restore(None, state)[1]

  def keep(self, step, state, row):
    """Saves where it is due; 'best' goes by the released training labels."""
    if self._store is not None and (
        step % self._run.checkpoint_every == 0 or step == self._run.num_steps):
      self._store.save(step, state, metric=row['accuracy'])

  def __enter__(self):
    return self

  def __exit__(self, *error):
    if self._store is not None:
      self._store.close()
