"""Bounds beyond 4,000 words against loops, the exact audit and closed forms."""

import math
import tracemalloc

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from scipy import stats
from scipy.spatial import distance as spatial

from jaxdp import auditing
from jaxdp import embeddings
from jaxdp.auditing import metric
from jaxdp.mechanisms import exponential


def _law(num_words, num_outputs, seed, spread=3.):
  logits = spread * np.random.default_rng(seed).normal(
      size=(num_words, num_outputs))
  return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _vectors(num_words, num_dimensions, seed):
  return np.random.default_rng(seed).normal(
      size=(num_words, num_dimensions)).astype(np.float32)


def _distances(vectors):
  difference = np.float64(vectors[:, None]) - vectors
  return np.sqrt((difference ** 2).sum(-1))


def _softmax(distances, rate, cap=math.inf):
  logits = -rate * np.minimum(distances, cap)
  return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _loop(log_probs, distances, pairs, error=0.):
  """The definition over the pairs, both directions, one output at a time."""
  best = (-1., None)
  for a, b in pairs:
    for w, v in ((a, b), (b, a)):
      for u in range(log_probs.shape[1]):
        if log_probs[w, u] > log_probs[v, u]:
          gap = max(0., log_probs[w, u] - log_probs[v, u] - 2 * error)
          best = max(best, (gap / distances[w, v], (w, v, u)),
                     key=lambda x: x[0])
  return best


