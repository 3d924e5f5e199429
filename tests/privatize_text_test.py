"""A text comes out private, whole and with its card, however often killed.

The tokeniser has an oracle that classifies characters one by one. Kills are
injected before every file operation; a few are real.
"""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np
import pytest
from scipy import stats

from experiments import privatize_text
from experiments import text_checkpoint
from experiments import text_stream
from jaxdp import embeddings
from jaxdp import mechanisms

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_NASTY = (' \t\r\n\x0b\x0c\x1c\x85\u2028\u2029\xa0\u3000\ufeff'
          'abZ09_\u00df\u0130\u01c5\u0301\u0307\u200b\u200d\u202e.,\'"-<>&'
          '\u4e2d\u06f3\u0e33\U0001f600\U00010400\u00b2\u2160')
_NUM_WORDS = 40
# A mechanism and an epsilon at which it calibrates on the test table.
_EPSILONS = {'multivariate_laplace': 3., 'truncated_gumbel': 60.,
             'gumbel_exponential': 30., 'tem': 3., 'santext': 3.}


def _test_table():
  vectors = np.random.default_rng(0).normal(size=(_NUM_WORDS, 5))
  words = [f'w{i}' for i in range(_NUM_WORDS - 2)] + ['.', "o'c"]
  return embeddings.make_table(words, vectors)


def _random_text(num_words, seed=0, unknown=0.1):
  rng = random.Random(seed)
  words = [f'w{i}' for i in range(_NUM_WORDS - 2)]
  out = []
  for _ in range(num_words):
    word = rng.choice(words) if rng.random() > unknown else f'Zq{rng.random()}'
    out += [rng.choice([word, word.upper(), '.']),
            rng.choice([' ', '\n', '\t', ' - ', '', '.'])]
  return ''.join(out)


def _oracle(text):
  """Words and white space of a text, character by character."""
  tokens, gaps, inside = [], [''], False
  for i, char in enumerate(text):
    is_word = char.isalnum() or char == '_'
    if char.isspace() or (i == 0 and char == '\ufeff'):
      gaps[-1] += char
    elif is_word and inside:
      tokens[-1] += char
    else:
      tokens.append(char)
      gaps.append('')
    inside = is_word
  return tokens, gaps


def _tokens_and_gaps(batches):
  """Joins batches to the form of the oracle."""
  tokens, gaps = [], ['']
  for batch in batches:
    for gap, token in zip(batch.gaps, batch.tokens):
      gaps[-1] += gap
      tokens.append(token)
      gaps.append('')
    gaps[-1] += batch.tail
  return tokens, gaps


