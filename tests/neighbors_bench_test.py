"""The benchmark of neighbours, its oracle, its table: answers come first."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from benchmarks import exactness
from benchmarks import harness
from benchmarks import neighbors_bench
from benchmarks import summary

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_CASE = neighbors_bench.Case(V=500, D=16, B=64)  # one shape: compiled once
_FIELDS = (
    'name', 'impl', 'V', 'D', 'B', 'k', 'dtype', 'device_kind', 'platform',
    'n_devices', 'versions', 'xla_flags', 'git', 'compile_s', 'first_run_s',
    'median_wall_s', 'p10_wall_s', 'p90_wall_s', 'median_cpu_s', 'p10_cpu_s',
    'p90_cpu_s', 'words_per_s', 'flops', 'temp_bytes', 'peak_bytes',
    'roof_before', 'roof_after', 'frac_compute', 'frac_bandwidth', 'bytes_min',
    'agreement_with_float64', 'load_avg', 'skipped', 'bound')
_OURS_ALONE = ('precision', 'tiling', 'certified_share', 'ratio_to_naive',
               'ratio_to_numpy')


def _problem(kind='gaussian'):
  return exactness.problem(kind, _CASE.V, _CASE.D, _CASE.B, num_batches=2)


def _exact(queries, table):
  """Nearest rows by integers over the whole table: slow and plain."""
  everything = np.arange(len(table))
  return [exactness.exact_nearest(q, table, everything) for q in queries]


def _slept(seconds):
  return lambda: time.sleep(seconds) or harness.Seconds(seconds, seconds)


def peer_of_test(size):
  """What another interpreter runs."""
  values = list(range(size))
  return lambda power: sum(v**power for v in values)


def peer_that_fails():
  """Ends while it is set up."""
  raise SystemExit(3)


class HarnessTest(parameterized.TestCase):

  def test_a_ratio_is_of_times_with_the_roof_divided_out(self):
    slow = [harness.Seconds(4., 4.), harness.Seconds(8., 8.)]
    fast = [harness.Seconds(1., 1.), harness.Seconds(1., 1.)]
    # In the second round the machine was half as fast for the slow one.
    roofs = [[harness.Seconds(r, r) for r in rates]
             for rates in ((1e9, 5e8), (1e9, 1e9))]
    slow, fast = (harness.Measured(c[0], c, r)
                  for c, r in zip((slow, fast), roofs))
    self.assertEqual(harness.ratio(fast, slow), 4.)
    row = harness.fields(fast, flops=5e8, units=10, bytes_min=100,
                         bandwidth=1000.)
    self.assertEqual(
        (row['frac_compute'], row['words_per_s'], row['frac_bandwidth']),
        (.5, 10., .1))

  def test_contestants_take_turns_and_rotate(self):
    calls = []
    fun = lambda name: lambda: calls.append(name)
    measured = harness.interleave({n: fun(n) for n in 'abc'}, rounds=2)
    self.assertEqual(''.join(calls), 'abc' 'abc' 'bca')
    self.assertLen(measured['a'].roofs, 2)
    self.assertGreater(measured['a'].roofs[0].cpu, 1e8)  # FLOP/s

  def test_a_roof_is_the_median_without_its_first_product(self):
    # The first one after a JAX call is slow; one of the others may be, too.
    times = iter([8., 1., 4., 1.])
    run = lambda: harness.Seconds(*[next(times)] * 2)
    with mock.patch.object(harness, '_product', lambda dtype: (run, 6e9)):
      self.assertEqual(harness.roof(), harness.Seconds(6e9, 6e9))
    self.assertEmpty(list(times))

  def test_a_function_that_times_itself_is_believed(self):
    measured = harness.interleave({'peer': lambda: harness.Seconds(7., 5.)}, 1)
    self.assertEqual(measured['peer'].calls, [harness.Seconds(7., 5.)])

  def test_batches_rotate(self):
    fun = harness.rotating(lambda batch: batch, 'abc')
    self.assertEqual([fun() for _ in range(4)], list('abca'))

  def test_compilation_and_temporary_memory_are_apart(self):
    program = harness.compile_ahead(
        lambda a: jax.numpy.sort(a @ a.T, axis=0).sum(), np.ones((256, 4)))
    self.assertGreaterEqual(program.temp_bytes, 4 * 256 * 256)
    self.assertGreater(program.seconds.wall, 0)
    self.assertEqual(float(program.call(np.ones((256, 4), 'f'))), 4 * 256**2)

  def test_peak_memory_is_what_a_call_adds(self):
    peak = harness.peak_bytes(lambda: np.ones(2**24, np.int8).sum())
    if peak is None:
      self.skipTest('this system does not tell')
    self.assertBetween(peak, 2**23, 2**26)

  def test_another_interpreter_answers_and_times_itself(self):
    with harness.Peer(sys.executable, peer_of_test, size=4) as peer:
      answer, seconds = peer.ask(power=2)
      self.assertEqual(answer, 14)
      self.assertBetween(seconds.wall, 0, 1)
      measured = harness.interleave({'peer': lambda: peer.seconds(power=3)}, 2)
    self.assertLen(measured['peer'].calls, 2)

  def test_a_peer_that_ends_is_an_error(self):
    with self.assertRaisesRegex(RuntimeError, 'ended with status 3'):
      harness.Peer(sys.executable, peer_that_fails)

  def test_a_stopped_run_leaves_whole_rows_and_the_old_file(self):
    out = os.path.join(self.create_tempdir().full_path, 'rows.jsonl')
    harness.emit([{'a': 1}], out)

    def rows():
      yield {'a': 2}
      raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      harness.emit(rows(), out)
    self.assertEqual(pathlib.Path(out).read_text(), '{"a": 1}\n')
    self.assertEqual(pathlib.Path(f'{out}.part').read_text(), '{"a": 2}\n')

  def test_google_benchmark_is_optional_and_says_so(self):
    with mock.patch.dict(sys.modules, {'google_benchmark': None}):
      with self.assertRaisesRegex(ValueError, 'pip install'):
        harness.google_benchmark({})


class NeighborsBenchTest(parameterized.TestCase):

  def test_rows_have_the_fields_and_print_a_table(self):
    impls = ['float32', 'auto', 'naive', 'numpy', 'faiss']
    rows = list(neighbors_bench.run_case(_CASE, impls, repeats=2))
    self.assertEqual([r['impl'] for r in rows], impls[:4])  # faiss: B < 2048
    json.dumps(rows)
    for row in rows:
      missing = set(_FIELDS) - set(row)
      self.assertLessEqual(missing, {'compile_s', 'temp_bytes'} if row[
          'impl'] == 'numpy' else set())
      self.assertIn('faiss', row['skipped'])
      self.assertEqual(row['agreement_with_float64'], 1.)
      self.assertEqual(row['flops'], 2 * 500 * 16 * 64)
    for row in rows[:2]:
      self.assertEmpty(set(_OURS_ALONE) - set(row))
    self.assertEqual(rows[0]['name'], 'nearest/V=500,D=16,B=64,float32')
    self.assertEqual(rows[1]['dtype'], 'float32')  # a small table's choice
    text = summary.table(rows).split('\n')
    self.assertLen([t for t in text if t.startswith('| neighbors')], 2)
    self.assertIn(f'{rows[0]["ratio_to_numpy"]:.2f}', text[2])
    self.assertRegex(text[-2], '^Machine: .*jax')
    self.assertIn('Left out: faiss: B < 2048', text[-1])

  def test_a_wrong_contestant_is_refused(self):
    check = exactness.Check(*_problem())
    right = [np.array(_exact(q, _problem()[0])) for q in _problem()[1]]
    self.assertEqual(check.agreement('x', lambda i: right[i], True), 1.)
    wrong = [r.copy() for r in right]
    wrong[1][7] = (wrong[1][7] + 1) % _CASE.V
    for exact in (True, False):
      with self.assertRaisesRegex(ValueError, 'x: batch 1, query 7'):
        check.agreement('x', lambda i: wrong[i], exact)

  def test_a_case_with_a_wrong_contestant_is_not_timed(self):
    wrong = lambda i: np.full(_CASE.B, 3)
    who = neighbors_bench.Contestant(wrong, wrong, {'role': 'baseline'})
    with mock.patch.object(neighbors_bench, 'in_numpy', lambda *_: who):
      with self.assertRaisesRegex(ValueError, 'D=16,B=64,numpy: batch 0'):
        list(neighbors_bench.run_case(_CASE, ['numpy'], repeats=1))

  def test_ours_must_be_the_nearest_where_others_may_round(self):
    table, batches = _problem()
    twin = np.concatenate([table, table])
    twin[500:] += np.spacing(twin[500:]) * np.float32(.6)  # the next floats
    twin[500:, 1:] = table[:, 1:]
    check = exactness.Check(twin, batches)
    near = [np.array(_exact(q, twin)) for q in batches]
    other = [(n + 500) % 1000 for n in near]  # almost the same row
    self.assertEqual(check.agreement('float32', lambda i: other[i], False), 0.)
    with self.assertRaisesRegex(ValueError, 'expected'):
      check.agreement('ours', lambda i: other[i], True)

  def test_a_time_in_the_row_is_that_of_the_contestant(self):
    who = neighbors_bench.Contestant(None, lambda i: _slept(.02)(), {})
    who = {'float32': who, 'naive': who._replace(
        timed=lambda i: _slept(.06)())}
    measured = harness.interleave(neighbors_bench.turns(who), 3)
    row = neighbors_bench.row_of(_CASE, 'float32', measured, 1e9)
    self.assertEqual(row['median_cpu_s'], .02)
    # The roofs beside the two may differ on a busy machine.
    self.assertBetween(row['ratio_to_naive'], 1., 9.)

  def test_the_fit_is_flat_only_for_linear_time(self):
    row = {'impl': 'float32', 'roof_flops_per_s': 1e11, 'frac_compute': .5,
           'name': 'a'}
    even = neighbors_bench.fit([row, row])
    self.assertAlmostEqual(even['max_deviation'], 0.)
    self.assertAlmostEqual(even['seconds_per_word_row_dim'], 4e-11)
    bent = neighbors_bench.fit([row, row, row | {'frac_compute': .05,
                                                 'name': 'b'}])
    self.assertGreater(bent['max_deviation'], 1.)
    self.assertEqual(bent['worst'], 'b')

  def test_sizes_may_be_in_thousands(self):
    self.assertEqual(neighbors_bench.sizes(['50k', '1.5k', '7']),
                     [50_000, 1_500, 7])

  def test_a_matrix_that_does_not_fit_is_left_out_with_the_reason(self):
    case = neighbors_bench.Case(V=10**6, D=300, B=10**6)
    self.assertRegex(neighbors_bench.unfit(case, 'numpy'), '3725 GiB')
    self.assertIsNone(neighbors_bench.unfit(case, 'faiss'))

  @pytest.mark.slow
  def test_every_contestant_and_the_binary_run(self):
    out = os.path.join(self.create_tempdir().full_path, 'rows.jsonl')
    for more in ([], ['--k=5'], ['--linear', '--precision=certified']):
      done = subprocess.run(
          [sys.executable, '-m', 'benchmarks.neighbors_bench', '--quick',
           f'--out={out}', *more], cwd=_ROOT, capture_output=True, text=True,
          check=False)
      self.assertEqual(done.returncode, 0, done.stderr)
      impls = [row['impl'] for row in summary.rows_of([out])]
      self.assertContainsSubset(
          ['certified'] * 2 if '--linear' in more else ['float32', 'numpy'],
          impls)

  @pytest.mark.slow
  def test_two_devices_split_the_queries(self):
    rows = list(neighbors_bench.run_case(
        _CASE._replace(devices=2), ['float32', 'naive'], repeats=1))
    self.assertEqual((rows[0]['clock'], rows[0]['n_devices']), ('wall', 2))


class ExactnessTest(parameterized.TestCase):

  @parameterized.parameters(*exactness.KINDS)
  def test_the_oracle_is_the_arg_min_of_exact_integers(self, kind):
    table, batches = _problem(kind)
    table[-3:] = table[:3]  # ties, to be decided by the lowest index
    queries = np.concatenate([batches[0][:24], table[-3:]])
    oracle = exactness.Oracle(table)
    self.assertEqual(oracle.nearest(queries).tolist(), _exact(queries, table))
    self.assertGreaterEqual(oracle.close, 3)

  def test_the_product_excludes_most_rows_and_never_the_nearest(self):
    table, batches = _problem()
    query, row = exactness.Oracle(table)._candidates(batches[0])
    self.assertLess(len(row), 2 * len(batches[0]))
    self.assertContainsSubset(enumerate(_exact(batches[0], table)),
                              list(zip(query.tolist(), row.tolist())))

  def test_about_half_the_words_move(self):
    table = exactness.table_of('gaussian', 5000, 50, np.random.default_rng(0))
    rng, same = np.random.default_rng(1), np.random.default_rng(1)
    queries = exactness.queries_of('gaussian', table, 500, rng)
    words = same.integers(5000, size=500)
    moved = np.mean(exactness.Oracle(table).nearest(queries) != words)
    self.assertBetween(moved, .2, .8)

  def test_a_planted_mismatch_is_counted_and_is_an_exit_status(self):
    def wrong(queries, table):
      del table
      ids = exactness.Oracle(planted).nearest(np.asarray(queries))
      return np.where(np.arange(len(ids)) == 5, ids + 1, ids), None

    rng = np.random.default_rng((0, 0))
    planted = exactness.table_of('gaussian', 500, 16, rng)
    count = lambda **more: exactness.count(
        'gaussian', 500, 16, 128, precisions=('float32',), batch=64, **more)
    self.assertEqual(count()['mismatches'], {'float32': 0})
    row = count(nearest=wrong)
    self.assertEqual(row['mismatches'], {'float32': 2})
    self.assertEqual(row['examples'][1]['batch'], 1)
    for found, status in ((row, 1), (count(), 0)):
      self.assertEqual(self._status(found), status)

  def _status(self, row):
    """Exit status of the binary where the count was ``row``."""
    values = mock.Mock(kind='gaussian', V=500, D=16, num_queries=128, batch=64,
                       precision='float32', seed=0, out=None)
    with (mock.patch.object(exactness, 'count', return_value=row),
          mock.patch.object(exactness.flags, 'FLAGS', values),
          contextlib.redirect_stdout(io.StringIO()) as out,
          self.assertRaises(SystemExit) as end):
      exactness.main(['exactness'])
    self.assertEqual(json.loads(out.getvalue()), row)
    return end.exception.code

  @pytest.mark.slow
  def test_the_check_of_a_new_host_runs_here(self):
    out = self.create_tempdir().full_path
    done = subprocess.run(
        ['bash', 'benchmarks/gpu_check.sh'], cwd=_ROOT, capture_output=True,
        text=True, check=False, env=os.environ | {
            'V': '500', 'D': '16', 'B': '64', 'NUM_QUERIES': '64',
            'KINDS': 'gaussian ulp', 'HARD': '32', 'REPEATS': '1', 'OUT': out,
            'PYTHON': sys.executable})
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('| neighbors | nearest/V=500', done.stdout)
    for name in ('exactness_gaussian.jsonl', 'exactness_ulp.jsonl',
                 'neighbors.jsonl', 'summary.md'):
      self.assertTrue(os.path.getsize(os.path.join(out, name)), name)


class SummaryTest(parameterized.TestCase):

  def test_rows_of_other_benchmarks_and_peers_have_their_columns(self):
    rows = [
        {'benchmark': 'audit', 'mechanism': 'laplace', 'n': 8,
         'cpu_seconds_per_million': .25, 'ratio_to_numpy': 4.},
        {'benchmark': 'samplers', 'name': 'poisson', 'samples_per_s': 3e6,
         'ratio_to_naive': 2., 'ratio_to_scipy': 10., 'machine': {
             'device_kind': 'cpu', 'cpu': 'X', 'num_cores': 1}},
        {'benchmark': 'neighbors', 'name': 'n', 'role': 'baseline'},
    ]
    lines = summary.table(rows).split('\n')
    self.assertEqual(
        lines[2], '| audit | mechanism=laplace,n=8 | 0.25 s |  | 4.00 |  |  |')
    self.assertEqual(
        lines[3],
        '| samplers | poisson | 3.00M samples/s | 2.00 |  | 10.00 scipy |  |')
    self.assertLen([t for t in lines if t.startswith('|')], 4)

  def test_a_device_s_bandwidth_and_bfloat16_share_are_shown(self):
    row = {'benchmark': 'neighbors', 'name': 'n', 'words_per_s': 1.,
           'frac_compute': 1.5, 'dtype': 'bfloat16', 'clock': 'wall',
           'flops': 1e12, 'median_wall_s': 2., 'frac_bandwidth_scores': .4,
           'roof_bfloat16': {'wall': 1e12, 'cpu': 1.}}
    line = summary.table([row]).split('\n')[2]
    self.assertEndsWith(line, '| 150% (50%) | 40% |')

  def test_no_rows_are_an_error(self):
    with self.assertRaisesRegex(ValueError, 'no row of ours'):
      summary.table([])
