"""The exact epsilon against a triple loop, closed forms and Xu's Theorem 1."""

import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from jaxdp import auditing
from jaxdp.mechanisms import truncated_gumbel_law


def _loop(log_probs, distances, error):
  """The definition, one triple at a time."""
  best = (-1., None)
  num_words = len(log_probs)
  for w in range(num_words):
    for w_prime in range(num_words):
      for u in range(num_words):
        if w != w_prime and log_probs[w, u] >= log_probs[w_prime, u]:
          gap = log_probs[w, u] - log_probs[w_prime, u] + 2 * error
          best = max(best, (gap / distances[w, w_prime], (w, w_prime, u)),
                     key=lambda x: x[0])
  return best


def _random(num_words, seed):
  """A random law and the distances of random points."""
  generator = np.random.default_rng(seed)
  logits = 3 * generator.normal(size=(num_words, num_words))
  logits -= np.log(np.exp(logits).sum(1, keepdims=True))
  points = generator.normal(size=(num_words, 4))
  distances = np.sqrt(((points[:, None] - points) ** 2).sum(-1))
  return logits, distances


class ExactMetricEpsilonTest(parameterized.TestCase):

  @parameterized.product(num_words=(2, 3, 9), error=(0., .25))
  def test_equals_the_triple_loop(self, num_words, error):
    log_probs, distances = _random(num_words, num_words)
    epsilon, triple = auditing.exact_metric_epsilon(
        log_probs, distances, log_prob_error=error)
    want, witness = _loop(log_probs, distances, error)
    self.assertAlmostEqual(epsilon, want, delta=1e-14 * want)
    self.assertSequenceEqual(triple, witness)

  @parameterized.parameters(127, 128, 129, 160, 257)
  def test_finds_the_worst_pair_wherever_the_blocks_end(self, num_words):
    log_probs, distances = _random(num_words, 1)
    gap = np.stack([np.abs(log_probs - row).max(1) for row in log_probs])
    with np.errstate(invalid='ignore'):
      ratio = np.where(np.eye(num_words), -1., gap / distances)
    result = auditing.exact_metric_epsilon(log_probs, distances)
    self.assertEqual(result.epsilon, ratio.max())
    w, w_prime, u = result.triple
    self.assertEqual(
        (log_probs[w, u] - log_probs[w_prime, u]) / distances[w, w_prime],
        result.epsilon)
    # Plant a worse pair at the corners of the blocks.
    for pair in ((0, num_words - 1), (num_words - 2, num_words - 1), (1, 0)):
      close = distances.copy()
      close[pair] = close[pair[::-1]] = 1e-6
      found = auditing.exact_metric_epsilon(log_probs, close)
      self.assertCountEqual(found.triple[:2], pair)
      self.assertGreater(found.epsilon, 1e3)

  def test_softmax_of_distances_never_exceeds_its_closed_bound(self):
    _, distances = _random(60, 7)
    log_probs = -1.5 * distances
    log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))
    epsilon, _ = auditing.exact_metric_epsilon(log_probs, distances)
    self.assertBetween(epsilon, 1.5, 2 * 1.5)

  def test_two_words_of_randomised_response_have_the_known_epsilon(self):
    law = np.log([[.75, .25], [.25, .75]])
    result = auditing.exact_metric_epsilon(law, [[0., .5], [.5, 0.]])
    self.assertAlmostEqual(result.epsilon, 2 * math.log(3), places=14)
    self.assertEqual(result.triple, (0, 1, 0))
    self.assertIsInstance(result.epsilon, float)
    self.assertTrue(all(type(i) is int for i in result.triple))

  def test_one_impossible_output_is_infinite_and_two_are_nothing(self):
    distances = np.abs(np.subtract.outer([0., 1., 3.], [0., 1., 3.]))
    with np.errstate(divide='ignore'):
      shared = np.log([[.5, .5, 0.], [.25, .75, 0.], [.5, .5, 0.]])
      unshared = np.log([[.5, .5, 0.], [.25, .75, 0.], [.4, .5, .1]])
    epsilon, triple = auditing.exact_metric_epsilon(shared, distances)
    self.assertAlmostEqual(epsilon, math.log(2), places=14)
    self.assertEqual(triple, (0, 1, 0))
    epsilon, triple = auditing.exact_metric_epsilon(unshared, distances)
    self.assertEqual(epsilon, math.inf)
    self.assertEqual(triple, (2, 0, 2))

  @parameterized.parameters(9, 127, 128, 129, 300)
  def test_incomparable_words_add_nothing_whatever_their_laws(self, num_words):
    # Three islands, interleaved, each with outputs of its own.
    log_probs, distances = _random(num_words, num_words)
    island = np.arange(num_words) % 3
    apart = island[:, None] != island
    log_probs[apart] = -np.inf
    log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))
    extended = np.where(apart, np.inf, distances)
    result = auditing.exact_metric_epsilon(log_probs, extended)
    alone = [auditing.exact_metric_epsilon(
        log_probs[np.ix_(island == i, island == i)],
        distances[np.ix_(island == i, island == i)]) for i in range(3)]
    best = max(range(3), key=lambda i: alone[i].epsilon)
    self.assertEqual(result.epsilon, alone[best].epsilon)
    self.assertEqual(result.triple,
                     tuple(3 * k + best for k in alone[best].triple))
    self.assertBetween(result.epsilon, .1, 1e6)
    # The same laws under a finite distance.
    w, w_prime = num_words - 1, num_words - 2
    extended[w, w_prime] = extended[w_prime, w] = 1e6
    result = auditing.exact_metric_epsilon(log_probs, extended)
    self.assertEqual(result.epsilon, math.inf)
    self.assertCountEqual(result.triple[:2], (w, w_prime))
    self.assertEqual(island[result.triple[2]], island[result.triple[0]])

  def test_infinite_distance_does_not_hide_a_comparable_differing_support(self):
    distances = np.array([[0., np.inf, 1.], [np.inf, 0., np.inf],
                          [1., np.inf, 0.]])
    with np.errstate(divide='ignore'):
      law = np.log([[.5, .5, 0.], [0., .5, .5], [.5, .5, 0.]])
      hole = np.log([[1., 0., 0.], [0., .5, .5], [.5, .5, 0.]])
    self.assertEqual(auditing.exact_metric_epsilon(law, distances),
                     (0., (0, 2, 0)))
    self.assertEqual(auditing.exact_metric_epsilon(hole, distances),
                     (math.inf, (2, 0, 1)))

  def test_words_none_of_which_compare_have_epsilon_zero_and_no_witness(self):
    law = np.log([[.75, .25], [.25, .75]])
    self.assertEqual(
        auditing.exact_metric_epsilon(law, [[0., np.inf], [np.inf, 0.]]),
        (0., None))

  def test_words_at_distance_zero_must_have_equal_laws(self):
    distances = np.array([[0., 0., 1.], [0., 0., 1.], [1., 1., 0.]])
    law = np.log([[.5, .25, .25], [.5, .25, .25], [.25, .25, .5]])
    epsilon, _ = auditing.exact_metric_epsilon(
        law, distances, log_prob_error=1e-3)
    self.assertAlmostEqual(epsilon, math.log(2) + 2e-3, places=14)
    law[1] = np.log([.25, .5, .25])
    epsilon, triple = auditing.exact_metric_epsilon(law, distances)
    self.assertEqual(epsilon, math.inf)
    self.assertEqual(triple, (0, 1, 0))

  def test_equal_laws_have_epsilon_zero(self):
    law = np.full((3, 3), -math.log(3))
    result = auditing.exact_metric_epsilon(law, np.ones((3, 3)) - np.eye(3))
    self.assertEqual(result, (0., (0, 1, 0)))

  def test_errors_of_rows_and_entries_round_up(self):
    log_probs, distances = _random(9, 3)
    exact, triple = auditing.exact_metric_epsilon(log_probs, distances)
    entries = np.zeros((9, 9))
    entries[triple[0], 4] = .5
    expected = exact + .5 / distances[triple[:2]]
    for error in (entries, entries.max(1)):
      rounded, _ = auditing.exact_metric_epsilon(
          log_probs, distances, log_prob_error=error)
      self.assertAlmostEqual(rounded, expected, places=12)

  def test_rounded_distances_count_at_their_smaller_value(self):
    law = np.log([[.75, .25], [.25, .75]])
    epsilon, _ = auditing.exact_metric_epsilon(
        law, [[0., 1.], [1. - 1e-7, 0.]])
    self.assertAlmostEqual(epsilon, math.log(3) / (1 - 1e-7), places=14)

  @parameterized.parameters(
      (np.zeros((2, 3)), None, r'\(2, 3\) must be square'),
      (np.zeros((1, 1)), np.zeros((1, 1)), 'compares at least 2'),
      (np.log([[.5, .5], [.5, .4]]), None, 'row 1 sums to 0.9'),
      ([[0., -np.inf], [np.nan, 0.]], None, 'NaN in row 1'),
      (None, np.zeros((3, 3)), r'distances of shape \(3, 3\)'),
      (None, [[0., -1.], [-1., 0.]], r'distances\[0, 1\]=-1.0'),
      (None, [[0., np.nan], [1., 0.]], r'distances\[0, 1\]=nan'),
      (None, [[0., np.inf], [1., 0.]], 'symmetric'),
      (None, [[0., -np.inf], [-np.inf, 0.]], r'distances\[0, 1\]=-inf'),
      (None, [[np.inf, 1.], [1., np.inf]], r'distances\[0, 0\]=inf'),
      (None, [[0., 1.], [2., 0.]], 'symmetric'),
      (None, [[0., 1.], [1., .1]], r'distances\[1, 1\]=0.1'))
  def test_refuses_bad_arrays_by_name(self, log_probs, distances, message):
    if log_probs is None:
      log_probs = np.log(np.full((2, 2), .5))
    if distances is None:
      distances = np.ones((2, 2)) - np.eye(2)
    with self.assertRaisesRegex(ValueError, message):
      auditing.exact_metric_epsilon(log_probs, distances)

  @parameterized.parameters((-1., 'not negative'), (math.nan, 'finite'),
                            (np.zeros(5), r'shape \(5,\)'))
  def test_refuses_an_error_that_is_none(self, error, message):
    log_probs, distances = _random(3, 0)
    with self.assertRaisesRegex(ValueError, message):
      auditing.exact_metric_epsilon(log_probs, distances, log_prob_error=error)

  def test_more_words_than_it_can_enumerate_are_refused_at_once(self):
    wide = np.broadcast_to(np.float64(0.), (4_001, 4_001))
    with self.assertRaisesRegex(ValueError, 'at most 4000'):
      auditing.exact_metric_epsilon(wide, wide)


