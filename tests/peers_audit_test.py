"""Every fault is caught, its law is a law, and without the fault it passes."""

import dataclasses
import json
import math
import os

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
from scipy import stats

from experiments import command_line
from experiments import peers_audit
from experiments import peers_faults
from experiments import records
from experiments import report
from jaxdp import mechanisms

_FAULTS = {fault.mechanism: fault for fault in peers_faults.FAULTS}
_FALSE_ALARM = 1e-3
_RUNS = 200_000
_GUMBEL_RUNS = 40_000


def _params(name):
  """Test parameters: one test a fault, named after it."""
  return [dict(testcase_name=''.join(c if c.isalnum() else '_' for c in n),
               **{name: n}) for n in _FAULTS]


def _library(name, table, epsilon, **settings):
  mechanism = mechanisms.get(name)
  ids = np.arange(len(table.words))
  params = mechanism.calibrate(table, epsilon=epsilon, **settings)
  return mechanism.log_prob(ids, params)


def _p_value(outputs, log_probs):
  """Chi-square of ids against a law; rare words are pooled."""
  expected = np.exp(log_probs) * len(outputs)
  counts = np.bincount(outputs, minlength=len(expected))
  common = expected >= 20
  pooled = [np.append(x[common], x[~common].sum()) for x in (counts, expected)]
  counts, expected = (x[:-1] if pooled[1][-1] < 1e-9 else x for x in pooled)
  if counts.sum() != len(outputs):
    return 0.  # an impossible word came out
  statistic = np.sum((counts - expected)**2 / expected)
  return stats.chi2.sf(statistic, len(counts) - 1)


def _run_gumbel(rng, distance, scale, bound, is_poisson_cut):
  """Candidates and noise by rejection, word by word as one would write it."""
  num = len(distance)
  k = rng.poisson(math.log(num - 1 if is_poisson_cut else num),
                  2 * _GUMBEL_RUNS)
  inside = (k >= 1) & (k < num)
  k = k[inside] if is_poisson_cut else np.where(inside, k, num)
  k = k[:_GUMBEL_RUNS, None]
  noise = rng.gumbel(scale=scale, size=8 * _GUMBEL_RUNS * num)
  noise = noise[abs(noise) <= bound][:_GUMBEL_RUNS * num].reshape(-1, num)
  order = np.argsort(distance)
  noisy = np.where(np.arange(num) < k, distance[order] + noise, np.inf)
  return order[np.argmin(noisy, axis=1)]


def _run_ellipse(rng, vectors, word, factor, epsilon, renormalised):
  noise = rng.normal(size=(_RUNS, 2))
  noise = noise / np.linalg.norm(noise, axis=1, keepdims=True) @ factor.T
  if renormalised:
    noise = noise / np.linalg.norm(noise, axis=1, keepdims=True)
  noisy = vectors[word] + noise * rng.gamma(2., 1 / epsilon, (_RUNS, 1))
  return np.argmin(((noisy[:, None] - vectors[None])**2).sum(-1), axis=1)


class RowsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.rows = list(peers_audit.run(peers_audit.QUICK))

  def test_every_fault_is_caught(self):
    self.assertLen(self.rows, len(_FAULTS) + 1)
    for row in self.rows:
      self.assertEqual((row['verdict'], row['status']), ('violated', 'claimed'),
                       row['mechanism'])
      self.assertGreater(row['measured_low'], row['claimed_epsilon'])
      self.assertEqual(row['ratio'], row['measured'] / row['claimed_epsilon'])

  def test_no_sound_counterpart_is_caught(self):
    for row in self.rows:
      self.assertEqual((row['sound_verdict'], row['sound_status']),
                       ('not violated', 'proved'), row['mechanism'])
      self.assertGreater(row['sound_measured'], 0.)

  def test_only_the_row_that_runs_is_a_lower_bound(self):
    kinds = [row['measured_kind'] for row in self.rows]
    self.assertEqual(kinds, ['exact'] * len(_FAULTS) + ['lower bound'])
    self.assertEqual(self.rows[-1]['settings'], {'run': 'numpy'})
    self.assertTrue(math.isfinite(self.rows[-1]['measured']))

  def test_rows_are_written_read_back_drawn_and_not_made_twice(self):
    out = self.create_tempdir().full_path
    rows = peers_audit.execute(peers_audit.QUICK, out)
    self.assertEqual(rows, json.loads(json.dumps(self.rows)))
    self.assertEqual(records.read(os.path.join(out, 'rows.jsonl'))[1], rows)
    self.assertGreater(
        os.path.getsize(os.path.join(out, 'peers.png')), 5_000)
    with absltest.mock.patch.object(
        peers_audit, 'measure', side_effect=AssertionError):
      self.assertEqual(peers_audit.execute(peers_audit.QUICK, out), rows)

  def test_the_report_shows_every_row(self):
    out = self.create_tempdir().full_path
    peers_audit.execute(peers_audit.QUICK, os.path.join(out, 'peers'))
    section = report.Section('peers', 'peers', 'Peers', peers_audit.FIGURES,
                             peers_audit.findings)
    page = report.render(out, [section], [], title='T')
    for name in _FAULTS:
      self.assertIn(name, page)
    self.assertNotIn('not measured', page)

  def test_findings_are_read_from_the_rows(self):
    changed = [dict(row) for row in self.rows]
    changed[0] |= {'measured': 1.2345, 'verdict': 'not violated'}
    before, after = map(peers_audit.findings, (self.rows, changed))
    self.assertIn(f'{len(self.rows)} of {len(self.rows)}', before[0])
    self.assertIn(f'{len(self.rows) - 1} of {len(self.rows)}', after[0])
    self.assertIn('1.234', after[1])
    self.assertEqual(before[2:], after[2:])

  def test_the_grid_names_the_rows(self):
    self.assertEqual(
        peers_audit.grid(peers_audit.QUICK),
        [tuple(row[name] for name in peers_audit.KEY) for row in self.rows])

  def test_the_command_line_has_what_it_needs(self):
    self.assertEqual(command_line.config(peers_audit, False, 7),
                     dataclasses.replace(peers_audit.Config(), seed=7))
    self.assertNotEqual(peers_audit.QUICK, peers_audit.Config())

  def test_the_seed_moves_the_row_that_runs_and_no_other(self):
    config = dataclasses.replace(peers_audit.QUICK, seed=1)
    for row, other in zip(self.rows, peers_audit.run(config), strict=True):
      self.assertEqual(row == other, row['measured_kind'] == 'exact')

  @parameterized.named_parameters(_params('name'))
  def test_a_claim_above_the_measured_epsilon_is_not_violated(self, name):
    fault = _FAULTS[name]
    [row] = [row for row in self.rows if row['mechanism'] == name
             and row['measured_kind'] == 'exact']
    measured = row['measured']
    if math.isinf(measured):
      self.assertEqual(peers_audit.exact_row(fault, 1e300)['verdict'],
                       'violated')
      return
    for factor, verdict in ((1.001, 'not violated'), (.999, 'violated')):
      row = peers_audit.exact_row(fault, factor * measured)
      self.assertEqual(row['verdict'], verdict)
      self.assertEqual(row['claimed_epsilon'], factor * measured)

  @parameterized.named_parameters(_params('name'))
  def test_the_law_sums_to_one_and_the_witness_shows_the_epsilon(self, name):
    fault = _FAULTS[name]
    table = peers_faults.make_table(fault.table)
    law = fault.law(table, fault.epsilon, **fault.settings)
    np.testing.assert_allclose(np.exp(law.log_probs).sum(axis=1), 1., rtol=0,
                               atol=1e-9)
    with np.errstate(divide='ignore', invalid='ignore'):
      gap = law.log_probs[:, None] - law.log_probs[None]
      gap = np.nanmax(np.abs(gap), axis=2)  # impossible under both is NaN
      ratio = gap / law.distances
    off = ~np.eye(len(gap), dtype=bool)
    [row] = [row for row in self.rows if row['mechanism'] == name
             and row['measured_kind'] == 'exact']
    np.testing.assert_allclose(row['measured'], ratio[off].max(), rtol=1e-12)


