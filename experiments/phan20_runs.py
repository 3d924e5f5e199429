r"""What the figures of Phan et al. (2020) share: runs, cells, curves. Host.

A run is one mode at one total budget, in RUNS/<mode>-<epsilon>/ with its
checkpoints and the rows of its training; killed, it goes on from the last
checkpoint, and a figure at its next cell. Figures that get the same
``--runs_dir`` train each run once; one process at a time.

'paper' mode has the published budgets, 'sound' the same and larger ones, at
which it can learn. Labels get their share by :func:`label_budget`:

>>> config = Config(label_epsilon=.1, label_share=.25, label_most=4.)
>>> [label_budget(config, mode, 2.) for mode in ('paper', 'sound')]
[0.1, 0.5]
>>> label_budget(config, 'sound', 400.)
4.0

Every row has the totals of two ledgers: what is claimed, and what standard
differential privacy gives for a whole record. Keys come from a seed, and the
conditions in a row say that they are not secret.

References: Phan et al. (2020), Section 6 and Appendix P.
"""

import dataclasses
import itertools
import math
import os
import sys
import types
from typing import NamedTuple
import zlib

from absl import flags
import jax
import numpy as np

from experiments import command_line
from experiments import image_evaluation
from experiments import image_training
from experiments import records
from experiments.datasets import images as image_data
from jaxdp.training import certificates
from jaxdp.training import stobatch

MODES = stobatch.MODES
DEPLOYMENTS = image_evaluation.DEPLOYMENTS
ATTACKS = image_evaluation.ATTACKS[1:]
INFERENCE = {'paper': 'product', 'sound': 'single'}
MECHANISMS = tuple(f'stobatch, {mode}' for mode in MODES)
COLORS = {'paper': 'tab:red', 'sound': 'tab:blue'}
LINES = {'run': '--', 'votes': '-'}
RADIUS_COLORS = {
    'claimed': 'tab:red', 'composed_linf': 'tab:blue',
    'laplace_linf': 'tab:green', 'laplace_renyi_linf': 'tab:purple',
    'hidden_linf': 'tab:orange', 'best_linf': 'tab:brown',
    'laplace_l1': 'tab:gray'}
