"""Trains an image classifier privately, attacks it, certifies it, says it all.

  python -m experiments.train --method=stobatch --mode=sound --dataset=digits \
      --out=results/train

The run prints three ledgers side by side: what is *claimed*, what standard
differential privacy gives for a whole record, and what is certified of its
predictions; all are rows of OUT/rows.jsonl, with accuracies under four attacks
beside them; the last row is of kind 'run', and says how many records were not
trained on. Without ``--seed`` the key comes from the operating system; while
the run is unfinished it lies in OUT/key.resume (mode 0600), then it is gone. A
killed run goes on from its last checkpoint.

Data: ``digits`` comes with the code; for the others see ``--data_dir``. Several
hosts: give each process ``--coordinator_address --num_processes --process_id``
and ``--backend=shard_map``; all train, then process 0 measures and the others
wait for it.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from experiments import command_line
from experiments import image_evaluation
from experiments import image_training
from experiments import records
from experiments.datasets import images as image_data
from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.training import certificates
from jaxdp.training import layouts
from jaxdp.training import stobatch

_KEY_FILE = 'key.resume'
_DEFAULT_EPOCHS = 10.
_EVALUATION_SEED = 20_200_713  # of attacks and votes; protects nothing
# What process 0 found in the directory, for the others.
_UNFINISHED, _FINISHED, _REFUSED = range(3)


def define_flags():
  """Defines the binary's own flags."""
  flags.DEFINE_enum('method', 'stobatch', ['stobatch'], 'What trains.')
  flags.DEFINE_enum('mode', 'sound', stobatch.MODES, 'As published, or what '
                    'standard accounting proves.')
  flags.DEFINE_enum('dataset', 'digits', sorted(stobatch.PUBLISHED), 'Images.')
  flags.DEFINE_string('data_dir', None, 'Where the data are; see README.')
  flags.DEFINE_float('epsilon', None, 'Total budget; the paper\'s by default.')
  flags.DEFINE_float('label_epsilon', None, 'Its part for labels.')
  flags.DEFINE_float('epochs', None, 'Passes over the training set; 10 by '
                     'default, a tenth of that with --quick.')
  flags.DEFINE_integer('batch_size', None, 'm, records of a fixed batch.')
  flags.DEFINE_float('learning_rate', None, 'Of all layers but the first.')
  flags.DEFINE_string('settings', '{}', 'Further fields of '
                      'jaxdp.training.stobatch.Config as JSON, such as '
                      '\'{"attack_steps": 3, "delta": 1e-6}\'.')
  flags.DEFINE_bool('flip', False, 'Flips released images.')
  flags.DEFINE_integer('shift', 0, 'Shifts released images, in pixels.')
  flags.DEFINE_integer('limit', None, 'Uses the first so many records.')
  flags.DEFINE_integer('trainers', 1, 'N, trainers of a step.')
  flags.DEFINE_integer('shards', 1, 'M, devices of a trainer.')
  flags.DEFINE_enum('backend', 'vmap', layouts.BACKENDS, 'How they run.')
  flags.DEFINE_integer('checkpoint_every', 50, 'Steps between checkpoints.')
  flags.DEFINE_float('attack_bound', .2, 'L-inf size on images in [-1, 1].')
  flags.DEFINE_integer('attack_steps', 10, 'Of the attacks at test time; '
                       'those of training are a field of --settings.')
  flags.DEFINE_integer('test_images', 1_000, 'Test images that are attacked.')
  flags.DEFINE_integer('votes', 200, 'Votes an image of the smoothed network.')
  flags.DEFINE_string('coordinator_address', None, 'host:port of process 0.')
  flags.DEFINE_integer('num_processes', None, 'Processes of the run.')
  flags.DEFINE_integer('process_id', None, 'Which of them this is.')


