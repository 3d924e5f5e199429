"""Tests of jaxdp.embeddings on small files made here."""

import gzip
import json
import os
import struct
import sys
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from jaxdp import embeddings

_GLOVE = 'the 0.5 -1 2e-1\ncat 1 2 3\ndog .25 0 7\n'
_WORDS = ('the', 'cat', 'dog')
_VECTORS = np.array([[.5, -1, .2], [1, 2, 3], [.25, 0, 7]], np.float32)


def _binary(words, vectors, newline=b'\n', header=None):
  vectors = np.asarray(vectors, '<f4')
  code = header or b'%d %d\n' % vectors.shape
  for word, vector in zip(words, vectors, strict=True):
    numbers = struct.pack(f'<{len(vector)}f', *vector)
    code += word.encode() + b' ' + numbers + newline
  return code


class FileTest(parameterized.TestCase):
  """Writes a file and loads it."""

  def write(self, code, name='table.txt'):
    path = os.path.join(self.create_tempdir().full_path, name)
    with open(path, 'wb') as stream:
      stream.write(code.encode() if isinstance(code, str) else code)
    return path

  def load(self, code, name='table.txt', **kwargs):
    return embeddings.load(self.write(code, name), **kwargs)

  def assert_usual(self, table, rows=3):
    self.assertEqual(table.words, _WORDS[:rows])
    self.assertEqual(table.vectors.dtype, np.float32)
    np.testing.assert_array_equal(table.vectors, _VECTORS[:rows])