# Streams of the seed: noise and batches of the runs; attacks and votes.
_TRAINING, _EVALUATION = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows; each figure adds its fields.

  Attributes:
    seed: of the runs, the attacks and the votes.
    dataset: name of ``datasets.images``; the published settings are its.
    limit: first records of the training and of the test set; None: all.
    training_steps: T.
    checkpoint_every: steps between two checkpoints.
    paper_epsilons: totals of 'paper' mode.
    sound_epsilons: totals of 'sound' mode.
    label_epsilon: budget of the labels in 'paper' mode, at every total.
    label_share: part of a total that labels get in 'sound' mode.
    label_most: at most so much.
    settings: pairs of further fields of ``stobatch.Config``, both modes.
    num_images: first test images that are attacked, or certified.
    num_samples: votes an image.
    num_draws: draws of noise that a step of an attack averages over.
    certified_bounds: sizes at which votes are certified too.
  """
  seed: int = 0
  dataset: str = 'mnist'
  limit: int | None = None
  training_steps: int = 4_800
  checkpoint_every: int = 200
  paper_epsilons: tuple[float, ...] = (.2,)
  sound_epsilons: tuple[float, ...] = (.2, 400.)
  label_epsilon: float = .1
  label_share: float = .25
  label_most: float = 4.
  settings: tuple[tuple[str, object], ...] = ()
  num_images: int = 1_000
  num_samples: int = 2_000
  num_draws: int = 4
  certified_bounds: tuple[float, ...] = ()


# The runs of quick forms; label noise is divided by the batch, so it is large.
QUICK = dict(dataset='digits', training_steps=100, checkpoint_every=50,
             num_samples=100, num_draws=1,
             settings=(('batch_size', 480), ('attack_steps', 1)))


class Point(NamedTuple):
  """One cell: which run, used how, under which attack."""
  mode: str
  epsilon: float
  inference: str  # how a vote is cast, 'product' or 'single'
  deployment: str  # 'run' or 'votes'
  attack: str
  attack_bound: float  # with attack 'none', the size that is certified
  num_steps: int  # of the attack


KEY = Point._fields


# --- Grids


def budgets(config):
  """Returns the runs of a Config, pairs of mode and epsilon."""
  return [(mode, epsilon) for mode in MODES
          for epsilon in getattr(config, f'{mode}_epsilons')]


def attacked(config, *, attacks, bounds, steps):
  """Returns the points of attacks on all runs in both deployments.

  Args:
    config: Config.
    attacks: of ``image_evaluation.ATTACKS``.
    bounds: sizes; 'none' has one point, without a size.
    steps: numbers of steps; 'fgsm' has one.
  """
  points = []
  for (mode, epsilon), deployment, attack, bound, num_steps in (
      itertools.product(budgets(config), DEPLOYMENTS, attacks, bounds, steps)):
    bound, num_steps = {'none': (0., 0), 'fgsm': (bound, 1)}.get(
        attack, (bound, num_steps))
    points.append(Point(mode, epsilon, INFERENCE[mode], deployment, attack,
                        bound, num_steps))
  return list(dict.fromkeys(points))


# --- Runs


def label_budget(config, mode, epsilon):
  """Returns the part of a total that the labels get."""
  if mode == 'paper':
    return config.label_epsilon
  return min(config.label_share * epsilon, config.label_most)


def run_of(config, mode, epsilon, num_examples):
  """Returns the image_training.Run of one mode and total."""
  method = stobatch.published(
      config.dataset, mode=mode, epsilon=epsilon, num_examples=num_examples,
      label_epsilon=label_budget(config, mode, epsilon),
      **dict(config.settings))
  return image_training.Run(
      method=method, dataset=config.dataset, num_steps=config.training_steps,
      checkpoint_every=config.checkpoint_every, limit=config.limit,
      seed=config.seed)


def train(config, mode, epsilon, data, runs_dir=None):
  """Returns ``(run, trained)``, from the last checkpoint where there is one.

  ``runs_dir`` is the directory of all runs; None keeps nothing.

  Raises:
    ValueError: the run's directory has other settings or another seed.
  """
  run = run_of(config, mode, epsilon, len(data.train_images))
  image_training.check(run, data)
  # A run's own stream, whatever other runs there are.
  key = jax.random.fold_in(
      jax.random.fold_in(jax.random.key(config.seed), _TRAINING),
      zlib.crc32(f'{mode} {float(epsilon)!r}'.encode()))
  if runs_dir is None:
    return run, image_training.train(key, run, data, None)
  out = os.path.join(runs_dir, f'{mode}-{epsilon:g}')
  fields = dataclasses.asdict(run)
  settings = fields.pop('method') | fields
  with records.Records(os.path.join(out, 'rows.jsonl'), settings) as file:
    return run, image_training.train(key, run, data, out, file=file)


# --- Rows


def run_points(config, points, done=frozenset(), *, runs_dir=None,
               data_dir=None):
  """Yields one row a point; a run of which all points are done is not touched.

  Args:
    config: Config.
    points: list of Point, those of a run side by side.
    done: set of tuples of the fields `KEY`.
    runs_dir, data_dir: see :func:`train` and ``datasets.images.load``.
  """
  todo = [point for point in points if tuple(point) not in done]
  data = todo and image_data.load(config.dataset, data_dir,
                                  limit=config.limit)
  for (mode, epsilon), mine in itertools.groupby(todo, lambda p: p[:2]):
    evaluation = _Evaluation(
        config, data, *train(config, mode, epsilon, data, runs_dir))
    for point in mine:
      yield evaluation.row(point)


class _Evaluation:
  """Measures one trained run; all certificates come from one tally."""

  def __init__(self, config, data, run, trained):
    self._config, self._run, self._trained = config, run, trained
    self._images = image_data.scale(data.test_images[:config.num_images])
    self._labels = data.test_labels[:config.num_images]
    self._key = jax.random.fold_in(jax.random.key(config.seed), _EVALUATION)
    self._shared = _context(config, run, trained) | {
        'num_images': len(self._images), 'num_samples': config.num_samples,
        'num_draws': config.num_draws}
    self._certified = {}

  def row(self, point):
    """The row of one point."""
    certificates = {}
    if (point.deployment == 'votes'
        and point.attack_bound in self._config.certified_bounds):
      certificates = self._certificates(point.inference)[point.attack_bound]
    if certificates and point.attack == 'none':
      accuracy = certificates['clean_accuracy']
    else:
      accuracy = self._accuracy(point)
    return (self._shared | point._asdict() | {'accuracy': accuracy}
            | certificates)

  def _accuracy(self, point):
    cell = image_evaluation.Cell(
        deployment=point.deployment, attack=point.attack,
        attack_bound=point.attack_bound, num_steps=max(1, point.num_steps),
        num_samples=self._config.num_samples,
        num_draws=self._config.num_draws)
    return image_evaluation.accuracy(
        self._key, deployed(self._run.method, point.inference),
        self._trained.state, self._images, self._labels, cell)['accuracy']

  def _certificates(self, inference):
    """Fields of the certificates at the CLEAN images, by size."""
    sizes = self._config.certified_bounds
    if inference not in self._certified:
      rows = image_evaluation.certified(
          self._key, deployed(self._run.method, inference),
          self._trained.calibration, self._trained.state, self._images,
          self._labels, num_samples=self._config.num_samples,
          attack_bounds=sizes)
      self._certified[inference] = {
          size: _by_radius([r for r in rows if r['attack_bound'] == size])
          for size in sizes}
    return self._certified[inference]


def deployed(method, inference):
  """Returns a method without its budget; all runs of a mode compile once.

  A prediction has its noise from the state, a radius from the calibration.
  """
  return dataclasses.replace(method, epsilon=1., label_epsilon=.5,
                             moments_epsilon=0., inference=inference)


def _context(config, run, trained):
  """What all rows of a run say: its budget, and how it stands."""
  method = run.method
  ledger = certificates.ledger(
      method, trained.calibration,
      np.asarray(trained.state.params['encoder']['kernel']), seeded=True)
  claimed, standard = (
      next(row for row in ledger
           if (row['ledger'], row['part']) == (name, 'total'))
      for name in ('claimed', 'standard'))
  return {
      'mechanism': f'stobatch, {method.mode}', 'dataset': config.dataset,
      'num_examples': method.num_examples, 'num_dropped': run.num_dropped,
      'training_steps': run.num_steps,
      'label_epsilon': method.label_epsilon,
      'input_scale': trained.calibration.input_scale,
      'claimed_epsilon': claimed['epsilon'], 'delta': claimed['delta'],
      'status': claimed['status'], 'source': claimed['source'],
      'standard_epsilon': standard['epsilon'],
      'standard_delta': standard['delta'],
      'standard_status': standard['status'],
      'standard_source': standard['source'],
      'standard_reason': standard['reason'],
      'conditions': claimed['conditions']}


def _by_radius(rows):
  """One dict a statistic, from the names of the radii."""
  shared = {'clean_accuracy': rows[0]['accuracy'],
            'significance': rows[0]['significance']}
  return shared | {
      field: {row['radius']: row[name] for row in rows} for field, name in (
          ('certified', 'certified_accuracy'), ('radius_status', 'status'),
          ('radius_norm', 'norm'), ('median_radius', 'median_radius'))}


# --- What figures say and draw


def standing(row):
  """How a run stands, in words."""
  standard = ('infinite' if math.isinf(row['standard_epsilon'])
              else f'{row["standard_epsilon"]:.4g}')
  return (f'{row["mode"]} mode at epsilon {row["epsilon"]:g} '
          f'({row["status"]}; standard epsilon {standard}, '
          f'{row["standard_status"]})')


def status(row):
  """The statuses of the two ledgers, in a word where they agree."""
  if row['status'] == row['standard_status']:
    return row['status']
  return f'{row["status"]}; standard: {row["standard_status"]}'


def where(rows, **fields):
  """The rows in which the fields have these values."""
  return [row for row in rows
          if all(row[name] == value for name, value in fields.items())]


def distinct(rows, *names):
  """Values of fields over rows, in order of appearance, each once."""
  return list(dict.fromkeys(tuple(row[name] for name in names)
                            for row in rows))


def percent(value):
  """A fraction, as text."""
  return f'{100 * value:.1f}%'


def figure_of(num, *, columns=3):
  """Returns a canvas and ``num`` panels; needs matplotlib."""
  from matplotlib.figure import Figure
  columns = min(num, columns)
  lines = -(-num // columns)
  canvas = Figure(figsize=(4.2 * columns, 3.2 * lines + .9),
                  layout='constrained')
  axes = canvas.subplots(lines, columns, squeeze=False).ravel()
  for axis in axes[num:]:
    axis.set_visible(False)
  for axis in axes:
    axis.set(ylim=(0, 1.02))
    axis.grid(alpha=.3)
  return canvas, axes[:num]


def save(canvas, axes, path):
  """Writes the PNG; one legend below names the lines of all panels."""
  lines = {}
  for axis in axes:
    axis.title.set_fontsize('medium')
    for line, name in zip(*axis.get_legend_handles_labels()):
      lines.setdefault(name, line)
  canvas.legend(lines.values(), lines, loc='outside lower center',
                fontsize='small', ncols=2)
  canvas.savefig(path, dpi=130)


# --- The binaries


def collect(module, config, out, *, runs_dir=None, data_dir=None):
  """Makes the rows that OUT/rows.jsonl lacks; ``runs_dir`` is OUT/runs."""
  places = dict(runs_dir=runs_dir or os.path.join(out, 'runs'),
                data_dir=data_dir)
  bound = types.SimpleNamespace(
      KEY=KEY, grid=module.grid,
      run=lambda config, done: module.run(config, done, **places))
  return command_line.collect(bound, config, out)


def main(module, name):
  """Runs a figure as a binary, with the flags of its runs and its data."""
  flags.DEFINE_string('runs_dir', None, 'Where trained runs lie, shared by '
                      'figures; OUT/runs by default.')
  flags.DEFINE_string('data_dir', None, 'Where the data are; see README.')

  def execute(config, out):
    try:
      module.execute(config, out, runs_dir=flags.FLAGS.runs_dir,
                     data_dir=flags.FLAGS.data_dir)
    except (ValueError, FileNotFoundError, image_training.Diverged) as error:
      sys.exit(f'{name}: {error}')
  command_line.main(types.SimpleNamespace(
      Config=module.Config, QUICK=module.QUICK, draw=module.draw,
      execute=execute), name)
