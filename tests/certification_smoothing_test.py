"""Votes against exact laws, bounds by enumeration, certificates that refuse."""

import functools
import itertools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxdp import certification
from jaxdp import confidence
from jaxdp import samplers
from jaxdp.certification import smoothing

_SCALE = .5
# Most tests share two shapes and two functions: compiling takes the time.
_LINE = np.linspace(-2., 2., 101, dtype=np.float32)[:, None]
_POINTS = np.float32([[.1], [.4], [-.3], [1.], [0.], [-2.], [.7]])
_FALSE_ALARM = 1e-3


def _noisy_sign(scale, key, x):
  """Two classes, the sign of x behind Laplace noise; scale is an array."""
  score = x + scale * samplers.laplace(key, x.shape, scale=1.)
  return jnp.concatenate([score, -score], axis=-1)


def _sign(scale=_SCALE):
  """One compiled function for every scale."""
  return jax.tree_util.Partial(_noisy_sign, jnp.float32(scale))


def _noisy_planes(gain, key, x):
  """Three classes on a line: below -.5, above .5, between."""
  score = x + samplers.laplace(key, x.shape, scale=_SCALE)
  return gain * jnp.concatenate(
      [-score - .5, score - .5, jnp.zeros_like(score)], -1)


_planes = jax.tree_util.Partial(_noisy_planes, 1.)
# Steep logits: the softmax is nearly the vote.
_steep_planes = jax.tree_util.Partial(_noisy_planes, 50.)


def _planes_law():
  x = _POINTS[:, 0].astype(np.float64)
  cdf = functools.partial(scipy.stats.laplace.cdf, scale=_SCALE)
  low, high = cdf(-.5 - x), cdf(x - .5)
  return np.stack([low, high, 1. - low - high], axis=-1)


