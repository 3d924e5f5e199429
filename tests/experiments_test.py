"""Every figure binary runs, resumes, and reports what it measured."""

import csv
import dataclasses
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from scipy import stats

from experiments import audit_library
from experiments import command_line
from experiments import habernal22_adept
from experiments import habernal22_fig1
from experiments import peers_audit
from experiments import privatize_reviews
from experiments import records
from experiments import report
from experiments import reproduce
from experiments import xu20_fig1
from experiments import xu20_fig2
from experiments import xu20_theorem1
from experiments.datasets import embedded
from jaxdp import embeddings
from jaxdp import mechanisms

# Pytest and a plain run both put this folder on the path.
import report_test

_FIG1 = xu20_fig1.Config(
    num_runs=60, vocabulary=150, laplace_words=12, gumbel_words=10,
    raw_epsilons=(1., 12.), unit_epsilons=(5., 60.), log_epsilons=(10., 60.),
    rates=(.3, 5.))
_THEOREM1 = xu20_theorem1.Config(
    tables=('gaussian-30-50', 'line-6'), factors=(1.01,), log_epsilons=(),
    line_epsilons=(2.,))


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


class TempTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.out = self.create_tempdir().full_path

  def path(self, *names):
    return os.path.join(self.out, *names)

  def patch(self, owner, name, value):
    self.enter_context(absltest.mock.patch.object(owner, name, value))


