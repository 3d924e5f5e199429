"""A privatised file in the making: what survives a kill, and how it ends. Host.

While a text is privatised, its output grows in ``OUTPUT.partial``. Beside it
stand ``OUTPUT.resume`` (mode 0600: settings, the state reached and the KEY),
``OUTPUT.resume.npz`` (the calibrated mechanism; public) and, for the binary,
``OUTPUT.resume.xla`` (compiled programs; public). Every file but the partial
one is replaced whole, and a state is recorded only after the text it speaks of
is on the disk, so a run that is killed anywhere goes on.

At the end the card is written, then the partial file takes the name OUTPUT,
then the key is deleted: OUTPUT never stands without its card, and a kill
between two of these steps leaves a record from which they are done again.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import stat
import time
from typing import NamedTuple
import zipfile

import jax
import numpy as np

import jaxdp
from experiments import records
from jaxdp import guarantees

_BATCHES_UNSAVED = 64
_EDGE = 2**20  # bytes at both ends of the input that identify it


class Files(NamedTuple):
  """The names that belong to one output."""
  output: str
  partial: str
  resume: str
  params: str
  programs: str
  card: str
  card_text: str

  @classmethod
  def of(cls, output):
    return cls(*(f'{output}{end}' for end in (
        '', '.partial', '.resume', '.resume.npz', '.resume.xla',
        '.guarantee.json', '.guarantee.txt')))


class State(NamedTuple):
  """How far a run has come; always at the end of a batch."""
  input_offset: int = 0  # bytes read
  output_bytes: int = 0
  num_words: int = 0
  glue: bool = False  # whether the output ends in a word character


def check_paths(source, table, files):
  """Refuses paths that cannot be read or written, or that are one file.

  Args:
    source: path of the text.
    table: path of the table, or a name that is no path.
    files: the Files.

  Raises:
    ValueError: names the path and says what to do.
  """
  try:
    is_file = stat.S_ISREG(os.stat(source).st_mode)
    if is_file:
      open(source, 'rb').close()
  except OSError as e:
    raise ValueError(f'input={source!r} cannot be read: {e.strerror}') from None
  if not is_file:
    raise ValueError(f'input={source!r} is not a regular file; it is read '
                     'twice, so save it to one')
  parent = os.path.dirname(os.path.abspath(files.output))
  if not os.path.isdir(parent):
    raise ValueError(f'output={files.output!r}: there is no directory '
                     f'{parent}; make it first')
  if os.path.isdir(files.output) or not os.path.basename(files.output):
    raise ValueError(f'output={files.output!r} is a directory; name a file')
  _check_writable(files, parent)
  for name, read in (('input', source), ('table', table)):
    for path in files:
      if os.path.exists(read) and os.path.exists(path) and os.path.samefile(
          read, path):
        raise ValueError(f'output={files.output!r} would overwrite the {name}: '
                         f'{path} is the same file; choose another output')


def _check_writable(files, parent):
  """Refuses a directory or a name that would fail only once words are drawn."""
  if not os.access(parent, os.W_OK | os.X_OK):
    raise ValueError(f'output={files.output!r}: the directory {parent} cannot '
                     'be written to; choose another')
  try:
    # Each is first written under a name with this end.
    os.lstat(max(files, key=len) + '.tmp')
  except FileNotFoundError:
    pass
  except OSError as e:
    raise ValueError(f'output={files.output!r} cannot be written, for the '
                     f'names beside it are longer: {e.strerror}; choose a '
                     'shorter one') from None


def check_path(name, value):
  """Refuses what is no path; the message names the field.

  Args:
    name: of the field.
    value: str or path-like.

  Raises:
    ValueError: another type, a NUL, or characters no file name can hold.
  """
  try:
    path = os.fspath(value)
    encoded = os.fsencode(path)
  except (TypeError, ValueError):
    path, encoded = None, b''
  if not isinstance(path, str) or b'\0' in encoded:
    raise ValueError(f'{name}={value!r} must be a path: a string without NUL '
                     'or lone surrogates')


def input_identity(file):
  """Returns what tells one input from another: size, time, both ends."""
  status = os.fstat(file.fileno())
  file.seek(0)
  edges = file.read(_EDGE)
  file.seek(max(0, status.st_size - _EDGE))
  edges += file.read(_EDGE)
  return {'size': status.st_size, 'mtime_ns': status.st_mtime_ns,
          'sha256_of_ends': hashlib.sha256(edges).hexdigest()}


def key_to_json(key):
  """Returns a typed key as JSON; secret."""
  return {'impl': str(jax.random.key_impl(key)),
          'data': np.asarray(jax.random.key_data(key)).tolist()}


def key_from_json(fields):
  """Returns the typed key that :func:`key_to_json` wrote."""
  return jax.random.wrap_key_data(np.array(fields['data'], np.uint32),
                                  impl=fields['impl'])


def save_params(path, params):
  """Writes calibrated params: arrays as ``.npz``, the guarantee as JSON."""
  arrays = {name: np.asarray(value) for name, value in params._asdict().items()
            if name != 'guarantee'}
  kind = type(params)
  header = json.dumps({'module': kind.__module__, 'name': kind.__qualname__,
                       'guarantee': params.guarantee.to_dict()})
  with records.atomic_file(path) as file:
    np.savez(file, _header=np.array(header), **arrays)


def load_params(path):
  """Returns the params that :func:`save_params` wrote.

  Raises:
    ValueError: the file is damaged or not one of ours.
  """
  try:
    with np.load(path, allow_pickle=False) as archive:
      arrays = dict(archive)
    header = json.loads(str(arrays.pop('_header')))
  except (zipfile.BadZipFile, KeyError, EOFError, ValueError):
    raise ValueError(f'{path} is damaged; delete it, and the next '
                     'run calibrates again') from None
  if not header['module'].startswith('jaxdp.mechanisms.'):
    raise ValueError(f'{path} names {header["module"]}, no word mechanism')
  kind = getattr(importlib.import_module(header['module']), header['name'])
  return kind(**arrays,
              guarantee=guarantees.Guarantee.from_dict(header['guarantee']))


def load_record(files, identity):
  """Returns the record of an unfinished run of the same command, or None.

  Args:
    files: the Files.
    identity: dict of what must be the same: settings, input, table.

  Raises:
    ValueError: the record is of another run; names what differs and how to
      start over.
  """
  start_over = (f'to start over, delete {files.resume} and {files.partial}; '
                'the words written so far are lost')
  try:
    with open(files.resume, encoding='utf-8') as file:
      record = json.load(file)
    old = {'version': record['version']} | record['identity']
  except FileNotFoundError:
    return None
  except (ValueError, KeyError, TypeError):
    raise ValueError(f'{files.resume} is damaged; {start_over}') from None
  new = {'version': jaxdp.__version__} | records.plain(identity)
  names = [name for name in sorted({*old, *new})
           if old.get(name) != new.get(name)]
  if names:
    shown = ', '.join(f'{name} (was {old.get(name)!r}, is {new.get(name)!r})'
                      for name in names)
    raise ValueError(f'{files.resume} belongs to another run: {shown}; '
                     f'{start_over}')
  return record


class Job:
  """The partial file and its record, opened for one run.

  Attributes:
    record: JSON-safe dict, written with every save; holds the key.
    state: the State reached by the text appended so far.
  """

  def __init__(self, files, record, *, resumed):
    """Opens the partial file and cuts it back to the recorded state.

    Raises:
      ValueError: another process writes it, or it is shorter than recorded.
    """
    self._files, self.record = files, record
    self._saved, self._unsaved = time.monotonic(), 0
    self.state = State(**record['state'])
    flags = os.O_RDWR | os.O_NOFOLLOW | (0 if resumed else os.O_CREAT)
    try:
      self._handle = os.open(files.partial, flags, 0o666)
    except FileNotFoundError:
      raise ValueError(f'{files.partial} is missing but {files.resume} is not; '
                       'delete that too to start over') from None
    try:
      self._cut_back()
    except BaseException:
      self.close()
      raise

  def _cut_back(self):
    try:
      fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f'{self._files.partial} is being written by another '
                       'run; wait for it or choose another output') from None
    size = os.fstat(self._handle).st_size
    if size < self.state.output_bytes:
      raise ValueError(
          f'{self._files.partial} has {size} bytes, fewer than the '
          f'{self.state.output_bytes} recorded; delete it and '
          f'{self._files.resume} to start over')
    os.ftruncate(self._handle, self.state.output_bytes)
    os.lseek(self._handle, 0, os.SEEK_END)

  def append(self, text, state):
    """Writes text, then takes `state` (its output_bytes apart) as reached."""
    data = memoryview(text.encode('utf-8'))
    size = len(data)
    while data:
      written = os.write(self._handle, data)
      if not written:
        raise OSError(errno.ENOSPC, 'no byte was written', self._files.partial)
      data = data[written:]
    self.state = state._replace(output_bytes=self.state.output_bytes + size)
    self._unsaved += 1

  def save(self):
    """Puts text and record on the disk, in this order."""
    os.fsync(self._handle)
    self.record['state'] = self.state._asdict()
    records.write_atomic(self._files.resume, json.dumps(self.record), 0o600)
    self._saved, self._unsaved = time.monotonic(), 0

  def save_if_due(self, seconds):
    """Saves when the last time is `seconds` ago, or many batches."""
    if (self._unsaved >= _BATCHES_UNSAVED
        or time.monotonic() - self._saved >= seconds):
      self.save()

  def close(self):
    os.close(self._handle)

  def __enter__(self):
    return self

  def __exit__(self, *unused_error):
    self.close()

  def discard(self):
    """Deletes the partial file, the record and with it the key."""
    delete_records(self._files)
    _unlink(self._files.partial)


def new_record(identity, key, **fields):
  """Returns the record of a run that begins."""
  return {'version': jaxdp.__version__, 'identity': records.plain(identity),
          'key': key_to_json(key), 'state': State()._asdict(),
          'finished': False, **fields}


def finish(files, record):
  """Puts the card and the output in place and deletes the key.

  May be called again after a kill at any of its steps.

  Args:
    files: the Files.
    record: a saved record that is `finished` and holds the ``card``.

  Raises:
    ValueError: neither the partial nor the whole output is there.
  """
  size = record['state']['output_bytes']
  if os.path.exists(files.partial):
    _unlink(files.output)  # it would stand beside the card of its successor
    card = record['card']
    records.write_atomic(files.card, guarantees.card_json(card) + '\n')
    records.write_atomic(files.card_text, guarantees.card_text(card))
    os.replace(files.partial, files.output)
    records.sync_directory(files.output)
  elif not (os.path.exists(files.output)
            and os.path.getsize(files.output) == size):
    raise ValueError(f'{files.partial} and {files.output} of {size} bytes are '
                     f'both missing; delete {files.resume} to start over')
  delete_records(files)


def delete_records(files):
  """Deletes all but output and card.

  The record goes last: it is what makes a second call possible.
  """
  shutil.rmtree(files.programs, ignore_errors=True)
  for path in (f'{files.params}.tmp', files.params, f'{files.resume}.tmp',
               files.resume):
    _unlink(path)
  records.sync_directory(files.output)


def _unlink(path):
  with contextlib.suppress(FileNotFoundError):
    os.unlink(path)