def run_of_flags(values, num_examples):
  """Returns the Run that flags ask for.

  Args:
    values: object with the flags as attributes.
    num_examples: records of the training set.

  Raises:
    ValueError: a setting out of range, by its name.
  """
  try:
    settings = json.loads(values.settings)
  except json.JSONDecodeError as error:
    raise ValueError(f'settings={values.settings!r} is no JSON: {error}'
                     ) from error
  if not isinstance(settings, dict):
    raise ValueError(f'settings={values.settings!r} must be a JSON object')
  known = {f.name for f in dataclasses.fields(stobatch.Config)
           } - {'mode', 'num_examples'}  # a flag; the data's
  unknown = set(settings) - known
  if unknown:
    raise ValueError(f'settings={values.settings!r}: {sorted(unknown)[0]!r} is '
                     f'no field of the Config; use some of {sorted(known)}')
  settings = {k: tuple(v) if isinstance(v, list) else v
              for k, v in settings.items()}
  for name in ('epsilon', 'label_epsilon', 'batch_size', 'learning_rate'):
    if getattr(values, name) is not None:
      settings[name] = getattr(values, name)
  config = stobatch.published(values.dataset, mode=values.mode,
                              num_examples=num_examples, **settings)
  epochs = values.epochs
  if epochs is None:
    epochs = _DEFAULT_EPOCHS * (.1 if values.quick else 1.)
  if not 0. < epochs < math.inf:
    raise ValueError(f'epochs={epochs!r} must be a finite number > 0; leave it '
                     f'out for {_DEFAULT_EPOCHS:g}')
  steps = epochs * num_examples / (config.batch_size * values.trainers)
  return image_training.Run(
      method=config, dataset=values.dataset, num_steps=max(1, round(steps)),
      num_trainers=values.trainers, num_shards=values.shards,
      checkpoint_every=values.checkpoint_every, limit=values.limit,
      flip=values.flip, shift=values.shift, seed=values.seed)


def check_measurement(values):
  """Refuses what would show after the training only, and no directory."""
  if os.path.exists(values.out) and not os.path.isdir(values.out):
    raise ValueError(f'out={values.out!r} is a file; name a directory')
  for name in ('attack_steps', 'test_images', 'votes'):
    if getattr(values, name) < 1:
      raise ValueError(f'{name}={getattr(values, name)!r} must be at least 1')
  if not 0. < values.attack_bound < math.inf:
    raise ValueError(f'attack_bound={values.attack_bound!r} must be a finite '
                     'number > 0')


def kept_key(path, owner):
  """Returns the key in a file. Raises ValueError if it is another's."""
  text, _, of = pathlib.Path(path).read_text(encoding='ascii').partition('\n')
  if of != owner:
    raise ValueError(f'{path} is the key of a run with other settings or other '
                     'data, or by another version, and must not make noise for '
                     'this one: choose another --out')
  words = np.frombuffer(bytes.fromhex(text), np.uint32)
  return jax.random.wrap_key_data(
      words, impl='threefry4x32' if words.size == 4 else 'threefry2x32')


def check_owner(out, owner):
  """Raises ValueError if the directory holds the key of another run."""
  path = os.path.join(out, _KEY_FILE)
  if os.path.exists(path):
    kept_key(path, owner)


def root_key(out, seed, owner):
  """Returns the run's key: of ``--seed``, or of the operating system.

  Without a seed it is kept in OUT/key.resume until :func:`forget_key`, so that
  a killed run can go on with the same noise. It is ``owner``'s alone, a text of
  :func:`owner_of` (process 0 only): the same draws at two scales would give the
  records away.

  Raises:
    ValueError: the key there is another run's, or gone.
  """
  if seed is not None:
    return jax.random.key(seed)
  if jax.process_index():
    return samplers.secure_key()  # replaced by that of process 0
  path = os.path.join(out, _KEY_FILE)
  if os.path.exists(path):
    return kept_key(path, owner)
  if os.path.exists(os.path.join(out, 'checkpoints')):
    raise ValueError(f'{path} is gone and out={out!r} holds a run that is not '
                     'finished; another key would release the records a second '
                     'time: choose another --out')
  key = samplers.secure_key()
  os.makedirs(out, exist_ok=True)
  words = np.asarray(jax.random.key_data(key), np.uint32)
  records.write_atomic(path, f'{words.tobytes().hex()}\n{owner}',
                       mode=0o600)
  return key