class TableTest(parameterized.TestCase):

  @parameterized.parameters(np.float16, np.float32, np.float64, np.int8)
  def test_any_real_dtype_becomes_float32(self, dtype):
    table = embeddings.make_table(['a', 'b'], np.array([[1], [2]], dtype))
    self.assertEqual(table.vectors.dtype, np.float32)
    np.testing.assert_array_equal(table.vectors, [[1.], [2.]])
    self.assertEqual(table.words, ('a', 'b'))

  @parameterized.named_parameters(
      ('no_words', [], np.zeros((0, 3)), 'no words'),
      ('flat', ['a'], [1.], r'must be \[V, D\]'),
      ('no_dimension', ['a'], np.zeros((1, 0)), r'must be \[V, D\]'),
      ('complex', ['a'], [[1j]], 'real numbers'),
      ('ragged', ['a', 'b'], [[1.], [1., 2.]], 'ragged'),
      ('short', ['a', 'b'], [[1.]], '2 words and 1 vectors'),
      ('empty_word', ['a', ''], [[1.], [2.]], "row 1: word ''"),
      ('number_word', ['a', 3], [[1.], [2.]], 'row 1: word 3'),
      ('one_string', 'ab', [[1.], [2.]], 'sequence of strings'),
      ('nan', ['a', 'b'], [[1.], [np.nan]], r"row 1 \('b'\) holds NaN"),
      ('infinity', ['a', 'b'], [[np.inf], [1.]], r"row 0 \('a'\) holds NaN"),
      ('overflow', ['a', 'b'], [[1.], [1e39]], r"row 1 \('b'\) overflows"),
      ('word_twice', ['a', 'b', 'a'], [[1.], [2.], [3.]],
       r"row 2 \('a'\) repeats the word of row 0"),
      ('vector_twice', ['a', 'b', 'c'], [[1.], [2.], [1.]],
       r"row 2 \('c'\) has the same vector as row 0 \('a'\).*drop_duplicates"),
      ('equal_in_float32', ['a', 'b'], [[1.], [1. + 1e-12]], 'same vector'),
      ('signed_zero', ['a', 'b'], [[0., 1.], [-0., 1.]], 'same vector'),
  )
  def test_faulty_tables_are_refused_by_name(self, words, vectors, message):
    with self.assertRaisesRegex(ValueError, message):
      embeddings.make_table(words, vectors)
    with self.assertRaisesRegex(ValueError, message):
      embeddings.validate(embeddings.EmbeddingTable(words, vectors))

  def test_repeated_rows_are_found_as_a_naive_comparison_finds_them(self):
    # 9,000 rows: more than two hashing blocks, with repeats across them.
    vectors = np.random.default_rng(0).integers(0, 9, (9000, 4))
    words = [f'w{row}' for row in range(len(vectors))]
    seen, kept = set(), []
    for row, vector in enumerate(vectors.tolist()):
      if tuple(vector) not in seen:
        seen.add(tuple(vector))
        kept.append(row)
    self.assertLess(len(kept), len(vectors))
    table = embeddings.drop_duplicates(
        embeddings.EmbeddingTable(words, vectors))
    self.assertEqual(table.words, tuple(words[row] for row in kept))
    np.testing.assert_array_equal(table.vectors, vectors[kept])

  def test_drop_duplicates_keeps_the_first_word_and_the_first_vector(self):
    table = embeddings.drop_duplicates(embeddings.EmbeddingTable(
        ('a', 'b', 'a', 'c', 'd'), [[1.], [2.], [3.], [2.], [3.]]))
    # 'd' goes too: its vector is that of the dropped second 'a'.
    self.assertEqual(table.words, ('a', 'b'))

  def test_normalized_rows_have_length_one_and_their_old_direction(self):
    table = embeddings.make_table(_WORDS, _VECTORS * np.float32(1e-30))
    rows = embeddings.normalize(table).vectors.astype(np.float64)
    # A float32 entry is off by half an ulp, at most 2^-24 of its size.
    np.testing.assert_allclose(
        np.linalg.norm(rows, axis=1), 1, atol=2**-23, rtol=0)
    lengths = np.linalg.norm(_VECTORS.astype(np.float64), axis=1)
    np.testing.assert_allclose(rows, _VECTORS / lengths[:, None], rtol=2**-22)

  def test_normalize_refuses_zero_rows_and_rows_that_coincide(self):
    zero = embeddings.make_table(['a', 'b'], [[1., 1.], [0., 0.]])
    with self.assertRaisesRegex(ValueError, r"row 1 \('b'\) is zero"):
      embeddings.normalize(zero)
    parallel = embeddings.make_table(['a', 'b'], [[1., 0.], [2., 0.]])
    with self.assertRaisesRegex(ValueError, "length one.*'b'.*'a'"):
      embeddings.normalize(parallel)
    kept = embeddings.normalize(parallel, duplicates='first')
    self.assertEqual(kept.words, ('a',))

  def test_subset_takes_words_or_ids_in_the_order_asked_for(self):
    table = embeddings.make_table(_WORDS, _VECTORS)
    by_word = embeddings.subset(table, ['dog', 'the'])
    by_id = embeddings.subset(table, np.array([2, 0]))
    for part in (by_word, by_id):
      self.assertEqual(part.words, ('dog', 'the'))
      np.testing.assert_array_equal(part.vectors, _VECTORS[[2, 0]])
    self.assertEqual(embeddings.word_ids(by_word), {'dog': 0, 'the': 1})

  @parameterized.parameters(
      (['dog', 'cow'], "not in the table.*'cow'"), ([0, 3], 'ids lie in'),
      ([-1], 'ids lie in'), ([0, 0], 'repeats the word'),
      (['dog', 1], 'all words or all integer'), ([0.5], 'integer ids'),
      ([True, False, True], 'integer ids'), ([], 'integer ids|no words'))
  def test_subset_refuses_what_it_cannot_take(self, rows, message):
    table = embeddings.make_table(_WORDS, _VECTORS)
    with self.assertRaisesRegex(ValueError, message):
      embeddings.subset(table, rows)

  def test_digest_changes_with_every_part_of_a_table(self):
    table = embeddings.make_table(_WORDS, _VECTORS)
    other_number = _VECTORS.copy()
    other_number[2, 1] = np.float32(1e-40)
    digests = {embeddings.digest(embeddings.EmbeddingTable(*pair))
               for pair in [(_WORDS, _VECTORS), (_WORDS, other_number),
                            (('the', 'ca', 'tdog'), _VECTORS),
                            (_WORDS[::-1], _VECTORS),
                            (_WORDS, _VECTORS.reshape(3, 3).T)]}
    self.assertLen(digests, 5)
    again = embeddings.EmbeddingTable(list(_WORDS), _VECTORS.astype(np.float64))
    self.assertEqual(embeddings.digest(again), embeddings.digest(table))


