r"""Words of a text file, streamed: batches in, privatised text out.

A word is ``\w+`` or one character of ``[^\w\s]``, lower-cased *after* it was
matched. What stands between words is white space and is kept byte for byte, a
byte-order mark at the beginning of a file included. Memory is bounded by the
batch: one line of 100 MB is as good as many.

>>> import io
>>> [batch] = batches(io.BytesIO(b'Hot\tsoup, now!\r\n'), 8)
>>> batch.tokens, batch.gaps, batch.tail
(['Hot', 'soup', ',', 'now', '!'], ['', '\t', '', ' ', ''], '\r\n')
>>> vocabulary = Vocabulary(('hot', 'soup', 'now', 'cold'))
>>> vocabulary.encode(batch).tolist()
[0, 1, -1, 2, -1]
>>> vocabulary.render(batch, [3, 1, 3, 3, -1], glue=False)
('cold\tsoup cold cold!\r\n', False)

White space is public, so it is neither read nor drawn; but two words that
stood against a punctuation mark would run into one when the mark becomes a
word. One space is put between them: it depends on the output alone.

All of it is host code but :class:`Replacer`, which sends batches through a word
mechanism. It does not wait for a batch it sent: the host reads the next one
while the device works.
"""

import codecs
import functools
import itertools
import operator
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import mechanisms
from jaxdp import samplers

MAX_WORD = 1_000_000  # characters
MAX_BATCH = 2**23  # characters; long words or long white space end a batch
UNKNOWN_WORD = '<unk>'
_TOKEN = re.compile(r'(\w+|[^\w\s])')
_BLOCK_BYTES = 2**18
_BOM = '\ufeff'


class TextError(ValueError):
  """The text cannot be read; no second run of the same text will do better."""


class Batch(NamedTuple):
  """Neighbouring words of a text; it begins and ends at a word boundary."""
  gaps: list[str]  # [n] white space before each word
  tokens: list[str]  # [n] as written
  tail: str  # white space after the last word; '' where another batch follows

  @property
  def num_bytes(self):
    return len(self.text().encode('utf-8'))

  def text(self):
    """Returns the batch as it stands in the file."""
    return _joined(self.gaps, self.tokens, self.tail)


def batches(file, size, *, offset=0, block_bytes=_BLOCK_BYTES):
  """Yields the batches of a text of any size.

  Args:
    file: binary file, seekable.
    size: words in a batch; the last one, or one of very long words, has fewer.
    offset: byte to begin at, the end of an earlier batch.
    block_bytes: bytes read at once, at most `MAX_BATCH`; does not show in the
      batches.

  Raises:
    TextError: the text is not UTF-8, or a word is longer than `MAX_WORD`
      characters; names the byte.
  """
  gaps, tokens, gap, num_chars = [], [], '', 0
  for parts in _blocks(file, offset, block_bytes):
    parts[0] = gap + parts[0]
    while len(parts[0]) > MAX_BATCH:
      yield Batch(gaps, tokens, parts[0][:MAX_BATCH])
      gaps, tokens, num_chars = [], [], 0
      parts[0] = parts[0][MAX_BATCH:]
    gap = parts.pop()
    gaps += parts[::2]
    tokens += parts[1::2]
    num_chars += sum(map(len, parts))
    while len(tokens) >= size or num_chars >= MAX_BATCH:
      cut = size if num_chars < MAX_BATCH else _cut(gaps, tokens, size)
      yield Batch(gaps[:cut], tokens[:cut], '')
      del gaps[:cut], tokens[:cut]
      num_chars = sum(map(len, gaps)) + sum(map(len, tokens))
  if tokens or gap:
    yield Batch(gaps, tokens, gap)


def _cut(gaps, tokens, size):
  """Where a batch ends: by the words alone, never by the blocks read.

  A resumed run reads other blocks and must make the same batches, because a
  device may round the same word differently at another place in a batch.
  """
  lengths = map(operator.add, map(len, gaps), map(len, tokens))
  ends = np.fromiter(itertools.accumulate(lengths), np.int64, len(tokens))
  return min(int(np.searchsorted(ends, MAX_BATCH)) + 1, size)