class RightInAllElseTest(parameterized.TestCase):
  """With its fault turned off each mechanism is the library's, to rounding."""

  @parameterized.named_parameters(
      ('tem', 'mldp: TEM, outside score', 'tem', {}, {'package_words': None}),
      ('unknown_words', 'mldp: unknown words', 'multivariate_laplace', {},
       {'known': 8}),
      ('kept_words', 'santext+: kept words', 'santext', {}, {'sensitive': 6}),
      ('lists', 'custext: aggressive lists', 'custext', {'group_size': 8},
       {'group_size': 8}),
      ('stop_words', 'custext: stop words', 'custext', {'group_size': 8},
       {'num_stop_words': 0}))
  def test_the_repaired_law_is_the_librarys(self, name, sound, settings, off):
    fault = _FAULTS[name]
    table = peers_faults.make_table(fault.table)
    law = fault.law(table, fault.epsilon, **off)
    np.testing.assert_allclose(
        law.log_probs, _library(sound, table, fault.epsilon, **settings),
        rtol=1e-6, atol=1e-9)  # the library's rates are float32
    self.assertEqual(peers_audit.measure(law, fault.epsilon)['verdict'],
                     'not violated')

  def test_plain_distances_give_the_published_gumbel_law(self):
    fault = _FAULTS['mldp: squared distances']
    table = peers_faults.make_table(fault.table)
    law = peers_faults.squared_distances(table, fault.epsilon, power=1)
    np.testing.assert_allclose(
        law.log_probs, _library('truncated_gumbel', table, fault.epsilon),
        rtol=1e-5, atol=1e-6)
    self.assertEqual(peers_audit.measure(law, fault.epsilon)['verdict'],
                     'not violated')

  @parameterized.parameters('mldp: one random word',
                            'mldp: Lambert W, real part')
  def test_the_published_gumbel_mechanism_is_refused_there(self, name):
    fault = _FAULTS[name]
    table = peers_faults.make_table(fault.table)
    with self.assertRaisesRegex(ValueError, 'must exceed'):
      mechanisms.get('truncated_gumbel').calibrate(table, epsilon=fault.epsilon)

  def test_a_word_of_the_closest_pair_would_have_been_refused(self):
    table = peers_faults.make_table('twins-12')
    with self.assertRaisesRegex(ValueError, 'must exceed'):
      peers_faults.one_random_word(table, 12., 'w11')

  def test_workers_with_their_own_state_are_two_santexts(self):
    fault = _FAULTS['santext: forked workers']
    table = peers_faults.make_table(fault.table)
    one = _library('santext', table, fault.epsilon)
    law = peers_faults.forked_workers(table, fault.epsilon, shared=False)
    for a, b in ((0, 0), (0, 3), (4, 1)):
      np.testing.assert_allclose(
          law.log_probs[5 * a + b], np.add.outer(one[a], one[b]).ravel(),
          rtol=1e-6)