class TextTest(FileTest):

  @parameterized.named_parameters(
      ('glove', _GLOVE, 'a.txt'),
      ('no_last_line_feed', _GLOVE[:-1], 'a.txt'),
      ('crlf', _GLOVE.replace('\n', '\r\n'), 'a.txt'),
      ('tabs', _GLOVE.replace(' ', '\t'), 'a.txt'),
      ('spaces_behind', _GLOVE.replace('\n', ' \n'), 'a.txt'),
      ('blank_lines_below', _GLOVE + '\n \n', 'a.txt'),
      ('byte_order_mark', '\ufeff' + _GLOVE, 'a.txt'),
      ('word2vec', '3 3\n' + _GLOVE, 'a.txt'),
      ('word2vec_crlf', '3 3\r\n' + _GLOVE.replace('\n', '\r\n'), 'a.txt'),
      ('fasttext', '3 3\n' + _GLOVE.replace('\n', ' \n'), 'a.vec'),
      ('gzipped', gzip.compress(_GLOVE.encode()), 'a.txt.gz'),
      ('gzipped_under_another_name', gzip.compress(_GLOVE.encode()), 'a'),
  )
  def test_the_same_table_is_read_from(self, code, name):
    self.assert_usual(self.load(code, name))

  @parameterized.parameters('word2vec', 'fasttext')
  def test_a_named_format_needs_its_header(self, form):
    self.assert_usual(self.load('3 3\n' + _GLOVE, format=form))
    with self.assertRaisesRegex(ValueError, 'line 1: .*must be the header'):
      self.load(_GLOVE, format=form)

  @parameterized.parameters('', '4 2\n')
  def test_words_may_contain_spaces_of_every_kind(self, header):
    # The first row has a word of three fields, the last a number in it.
    code = '. . . 1 2\nnew\u00a0york 3 4\nid\u2003x 5 6\narea 51 7 8\n'
    table = self.load(header + code)
    self.assertEqual(
        table.words, ('. . .', 'new\u00a0york', 'id\u2003x', 'area 51'))
    np.testing.assert_array_equal(
        table.vectors, [[1, 2], [3, 4], [5, 6], [7, 8]])

  def test_line_separators_of_unicode_do_not_break_a_line(self):
    table = self.load('a\u2028b 1\nc\x85d 2\n')
    self.assertEqual(table.words, ('a\u2028b', 'c\x85d'))

  def test_words_that_are_numbers_are_words(self):
    table = self.load('0.5 1 2\n1e3 3 4\n-7 5 6\n')
    self.assertEqual(table.words, ('0.5', '1e3', '-7'))

  def test_limit_reads_the_first_rows_and_nothing_below(self):
    self.assert_usual(self.load(_GLOVE + 'broken row\n', limit=2), rows=2)
    self.assert_usual(self.load('4 3\n' + _GLOVE, limit=3))
    self.assert_usual(self.load(_GLOVE, limit=100))
    with self.assertRaisesRegex(ValueError, 'limit=0'):
      self.load(_GLOVE, limit=0)

  def test_many_rows_keep_their_order_and_their_line_numbers(self):
    # More than one block of rows, and more than the rows that are probed.
    vectors = np.random.default_rng(1).normal(size=(9001, 3))
    rows = [f'w{row} ' + ' '.join(map(repr, vector))
            for row, vector in enumerate(vectors.tolist())]
    table = self.load('\n'.join(rows))
    self.assertEqual(table.words, tuple(f'w{row}' for row in range(9001)))
    np.testing.assert_array_equal(table.vectors, vectors.astype(np.float32))
    rows[8500] = 'w8500 1 nan 2'
    with self.assertRaisesRegex(ValueError, r"line 8501 \('w8500'\) holds NaN"):
      self.load('\n'.join(rows))

  @parameterized.named_parameters(
      ('empty', '', 'is empty'),
      ('blank', '\n\n', 'is empty'),
      ('only_words', 'one\ntwo\n', 'line 1.*must be a word and its numbers'),
      ('short', _GLOVE + 'emu 1 2\n', 'line 4: 2 numbers.*3 dimensions'),
      ('long', _GLOVE + 'emu 1 2.5 3 4.5 6\n', 'line 4: more than 3 numbers'),
      ('long_by_exponent', _GLOVE + 'emu 1e-3 3 4 6\n', 'line 4: more than 3'),
      ('no_word', _GLOVE + ' 1 2 3\n', 'line 4: 2 numbers'),
      ('text', _GLOVE + 'emu 1 x2 3\n', "line 4: b'x2' is not a number"),
      ('hexadecimal', _GLOVE + 'emu 1 0x2 3\n', "line 4: b'0x2' is not"),
      ('underscore', _GLOVE + 'emu 1 2_0 3\n', "line 4: b'2_0' is not"),
      ('arabic_digit', _GLOVE + 'emu 1 \u0663 3\n', 'line 4: .* is not a num'),
      ('gap', 'the 1\n\ncat 2\n', 'line 2 is empty'),
      ('nan', _GLOVE + 'emu 1 NaN 3\n', r"line 4 \('emu'\) holds NaN"),
      ('infinity', _GLOVE + 'emu 1 -inf 3\n', 'line 4 .*holds NaN'),
      ('overflow', _GLOVE + 'emu 1 1e39 3\n', 'line 4 .*overflows float32'),
      ('word_twice', _GLOVE + 'cat 7 8 9\n',
       r"line 4 \('cat'\) repeats the word of line 2"),
      ('vector_twice', _GLOVE + 'emu 1 2 3\n',
       r"line 4 \('emu'\) has the same vector as line 2 \('cat'\)"),
      ('header_word_twice', '4 3\n' + _GLOVE + 'cat 7 8 9\n',
       r"line 5 \('cat'\) repeats the word of line 3"),
      ('cut', '4 3\n' + _GLOVE, 'promises 4 words and 3 were found'),
      ('too_many', '2 3\n' + _GLOVE, 'promises 2 words and 3 were found'),
      ('other_dimension', '3 4\n' + _GLOVE, 'line 2: 3 numbers.*4 dimensions'),
      ('fewer_dimensions', '3 2\n' + _GLOVE, "line 2: more than 2 numbers"),
      ('no_rows', '3 2\n', 'holds no words'),
      ('zero_words', '0 3\n', 'promises 0 words'),
      ('zero_dimensions', '3 0\nthe\n', '3 words of 0 dimensions'),
      ('absurd', f'3 {10**9}\n' + _GLOVE, '1 to 65536 dimensions'),
  )
  def test_damage_is_refused_with_its_line(self, code, message):
    with self.assertRaisesRegex(ValueError, message):
      self.load(code)

  def test_the_first_row_sets_the_dimension_when_rows_disagree(self):
    with self.assertRaisesRegex(ValueError, 'line 2: 1 numbers'):
      self.load('cat 1 2\ndog 1\n')

  def test_the_first_of_each_is_kept_on_request(self):
    table = self.load(_GLOVE + 'cat 7 8 9\nemu 1 2 3\nyak 4 4 4\n',
                      duplicates='first')
    self.assertEqual(table.words, (*_WORDS, 'yak'))
    np.testing.assert_array_equal(table.vectors[1], [1, 2, 3])

  def test_a_wrong_encoding_is_refused_with_the_byte(self):
    code = 'the 1\nna\u00efve 2\n'.encode('latin-1')
    byte = code.index(b'\xef')
    with self.assertRaisesRegex(ValueError, f'line 2: byte {byte} is not utf'):
      self.load(code)
    table = self.load(code, encoding='latin-1')
    self.assertEqual(table.words[1], 'na\u00efve')
    with self.assertRaisesRegex(ValueError, f'byte {byte + 4} is not utf-8'):
      self.load(b'2 1\n' + code)

  @parameterized.parameters('utf-16', 'no-such-code')
  def test_encodings_without_ascii_are_refused(self, encoding):
    with self.assertRaisesRegex(ValueError, f"encoding='{encoding}'"):
      self.load(_GLOVE, encoding=encoding)

  def test_a_cut_gzip_file_is_refused(self):
    rows = ''.join(f'w{row} {row}.5\n' for row in range(5000))
    code = gzip.compress(rows.encode())
    with self.assertRaisesRegex(ValueError, 'gzip stream is damaged'):
      self.load(code[:len(code) // 2], 'a.txt.gz')

  def test_a_missing_file_and_a_folder_are_not_found(self):
    folder = self.create_tempdir().full_path
    for path in (folder, os.path.join(folder, 'none.txt')):
      with self.assertRaisesRegex(FileNotFoundError, 'is no file; pass'):
        embeddings.load(path)

  def test_unknown_options_are_refused(self):
    with self.assertRaisesRegex(ValueError, "format='csv'"):
      self.load(_GLOVE, format='csv')
    with self.assertRaisesRegex(ValueError, "duplicates='last'"):
      self.load(_GLOVE, duplicates='last')

  @parameterized.parameters(
      struct.pack('<i', 793712314) + b'rest', b'\x80\x04\x95rest')
  def test_models_and_pickles_are_refused_unread(self, code):
    with self.assertRaisesRegex(ValueError, 'fastText model or a pickle'):
      self.load(code, 'a.bin')


class BinaryTest(FileTest):

  @parameterized.product(newline=[b'', b'\n'], name=['a.bin', 'a.w2v'],
                         zipped=[False, True])
  def test_the_same_table_is_read_from_word2vec_binary(
      self, newline, name, zipped):
    code = _binary(_WORDS, _VECTORS, newline)
    self.assert_usual(self.load(gzip.compress(code) if zipped else code, name))

  def test_records_across_the_read_buffer_are_whole(self):
    # About 5 MB: several refills of a buffer of 1 MB.
    vectors = np.random.default_rng(2).normal(size=(4000, 300))
    words = [f'w{row}\u00a0' for row in range(4000)]
    table = self.load(_binary(words, vectors), 'a.bin')
    self.assertEqual(table.words, tuple(words))
    np.testing.assert_array_equal(table.vectors, vectors.astype(np.float32))

  def test_limit_reads_the_first_records(self):
    code = _binary(_WORDS, _VECTORS)
    self.assert_usual(self.load(code[:-5], 'a.bin', limit=2), rows=2)

  def test_numbers_that_hold_spaces_and_line_feeds_are_numbers(self):
    vectors = np.frombuffer(b'\n   \n\n\n\n    ', '<f4').reshape(3, 1)
    table = self.load(_binary(_WORDS, vectors, b''), 'a.bin')
    np.testing.assert_array_equal(table.vectors, vectors)

  def test_a_cut_file_is_refused_with_record_and_byte(self):
    code = _binary(_WORDS, _VECTORS)
    record = code.index(b'dog')
    for end in (record + 2, record + 9, len(code) - 2):
      with self.assertRaisesRegex(
          ValueError, f'record 3 at byte {record}: the file ends here'):
        self.load(code[:end], 'a.bin')

  def test_other_damage_is_refused(self):
    code = _binary(_WORDS, _VECTORS)
    with self.assertRaisesRegex(ValueError, 'bytes follow the 3 words'):
      self.load(code + b'more', 'a.bin')
    with self.assertRaisesRegex(ValueError, 'no word ends within'):
      self.load(b'3 3\n' + b'x' * 40_000, 'a.bin')
    with self.assertRaisesRegex(ValueError, '1 to 65536 dimensions'):
      self.load(b'3 99999999999\n' + code, 'a.bin')
    with self.assertRaisesRegex(ValueError, 'the header promises 999999999'):
      self.load(_binary(_WORDS, _VECTORS, header=b'999999999 3\n'), 'a.bin')

  def test_values_are_checked_with_record_and_byte(self):
    vectors = _VECTORS.copy()
    vectors[1, 1] = np.nan
    code = _binary(_WORDS, vectors)
    byte = code.index(b'cat')
    with self.assertRaisesRegex(
        ValueError, rf"record 2 at byte {byte} \('cat'\) holds NaN"):
      self.load(code, 'a.bin')
    with self.assertRaisesRegex(ValueError, 'record 3 .*repeats.*record 1'):
      self.load(_binary(('a', 'b', 'a'), _VECTORS), 'a.bin')
    latin = code.replace(b'dog', b'd\xf6g')
    byte = latin.index(b'\xf6')
    with self.assertRaisesRegex(ValueError, f'byte {byte} is not utf-8'):
      self.load(latin, 'a.bin')


class ArchiveTest(FileTest):

  def save(self, name='a.npz', **arrays):
    path = self.write(b'', name)
    np.savez(path, **arrays)
    return path

  @parameterized.parameters(
      ({'words': np.array(_WORDS)},), ({'vocab': np.array(_WORDS)},),
      ({'words': np.array([word.encode() for word in _WORDS])},))
  def test_words_and_vectors_are_read_from_npz(self, arrays):
    path = self.save(vectors=_VECTORS.astype(np.float64), **arrays)
    self.assert_usual(embeddings.load(path))
    self.assert_usual(embeddings.load(path, limit=1), rows=1)

  @parameterized.parameters('a.npz', 'a_f16.npz', 'a_f32.npz')
  def test_words_may_lie_beside_the_vectors(self, name):
    path = self.save(name, vectors=_VECTORS)
    with self.assertRaisesRegex(ValueError, 'holds no words'):
      embeddings.load(path)
    beside = os.path.join(os.path.dirname(path), 'a_vocab.txt')
    with open(beside, 'w', encoding='utf-8') as stream:
      stream.write('\n'.join(_WORDS) + '\n')
    self.assert_usual(embeddings.load(path))

  def test_what_is_no_plain_archive_is_refused(self):
    pickled = self.save(vectors=_VECTORS, words=np.array(_WORDS, object))
    with self.assertRaisesRegex(ValueError, 'pickled arrays are never read'):
      embeddings.load(pickled)
    with self.assertRaisesRegex(ValueError, r"holds \['x'\] and no array"):
      embeddings.load(self.save(x=_VECTORS))
    with self.assertRaisesRegex(ValueError, 'words of dtype int64'):
      embeddings.load(self.save(vectors=_VECTORS, words=np.arange(3)))
    with self.assertRaisesRegex(ValueError, '2 words and 3 vectors'):
      embeddings.load(self.save(vectors=_VECTORS, words=np.array(['a', 'b'])))
    with open(pickled, 'rb') as stream:
      code = stream.read()
    with self.assertRaisesRegex(ValueError, 'no whole .npz'):
      self.load(code[:len(code) // 2], 'b.npz')

  def test_saved_tables_come_back_bit_for_bit(self):
    words = ('new\u00a0york', '. .', 'x' * 300, 'nul\0')
    vectors = np.random.default_rng(3).normal(size=(4, 5))
    table = embeddings.make_table(words, vectors)
    path = os.path.join(self.create_tempdir().full_path, 'a.npz')
    embeddings.save(table, path)
    again = embeddings.load(path)
    self.assertEqual(again.words, words)
    self.assertEqual(embeddings.digest(again), embeddings.digest(table))

  def test_a_failed_save_leaves_the_old_file_and_no_other(self):
    folder = self.create_tempdir().full_path
    path = os.path.join(folder, 'a.npz')
    table = embeddings.make_table(_WORDS, _VECTORS)
    embeddings.save(table, path)
    with mock.patch.object(np, 'savez_compressed', side_effect=OSError('full')):
      with self.assertRaisesRegex(OSError, 'full'):
        embeddings.save(embeddings.subset(table, [0]), path)
    self.assertEqual(os.listdir(folder), ['a.npz'])
    self.assert_usual(embeddings.load(path))

  def test_save_refuses_other_names_and_line_feeds(self):
    with self.assertRaisesRegex(ValueError, 'must end in .npz'):
      embeddings.save(embeddings.make_table(['a'], [[1.]]), 'a.txt')
    with self.assertRaisesRegex(ValueError, 'holds a line feed'):
      embeddings.save(embeddings.make_table(['a\nb'], [[1.]]), 'a.npz')


class PackageTest(FileTest):
  """Readers of the two registry packages, on tiny imitations."""

  def imitate_kumo(self, num_words=3):
    folder = self.create_tempdir().full_path
    np.save(os.path.join(folder, 'glove_6B_50d_emb.npy'), _VECTORS)
    with open(os.path.join(folder, 'glove_6B_index.parquet'), 'wb'):
      pass
    column = mock.Mock()
    column.to_pylist.return_value = list(_WORDS[:num_words])
    parquet = types.ModuleType('pyarrow.parquet')
    parquet.read_table = lambda path, columns: {columns[0]: column}
    pyarrow = types.ModuleType('pyarrow')
    pyarrow.parquet = parquet
    modules = {'pyarrow': pyarrow, 'pyarrow.parquet': parquet}
    return folder, mock.patch.dict(sys.modules, modules)

  def test_kumo_is_read_whole_or_in_part(self):
    folder, modules = self.imitate_kumo()
    with modules:
      self.assert_usual(embeddings.load_kumo(folder))
      self.assert_usual(embeddings.load_kumo(folder, limit=2), rows=2)

  def test_kumo_says_what_is_missing(self):
    folder, modules = self.imitate_kumo(num_words=2)
    with modules, self.assertRaisesRegex(ValueError, '2 words and 3 vectors'):
      embeddings.load_kumo(folder)
    with mock.patch.dict(sys.modules, {'pyarrow': None}):
      with self.assertRaisesRegex(ImportError, 'pip install pyarrow'):
        embeddings.load_kumo(folder)
    with self.assertRaises(FileNotFoundError):
      embeddings.load_kumo(self.create_tempdir().full_path)

  def test_wink_drops_the_length_and_the_index_behind_each_vector(self):
    vectors = {word: [*vector, 9., row] for row, (word, vector) in enumerate(
        zip(_WORDS, _VECTORS.tolist(), strict=True))}
    content = {'dimensions': 3, 'words': list(_WORDS), 'vectors': vectors}
    path = self.write(json.dumps(content), 'wink.json')
    self.assert_usual(embeddings.load_wink(path))
    self.assert_usual(embeddings.load_wink(path, limit=1), rows=1)

  def test_wink_says_what_is_wrong(self):
    with self.assertRaisesRegex(ValueError, 'broken JSON.*char 10'):
      embeddings.load_wink(self.write('{"words": ', 'wink.json'))
    with self.assertRaisesRegex(ValueError, "'words' is missing"):
      embeddings.load_wink(self.write('{"dimensions": 2}', 'wink.json'))


if __name__ == '__main__':
  absltest.main()