def owner_of(run, data):
  """Returns what a key file says of its run: a digest of settings and records.

  The same noise on other records would give their difference away.
  """
  digest = hashlib.sha256(repr(run).encode())
  for array in (data.train_images, data.train_labels):
    digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()


def forget_key(out):
  """Deletes the key of a finished run."""
  path = os.path.join(out, _KEY_FILE)
  if os.path.exists(path):
    os.unlink(path)


def _agreed(value=None):
  """The number that process 0 gives, on every process; else it is waited for.

  Every process calls this as often as the others, or they wait for ever.
  """
  if jax.process_count() == 1:
    return value
  return int(multihost_utils.broadcast_one_to_all(np.int32(value or 0)))


def _shared(key):
  """The key of process 0, on every process."""
  if jax.process_count() == 1:
    return key
  words = multihost_utils.broadcast_one_to_all(jax.random.key_data(key))
  return jax.random.wrap_key_data(jnp.asarray(words),
                                  impl=jax.random.key_impl(key))


def cells(attack_bound, num_steps, num_samples, config):
  """Returns the cells that every run is measured on.

  Where the released code attacks another network than it deploys, those attacks
  stand beside the ones on the deployed network.
  """
  Cell = image_evaluation.Cell
  out = []
  for deployment in image_evaluation.DEPLOYMENTS:
    shared = dict(deployment=deployment, num_samples=num_samples)
    out.append(Cell(**shared))
    out += [Cell(**shared, attack=attack, attack_bound=attack_bound,
                 num_steps=num_steps, network=network)
            for network in image_evaluation.networks(config)
            for attack in image_evaluation.ATTACKS[1:]]
  return out


def measure(file, run, trained, data, values):
  """Appends the accuracies and certificates that the file lacks."""
  key = jax.random.key(_EVALUATION_SEED)
  images = image_data.scale(data.test_images[:values.test_images])
  labels = data.test_labels[:values.test_images]
  config, state = run.method, trained.state
  todo = cells(values.attack_bound, values.attack_steps, values.votes, config)
  names = ('kind', *(f.name for f in dataclasses.fields(todo[0])))
  done = file.done(*names)
  with records.Progress(len(todo) + 1) as progress:
    for cell in todo:
      if ('accuracy', *dataclasses.astuple(cell)) not in done:
        file.append({'kind': 'accuracy'} | image_evaluation.accuracy(
            key, config, state, images, labels, cell))
      _agreed(_UNFINISHED)  # no wait of the others is longer than a cell
      progress.update(1, f'{cell.deployment} {cell.attack}')
    names = ('kind', 'radius', 'attack_bound')
    radii = certificates.radii(config, trained.calibration, _kernel(trained),
                               attack_bound=values.attack_bound)
    if not file.done(*names).issuperset(
        ('certified', radius, values.attack_bound) for radius in radii):
      _append(file, names, (
          {'kind': 'certified'} | row for row in image_evaluation.certified(
              key, config, trained.calibration, state, images, labels,
              num_samples=values.votes, attack_bounds=[values.attack_bound])))
    progress.update(1, 'certified')


def _kernel(trained):
  """The deployed first layer."""
  return np.asarray(trained.state.params['encoder']['kernel'])


def _append(file, names, rows):
  """Appends the rows that the file lacks, told apart by the fields `names`."""
  for row in rows:
    if tuple(row[name] for name in names) not in file.done(*names):
      file.append(row)


def ledger_rows(run, trained, values):
  """Returns the rows of the three ledgers of a finished run."""
  return [{'kind': 'ledger'} | row for row in certificates.ledger(
      run.method, trained.calibration, _kernel(trained),
      num_samples=values.votes, attack_bound=values.attack_bound,
      seeded=values.seed is not None)]