def _blocks(file, offset, block_bytes):
  """Yields [gap, word, gap, ..., word, gap] of each block; no word is cut."""
  file.seek(offset)
  raw, word, at_start = b'', '', offset == 0
  while True:
    data = file.read(block_bytes)
    raw += data
    try:
      text, used = codecs.utf_8_decode(raw, 'strict', not data)
    except UnicodeDecodeError as e:
      raise TextError(f'input: byte {offset + e.start} is not UTF-8 '
                      f'({e.reason}); convert the file first') from None
    bom = ''
    if at_start and text:
      at_start = False
      if text[0] == _BOM:
        bom, text = _BOM, text[1:]
    parts = _TOKEN.split(word + text)
    parts[0] = bom + parts[0]
    if len(word) + len(text) > MAX_WORD:
      _check_lengths(parts, offset - len(word.encode('utf-8')))
    word = ''
    if data and len(parts) > 1 and not parts[-1] and _is_word(parts[-2]):
      parts.pop()
      word = parts.pop()
    offset, raw = offset + used, raw[used:]
    yield parts
    if not data:
      return


def _check_lengths(parts, offset):
  """Refuses a word that bounded memory cannot hold."""
  longest = max(map(len, parts[1::2]), default=0)
  if longest > MAX_WORD:
    before = itertools.takewhile(
        lambda i: i % 2 == 0 or len(parts[i]) <= MAX_WORD, range(len(parts)))
    offset += sum(len(parts[i].encode('utf-8')) for i in before)
    raise TextError(f'input: the word at byte {offset} has more than '
                    f'{MAX_WORD} characters; is it a text of words?')


def _is_word(token):
  return token[0].isalnum() or token[0] == '_'


def _joined(gaps, tokens, tail):
  return ''.join(itertools.chain.from_iterable(zip(gaps, tokens))) + tail


class Vocabulary:
  """The words of a table: text to ids, and ids to text."""

  def __init__(self, words):
    """Indexes the words.

    Args:
      words: V distinct strings. One that is not lower-case is never found in
        a text, but may be written.
    """
    self._ids = {word: i for i, word in enumerate(words)}
    self.unknown_id = len(words)  # written as UNKNOWN_WORD
    written = [*words, UNKNOWN_WORD]
    self._words = np.array(written, object)
    self._begins = np.array([_is_word(w[:1] or ' ') for w in written])
    self._ends = np.array([_is_word(w[-1:] or ' ') for w in written])

  def encode(self, batch):
    """Returns int32 ids of the words; -1 where the table has none."""
    lowered = map(str.lower, batch.tokens)
    return np.fromiter(map(self._ids.get, lowered, itertools.repeat(-1)),
                       np.int32, len(batch.tokens))

  def render(self, batch, ids, glue):
    """Returns the text of a batch with its words replaced.

    Args:
      batch: the Batch.
      ids: int ``[n]``; -1 keeps a word as written, V writes `UNKNOWN_WORD`.
      glue: whether the text so far ends in a word character.

    Returns:
      The text, and whether it ends in a word character.
    """
    ids = np.asarray(ids, np.int64)
    words = self._words[ids].tolist()
    begins, ends = self._begins[ids], self._ends[ids]
    for i in np.flatnonzero(ids < 0):
      words[i] = batch.tokens[i]
      begins[i] = ends[i] = _is_word(words[i])
    gaps = batch.gaps
    touching = np.fromiter(map(len, gaps), np.int64, len(gaps)) == 0
    touching &= begins & np.concatenate([[glue], ends])[:-1]
    if touching.any():
      gaps = list(gaps)
      for i in np.flatnonzero(touching):
        gaps[i] = ' '
    last = ends[-1] if words else glue
    return _joined(gaps, words, batch.tail), bool(last and not batch.tail)


