"""Mechanisms that draw from lists: SanText+, CusText, Vickrey and syntax."""

import functools
import math
import pathlib

from absl.testing import parameterized
import jax
import numpy as np
import pytest
import scipy.stats

from experiments import privatize_text
from experiments import text_checkpoint
from experiments.datasets import embedded
from jaxdp import deniability
from jaxdp import embeddings
from jaxdp import mechanisms
from jaxdp import samplers
from jaxdp.auditing import exact
from jaxdp.mechanisms import comparable
from jaxdp.mechanisms import custext

_FALSE_ALARM = 1e-3
_NUM = 2_000  # draws of the tests that look at each draw
_CLASSES = np.arange(12) % 3
# On the table of 12 words in 3 dimensions.
_CASES = {
    'santext': ({'sensitive': 0.5}, 4.),
    'custext': ({'group_size': 5, 'stop_words': 1}, 4.),
    'vickrey': ({'tuning': 0.5}, 4.),
    'syntax': ({'classes': _CLASSES, 'num_candidates': 4}, 4.)}
_LINE_CASES = (
    ('vickrey', {'tuning': 0.5}), ('vickrey', {'tuning': 0.9}),
    ('syntax', {'classes': [0, 1, 0, 1, 0], 'num_candidates': 2}))


@functools.lru_cache
def _table(num_words=12, dim=3, seed=0):
  vectors = np.random.default_rng(seed).normal(size=(num_words, dim))
  return embeddings.EmbeddingTable(
      tuple(f'w{i}' for i in range(num_words)), vectors.astype(np.float32))


def _line():
  return embeddings.EmbeddingTable(
      ('a', 'b', 'c', 'd', 'e'),
      np.float32([[0.], [1.], [1.7], [3.], [7.]]))


def _calibrated(name):
  settings, epsilon = _CASES[name]
  mech = mechanisms.get(name)
  return mech, mech.calibrate(_table(), epsilon=epsilon, **settings)


