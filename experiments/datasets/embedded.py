"""The data that come with the code: real input for a first run, offline.

A subset of GloVe 6B (27,958 words, 50 dimensions), 10,605 movie-review
sentences with their mean rating by 20 people, the synonyms and antonyms of
WordNet 3.1 inside that vocabulary, and 1,797 images of digits. Where each file
comes from and under which licence: ``embedded/README.md``; how it was made:
``build_embedded``. Everything runs on the host.

>>> words = table().words
>>> words[:3], len(words)
(('the', ',', '.'), 27958)
>>> reviews()[2]
Review(id=3, valence=-0.6, text='Effective but too tepid biopic')
"""

import gzip
import pathlib
from typing import NamedTuple

import numpy as np

from jaxdp import embeddings

FOLDER = pathlib.Path(__file__).parent / 'embedded'
PARTS_OF_SPEECH = ('n', 'v', 'a', 'r')


class Review(NamedTuple):
  """A sentence and its mean rating, from -4, most negative, to 4."""
  id: int
  valence: float
  text: str


def table(*, normalize=False):
  """Reads the GloVe words, the most frequent first.

  The vectors were rounded to float16 (relative error up to 2^-11) and are
  returned as float32. No two of the 27,958 coincide, before or after scaling
  to length one; a table with coincident rows would be refused, not thinned.

  Args:
    normalize: scales every vector to Euclidean length one.

  Returns:
    ``EmbeddingTable`` of 27,958 words and 50 dimensions.
  """
  result = embeddings.load(FOLDER / 'glove50_f16.npz')
  return embeddings.normalize(result) if normalize else result


def reviews():
  """Reads the rated sentences, in the order of their id.

  Returns:
    List of 10,605 ``Review``; a sentence with valence 0 is neither positive
    nor negative.
  """
  rows = [line.split('\t') for line in _lines('reviews.tsv.gz')]
  return [Review(int(number), float(valence), text)
          for number, valence, text in rows]


def digits():
  """Reads the images of handwritten digits.

  Returns:
    Images, uint8 [1797, 8, 8], from 0 (paper) to 16 (ink), and labels,
    int32 [1797], from 0 to 9.
  """
  rows = np.loadtxt(_lines('digits.csv.gz'), np.uint8, delimiter=',')
  return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int32)


def synonyms(pos=None):
  """Pairs of words that share a WordNet sense.

  Args:
    pos: keeps one part of speech: 'n', 'v', 'a' or 'r' (adverbs); None keeps
      all.

  Returns:
    Sorted list of pairs (word, word), each pair once and in alphabetical
    order, both words in ``table()``.

  Raises:
    ValueError: unknown part of speech.
  """
  return _pairs('syn', pos)


def antonyms(pos=None):
  """Pairs of words of which one is a WordNet antonym of the other.

  Args:
    pos: as for ``synonyms``.

  Returns:
    As ``synonyms``.

  Raises:
    ValueError: unknown part of speech.
  """
  return _pairs('ant', pos)


def _pairs(relation, pos):
  if pos is not None and pos not in PARTS_OF_SPEECH:
    raise ValueError(f'pos={pos!r} must be one of {PARTS_OF_SPEECH}, or None '
                     'for all')
  rows = [line.split('\t') for line in _lines('wordnet31_pairs.tsv.gz')]
  return sorted({(first, second) for kind, part, first, second in rows
                 if kind == relation and pos in (None, part)})


def _lines(name):
  with gzip.open(FOLDER / name, 'rt', encoding='utf-8', newline='\n') as stream:
    return stream.read().removesuffix('\n').split('\n')