class StreamTest(parameterized.TestCase):

  @parameterized.product(seed=tuple(range(6)), block_bytes=(1, 2, 7, 64, 2**18))
  def test_words_agree_with_a_reader_of_single_characters(
      self, seed, block_bytes):
    rng = random.Random(seed)
    text = ''.join(rng.choice(_NASTY) for _ in range(300))
    data = text.encode('utf-8')
    found = list(text_stream.batches(io.BytesIO(data), 16,
                                     block_bytes=block_bytes))
    self.assertEqual(_tokens_and_gaps(found), _oracle(text))
    self.assertEqual([len(b.tokens) for b in found[:-1]],
                     [16] * (len(found) - 1))
    self.assertEqual(sum(b.num_bytes for b in found), len(data))

  @parameterized.parameters(1, 7, 2**18)
  def test_the_end_of_any_batch_is_a_place_to_go_on(self, block_bytes):
    rng = random.Random(1)
    data = '\ufeff'.join(
        ''.join(rng.choice(_NASTY) for _ in range(9)) for _ in range(30)
    ).encode('utf-8')
    found = list(text_stream.batches(io.BytesIO(data), 8))
    offset = 0
    for i, batch in enumerate(found[:-1]):
      offset += batch.num_bytes
      rest = list(text_stream.batches(io.BytesIO(data), 8, offset=offset,
                                      block_bytes=block_bytes))
      self.assertEqual(rest, found[i + 1:])

  @parameterized.parameters(5, 50, 150)
  def test_long_text_ends_a_batch_at_the_same_words_for_any_blocks(self, block):
    rng = random.Random(2)
    parts = [rng.choice(['ab', 'x' * 90, '\n' * 250, ' ', '.', ' ' * 99])
             for _ in range(400)]
    data = ''.join(parts).encode('utf-8')
    longest = max(map(len, _oracle(''.join(parts))[0]))
    def ends(**kwargs):
      at, out = 0, []
      for batch in text_stream.batches(io.BytesIO(data), 40, **kwargs):
        at += batch.num_bytes
        out.append((at, len(batch.tokens)))
        # Under the limit, then at most a gap of the limit and one word.
        self.assertLessEqual(len(batch.text()), 400 + longest)
      return out
    with mock.patch.object(text_stream, 'MAX_BATCH', 200):
      found = ends(block_bytes=block)
      self.assertEqual(found, ends(block_bytes=200))
      for at, _ in found[::7]:
        self.assertEqual(ends(block_bytes=block, offset=at),
                         [(e - at, n) for e, n in found if e > at])

  def test_keeping_every_word_gives_the_text_back(self):
    rng = random.Random(3)
    text = ''.join(rng.choice(_NASTY) for _ in range(3000))
    vocabulary, glue, out = text_stream.Vocabulary(('a',)), False, ''
    for batch in text_stream.batches(io.BytesIO(text.encode()), 64):
      new, glue = vocabulary.render(batch, np.full(len(batch.tokens), -1), glue)
      out += new
    self.assertEqual(out, text)

  @parameterized.parameters(1, 5, 10_000)
  def test_replaced_text_reads_as_the_new_words_in_the_old_spaces(self, size):
    rng = random.Random(4)
    text = ''.join(rng.choice(_NASTY) for _ in range(3000))
    words = ('one', 'two', '.', '\u4e2d', '_', '\U0001f600')
    vocabulary, glue, out, ids = text_stream.Vocabulary(words), False, '', []
    for batch in text_stream.batches(io.BytesIO(text.encode()), size):
      new_ids = [rng.randrange(len(words)) for _ in batch.tokens]
      new, glue = vocabulary.render(batch, new_ids, glue)
      out, ids = out + new, ids + new_ids
    tokens, gaps = _oracle(out)
    self.assertEqual(tokens, [words[i] for i in ids])
    inserted = 0
    for old, new in zip(_oracle(text)[1], gaps, strict=True):
      self.assertIn(new, (old, ' ' if not old else old))
      inserted += old != new
    self.assertGreater(inserted, 10)

  def test_a_byte_order_mark_is_white_space_at_the_beginning_alone(self):
    data = '\ufeffa \ufeff'.encode('utf-8')
    [batch] = text_stream.batches(io.BytesIO(data), 8, block_bytes=1)
    self.assertEqual((batch.tokens, batch.gaps),
                     (['a', '\ufeff'], ['\ufeff', ' ']))

  def test_case_falls_after_matching(self):
    vocabulary = text_stream.Vocabulary(('abc', 'i\u0307'))
    [batch] = text_stream.batches(io.BytesIO('ABC \u0130 \u0130b'.encode()), 8)
    self.assertEqual(vocabulary.encode(batch).tolist(), [0, 1, -1])

  @parameterized.product(
      case=((b'ab \xff', 3, 'invalid start'), (b'\xc3(', 0, 'continuation'),
            (b'aa\xed\xa0\x80', 2, 'continuation'),
            (b'abc \xe2\x82', 4, 'unexpected end')),
      block_bytes=(1, 3, 64), prefix=(0, 100))
  def test_what_is_not_utf8_is_refused_by_its_byte(
      self, case, block_bytes, prefix):
    data, at, reason = case
    with self.assertRaisesRegex(text_stream.TextError,
                                rf'byte {at + prefix} .*{reason}'):
      list(text_stream.batches(io.BytesIO(b' ' * prefix + data), 8,
                               block_bytes=block_bytes))

  @parameterized.parameters(7, 64, 2**18)
  def test_a_word_beyond_the_limit_is_refused_by_its_byte(self, block_bytes):
    with mock.patch.object(text_stream, 'MAX_WORD', 50):
      fits = '\u00e9 ' + 'x' * 50 + ' y'
      self.assertLen(list(text_stream.batches(
          io.BytesIO(fits.encode()), 8, block_bytes=block_bytes))[0].tokens, 3)
      for text in ('\u00e9 a' + 'x' * 50 + ' b', '\u00e9 ' + 'x' * 500):
        with self.assertRaisesRegex(text_stream.TextError, 'byte 3 has more'):
          list(text_stream.batches(io.BytesIO(text.encode()), 8,
                                   block_bytes=block_bytes))

  @parameterized.parameters(5, 2**18)
  def test_a_scan_counts_and_finds_the_lines(self, block_bytes):
    text = 'a a\r\nb A x\n\n' + 'a ' * 70000 + '\nY a\n' + 'x y b' + '\n' * 3
    found = text_stream.scan(io.BytesIO(text.encode()),
                             text_stream.Vocabulary(('a', 'b')),
                             block_bytes=block_bytes)
    self.assertEqual(found, text_stream.Scan(
        70010, 4, 70000, [('x', 2), ('y', 5)]))


