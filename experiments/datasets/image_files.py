"""Readers of the original image formats: IDX, CIFAR-10 batches, JPEG. Host.

Each reader takes one file and returns what it holds, whatever data set it
belongs to; which files make a set, and how many images it must have, is known
to ``images``. A file that is truncated, corrupt or of another kind is refused
with a ValueError that names it, what was found and what was expected.

>>> import io, tempfile
>>> path = tempfile.mkdtemp() + '/labels-idx1-ubyte'
>>> with open(path, 'wb') as stream:
...   _ = stream.write(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
>>> read_idx(path, 1)
array([7, 2, 1], dtype=uint8)
"""

import gzip
import io
import math
import pathlib
import pickle
import zipfile
import zlib

import numpy as np

_CIFAR_SHAPE = (3, 32, 32)


def read_idx(path, num_axes):
  """Reads an IDX file of bytes, plain or gzipped.

  Args:
    path: the file; gzip is told by its first bytes, not by its name.
    num_axes: number of axes expected: 3 for images, 1 for labels.

  Returns:
    uint8 array of the shape in the file's header.

  Raises:
    FileNotFoundError: no such file.
    ValueError: another magic number, or more or fewer bytes than the header
      says.
  """
  code = pathlib.Path(path).read_bytes()
  if code[:2] == b'\x1f\x8b':
    try:
      code = gzip.decompress(code)
    except (OSError, EOFError, zlib.error) as error:
      raise ValueError(f'{path}: gzip found {error}, expected a whole file; '
                       'fetch it again') from error
  wanted = 0x800 + num_axes
  if int.from_bytes(code[:4], 'big') != wanted or len(code) < 4:
    raise ValueError(f'{path}: magic number 0x{code[:4].hex()}, expected '
                     f'0x{wanted:08x}: IDX bytes of {num_axes} axes')
  start = 4 + 4 * num_axes
  if len(code) < start:
    raise ValueError(f'{path}: a header of {len(code)} bytes, expected {start}')
  shape = tuple(int.from_bytes(code[at:at + 4], 'big')
                for at in range(4, start, 4))
  found = len(code) - start
  if found != math.prod(shape):
    raise ValueError(f'{path}: {found} bytes after the header, expected '
                     f'{math.prod(shape)} for shape {shape}; fetch it again')
  return np.frombuffer(code, np.uint8, offset=start).reshape(shape)


def idx_bytes(array):
  """Returns the IDX form of a uint8 array: header, then the bytes."""
  header = [0x800 + array.ndim, *array.shape]
  return (b''.join(number.to_bytes(4, 'big') for number in header)
          + np.ascontiguousarray(array).tobytes())


def read_npz(path, names):
  """Reads arrays of an ``.npz`` archive; never unpickles.

  Args:
    path: the file.
    names: names of the arrays wanted.

  Returns:
    List of arrays.

  Raises:
    FileNotFoundError: no such file.
    ValueError: not an archive, corrupt, or one of the arrays is not there.
  """
  try:
    with np.load(path, allow_pickle=False) as archive:
      missing = [name for name in names if name not in archive.files]
      if missing:
        raise ValueError(f'arrays {archive.files}, expected {list(names)}')
      return [archive[name] for name in names]
  except FileNotFoundError:
    raise
  except (OSError, EOFError, AttributeError, ValueError, zipfile.BadZipFile,
          zlib.error) as error:  # AttributeError: a lone .npy is no archive
    raise ValueError(f'{path}: {error}') from error


def read_cifar_binary(path):
  """Reads a batch of the binary version of CIFAR-10.

  Args:
    path: a file of rows of 3,073 bytes: label, then red, green, blue planes.

  Returns:
    Images, uint8 [N, 32, 32, 3], and labels, int32 [N].

  Raises:
    FileNotFoundError: no such file.
    ValueError: the size is not that of whole rows.
  """
  code = pathlib.Path(path).read_bytes()
  row = 1 + math.prod(_CIFAR_SHAPE)
  if not code or len(code) % row:
    raise ValueError(f'{path}: {len(code)} bytes, expected a multiple of {row};'
                     ' it is truncated or no binary CIFAR-10 batch')
  rows = np.frombuffer(code, np.uint8).reshape(-1, row)
  return _channels_last(rows[:, 1:]), rows[:, 0].astype(np.int32)


def read_cifar_pickle(path):
  """Reads a batch of the Python version of CIFAR-10, and runs no code of it.

  The pickle is read by an interpreter that knows byte arrays, numbers, strings
  and containers. Any other name in it is refused before it is imported.

  Args:
    path: a pickled dict with ``data``, uint8 [N, 3072], and ``labels``.

  Returns:
    As ``read_cifar_binary``.

  Raises:
    FileNotFoundError: no such file.
    ValueError: the pickle is truncated, names something it may not, or holds
      something else than a batch.
  """
  code = pathlib.Path(path).read_bytes()
  try:
    batch = _BatchUnpickler(io.BytesIO(code), encoding='bytes').load()
  except Exception as error:  # a bad pickle may raise anything
    raise ValueError(f'{path}: {error or type(error).__name__}; expected a '
                     'pickled CIFAR-10 batch') from error
  if not isinstance(batch, dict):
    raise ValueError(f'{path}: a {type(batch).__name__}, expected a dict with '
                     'data and labels')
  batch = {key.decode() if isinstance(key, bytes) else key: value
           for key, value in batch.items()}
  data = getattr(batch.get('data'), 'value', None)
  labels = batch.get('labels')
  width = math.prod(_CIFAR_SHAPE)
  if data is None or data.ndim != 2 or data.shape[1] != width:
    found = sorted(map(str, batch)) if data is None else data.shape
    raise ValueError(f'{path}: {found}, expected data of shape [N, {width}]')
  if not (isinstance(labels, list) and len(labels) == len(data)
          and all(type(label) is int for label in labels)):
    raise ValueError(f'{path}: no list of {len(data)} whole numbers as labels '
                     f'(keys {sorted(map(str, batch))})')
  return _channels_last(data), np.array(labels, np.int32)


