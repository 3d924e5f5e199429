"""StoBatch's figures: both modes, every status, and a kill at any moment."""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from experiments import image_evaluation
from experiments import image_training
from experiments import phan20_fig2
from experiments import phan20_fig5
from experiments import phan20_fig7
from experiments import phan20_fig8
from experiments import phan20_runs
from experiments import records
from experiments import reproduce
from experiments.datasets import images
from jaxdp import guarantees
from jaxdp.training import parallel
from jaxdp.training import stobatch

pytestmark = pytest.mark.slow  # trains and attacks small networks

_TINY = dict(
    dataset='digits', limit=120, training_steps=3, checkpoint_every=2,
    paper_epsilons=(2.,), sound_epsilons=(40.,), num_images=30, num_samples=20,
    num_draws=1, settings=(
        ('first_layer', 'dense'), ('batch_size', 40), ('attack_steps', 1),
        ('attacks', ('ifgsm',))))
_FIGURES = {
    phan20_fig2: phan20_fig2.Config(
        **_TINY, attacks=('none', 'fgsm')),
    phan20_fig5: phan20_fig5.Config(
        **_TINY, attacks=('none', 'fgsm'), attack_bounds=(.1, .4)),
    phan20_fig7: phan20_fig7.Config(**_TINY, certified_bounds=(.001, .1, .4)),
    phan20_fig8: phan20_fig8.Config(
        **_TINY, attacks=('fgsm',), certified_bounds=(.1, .4)),
}
_EACH = tuple((module.__name__.split('_')[-1], module) for module in _FIGURES)


class _Killed(BaseException):
  """As SIGKILL: nothing in the experiments may catch it."""


def _killing(fun, after):
  """`fun`, until it was called ``after`` times."""
  calls = itertools.count()

  def killed(*args, **settings):
    if next(calls) >= after:
      raise _Killed
    return fun(*args, **settings)

  return killed


@functools.cache
def directory():
  """Directory of all that this module makes; the runs are in RUNS."""
  return tempfile.mkdtemp(prefix='phan20_test')


@functools.cache
def result(module):
  """(rows, OUT) of a figure, made once; figures share their runs."""
  out = os.path.join(directory(), module.__name__)
  return module.execute(_FIGURES[module], out, runs_dir=runs_dir()), out


# A run that goes on compiles no more.
_PATCHES = [
    absltest.mock.patch.object(owner, name, functools.cache(
        getattr(owner, name)))
    for owner, name in ((stobatch, 'make_train_step'),
                        (parallel, 'map_trainers'))]


def setUpModule():
  jax.config.update('jax_disable_most_optimizations', True)
  for patch in _PATCHES:
    patch.start()


def runs_dir():
  return os.path.join(directory(), 'runs')


def tearDownModule():
  jax.config.update('jax_disable_most_optimizations', False)
  for patch in _PATCHES:
    patch.stop()
  shutil.rmtree(directory())


def numbers(text):
  return re.findall(r'\d+(?:,\d{3})*(?:\.\d+)?', text)


