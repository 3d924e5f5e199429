"""The exact law of the truncated Gumbel mechanism against four oracles.

Direct quadrature of the defining integral (n = 3, 4), 50-digit arithmetic (deep
entries), simulation (n = 12) and the printed golden numbers.
"""

import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
from scipy import integrate
from scipy import stats

from jaxdp import special
from jaxdp.mechanisms import truncated_gumbel_law

_FALSE_ALARM = 1e-3


def _cdf(x, scale, bound, noise, strict):
  """P(noise < x) if strict else P(noise <= x), from the definitions."""
  gumbel = lambda y: math.exp(-math.exp(-y / scale))
  if noise == 'untruncated':
    return gumbel(x)
  if noise == 'truncated':
    low, high = gumbel(-bound), gumbel(bound)
    return (gumbel(min(max(x, -bound), bound)) - low) / (high - low)
  if x < -bound or (strict and x == -bound):
    return 0.
  return 1. if x > bound or (x == bound and not strict) else gumbel(x)


def _direct_law(distances, scale, bound, noise, pmf):
  """P(rank) for ascending distances: one integral a rank and a value of K."""
  mass = 1.
  if noise == 'truncated':
    mass = (math.exp(-math.exp(-bound / scale))
            - math.exp(-math.exp(bound / scale)))
  inside = 60 * scale if noise == 'untruncated' else bound
  atoms = {}
  if noise == 'clipped':
    atoms = {-bound: math.exp(-math.exp(bound / scale)),
             bound: 1 - math.exp(-math.exp(-bound / scale))}

  def beats_the_others(r, k, v):
    win = 1.
    for j in range(k):
      # A tie goes to the lower rank.
      if j != r:
        win *= 1 - _cdf(v - distances[j], scale, bound, noise, strict=j > r)
    return win

  def integrand(v, r, k):
    x = v - distances[r]
    density = math.exp(-x / scale - math.exp(-x / scale)) / scale / mass
    return density * beats_the_others(r, k, v)

  law = np.zeros(len(distances))
  for k in range(1, len(distances) + 1):
    for r in range(k):
      low, high = distances[r] - inside, distances[r] + inside
      if noise == 'untruncated':
        low = distances[r] - 6 * scale
      corners = sorted({low, high} | {
          c for d in distances for c in (d - bound, d + bound)
          if low < c < high})
      law[r] += pmf[k - 1] * sum(
          integrate.quad(integrand, a, b, (r, k), epsabs=1e-13, epsrel=1e-12,
                         limit=200)[0]
          for a, b in itertools.pairwise(corners))
      law[r] += pmf[k - 1] * sum(
          probability * beats_the_others(r, k, distances[r] + x)
          for x, probability in atoms.items())
  return law


def _precise_log_prob(distances, rank, scale, bound, noise, log_pmf):
  """log P(rank) with 50 digits; no atoms, so clipped only for rank > 1."""
  mp = mpmath.mp.clone()
  mp.dps = 50
  d = [mp.mpf(float(x)) for x in distances]
  scale, bound = mp.mpf(float(scale)), mp.mpf(float(bound))
  pmf = [mp.exp(mp.mpf(float(x))) for x in log_pmf]
  cdf = lambda x: mp.exp(-mp.exp(-x / scale))
  floor, mass = mp.mpf(0), mp.mpf(1)
  if noise == 'truncated':
    floor, mass = cdf(-bound), cdf(bound) - cdf(-bound)
  ceiling = mass + floor

  def survival(x):
    if noise != 'untruncated' and x <= -bound:
      return mp.mpf(1)
    return (ceiling - cdf(x)) / mass

  def integrand(v):
    total, product = mp.mpf(0), mp.mpf(1)
    for j, distance in enumerate(d):
      if j != rank:
        product *= survival(v - distance)
      if j >= rank:
        total += pmf[j] * product
    x = v - d[rank]
    return mp.exp(-x / scale) * cdf(x) / scale / mass * total

  if noise == 'untruncated':
    low, high = d[rank] - 12 * scale, d[rank] + 60 * scale
  else:
    low, high = d[rank] - bound, min(d[0] + bound, d[rank] + 60 * scale)
  # Each term is log-concave with a peak as narrow as 1/100 of the scale: find
  # it on a coarse grid, then cut it where the integrand has corners.
  grid = [low + (high - low) * i / 300 for i in range(301)]
  height = [integrand(v) for v in grid]
  peak = [i for i, x in enumerate(height) if x > max(height) / 10 ** 22]
  low, high = grid[max(peak[0] - 1, 0)], grid[min(peak[-1] + 1, 300)]
  pieces = 12 if scale > bound else 40
  points = [low + (high - low) * i / pieces for i in range(pieces + 1)]
  corners = [x - bound for x in d if noise != 'untruncated']
  points = sorted(points + [x for x in corners if low < x < high])
  total = mp.quad(integrand, points, method='gauss-legendre', maxdegree=4)
  if noise == 'clipped':
    assert rank > 0
    bottom = cdf(-bound) * sum(pmf[rank:])
    for j in range(rank):
      bottom *= 1 - cdf(d[rank] - d[j] - bound)
    total += bottom
  return float(mp.log(total))


