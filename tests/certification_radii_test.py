"""Radii against laws that are known exactly, and by brute force."""

import functools
import inspect
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import scipy.integrate
import scipy.stats

from jaxdp.certification import radii
from jaxdp.certification import renyi

_PAIRS = ((.99, .01), (.9, .1), (.9, .02), (.6, .3), (.4, .05), (.55, .45))


def _sum_tail(t, a, b):
  """P(A + B > t) of independent Laplace A, B of scales a, b, from t >= 0 on."""
  negative, t = t < 0., np.abs(t)
  if a == b:
    tail = np.exp(-t / a) / 2. * (1. + t / (2. * a))
  else:
    tail = (a**2 * np.exp(-t / a) - b**2 * np.exp(-t / b)) / 2. / (a**2 - b**2)
  return np.where(negative, 1. - tail, tail)


def _many_tail(t, dimension):
  """P(sum of D standard Laplace draws > t): a difference of two gamma laws."""
  law = scipy.stats.gamma(dimension)
  spread = 12. * np.sqrt(dimension) + 12.
  value, _ = scipy.integrate.quad(
      lambda g: law.pdf(g) * law.sf(g + t), max(dimension - spread, 0.),
      dimension + spread, limit=200, epsabs=1e-12)
  return value


def _boxes(x, scale, cuts=(.3, -.2)):
  """Class probabilities of three boxes in the plane behind Laplace noise."""
  first = scipy.stats.laplace.cdf((cuts[0] - x[..., 0]) / scale)
  second = scipy.stats.laplace.cdf((cuts[1] - x[..., 1]) / scale)
  return np.stack([first, (1. - first) * second,
                   (1. - first) * (1. - second)], axis=-1)


def _directions(norm):
  """A grid of directions in the plane, of length 1, corners included."""
  angle = np.linspace(0., 2. * np.pi, 721)[:-1]
  way = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
  order = {'l1': 1, 'l2': 2, 'linf': np.inf}[norm]
  return way / np.linalg.norm(way, ord=order, axis=-1, keepdims=True)


def _top_two(p):
  ordered = np.sort(p, axis=-1)
  return ordered[..., -1], ordered[..., -2]


class GoldenTest(parameterized.TestCase):

  def test_published_factors_and_their_composition(self):
    kappa = radii.noise_to_radius(32.27, sensitivity=.2 * 784)
    phi = radii.noise_to_radius(64.54, sensitivity=96.6)
    self.assertAlmostEqual(kappa, .2058, delta=1e-4)
    self.assertAlmostEqual(phi, .668, delta=1e-3)
    self.assertAlmostEqual(radii.compose(kappa, phi), .1574, delta=1e-4)
    self.assertAlmostEqual(
        radii.claimed_radius(np.e**2 / 10., .1, kappa=kappa, phi=phi), .1574,
        delta=1e-4)

  @parameterized.parameters(
      # p_low, p_high of n equal votes; scale as trained, its divisor, D
      (.99735, .00265, 32.27, 2., 784, .061, .108, 1.35),
      (.99472, .00528, 6.41, 10., 2352, .0007, .0012, .028),
      (.99472, .00528, 8.69, 10., 12288, .0002, .0003, .016))
  def test_what_unanimous_votes_certify(
      self, p, q, scale, divisor, dimension, basic, exact, by_renyi):
    settings = dict(scale=scale, dimension=dimension, noise_divisor=divisor)
    kappa = radii.noise_to_radius(
        scale, sensitivity=dimension, noise_divisor=divisor)
    got = [np.log(p / q) / 2. * kappa,
           radii.laplace_linf_radius(p, q, **settings),
           radii.laplace_renyi_linf_radius(p, q, **settings)]
    for value, expected in zip(got, (basic, exact, by_renyi)):
      # One unit of the last digit that is quoted.
      digits = len(str(expected).split('.')[1])
      self.assertAlmostEqual(value, expected, delta=10.**-digits)

  @parameterized.parameters((32.27, 2., 784, .19), (6.41, 10., 2352, .004))
  def test_what_a_split_vote_certifies(self, scale, divisor, dimension, value):
    got = radii.laplace_renyi_linf_radius(
        .6, .3, scale=scale, dimension=dimension, noise_divisor=divisor)
    self.assertAlmostEqual(got, value, delta=10.**-(2 if value > .1 else 3))

  @parameterized.parameters(
      (.99, .01, 1.91, 2.33), (.8, .15, .78, .94), (.6, .3, .33, .39))
  def test_renyi_stays_below_cohen(self, p, q, by_renyi, cohen):
    self.assertAlmostEqual(radii.gaussian_renyi_l2_radius(p, q, stddev=1.),
                           by_renyi, delta=.01)
    self.assertAlmostEqual(radii.gaussian_l2_radius(p, q, stddev=1.), cohen,
                           delta=.01)


