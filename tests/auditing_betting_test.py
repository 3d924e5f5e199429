"""The betting test against a plain loop, enumeration and known violations."""

import dataclasses
import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from scipy import stats

from jaxdp import auditing


def _loop(hits, hits_prime, epsilon, delta, significance):
  """The product of the definition, its bet fixed before each pair is seen."""
  largest = 1 / (math.exp(epsilon) + delta)
  bets = [largest * 2 ** (-j / 2) for j in range(1, 33)]
  prior = [1 / j for j in range(1, 33)]
  wealth = [w / sum(prior) for w in prior]
  total, best = 1., 1.
  for t, (hit, hit_prime) in enumerate(zip(hits, hits_prime, strict=True)):
    bet = sum(b * w for b, w in zip(bets, wealth)) / sum(wealth)
    assert 0 <= bet <= largest
    gain = float(hit) - math.exp(epsilon) * float(hit_prime) - delta
    total *= 1 + bet * gain
    wealth = [w * (1 + b * gain) for b, w in zip(bets, wealth)]
    best = max(best, total)
    if total >= 1 / significance:
      return True, t + 1, math.log(best)
  return False, len(hits), math.log(best)


def _laplace(generator, num_pairs, epsilon):
  """Sign of 0 and of 1 with Laplace noise: a ratio of exactly e^epsilon."""
  noise = generator.laplace(0., 1 / epsilon, (2, num_pairs))
  return noise[0] < 0., 1. + noise[1] < 0.


def _adept(generator, num_pairs, epsilon, n):
  """Majority of n coordinates; noise for a sensitivity of one, not n."""
  def vote(x):
    noisy = x + generator.laplace(0., 1 / epsilon, (num_pairs, n))
    return (noisy >= .5).sum(1) * 2 > n
  return vote(1.), vote(0.)


def _dptext(generator, num_pairs, epsilon, n):
  """Noise that is half an atom at zero, half exponential; below one or not."""
  del n
  noise = np.where(generator.random((2, num_pairs)) < .5, 0.,
                   generator.exponential(1 / epsilon, (2, num_pairs)))
  return noise[0] < 1., 1. + noise[1] < 1.


class DefinitionTest(parameterized.TestCase):

  @parameterized.product(epsilon=(0., .3, 2.), delta=(0., .05),
                         rates=((.5, .5), (.7, .4), (.05, .01), (.3, 0.)))
  def test_equals_the_loop_of_predictable_bets(self, epsilon, delta, rates):
    generator = np.random.default_rng(4)
    hits, hits_prime = generator.random((2, 400)) < np.array(rates)[:, None]
    for significance in (.05, .4):
      rejected, pairs_used, log_wealth = _loop(
          hits, hits_prime, epsilon, delta, significance)
      got = auditing.betting_test(hits, hits_prime, epsilon=epsilon,
                                  delta=delta, significance=significance)
      self.assertEqual(got[:2], (rejected, pairs_used))
      self.assertAlmostEqual(got.log_wealth, log_wealth, delta=1e-10)
    self.assertIs(type(got.rejected), bool)
    self.assertIs(type(got.pairs_used), int)
    self.assertIs(type(got.log_wealth), float)

  @parameterized.parameters((0., .5, 0.), (.1, .6, 0.), (.5, .4, 0.),
                            (.3, .3, .1))
  def test_rejects_a_true_claim_no_more_than_stated_by_enumeration(
      self, epsilon, p_prime, delta):
    # The least favourable law: p is all that the claim allows.
    p = min(1., math.exp(epsilon) * p_prime + delta)
    law = np.outer([p, 1 - p], [p_prime, 1 - p_prime]).ravel()
    outcomes = [(1, 1), (1, 0), (0, 1), (0, 0)]
    rejected = {.1: 0., .45: 0.}
    for path in itertools.product(range(4), repeat=5):
      pairs = np.array([outcomes[i] for i in path], bool)
      for significance in rejected:
        result = auditing.betting_test(
            pairs[:, 0], pairs[:, 1], epsilon=epsilon, delta=delta,
            significance=significance)
        rejected[significance] += law[list(path)].prod() * result.rejected
    for significance, probability in rejected.items():
      self.assertLessEqual(probability, significance)
    self.assertGreater(rejected[.45], 1e-3)  # it can reject at all

  def test_no_wealth_is_won_where_nothing_happens(self):
    ones, zeros = np.ones(500, bool), np.zeros(500, bool)
    for hits, hits_prime in ((zeros, zeros), (ones, ones), (zeros, ones)):
      self.assertEqual(
          auditing.betting_test(hits, hits_prime, epsilon=0.),
          (False, 500, 0.))
    self.assertTrue(auditing.betting_test(ones, zeros, epsilon=0.).rejected)

  def test_any_epsilon_is_safe_from_overflow(self):
    ones = np.ones(2, bool)
    for epsilon in (710., 1e9):
      self.assertEqual(auditing.betting_test(ones, ~ones, epsilon=epsilon)[:2],
                       (False, 2))

  def test_log_wealth_is_that_of_a_p_value(self):
    # After a rejection at .05, and only then, exp(-log_wealth) is below it.
    generator = np.random.default_rng(6)
    for _ in range(20):
      result = auditing.betting_test(
          *_adept(generator, 60, 1., 8), epsilon=1.)
      self.assertEqual(result.rejected, math.exp(-result.log_wealth) <= .05)