class FiguresTest(parameterized.TestCase):

  @parameterized.named_parameters(*_EACH)
  def test_rows_are_written_read_back_and_drawn(self, module):
    rows, out = result(module)
    _, read = records.read(os.path.join(out, 'rows.jsonl'))
    self.assertEqual(read, rows)
    self.assertEqual(read, json.loads(json.dumps(rows)))
    points = module.grid(_FIGURES[module])
    self.assertEqual([tuple(row[name] for name in module.KEY) for row in rows],
                     [tuple(point) for point in points])
    self.assertGreater(
        os.path.getsize(os.path.join(out, module.FIGURES[0].image)), 5_000)
    self.assertTrue(os.path.exists(os.path.join(out, 'rows.csv')))

  @parameterized.named_parameters(*_EACH)
  def test_a_second_run_trains_and_adds_nothing(self, module):
    rows, out = result(module)
    path = os.path.join(out, 'rows.jsonl')
    with open(path, 'rb') as file:
      before = file.read()
    with absltest.mock.patch.object(image_training, 'train',
                                    side_effect=_Killed):
      again = module.execute(_FIGURES[module], out, runs_dir=runs_dir())
    with open(path, 'rb') as file:
      self.assertEqual(file.read(), before)
    self.assertEqual(again, rows)

  @parameterized.named_parameters(*_EACH)
  def test_a_figure_killed_after_its_first_cell_goes_on(self, module):
    rows, _ = result(module)
    out = self.create_tempdir().full_path
    with absltest.mock.patch.object(
        phan20_runs._Evaluation, 'row', _killing(
            phan20_runs._Evaluation.row, 1)):
      with self.assertRaises(_Killed):
        module.execute(_FIGURES[module], out, runs_dir=runs_dir())
    self.assertLen(records.read(os.path.join(out, 'rows.jsonl'))[1], 1)
    self.assertEqual(
        module.execute(_FIGURES[module], out, runs_dir=runs_dir()), rows)

  @parameterized.named_parameters(*_EACH)
  def test_quick_and_full_forms_have_both_modes_and_both_deployments(
      self, module):
    for config in (module.QUICK, module.Config()):
      grid = module.grid(config)
      self.assertLen(set(grid), len(grid))
      self.assertEqual({p.mode for p in grid}, set(phan20_runs.MODES))
      self.assertEqual({(p.mode, p.deployment) for p in grid}, set(
          itertools.product(phan20_runs.MODES, phan20_runs.DEPLOYMENTS)))
      # 'sound' at the totals of 'paper', and at one where it can learn.
      self.assertContainsSubset(config.paper_epsilons, config.sound_epsilons)
      self.assertGreater(max(config.sound_epsilons),
                         10 * max(config.paper_epsilons))
      self.assertIn(.2, config.paper_epsilons)
    self.assertEqual(module.QUICK.dataset, 'digits')
    self.assertEqual(module.Config().dataset, 'mnist')

  def test_figures_of_equal_settings_share_their_runs(self):
    wanted = {phan20_runs.run_of(module.Config(), mode, .2, 60_000)
              for module in _FIGURES for mode in phan20_runs.MODES}
    self.assertLen(wanted, 2)
    for module in _FIGURES:
      result(module)
    self.assertEqual(sorted(os.listdir(runs_dir())), ['paper-2', 'sound-40'])

  @parameterized.named_parameters(*_EACH)
  def test_findings_say_what_the_rows_say(self, module):
    rows, _ = result(module)
    said = module.findings(rows)
    self.assertNotEmpty(said)
    self.assertContainsSubset(
        {number for line in said for number in numbers(line)},
        self._numbers_of(rows))
    for status in ('claimed', 'none', 'proved'):
      self.assertTrue(any(status in line for line in said))
    # Other rows, other findings: no number is typed.
    other = [row | {'accuracy': 1 / 3, 'standard_epsilon': 7.125}
             for row in rows]
    for line in module.findings(other):
      self.assertIn('7.125', line)
      if 'certified' not in line or 'right' in line:
        self.assertIn('33.3%', line)

  def _numbers_of(self, rows):
    """Every number of the rows, in each form that a finding may have."""
    found = set()
    def visit(value):
      if isinstance(value, dict):
        for part in value.values():
          visit(part)
      elif isinstance(value, (int, float)) and math.isfinite(value):
        for text in (f'{value:g}', f'{value:.4g}', f'{100 * value:.1f}',
                     f'{value:,}', f'{value:,.0f}'):
          found.add(text)
    for row in rows:
      visit(row)
    found |= {number for row in rows for name in row.get('radius_status', ())
              for number in numbers(name)}
    return found | {number for row in rows for name in row.get(
        'radius_norm', {}).values() for number in numbers(name)}

  def test_the_published_number_stands_beside_its_own_cell_alone(self):
    rows, _ = result(phan20_fig2)
    published = 'The paper has 82.7%'
    at = lambda **fields: [
        published in line for line in phan20_fig2.findings(
            [row | fields for row in rows if row['mode'] == 'paper'])]
    self.assertEqual(at(dataset='mnist', epsilon=.2), [True, True])
    self.assertEqual(at(dataset='mnist'), [False, False])
    self.assertEqual(at(epsilon=.2), [False, False])


