"""Habernal (2022): closed form, our runs and published numbers agree."""

import json
import math
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest
from scipy import stats

from experiments import habernal22_adept
from experiments import habernal22_fig1
from jaxdp import auditing

_PUBLISHED = {
    'laplace': 'LaplaceMechanism', 'adept': 'LaplaceMechanismADePT',
    'dptext': 'BeigiEtAlLaplaceMechanism', 'copy': 'NoPrivacyMechanism',
    'random': 'CompletelyRandomMechanism',
    'wrong_sensitivity': 'LaplaceMechanismWrongSensitivity'}
_FALSE_ALARM = 6e-5  # a count; 1,000 counts, a false alarm of 6% in all


def _published():
  folder = os.environ.get('JAXDP_DATA_DIR')
  path = pathlib.Path(folder or '') / 'habernal22' / 'results.json'
  if not folder or not path.exists():
    pytest.skip('JAXDP_DATA_DIR has no habernal22/results.json')
  return json.loads(path.read_text())


def _cells():
  return [(e, n) for e in habernal22_fig1.Config().epsilons
          for n in habernal22_fig1.Config().dimensions]


def _counts_agree(row):
  """p-values of the two counts of a row under the closed form."""
  votes = habernal22_fig1.vote_probabilities(
      row['mechanism'], row['epsilon'], row['n'])
  return [stats.binomtest(row[name], row['num_trials'],
                          float(np.exp(log_p))).pvalue
          for name, (log_p, _) in zip(('hits', 'hits_prime'), votes)]


class ClosedFormTest(parameterized.TestCase):

  @parameterized.parameters(
      ('laplace', .1, 1, .0976), ('laplace', 1., 8, .3655),
      ('laplace', 10., 128, .7485), ('laplace', 2., 64, .2190),
      ('adept', .1, 2, .1952), ('adept', 1., 128, 13.7432),
      ('adept', 5., 8, 12.0445), ('adept', 10., 128, 284.2),
      ('wrong_sensitivity', 1., 1, 1.0), ('random', 1., 32, 0.))
  def test_golden_losses(self, mechanism, epsilon, n, loss):
    self.assertAlmostEqual(
        habernal22_fig1.exact_loss(mechanism, epsilon, n), loss,
        delta=max(6e-5, 2e-4 * loss))

  @parameterized.parameters((1, 1.1931, .6967), (2, 1.8863, .8484),
                            (8, 1.2065, .7007), (128, .8046, .5527))
  def test_dptext_is_infinite_on_one_vote_only(self, n, finite, no_vote):
    one, other = habernal22_fig1.vote_probabilities('dptext', 1., n)
    self.assertAlmostEqual(abs(one[0] - other[0]), finite, places=4)
    self.assertAlmostEqual(math.exp(one[1]), no_vote, places=4)
    self.assertEqual(habernal22_fig1.exact_loss('dptext', 1., n), math.inf)

  def test_every_finite_published_cell_is_within_four_deviations(self):
    published = _published()
    checked = 0
    for mechanism, name in _PUBLISHED.items():
      for epsilon, n in _cells():
        loss = published[name][str(epsilon)][str(n)]
        if not math.isfinite(loss):
          continue
        votes = habernal22_fig1.vote_probabilities(mechanism, epsilon, n)
        trials = 10_000_000 if n <= 16 else 1_000_000
        self.assertLessEqual(abs(_deviations(loss, votes, trials)), 4.,
                             (mechanism, epsilon, n))
        checked += 1
    self.assertEqual(checked, 158)

  def test_every_published_infinity_is_one_or_a_plausible_empty_count(self):
    published = _published()
    for mechanism, name in _PUBLISHED.items():
      for epsilon, n in _cells():
        if math.isfinite(published[name][str(epsilon)][str(n)]):
          continue
        if math.isinf(habernal22_fig1.exact_loss(mechanism, epsilon, n)):
          continue
        trials = 10_000_000 if n <= 16 else 1_000_000
        logs = [log for side in habernal22_fig1.vote_probabilities(
            mechanism, epsilon, n) for log in side]
        empty = max(trials * math.log1p(-math.exp(min(log, -1e-300)))
                    if log < 0 else -math.inf for log in logs)
        self.assertGreater(math.exp(empty), 1e-3, (mechanism, epsilon, n))


def _deviations(loss, votes, trials):
  """How many standard errors a loss is from the closed form."""
  best = (-1., 1.)
  for a, b in zip(*votes):
    if np.isneginf(a) or np.isneginf(b):
      continue
    spread = math.sqrt((-math.expm1(a)) / (trials * math.exp(a))
                       + (-math.expm1(b)) / (trials * math.exp(b)))
    best = max(best, (abs(a - b), spread))
  if best[0] == 0.:  # two fair votes: the larger of two absolute deviations
    return loss / best[1]
  return (loss - best[0]) / best[1]