class Figure1Test(TempTest):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.rows = list(xu20_fig1.run(_FIG1))

  def test_rows_are_written_read_back_and_drawn(self):
    rows = xu20_fig1.execute(_FIG1, self.out)
    provenance, read = records.read(self.path('rows.jsonl'))
    self.assertEqual(read, rows)
    self.assertEqual(read, json.loads(json.dumps(self.rows)))
    self.assertEqual(provenance['config']['num_runs'], 60)
    self.assertLen(rows, len(xu20_fig1.grid(_FIG1)))
    with open(self.path('rows.csv'), newline='') as file:
      table = list(csv.DictReader(file))
    self.assertEqual([float(line['epsilon']) for line in table],
                     [row['epsilon'] for row in rows])
    for figure in xu20_fig1.FIGURES:
      self.assertGreater(os.path.getsize(self.path(figure.image)), 5_000)
    self.assertTrue(xu20_fig1.findings(rows))

  def test_rows_hold_the_guarantee_of_the_mechanism_that_ran(self):
    for row in self.rows:
      table = embedded.table(normalize=row['table'] == 'unit')
      table = embeddings.subset(table, range(150))
      guarantee = mechanisms.get(row['mechanism']).calibrate(
          table, epsilon=row['epsilon']).guarantee
      self.assertEqual(
          (row['status'], row['source'], row['claimed_epsilon']),
          (guarantee.status, guarantee.source, guarantee.epsilon))

  def test_unchanged_rises_with_epsilon_and_silent_noise_would_be_seen(self):
    for table in ('raw', 'unit'):
      for name in (xu20_fig1.LAPLACE, xu20_fig1.GUMBEL, xu20_fig1.SOUND):
        curve = xu20_fig1.curve_of(self.rows, table, name)
        first, last = curve[0], curve[-1]
        self.assertLess(first['unchanged_mean'], .8)
        self.assertGreater(last['unchanged_mean'], first['unchanged_mean'])
        self.assertLess(last['support_mean'], first['support_mean'])
        self.assertGreater(first['support_mean'], 3 / first['num_runs'])

  def test_the_provable_variant_has_its_exact_mean(self):
    # The law, from the words' distances: sum over k of Pr(K = k) / Z_k.
    row = xu20_fig1.curve_of(self.rows, 'unit', xu20_fig1.SOUND)[0]
    vectors = embedded.table(normalize=True).vectors[:150].astype(np.float64)
    gap = np.sqrt(((vectors[:, None] - vectors[None])**2).sum(-1))
    rate = row['epsilon'] - 2 * math.log(150) / gap[gap > 0].min()
    gap.sort(axis=1)
    pmf = stats.poisson.pmf(np.arange(1, 151), math.log(150))
    pmf[-1] = 1 - pmf[:-1].sum()
    stay = (pmf / np.cumsum(np.exp(-rate * gap), axis=1)).sum(axis=1)
    # Ten words of 150, 60 runs each, at a false-alarm rate of 1e-3.
    stderr = math.sqrt(stay.var(ddof=1) / 10 + (stay * (1 - stay)).mean() / 600)
    limit = stats.norm.isf(1e-3 / 2) * stderr
    self.assertLess(abs(row['unchanged_mean'] - stay.mean()), limit)
    self.assertGreater(1 - stay.mean(), limit)  # no noise would be seen

  def test_words_and_draws_of_a_point_do_not_depend_on_the_grid(self):
    other = dataclasses.replace(_FIG1, tables=('unit',), rates=(5.,),
                                unit_epsilons=(60., 5.), log_epsilons=())
    by_key = {tuple(row[k] for k in xu20_fig1.KEY): row for row in self.rows}
    rows = list(xu20_fig1.run(other))
    self.assertNotEmpty(rows)
    for row in rows:
      self.assertEqual(row, by_key[tuple(row[k] for k in xu20_fig1.KEY)])

  def test_a_larger_sample_of_words_holds_the_smaller(self):
    import jax
    small, large = (xu20_fig1._sample(jax.random.key(0), 99, n)
                    for n in (10, 40))
    self.assertContainsSubset(small.tolist(), large.tolist())
    self.assertLen(set(large.tolist()), 40)
    np.testing.assert_array_equal(
        xu20_fig1._sample(jax.random.key(0), 99, 0), np.arange(99))

  def test_a_killed_run_makes_no_row_twice_and_ends_the_same(self):
    total = len(xu20_fig1.grid(_FIG1))
    measure = xu20_fig1._measure
    with absltest.mock.patch.object(xu20_fig1, '_measure',
                                    _killing(measure, total - 3)):
      with self.assertRaises(_Killed):
        xu20_fig1.execute(_FIG1, self.out)
    with open(self.path('rows.jsonl'), 'a') as file:
      file.write('{"table": "raw", "mech')  # torn by the kill
    again = absltest.mock.Mock(side_effect=measure)
    self.patch(xu20_fig1, '_measure', again)
    rows = xu20_fig1.execute(_FIG1, self.out)
    self.assertEqual(again.call_count, 3)
    self.assertEqual(rows, json.loads(json.dumps(self.rows)))

  def test_figure_2_measures_nothing_where_figure_1_has_been(self):
    xu20_fig1.execute(_FIG1, self.out)
    self.patch(xu20_fig1, '_measure', _killing(None, 0))
    rows = xu20_fig2.execute(_FIG1, self.out)
    self.assertEqual(rows, json.loads(json.dumps(self.rows)))
    self.assertGreater(os.path.getsize(self.path('fig2.png')), 5_000)

  def test_figure_2_without_figure_1_makes_the_same_rows(self):
    config = dataclasses.replace(_FIG1, tables=('raw',))
    rows = xu20_fig2.execute(config, self.out)
    self.assertEqual(rows, json.loads(json.dumps(
        [row for row in self.rows if row['table'] == 'raw'])))

  def test_support_is_compared_at_equal_unchanged(self):
    curve = [{'unchanged_mean': n, 'support_mean': s, 'epsilon': e}
             for n, s, e in ((.2, .1, 1.), (.6, .001, 9.), (.8, .0005, 10.))]
    support, epsilon = xu20_fig2.at_level(curve, .4)
    self.assertAlmostEqual(support, .01)
    self.assertAlmostEqual(epsilon, 3.)
    self.assertIsNone(xu20_fig2.at_level(curve, .1))
    self.assertIsNone(xu20_fig2.at_level(curve, .9))