class TallyTest(parameterized.TestCase):

  def test_votes_are_those_of_one_image_and_one_key_at_a_time(self):
    key, num = jax.random.key(3), 20
    expected = np.zeros((len(_POINTS), 3), np.int64)
    one = jax.jit(lambda key, x: _planes(key, x))
    vote_keys = samplers.element_keys(key, samplers.VOTE, 0, num)
    for s, i in itertools.product(range(num), range(len(_POINTS))):
      logits = one(jax.random.fold_in(vote_keys[s], i), _POINTS[i:i + 1])
      expected[i, np.argmax(logits)] += 1
    votes = certification.tally(key, _planes, _POINTS, num_samples=num)
    np.testing.assert_array_equal(votes.counts, expected)
    self.assertEqual(votes.counts.dtype, np.int32)
    self.assertEqual(votes.num_samples, num)

  @parameterized.parameters('vote', 'softmax')
  def test_neither_chunks_nor_steps_nor_calls_show(self, score):
    count = functools.partial(
        certification.tally, jax.random.key(4), _planes, score=score)
    whole = count(_POINTS, num_samples=100)
    with mock.patch.object(smoothing, '_PER_CALL', 33):
      others = [count(_POINTS, num_samples=100, chunk_size=3,
                      samples_per_step=8)]
      if score == 'vote':
        others.append(count(_POINTS, num_samples=100, chunk_size=1))
    for other in others:
      for a, b in zip(whole[:-1], other[:-1]):
        np.testing.assert_array_equal(a, b)

  def test_a_part_of_the_images_is_drawn_as_in_the_whole(self):
    count = functools.partial(
        certification.tally, jax.random.key(4), _planes, num_samples=100,
        chunk_size=3, samples_per_step=8)
    whole = count(_POINTS).counts
    np.testing.assert_array_equal(count(_POINTS[4:], start=4).counts, whole[4:])
    self.assertTrue(np.any(count(_POINTS[4:]).counts != whole[4:]))

  def test_ranges_of_votes_add_up(self):
    count = functools.partial(
        certification.tally, jax.random.key(4), _planes, _POINTS)
    parts = [count(num_samples=40), count(num_samples=60, first_sample=40)]
    np.testing.assert_array_equal(
        parts[0].counts + parts[1].counts, count(num_samples=100).counts)

  def test_counts_follow_the_law_and_no_other(self):
    num = 4_000
    votes = certification.tally(
        jax.random.key(5), _planes, _POINTS, num_samples=num)
    np.testing.assert_array_equal(votes.counts.sum(axis=-1), num)
    law = _planes_law()

    def statistic(p):
      return np.sum((votes.counts - num * p)**2 / (num * p))
    limit = scipy.stats.chi2.isf(_FALSE_ALARM, 2 * len(_POINTS))
    self.assertLess(statistic(law), limit)
    # A tenth more noise, or votes of one image given to its neighbour.
    wider = scipy.stats.laplace.cdf(
        np.stack([-.5 - _POINTS[:, 0], _POINTS[:, 0] - .5], -1), scale=.55)
    wider = np.concatenate([wider, 1. - wider.sum(-1, keepdims=True)], -1)
    self.assertGreater(statistic(wider), limit)
    self.assertGreater(statistic(np.roll(law, 1, axis=0)), limit)

  def test_images_and_votes_have_noise_of_their_own(self):
    same = np.zeros_like(_LINE)
    count = functools.partial(certification.tally, jax.random.key(6), _sign())
    first = count(same, num_samples=1).counts[:, 0]
    second = count(same, num_samples=1, first_sample=1).counts[:, 0]
    # 101 fair coins, within 1e-3 together.
    limit = scipy.stats.binom.isf(_FALSE_ALARM / 6., 101, .5)
    for wins in (first.sum(), second.sum(), np.sum(first == second)):
      self.assertBetween(wins, 101 - limit, limit)

  def test_softmax_moments_match_the_scores(self):
    key, num = jax.random.key(7), 50
    vote_keys = samplers.element_keys(key, samplers.VOTE, 0, num)
    one = jax.jit(lambda key, x: _planes(key, x))
    scores = np.stack([[
        jax.nn.softmax(one(jax.random.fold_in(vote_keys[s], i),
                           _POINTS[i:i + 1])[0]) for i in (0, 5)]
        for s in range(num)]).astype(np.float64)
    got = certification.tally(
        key, _planes, _POINTS, num_samples=num, score='softmax')
    error = scores.mean(0) - got.mean[[0, 5]]
    # Rounded down to 2^-15, by less than one step (and an ulp of float32).
    self.assertTrue(np.all((error > -1e-6) & (error < 2.**-15 + 1e-6)))
    np.testing.assert_allclose(
        got.variance[[0, 5]], scores.var(0, ddof=1), atol=4 * 2.**-15)

  def test_a_hundred_thousand_votes_overflow_nothing(self):
    def sure(key, x):
      return jnp.stack([x[:, 0] * 0. + 50., samplers.laplace(
          key, (len(x),), scale=.01)], axis=-1)
    got = certification.tally(
        jax.random.key(0), sure, _POINTS[:1], num_samples=100_000,
        score='softmax', samples_per_step=1_024)
    np.testing.assert_array_equal(got.mean, [[1., 0.]])
    np.testing.assert_array_equal(got.variance, [[0., 0.]])

  def test_new_parameters_and_counts_do_not_trace_again(self):
    traces = []

    def predict_fn(scale, key, x):
      traces.append(x.shape)
      return _noisy_sign(scale, key, x)

    def count(scale, num):
      before = len(traces)
      votes = certification.tally(
          jax.random.key(1), jax.tree_util.Partial(
              predict_fn, jnp.float32(scale)), _POINTS, num_samples=num)
      return len(traces) - before, votes.counts
    compiled, narrow = count(.01, 60)
    again, wide = count(9., 700)
    self.assertGreater(compiled, again)
    self.assertLessEqual(again, 1)  # the check of shapes, which runs nothing
    self.assertEqual(narrow[3, 0], 60)
    self.assertLess(wide[3, 0], 500)

  def test_a_key_of_128_bits_serves(self):
    key = jax.random.wrap_key_data(
        np.arange(4, dtype=np.uint32), impl='threefry4x32')
    votes = certification.tally(key, _sign(.1), _LINE, num_samples=60)
    np.testing.assert_array_equal(votes.counts[[0, 100]], [[0, 60], [60, 0]])
    self.assertBetween(votes.counts[50, 0], 10, 50)

  def test_one_key_for_the_batch_refuses_chunks(self):
    count = functools.partial(
        certification.tally, jax.random.key(2), _planes, _POINTS,
        per_image_keys=False)
    parts = [count(num_samples=10), count(num_samples=20, first_sample=10)]
    np.testing.assert_array_equal(
        parts[0].counts + parts[1].counts, count(num_samples=30).counts)
    with self.assertRaisesRegex(ValueError, 'per_image_keys=False'):
      count(num_samples=30, chunk_size=6)

  @parameterized.parameters(
      ('num_samples=0', dict(num_samples=0)),
      ('num_samples=2.5', dict(num_samples=2.5)),
      ('chunk_size=0', dict(chunk_size=0)),
      ('samples_per_step=0', dict(samples_per_step=0)),
      ('start=-1', dict(start=-1)),
      ('score=', dict(score='rank')),
      (r'x has shape \(7,\)', dict(x=_POINTS[:, 0])),
      (r'x has shape \(0, 1\)', dict(x=_POINTS[:0])),
      ('logits', dict(predict_fn=lambda key, x: _planes(key, x)[:, 0])),
      ('logits', dict(predict_fn=lambda key, x: _planes(key, x)[:, :1])),
      ('logits', dict(predict_fn=lambda key, x: (_planes(key, x), x))),
      ('int32', dict(score='softmax', predict_fn=lambda key, x: jax.nn.one_hot(
          jnp.argmax(_planes(key, x), -1), 3, dtype=jnp.int32))),
      ('ignores its key', dict(
          predict_fn=lambda key, x: jnp.concatenate([x, -x], -1))),
      ('ignores its key', dict(predict_fn=jax.jit(
          lambda key, x: jnp.concatenate([x, -x], -1) + 0 * _planes(
              jax.random.key(0), x)[:, :2]))))
  def test_bad_input_is_named(self, message, changed):
    settings = dict(predict_fn=_planes, x=_POINTS, num_samples=5) | changed
    with self.assertRaisesRegex(ValueError, message):
      certification.tally(jax.random.key(0), **settings)

  @parameterized.parameters(np.nan, np.inf)
  def test_an_image_without_a_finite_vote_is_named(self, value):
    x = np.concatenate([_POINTS, [[np.float32(value)]], _POINTS[1:]])
    with self.assertRaisesRegex(ValueError, 'for image 7;'):
      certification.tally(jax.random.key(0), _planes, x, num_samples=5,
                          chunk_size=7)


