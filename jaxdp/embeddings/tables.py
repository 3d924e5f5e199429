r"""The table of words and vectors, and what may be done to one. Host, NumPy.

  >>> table = make_table(['cat', 'dog'], [[0., 1.], [3., 4.]])
  >>> normalize(table).vectors[1]
  array([0.6, 0.8], dtype=float32)

Shape letters: ``V`` words, ``D`` dimensions.
"""

import hashlib
import os
import tempfile
from typing import NamedTuple

import numpy as np

_BLOCK_ROWS = 4096


class EmbeddingTable(NamedTuple):
  """Words and their vectors; row i of ``vectors`` belongs to ``words[i]``."""
  words: tuple[str, ...]
  vectors: np.ndarray  # f32 [V, D]


def make_table(words, vectors, *, source='table', duplicates='error'):
  """Builds a table that passes ``validate``.

  Args:
    words: sequence of V different, non-empty strings.
    vectors: [V, D] real numbers, D >= 1; any float or integer dtype, converted
      to float32.
    source: what error messages call the table.
    duplicates: 'error' refuses a word or a vector that comes twice; 'first'
      keeps the first of each.

  Returns:
    ``EmbeddingTable``.

  Raises:
    ValueError: words or vectors are empty, ragged, not finite in float32 or
      duplicate; the message names the rows.

  Example:
    >>> make_table(['a', 'b', 'c'], [[1], [2], [1]], duplicates='first').words
    ('a', 'b')
  """
  if isinstance(words, str):
    raise ValueError(f'{source}: words={words!r} must be a sequence of strings')
  try:
    vectors = np.asarray(vectors)
  except ValueError as error:
    raise ValueError(f'{source}: vectors are ragged; every word needs the same '
                     'number of dimensions') from error
  return assemble(tuple(words), vectors, source, 'row {}'.format, duplicates)


def validate(table):
  """Refuses a table that no mechanism can work on; returns it as float32.

  Args:
    table: ``EmbeddingTable``, or any pair (words, vectors).

  Returns:
    The same table, its words a tuple and its vectors a float32 NumPy array.

  Raises:
    ValueError: as ``make_table``.
  """
  words, vectors = table
  return make_table(words, vectors)


def drop_duplicates(table):
  """Keeps the first of each repeated word and of each repeated vector.

  Args:
    table: ``EmbeddingTable``.

  Returns:
    A table that passes ``validate``; ids shift where a row was dropped.

  Raises:
    ValueError: the table is faulty in another way.
  """
  words, vectors = table
  return make_table(words, vectors, duplicates='first')


def normalize(table, *, duplicates='error'):
  """Scales every vector to Euclidean length one.

  Args:
    table: ``EmbeddingTable``.
    duplicates: 'error' refuses rows that coincide once scaled; 'first' keeps
      the first of them.

  Returns:
    ``EmbeddingTable`` whose rows have length one up to float32 rounding.

  Raises:
    ValueError: a row is zero, or two rows point the same way.

  Example:
    >>> normalize(make_table(['a'], [[3., 4.]])).vectors
    array([[0.6, 0.8]], dtype=float32)
  """
  words, vectors = validate(table)
  wide = vectors.astype(np.float64)
  length = np.linalg.norm(wide, axis=1, keepdims=True)
  if not length.all():
    row = int(np.argmin(length))
    raise ValueError(f'table: row {row} ({words[row]!r}) is zero and has no '
                     'direction; leave it out with subset')
  try:
    return make_table(words, wide / length, duplicates=duplicates)
  except ValueError as error:
    raise ValueError(
        f"after scaling to length one, {error} (or pass duplicates='first' "
        'to normalize)') from error


def subset(table, words_or_ids):
  """Takes some rows of a table, in the order asked for.

  Args:
    table: ``EmbeddingTable``.
    words_or_ids: sequence of words, or of integer ids in [0, V).

  Returns:
    ``EmbeddingTable``.

  Raises:
    ValueError: a word is not in the table, an id is out of range, or one is
      asked for twice.
  """
  rows = list(words_or_ids)
  if all(isinstance(row, str) for row in rows):
    ids = word_ids(table)
    unknown = [word for word in rows if word not in ids]
    if unknown:
      raise ValueError(f'words_or_ids: {len(unknown)} words are not in the '
                       f'table, the first {unknown[:5]}; leave them out')
    rows = [ids[word] for word in rows]
  rows = np.asarray(rows)
  size = len(table.words)
  if rows.ndim != 1 or rows.dtype.kind not in 'iu':
    raise ValueError('words_or_ids must be all words or all integer ids')
  if rows.min() < 0 or rows.max() >= size:
    raise ValueError(f'words_or_ids reach from {rows.min()} to {rows.max()}; '
                     f'ids lie in [0, {size})')
  return make_table([table.words[row] for row in rows],
                    np.asarray(table.vectors)[rows], source='subset')


def word_ids(table):
  """Returns the dict from each word to its id, the row of its vector."""
  return {word: row for row, word in enumerate(table.words)}