class Theorem1Test(TempTest):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.rows = list(xu20_theorem1.run(_THEOREM1))

  def row(self, mechanism, **settings):
    [row] = [row for row in self.rows if row['mechanism'] == mechanism
             and row['settings'] == settings]
    return row

  def test_rows_are_written_read_back_and_drawn(self):
    rows = xu20_theorem1.execute(_THEOREM1, self.out)
    self.assertEqual(records.read(self.path('rows.jsonl'))[1], rows)
    self.assertEqual(rows, json.loads(json.dumps(self.rows)))
    self.assertGreater(os.path.getsize(self.path('theorem1.png')), 5_000)
    self.assertLen(xu20_theorem1.findings(rows),
                   len({row['verdict'] for row in rows}))

  def test_a_killed_run_makes_no_row_twice(self):
    audit = xu20_theorem1.audit
    with absltest.mock.patch.object(xu20_theorem1, 'audit',
                                    _killing(audit, 5)):
      with self.assertRaises(_Killed):
        xu20_theorem1.execute(_THEOREM1, self.out)
    again = absltest.mock.Mock(side_effect=audit)
    self.patch(xu20_theorem1, 'audit', again)
    rows = xu20_theorem1.execute(_THEOREM1, self.out)
    self.assertEqual(again.call_count, len(rows) - 5)

  def test_exact_epsilon_equals_a_loop_over_all_triples(self):
    row = self.row('santext')
    table = xu20_theorem1.make_table('gaussian-30-50', 1)
    x = table.vectors.astype(np.float64)
    gap = np.sqrt(((x[:, None] - x[None])**2).sum(-1))
    law = np.exp(-row['epsilon'] / 2 * gap)
    law = np.log(law / law.sum(axis=1, keepdims=True))
    worst = max(abs(law[a, u] - law[b, u]) / gap[a, b]
                for a, b in itertools.combinations(range(30), 2)
                for u in range(30))
    # epsilon / 2 is rounded down to float32.
    self.assertAlmostEqual(row['measured'] / worst, 1., delta=2**-23)
    w, w_prime, u = (int(word[1:]) for word in row['witness'])
    self.assertAlmostEqual(abs(law[w, u] - law[w_prime, u]) / gap[w, w_prime],
                           worst, delta=1e-9)

  def test_a_proved_claim_is_not_violated_though_it_is_met_with_equality(self):
    row = self.row('multivariate_laplace')
    self.assertAlmostEqual(row['ratio'], 1., delta=1e-9)
    self.assertEqual(row['verdict'], 'not violated')
    for row in self.rows:
      if row['status'] == 'proved':
        self.assertEqual(row['verdict'], 'not violated')

  def test_the_clipped_reading_violates_its_claim_near_its_lower_bound(self):
    row = xu20_theorem1.audit(
        xu20_theorem1.make_table('gaussian-60-50', 1), 'truncated_gumbel',
        {'noise': 'clipped'},
        1.01 * xu20_theorem1._paper_bound('gaussian-60-50', 1))
    self.assertEqual((row['verdict'], row['status']), ('violated', 'claimed'))
    self.assertGreater(row['measured_low'], row['claimed_epsilon'])

  def test_half_the_noise_is_caught(self):
    table = xu20_theorem1.make_table('line-6', 1)
    real = mechanisms.get('multivariate_laplace')

    def calibrate(table, *, epsilon):
      params = real.calibrate(table, epsilon=epsilon)
      return params._replace(epsilon=np.float32(2 * epsilon))

    self.patch(xu20_theorem1.mechanisms, 'get',
               lambda name: real._replace(calibrate=calibrate))
    row = xu20_theorem1.audit(table, 'multivariate_laplace', {}, 2.)
    self.assertEqual(row['verdict'], 'violated')
    self.assertAlmostEqual(row['ratio'], 2., delta=1e-6)

  def test_an_unknown_table_is_named(self):
    with self.assertRaisesRegex(ValueError, "name='cauchy-30-2'"):
      xu20_theorem1.make_table('cauchy-30-2', 1)


def _reviews_config(out, **changes):
  table = embeddings.subset(embedded.table(), range(400))
  path = os.path.join(out, 'table.npz')
  embeddings.save(table, path)
  budgets = (('multivariate_laplace', 8.), ('truncated_gumbel', 1e3),
             ('gumbel_exponential', 500.), ('tem', 3.), ('santext', 3.))
  return privatize_reviews.Config(
      num_lines=5, num_shown=2, table=path, budgets=budgets, **changes)