class OracleTest(parameterized.TestCase):

  @parameterized.product(pair=_PAIRS, order=(1.3, 2., 7., 40.))
  def test_no_law_with_another_top_class_is_nearer(self, pair, order):
    p = np.array([*pair, 1. - sum(pair)])
    kept = p > 1e-12
    grid = np.linspace(0., 1., 401)
    first, second = np.meshgrid(grid, grid, indexing='ij')
    q = np.stack([first, second, 1. - first - second], axis=-1)
    q = q[(q[..., 2] >= -1e-12) & (q[..., 1] >= q[..., 0])]
    if not kept[2]:
      q = q[np.abs(q[:, 2]) < 1e-9]
    q = np.maximum(q[:, kept], 0.)
    divergence = np.log(np.sum(
        p[kept]**(1. - order) * q**order, axis=-1)) / (order - 1.)
    bound = renyi.least_divergence(*pair, order)
    self.assertGreaterEqual(divergence.min(), bound - 1e-12)
    # Attained where the two are equal; the grid is 1/400 wide.
    tie = np.linspace(0., .5, 200_001) if kept[2] else np.array([.5])
    law = np.stack([tie, tie, 1. - 2. * tie], axis=-1)[:, kept]
    least = np.log(np.sum(
        p[kept]**(1. - order) * law**order, axis=-1)).min() / (order - 1.)
    self.assertAlmostEqual(least, bound, delta=1e-7)

  @parameterized.product(order=(1.05, 2., 30.), divergence=(1e-6, 1e-3, .2, 6.))
  def test_the_shift_has_the_divergence_by_quadrature(self, order, divergence):
    def integral(s):
      def ratio(t):
        return np.exp(order * -np.abs(t - s) - (1. - order) * np.abs(t)) / 2.
      parts = [scipy.integrate.quad(ratio, a, b, epsabs=1e-14, epsrel=1e-12)[0]
               for a, b in ((-60., 0.), (0., s), (s, s + 60.))]
      return np.log(sum(parts)) / (order - 1.)
    got = float(renyi.laplace_shift(order, np.float64(divergence)))
    # Quadrature errs by 1e-11 in the sum, over (order - 1) in the divergence.
    self.assertAlmostEqual(integral(got), divergence,
                           delta=1e-11 / (order - 1.) + 1e-9 * divergence)

  @parameterized.product(pair=_PAIRS, dimension=(1, 50, 3072))
  def test_the_search_finds_the_best_order(self, pair, dimension):
    order = 1. + np.geomspace(.01, 1e5, 4_001)  # .4% apart
    best = renyi.laplace_shift(
        order, renyi.least_divergence(*pair, order) / dimension).max()
    got = radii.laplace_renyi_linf_radius(*pair, scale=1., dimension=dimension)
    self.assertLessEqual(got, best * (1. + 1e-5))
    self.assertGreater(got, best * (1. - 1e-4))

  @parameterized.parameters(*_PAIRS)
  def test_l1_radius_is_sound_and_with_two_classes_tight(self, p, q):
    scale = .7
    radius = radii.laplace_l1_radius(p, q, scale=scale)
    # Neyman and Pearson on a line: the law at 0 gives p to one set and q to
    # another; the shifted law gives the first its least and the other its most.
    edges = np.linspace(-30., 30., 120_001)

    def worst(shift):
      here = np.diff(scipy.stats.laplace.cdf(edges, scale=scale))
      there = np.diff(scipy.stats.laplace.cdf(edges, shift, scale))
      order = np.argsort(there / np.maximum(here, 1e-300), kind='stable')
      reached = np.cumsum(here[order])
      least = np.interp(p, reached, np.cumsum(there[order]))
      back = np.cumsum(here[order][::-1])
      most = np.interp(q, back, np.cumsum(there[order][::-1]))
      return least - most
    # A cell holds up to 60 / 120,000 / scale / 2 of the mass.
    self.assertGreater(worst(radius), -1e-3)
    if p + q == 1.:
      self.assertLess(worst(radius * 1.05), -1e-3)
      stump = scale * -np.log(2. * q)
      self.assertAlmostEqual(radius, stump, delta=1e-12)

  def test_gaussian_radius_is_that_of_a_half_space(self):
    margin = np.array([.1, 1., 3.])
    p = scipy.stats.norm.cdf(margin / .5)
    got = radii.gaussian_l2_radius(p, 1. - p, stddev=.5)
    np.testing.assert_allclose(got, margin, rtol=1e-6)  # p is rounded near 1

  def test_pixeldp_gaussian_by_bisection_over_its_grid(self):
    bound, epsilon, delta = .1, .8, .05
    for p, q in _PAIRS:
      best = 0.
      for other in np.arange(.001, .3, .001):
        fits = lambda e: p > np.exp(2. * e) * q + (1. + np.exp(e)) * other
        if not fits(0.):
          continue
        low, high = 0., 1.
        if fits(1.):
          low = 1.
        for _ in range(60):
          middle = (low + high) / 2.
          low, high = (middle, high) if fits(middle) else (low, middle)
        best = max(best, bound * low / epsilon * np.sqrt(
            np.log(1.25 / delta) / np.log(1.25 / other)))
      got = radii.pixeldp_gaussian_radius(
          p, q, attack_bound=bound, epsilon=epsilon, delta=delta)
      self.assertAlmostEqual(got, best, delta=1e-9)

  def test_pixeldp_gaussian_noise_keeps_its_budget_on_the_whole_grid(self):
    # The exact delta of Gaussian noise (Balle and Wang, 2018, Theorem 8).
    budget, delta = np.meshgrid(
        np.linspace(.01, 1., 60), np.arange(1, 300) / 1000., indexing='ij')
    sigma = np.sqrt(2. * np.log(1.25 / delta)) / budget
    cdf = scipy.stats.norm.cdf
    exact = (cdf(.5 / sigma - budget * sigma)
             - np.exp(budget) * cdf(-.5 / sigma - budget * sigma))
    self.assertTrue(np.all(exact <= delta))

  def test_pixeldp_laplace_is_the_basic_l1_route(self):
    got = radii.pixeldp_laplace_radius(.9, .02, attack_bound=.1, epsilon=.5)
    p, q = .9 * np.exp(-got * 5.), .02 * np.exp(got * 5.)
    self.assertAlmostEqual(p, q, delta=1e-12)  # scale .2 for sensitivity 1