class RowsTest(parameterized.TestCase):

  def test_rows_carry_how_their_run_stands(self):
    for module in _FIGURES:
      for row in result(module)[0]:
        statuses = (row['status'], row['standard_status'])
        if row['mode'] == 'paper':
          self.assertEqual(statuses, ('claimed', 'none'))
          self.assertEqual(row['claimed_epsilon'], row['epsilon'])
          self.assertEqual(row['standard_epsilon'], math.inf)
          self.assertEqual(row['label_epsilon'], .1)
        else:
          self.assertEqual(statuses, ('proved', 'proved'))
          self.assertEqual(row['claimed_epsilon'], row['standard_epsilon'])
          self.assertLessEqual(row['standard_epsilon'], row['epsilon'])
          self.assertEqual(row['standard_delta'], 1e-5)
          self.assertEqual(row['label_epsilon'], 4.)
        self.assertIn(guarantees.KEY_NOT_SECRET, row['conditions'])
        self.assertEqual(row['num_images'], 30)

  def test_the_noise_of_a_sound_row_is_worth_its_epsilon(self):
    row = phan20_runs.where(result(phan20_fig2)[0], mode='sound')[0]
    spent = functools.partial(guarantees.laplace_vector_epsilon, dimension=64,
                              shift=2., delta=1e-5)
    self.assertLessEqual(spent(scale=row['input_scale']), 36.)
    self.assertGreater(spent(scale=.99 * row['input_scale']), 36.)

  def test_a_prediction_does_not_read_the_budget(self):
    config = _FIGURES[phan20_fig7]
    data = images.load('digits', limit=120)
    key = jax.random.fold_in(jax.random.key(0), 1)
    run, trained = phan20_runs.train(config, 'paper', 2., data, runs_dir())
    rows = image_evaluation.certified(
        key, run.method, trained.calibration, trained.state,
        images.scale(data.test_images[:30]), data.test_labels[:30],
        num_samples=20, attack_bounds=(.001, .1, .4))
    self.assertLen(rows, 6)
    for row in rows:
      ours, = phan20_runs.where(
          result(phan20_fig7)[0], mode='paper', deployment='votes',
          attack_bound=row['attack_bound'], inference='product')
      name = row['radius']
      self.assertEqual(
          (ours['certified'][name], ours['radius_status'][name],
           ours['radius_norm'][name], ours['median_radius'][name]),
          (row['certified_accuracy'], row['status'], row['norm'],
           row['median_radius']))

  def test_a_claimed_radius_stands_beside_every_proved_one(self):
    rows = phan20_runs.where(result(phan20_fig7)[0], deployment='votes')
    radii = {(row['mode'], row['inference']): row['radius_status']
             for row in rows}
    self.assertEqual(radii['paper', 'product'], {
        'claimed': 'claimed', 'composed_linf': 'proved'})
    for mode in phan20_runs.MODES:
      self.assertContainsSubset(
          {'laplace_l1': 'proved', 'laplace_linf': 'proved',
           'laplace_renyi_linf': 'proved'}.items(),
          radii[mode, 'single'].items())
    self.assertNotIn('claimed', radii['sound', 'single'])

  def test_nothing_is_certified_that_is_wrong_or_at_a_larger_size(self):
    rows = phan20_runs.where(result(phan20_fig7)[0], deployment='votes')
    for mode, inference in phan20_runs.distinct(rows, 'mode', 'inference'):
      mine = phan20_runs.where(rows, mode=mode, inference=inference)
      for name, kind in mine[0]['radius_status'].items():
        curve = [row['certified'][name] for row in mine]
        self.assertLessEqual(max(curve), mine[0]['clean_accuracy'])
        if kind == 'proved':
          self.assertEqual(curve, sorted(curve, reverse=True))

  def test_attacks_of_both_deployments_are_rows_of_their_own(self):
    rows, _ = result(phan20_fig5)
    for mode, deployment in itertools.product(
        phan20_runs.MODES, phan20_runs.DEPLOYMENTS):
      curve = phan20_fig5.curve_of(rows, mode=mode, deployment=deployment,
                                   attack='fgsm')
      self.assertEqual([row['attack_bound'] for row in curve], [0., .1, .4])
      self.assertEqual([row['num_steps'] for row in curve], [0, 1, 1])
      for row in curve:
        self.assertBetween(row['accuracy'], 0., 1.)
        # A share of 30 images.
        np.testing.assert_allclose(row['accuracy'] * 30,
                                   round(row['accuracy'] * 30), atol=1e-5)

  def test_every_cell_is_measured_as_its_point_says(self):
    result(phan20_fig5)
    config = dataclasses.replace(
        _FIGURES[phan20_fig5], attacks=image_evaluation.ATTACKS, num_draws=3)
    points = phan20_runs.attacked(
        config, attacks=config.attacks, bounds=(.1, .4), steps=(7, 9))
    seen = []

    def accuracy(key, method, state, images, labels, cell):
      del key, state
      seen.append((method.mode, method.inference, len(images), len(labels),
                   cell))
      return {'accuracy': len(seen) / 100}

    with absltest.mock.patch.object(image_evaluation, 'accuracy', accuracy):
      rows = list(phan20_runs.run_points(config, points, runs_dir=runs_dir()))
    # Once without attack, two sizes of FGSM, two by two of each other one.
    self.assertLen(seen, 4 * (1 + 2 + 3 * 4))
    self.assertEqual([row['accuracy'] for row in rows],
                     [(i + 1) / 100 for i in range(len(points))])
    for point, row, (mode, inference, *nums, cell) in zip(points, rows, seen):
      self.assertEqual((mode, inference, nums), (
          point.mode, {'paper': 'product', 'sound': 'single'}[mode], [30, 30]))
      self.assertEqual(
          (cell.deployment, cell.attack, cell.attack_bound, cell.num_samples,
           cell.num_draws, cell.labels), (
               point.deployment, point.attack, point.attack_bound, 20, 3,
               'true'))
      self.assertEqual(cell.num_steps, max(1, point.num_steps))
      self.assertEqual(row['num_steps'], {'none': 0, 'fgsm': 1}.get(
          cell.attack, cell.num_steps))

  def test_a_curve_of_strong_attacks_takes_the_worst_of_them(self):
    rows = [row | {'attack': attack, 'num_steps': steps, 'accuracy': accuracy}
            for row in phan20_runs.where(result(phan20_fig8)[0], mode='sound')
            for attack, steps, accuracy in (
                ('ifgsm', 100, .5), ('pgd', 100, .25), ('ifgsm', 500, .125))]
    said = [line for line in phan20_fig8.findings(rows) if 'after' in line]
    self.assertLen(said, 4)
    self.assertIn('run: after 100 steps 25.0% at 0.1 (pgd)', said[0])
    self.assertIn('run: after 500 steps 12.5% at 0.1 (ifgsm)', said[1])
    self.assertIn('votes: after 100 steps 25.0% at 0.1 (pgd)', said[2])