class ReviewsTest(TempTest):

  def test_rows_hold_lines_and_cards_lie_beside_the_files(self):
    rows = privatize_reviews.execute(_reviews_config(self.out), self.out)
    self.assertLen(rows, 5)
    for row in rows:
      self.assertEqual(row['before'],
                       [review.text for review in embedded.reviews()[:2]])
      text = pathlib.Path(self.path(row['file'])).read_text()
      self.assertEqual(text.split('\n')[:2], row['after'])
      self.assertLen(text.split('\n'), 6)
      self.assertNotEqual(row['after'], row['before'])
      card = json.loads(pathlib.Path(self.path(row['card'])).read_text())
      self.assertEqual(card['table_words']['status'], row['status'])
      self.assertIn('seed', row['entropy'])

  def test_a_killed_run_makes_no_file_twice(self):
    config = dataclasses.replace(
        _reviews_config(self.out),
        budgets=(('tem', 2.), ('tem', 3.), ('tem', 4.)))
    privatize = privatize_reviews.privatize_text.privatize_file
    module = privatize_reviews.privatize_text
    with absltest.mock.patch.object(module, 'privatize_file',
                                    _killing(privatize, 1)):
      with self.assertRaises(_Killed):
        privatize_reviews.execute(config, self.out)
    again = absltest.mock.Mock(side_effect=privatize)
    self.patch(module, 'privatize_file', again)
    self.assertLen(privatize_reviews.execute(config, self.out), 3)
    self.assertEqual(again.call_count, 2)


class ReproduceTest(TempTest):

  def test_the_core_set_makes_a_report_whose_links_resolve(self):
    configs = {
        'xu20_theorem1': _THEOREM1,
        'privatize_reviews': _reviews_config(self.out),
        'peers_audit': peers_audit.QUICK,
        'habernal22_fig1': habernal22_fig1.Config(
            mechanisms=('copy', 'laplace'), dimensions=(2,), num_trials=2_000),
        'habernal22_adept': habernal22_adept.Config(
            epsilons=(1.,), dimensions=(2,), num_trials=20_000),
        'audit_library': audit_library.Config(),
        'xu20_fig1': _FIG1, 'xu20_fig2': _FIG1}
    # Every mechanism by its law; the others are runs, which --quick makes.
    laws = [case for case in audit_library.grid(None) if case.how == 'law']
    self.patch(audit_library, 'grid', lambda config: laws)
    # Those that train are in phan20_test.
    self.assertEqual(set(configs),
                     set(reproduce.EXPERIMENTS) - set(reproduce._TRAINED))
    self.assertEqual(reproduce.reproduce(self.out, configs), {})
    path = self.path('report.html')
    self.assertEqual(report_test.broken_links(path), [])
    page = report_test._Page(pathlib.Path(path).read_text(encoding='utf-8'))
    self.assertEqual(page.tags.count('img'), sum(
        len(s.figures) for s in reproduce.sections() if s.name in configs))
    for name in configs:
      self.assertIn(f'#{name}', page.links)
    text = ' '.join(page.texts)
    for name in mechanisms.names():
      self.assertIn(name, text)
    _, runs = records.read(self.path('rows.jsonl'))
    self.assertEqual([run['experiment'] for run in runs], list(configs))
    self.assertTrue(all(run['seconds'] > 0 for run in runs))

  @parameterized.parameters('none', 'proved')
  def test_a_mechanism_that_changes_its_status_changes_the_report(self, status):
    real = mechanisms.get('tem')

    def calibrate(table, *, epsilon):
      params = real.calibrate(table, epsilon=epsilon)
      return params._replace(guarantee=dataclasses.replace(
          params.guarantee, status=status, source='patched',
          epsilon=math.inf if status == 'none' else epsilon))

    self.patch(xu20_theorem1, '_GUMBEL', [])
    self.patch(xu20_theorem1, '_PROVABLE', [('tem', {})])
    self.patch(xu20_theorem1.mechanisms, 'get',
               lambda name: real._replace(calibrate=calibrate))
    config = dataclasses.replace(_THEOREM1, tables=('gaussian-30-50',))
    self.assertEqual(
        reproduce.reproduce(self.out, {'xu20_theorem1': config}), {})
    page = report_test._Page(pathlib.Path(self.path('report.html')).read_text())
    self.assertEqual(page.bold.count(status), 2)
    self.assertEqual(page.bold.count('not violated'), 2)
    self.assertEqual(page.texts.count('patched'), 2)

  def test_an_experiment_that_fails_loses_no_other(self):
    def execute(config, out):
      if config == 'bad':
        raise ValueError('scale=-1.0 must be positive')
      with records.Records(os.path.join(out, 'rows.jsonl'), {}) as file:
        file.append({'mechanism': 'm', 'epsilon': 1., 'claimed_epsilon': 1.,
                     'status': 'proved', 'source': 'S'})

    module = SimpleNamespace(__name__='toy', FIGURES=(), execute=execute,
                             findings=lambda rows: ['found'])
    experiments = {'first': (module, 'first', 'First'),
                   'second': (module, 'second', 'Second')}
    errors = reproduce.reproduce(
        self.out, {'first': 'bad', 'second': 'good'}, experiments=experiments)
    self.assertEqual(list(errors), ['first'])
    page = report_test._Page(pathlib.Path(self.path('report.html')).read_text())
    self.assertIn('failed: ValueError: scale=-1.0 must be positive', page.texts)
    self.assertIn('found', page.texts)

  def test_a_second_run_measures_nothing_again(self):
    configs = {'xu20_theorem1': _THEOREM1}
    reproduce.reproduce(self.out, configs)
    self.patch(xu20_theorem1, 'audit', _killing(None, 0))
    self.assertEqual(reproduce.reproduce(self.out, configs), {})
    self.assertEqual(report_test.broken_links(self.path('report.html')), [])

  def test_only_is_checked_by_name(self):
    self.assertEqual(reproduce._chosen([], True), list(reproduce.EXPERIMENTS))
    self.assertNotIn('habernal22_adept', reproduce._chosen([]))
    with self.assertRaisesRegex(Exception, 'xu20_fig9'):
      reproduce._chosen(['xu20_fig9'])