def digest(table):
  """SHA-256 over a table's shape, words and float32 vectors, for a card.

  Args:
    table: ``EmbeddingTable``.

  Returns:
    64 hexadecimal digits, the same on every machine.
  """
  vectors = np.ascontiguousarray(table.vectors, '<f4')
  hasher = hashlib.sha256(f'{vectors.shape}'.encode())
  for word in table.words:
    code = word.encode('utf-8', 'surrogatepass')
    hasher.update(len(code).to_bytes(8, 'little') + code)
  hasher.update(vectors.data)
  return hasher.hexdigest()


def save(table, path):
  """Writes a table as ``.npz``, whole or not at all; ``load`` reads it back.

  The file holds ``vectors`` (f32 [V, D]) and ``words``, the UTF-8 bytes of the
  words with a line feed between them: no pickle, and small for long words.

  Args:
    table: ``EmbeddingTable``.
    path: name that ends in ``.npz``; an older file there is replaced.

  Raises:
    ValueError: the name ends otherwise, a word holds a line feed, or the table
      does not pass ``validate``.
  """
  path = os.fspath(path)
  words, vectors = validate(table)
  if not path.endswith('.npz'):
    raise ValueError(f'path={path!r} must end in .npz, the format written')
  if any('\n' in word for word in words):
    raise ValueError('a word holds a line feed, which separates words on disk')
  code = np.frombuffer('\n'.join(words).encode('utf-8'), np.uint8)
  handle, partial = tempfile.mkstemp(
      dir=os.path.dirname(path) or '.', suffix='.partial')
  try:
    with os.fdopen(handle, 'wb') as stream:
      np.savez_compressed(stream, words=code, vectors=vectors)
    os.chmod(partial, 0o644)
    os.replace(partial, path)
  except BaseException:
    os.unlink(partial)
    raise


def assemble(words, vectors, source, where, duplicates):
  """Checks words and vectors; ``where(i)`` says where row i came from."""
  if duplicates not in ('error', 'first'):
    raise ValueError(f"duplicates={duplicates!r} must be 'error' or 'first'")
  if not words:
    raise ValueError(f'{source}: no words; a table needs at least one')
  if (vectors.ndim != 2 or vectors.shape[1] < 1
      or vectors.dtype.kind not in 'fiu'):
    raise ValueError(f'{source}: vectors of shape {vectors.shape} and dtype '
                     f'{vectors.dtype} must be [V, D] real numbers, D >= 1')
  if len(words) != len(vectors):
    raise ValueError(f'{source}: {len(words)} words and {len(vectors)} '
                     'vectors; there must be one vector a word')
  for row, word in enumerate(words):
    if not isinstance(word, str) or not word:
      raise ValueError(f'{source}: {where(row)}: word {word!r} must be a '
                       'non-empty string')
  label = lambda row: f'{where(row)} ({words[row]!r})'
  vectors = _to_float32(vectors, source, label)
  words_twice = _repeats(enumerate(words))
  vectors_twice = _repeated_rows(vectors)
  if duplicates == 'error' and words_twice:
    first, second = words_twice[0]
    raise ValueError(f'{source}: {label(second)} repeats the word of '
                     f'{where(first)}; drop one, e.g. with drop_duplicates')
  if duplicates == 'error' and vectors_twice:
    first, second = vectors_twice[0]
    raise ValueError(
        f'{source}: {label(second)} has the same vector as {label(first)}; no '
        'epsilon tells them apart, so drop one, e.g. with drop_duplicates')
  dropped = {second for _, second in words_twice + vectors_twice}
  if dropped:
    kept = [row for row in range(len(words)) if row not in dropped]
    words, vectors = tuple(words[row] for row in kept), vectors[kept]
  return EmbeddingTable(words, vectors)


def _to_float32(vectors, source, label):
  """Converts to float32 and refuses what is not finite there."""
  with np.errstate(over='ignore'):
    result = np.ascontiguousarray(vectors, np.float32)
  finite = np.isfinite(result).all(axis=1)
  if not finite.all():
    row = int(np.argmin(finite))
    overflows = np.isfinite(vectors[row]).all()
    raise ValueError(f'{source}: {label(row)} ' + (
        'overflows float32; scale the table' if overflows else
        'holds NaN or infinity; remove the row'))
  return result


def _repeats(items):
  """Pairs (first row, later row) of equal items, from (row, item) pairs."""
  first, pairs = {}, []
  for row, item in items:
    earlier = first.setdefault(item, row)
    if earlier != row:
      pairs.append((earlier, row))
  return pairs


def _repeated_rows(vectors):
  """Pairs of equal rows; hashes first, as few rows of a real table collide."""
  weights = np.random.default_rng(0).integers(
      2**63, size=vectors.shape[1], dtype=np.uint64)
  hashes = np.empty(len(vectors), np.uint64)
  for start in range(0, len(vectors), _BLOCK_ROWS):
    # Adding zero makes -0. and 0., which are equal, the same bits.
    block = vectors[start:start + _BLOCK_ROWS] + np.float32(0)
    hashes[start:start + _BLOCK_ROWS] = (
        block.view(np.uint32).astype(np.uint64) * weights).sum(axis=1)
  _, inverse, counts = np.unique(
      hashes, return_inverse=True, return_counts=True)
  suspects = np.flatnonzero(counts[inverse] > 1).tolist()
  return _repeats((row, (vectors[row] + np.float32(0)).tobytes())
                  for row in suspects)