class BoundsTest(parameterized.TestCase):

  @parameterized.parameters(
      (2_000, (2_000, 0), .99735, .00265, 2.966),
      (1_000, (1_000, 0), .99472, .00528, 2.619),
      (300, (280, 15), .88726, .09183, 1.134))
  def test_published_bounds(self, num, counts, low, high, epsilon):
    counts = np.pad(np.int32([counts]), [(0, 0), (0, 8)])
    counts[0, 2] = num - counts.sum()
    top, p_low, p_high = certification.probability_bounds(
        certification.Votes(counts, num), significance=.05,
        correction='published')
    self.assertEqual(top, [0])
    np.testing.assert_allclose(p_low, low, atol=5e-6)
    np.testing.assert_allclose(p_high, high, atol=5e-6)
    self.assertAlmostEqual(
        np.log(p_low[0] / p_high[0]) / 2., epsilon, delta=5e-4)
    radius = certification.claimed_radius(p_low, p_high, kappa=2., phi=2.)
    self.assertAlmostEqual(radius[0], epsilon, delta=5e-4)

  def test_published_hoeffding_half_width(self):
    counts, n = np.int32([[700, 200, 60, 40]]), 1_000
    _, p_low, p_high = certification.probability_bounds(
        certification.Votes(counts, n), significance=.05, bound='hoeffding',
        correction='published')
    width = np.sqrt(np.log(4 / .05) / (2 * n))
    np.testing.assert_allclose([p_low[0], p_high[0]], [.7 - width, .2 + width])

  def test_no_law_of_three_classes_is_missed_more_often_than_promised(self):
    n, significance = 40, .1
    counts = np.int32([(a, b, n - a - b) for a in range(n + 1)
                       for b in range(n + 1 - a)])
    votes = certification.Votes(counts, n)
    laws = [p for p in itertools.product(np.arange(1, 19) / 20., repeat=2)
            if sum(p) < .99]
    laws = np.array([(a, b, 1. - a - b) for a, b in laws])
    pmf = np.exp(scipy.special.gammaln(n + 1.)
                 - scipy.special.gammaln(counts + 1.).sum(-1)
                 + np.log(laws) @ counts.T)  # [law, outcome]
    np.testing.assert_allclose(pmf.sum(-1), 1., atol=1e-9)

    def worst(level, correction='bonferroni'):
      top, low, high = certification.probability_bounds(
          votes, significance=level, correction=correction)
      runner_up = np.where(np.arange(3) == top[:, None], -1.,
                           laws[:, None]).max(-1)
      wrong = (low > laws[:, top]) | (high < runner_up)
      return np.sum(pmf * wrong, axis=-1).max()
    self.assertLessEqual(worst(significance), significance)
    # The count of events is not slack: bounds at 2.5 times the level miss.
    self.assertGreater(worst(2.5 * significance), significance)
    published = worst(significance, 'published')
    self.assertLessEqual(published, (1. + 2. / 3.) * significance)

  def test_the_class_that_wins_by_luck_is_paid_for(self):
    num_classes, n, significance = 40, 200, .02
    law = np.full(num_classes, 1. / num_classes)
    counts = np.random.default_rng(1).multinomial(n, law, 4_000)
    votes = certification.Votes(counts.astype(np.int32), n)

    def missed(level):
      _, low, high = certification.probability_bounds(
          votes, significance=level)
      return np.sum((low > law[0]) | (high < law[0]))
    limit = scipy.stats.binom.isf(_FALSE_ALARM, len(counts), significance)
    self.assertLessEqual(missed(significance), limit)
    # One class's bound at the whole significance, as if it had been fixed.
    rows = np.arange(len(counts))
    low, _ = confidence.clopper_pearson(
        counts[rows, counts.argmax(-1)], n, significance=significance,
        side='lower')
    self.assertGreater(np.sum(low > law[0]), 10 * limit)

  def test_two_stages_pay_for_two_events_whatever_the_classes(self):
    counts = np.int32([[90, 10] + [0] * 48])
    votes = certification.Votes(counts, 100)
    low, _ = confidence.clopper_pearson(
        90, 100, significance=.025, side='lower')
    top, p_low, p_high = certification.probability_bounds(
        votes, significance=.05, correction='two_stage', top=[0])
    np.testing.assert_allclose(p_low, low)
    np.testing.assert_allclose(p_high, 1. - low)
    _, one_stage, _ = certification.probability_bounds(votes, significance=.05)
    self.assertLess(one_stage, p_low)
    top, p_low, p_high = certification.probability_bounds(
        votes, significance=.05, correction='two_stage', top=[1])
    self.assertEqual(top, [1])
    self.assertLess(p_low, p_high)
    with self.assertRaisesRegex(ValueError, 'top=None'):
      certification.probability_bounds(
          votes, significance=.05, correction='two_stage')

  @parameterized.parameters('hoeffding', 'empirical_bernstein')
  def test_bounds_of_means_cover_and_a_quarter_of_their_width_does_not(
      self, bound):
    truth, n, significance = np.array([.5, .4, .1]), 2_000, .05
    mean = np.random.default_rng(2).multinomial(n, truth, 1_000) / n
    scores = certification.Scores(
        mean, mean * (1. - mean) * n / (n - 1), n)
    top, low, high = certification.probability_bounds(
        scores, significance=significance, bound=bound)
    limit = scipy.stats.binom.isf(_FALSE_ALARM, len(top), significance)
    rows = np.arange(len(top))
    wrong = (low > truth[top]) | (high < truth[1])
    self.assertLessEqual(np.sum(wrong), limit)
    self.assertGreater(np.mean(low > high), .5)
    narrow = mean[rows, top] - (mean[rows, top] - low) / 4.
    self.assertGreater(np.sum(narrow > truth[top]), 2. * limit)

  def test_clopper_pearson_refuses_means(self):
    scores = certification.Scores(np.full((1, 2), .5), np.zeros((1, 2)), 9)
    with self.assertRaisesRegex(ValueError, 'clopper_pearson'):
      certification.probability_bounds(scores, significance=.05)


