"""Result files survive kills and full disks, and say how they were made."""

import csv
import json
import math
import os
import pathlib
import sys
from unittest import mock

from absl.testing import parameterized
import numpy as np

from experiments import records


class RecordsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / 'out' / 'rows.jsonl'

  def test_the_first_line_is_the_provenance_and_rows_follow(self):
    with records.Records(self.path, {'scale': 2.}) as out:
      out.append({'epsilon': 1, 'stay': np.float32(0.5)})
      lines = self.path.read_text().splitlines()  # on disk before close
      out.append({'epsilon': 2, 'stay': math.inf})
    self.assertEqual(set(json.loads(lines[0])), {'provenance'})
    self.assertEqual(json.loads(lines[1]), {'epsilon': 1, 'stay': 0.5})
    self.assertIn('Infinity', self.path.read_text().splitlines()[2])
    provenance, rows = records.read(self.path)
    self.assertEqual(provenance['config'], {'scale': 2.})
    self.assertEqual(rows[1]['stay'], math.inf)
    for name in ('git_commit', 'versions', 'device_kind', 'cpu', 'num_cores',
                 'time', 'argv'):
      self.assertIn(name, provenance)
    self.assertEqual(set(provenance['versions']),
                     {'python', 'jax', 'jaxlib', 'numpy'})

  def test_each_row_is_synced_as_it_is_made(self):
    with records.Records(self.path, {}) as out:
      with mock.patch.object(os, 'fsync', wraps=os.fsync) as fsync:
        out.append({'x': 1})
        out.append({'x': 2})
    self.assertEqual(fsync.call_count, 2)

  def test_a_second_run_skips_what_is_done_at_any_torn_byte(self):
    with records.Records(self.path, {'a': (1, 2)}) as out:
      for x in range(3):
        out.append({'mechanism': 'tem', 'x': x, 'list': [x]})
    whole = self.path.read_bytes()
    last = whole.rstrip(b'\n').rfind(b'\n') + 1
    for size in range(last, len(whole) + 1):
      self.path.write_bytes(whole[:size])
      kept = 3 if size == len(whole) else 2
      self.assertLen(records.read(self.path)[1], kept)
      with records.Records(self.path, {'a': [1, 2]}) as out:
        self.assertEqual(out.done('mechanism', 'x'),
                         {('tem', x) for x in range(kept)})
        self.assertIn(((0,),), out.done('list'))
        for x in range(kept, 3):
          out.append({'mechanism': 'tem', 'x': x, 'list': [x]})
      self.assertEqual(self.path.read_bytes(), whole)

  def test_another_config_is_refused_by_the_keys_that_differ(self):
    with records.Records(self.path, {'same': 1, 'scale': 2., 'old': 0}) as out:
      out.append({'x': 1})
    before = self.path.read_bytes()
    with self.assertRaises(ValueError) as caught:
      records.Records(self.path, {'same': 1, 'scale': 3., 'new': 0})
    message = str(caught.exception)
    for part in ("scale (2.0 there, 3.0 now)", 'old', 'new', '--out', 'delete'):
      self.assertIn(part, message)
    self.assertNotIn('same', message)
    self.assertEqual(self.path.read_bytes(), before)

  def test_a_run_by_other_versions_is_noted_with_its_first_row(self):
    with records.Records(self.path, {}) as out:
      out.append({'x': 1})
    with mock.patch.object(records, '_cpu_model', return_value='another'):
      records.Records(self.path, {}).close()
    with records.Records(self.path, {}) as out:
      out.append({'x': 2})
    provenance, rows = records.read(self.path)
    self.assertEqual([r['x'] for r in rows], [1, 2])
    [resumed] = provenance['resumed']
    self.assertEqual((resumed['cpu'], resumed['first_row']), ('another', 1))

  @parameterized.parameters(
      (b'{"provenance": {}}\nbroken\n{"x": 1}\n', 'line 2'),
      (b'{"x": 1}\n', 'provenance'), (b'not mine', 'provenance'))
  def test_a_file_that_is_no_result_is_refused_and_kept(self, content, part):
    self.path.parent.mkdir()
    self.path.write_bytes(content)
    with self.assertRaisesRegex(ValueError, part):
      records.Records(self.path, {})
    self.assertEqual(self.path.read_bytes(), content)

  def test_nan_is_refused_by_its_name_and_leaves_no_line(self):
    with records.Records(self.path, {}) as out:
      with self.assertRaisesRegex(ValueError, r'row\.a\[1\]\.loss=nan'):
        out.append({'a': [1, {'loss': np.float32('nan')}]})
      with self.assertRaisesRegex(ValueError, 'provenance'):
        out.append({'provenance': 1})
      with self.assertRaisesRegex(TypeError, 'row.x'):
        out.append({'x': object()})
    self.assertEmpty(records.read(self.path)[1])

  def test_paths_outside_out_are_not_recorded(self):
    out = self.folder / 'out'
    argv = ['/home/x/experiments/a.py', f'--out={out}', '--data_dir=/home/x/d',
            '/etc/passwd', f'{out}/p.png', '--scale=8/255', '--quick',
            '--rel=../secret', '~/notes']
    with mock.patch.object(sys, 'argv', argv):
      found = records.provenance({}, out)['argv']
    self.assertEqual(found, [
        'a.py', '--out=<out>', '--data_dir=<path>', '<path>', '<out>/p.png',
        '--scale=8/255', '--quick', '--rel=<path>', '<path>'])

  def test_without_git_the_commit_is_unknown(self):
    with mock.patch.object(records.subprocess, 'run', side_effect=OSError):
      self.assertEqual(records.provenance({})['git_commit'], 'unknown')

  def test_csv_has_every_column_and_is_derived_in_one_step(self):
    path = self.folder / 'rows.csv'
    records.to_csv([{'a': 1, 'b': 'x,"y"\n'}, {'c': [1, 2], 'a': math.inf}],
                   path)
    with open(path, newline='') as file:
      rows = list(csv.DictReader(file))
    self.assertEqual(rows, [{'a': '1', 'b': 'x,"y"\n', 'c': ''},
                            {'a': 'inf', 'b': '', 'c': '[1, 2]'}])
    self.assertEqual(os.listdir(self.folder), ['rows.csv'])


class AtomicTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  @parameterized.parameters(0o600, 0o644)
  def test_the_mode_holds_from_the_start(self, mode):
    path, seen = self.folder / 'file', []
    def fsync(handle):
      seen.append(os.fstat(handle).st_mode & 0o777)
    old = os.umask(0o022)
    try:
      with mock.patch.object(os, 'fsync', fsync):
        records.write_atomic(path, 'text\u00e9', mode)
    finally:
      os.umask(old)
    self.assertEqual(seen[0], mode)
    self.assertEqual(path.stat().st_mode & 0o777, mode)
    self.assertEqual(path.read_text(encoding='utf-8'), 'text\u00e9')

  @parameterized.parameters('fsync', 'replace')
  def test_a_full_disk_leaves_the_old_file_and_nothing_else(self, name):
    path = self.folder / 'file'
    records.write_atomic(path, b'old')
    with mock.patch.object(os, name, side_effect=OSError(28, 'no space')):
      with self.assertRaises(OSError):
        records.write_atomic(path, b'new')
    self.assertEqual(path.read_bytes(), b'old')
    self.assertEqual(os.listdir(self.folder), ['file'])

  def test_what_a_killed_writer_left_is_replaced_and_not_followed(self):
    target = self.folder / 'target'
    target.write_bytes(b'keep')
    (self.folder / 'file.tmp').symlink_to(target)
    records.write_atomic(self.folder / 'file', b'new')
    self.assertEqual(target.read_bytes(), b'keep')
    self.assertCountEqual(os.listdir(self.folder), ['file', 'target'])


class ProgressTest(parameterized.TestCase):

  def _progress(self, total, **kwargs):
    self.now = 0.
    return records.Progress(total, clock=lambda: self.now, **kwargs)

  def test_the_line_counts_and_tells_the_time_left(self):
    progress = self._progress(120)
    self.now = 116.
    with mock.patch.object(records.logging, 'info') as info:
      progress.update(37, 'scale=0.5')
    self.assertEqual(info.call_args.args[1], '37/120 scale=0.5 eta=04:20')

  def test_steps_of_an_earlier_run_do_not_count_for_the_speed(self):
    progress = self._progress(100, initial=90)
    self.now = 600.
    progress.update(1)
    self.assertEqual(progress.line(), '91/100 eta=1:30:00')

  def test_nothing_done_has_no_time_left(self):
    self.assertEqual(self._progress(3).line('x'), '0/3 x eta=??:??')

  def test_it_logs_every_ten_seconds_at_most_and_always_at_the_end(self):
    with self._progress(100) as progress:
      with mock.patch.object(records.logging, 'info') as info:
        for _ in range(100):
          self.now += 1.
          progress.update(1)
    lines = [call.args[1].split()[0] for call in info.call_args_list]
    self.assertEqual(lines, [f'{n}/100' for n in (*range(1, 100, 10), 100)])

  def test_bytes_are_shown_in_megabytes(self):
    progress = self._progress(2_500_000, unit='B')
    progress.update(1_000_000)
    self.assertStartsWith(progress.line(), '1.0MB/2.5MB')

  def test_on_a_terminal_there_is_a_bar_and_no_log(self):
    with mock.patch.object(sys.stderr, 'isatty', return_value=True):
      with mock.patch.object(records.tqdm, 'tqdm') as bar:
        with mock.patch.object(records.logging, 'info') as info:
          with records.Progress(3, initial=1) as progress:
            progress.update(2, 'x=1')
    bar.return_value.update.assert_called_once_with(2)
    bar.return_value.close.assert_called_once_with()
    info.assert_not_called()