class LowerBoundTest(parameterized.TestCase):

  @parameterized.product(error=(0., .25), block_bytes=(1, 8 * 7 * 5, 2**27))
  def test_equals_the_loop_over_the_pairs_however_many_rows_fit(
      self, error, block_bytes):
    vectors, law = _vectors(40, 3, 0), _law(40, 7, 1)
    generator = np.random.default_rng(2)
    pairs = generator.integers(40, size=(300, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    asked = []
    found = auditing.metric_epsilon_lower_bound(
        lambda ids: (asked.append(len(ids)), law[ids])[1], vectors, pairs,
        log_prob_error=error, block_bytes=block_bytes)
    want, triple = _loop(law, _distances(vectors), pairs.tolist(), error)
    self.assertAlmostEqual(found.epsilon, want, delta=1e-12 * want)
    self.assertEqual(found.triple, triple)
    self.assertEqual(found[2:], ('lower bound', len(pairs)))
    rows = max(2, block_bytes // 56)
    self.assertLessEqual(max(asked), min(rows, 64))
    # Where all rows fit each is computed once, but for one that tells U.
    self.assertLessEqual(sum(asked), 2 * len(pairs) if rows < 40 else 41)

  def test_all_pairs_give_the_exact_epsilon(self):
    vectors, law = _vectors(90, 3, 3), _law(90, 90, 4)
    table = embeddings.make_table([str(i) for i in range(90)], vectors)
    found = auditing.metric_epsilon_lower_bound(lambda ids: law[ids], table)
    exact = auditing.exact_metric_epsilon(law, _distances(vectors))
    self.assertAlmostEqual(found.epsilon, exact.epsilon, places=12)
    self.assertEqual(found.triple, exact.triple)
    self.assertEqual(found.num_pairs, 90 * 89 // 2)

  def test_the_choice_holds_the_closest_pair_and_finds_what_it_needs(self):
    vectors = _vectors(700, 4, 5)
    distances = _distances(vectors)
    np.fill_diagonal(distances, np.inf)
    closest = np.unravel_index(np.argmin(distances), distances.shape)
    law = _law(700, 20, 6, spread=.01)
    law[closest[0]] = np.roll(_law(1, 20, 7)[0], 1)
    found = auditing.metric_epsilon_lower_bound(
        lambda ids: law[ids], vectors, num_pairs=3_000)
    self.assertCountEqual(found.triple[:2], closest)
    np.fill_diagonal(distances, 0.)
    want, _ = _loop(law, distances, [closest])
    self.assertAlmostEqual(found.epsilon, want, delta=1e-9 * want)
    self.assertBetween(found.num_pairs, 2_700, 3_000)

  def test_the_choice_is_of_different_pairs_and_repeats_with_its_seed(self):
    vectors = _vectors(700, 4, 5)
    choose = lambda seed: metric._choose_pairs(
        vectors, 3_000, np.random.default_rng(seed))
    pairs = choose(0)
    self.assertLen({frozenset(pair) for pair in pairs.tolist()}, len(pairs))
    self.assertTrue((pairs[:, 0] != pairs[:, 1]).all())
    np.testing.assert_array_equal(pairs, choose(0))
    self.assertNotEqual(pairs.tolist(), choose(1).tolist())
    # The first half are the closest pairs, up to what 5 neighbours can know.
    distances = _distances(vectors)[tuple(pairs.T)]
    every = np.sort(_distances(vectors)[np.triu_indices(700, 1)])
    self.assertLess(distances[:1_500].max(), 1.2 * every[1_500])
    self.assertGreater(distances[1_500:].max(), every[-700])

  @parameterized.parameters((1., False), (2., True))
  def test_a_law_with_half_the_noise_exceeds_the_claim(self, rate, violated):
    vectors = _vectors(700, 4, 8)
    law = lambda ids: exponential.log_prob(ids, vectors, rate=rate)
    claim = auditing.exponential_metric_epsilon(vectors, 1.).epsilon
    found = auditing.metric_epsilon_lower_bound(law, vectors, num_pairs=3_000)
    self.assertEqual(found.epsilon > claim * (1 + 1e-9), violated)
    self.assertGreater(found.epsilon, .9 * rate)

  def test_one_sided_support_is_infinite_and_stops_the_search(self):
    vectors, law = _vectors(30, 2, 9), _law(30, 5, 10)
    law[:, 4] = -np.inf
    law -= np.log(np.exp(law).sum(1, keepdims=True))
    pairs = np.stack([np.arange(29), np.arange(1, 30)], axis=1)
    ask = lambda ids: law[ids]
    shared = auditing.metric_epsilon_lower_bound(ask, vectors, pairs)
    self.assertAlmostEqual(shared.epsilon, _loop(
        law[:, :4], _distances(vectors), pairs.tolist())[0], places=10)
    law[7] = np.log([.2, .2, .2, .2, .2])
    found = auditing.metric_epsilon_lower_bound(
        ask, vectors, pairs, block_bytes=8 * 5 * 4)
    self.assertEqual(found, (math.inf, (7, 6, 4), 'lower bound', 9))

  def test_infinite_distance_adds_nothing_and_zero_wants_equal_laws(self):
    vectors, law = _vectors(4, 2, 11), _law(4, 3, 12)
    law[1] = law[0]
    pairs = [[0, 1], [0, 2], [2, 3]]
    values = {(0, 1): 0., (0, 2): math.inf, (2, 3): 2.}
    distance = lambda ids, others: np.array(
        [values[pair] for pair in zip(ids.tolist(), others.tolist())])
    run = lambda p: auditing.metric_epsilon_lower_bound(
        lambda ids: law[ids], vectors, p, distance_fn=distance)
    found = run(pairs)
    self.assertAlmostEqual(
        found.epsilon, np.abs(law[2] - law[3]).max() / 2, places=14)
    self.assertCountEqual(found.triple[:2], (2, 3))
    self.assertEqual(run([[0, 2]]), (0., None, 'lower bound', 1))
    law[1] = np.roll(law[0], 1)
    self.assertEqual(run(pairs).epsilon, math.inf)

  def test_tells_how_far_it_is(self):
    vectors, law = _vectors(60, 2, 13), _law(60, 4, 14)
    calls = []
    found = auditing.metric_epsilon_lower_bound(
        lambda ids: law[ids], vectors, block_bytes=8 * 4 * 20,
        on_block=lambda *progress: calls.append(progress))
    done, totals, epsilons = zip(*calls)
    self.assertGreater(len(calls), 3)
    self.assertEqual(sorted(set(done)), list(done))
    self.assertEqual((done[-1], set(totals)), (1770, {1770}))
    self.assertEqual(sorted(epsilons), list(epsilons))
    self.assertEqual(epsilons[-1], found.epsilon)

  def test_memory_does_not_grow_with_the_number_of_rows(self):
    vectors = _vectors(3_000, 2, 15)

    def law(ids):
      logits = -spatial.cdist(vectors[ids], vectors)
      return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    pairs = np.stack([np.arange(2_999), np.arange(1, 3_000)], axis=1)
    tracemalloc.start()
    found = auditing.metric_epsilon_lower_bound(
        law, vectors, pairs, block_bytes=2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    self.assertEqual(found.num_pairs, 2_999)
    # The block, one slab of differences with its temporaries, 64 rows thrice.
    self.assertLess(peak, 2**20 + 2 * 2**24 + 3 * 64 * 3_000 * 8)
    self.assertLess(peak, 3_000 ** 2 * 8)

  @parameterized.parameters(
      ({'pairs': [[0, 3]]}, r'ids lie in \[0, 3\)'),
      ({'pairs': [[-1, 1]]}, 'from -1'),
      ({'pairs': [[0, 1], [2, 2]]}, r'pairs\[1\] is a word with itself'),
      ({'pairs': [[0., 1.]]}, 'float64'),
      ({'pairs': np.zeros((0, 2), int)}, r'\(0, 2\)'),
      ({'pairs': [[0, 1, 2]]}, r'\(1, 3\)'),
      ({'table': np.zeros((1, 2))}, 'at least 2'),
      ({'table': np.zeros(3)}, r'\(3,\)'),
      ({'table': np.full((2, 2), np.nan)}, 'finite'),
      ({'num_pairs': 0}, 'num_pairs=0'),
      ({'num_pairs': 1.5}, 'num_pairs=1.5'),
      ({'block_bytes': 0}, 'block_bytes=0'),
      ({'log_prob_error': -1.}, 'log_prob_error=-1.0'),
      ({'log_prob_error': math.inf}, 'log_prob_error=inf'),
      ({'log_prob_fn': lambda ids: np.zeros((len(ids), 2))}, 'sums to 2.0'),
      ({'log_prob_fn': lambda ids: np.full((len(ids), 2), np.nan)}, 'NaN'),
      ({'log_prob_fn': lambda ids: np.zeros((5, 1))}, r'shape \(5, 1\)'),
      ({'distance_fn': lambda ids, others: np.full(len(ids), -1.)},
       'returns -1.0'),
      ({'distance_fn': lambda ids, others: np.full(len(ids), np.nan)},
       'returns nan'),
      ({'distance_fn': lambda ids, others: np.zeros((9, 9))},
       r'shape \(9, 9\)'))
  def test_refuses_bad_input_by_name(self, bad, message):
    arguments = {
        'log_prob_fn': lambda ids: np.full((len(ids), 2), -math.log(2)),
        'table': np.float32([[0.], [1.], [3.]]), 'pairs': [[0, 1], [1, 2]]}
    with self.assertRaisesRegex(ValueError, message):
      auditing.metric_epsilon_lower_bound(**{**arguments, **bad})


class ExponentialTest(parameterized.TestCase):

  @parameterized.product(num_words=(2, 128, 129, 300), rate=(.3, 2.),
                         cap=(math.inf, 1.5))
  def test_equals_the_exact_audit_over_all_triples(self, num_words, rate, cap):
    vectors = _vectors(num_words, 3, num_words)
    distances = _distances(vectors)
    want = auditing.exact_metric_epsilon(
        _softmax(distances, rate, cap), distances)
    found = auditing.exponential_metric_epsilon(vectors, rate, cap)
    self.assertAlmostEqual(found.epsilon, want.epsilon,
                           delta=1e-9 * want.epsilon)
    # Outputs beyond the cap of both words tie; the pair and its order do not.
    self.assertEqual(found.triple[:2], want.triple[:2])
    self.assertEqual(found[2:], ('exact', num_words * (num_words - 1) // 2))
    other = auditing.exponential_metric_epsilon(vectors, 1.01 * rate, cap)
    self.assertGreater(abs(other.epsilon - want.epsilon), 1e-3 * want.epsilon)

  def test_rows_of_distances_may_join_words_that_are_not_comparable(self):
    distances = _distances(_vectors(200, 2, 1))
    island = np.arange(200) % 2
    distances[island[:, None] != island] = np.inf
    with np.errstate(divide='ignore'):
      want = auditing.exact_metric_epsilon(_softmax(distances, 1.), distances)
    found = auditing.exponential_metric_epsilon(lambda ids: distances[ids], 1.)
    self.assertAlmostEqual(found.epsilon, want.epsilon, places=10)
    self.assertEqual(found.triple[:2], want.triple[:2])
    apart = np.where(np.eye(3, dtype=bool), 0., np.inf)
    self.assertEqual(
        auditing.exponential_metric_epsilon(lambda ids: apart[ids], 1.),
        (0., None, 'exact', 3))

  def test_two_equal_words_add_nothing(self):
    vectors = np.float32([[0.], [1.], [0.], [3.]])
    distances = _distances(vectors)
    want = auditing.exact_metric_epsilon(_softmax(distances, 1.), distances)
    found = auditing.exponential_metric_epsilon(vectors, 1.)
    self.assertAlmostEqual(found.epsilon, want.epsilon, places=13)
    self.assertBetween(found.epsilon, 1., 2.)

  def test_beyond_the_exact_audit_its_witness_shows_the_epsilon(self):
    vectors = _vectors(4_100, 2, 2)
    found = auditing.exponential_metric_epsilon(vectors, 3., 1.)
    w, w_prime, u = found.triple
    rows = exponential.log_prob([w, w_prime], vectors, rate=3., cap=1.)
    distance = np.linalg.norm(np.float64(vectors[w]) - vectors[w_prime])
    shown = (rows[0, u] - rows[1, u]) / distance
    # Ratios of near words lose digits: 1e-14 of log-probability a distance.
    self.assertAlmostEqual(found.epsilon, shown, delta=1e-13 / distance)
    pairs = np.random.default_rng(3).integers(4_100, size=(400, 2))
    pairs[0] = w, w_prime
    below = auditing.metric_epsilon_lower_bound(
        lambda ids: exponential.log_prob(ids, vectors, rate=3., cap=1.),
        vectors, pairs[pairs[:, 0] != pairs[:, 1]])
    self.assertEqual(below.triple, found.triple)
    self.assertAlmostEqual(below.epsilon, found.epsilon, delta=1e-13 / distance)

  @parameterized.parameters(
      ({'rate': 0.}, 'rate=0.0'), ({'rate': math.inf}, 'rate=inf'),
      ({'rate': math.nan}, 'rate=nan'), ({'cap': 0.}, 'cap=0.0'),
      ({'cap': -1.}, 'cap=-1.0'), ({'cap': math.nan}, 'cap=nan'),
      ({'source': np.zeros(4)}, r'\(4,\)'),
      ({'source': np.zeros((1, 2))}, 'at least 2'),
      ({'source': np.full((2, 2), np.inf)}, 'finite'),
      ({'source': lambda ids: -np.ones((len(ids), 2))}, 'negative'),
      ({'source': lambda ids: np.full((len(ids), 2), np.nan)}, 'NaN'),
      ({'source': lambda ids: np.ones((len(ids), 2))}, 'to itself'),
      ({'source': lambda ids: np.zeros((1, 3))}, r'\(1, 3\)'))
  def test_refuses_bad_input_by_name(self, bad, message):
    arguments = {'source': np.float32([[0.], [1.]]), 'rate': 1.,
                 'cap': math.inf, **bad}
    with self.assertRaisesRegex(ValueError, message):
      auditing.exponential_metric_epsilon(*arguments.values())


class SampledTest(parameterized.TestCase):

  def _false_alarms(self, sample, num_runs=200):
    """How often equal laws on 50 outcomes are told apart."""
    generator = np.random.default_rng(3)
    wrong = 0
    for _ in range(num_runs):
      found = auditing.sampled_epsilon_lower_bound(
          sample(generator), sample(generator), num_outcomes=50,
          significance=.05)
      wrong += found.epsilon_lower > 0
    return wrong

  def test_equal_laws_are_told_apart_no_oftener_than_it_says(self):
    # 1e-3 of the time a true rate of .05 gives more.
    most = stats.binom.isf(1e-3, 200, .05)
    alarms = self._false_alarms(lambda g: g.integers(50, size=1_000))
    self.assertLessEqual(alarms, most)
    # Testing the very samples that chose the event is what a split prevents.
    again = self._false_alarms(lambda g: np.tile(g.integers(50, size=500), 2))
    self.assertGreater(again, most)

  def test_each_half_serves_one_purpose_only(self):
    generator = np.random.default_rng(4)
    draw = lambda p: generator.choice(4, 500, p=p)
    run = lambda *halves: auditing.sampled_epsilon_lower_bound(
        np.concatenate(halves[:2]), np.concatenate(halves[2:]),
        num_outcomes=4, significance=.05, num_selected=1)
    rare, even = [.05, .3, .3, .35], [.25, .25, .25, .25]
    found = run(draw(even), draw(even), draw(rare), draw(rare))
    self.assertEqual((found.outcomes, found.direction), ((0,), 'x'))
    # The event is the first halves' even where the second halves belie it ...
    belied = run(draw(even), draw(rare), draw(rare), draw(even))
    self.assertEqual(belied[1:3], ((0,), 'x'))
    self.assertEqual(belied.epsilon_lower, 0.)
    # ... and its bound the second halves', whatever chose it.
    tests = draw(even), draw(rare)
    bounds = {run(draw(even), tests[0], draw(rare), tests[1]).epsilon_lower
              for _ in range(3)}
    self.assertLen(bounds, 1)
    self.assertBetween(bounds.pop(), 1., math.log(5))

  def test_disjoint_laws_reach_the_ceiling_in_closed_form(self):
    found = auditing.sampled_epsilon_lower_bound(
        np.zeros(2_000, int), np.ones(600, int), 2., num_outcomes=2,
        significance=.05)
    tail = .05 / 4  # two events, two sides
    ceiling = max(math.log(tail ** (1 / n) / (1 - tail ** (1 / m)))
                  for n, m in ((1_000, 300), (300, 1_000)))
    self.assertAlmostEqual(found.ceiling, ceiling / 2, places=12)
    self.assertAlmostEqual(found.epsilon_lower, found.ceiling, places=12)
    self.assertEqual((found.outcomes, found.direction), ((1,), 'x_prime'))

  def test_unions_show_what_no_single_outcome_can(self):
    likely = np.where(np.arange(1_000) < 500, 1.6, .4) / 1_000
    generator = np.random.default_rng(5)
    samples = [generator.choice(1_000, 20_000, p=p)
               for p in (likely, likely[::-1])]
    found = auditing.sampled_epsilon_lower_bound(
        *samples, num_outcomes=1_000, significance=.05)
    self.assertBetween(found.epsilon_lower, .8, math.log(4))
    self.assertGreater(len(found.outcomes), 30)
    side = np.array(found.outcomes) < 500
    self.assertGreater(abs(side.mean() - .5), .4)
    self.assertSequenceEqual(sorted(set(found.outcomes)), found.outcomes)

  @parameterized.parameters((1., False), (2., True))
  def test_randomised_response_with_half_the_noise_is_caught(
      self, epsilon, violated):
    keep = math.exp(epsilon) / (math.exp(epsilon) + 3)
    law = np.full((2, 4), (1 - keep) / 3)
    law[0, 1] = law[1, 2] = keep
    generator = np.random.default_rng(6)
    samples = [generator.choice(4, 20_000, p=p) for p in law]
    run = lambda distance: auditing.sampled_epsilon_lower_bound(
        *samples, distance, num_outcomes=4, significance=.05)
    found = run(1.)
    self.assertEqual(found.epsilon_lower > 1., violated)
    self.assertBetween(found.epsilon_lower, .85 * epsilon, epsilon)
    self.assertLess(found.epsilon_lower, found.ceiling)
    self.assertEqual(run(4.).epsilon_lower, found.epsilon_lower / 4)

  @parameterized.parameters(
      ({'outputs': [0, 3]}, r'num_outcomes=3\)'),
      ({'outputs': [0, -1]}, 'outputs reach from -1'),
      ({'outputs': [0]}, 'N >= 2'), ({'outputs': [[0, 1]]}, r'\(1, 2\)'),
      ({'outputs_prime': [0., 1.]}, 'outputs_prime .* float64'),
      ({'distance': 0.}, 'distance=0.0'),
      ({'distance': math.inf}, 'not comparable'),
      ({'significance': .5}, 'significance=0.5'),
      ({'significance': math.nan}, 'significance=nan'),
      ({'num_outcomes': 0}, 'num_outcomes=0'),
      ({'num_selected': 0}, 'num_selected=0'))
  def test_refuses_bad_input_by_name(self, bad, message):
    arguments = {'outputs': [0, 1, 2], 'outputs_prime': [1, 2, 2],
                 'distance': 1., 'num_outcomes': 3,
                 'significance': .05}
    with self.assertRaisesRegex(ValueError, message):
      auditing.sampled_epsilon_lower_bound(**{**arguments, **bad})


if __name__ == '__main__':
  absltest.main()