class Scan(NamedTuple):
  """What a first pass over a text found."""
  num_words: int
  num_unknown: int
  longest_line: int  # most words of the table between two line feeds
  examples: list[tuple[str, int]]  # first ten distinct unknown words, lines


def scan(file, vocabulary, *, block_bytes=_BLOCK_BYTES, on_batch=None):
  """Reads a text once: is it UTF-8, and which words does the table lack?

  Args:
    file: binary file, seekable.
    vocabulary: the Vocabulary.
    block_bytes: as in :func:`batches`.
    on_batch: called with the bytes of each batch.

  Raises:
    TextError: as :func:`batches` does.
  """
  num_words = num_unknown = longest = on_line = 0
  line, examples = 1, {}
  for batch in batches(file, 2**16, block_bytes=block_bytes):
    known = vocabulary.encode(batch) >= 0
    breaks = map(str.count, batch.gaps, itertools.repeat('\n'))
    lines = np.cumsum(np.fromiter(breaks, np.int64, len(known)))
    unknown = np.flatnonzero(~known)
    num_words += len(known)
    num_unknown += len(unknown)
    for i in unknown:
      if len(examples) == 10:
        break
      examples.setdefault(batch.tokens[i].lower(), line + int(lines[i]))
    total = int(lines[-1]) if len(lines) else 0
    counts = np.bincount(lines[known], minlength=total + 1)
    counts[0] += on_line
    longest = max(longest, int(counts.max()))
    in_tail = batch.tail.count('\n')
    on_line = 0 if in_tail else int(counts[-1])
    line += total + in_tail
    if on_batch is not None:
      on_batch(batch.num_bytes)
  return Scan(num_words, num_unknown, longest, list(examples.items()))


class Pending(NamedTuple):
  """A batch on its way through the device."""
  batch: Batch
  ids: np.ndarray  # [n] int32, -1 for unknown
  words: Any  # device, [size] int32, or None
  uniform: Any  # device, [size] int32, or None


class Replacer(NamedTuple):
  """Replaces words through a mechanism, batch by batch.

  Word i of a text uses keys folded with i, an unknown one under a purpose of
  its own: batches and the fate of unknown words leave the other words alone.
  """
  mechanism: mechanisms.Mechanism
  key: Any  # typed key, []
  params: Any
  vocabulary: Vocabulary
  oov: str  # 'error', 'unk', 'uniform' or 'keep'
  size: int  # words a device call

  def send(self, batch, start):
    """Starts a batch whose first word has the index `start`; does not wait."""
    ids = self.vocabulary.encode(batch)
    if not len(ids):
      return Pending(batch, ids, None, None)
    known = ids >= 0
    if self.oov == 'error' and not known.all():
      raise TextError('input: changed while it was read; start again')
    padded = np.zeros(self.size, np.int32)
    padded[:len(ids)] = np.where(known, ids, ids.max().clip(0))
    words = self.mechanism.privatize(self.key, padded, self.params, start=start)
    uniform = None
    if self.oov == 'uniform' and not known.all():
      uniform = _uniform_words(self.key, samplers.split_index(start), self.size,
                               self.vocabulary.unknown_id)
    return Pending(batch, ids, words, uniform)

  def fetch(self, pending):
    """Waits; returns ids to write: -1 keeps a word, V writes ``<unk>``."""
    ids = pending.ids
    if not len(ids):
      return ids
    words = np.asarray(pending.words)[:len(ids)]
    instead = {'unk': self.vocabulary.unknown_id}.get(self.oov, -1)
    if pending.uniform is not None:
      instead = np.asarray(pending.uniform)[:len(ids)]
    return np.where(ids >= 0, words, instead)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _uniform_words(key, start, size, num_words):
  keys = samplers.element_keys(key, samplers.UNKNOWN, start, size)
  return jax.vmap(lambda k: jax.random.randint(
      k, (), 0, num_words, jnp.int32))(keys)