def _chi_square(counts, law):
  """P-value of counts against a law; cells expecting under 10 are pooled."""
  expected = law * counts.sum()
  rare = expected < 10
  observed = np.append(counts[~rare], counts[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  if expected[-1] < 1e-6:
    if observed[-1]:
      return 0.
    observed, expected = observed[:-1], expected[:-1]
  return scipy.stats.chisquare(observed, expected).pvalue


class LawTest(parameterized.TestCase):

  @parameterized.parameters(('santext', (0, 9)), ('custext', (3, 8)))
  def test_a_million_draws_match_log_prob_and_reject_another_epsilon(
      self, name, words):
    mech, params = _calibrated(name)
    wrong = params._replace(rate=np.float32(params.rate / 1.05))
    self._matches(mech, params, wrong, words)

  def test_on_a_line_draws_match_the_integrated_law(self):
    self._matches_on_a_line(*_LINE_CASES[0], (1,))

  @pytest.mark.slow
  def test_on_a_line_a_million_draws_match_every_integrated_law(self):
    for case in _LINE_CASES:
      self._matches_on_a_line(*case, (1, 3))

  def _matches_on_a_line(self, name, settings, words):
    mech = mechanisms.get(name)
    params = mech.calibrate(_line(), epsilon=1., **settings)
    wrong = params._replace(epsilon=np.float32(params.epsilon / 1.05))
    self._matches(mech, params, wrong, words)

  def _matches(self, mech, params, wrong, words):
    num = params.vectors.shape[0]
    for word in words:
      out = mech.privatize(jax.random.key(word),
                           np.full(500_000, word, np.int32), params)
      counts = np.bincount(np.asarray(out), minlength=num)
      law = np.exp(mech.log_prob(np.array([word]), params))[0]
      np.testing.assert_allclose(law.sum(), 1, atol=1e-10)
      self.assertLess(law.max(), 0.9)
      self.assertGreater(_chi_square(counts, law), _FALSE_ALARM)
      other = np.exp(mech.log_prob(np.array([word]), wrong))[0]
      self.assertLess(_chi_square(counts, other), _FALSE_ALARM)

  def test_santext_plus_is_the_law_of_the_paper(self):
    mech, params = _calibrated('santext')
    x = _table().vectors.astype(np.float64)
    for word in (0, 9):
      weights = np.exp(-2. * np.linalg.norm(x[word] - x[6:], axis=1))
      law = np.append(np.zeros(6), weights / weights.sum())
      if word < 6:
        law = 0.2 * law + 0.8 * (np.arange(12) == word)
      np.testing.assert_allclose(
          np.exp(mech.log_prob(np.array([word]), params))[0], law, rtol=1e-12)

  def test_santext_with_every_word_sensitive_has_the_plain_law(self):
    mech, ids = mechanisms.get('santext'), np.arange(12)
    plus = mech.calibrate(_table(), epsilon=4., sensitive=np.ones(12, bool))
    plain = mech.calibrate(_table(), epsilon=4.)
    np.testing.assert_allclose(mech.log_prob(ids, plus),
                               mech.log_prob(ids, plain), rtol=1e-12)
    np.testing.assert_array_equal(mech.distances(ids, plus),
                                  mech.distances(ids, plain))

  def test_a_word_far_from_all_sensitive_ones_still_draws_the_nearest(self):
    # Every weight of its row is below the least float64.
    mech = mechanisms.get('santext')
    params = mech.calibrate(_table(), epsilon=2e4, sensitive=0.5,
                            keep_probability=0.)
    ids = np.arange(6, dtype=np.int32)
    distance = np.linalg.norm(
        _table().vectors[:6, None] - _table().vectors[None, 6:], axis=-1)
    np.testing.assert_array_equal(
        mech.privatize(jax.random.key(0), ids, params),
        6 + distance.argmin(axis=1))

  def test_custext_is_the_law_of_the_paper(self):
    mech, params = _calibrated('custext')
    x = _table().vectors.astype(np.float64)
    group = np.flatnonzero(params.classes == params.classes[3])
    distance = np.linalg.norm(x[3] - x[group], axis=1)
    score = 1 - (distance - distance.min()) / (distance.max() - distance.min())
    law = np.zeros(12)
    law[group] = np.exp(4. * score / 2) / np.exp(4. * score / 2).sum()
    np.testing.assert_allclose(
        np.exp(mech.log_prob(np.array([3]), params))[0], law, rtol=1e-12)

  def test_integer_thresholds_hold_the_law(self):
    _, params = _calibrated('custext')
    cut = params.thresholds.astype(np.float64) @ [2.**-32, 2.**-64]
    law = np.diff(cut, axis=1, prepend=0., append=1.)
    log_prob = mechanisms.get('custext').log_prob(np.arange(12), params)
    for word in range(12):
      members = params.members[params.classes[word]]
      drawn = np.zeros(12)
      np.add.at(drawn, members, law[word])
      np.testing.assert_allclose(drawn, np.exp(log_prob[word]), atol=1e-15)

  def test_deniability_copes_with_words_that_never_come_out(self):
    mech, params = _calibrated('custext')
    rows = deniability.exact(mech, np.array([0, 3]), params, 10)
    self.assertEqual((rows.unchanged[0], rows.support[0]), (1., 0.1))
    self.assertBetween(rows.support[1], 0.11, 0.6)

  @parameterized.parameters('vickrey', 'syntax')
  def test_no_log_prob_where_none_is_known(self, name):
    mech, params = _calibrated(name)
    with self.assertRaisesRegex(ValueError, 'deniability.measure'):
      mech.log_prob(np.array([0]), params)


class DrawTest(parameterized.TestCase):
  """Each draw against NumPy, given the noise."""

  def setUp(self):
    super().setUp()
    self.ids = np.random.default_rng(2).integers(0, 12, _NUM).astype(np.int32)
    self.key = jax.random.key(3)
    keys = samplers.element_keys(self.key, samplers.VECTOR_NOISE, 0, _NUM)
    noise = jax.vmap(lambda k: samplers.multivariate_laplace(
        k, (3,), epsilon=4.))(keys)
    x = _table().vectors
    noisy = (x[self.ids] + np.asarray(noise)).astype(np.float64)
    self.distance = np.linalg.norm(noisy[:, None] - x[None], axis=-1)
    self.order = np.argsort(self.distance, axis=1)

  def test_vickrey_takes_the_second_at_the_odds_of_the_paper(self):
    coins = samplers.element_keys(self.key, samplers.OUTCOME, 0, _NUM)
    u = np.asarray(jax.vmap(jax.random.uniform)(coins), np.float64)
    a, b = np.take_along_axis(self.distance, self.order[:, :2], axis=1).T
    mech = mechanisms.get('vickrey')
    for t in (0., 0.3, 0.9, 1.):
      params = mech.calibrate(_table(), epsilon=4., tuning=t)
      out = np.asarray(mech.privatize(self.key, self.ids, params))
      first = (1 - t) * b / (t * a + (1 - t) * b)
      squared = (1 - t) * b**2 / (t * a**2 + (1 - t) * b**2)
      # float32 noise and u: a margin of 1e-5 is a hundred roundings.
      sure = (np.abs(u - first) > 1e-5) & (b - a > 1e-5)
      self.assertGreater(sure.mean(), 0.99)
      expected = self.order[np.arange(_NUM), np.where(u < first, 0, 1)]
      np.testing.assert_array_equal(out[sure], expected[sure])
      self.assertTrue(np.any(out == self.ids))  # the input may come out
      self.assertTrue(np.any(out != self.ids))
      if 0 < t < 1:
        self.assertGreater(np.mean((u < first) != (u < squared)), 0.05)

  def test_syntax_takes_the_nearest_candidate_of_the_input_class(self):
    mech, params = _calibrated('syntax')
    out = np.asarray(mech.privatize(self.key, self.ids, params))
    own = _CLASSES[self.ids]
    match = _CLASSES[self.order[:, :4]] == own[:, None]
    expected = self.order[np.arange(_NUM), match.argmax(axis=1)]
    ranked = np.sort(self.distance, axis=1)
    sure = np.diff(ranked[:, :5], axis=1).min(axis=1) > 1e-5
    self.assertGreater(sure.mean(), 0.99)
    np.testing.assert_array_equal(out[sure], expected[sure])
    self.assertGreater(np.mean(match.argmax(axis=1) > 0), 0.05)
    self.assertGreater(np.mean(~match.any(axis=1)), 0.001)

  def test_batches_of_custext_do_not_show(self):
    self._batches_do_not_show('custext', (7,))

  @pytest.mark.slow
  def test_batches_and_single_words_of_none_show(self):
    for name in _CASES:
      self._batches_do_not_show(name, (1, 7))

  def _batches_do_not_show(self, name, sizes):
    mech, params = _calibrated(name)
    whole = np.asarray(mech.privatize(self.key, self.ids, params))
    self.assertTrue(np.any(whole != self.ids))
    for size in sizes:
      starts = range(0, 20 * size, size)
      parts = [mech.privatize(self.key, self.ids[i:i + size], params, start=i)
               for i in starts]
      last = starts[-1] + size
      np.testing.assert_array_equal(np.concatenate(parts), whole[:last])

  @parameterized.parameters(*_CASES)
  def test_it_may_be_traced_in_any_shape_and_on_nothing(self, name):
    mech, params = _calibrated(name)
    ids = self.ids.reshape(20, 100)
    traced = jax.eval_shape(mech.privatize, self.key, ids, params)
    self.assertEqual((traced.shape, traced.dtype), ((20, 100), np.int32))
    empty = mech.privatize(self.key, np.zeros((0,), np.int32), params)
    self.assertEqual(empty.shape, (0,))


class GuaranteeTest(parameterized.TestCase):

  @parameterized.product(
      case=(('santext', {'sensitive': 0.5}),
            ('santext', {'sensitive': 0.3, 'keep_probability': 0.}),
            ('custext', {'group_size': 5}), ('custext', {'group_size': 2}),
            ('custext', {'group_size': 4, 'stop_words': 3})),
      table=((12, 3, 0), (60, 20, 2)), epsilon=(0.1, 3., 40.))
  def test_no_proved_epsilon_is_exceeded(self, case, table, epsilon):
    name, settings = case
    self._holds(name, settings, _table(*table), epsilon)

  @parameterized.product(case=_LINE_CASES, epsilon=(0.1, 1., 10.))
  def test_on_a_line_no_proved_epsilon_is_exceeded(self, case, epsilon):
    # Vickrey's quadrature is good to 1e-10: 1e-9 at the nearest pair, 0.7.
    self._holds(*case, _line(), epsilon)

  def _holds(self, name, settings, table, epsilon):
    mech = mechanisms.get(name)
    params = mech.calibrate(table, epsilon=epsilon, **settings)
    self.assertEqual(params.guarantee.status, 'proved')
    self.assertEqual(params.guarantee.epsilon, epsilon)
    ids = np.arange(len(table.words))
    measured, _ = exact.exact_metric_epsilon(
        mech.log_prob(ids, params), mech.distances(ids, params))
    self.assertLessEqual(measured, epsilon * (1 + 1e-9))
    self.assertGreater(measured, 0.3 * epsilon)

  @parameterized.parameters('santext', 'custext')
  def test_less_noise_is_caught(self, name):
    mech, params = _calibrated(name)
    loud = params._replace(rate=np.float32(params.rate * 2.5))
    ids = np.arange(12)
    measured, _ = exact.exact_metric_epsilon(
        mech.log_prob(ids, loud), mech.distances(ids, loud))
    self.assertGreater(measured, params.guarantee.epsilon)

  @parameterized.parameters('santext', 'custext')
  def test_without_the_infinite_distances_no_epsilon_would_hold(self, name):
    mech, params = _calibrated(name)
    ids = np.arange(12)
    measured, _ = exact.exact_metric_epsilon(
        mech.log_prob(ids, params), 1 - np.eye(12))
    self.assertEqual(measured, math.inf)
    self.assertIn('infinite distance', params.guarantee.relation)
    self.assertIn('promised nothing', params.guarantee.relation)

  def test_syntax_gives_the_class_away(self):
    mech = mechanisms.get('syntax')
    line = embeddings.EmbeddingTable(
        ('a', 'b', 'c', 'd'), np.float32([[0.], [1e-3], [1e-3 + 1.], [1.]]))
    params = mech.calibrate(line, epsilon=1., classes=[0, 1, 0, 1])
    ids = np.arange(4)
    log_prob = mech.log_prob(ids, params)
    measured, _ = exact.exact_metric_epsilon(
        log_prob, np.abs(np.subtract.outer(*[line.vectors[:, 0]] * 2)))
    self.assertEqual(measured, math.inf)
    self.assertIn('the class of each word, one of 2, is released',
                  params.guarantee.relation)

  def test_distances_are_the_extended_metrics(self):
    x = _table().vectors.astype(np.float64)
    plain = np.linalg.norm(x[:, None] - x[None], axis=-1)
    ids, eye = np.arange(12), np.eye(12, dtype=bool)
    mech, params = _calibrated('santext')
    both = np.logical_and.outer(ids >= 6, ids >= 6)
    np.testing.assert_allclose(mech.distances(ids, params),
                               np.where(both | eye, plain, np.inf))
    mech, params = _calibrated('syntax')
    same = np.equal.outer(_CLASSES, _CLASSES)
    np.testing.assert_allclose(mech.distances(ids, params),
                               np.where(same, plain, np.inf))
    mech, params = _calibrated('custext')
    same = np.equal.outer(params.classes, params.classes)
    np.testing.assert_array_equal(mech.distances(ids, params),
                                  np.where(same, ~eye, np.inf))
    mech, params = _calibrated('vickrey')
    np.testing.assert_allclose(mech.distances(ids, params), plain)


def _greedy(vectors, start, size):
  """The partition word by word, from the paper."""
  x = np.asarray(vectors, np.float64)
  free, groups = list(range(start, len(x))), []
  while free:
    order = sorted(free, key=lambda w: (np.sum((x[w] - x[free[0]])**2), w))
    # A word that would be left alone joins.
    group = order if len(free) == size + 1 else order[:size]
    groups.append(group)
    free = [word for word in free if word not in group]
  return groups


class PartitionTest(parameterized.TestCase):

  @parameterized.parameters(
      (60, 3, 0, 20), (61, 3, 0, 20), (41, 2, 1, 20), (12, 3, 0, 5),
      (10, 2, 7, 2), (5, 1, 0, 50), (700, 2, 10, 3))
  def test_it_is_the_greedy_one(self, num_words, dim, start, size):
    table = _table(num_words, dim, 5)
    for vectors in (table.vectors, 1e3 + table.vectors,
                    np.round(4 * table.vectors)):  # cancellation; ties
      found = custext.partition(vectors.astype(np.float64), start, size)
      self.assertEqual([group.tolist() for group in found],
                       _greedy(vectors, start, size))

  def test_params_hold_it_and_nobody_is_alone(self):
    for num_words, size, stop_words, sizes in (
        (12, 5, 1, [5, 6]), (12, 5, 0, [5, 5, 2]), (12, 11, 0, [12]),
        (12, 50, 2, [10]), (12, 2, 10, [2])):
      table = _table(num_words)
      params = custext.calibrate(table, epsilon=1., group_size=size,
                                 stop_words=stop_words)
      groups = _greedy(table.vectors, stop_words, size)
      self.assertEqual([len(group) for group in groups], sizes)
      self.assertEqual(params.classes[:stop_words].tolist(),
                       list(range(stop_words)))
      for i, group in enumerate(groups, start=stop_words):
        self.assertEqual(set(params.members[i].tolist()), set(group))
        self.assertEqual(set(params.classes[group]), {i})
      np.testing.assert_array_equal(comparable.alone(params.classes),
                                    np.arange(num_words) < stop_words)

  def test_a_real_table_is_cut_whole(self):
    table = embedded.table()
    wide = table.vectors.astype(np.float64)
    groups = custext.partition(wide, 0, 20)
    self.assertEqual({len(group) for group in groups[:-1]}, {20})
    self.assertLen(groups[-1], len(wide) % 20)
    np.testing.assert_array_equal(np.sort(np.concatenate(groups)),
                                  np.arange(len(wide)))
    free = np.ones(len(wide), bool)
    for i, group in enumerate(groups):
      if i in (0, 1, 700):
        left = np.flatnonzero(free)
        order = np.argsort(np.linalg.norm(wide[left] - wide[left[0]], axis=1))
        np.testing.assert_array_equal(group, left[order[:20]])
      free[group] = False


class TextTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.input, self.table = self.folder / 'in.txt', self.folder / 'table.npz'
    embeddings.save(_table(40, 5), self.table)
    # 3 and 2 of the first ten words, 2 and 3 of the others.
    self.input.write_text('w0 w1 w9 w10 w39\nw0 w1 w20 w21 W22',
                          encoding='utf-8')

  def _run(self, name, epsilon, **settings):
    return privatize_text.privatize_file(privatize_text.Config(
        input=str(self.input), output=str(self.folder / 'out.txt'),
        mechanism=name, epsilon=epsilon, table=str(self.table),
        insecure_seed=1, settings=tuple(settings.items())), batch_size=32)

  def test_custext_keeps_its_stop_words_and_the_card_counts_them(self):
    card = self._run('custext', 2., stop_words=10, group_size=7)
    words = [line.split() for line in (
        self.folder / 'out.txt').read_text(encoding='utf-8').split('\n')]
    self.assertEqual(words[0][:3] + words[1][:2],
                     ['w0', 'w1', 'w9', 'w0', 'w1'])
    self.assertNotEqual(words[0][3:] + words[1][2:],
                        ['w10', 'w39', 'w20', 'w21', 'w22'])
    tokens, reading = card['tokens'], card['table_words']
    self.assertEqual(tokens['protected'], 5)
    self.assertEqual(tokens['not_protected_by_the_mechanism']['count'], 5)
    self.assertEqual((reading['diameter'], reading['epsilon_times_diameter'],
                      reading['median_neighbor_distance'],
                      reading['p95_pair_distance']), (1., 2., 1., 1.))
    # 30 words in groups of 7, 7, 7, 7 and 2.
    self.assertEqual((reading['pairs'], reading['pairs_at_infinite_distance']),
                     (780, 780 - 4 * 21 - 1))
    bound = card['text_bound']
    self.assertEqual(bound['file'], {'words': 5, 'epsilon': 10., 'delta': 0.})
    self.assertEqual(bound['longest_line']['words'], 3)
    self.assertIn('with which words each word is comparable', card['public'])

  def test_santext_plus_reads_its_distances_off_sensitive_words(self):
    card = self._run('santext', 3., sensitive=0.75)
    x = _table(40, 5).vectors[10:].astype(np.float64)
    distance = np.linalg.norm(x[:, None] - x[None], axis=-1)
    off = distance[~np.eye(30, dtype=bool)]
    reading = card['table_words']
    self.assertAlmostEqual(reading['p95_pair_distance'],
                           np.quantile(off, 0.95))
    self.assertBetween(reading['diameter'], off.max(), 2 * off.max())
    self.assertEqual(reading['pairs_at_infinite_distance'], 780 - 435)
    self.assertEqual(card['tokens']['protected'], 5)
    self.assertIn('10 words of the table are not sensitive',
                  card['guarantee']['relation'])

  def test_syntax_says_that_no_flag_can_hold_classes(self):
    with self.assertRaisesRegex(ValueError, "'syntax' needs 'classes'"):
      self._run('syntax', 3.)
    self.assertFalse((self.folder / 'out.txt').exists())

  @parameterized.parameters(*_CASES)
  def test_params_come_back_as_they_were(self, name):
    _, params = _calibrated(name)
    path = str(self.folder / 'params.npz')
    text_checkpoint.save_params(path, params)
    back = text_checkpoint.load_params(path)
    self.assertIs(type(back), type(params))
    for old, new in zip(params, back):
      if old is not params.guarantee:
        np.testing.assert_array_equal(old, new)
        self.assertEqual(np.asarray(old).dtype, new.dtype)


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      ('santext', {'sensitive': 0.}, 'sensitive=0.0 must lie in'),
      ('santext', {'sensitive': 1.}, 'plain SanText'),
      ('santext', {'sensitive': True}, 'sensitive=True'),
      ('santext', {'sensitive': 'rare'}, "sensitive='rare'"),
      ('santext', {'sensitive': np.arange(12)}, 'bool array'),
      ('santext', {'sensitive': np.ones(11, bool)}, r'shape \(12,\)'),
      ('santext', {'sensitive': 0.01}, 'covers 1 of 12'),
      ('santext', {'sensitive': np.zeros(12, bool)}, 'covers 0 of 12'),
      ('santext', {'sensitive': 0.5, 'keep_probability': 1.1},
       'keep_probability=1.1'),
      ('santext', {'keep_probability': 0.5}, 'without sensitive'),
      ('custext', {'group_size': 1}, 'group_size=1'),
      ('custext', {'group_size': 2.5}, 'group_size=2.5'),
      ('custext', {'group_size': True}, 'group_size=True'),
      ('custext', {'stop_words': -1}, 'stop_words=-1'),
      ('custext', {'stop_words': 11}, 'at most V - 2 = 10'),
      ('vickrey', {'tuning': -0.1}, 'tuning=-0.1'),
      ('vickrey', {'tuning': math.nan}, 'tuning=nan'),
      ('syntax', {}, 'classes=None'),
      ('syntax', {'classes': np.zeros(11, int)}, r'shape \(12,\)'),
      ('syntax', {'classes': ['n'] * 12}, 'integer array'),
      ('syntax', {'classes': np.arange(12)}, 'no two words'),
      ('syntax', {'classes': _CLASSES, 'num_candidates': 0},
       'num_candidates=0'))
  def test_bad_settings_are_refused_by_name(self, name, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      mechanisms.get(name).calibrate(_table(), epsilon=1., **settings)

  @parameterized.parameters(*_CASES)
  def test_epsilons_tables_and_ids_are_checked(self, name):
    mech, params = _calibrated(name)
    settings, _ = _CASES[name]
    for epsilon in (0., -1., math.nan, math.inf, None):
      with self.assertRaisesRegex(ValueError, 'epsilon'):
        mech.calibrate(_table(), epsilon=epsilon, **settings)
    twice = embeddings.EmbeddingTable(('a', 'b'), np.float32([[1.], [1.]]))
    with self.assertRaisesRegex(ValueError, 'same'):
      mech.calibrate(twice, epsilon=1., **settings)
    for ids in ([-1], [12], [0.5]):
      for call in (lambda i: mech.privatize(jax.random.key(0), i, params),
                   lambda i: mech.log_prob(i, params)):
        with self.assertRaisesRegex(ValueError, 'ids'):
          call(np.array(ids))