class RunsTest(parameterized.TestCase):

  @parameterized.parameters(*habernal22_fig1.PANELS)
  def test_our_counts_are_those_of_the_law(self, mechanism):
    config = habernal22_fig1.Config(num_trials=100_000)
    for row in habernal22_fig1.sweep(config, mechanism, 2):
      self.assertGreater(min(_counts_agree(row)), _FALSE_ALARM, row['epsilon'])
      claimed = row['claimed_epsilon']
      if row['status'] == 'proved' and claimed > 0:
        self.assertEqual(row['verdict'], 'not violated')
      if mechanism == 'dptext':
        self.assertEqual(row['epsilon_point'], math.inf)

  def test_another_scale_is_not_the_law(self):
    config = habernal22_fig1.Config(num_trials=100_000)
    row = habernal22_fig1.sweep(config, 'laplace', 2)[-1]
    self.assertLess(min(_counts_agree(row | {'epsilon': 9.5})), 1e-6)

  def test_legacy_counts_take_a_tenth_above_16_dimensions(self):
    config = habernal22_fig1.Config(num_trials=20_000, legacy_counts=True,
                                    epsilons=(1.,))
    self.assertEqual([habernal22_fig1.sweep(config, 'copy', n)[0]['num_trials']
                      for n in (2, 32)], [20_000, 2_000])

  @parameterized.parameters(*habernal22_fig1.PANELS)
  @pytest.mark.slow
  def test_ten_million_runs_of_every_cell(self, mechanism):
    config = habernal22_fig1.Config()
    for n in config.dimensions:
      for row in habernal22_fig1.sweep(config, mechanism, n):
        self.assertGreater(min(_counts_agree(row)), _FALSE_ALARM,
                           (row['epsilon'], n))
        if mechanism == 'dptext':
          self.assertEqual(row['epsilon_point'], math.inf)
          self.assertEqual(row['verdict'], 'violated')
        if (mechanism, row['epsilon'], n) == ('adept', 1., 128):
          self.assertBetween(row['epsilon_point'], 12., 16.2)


class SharpnessTest(parameterized.TestCase):
  """What the auditor reaches at 10 M runs, as shares of the true epsilon."""

  @pytest.mark.slow
  def test_log_ratio_in_eight_dimensions(self):
    z, o = np.zeros(8, np.float32), np.ones(8, np.float32)
    declared, split = [], []
    for seed in range(10):
      common = dict(key=jax.random.key(seed), num_trials=10_000_000,
                    score=_log_ratio, vectorized=True)
      declared.append(auditing.audit(
          _eight, z, o, selection='fixed', thresholds=8., direction='x_prime',
          **common).epsilon_lower)
      split.append(auditing.audit(_eight, z, o, **common).epsilon_lower)
    self.assertGreaterEqual(np.mean(declared), .96)
    self.assertGreaterEqual(np.mean(split), .94)

  @parameterized.parameters(.5, 1., 2.)
  @pytest.mark.slow
  def test_one_dimension(self, epsilon):
    result = auditing.audit_sweep(
        habernal22_fig1.laplace, np.zeros(1, np.float32),
        np.ones(1, np.float32), np.float32([epsilon]),
        key=jax.random.key(0), num_trials=10_000_000, vectorized=True,
        claims=[epsilon])[0]
    self.assertGreaterEqual(result.epsilon_lower, .99 * epsilon)
    self.assertEqual(result.verdict, 'not violated')

  @pytest.mark.slow
  def test_over_400_seeds_a_true_claim_is_exceeded_no_more_than_stated(self):
    z, o = np.zeros(1, np.float32), np.ones(1, np.float32)
    exceeded = 0
    for seed in range(400):
      result = auditing.audit_sweep(
          _sweep_laplace, z, o, np.float32([1.]), key=jax.random.key(seed),
          num_trials=10_000, claims=[1.])[0]
      exceeded += result.verdict == 'violated'
    self.assertLessEqual(exceeded, stats.binom.isf(1e-3, 400, .05))


def _log_ratio(y):
  return (2 * y - 1).clip(-1., 1.).sum()


def _eight(key, x, num):
  return habernal22_fig1.laplace(key, x, num, 1.)


def _sweep_laplace(key, x, epsilon):
  return habernal22_fig1.laplace(key, x, 1, epsilon)[0]


class AdeptTest(absltest.TestCase):

  def test_as_printed_is_caught_and_the_repairs_are_not(self):
    config = habernal22_adept.Config(num_trials=40_000, significance=.01)
    verdicts = {form: habernal22_adept.row(config, form, 1., 8)['verdict']
                for form in habernal22_adept.FORMS}
    self.assertEqual(verdicts.pop('adept_as_printed'), 'violated')
    self.assertEqual(set(verdicts.values()), {'not violated'})


if __name__ == '__main__':
  absltest.main()