class PowerTest(parameterized.TestCase):

  @parameterized.parameters((_dptext, 1., 1, 36, 500),
                            (_adept, 1., 8, 150, 3_000),
                            (_adept, .1, 2, 20_000, 300_000))
  def test_finds_the_published_violations(self, draw, epsilon, n, median, most):
    results = [auditing.betting_test(
        *draw(np.random.default_rng(seed), most, epsilon, n), epsilon=epsilon)
               for seed in range(20)]
    self.assertGreaterEqual(sum(r.rejected for r in results), 19)
    self.assertLess(np.median([r.pairs_used for r in results]), median)

  def test_rejects_a_correct_laplace_no_more_than_stated(self):
    num, num_pairs = 200, 20_000
    allowed = stats.binom.isf(1e-3, num, .05)  # of this test's false alarms
    rejected, cheated, halved = 0, 0, 0
    fractions = 2. ** (-np.arange(1, 33) / 2)
    gains = np.array([math.exp(-1.), math.exp(-1.) - 1, -1.])
    log_factors = np.log1p(gains[:, None] * fractions)
    for seed in range(num):
      generator = np.random.default_rng(1_000 + seed)
      hits, hits_prime = _laplace(generator, num_pairs, 1.)
      rejected += auditing.betting_test(hits, hits_prime, epsilon=1.).rejected
      # A bet chosen in hindsight is not predictable, and is caught here.
      counts = np.cumsum(np.stack(
          [hits & ~hits_prime, hits & hits_prime, ~hits & hits_prime], 1), 0)
      cheated += (counts[::20] @ log_factors).max() >= math.log(20.)
      # The same mechanism against a claim that it does not keep.
      if seed < 20:
        halved += auditing.betting_test(hits, hits_prime, epsilon=.5).rejected
    self.assertLessEqual(rejected, allowed)
    self.assertGreater(cheated, allowed)
    self.assertEqual(halved, 20)

  def test_silent_noise_is_found_at_once(self):
    result = auditing.betting_test(
        np.ones(100, bool), np.zeros(100, bool), epsilon=1.)
    self.assertTrue(result.rejected)
    self.assertLess(result.pairs_used, 20)


class BettorTest(parameterized.TestCase):

  @parameterized.product(size=(1, 7, 4095, 4096, 4097), epsilon=(.15, 1.))
  def test_blocks_never_show(self, size, epsilon):
    num = 200 if size == 1 else 9_000
    hits, hits_prime = _adept(np.random.default_rng(1), num, .1, 2)
    whole = auditing.betting_test(hits, hits_prime, epsilon=epsilon)
    bettor = auditing.Bettor(epsilon=epsilon)
    for start in range(0, num, size):
      bettor = bettor.update(hits[start:start + size],
                             hits_prime[start:start + size])
    self.assertEqual(bettor.result, whole)
    self.assertEqual(sum(bettor.counts), whole.pairs_used)

  def test_stops_at_the_first_crossing_and_stays(self):
    hits, hits_prime = _adept(np.random.default_rng(1), 2_000, 1., 8)
    bettor = auditing.Bettor(epsilon=1.).update(hits, hits_prime)
    self.assertTrue(bettor.rejected)
    self.assertLess(bettor.pairs_used, 200)
    self.assertIs(bettor.update(hits, hits_prime), bettor)
    before = slice(bettor.pairs_used - 1)
    self.assertFalse(auditing.betting_test(
        hits[before], hits_prime[before], epsilon=1.).rejected)

  def test_a_state_is_never_changed(self):
    start = auditing.Bettor(epsilon=1.)
    start.update(np.ones(50, bool), np.zeros(50, bool))
    self.assertEqual(start, auditing.Bettor(epsilon=1.))
    with self.assertRaises(dataclasses.FrozenInstanceError):
      start.epsilon = 2.

  def test_no_pairs_change_nothing(self):
    start = auditing.Bettor(epsilon=1.)
    self.assertEqual(start.update(np.zeros(0, bool), np.zeros(0, bool)), start)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ({'epsilon': -1.}, 'epsilon=-1.0'), ({'epsilon': math.nan}, 'epsilon='),
      ({'epsilon': math.inf}, 'epsilon=inf'), ({'epsilon': [1.]}, 'epsilon='),
      ({'epsilon': 1., 'significance': 0.}, 'significance=0.0'),
      ({'epsilon': 1., 'significance': .5}, 'significance=0.5'),
      ({'epsilon': 1., 'significance': math.nan}, 'significance=nan'),
      ({'epsilon': 1., 'delta': -.1}, 'delta=-0.1'),
      ({'epsilon': 1., 'delta': 1.}, 'delta=1.0'),
      ({'epsilon': 1., 'delta': math.nan}, 'delta=nan'))
  def test_settings_are_refused_by_name(self, settings, message):
    for call in (auditing.Bettor, lambda **kw: auditing.betting_test(
        np.ones(2, bool), np.ones(2, bool), **kw)):
      with self.assertRaisesRegex(ValueError, message):
        call(**settings)

  @parameterized.parameters(
      (np.ones(3), np.ones(3, bool), 'hits of dtype float64'),
      (np.ones(3, bool), np.ones(3, int), 'hits_prime of dtype int64'),
      (np.ones((3, 1), bool), np.ones(3, bool), r'shape \(3, 1\)'),
      (np.ones(3, bool), np.ones(4, bool), 'hits_prime of length 4'))
  def test_pairs_are_refused_by_name(self, hits, hits_prime, message):
    with self.assertRaisesRegex(ValueError, message):
      auditing.betting_test(hits, hits_prime, epsilon=1.)


if __name__ == '__main__':
  absltest.main()