@pytest.mark.slow
class CertifyTest(parameterized.TestCase):

  def _certify(self, predict_fn, x=_POINTS, **settings):
    settings = dict(
        num_samples=3_000, significance=.001,
        radii={'l1': functools.partial(
            certification.laplace_l1_radius, scale=_SCALE)}) | settings
    return certification.certify(jax.random.key(11), predict_fn, x, **settings)

  @parameterized.parameters(
      dict(), dict(bound='hoeffding'), dict(correction='two_stage'))
  def test_never_beyond_the_boundary_and_not_for_want_of_trying(
      self, **settings):
    true = np.abs(_LINE[:, 0])
    got = self._certify(_sign(), _LINE, **settings)
    radius = got.radii['l1']
    # 101 images at .001 each: one wrong by chance in ten such tests; the key is
    # fixed, and wrong noise makes dozens.
    self.assertTrue(np.all(radius <= true))
    self.assertGreater(radius[10], .5 * true[10])
    right = np.where(_LINE[:, 0] > 0., 0, 1)
    sure = got.label != certification.ABSTAIN
    np.testing.assert_array_equal(got.label[sure], right[sure])
    self.assertGreater(sure.mean(), .9)
    self.assertEqual(got.label[50], certification.ABSTAIN)  # on the boundary
    np.testing.assert_array_equal(radius[~sure], 0.)
    np.testing.assert_array_equal(got.top[sure], got.label[sure])

  @parameterized.parameters(0., .25)
  def test_noise_that_is_missing_or_halved_is_seen(self, scale):
    radius = self._certify(_sign(scale), _LINE).radii['l1']
    self.assertGreater(np.sum(radius > np.abs(_LINE[:, 0])), 20)

  def test_softmax_means_certify_the_same_label(self):
    for bound, score in (
        ('empirical_bernstein', None), ('hoeffding', 'softmax')):
      got = self._certify(
          _steep_planes, bound=bound, score=score, significance=.01)
      self.assertIsInstance(got.votes, certification.Scores)
      law = _planes_law()
      self.assertTrue(np.all(got.p_low < law.max(-1) + .02))
      np.testing.assert_array_equal(got.top, law.argmax(-1))
      self.assertTrue(np.all(got.p_low > law.max(-1) - .08))

  def test_two_stages_bound_votes_that_did_not_select(self):
    got = self._certify(
        _planes, correction='two_stage', num_selection=50, num_samples=200)
    whole = certification.tally(
        jax.random.key(11), _planes, _POINTS, num_samples=250)
    first = certification.tally(
        jax.random.key(11), _planes, _POINTS, num_samples=50)
    np.testing.assert_array_equal(
        got.votes.counts, whole.counts - first.counts)
    np.testing.assert_array_equal(got.top, first.counts.argmax(-1))

  def test_what_is_covered_is_stated(self):
    for correction, covered in (
        ('bonferroni', .03), ('two_stage', .03), ('published', .05)):
      got = self._certify(_planes, significance=.03, correction=correction,
                          num_samples=10)
      self.assertAlmostEqual(got.significance, covered, delta=1e-12)

  def test_a_few_votes_certify_nothing(self):
    got = self._certify(_planes, num_samples=5)
    np.testing.assert_array_equal(got.label, certification.ABSTAIN)
    np.testing.assert_array_equal(got.radii['l1'], 0.)

  @parameterized.parameters(
      ('significance=0.95', dict(significance=.95)),
      ('significance=0.0', dict(significance=0.)),
      ('bound=', dict(bound='normal')),
      ('correction=', dict(correction='none')),
      ('num_samples=0', dict(num_samples=0)),
      ('clopper_pearson', dict(score='softmax')))
  def test_bad_input_is_named_before_a_vote_is_drawn(self, message, changed):
    def predict_fn(key, x):
      raise AssertionError('a vote was drawn')
    with self.assertRaisesRegex(ValueError, message):
      self._certify(predict_fn, **changed)


class AccuracyTest(parameterized.TestCase):

  def test_a_wrong_or_abstaining_image_is_never_certified(self):
    labels = np.int32([1, 1, 0, certification.ABSTAIN, 2])
    truth = np.int32([1, 0, 0, 1, 2])
    radii = np.array([.3, .9, .1, 0., np.inf])
    conventional, certified = certification.certified_accuracy(
        labels, truth, radii, [0., .1, .3, 5.])
    self.assertAlmostEqual(conventional, .6)
    # The radius must exceed the bound: .1 does not certify .1.
    np.testing.assert_allclose(certified, [.6, .4, .2, .2])

  @parameterized.parameters(
      ('shapes', ([1], [1, 0], [.1], [0.])),
      ('shapes', ([[1]], [[1]], [[.1]], [0.])),
      ('no entry', ([], [], [], [0.])),
      ('radii', ([1], [1], [np.nan], [0.])),
      ('attack_bounds', ([1], [1], [.1], [-1.])))
  def test_bad_input_is_named(self, message, arguments):
    with self.assertRaisesRegex(ValueError, message):
      certification.certified_accuracy(*arguments)


if __name__ == '__main__':
  absltest.main()