class LawsTest(parameterized.TestCase):
  """The laws against plain NumPy simulations, which reject the wrong law."""

  @parameterized.named_parameters(
      ('squared', 'mldp: squared distances', 2, False),
      ('poisson', 'mldp: Poisson by rejection', 1, True))
  def test_gumbel_laws_are_those_of_a_simulation(self, name, power, is_cut):
    fault = _FAULTS[name]
    table = peers_faults.make_table(fault.table)
    distance = np.abs(table.vectors[:, 0] - table.vectors[2, 0])
    line = table.vectors[:, 0].astype(np.float64)
    diameter, minimum = line[-1] - line[0], np.diff(line).min()
    scale = peers_faults.truncated_gumbel_law.paper_scale(
        fault.epsilon, len(line), diameter, minimum)
    outputs = _run_gumbel(np.random.default_rng(0), distance**power, scale,
                          diameter, is_cut)
    law = fault.law(table, fault.epsilon).log_probs[2]
    wrong = peers_faults.squared_distances(table, fault.epsilon, power=1)
    self.assertGreater(_p_value(outputs, law), _FALSE_ALARM)
    self.assertLess(_p_value(outputs, wrong.log_probs[2]), _FALSE_ALARM)

  @parameterized.parameters(True, False)
  def test_rays_give_the_law_of_elliptical_noise(self, renormalised):
    fault = _FAULTS['pypantera: Mahalanobis']
    table = peers_faults.make_table(fault.table)
    params = mechanisms.get('mahalanobis').calibrate(
        table, epsilon=fault.epsilon, **fault.settings)
    outputs = _run_ellipse(
        np.random.default_rng(1), table.vectors.astype(np.float64), 3,
        params.factor.astype(np.float64), fault.epsilon, renormalised)
    right, wrong = (peers_faults.mahalanobis(
        table, fault.epsilon, **fault.settings, renormalised=r).log_probs[3]
                    for r in (renormalised, not renormalised))
    self.assertGreater(_p_value(outputs, right), _FALSE_ALARM)
    self.assertLess(_p_value(outputs, wrong), _FALSE_ALARM)

  def test_more_rays_change_a_law_by_less_than_its_error(self):
    fault = _FAULTS['pypantera: Mahalanobis']
    table = peers_faults.make_table(fault.table)
    law = fault.law(table, fault.epsilon, **fault.settings)
    with absltest.mock.patch.object(peers_faults, '_ANGLES', 2**14):
      finer = fault.law(table, fault.epsilon, **fault.settings)
    change = np.abs(law.log_probs - finer.log_probs).max()
    self.assertBetween(change, 1e-14, law.error / 10)

  def test_vickrey_takes_the_word_nearest_to_the_noise_but_never_its_own(self):
    fault = _FAULTS['mldp: Vickrey, no input word']
    table = peers_faults.make_table(fault.table)
    line = table.vectors[:, 0].astype(np.float64)
    noisy = line[4] + np.random.default_rng(2).laplace(
        scale=1 / fault.epsilon, size=_RUNS)
    order = np.argsort(np.abs(noisy[:, None] - line), axis=1)[:, :2]
    outputs = np.where(order[:, 0] == 4, order[:, 1], order[:, 0])
    law = fault.law(table, fault.epsilon).log_probs[4]
    self.assertEqual(law[4], -math.inf)
    self.assertGreater(_p_value(outputs, law), _FALSE_ALARM)
    wrong = fault.law(table, .9 * fault.epsilon).log_probs[4]
    self.assertLess(_p_value(outputs, wrong), _FALSE_ALARM)

  def test_tem_with_the_wrong_count_draws_as_its_near_list_and_bottom(self):
    fault = _FAULTS['mldp: TEM, outside score']
    table = peers_faults.make_table(fault.table)
    rng, epsilon = np.random.default_rng(3), fault.epsilon
    distance = np.abs(table.vectors[:, 0] - table.vectors[20, 0])
    radius = 2 / epsilon * math.log(.999 * 29 / .001)
    near = np.flatnonzero(distance <= radius)
    score = np.append(-distance[near],
                      -radius + 2 / epsilon * math.log(4e5 / len(near)))
    choice = np.argmax(score + rng.gumbel(
        scale=2 / epsilon, size=(_RUNS, len(score))), axis=1)
    far = rng.choice(np.flatnonzero(distance > radius), _RUNS)
    outputs = np.where(choice == len(near), far, np.append(near, -1)[choice])
    law = fault.law(table, epsilon, 400_000).log_probs[20]
    self.assertGreater(_p_value(outputs, law), _FALSE_ALARM)
    wrong = fault.law(table, epsilon, None).log_probs[20]
    self.assertLess(_p_value(outputs, wrong), _FALSE_ALARM)

  def test_shared_uniforms_are_one_inverse_cdf_twice(self):
    fault = _FAULTS['santext: forked workers']
    table = peers_faults.make_table(fault.table)
    law = fault.law(table, fault.epsilon)
    cdf = np.cumsum(np.exp(_library('santext', table, fault.epsilon)), axis=1)
    u = (np.arange(_RUNS) + .5) / _RUNS
    for a, b in ((0, 0), (0, 1), (3, 1)):
      pairs = 5 * np.searchsorted(cdf[a], u) + np.searchsorted(cdf[b], u)
      share = np.bincount(pairs, minlength=25) / _RUNS
      np.testing.assert_allclose(
          np.exp(law.log_probs[5 * a + b]), share, atol=2 / _RUNS + 1e-6)

  def test_default_gumbel_noise_ends_where_the_law_says(self):
    low, high = peers_faults.gumbel_range()
    self.assertAlmostEqual(high, 23 * math.log(2), delta=1e-5)
    self.assertAlmostEqual(low, -math.log(126 * math.log(2)), delta=1e-5)
    # Endless noise passes the end twice in 2**24 draws, as 'high' does here.
    draw = jax.jit(lambda key, mode: jax.random.gumbel(
        key, (2**24,), mode=mode).max(), static_argnums=1)
    self.assertLessEqual(float(draw(jax.random.key(1), None)), high)
    self.assertGreater(float(draw(jax.random.key(1), 'high')), high)

  def test_another_table_is_refused(self):
    with self.assertRaisesRegex(ValueError, "name='cauchy-3'"):
      peers_faults.make_table('cauchy-3')


if __name__ == '__main__':
  absltest.main()