class FileTest(parameterized.TestCase):
  """Tests that run on files, with a small table and small batches."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.table = str(self.folder / 'table.npz')
    embeddings.save(_test_table(), self.table)
    self.input = self.folder / 'in.txt'
    self.output = self.folder / 'out.txt'
    self.files = text_checkpoint.Files.of(str(self.output))

  def config(self, **fields):
    return privatize_text.Config(**({
        'input': str(self.input), 'output': str(self.output),
        'mechanism': 'santext', 'epsilon': 3., 'table': self.table,
        'oov': 'uniform', 'insecure_seed': 7} | fields))

  def run_file(self, batch_size=32, **fields):
    return privatize_text.privatize_file(
        self.config(**fields), batch_size=batch_size, checkpoint_seconds=0.)

  def reference(self, **fields):
    """The bytes of a run that nobody killed."""
    output = self.folder / 'reference.txt'
    self.run_file(output=str(output), overwrite=True, **fields)
    return output.read_bytes()

  def assert_clean(self):
    """Output and card are there, and no trace of the key."""
    names = {p.name for p in self.folder.iterdir() if 'out.txt' in p.name}
    self.assertEqual(names, {'out.txt', 'out.txt.guarantee.json',
                             'out.txt.guarantee.txt'})

  def assert_untouched(self):
    self.assertEmpty([p for p in self.folder.iterdir() if 'out.txt' in p.name])


class PrivatizeTest(FileTest):

  @parameterized.parameters(*_EPSILONS)
  def test_batches_do_not_show_and_noise_is_there(self, name):
    text = _random_text(150)
    self.input.write_bytes(text.encode())
    fields = {'mechanism': name, 'epsilon': _EPSILONS[name]}
    outputs = {self.reference(batch_size=size, **fields)
               for size in (32, 7)}
    self.assertLen(outputs, 1)
    [output] = outputs
    self.assertNotEqual(output.decode().split(), text.lower().split())
    other = self.reference(insecure_seed=8, **fields)
    self.assertNotEqual(output, other)

  def test_the_words_are_those_the_mechanism_draws(self):
    ids = np.arange(96, dtype=np.int32) % 38
    self.input.write_text('\n'.join(f'W{i}' for i in ids), encoding='utf-8')
    output = self.reference().decode()
    table, mechanism = _test_table(), mechanisms.get('santext')
    params = mechanism.calibrate(table, epsilon=3.)
    drawn = [mechanism.privatize(jax.random.key(7), ids[i:i + 32], params, i)
             for i in (0, 32, 64)]
    self.assertEqual(output.split('\n'),
                     [table.words[i] for i in np.concatenate(drawn)])

  def test_two_runs_from_entropy_differ(self):
    self.input.write_text(_random_text(200), encoding='utf-8')
    first = self.reference(insecure_seed=None)
    self.assertNotEqual(first, self.reference(insecure_seed=None))

  @parameterized.parameters('', ' \r\n\t', '\ufeff')
  def test_a_text_without_words_gives_its_white_space_and_a_card(self, text):
    self.input.write_bytes(text.encode())
    card = self.run_file()
    self.assertEqual(self.output.read_bytes(), text.encode())
    self.assertEqual(card['tokens']['total'], 0)
    self.assert_clean()

  def test_a_table_word_that_reads_as_two_is_kept_apart_from_neighbours(self):
    self.input.write_text('w1.w2' * 400, encoding='utf-8')
    output = self.reference().decode()
    self.assertNotRegex(output, r'\dw|co|\do|cw')
    self.assertRegex(output, r"o'c")


class UnknownWordsTest(FileTest):

  def test_error_names_ten_words_with_lines_and_writes_nothing(self):
    lines = [f'w1 Zq{i} Zq0' for i in range(12)]
    self.input.write_text('\n'.join(lines), encoding='utf-8')
    with self.assertRaises(ValueError) as caught:
      self.run_file(oov='error')
    message = str(caught.exception)
    for i in range(10):
      self.assertIn(f"'zq{i}' (line {i + 1})", message)
    self.assertNotIn('zq10', message)
    self.assertIn('24 words', message)
    self.assertIn('--oov', message)
    self.assert_untouched()

  def test_error_is_silent_when_all_words_are_known(self):
    self.input.write_text('w1 w2. W3', encoding='utf-8')
    card = self.run_file(oov='error')
    self.assertEqual(card['tokens']['unknown']['count'], 0)
    self.assertEqual(card['guarantee']['status'], 'proved')

  def test_each_policy_changes_unknown_words_alone(self):
    text = _random_text(300)
    self.input.write_text(text, encoding='utf-8')
    vocabulary = text_stream.Vocabulary(_test_table().words)
    [batch] = text_stream.batches(io.BytesIO(text.encode()), 10_000)
    known = vocabulary.encode(batch) >= 0
    rendered = {}
    real = text_stream.Vocabulary.render
    def spy(this, batch, ids, glue):
      rendered[policy].extend(np.asarray(ids).tolist())
      return real(this, batch, ids, glue)
    for policy in ('unk', 'uniform', 'keep'):
      rendered[policy] = []
      with mock.patch.object(text_stream.Vocabulary, 'render', spy):
        card = self.run_file(oov=policy, overwrite=True)
      self.assertEqual(card['tokens']['unknown']['count'], (~known).sum())
      self.assertEqual(card['guarantee']['status'],
                       'none' if policy == 'keep' else 'proved')
    ids = {policy: np.array(x) for policy, x in rendered.items()}
    for policy in ('unk', 'keep'):
      np.testing.assert_array_equal(ids[policy][known], ids['uniform'][known])
    self.assertEqual(set(ids['unk'][~known]), {_NUM_WORDS})
    self.assertEqual(set(ids['keep'][~known]), {-1})
    self.assertGreater(len(set(ids['uniform'][~known])), 5)

  def test_unk_and_keep_are_written_so(self):
    self.input.write_text('Straße, w1 Qq', encoding='utf-8')
    self.assertRegex(self.reference(oov='unk').decode(),
                     '^<unk><unk> .+ <unk>$')
    self.assertRegex(self.reference(oov='keep').decode(), '^Straße, .+ Qq$')

  def test_uniform_words_are_uniform_and_drawn_by_the_key(self):
    num, words = 8_000, _test_table().words
    def counts(word, seed):
      self.input.write_text(f'{word}\n' * num, encoding='utf-8')
      output = self.reference(batch_size=1024, insecure_seed=seed)
      ids = [words.index(w) for w in output.decode().split('\n') if w]
      return ids, np.bincount(ids, minlength=_NUM_WORDS)
    ids, uniform = counts('zzz', 0)
    self.assertEqual(ids, counts('yyy', 0)[0])
    self.assertNotEqual(ids, counts('zzz', 1)[0])
    # False alarm at 1e-3; the law of a known word must not pass for uniform.
    self.assertGreater(stats.chisquare(uniform).pvalue, 1e-3)
    self.assertLess(stats.chisquare(counts('w1', 0)[1]).pvalue, 1e-3)


class CardTest(FileTest):

  def test_its_numbers_are_those_of_the_text_and_the_table(self):
    self.input.write_text('w1 w2 zz\nw3 w4. w5\n\nw1', encoding='utf-8')
    card = self.run_file(releases=2, insecure_seed=None)
    self.assertEqual(card,
                     json.loads(pathlib.Path(self.files.card).read_text()))
    self.assertEqual(card['mechanism'], 'santext')
    self.assertEqual(card['tokens']['total'], 8)
    self.assertEqual(card['tokens']['protected'], 7)
    self.assertEqual(card['releases'], 2)
    table = _test_table()
    self.assertEqual(card['table']['sha256'], embeddings.digest(table))
    self.assertEqual(card['table']['name'], 'table.npz')
    x = table.vectors.astype(np.float64)
    distance = np.sqrt(((x[:, None] - x[None])**2).sum(-1))
    off = distance[~np.eye(_NUM_WORDS, dtype=bool)].reshape(_NUM_WORDS, -1)
    words = card['table_words']
    self.assertAlmostEqual(words['median_neighbor_distance'],
                           np.median(off.min(axis=1)), places=6)
    self.assertAlmostEqual(words['p95_pair_distance'],
                           np.quantile(off, 0.95), places=6)
    # A bound, at least the diameter and at most twice it.
    self.assertBetween(words['diameter'], off.max(), 2 * off.max())
    bound = card['text_bound']['longest_line']
    self.assertEqual(bound['words'], 4)
    self.assertAlmostEqual(bound['epsilon'], 3. * 4 * words['diameter'])
    self.assertEqual(card['measured']['unchanged_q50'], 'not measured')
    self.assertIn('white space', card['public'])
    self.assertIn('128 bits', card['randomness']['entropy'])
    self.assertIn('out.txt.resume', card['randomness']['key_during_the_run'])
    self.assertIn('deleted', card['randomness']['key_during_the_run'])
    self.assertIn('w', pathlib.Path(self.files.card_text).read_text())

  def test_it_names_an_insecure_seed_and_what_was_declared(self):
    self.input.write_text('w1', encoding='utf-8')
    card = self.run_file()
    self.assertIn('insecure', card['randomness']['entropy'])
    self.assertEqual(card['table']['trained_on_public_data'], 'unknown')
    card = self.run_file(declare_public_table=True, overwrite=True)
    self.assertEqual(card['table']['trained_on_public_data'], 'declared')

  def test_settings_reach_the_mechanism_and_the_card(self):
    self.input.write_text('w1', encoding='utf-8')
    card = self.run_file(mechanism='truncated_gumbel', epsilon=60.,
                         settings=(('noise', 'clipped'),))
    self.assertEqual(card['settings'], {'noise': 'clipped'})
    self.assertIn('clipped', card['guarantee']['source'])
    self.assertEqual(card['guarantee']['status'], 'claimed')


class RefusalTest(FileTest):

  def setUp(self):
    super().setUp()
    self.input.write_text('w1 w2', encoding='utf-8')

  @parameterized.parameters(
      ({'mechanism': 'rot13'}, 'rot13.*truncated_gumbel'),
      ({'epsilon': -1.}, 'epsilon=-1.0'),
      ({'oov': 'drop'}, "oov='drop'.*uniform"),
      ({'insecure_seed': 2**40 + 7}, f'insecure_seed={2**40 + 7}'),
      ({'insecure_seed': -1}, 'insecure_seed=-1'),
      ({'insecure_seed': 2**32}, 'insecure_seed'),
      ({'insecure_seed': True}, 'insecure_seed'),
      ({'releases': 0}, 'releases=0'),
      ({'settings': (('nose', 1),)}, "'nose' is unknown to santext"),
      ({'mechanism': 'tem', 'settings': (('beta', [1]),)}, 'beta'),
      ({'table': '/nonexistent/table'}, 'table=.*cannot be read'),
      ({'input': '/nonexistent/in'}, 'input=.*cannot be read'),
      ({'input': '/'}, 'not a regular file'),
      ({'input': '/dev/null'}, 'not a regular file'),
      ({'output': '/nonexistent/dir/out'}, 'no directory'),
      ({'output': '/'}, 'is a directory'),
      ({'output': '/tmp/' + 'o' * 240}, "output='.*name too long"),
      ({'settings': (('beta', .1), ('beta', .2)), 'mechanism': 'tem'},
       "'beta' is given twice"),
      ({'mechanism': 'tem', 'settings': (('beta', 'x'),)}, "beta='x'"),
      ({'mechanism': 'truncated_gumbel', 'epsilon': 60.,
        'settings': (('max_candidates', True),)}, 'max_candidates=True'),
      ({'mechanism': 'truncated_gumbel', 'epsilon': 60.,
        'settings': (('geometry', 1),)}, "'geometry' is unknown.*'noise'"),
      ({'settings': 3}, 'settings=3'), ({'settings': ('ab',)}, 'settings='),
      ({'input': None}, 'input=None'), ({'input': 0}, 'input=0'),
      ({'output': 3}, 'output=3'), ({'output': 'a\0b'}, 'output='),
      ({'table': None}, 'table=None'), ({'overwrite': 'no'}, "overwrite='no'"),
      ({'declare_public_table': 1}, 'declare_public_table=1'),
      ({'mechanism': None}, 'mechanism=None'), ({'epsilon': '3'}, 'epsilon='),
      ({'batch_size': 0}, 'batch_size=0'), ({'batch_size': -5}, 'batch_size'),
      ({'batch_size': 1.5}, 'batch_size=1.5'),
      ({'batch_size': 'x'}, "batch_size='x'"),
      ({'batch_size': True}, 'batch_size=True'),
      ({'batch_size': 2**22 + 1}, f'batch_size={2**22 + 1}'))
  def test_bad_settings_are_refused_and_nothing_is_written(self, fields, part):
    with self.assertRaisesRegex(ValueError, part):
      self.run_file(**fields)
    self.assert_untouched()

  def test_a_directory_that_cannot_be_written_is_refused_before_the_scan(self):
    # Root may write anywhere, so the file mode would not do.
    with mock.patch.object(os, 'access', return_value=False), mock.patch.object(
        text_stream, 'scan', side_effect=AssertionError):
      with self.assertRaisesRegex(ValueError, 'output=.*cannot be written'):
        self.run_file()
    self.assert_untouched()

  def test_a_table_that_holds_what_unk_writes_is_refused(self):
    table = embeddings.make_table(['w1', '<unk>'], [[0.], [1.]])
    embeddings.save(table, self.table)
    with self.assertRaisesRegex(ValueError, "table=.*'<unk>'"):
      self.run_file(oov='unk')
    self.assert_untouched()

  @parameterized.parameters(('Paris', True), ('Rome', False))
  def test_unknown_words_that_the_table_capitalises_are_explained(
      self, word, explained):
    self.input.write_text('w1 paris', encoding='utf-8')
    embeddings.save(embeddings.make_table(['w1', word], [[0.], [1.]]),
                    self.table)
    with self.assertRaises(ValueError) as caught:
      self.run_file(oov='error')
    self.assertIn("'paris' (line 1)", str(caught.exception))
    self.assertEqual(
        "lower-cased, and the table holds 'Paris'" in str(caught.exception),
        explained)

  @parameterized.parameters(0, 2**32 - 1)
  def test_the_ends_of_the_seeds_are_accepted(self, seed):
    self.run_file(insecure_seed=seed)

  def test_an_output_that_exists_is_kept_without_overwrite(self):
    self.output.write_bytes(b'mine')
    with self.assertRaisesRegex(ValueError, '--overwrite'):
      self.run_file()
    self.assertEqual(self.output.read_bytes(), b'mine')
    self.run_file(overwrite=True)
    self.assertNotEqual(self.output.read_bytes(), b'mine')

  @parameterized.parameters('same', 'symlink', 'hardlink', 'partial', 'card',
                            'table')
  def test_no_file_that_is_read_is_written(self, how):
    before = self.input.read_bytes()
    fields = {'overwrite': True}
    if how == 'same':
      fields['output'] = str(self.input)
    elif how == 'symlink':
      self.output.symlink_to(self.input)
    elif how == 'hardlink':
      os.link(self.input, self.output)
    elif how == 'partial':
      os.link(self.input, self.files.partial)
    elif how == 'card':
      pathlib.Path(self.files.card).symlink_to(self.input)
    else:
      fields['output'] = self.table
    with self.assertRaisesRegex(ValueError, 'is the same file'):
      self.run_file(**fields)
    self.assertEqual(self.input.read_bytes(), before)

  def test_a_text_that_is_not_utf8_leaves_nothing(self):
    self.input.write_bytes(b'w1 ' * 5000 + b'\xff')
    with self.assertRaisesRegex(ValueError, 'byte 15000'):
      self.run_file()
    self.assert_untouched()

  def test_a_text_that_changes_meanwhile_is_refused_and_discarded(self):
    self.input.write_text('w1 ' * 200, encoding='utf-8')
    real = text_checkpoint.Job.append
    def append(job, text, state):
      os.utime(self.input, ns=(1, 1))
      real(job, text, state)
    with mock.patch.object(text_checkpoint.Job, 'append', append):
      with self.assertRaisesRegex(ValueError, 'changed'):
        self.run_file()
    self.assertNotIn('out.txt.resume', os.listdir(self.folder))
    self.assertFalse(self.output.exists())
    self.assertFalse(os.path.exists(self.files.partial))

  def test_another_run_of_the_same_output_is_refused(self):
    record = {'state': text_checkpoint.State()._asdict()}
    with text_checkpoint.Job(self.files, record, resumed=False):
      with self.assertRaisesRegex(ValueError, 'another run'):
        self.run_file()
    self.assertFalse(self.output.exists())


class Killed(BaseException):
  """What a process that is no more does not catch."""


@contextlib.contextmanager
def _killed_at(operation):
  """Kills at the n-th file operation; after it none happens any more.

  Yields a list that gets an entry for each operation that did happen.
  """
  done = []
  def guard(real, name):
    def call(*args, **kwargs):
      if len(done) >= operation:
        raise Killed
      done.append(name)
      return real(*args, **kwargs)
    return call
  with contextlib.ExitStack() as stack:
    for name in ('write', 'fsync', 'replace', 'unlink', 'ftruncate'):
      stack.enter_context(mock.patch.object(
          os, name, guard(getattr(os, name), name)))
    yield done


@contextlib.contextmanager
def _fails_after(num_batches, error):
  """Raises in place of writing batch `num_batches`; counts what was written."""
  real, written = text_checkpoint.Job.append, []
  def append(job, text, state):
    if len(written) == num_batches:
      raise error
    written.append(text)
    real(job, text, state)
  with mock.patch.object(text_checkpoint.Job, 'append', append):
    yield written


@contextlib.contextmanager
def _counted():
  """Counts what a run does; yields a dict."""
  counts = {'calibrated': 0, 'scanned': 0, 'starts': []}
  real_get, real_scan = mechanisms.get, text_stream.scan
  def get(name):
    mech = real_get(name)
    def calibrate(table, *, epsilon, **settings):
      counts['calibrated'] += 1
      return mech.calibrate(table, epsilon=epsilon, **settings)
    def privatize(key, ids, params, start=0):
      counts['starts'].append(start)
      return mech.privatize(key, ids, params, start=start)
    return mech._replace(calibrate=calibrate, privatize=privatize)
  def scan(*args, **kwargs):
    counts['scanned'] += 1
    return real_scan(*args, **kwargs)
  with mock.patch.object(mechanisms, 'get', get):
    with mock.patch.object(text_stream, 'scan', scan):
      yield counts


class ResumeTest(FileTest):

  @parameterized.parameters(False, True)
  def test_a_kill_at_any_file_operation_loses_nothing(self, overwrite):
    self.input.write_text(_random_text(45), encoding='utf-8')
    expected = self.reference()
    operation = 0
    while True:
      for path in self.folder.glob('out.txt*'):
        path.unlink()
      if overwrite:
        self.run_file(insecure_seed=9)
        old = self.output.read_bytes()
        self.assertNotEqual(old, expected)
        old_card = pathlib.Path(self.files.card).read_bytes()
      with _killed_at(operation) as done:
        with contextlib.suppress(Killed):
          self.run_file(overwrite=overwrite)
          break
      # Whatever is there is whole, and stands beside its own card.
      if self.output.exists():
        card = pathlib.Path(self.files.card).read_bytes()
        if overwrite and self.output.read_bytes() == old:
          self.assertEqual(card, old_card)
        else:
          self.assertEqual(self.output.read_bytes(), expected)
          self.assertEqual(json.loads(card)['mechanism'], 'santext')
      # An output without a record is of a run that had ended.
      ended = self.output.exists() and not os.path.exists(self.files.resume)
      if overwrite or not ended:
        self.run_file(overwrite=overwrite)
      self.assertEqual(self.output.read_bytes(), expected)
      self.assert_clean()
      operation += 1
    self.assertGreater(operation, 20)
    self.assertEqual(len(done), operation)

  @parameterized.parameters(*_EPSILONS)
  def test_every_mechanism_goes_on_where_it_stopped(self, name):
    self.input.write_text(_random_text(200), encoding='utf-8')
    fields = {'mechanism': name, 'epsilon': _EPSILONS[name]}
    expected = self.reference(**fields)
    with _fails_after(6, RuntimeError('broken')):
      with self.assertRaisesRegex(RuntimeError, 'broken'):
        self.run_file(**fields)
    self.assertFalse(self.output.exists())
    with _counted() as counts:
      self.run_file(**fields)
    self.assertEqual(self.output.read_bytes(), expected)
    # Neither calibration nor the first pass, and only the words still missing.
    self.assertEqual((counts['calibrated'], counts['scanned']), (0, 0))
    self.assertEqual(counts['starts'][:2], [6 * 32, 7 * 32])
    self.assert_clean()

  def test_a_run_from_entropy_goes_on_with_its_own_key(self):
    self.input.write_text('zz ' * 3000, encoding='utf-8')
    with _fails_after(40, Killed()):
      with self.assertRaises(Killed):
        self.run_file(insecure_seed=None)
    key = json.loads(pathlib.Path(self.files.resume).read_text())['key']
    self.assertEqual((key['impl'], len(key['data'])), ('threefry4x32', 4))
    written = pathlib.Path(self.files.partial).read_bytes()
    self.run_file(insecure_seed=None)
    self.assertStartsWith(self.output.read_bytes(), written)
    self.assertLen(self.output.read_text().split(), 3000)
    with mock.patch.object(privatize_text, '_key',
                           lambda _: text_checkpoint.key_from_json(key)):
      self.assertEqual(self.output.read_bytes(),
                       self.reference(insecure_seed=None))

  @parameterized.parameters(
      KeyboardInterrupt(), OSError(errno.ENOSPC, 'No space left on device'))
  def test_a_stop_keeps_all_that_was_written(self, error):
    self.input.write_text(_random_text(200), encoding='utf-8')
    expected = self.reference()
    # Nothing is due for a save but the stop itself.
    with _fails_after(5, error), self.assertRaises(type(error)):
      privatize_text.privatize_file(self.config(), batch_size=32,
                                    checkpoint_seconds=1e9)
    state = json.loads(pathlib.Path(self.files.resume).read_text())['state']
    self.assertEqual(state['num_words'], 5 * 32)
    self.assertFalse(self.output.exists())
    self.run_file()
    self.assertEqual(self.output.read_bytes(), expected)

  def test_a_disk_that_fills_in_mid_batch_is_survived(self):
    self.input.write_text(_random_text(200), encoding='utf-8')
    expected = self.reference()
    real, room = os.write, [500]
    def write(handle, data):
      if not room[0]:
        raise OSError(errno.ENOSPC, 'No space left on device')
      size = min(len(data), room[0])
      room[0] -= size
      return real(handle, data[:size])
    with mock.patch.object(os, 'write', write), self.assertRaises(OSError):
      self.run_file()
    self.assertFalse(self.output.exists())
    self.assertEqual(os.path.getsize(self.files.partial), 500)
    self.run_file()
    self.assertEqual(self.output.read_bytes(), expected)

  def test_the_key_is_for_the_owner_alone_and_gone_at_the_end(self):
    self.input.write_text(_random_text(100), encoding='utf-8')
    modes = set()
    real = os.fsync
    def fsync(handle):
      for path in self.folder.glob('out.txt.resume*'):
        if 'npz' not in path.name:
          modes.add((path.name, path.stat().st_mode & 0o777))
      real(handle)
    old = os.umask(0)
    try:
      with mock.patch.object(os, 'fsync', fsync):
        self.run_file()
    finally:
      os.umask(old)
    self.assertEqual(modes, {('out.txt.resume', 0o600),
                             ('out.txt.resume.tmp', 0o600)})
    self.assert_clean()

  @parameterized.parameters(
      ({'epsilon': 2.}, r'epsilon \(was 3.0, is 2.0\)'),
      ({'mechanism': 'tem'}, 'mechanism'), ({'oov': 'unk'}, 'oov'),
      ({'insecure_seed': None}, 'insecure_seed'), ({'releases': 3}, 'releases'),
      ('input', 'input'), ('table', 'table'))
  def test_a_record_of_another_run_is_refused_and_kept(self, change, part):
    self.input.write_text(_random_text(100), encoding='utf-8')
    with _fails_after(2, Killed()), self.assertRaises(Killed):
      self.run_file()
    before = pathlib.Path(self.files.resume).read_bytes()
    fields = change if isinstance(change, dict) else {}
    if change == 'input':
      self.input.write_text(_random_text(100, seed=1), encoding='utf-8')
    elif change == 'table':
      embeddings.save(embeddings.normalize(_test_table()), self.table)
    with self.assertRaisesRegex(ValueError, f'another run: {part}.*delete'):
      self.run_file(**fields)
    self.assertEqual(pathlib.Path(self.files.resume).read_bytes(), before)
    os.unlink(self.files.resume)
    os.unlink(self.files.partial)
    self.run_file(**fields)
    self.assert_clean()

  @parameterized.parameters('missing', 'short', 'torn')
  def test_damaged_files_are_refused_with_a_way_out(self, how):
    self.input.write_text(_random_text(100), encoding='utf-8')
    with _fails_after(2, Killed()), self.assertRaises(Killed):
      self.run_file()
    if how == 'missing':
      os.unlink(self.files.partial)
    elif how == 'short':
      os.truncate(self.files.partial, 3)
    else:
      os.truncate(self.files.resume, 30)
    with self.assertRaisesRegex(ValueError, 'delete|damaged'):
      self.run_file()
    self.assertFalse(self.output.exists())

  @parameterized.parameters(True, False)
  def test_lost_calibration_is_made_again_and_damaged_refused(self, lost):
    self.input.write_text(_random_text(100), encoding='utf-8')
    expected = self.reference()
    with _fails_after(2, Killed()), self.assertRaises(Killed):
      self.run_file()
    if not lost:
      os.truncate(self.files.params, 30)
      with self.assertRaisesRegex(ValueError, 'damaged; delete it'):
        self.run_file()
    os.unlink(self.files.params)
    self.run_file()
    self.assertEqual(self.output.read_bytes(), expected)

  @parameterized.parameters(*_EPSILONS)
  def test_params_come_back_as_they_were(self, name):
    params = mechanisms.get(name).calibrate(
        _test_table(), epsilon=_EPSILONS[name])
    path = str(self.folder / 'params.npz')
    text_checkpoint.save_params(path, params)
    back = text_checkpoint.load_params(path)
    self.assertIs(type(back), type(params))
    self.assertEqual(back.guarantee, params.guarantee)
    for field in set(params._fields) - {'guarantee'}:
      old, new = getattr(params, field), getattr(back, field)
      np.testing.assert_array_equal(old, new)
      self.assertEqual(np.asarray(old).dtype, new.dtype)


def _command(config, *extra):
  given = [f'--{f.name}={getattr(config, f.name)}'
           for f in dataclasses.fields(config)
           if f.name != 'settings' and getattr(config, f.name) is not None]
  return [sys.executable, '-m', 'experiments.privatize_text', *given, *extra]


class ProcessTest(FileTest):
  """The binary itself, as the operating system sees it."""

  def _kill_when(self, size, config, signum=signal.SIGKILL):
    """Runs the binary until its partial output has `size` bytes."""
    process = subprocess.Popen(_command(config, '--batch_size=256'), cwd=_ROOT,
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
      with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(self.files.partial) >= size:
          break
      time.sleep(0.002)
    process.send_signal(signum)
    message = process.communicate(timeout=240)[1]
    return process.returncode, message

  def _killed_and_finished(self, fractions, **fields):
    self.input.write_text(_random_text(40_000), encoding='utf-8')
    config = self.config(**fields)
    expected = self.reference(batch_size=256, **fields)
    for fraction in fractions:
      code, message = self._kill_when(int(fraction * len(expected)), config)
      self.assertEqual(code, -signal.SIGKILL, message)
      self.assertFalse(self.output.exists())
    subprocess.run(_command(config), cwd=_ROOT, check=True,
                   stderr=subprocess.PIPE, timeout=240)
    self.assertEqual(self.output.read_bytes(), expected)
    self.assert_clean()

  @parameterized.parameters(*_EPSILONS)
  @pytest.mark.slow
  def test_real_kills_at_random_places_do_not_show(self, name):
    places = sorted(random.Random(name).uniform(0.05, 0.9) for _ in range(2))
    self._killed_and_finished(places, mechanism=name, epsilon=_EPSILONS[name])

  def test_a_real_kill_does_not_show(self):
    self._killed_and_finished([0.3], mechanism='truncated_gumbel', epsilon=60.)

  @pytest.mark.slow
  def test_sigterm_saves_and_says_how_to_go_on(self):
    self.input.write_text(_random_text(40_000), encoding='utf-8')
    code, message = self._kill_when(10_000, self.config(), signal.SIGTERM)
    self.assertEqual(code, 1)
    self.assertIn('the same command goes on', message)
    self.assertNotIn('Traceback', message)
    self.assertTrue(os.path.exists(self.files.resume))

  @parameterized.parameters(({'oov': 'error'}, "'zz' (line 1)"),
                            ({'mechanism': 'truncated_gumbel'}, 'epsilon=3.0'))
  def test_a_refusal_is_one_line_and_exit_status_one(self, fields, part):
    self.input.write_text('w1 zz', encoding='utf-8')
    done = subprocess.run(_command(self.config(**fields)), cwd=_ROOT,
                          capture_output=True, text=True, check=False,
                          timeout=240)
    self.assertEqual(done.returncode, 1)
    self.assertNotIn('Traceback', done.stderr)
    [line] = [line for line in done.stderr.splitlines()
              if line.startswith('privatize_text:')]
    self.assertIn(part, line)
    self.assertEmpty(done.stdout)
    self.assert_untouched()

  @pytest.mark.slow
  def test_one_line_of_100_mb_takes_less_than_a_gibibyte(self):
    block = ' '.join(f'w{i % 38}' for i in range(100_000))
    with open(self.input, 'w', encoding='utf-8') as file:
      for _ in range(10**8 // len(block) + 1):
        file.write(block + ' ')
    command = _command(self.config(mechanism='truncated_gumbel', epsilon=60.))
    script = ('import resource, subprocess, sys; '
              'subprocess.run(sys.argv[1:], check=True); '
              'print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)')
    done = subprocess.run([sys.executable, '-c', script, *command], cwd=_ROOT,
                          stdout=subprocess.PIPE, text=True, check=True)
    self.assertLess(int(done.stdout), 2**20)  # KiB
    # Each of the words leaves at least one character and its space.
    num_words = 100_000 * (10**8 // len(block) + 1)
    self.assertGreaterEqual(self.output.stat().st_size, 2 * num_words)


class SettingTest(parameterized.TestCase):

  @parameterized.parameters(
      ('tem', 0, 2**10), ('tem', 5000, 2**13), ('tem', 10**6, 2**17),
      ('tem', 3 * 10**6, 2**18), ('santext', 10**8, 2**19),
      ('truncated_gumbel', 1025, 2**11), ('truncated_gumbel', 10**8, 2**16))
  def test_batches_fit_the_text_and_the_mechanism(self, name, words, size):
    config = privatize_text.Config(input='', output='', mechanism=name,
                                   epsilon=1.)
    self.assertEqual(privatize_text._batch_size(config, words), size)

  @parameterized.parameters(('beta=0.1', ('beta', 0.1)),
                            ('noise=clipped', ('noise', 'clipped')))
  def test_a_setting_is_a_number_or_a_word(self, text, expected):
    self.assertEqual(privatize_text.parse_setting(text), expected)

  def test_a_setting_without_a_value_is_refused(self):
    with self.assertRaisesRegex(ValueError, "setting='beta'"):
      privatize_text.parse_setting('beta')