def _gauss_row(row):
  """Ascending distances from one of 100 Gaussian words, and the diameter."""
  vectors = np.random.default_rng(1).normal(size=(100, 50))
  gaps = vectors[:, None] - vectors
  distances = np.sqrt((gaps ** 2).sum(-1))
  return np.sort(distances[row]), distances.max()


class TruncatedPoissonTest(parameterized.TestCase):

  def test_golden_probabilities_of_four_and_of_a_hundred_words(self):
    four = np.exp(truncated_gumbel_law.truncated_poisson_log_pmf(
        math.log(4), 1, 4))
    np.testing.assert_allclose(
        four, [.346574, .240227, .111008, .302192], atol=5e-7)
    hundred = np.exp(truncated_gumbel_law.truncated_poisson_log_pmf(
        math.log(100), 1, 100))
    np.testing.assert_allclose(hundred[[0, 1, 2, -1]],
                               [.0460517, .106038, .162774, .01], atol=5e-7)

  @parameterized.parameters(
      (0., 0, 3, None), (0., 1, 3, None), (2.5, 0, 9, 4), (2.5, 3, 9, 3),
      (7., 5, 6, None), (7., 4, 4, None), (40., 2, 30, 10), (4.6, 1, 100, 100),
      (4.6, 1, 100, 64))
  def test_both_tails_and_the_rerouted_middle_are_on_the_last_value(
      self, rate, low, high, max_candidates):
    got = truncated_gumbel_law.truncated_poisson_log_pmf(
        rate, low, high, max_candidates)
    kept = high if max_candidates is None else min(high, max_candidates + 1)
    want = np.zeros(high - low + 1)
    want[:kept - low] = stats.poisson.pmf(np.arange(low, kept), rate)
    want[-1] = 0.
    if kept == high:
      want[:-1] = stats.poisson.pmf(np.arange(low, high), rate)
    want[-1] = (stats.poisson.cdf(low - 1, rate)
                + stats.poisson.sf(kept - 1, rate))
    np.testing.assert_allclose(np.exp(got), want, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(np.exp(got).sum(), 1., rtol=1e-13)

  def test_an_atom_below_the_smallest_float_keeps_its_logarithm(self):
    got = truncated_gumbel_law.truncated_poisson_log_pmf(.5, 0, 400)[-1]
    with mpmath.workdps(40):
      want = mpmath.log(mpmath.gammainc(400, 0, .5, regularized=True))
    self.assertAlmostEqual(got, float(want), delta=1e-12 * abs(got))
    self.assertLess(got, -2_000.)

  def test_without_the_overflow_atom_the_last_word_would_be_out_of_reach(self):
    log_pmf = truncated_gumbel_law.truncated_poisson_log_pmf(
        math.log(1_000), 1, 1_000, max_candidates=64)
    self.assertGreaterEqual(log_pmf[-1], -math.log(1_000))
    self.assertTrue((log_pmf[64:-1] == -np.inf).all())

  @parameterized.parameters(
      (-1., 1, 4, None, 'rate=-1.0'), (math.nan, 1, 4, None, 'rate=nan'),
      (1., -1, 4, None, 'low=-1'), (1., 3, 2, None, 'high=2'),
      (1., 1, 4.5, None, 'high=4.5'), (1., 2, 4, 1, 'max_candidates=1'))
  def test_refuses_what_is_out_of_range_by_name(
      self, rate, low, high, max_candidates, message):
    with self.assertRaisesRegex(ValueError, message):
      truncated_gumbel_law.truncated_poisson_log_pmf(
          rate, low, high, max_candidates)


class ScaleTest(parameterized.TestCase):

  @parameterized.parameters(
      (20., 100, 10., 1., 18.60527942, 9.168955607),
      (1e4, 100, 10., 1., 2.465906859, 2.328448136),
      (100., 33860, 16.252268, .7446196, 11.42535422, 8.508393075),
      (math.exp(20), 33860, 16.252268, .7446196, 1.746944658, 1.703857982),
      (math.exp(5), 48210, 1.7, .2, 4.77330929, 1.796290262))
  def test_golden_scales_to_all_digits(self, *case):
    *setting, paper, tight = case
    got = (truncated_gumbel_law.paper_scale(*setting),
           truncated_gumbel_law.tight_scale(*setting))
    self.assertSequenceEqual([f'{x:.10g}' for x in got],
                             [f'{x:.10g}' for x in (paper, tight)])

  @parameterized.parameters(
      (20., 100, 10., 1., 2.929886543, 2.979081082, 1.0749637),
      (1e4, 100, 10., 1., 3329.596553, 8.918240069, 8.11060642),
      (100., 33860, 16.252268, .7446196, 23.09992945, 5.009811019, 2.844947769),
      (math.exp(20), 33860, 16.252268, .7446196, 161721721.6, 19.41663702,
       18.60650585),
      (math.exp(5), 48210, 1.7, .2, 10.19331388, 2.592777673, .7122940906))
  def test_golden_steps_to_the_scale(self, epsilon, num_words, diameter,
                                     minimum, alpha, w, log_term):
    mine = (epsilon - 2 * (1 + math.log(num_words)) / minimum) / 3
    with jax.enable_x64(True):
      mine_w = float(special.lambertw(jnp.float64(2 * mine * diameter)))
    self.assertSequenceEqual(
        [f'{x:.9g}' for x in (mine, mine_w, math.log(mine * minimum))],
        [f'{x:.9g}' for x in (alpha, w, log_term)])
    self.assertAlmostEqual(
        2 * diameter / min(mine_w, math.log(mine * minimum)),
        truncated_gumbel_law.paper_scale(epsilon, num_words, diameter, minimum),
        places=9)

  @parameterized.product(log_epsilon=(4., 20., 80., 300.),
                         geometry=((16.25, .745), (1., 1.), (.9, .4)))
  def test_agrees_with_forty_digits_up_to_the_largest_budgets(
      self, log_epsilon, geometry):
    diameter, minimum = geometry
    epsilon = math.exp(log_epsilon)
    with mpmath.workdps(40):
      log_n = mpmath.log(1_000)
      alpha = (mpmath.mpf(epsilon) - 2 * (1 + log_n) / minimum) / 3
      paper = 2 * diameter / min(
          mpmath.lambertw(2 * alpha * diameter).real,
          mpmath.log(alpha * minimum))
      got = truncated_gumbel_law.paper_scale(epsilon, 1_000, diameter, minimum)
      self.assertLess(abs(got / paper - 1), 1e-12)
      x = 2 * diameter / mpmath.mpf(truncated_gumbel_law.tight_scale(
          epsilon, 1_000, diameter, minimum))
      meets = ((2 * log_n + mpmath.exp(x)) / minimum
               + x * mpmath.exp(x) / diameter)
      # exp(x) turns a rounding of x into x roundings of epsilon.
      self.assertLess(abs(meets / epsilon - 1), 1e-13 * (1 + x))

  def test_refuses_a_budget_below_the_bound_and_says_what_the_paper_says(self):
    least = (5 + 2 * math.log(100)) / .5
    stated = 2 * (1 + math.log(100)) / .5
    for epsilon in (stated * 1.01, least * (1 - 1e-9), least):
      with self.assertRaises(ValueError) as caught:
        truncated_gumbel_law.paper_scale(epsilon, 100, 10., .5)
      for part in (f'epsilon={epsilon}', str(least), str(stated)):
        self.assertIn(part, str(caught.exception))
    self.assertGreater(
        truncated_gumbel_law.paper_scale(least * 1.001, 100, 10., .5), 0.)
    with self.assertRaisesRegex(ValueError, 'no scale meets it'):
      truncated_gumbel_law.tight_scale(
          (1 + 2 * math.log(100)) / .5, 100, 10., .5)

  @parameterized.parameters(
      (-1., 9, 2., 1., 'epsilon=-1.0'), (math.inf, 9, 2., 1., 'epsilon=inf'),
      (99., 1, 2., 1., 'num_words=1'), (99., 9, 2., 0., 'duplicate words'),
      (99., 9, 2., 3., 'diameter=2.0'), (99., 9, math.inf, 1., 'diameter=inf'))
  def test_refuses_a_geometry_that_no_table_has(
      self, epsilon, num_words, diameter, minimum, message):
    for scale in (truncated_gumbel_law.paper_scale,
                  truncated_gumbel_law.tight_scale):
      with self.assertRaisesRegex(ValueError, message):
        scale(epsilon, num_words, diameter, minimum)


class LawTest(parameterized.TestCase):

  @parameterized.parameters(
      ('truncated', [.741331, .228109, .030428, .000133]),
      ('clipped', [.736, .230836, .032922, .000242]),
      ('untruncated', [.735788, .231025, .032938, .000249]))
  def test_golden_law_of_four_words_on_a_line(self, noise, want):
    got = truncated_gumbel_law.log_law(
        [0., 1., 3., 7.], scale=2., bound=7., noise=noise)
    np.testing.assert_allclose(np.exp(got), want, atol=5.1e-7)

  @parameterized.product(
      noise=truncated_gumbel_law.NOISES,
      # Ties, a far word that a short bound shuts out (3 > 2 * 1), one at the
      # last point of the support, and noise far wider than the bound.
      case=(((0., 1., 3.), .7, 3.), ((0., 1., 1., 3.), 5., 3.),
            ((0., 0., 2., 2.), 1.5, 2.), ((0., .5, 3.), 1., 1.),
            ((0., 1., 2., 4.), 40., 2.)))
  def test_agrees_with_the_defining_integral(self, noise, case):
    distances, scale, bound = case
    num_words = len(distances)
    log_pmf = truncated_gumbel_law.truncated_poisson_log_pmf(
        math.log(num_words), 1, num_words)
    got = np.exp(truncated_gumbel_law.log_law(
        distances, scale=scale, bound=bound, noise=noise))
    want = _direct_law(distances, scale, bound, noise, np.exp(log_pmf))
    np.testing.assert_allclose(want.sum(), 1., atol=1e-9)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)

  @parameterized.product(noise=truncated_gumbel_law.NOISES,
                         ratio=(.15, .6, 2.))
  def test_simulation_has_this_law_and_no_other(self, noise, ratio):
    distances = np.concatenate(
        [[0.], np.linspace(1., 3., 9), [3., 5.]])
    bound, num_words, num_draws = 5., 12, 200_000
    scale = ratio * bound
    generator = np.random.default_rng(20)
    count = generator.poisson(math.log(num_words), num_draws)
    count[(count < 1) | (count >= num_words)] = num_words
    cdf = lambda x: np.exp(-np.exp(-x / scale))
    uniform = generator.random((num_draws, num_words))
    if noise == 'truncated':
      uniform = cdf(-bound) + uniform * (cdf(bound) - cdf(-bound))
    draw = -scale * np.log(-np.log(uniform))
    if noise == 'clipped':
      draw = np.clip(draw, -bound, bound)
    noisy = np.where(np.arange(num_words) < count[:, None], distances + draw,
                     np.inf)
    counts = np.bincount(noisy.argmin(1), minlength=num_words)

    def p_value(**changes):
      law = np.exp(truncated_gumbel_law.log_law(
          distances, **({'scale': scale, 'bound': bound, 'noise': noise}
                        | changes)))
      rare = law * num_draws < 5
      observed = np.append(counts[~rare], counts[rare].sum())
      expected = np.append(law[~rare], law[rare].sum()) * num_draws
      observed, expected = observed[expected > 0], expected[expected > 0]
      return stats.chisquare(observed, expected).pvalue

    self.assertGreater(p_value(), _FALSE_ALARM)
    # Noise far wider than its bound hardly shows its scale.
    factor = .8 if ratio < 1 else 1 / 3
    self.assertLess(p_value(scale=scale * factor), _FALSE_ALARM)
    if ratio > .5:
      for other in truncated_gumbel_law.NOISES:
        if other != noise:
          self.assertLess(p_value(noise=other), _FALSE_ALARM)

  @parameterized.parameters(
      # The least likely entries of 100 Gaussian words near the paper's bound.
      ('clipped', 46, 99, 43.2), ('clipped', 46, 60, 43.2),
      ('truncated', 56, 94, 43.2), ('untruncated', 1, 27, 43.2),
      # exp(-1200) with little noise.
      ('truncated', 0, 99, .01), ('clipped', 0, 70, .01))
  def test_deep_entries_agree_with_fifty_digits_within_the_error(
      self, noise, row, rank, ratio):
    distances, bound = _gauss_row(row)
    scale = ratio * bound
    log_pmf = truncated_gumbel_law.truncated_poisson_log_pmf(
        math.log(100), 1, 100)
    got = truncated_gumbel_law.law(
        distances[None], scale=scale, bound=bound, noise=noise)
    want = _precise_log_prob(distances, rank, scale, bound, noise, log_pmf)
    self.assertLess(want, -5.)
    self.assertLess(abs(got.log_prob[0, rank] - want), got.error[0, rank])
    self.assertLess(got.error[0, rank], 2e-11)

  @parameterized.parameters(*truncated_gumbel_law.NOISES)
  def test_rows_sum_to_one_from_the_widest_noise_to_the_narrowest(self, noise):
    distances, bound = _gauss_row(3)
    deepest = 0.
    for ratio in (1e4, 43., .5, .02, 1 / 590):
      got = truncated_gumbel_law.law(
          distances[None], scale=ratio * bound, bound=bound, noise=noise)
      np.testing.assert_allclose(np.exp(got.log_prob).sum(), 1., atol=1e-10)
      self.assertTrue(np.isfinite(got.log_prob).all())
      self.assertLess(got.error.max(), 1e-10)
      deepest = min(deepest, got.log_prob.min())
    self.assertLess(deepest, -5_000.)

  def test_the_order_of_words_does_not_matter_and_rows_are_apart(self):
    rows = np.stack([_gauss_row(i)[0][:20] for i in range(3)])
    shuffle = np.random.default_rng(3).permutation(20)
    settings = {'scale': 9., 'bound': 9., 'noise': 'clipped'}
    together = truncated_gumbel_law.log_prob(rows, **settings)
    for row, want in zip(rows, together):
      got = truncated_gumbel_law.log_law(row[shuffle], **settings)
      np.testing.assert_array_equal(got, want[shuffle])

  def test_a_tie_goes_to_the_lowest_index(self):
    # Only the nearest word is ever a candidate, and two are nearest.
    only_one = np.array([0., -np.inf, -np.inf])
    got = truncated_gumbel_law.log_law(
        [2., 0., 0.], scale=1., bound=2., log_pmf=only_one)
    np.testing.assert_array_equal(np.exp(got).round(12), [0., 1., 0.])

  def test_a_table_of_few_neighbours_has_the_law_with_its_mass_rerouted(self):
    distances, bound = _gauss_row(5)
    full, short = (truncated_gumbel_law.truncated_poisson_log_pmf(
        math.log(100), 1, 100, k) for k in (None, 6))
    settings = {'scale': bound, 'bound': bound}
    parts = [truncated_gumbel_law.log_law(
        distances, log_pmf=np.log(np.eye(100)[k], where=np.eye(100)[k] > 0,
                                  out=np.full(100, -np.inf)), **settings)
             for k in (*range(6), 99)]
    want = np.exp(short[[*range(6), 99]]) @ np.exp(parts)
    got = truncated_gumbel_law.log_law(distances, log_pmf=short, **settings)
    np.testing.assert_allclose(np.exp(got), want, rtol=1e-10)
    whole = truncated_gumbel_law.log_law(distances, log_pmf=full, **settings)
    self.assertGreater(np.abs(got - whole).max(), .1)

  def test_one_word_is_certain(self):
    for noise in truncated_gumbel_law.NOISES:
      got = truncated_gumbel_law.log_law([0.], scale=1., bound=1., noise=noise)
      np.testing.assert_allclose(got, [0.], atol=1e-12)

  def test_two_thousand_words_are_in_reach_and_one_more_is_not(self):
    distances = np.linspace(0., 9., 2_001)
    log_pmf = truncated_gumbel_law.truncated_poisson_log_pmf(
        math.log(2_000), 1, 2_000, 64)
    got = truncated_gumbel_law.log_law(
        distances[:-1], scale=9., bound=9., noise='untruncated',
        log_pmf=log_pmf)
    np.testing.assert_allclose(np.exp(got).sum(), 1., atol=1e-10)
    with self.assertRaisesRegex(ValueError, 'jaxdp.deniability.measure'):
      truncated_gumbel_law.log_law(distances, scale=9., bound=9.)

  @parameterized.parameters(
      ({'scale': 0.}, 'scale=0.0'), ({'scale': math.nan}, 'scale=nan'),
      ({'scale': 1e-3}, 'scale=0.001 is below'), ({'bound': -1.}, 'bound=-1'),
      ({'noise': 'min'}, "noise='min'"),
      ({'distances': [0., -1.]}, 'not negative'),
      ({'distances': [0., math.nan]}, 'finite'),
      ({'distances': [[0., 1.]]}, r'\(1, 2\) must be \[V\]'),
      ({'log_pmf': [0.]}, r'log_pmf of shape \(1,\)'),
      ({'log_pmf': [0., 0.]}, 'sum to one'))
  def test_refuses_bad_arguments_by_name(self, changes, message):
    arguments = {'distances': [0., 1.], 'scale': 1., 'bound': 1.} | changes
    distances = arguments.pop('distances')
    with self.assertRaisesRegex(ValueError, message):
      truncated_gumbel_law.log_law(distances, **arguments)


if __name__ == '__main__':
  absltest.main()