class RunsTest(parameterized.TestCase):

  def _execute(self, out, **changes):
    config = dataclasses.replace(
        _FIGURES[phan20_fig7], paper_epsilons=(), **changes)
    return phan20_fig7.execute(config, out)

  def test_the_main_job_trains_each_run_once_and_reports_it(self):
    result(phan20_fig2)
    out = self.create_tempdir().full_path
    names = ('phan20_fig2', 'phan20_fig7')
    self.assertLessEqual(set(names), set(reproduce._TRAINED))
    keep = image_training._Keeper.keep
    with absltest.mock.patch.object(
        image_training._Keeper, 'keep', autospec=True,
        side_effect=keep) as kept:
      self.assertEqual({}, reproduce.reproduce(out, {
          name: _FIGURES[reproduce.EXPERIMENTS[name][0]] for name in names}))
    # Two runs of three steps; a run that is there makes none.
    self.assertEqual([call.args[1] for call in kept.call_args_list],
                     [1, 2, 3, 1, 2, 3])
    self.assertLen(os.listdir(os.path.join(out, 'phan20_runs')), 2)
    with open(os.path.join(out, 'report.html'), encoding='utf-8') as page:
      text = page.read()
    for word in (*names, *phan20_runs.MECHANISMS, 'claimed', 'proved'):
      self.assertIn(word, text)

  def test_a_run_killed_in_training_goes_on_from_its_checkpoint(self):
    result(phan20_fig7)
    out = self.create_tempdir().full_path
    keep = image_training._Keeper.keep
    with absltest.mock.patch.object(
        image_training._Keeper, 'keep', _killing(keep, 2)):
      with self.assertRaises(_Killed):
        self._execute(out)
    self.assertEmpty(records.read(os.path.join(out, 'rows.jsonl'))[1])
    with absltest.mock.patch.object(
        image_training._Keeper, 'keep', autospec=True,
        side_effect=keep) as kept:
      rows = self._execute(out)
    self.assertEqual([call.args[1] for call in kept.call_args_list], [3])
    self.assertEqual(
        rows, phan20_runs.where(result(phan20_fig7)[0], mode='sound'))

  def test_a_run_of_another_seed_or_setting_is_refused_by_name(self):
    result(phan20_fig7)
    config = _FIGURES[phan20_fig7]
    for field, change in (('seed', dict(seed=1)),
                          ('label_epsilon', dict(label_most=3.)),
                          ('num_steps', dict(training_steps=4))):
      with self.assertRaisesRegex(ValueError, field):
        phan20_fig7.execute(
            dataclasses.replace(config, paper_epsilons=(), **change),
            self.create_tempdir().full_path, runs_dir=runs_dir())

  def test_streams_of_runs_differ_and_follow_the_seed(self):
    keys = []
    with absltest.mock.patch.object(
        image_training, 'train', side_effect=lambda key, *_: keys.append(key)):
      data = images.load('digits', limit=120)
      for seed, mode, epsilon in itertools.product(
          (0, 1), phan20_runs.MODES, (2., 40.)):
        config = dataclasses.replace(_FIGURES[phan20_fig2], seed=seed)
        for _ in range(2):
          phan20_runs.train(config, mode, epsilon, data)
    words = [jax.random.key_data(key).tobytes() for key in keys]
    self.assertEqual(words[::2], words[1::2])
    self.assertLen(set(words), 8)

  def test_the_binary_draws_rows_that_are_there(self):
    _, out = result(phan20_fig2)
    image = os.path.join(out, 'fig2.png')
    os.unlink(image)
    subprocess.run(
        [sys.executable, '-m', 'experiments.phan20_fig2', f'--out={out}',
         '--plot_only', '--runs_dir=elsewhere', '--data_dir=elsewhere'],
        check=True, timeout=120, cwd=os.path.dirname(os.path.dirname(
            os.path.abspath(phan20_runs.__file__))))
    self.assertGreater(os.path.getsize(image), 5_000)


if __name__ == '__main__':
  absltest.main()