def _channels_last(rows):
  return np.ascontiguousarray(
      rows.reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1))


class _Name:
  """What a pickle gets for a name: no state can be set on it."""
  __slots__ = ()

  def __setstate__(self, state):
    raise pickle.UnpicklingError('it sets the state of a function')


class _Reconstruct(_Name):
  __slots__ = ()

  def __call__(self, kind, shape, code):
    del shape, code  # overwritten by the state
    if kind is not _NDARRAY:
      raise pickle.UnpicklingError('it makes an array of another class')
    return _Array()


class _Dtype(_Name):
  __slots__ = ()

  def __call__(self, code, *flags):
    del flags
    if code not in ('u1', b'u1'):
      raise pickle.UnpicklingError(f'it holds an array of {code!r}, not bytes')
    return _Uint8()


class _Encode(_Name):
  __slots__ = ()

  def __call__(self, text, encoding):
    if encoding != 'latin1':
      raise pickle.UnpicklingError(f'it encodes as {encoding!r}')
    return text.encode('latin1')


class _Uint8:
  __slots__ = ()

  def __setstate__(self, state):
    del state  # byte order and alignment: a byte has neither


class _Array:
  """A uint8 array in the making."""
  __slots__ = ('value',)

  def __setstate__(self, state):
    _, shape, dtype, is_fortran, code = state
    if not isinstance(dtype, _Uint8) or not isinstance(code, bytes):
      raise pickle.UnpicklingError('it holds an array of something but bytes')
    self.value = np.frombuffer(code, np.uint8).reshape(
        shape, order='F' if is_fortran else 'C')


_NDARRAY = _Name()
_NAMES = {
    ('numpy', 'ndarray'): _NDARRAY,
    ('numpy', 'dtype'): _Dtype(),
    ('numpy.core.multiarray', '_reconstruct'): _Reconstruct(),
    ('numpy._core.multiarray', '_reconstruct'): _Reconstruct(),
    ('_codecs', 'encode'): _Encode(),  # bytes, as Python 3 writes protocol 2
}


class _BatchUnpickler(pickle.Unpickler):
  """Gives stand-ins for five names, and refuses every other one."""

  def find_class(self, module_name, global_name):
    if (module_name, global_name) not in _NAMES:
      raise pickle.UnpicklingError(
          f'it names {module_name}.{global_name}, which was not imported')
    return _NAMES[module_name, global_name]


class Jpegs:
  """JPEG images that are decoded when they are taken: ``jpegs[ids]``.

  Grey images become RGB. Needs pillow (extra ``images``).

  Args:
    read: function of an index that returns (the name of the image, its bytes).
    num_images: how many there are.
    shape: (height, width) that each must have.
  """

  def __init__(self, read, num_images, shape):
    self._read = read
    self._num_images = num_images
    self._shape = shape

  def __len__(self):
    return self._num_images

  @property
  def shape(self):
    return (self._num_images, *self._shape, 3)

  def __getitem__(self, ids):
    """Decodes uint8 [len(ids), H, W, 3]; ValueError names a bad image."""
    images = np.empty((len(ids), *self._shape, 3), np.uint8)
    for at, index in enumerate(ids):
      images[at] = _decode_jpeg(*self._read(int(index)), self._shape)
    return images


def packed_jpegs(path, code, offsets, shape):
  """``Jpegs`` of one array of bytes and where each image starts and ends.

  Args:
    path: names the file in messages.
    code: uint8 [bytes].
    offsets: integers [N + 1], from 0 to the number of bytes.
    shape: (height, width).

  Raises:
    ValueError: the offsets do not divide the bytes.
  """
  if (offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0
      or offsets[-1] != len(code) or np.any(np.diff(offsets) <= 0)):
    raise ValueError(f'{path}: the offsets do not divide its {len(code)} bytes')

  def read(index):
    start, end = offsets[index:index + 2]
    return f'{path}, image {index}', code[start:end].tobytes()
  return Jpegs(read, len(offsets) - 1, shape)


def _decode_jpeg(name, code, shape):
  try:
    from PIL import Image
  except ImportError as error:
    raise ImportError(f'{name} is a JPEG image; reading it needs pillow: '
                      "pip install 'jaxdp[images]'") from error
  try:
    with Image.open(io.BytesIO(code)) as image:
      if image.size[::-1] != shape:
        raise ValueError(f'{image.size[::-1]} pixels, expected {shape}')
      return np.asarray(image.convert('RGB'))
  except (OSError, SyntaxError, ValueError) as error:
    raise ValueError(f'{name}: {error}; expected a whole image') from error