class SoundnessTest(parameterized.TestCase):

  @parameterized.product(norm=('l1', 'linf', 'renyi'), scale=(.2, 1.))
  def test_no_direction_changes_the_class_within_the_radius(self, norm, scale):
    fun = {
        'l1': radii.laplace_l1_radius,
        'linf': functools.partial(radii.laplace_linf_radius, dimension=2),
        'renyi': functools.partial(
            radii.laplace_renyi_linf_radius, dimension=2),
    }[norm]
    axis = np.linspace(-2.03, 1.98, 21)  # off the ties
    x = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 1, 2)
    p = _boxes(x, scale)[:, 0]
    way = _directions('l1' if norm == 'l1' else 'linf')[None]

    def num_changed(radius):
      there = _boxes(x + radius[:, None, None] * way, scale)
      return np.sum(there.argmax(-1) != p.argmax(-1)[:, None])
    radius = fun(*_top_two(p), scale=scale)
    self.assertGreater(np.mean(radius > 0.), .9)
    self.assertEqual(num_changed(radius * (1. - 1e-9)), 0)
    # Had the noise three times the scale that the formula is told, or the
    # formula not known the scale at all, this grid would show it.
    self.assertGreater(num_changed(fun(*_top_two(p), scale=3. * scale)), 0)

  @parameterized.parameters((1., 1.), (3., 1.), (1., .1))
  def test_a_linear_classifier_is_never_certified_beyond_its_plane(self, a, b):
    scale = .6
    margin = np.linspace(.01, 6., 60)  # of w x, to the plane
    q = _sum_tail(margin, a * scale, b * scale)
    for fun, true in (
        (radii.laplace_l1_radius, margin / max(a, b)),
        (functools.partial(radii.laplace_linf_radius, dimension=2),
         margin / (a + b)),
        (functools.partial(radii.laplace_renyi_linf_radius, dimension=2),
         margin / (a + b))):
      radius = fun(1. - q, q, scale=scale)
      self.assertTrue(np.all(radius <= true * (1. + 1e-9)))
      self.assertGreater(np.max(radius / true), .3)
      self.assertTrue(np.any(fun(1. - q, q, scale=5. * scale) > true))

  def test_in_many_dimensions_renyi_is_sound_and_far_ahead(self):
    dimension, scale = 784, .5
    for sigmas in (.5, 2.33):
      margin = sigmas * np.sqrt(2. * dimension)
      q = _many_tail(margin, dimension)
      true = margin * scale / dimension
      settings = dict(scale=scale, dimension=dimension)
      by_renyi = radii.laplace_renyi_linf_radius(1. - q, q, **settings)
      self.assertLess(by_renyi, true)
      self.assertGreater(by_renyi, .5 * true)
      self.assertLess(
          radii.laplace_linf_radius(1. - q, q, **settings), .2 * by_renyi)

  def test_hidden_radius_needs_the_true_operator_norm(self):
    weights = np.array([[1., -2.], [.5, 1.5], [-1., 1.]])
    true_norm = max(np.abs(weights @ signs).sum() for signs in
                    np.array(list(itertools.product((-1., 1.), repeat=2))))
    # The class is the sign of the sum of the layer, whose signs all agree.
    rows = np.abs(weights)
    scale, margin = .4, np.linspace(.05, 8., 40)
    law = functools.partial(_three_tail, scale=scale)
    q = law(margin)
    true = margin / rows.sum()
    sound = radii.hidden_linf_radius(
        1. - q, q, scale=scale, operator_norm=rows.sum())
    self.assertTrue(np.all(sound <= true))
    self.assertLessEqual(true_norm, rows.sum())
    spectral = np.linalg.norm(rows, ord=2)
    self.assertTrue(np.any(radii.hidden_linf_radius(
        1. - q, q, scale=scale, operator_norm=spectral) > true))

  def test_the_claimed_radius_is_unsound_once_fresh_noise_is_divided(self):
    scale, divisor, margin = 1., 10., .5
    q = scipy.stats.laplace.sf(margin * divisor / scale)
    settings = dict(sensitivity=1.)
    claimed = radii.claimed_radius(
        1. - q, q, phi=np.inf, kappa=radii.noise_to_radius(scale, **settings))
    self.assertGreater(claimed, margin)
    repaired = radii.claimed_radius(
        1. - q, q, phi=np.inf, kappa=radii.noise_to_radius(
            scale, noise_divisor=divisor, **settings))
    self.assertLess(repaired, margin)