class CommandLineTest(parameterized.TestCase):

  @parameterized.parameters(
      xu20_fig1, xu20_fig2, xu20_theorem1, privatize_reviews, habernal22_fig1,
      habernal22_adept, audit_library)
  def test_every_experiment_has_what_the_command_line_needs(self, module):
    quick = command_line.config(module, True, None)
    self.assertEqual(quick, module.QUICK)
    self.assertEqual(command_line.config(module, False, 7),
                     dataclasses.replace(module.Config(), seed=7))
    self.assertNotEqual(module.QUICK, module.Config())
    for figure in module.FIGURES:
      self.assertIsInstance(figure, report.Figure)
    self.assertTrue(callable(module.draw) and callable(module.execute))

  def test_short_help_lists_the_flags_of_the_binary(self):
    done = self._run('--helpshort')
    for flag in ('--out:', '--[no]quick:', '--seed:', '--[no]plot_only:'):
      self.assertIn(flag, done.stdout)

  @parameterized.parameters(True, False)
  def test_an_output_without_rows_or_that_is_a_file_is_one_line(self, is_file):
    out = self.create_tempfile().full_path if is_file else (
        self.create_tempdir().full_path)
    done = self._run(f'--out={out}', '--plot_only')
    self.assertEqual(done.returncode, 1)
    self.assertNotIn('Traceback', done.stderr)
    [line] = [line for line in done.stderr.splitlines() if out in line]
    self.assertIn('is a file' if is_file else 'cannot be read', line)

  def _run(self, *arguments):
    root = pathlib.Path(__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, '-m', 'experiments.xu20_fig1', *arguments], cwd=root,
        capture_output=True, text=True, check=False, timeout=240)


if __name__ == '__main__':
  absltest.main()