class TheoremOneTest(parameterized.TestCase):
  """Xu et al. (2020), Theorem 1, on 100 Gaussian words in 50 dimensions."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    vectors = np.random.default_rng(1).normal(size=(100, 50))
    cls.distances = np.sqrt(((vectors[:, None] - vectors) ** 2).sum(-1))
    cls.diameter = cls.distances.max()
    cls.minimum = cls.distances[~np.eye(100, dtype=bool)].min()
    cls.least = (5 + 2 * math.log(100)) / cls.minimum

  def _measured(self, epsilon, noise):
    scale = truncated_gumbel_law.paper_scale(
        epsilon, 100, self.diameter, self.minimum)
    law = truncated_gumbel_law.law(
        self.distances, scale=scale, bound=self.diameter, noise=noise)
    exact, _ = auditing.exact_metric_epsilon(law.log_prob, self.distances)
    rounded, _ = auditing.exact_metric_epsilon(
        law.log_prob, self.distances, log_prob_error=law.error)
    self.assertBetween(rounded - exact, 0., 1e-10 * exact)
    return exact / epsilon

  # The published table (2.77, .789, .522 at 1.01 times the bound; .051 at ten
  # times; 7.2e-9 at e^20) is of another draw of the words: its bound is 2.243,
  # this draw's 2.187. The bands hold both; the last column is this draw.
  @parameterized.parameters(
      ('clipped', 2.5, 2.9, 2.620469), ('truncated', .77, .83, .812257),
      ('untruncated', .517, .527, .522210))
  def test_near_its_bound_only_the_clipped_reading_exceeds_the_claim(
      self, noise, low, high, this_draw):
    ratio = self._measured(1.01 * self.least, noise)
    self.assertBetween(ratio, low, high)
    self.assertAlmostEqual(ratio, this_draw, places=6)

  @parameterized.parameters(('clipped', .050177), ('truncated', .051443),
                            ('untruncated', .050077))
  def test_at_ten_times_the_bound_the_claim_is_twenty_times_too_large(
      self, noise, this_draw):
    ratio = self._measured(10 * self.least, noise)
    self.assertAlmostEqual(ratio, .051, delta=.001)
    self.assertAlmostEqual(ratio, this_draw, places=6)

  def test_at_e20_the_claim_is_a_hundred_million_times_too_large(self):
    ratio = self._measured(math.exp(20), 'truncated')
    self.assertBetween(ratio, 6.5e-9, 8.5e-9)
    self.assertAlmostEqual(ratio * 1e9, 7.841668, places=5)

  def test_on_300_words_the_truncated_reading_exceeds_the_claim_too(self):
    num_words, (w, w_prime, u) = 300, (1, 54, 286)
    vectors = np.random.default_rng(1).normal(size=(num_words, 50))
    distances = np.sqrt(((vectors[:, None] - vectors) ** 2).sum(-1))
    minimum = distances[~np.eye(num_words, dtype=bool)].min()
    epsilon = 1.01 * (5 + 2 * math.log(num_words)) / minimum
    diameter = distances.max()
    scale = truncated_gumbel_law.paper_scale(
        epsilon, num_words, diameter, minimum)
    # One pair is a lower bound of what all pairs have.
    ratios = {}
    for noise in ('truncated', 'untruncated'):
      law = truncated_gumbel_law.law(
          distances[[w, w_prime]], scale=scale, bound=diameter, noise=noise)
      gap = abs(law.log_prob[0, u] - law.log_prob[1, u]) - law.error[:, u].sum()
      ratios[noise] = gap / distances[w, w_prime] / epsilon
      if noise == 'truncated':
        np.testing.assert_allclose(
            law.log_prob[:, u], [-44.159433, -16.346374], atol=1e-6)
    self.assertAlmostEqual(distances[w, w_prime], 6.4986, places=4)
    self.assertAlmostEqual(ratios['truncated'], 1.565328, places=6)
    self.assertLess(ratios['untruncated'], 1.)


if __name__ == '__main__':
  absltest.main()