def _three_tail(t, scale):
  """P(sum of three Laplace draws of one scale > t), t > 0."""
  s = t / scale
  return np.exp(-s) * (s * s + 5. * s + 8.) / 16.


class FormTest(parameterized.TestCase):

  def _all(self):
    """Every radius with its settings bound."""
    noise = dict(scale=.3, noise_divisor=2.)
    settings = {
        'claimed': dict(kappa=.2, phi=.7),
        'laplace_l1': noise,
        'laplace_linf': dict(noise, dimension=12),
        'laplace_renyi_linf': dict(noise, dimension=12),
        'hidden_linf': dict(noise, operator_norm=7.),
        'gaussian_l2': dict(stddev=.5),
        'gaussian_renyi_l2': dict(stddev=.5),
        'pixeldp_laplace': dict(attack_bound=.1, epsilon=2.),
        'pixeldp_gaussian': dict(attack_bound=.1, epsilon=1., delta=.05),
    }
    self.assertEqual(set(settings), set(radii.RADII))
    return {name: functools.partial(radii.RADII[name].fun, **kwargs)
            for name, kwargs in settings.items()}

  def test_no_pair_gives_nan_and_ties_give_zero(self):
    values = np.array(
        [0., 1e-300, 1e-9, .1, .5, .5 + 1e-12, .9, 1. - 1e-12, 1.])
    p, q = np.meshgrid(values, values, indexing='ij')
    for name, fun in self._all().items():
      got = fun(p, q)
      self.assertEqual(got.dtype, np.float64, name)
      self.assertFalse(np.any(np.isnan(got)), name)
      self.assertTrue(np.all(got >= 0.), name)
      self.assertTrue(np.all(got[p <= q] == 0.), name)
      self.assertTrue(np.all(got[(p == .9) & (q == .1)] > 0.), name)
      finite = (p < 1.) & (q > 0.)
      self.assertTrue(np.all(np.isfinite(got[finite])), name)

  def test_scalars_give_scalars_and_empty_arrays_pass(self):
    for name, fun in self._all().items():
      self.assertEqual(np.shape(fun(.9, .1)), (), name)
      self.assertEqual(fun(np.zeros(0), np.zeros(0)).shape, (0,), name)

  def test_more_votes_never_lower_a_radius(self):
    p = np.linspace(.02, .98, 97)
    for name, fun in self._all().items():
      for q in (.001, .2, .45):
        self.assertTrue(np.all(np.diff(fun(p, q)) >= 0.), name)
        self.assertTrue(np.all(np.diff(fun(.97, p * .5)) <= 0.), name)
      self.assertGreater(fun(.97, .01), fun(.7, .01), name)

  @parameterized.parameters(
      'laplace_l1', 'laplace_linf', 'laplace_renyi_linf', 'hidden_linf')
  def test_radius_is_linear_in_the_scale_of_fresh_noise(self, name):
    fun = functools.partial(radii.RADII[name].fun, .9, .05, **{
        'laplace_l1': {}, 'hidden_linf': dict(operator_norm=3.)}.get(
            name, dict(dimension=9)))
    unit = fun(scale=1.)
    np.testing.assert_allclose(fun(scale=4.), 4. * unit, rtol=1e-12)
    np.testing.assert_allclose(
        fun(scale=4., noise_divisor=10.), .4 * unit, rtol=1e-12)

  def test_noise_copied_to_channels_certifies_nothing(self):
    settings = dict(scale=1., channel_copied=True)
    p, q = np.array([.9, 1.]), np.array([.1, 0.])
    for got in (
        radii.laplace_l1_radius(p, q, **settings),
        radii.laplace_linf_radius(p, q, dimension=3, **settings),
        radii.laplace_renyi_linf_radius(p, q, dimension=3, **settings)):
      np.testing.assert_array_equal(got, [0., 0.])
    kappa = radii.noise_to_radius(sensitivity=3., **settings)
    np.testing.assert_array_equal(
        radii.claimed_radius(p, q, kappa=kappa, phi=1.), [0., 0.])

  def test_separate_passes_certify_less_than_one_pass(self):
    kappa, phi = np.array([.1, 1., 0., np.inf]), np.array([.4, 1., 2., 3.])
    both = radii.compose(kappa, phi)
    np.testing.assert_allclose(both, [.08, .5, 0., 3.], rtol=1e-12)
    one = radii.best_single_pass(kappa, phi)
    np.testing.assert_array_equal(one, [.4, 1., 2., np.inf])
    self.assertTrue(np.all(both <= np.minimum(kappa, phi)))

  def test_docstrings_name_what_the_table_says(self):
    for name, radius in radii.RADII.items():
      text = inspect.getdoc(radius.fun)
      self.assertIn(f'*{radius.status}*', text, name)
      if radius.norm != 'p':
        self.assertIn(f'Norm: {radius.norm}', text, name)
      self.assertEqual(radius.status, 'claimed' if name == 'claimed'
                       else 'proved')
      self.assertTrue(radius.conditions, name)

  @parameterized.parameters(
      ('p_low=1.5', lambda: radii.laplace_l1_radius(1.5, .1, scale=1.)),
      ('p_high=nan', lambda: radii.gaussian_l2_radius(
          [.9], [np.nan], stddev=1.)),
      ('scale=0.0', lambda: radii.laplace_l1_radius(.9, .1, scale=0.)),
      ('scale=nan', lambda: radii.laplace_l1_radius(.9, .1, scale=np.nan)),
      ('stddev=-1.0', lambda: radii.gaussian_l2_radius(.9, .1, stddev=-1.)),
      ('noise_divisor=0.5', lambda: radii.laplace_l1_radius(
          .9, .1, scale=1., noise_divisor=.5)),
      ('dimension=2.5', lambda: radii.laplace_linf_radius(
          .9, .1, scale=1., dimension=2.5)),
      ('dimension has shape', lambda: radii.laplace_renyi_linf_radius(
          .9, .1, scale=1., dimension=[2, 3])),
      ('operator_norm=0.0', lambda: radii.hidden_linf_radius(
          .9, .1, scale=1., operator_norm=0.)),
      ('sensitivity=-2.0', lambda: radii.noise_to_radius(
          1., sensitivity=-2.)),
      ('radii', lambda: radii.claimed_radius(.9, .1, kappa=-1., phi=1.)),
      ('radii', radii.compose),
      ('epsilon=2.0', lambda: radii.pixeldp_gaussian_radius(
          .9, .1, attack_bound=.1, epsilon=2., delta=.05)),
      ('delta=1.0', lambda: radii.pixeldp_gaussian_radius(
          .9, .1, attack_bound=.1, epsilon=1., delta=1.)),
      ('attack_bound=0.0', lambda: radii.pixeldp_laplace_radius(
          .9, .1, attack_bound=0., epsilon=1.)))
  def test_bad_input_is_named(self, message, call):
    with self.assertRaisesRegex(ValueError, message):
      call()


if __name__ == '__main__':
  absltest.main()