def run_row(run):
  """Returns the row that a finished run ends with."""
  return {'kind': 'run', 'num_steps': run.num_steps,
          'num_examples': run.method.num_examples,
          'batch_size': run.method.batch_size, 'num_dropped': run.num_dropped}


def summary(rows):
  """Returns the text that the binary ends with, every number from the rows."""
  lines = [guarantees.ledger_text(
      [row for row in rows if row['kind'] == 'ledger']), 'Accuracy on test '
      'images (run: one pass with the run\'s own draw; votes: smoothed):']
  for row in rows:
    if row['kind'] == 'accuracy':
      on = ', attack on the released code\'s network' * (
          row.get('network') == 'official')
      lines.append(f"  {row['deployment']:<6} {row['attack']:<6} at "
                   f"{row['attack_bound']:<5g} {row['accuracy']:.4f}  "
                   f"({row['num_images']} images{on})")
  for row in rows:
    if row['kind'] == 'certified':
      lines.append(
          f"  certified at {row['norm']} {row['attack_bound']:g} by "
          f"{row['radius']} ({row['status']}): "
          f"{row['certified_accuracy']:.4f}")
    if row['kind'] == 'run':
      lines.append(
          f"{row['num_dropped']} of {row['num_examples']} records, left over "
          f"by batches of {row['batch_size']}, were not trained on")
  return '\n'.join(lines)


def execute(values):
  """Trains, measures and returns the rows; ``values`` has the flags.

  Process 0 writes and returns them, the others train with it and return [].
  """
  check_measurement(values)
  data = image_data.load(values.dataset, values.data_dir, limit=values.limit)
  run = run_of_flags(values, len(data.train_images))
  data = image_training.fit(data, run.method)
  image_training.check(run, data)
  if jax.process_index():
    _follow(values, run, data)
    return []
  owner = owner_of(run, data) if values.seed is None else None
  with contextlib.ExitStack() as stack:
    try:
      if values.seed is None:
        check_owner(values.out, owner)  # before anything is written
      file = stack.enter_context(
          records.Records(os.path.join(values.out, 'rows.jsonl'), run))
      finished = ('run',) in file.done('kind')
      key = None if finished else root_key(values.out, values.seed, owner)
    except BaseException:
      _agreed(_REFUSED)
      raise
    if _agreed(_FINISHED if finished else _UNFINISHED) == _UNFINISHED:
      _finish(_shared(key), values, run, data, file)
    rows = file.rows
  forget_key(values.out)
  records.to_csv(rows, os.path.join(values.out, 'rows.csv'))
  return rows


def _follow(values, run, data):
  """What the processes other than 0 do: they train, and wait for its rows."""
  state = _agreed()
  if state == _REFUSED:
    raise ValueError('process 0 has refused to start; its message says why')
  if state == _UNFINISHED:
    key = _shared(root_key(values.out, values.seed, None))
    image_training.train(key, run, data, values.out, backend=values.backend)
    while _agreed() == _UNFINISHED:
      pass  # process 0 measures


def _finish(key, values, run, data, file):
  """Trains and appends all rows that the file lacks, that of the run last."""
  trained = image_training.train(key, run, data, values.out, file=file,
                                 backend=values.backend)
  try:
    measure(file, run, trained, data, values)
    _append(file, ('kind', 'ledger', 'part'), ledger_rows(run, trained, values))
    file.append(run_row(run))
  finally:  # the others wait: one that ends takes all with it minutes later
    _agreed(_FINISHED)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  layouts.initialize(values.coordinator_address, values.num_processes,
                      values.process_id)
  try:
    rows = execute(values)
  except (ValueError, FileNotFoundError, image_training.Diverged) as error:
    sys.exit(f'train: {error}')
  if not jax.process_index():
    print(summary(rows))


if __name__ == '__main__':
  command_line.define_flags('train')
  define_flags()
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main)
