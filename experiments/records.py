"""Result files of the experiments: rows, provenance, resume, progress. Host.

A result is ``rows.jsonl``: the first line is the provenance, then one row a
grid point, on the disk as soon as it is made. A run that was killed goes on
where it stopped; a CSV is derived, never a source.

>>> import tempfile
>>> path = tempfile.mkdtemp() + '/rows.jsonl'
>>> with Records(path, {'epsilons': [1., 2.]}) as out:
...   for epsilon in (1., 2.):
...     if (epsilon,) not in out.done('epsilon'):
...       out.append({'epsilon': epsilon, 'stay': epsilon / 4})
>>> provenance, rows = read(path)
>>> rows[1]
{'epsilon': 2.0, 'stay': 0.5}

In the room: :class:`Records`, :func:`read`, :func:`to_csv`, the crash-safe
:func:`write_atomic`, :func:`provenance` and :class:`Progress`.
"""

import contextlib
import csv
import dataclasses
import datetime
import importlib.metadata
import io
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time

from absl import logging
import tqdm

_LOG_SECONDS = 10.


def write_atomic(path, data, mode=0o644):
  """Writes a whole file so that a crash or a full disk leaves no half of it.

  Args:
    path: the file; an old one of that name stays until the new one is whole.
    data: bytes, or str written as UTF-8.
    mode: permission bits, in force from the start, less the umask.

  Raises:
    OSError: the disk is full or the directory cannot be written.
  """
  with atomic_file(path, mode) as file:
    file.write(data.encode('utf-8') if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_file(path, mode=0o644):
  """Yields a binary file that takes the place of `path` once it is whole."""
  path = os.fspath(path)
  temporary = f'{path}.tmp'
  # A name that is known in advance: a killed run leaves nothing that the next
  # one does not overwrite.
  with contextlib.suppress(FileNotFoundError):
    os.unlink(temporary)
  handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
  try:
    with os.fdopen(handle, 'wb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    raise
  sync_directory(path)


def sync_directory(path):
  """Puts the names in the directory of `path` on the disk."""
  handle = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def provenance(config, out_dir='.'):
  """Returns what made a result, JSON-safe.

  Args:
    config: the experiment's Config (a dataclass) or a dict.
    out_dir: the directory of ``--out``; paths inside it are written relative
      to it, all other paths on the command line are not recorded.
  """
  import jax  # the reader of a result file needs no accelerator
  versions = {'python': platform.python_version()}
  for package in ('jax', 'jaxlib', 'numpy'):
    versions[package] = importlib.metadata.version(package)
  now = datetime.datetime.now(datetime.UTC)
  return {
      'config': plain(config),
      'git_commit': _git_commit(),
      'versions': versions,
      'device_kind': jax.devices()[0].device_kind,
      'num_devices': jax.device_count(),
      'cpu': _cpu_model(),
      'num_cores': len(os.sched_getaffinity(0))
                   if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
      'time': now.isoformat(timespec='seconds'),
      'argv': [os.path.basename(sys.argv[0])] + [
          _without_path(arg, out_dir) for arg in sys.argv[1:]],
  }


def _git_commit():
  """The commit of the tree this file lies in, or 'unknown'."""
  root = pathlib.Path(__file__).resolve().parents[1]
  command = ['git', '-C', str(root), 'rev-parse', '--show-toplevel', 'HEAD']
  try:
    lines = subprocess.run(command, capture_output=True, text=True, check=True,
                           timeout=10).stdout.split('\n')
  except (OSError, subprocess.SubprocessError):
    return 'unknown'
  # An installed copy may lie inside the repository of something else.
  return lines[1] if pathlib.Path(lines[0]).resolve() == root else 'unknown'


def _cpu_model():
  with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
    for line in file:
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.processor() or platform.machine()


def _without_path(arg, out_dir):
  """An argument with its path, if it is one, hidden or relative to --out."""
  flag, equals, value = arg.partition('=')
  if not (equals and flag.startswith('-')):
    flag, equals, value = '', '', arg
  is_path = (value.startswith(('/', '~', './', '../'))
             or (os.sep in value and os.path.exists(value)))
  if not is_path:
    return arg
  inside = os.path.relpath(os.path.abspath(value), os.path.abspath(out_dir))
  hidden = inside == '..' or inside.startswith('../')
  return flag + equals + ('<path>' if hidden else os.path.normpath(
      os.path.join('<out>', inside)))


def plain(value, name='value'):
  """Returns `value` as JSON knows it; NaN is refused, infinity is not.

  Args:
    value: numbers, NumPy scalars and arrays, strings, None, mappings, lists,
      tuples and dataclasses, nested.
    name: how an error calls the value.

  Raises:
    ValueError: a NaN; it names the entry.
    TypeError: another type.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  if hasattr(value, 'tolist'):
    value = value.tolist()
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    if math.isnan(value):
      raise ValueError(f'{name}=nan is not a result; stop the run and look for '
                       'the step that made it')
    return value
  if isinstance(value, dict):
    return {str(k): plain(v, f'{name}.{k}') for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v, f'{name}[{i}]') for i, v in enumerate(value)]
  raise TypeError(f'{name} has type {type(value).__name__}; a row holds '
                  'numbers, strings, None, lists and dicts')


def read(path):
  """Returns (provenance, rows) of a result file; a torn last line is dropped.

  Raises:
    ValueError: a broken line that is not the last, or no provenance.
  """
  lines = _read_lines(path)
  if not lines or set(lines[0]) != {'provenance'}:
    raise ValueError(f'{path} does not begin with a provenance line; it is no '
                     'result file, or one that was torn at once')
  return lines[0]['provenance'], lines[1:]


def _read_lines(path):
  """The whole JSON lines of a file. A torn one can only be the last."""
  raw = pathlib.Path(path).read_bytes().split(b'\n')
  lines = []
  for number, line in enumerate(raw[:-1], 1):
    try:
      lines.append(json.loads(line))
    except ValueError:
      if number < len(raw) - 1:
        raise ValueError(f'{path}, line {number} is not JSON; restore the file '
                         'or delete it') from None
  return lines


class Records:
  """Writer of one result file; goes on where an earlier run stopped.

  Attributes:
    rows: list of the rows in the file, those of an earlier run included.
    provenance: the first line; ``resumed`` lists the provenance of later runs
      that differ in more than time.
  """

  def __init__(self, path, config):
    """Opens or creates the file.

    Args:
      path: the file, ``DIR/rows.jsonl`` by custom; its directory is made.
      config: dataclass or dict of all that determines the result.

    Raises:
      ValueError: the file was made by another config, or is broken.
    """
    self._path = os.fspath(path)
    out_dir = os.path.dirname(os.path.abspath(self._path))
    os.makedirs(out_dir, exist_ok=True)
    self.provenance, self.rows = provenance(config, out_dir), []
    if os.path.exists(self._path) and os.path.getsize(self._path):
      mine = self.provenance
      self.provenance, self.rows = read(self._path)
      self._check_config(mine['config'])
      self._note_resumed(mine)
    lines = [{'provenance': self.provenance}, *self.rows]
    write_atomic(self._path, ''.join(map(_line, lines)))
    self._file = open(self._path, 'ab', buffering=0)

  def _check_config(self, config):
    old = self.provenance.get('config', {})
    names = sorted(k for k in {*old, *config}
                   if old.get(k, _ABSENT) != config.get(k, _ABSENT))
    if names:
      shown = ', '.join(f'{k} ({old.get(k, "absent")!r} there, '
                        f'{config.get(k, "absent")!r} now)' for k in names)
      raise ValueError(f'{self._path} was made by another config: {shown}; '
                       'choose another --out or delete the file')

  def _note_resumed(self, mine):
    """Rows made by other versions or devices must not pass unseen."""
    names = ('git_commit', 'versions', 'device_kind', 'num_devices', 'cpu')
    runs = [self.provenance, *self.provenance.get('resumed', [])]
    if all(any(run.get(n) != mine[n] for n in names) for run in runs):
      entry = {k: v for k, v in mine.items() if k != 'config'}
      entry['first_row'] = len(self.rows)
      self.provenance.setdefault('resumed', []).append(entry)

  def done(self, *names):
    """Returns the set of value tuples of the fields `names` over all rows."""
    return {tuple(_hashable(row.get(name)) for name in names)
            for row in self.rows}

  def append(self, row):
    """Writes one row, on the disk when this returns.

    Raises:
      ValueError: a NaN in the row, or a first field called 'provenance'.
      OSError: the disk is full; the file ends in a torn line, which the next
        run drops.
    """
    row = plain(row, 'row')
    if 'provenance' in row:
      raise ValueError("row has a field 'provenance'; the first line is that")
    data = _line(row).encode('utf-8')
    if self._file.write(data) != len(data):
      raise OSError(f'{self._path}: the disk took only a part of a row')
    os.fsync(self._file.fileno())
    self.rows.append(row)

  def close(self):
    self._file.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused_error):
    self.close()


_ABSENT = object()


def _line(value):
  return json.dumps(value, ensure_ascii=False) + '\n'


def _hashable(value):
  if isinstance(value, dict):
    return tuple((k, _hashable(v)) for k, v in value.items())
  return tuple(map(_hashable, value)) if isinstance(value, list) else value


def to_csv(rows, path):
  """Writes rows as CSV; columns in the order in which fields first appear.

  Args:
    rows: list of dicts; lists and dicts inside are written as JSON.
    path: the CSV file, replaced in one step.
  """
  names = list(dict.fromkeys(name for row in rows for name in row))
  text = io.StringIO(newline='')
  writer = csv.DictWriter(text, names, lineterminator='\n')
  writer.writeheader()
  for row in rows:
    writer.writerow({k: json.dumps(v) if isinstance(v, (list, dict)) else v
                     for k, v in plain(row, 'row').items()})
  write_atomic(path, text.getvalue())


class Progress:
  """A bar on a terminal; elsewhere a log line a step, at most every 10 s.

  >>> with Progress(2) as progress:
  ...   progress.update(1, 'scale=0.5')  # logs '1/2 scale=0.5 eta=00:00'
  """

  def __init__(self, total, *, initial=0, unit='', clock=time.monotonic):
    """Starts the clock.

    Args:
      total: number of steps; the log shows the steps done out of it.
      initial: steps done by an earlier run; they do not count for the speed.
      unit: 'B' shows both numbers in MB.
      clock: seconds, rising; a test passes its own.
    """
    self._total, self._done, self._initial = total, initial, initial
    self._unit, self._clock = unit, clock
    self._started = clock()
    self._logged = -math.inf
    self._bar = None
    if sys.stderr.isatty():
      self._bar = tqdm.tqdm(total=total, initial=initial, unit=unit or 'row',
                            unit_scale=bool(unit), dynamic_ncols=True)

  def update(self, steps, text=''):
    """Counts `steps` more; `text` says what was done ('scale=0.5')."""
    self._done += steps
    if self._bar is not None:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(steps)
      return
    now = self._clock()
    if now - self._logged >= _LOG_SECONDS or self._done >= self._total:
      self._logged = now
      logging.info('%s', self.line(text))

  def line(self, text=''):
    """Returns the log line: ``37/120 scale=0.5 eta=04:10``."""
    new = self._done - self._initial
    elapsed = self._clock() - self._started
    left = (self._total - self._done) * elapsed / new if new else math.inf
    counts = f'{self._show(self._done)}/{self._show(self._total)}'
    return ' '.join(filter(None, [counts, text, f'eta={_minutes(left)}']))

  def _show(self, steps):
    return f'{steps / 1e6:.1f}MB' if self._unit == 'B' else str(steps)

  def __enter__(self):
    return self

  def __exit__(self, *unused_error):
    if self._bar is not None:
      self._bar.close()


def _minutes(seconds):
  if not math.isfinite(seconds):
    return '??:??'
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return (f'{hours}:{minutes:02}:{seconds:02}' if hours
          else f'{minutes:02}:{seconds:02}')
