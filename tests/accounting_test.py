"""Tests of the accounting of noise on vectors against integrals and loss laws.

Oracles: Rényi divergences by integration (mpmath), the privacy loss law of a
product of Laplace laws by convolution on a grid, rounded to the safe and to
the unsafe side, and Google's dp_accounting where it is installed.
"""

import importlib
import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import mpmath
import numpy as np

from jaxdp import guarantees
from jaxdp.guarantees import accounting

# (D, scale) of the published runs: MNIST, CIFAR-10, Tiny ImageNet.
_MNIST, _CIFAR, _TINY = (784, 32.27), (2352, 6.41), (12288, 8.69)


def _integral(order, shift):
  """Returns the divergence of Lap(0, 1) from Lap(shift, 1) by quadrature."""
  p = lambda x: mpmath.exp(-abs(x)) / 2
  q = lambda x: mpmath.exp(-abs(x - shift)) / 2
  # Outside [-60, shift + 60] either law has mass below 1e-26, and its ratio
  # is the constant exp(+-shift).
  ends = [-60, 0, shift, shift + 60]
  with mpmath.workdps(30):
    if order == 1:
      return mpmath.quad(lambda x: p(x) * (abs(x - shift) - abs(x)), ends)
    total = mpmath.quad(lambda x: p(x)**order * q(x)**(1 - order), ends)
    return mpmath.log(total) / (order - 1)


def _printed_form(order, shift):
  """Returns the closed form as printed, with digits to spare."""
  with mpmath.workdps(80):
    a, s = mpmath.mpf(order), mpmath.mpf(shift)
    total = (a / (2 * a - 1) * mpmath.exp((a - 1) * s)
             + (a - 1) / (2 * a - 1) * mpmath.exp(-a * s))
    return mpmath.log(total) / (a - 1)


def _losses(shift, cells, up):
  """Returns the law of ln P/Q under P on a grid, rounded up or down.

  P = Lap(0, 1), Q = Lap(shift, 1): the loss is shift with probability 1/2,
  -shift with exp(-shift)/2, and has density exp((l - shift)/2)/4 between.
  """
  edges = np.linspace(-shift, shift, cells + 1)
  mass = np.diff(np.exp((edges - shift) / 2.)) / 2.
  law = np.zeros(cells + 1)
  law[1:] += mass if up else 0.
  law[:-1] += 0. if up else mass
  law[-1] += .5
  law[0] += math.exp(-shift) / 2.
  return law


def _hockey_stick(shift, dimension, epsilon, up, cells=240, odds=None):
  """Returns delta(epsilon) of a D-fold product, from above (up) or below.

  Args:
    shift: of each coordinate over its scale.
    dimension: D.
    epsilon: where delta is read.
    up: whether losses are rounded up, and delta bounded from above.
    cells: of the grid of one coordinate.
    odds: e^epsilon of a binary randomised response besides, or None.
  """
  one = _losses(shift, cells, up)
  whole = np.ones(1)
  for _ in range(dimension):
    whole = np.convolve(whole, one)
  loss = np.linspace(-shift * dimension, shift * dimension, len(whole))
  terms = [(1., 0.)] if odds is None else [
      (odds / (1. + odds), math.log(odds)), (1. / (1. + odds), -math.log(odds))]
  return sum(weight * np.sum(whole * -np.expm1(np.minimum(
      epsilon - loss - extra, 0.))) for weight, extra in terms)


class LaplaceRdpTest(parameterized.TestCase):

  @parameterized.product(order=(1, 1.0001, 1.5, 2, 7, 40), shift=(.01, .8, 12))
  def test_is_the_integral_of_the_definition(self, order, shift):
    # Both laws have 1e-26 outside the quadrature's interval, times at most
    # exp(12 * 40) in the largest case, which the mass inside exceeds by far.
    self.assertAlmostEqual(
        guarantees.laplace_rdp(order, shift) / float(_integral(order, shift)),
        1., delta=1e-10)

  @parameterized.product(
      order=(1.0001, 1.5, 3, 1e3, 1e6),
      shift=(1e-8, 1e-4, .3, .9999, 1., 1.0001, 30., 1e4))
  def test_keeps_its_digits_where_the_printed_form_loses_them(
      self, order, shift):
    exact = _printed_form(order, shift)
    # A sum of 20 positive terms and three more operations: well below 64 ulp.
    self.assertAlmostEqual(
        float(guarantees.laplace_rdp(order, shift) / exact), 1.,
        delta=64 * 2.**-52)

  def test_limits(self):
    shift = np.array([0., 1e-9, .5, 40., 1e4])
    np.testing.assert_array_equal(
        guarantees.laplace_rdp(np.inf, shift), shift)
    np.testing.assert_allclose(
        guarantees.laplace_rdp(1., shift[2:]),
        shift[2:] + np.exp(-shift[2:]) - 1., rtol=1e-14)
    np.testing.assert_allclose(guarantees.laplace_rdp(1., 1e-9), 5e-19,
                               rtol=1e-8)
    np.testing.assert_allclose(
        guarantees.laplace_rdp(1. + 1e-12, shift),
        guarantees.laplace_rdp(1., shift), rtol=1e-9)
    np.testing.assert_allclose(
        guarantees.laplace_rdp(1e15, shift[2:]), shift[2:], rtol=1e-13)
    self.assertEqual(guarantees.laplace_rdp(3., np.inf), np.inf)

  def test_grows_with_order_and_shift_and_broadcasts(self):
    orders = np.asarray(accounting.ORDERS)
    shifts = np.geomspace(1e-6, 1e4, 41)
    table = guarantees.laplace_rdp(orders[:, None], shifts)
    self.assertEqual(table.shape, (len(orders), 41))
    self.assertTrue(np.all(np.diff(table, axis=1) > 0.))
    # The limit in order is reached to the last digit: one ulp of noise there.
    self.assertTrue(np.all(np.diff(table, axis=0) >= -1e-15 * table[1:]))
    self.assertTrue(np.all(table <= shifts * (1. + 1e-15)))

  @parameterized.parameters(((.5, 1.), 'order'), ((np.nan, 1.), 'order'),
                            ((2., -1.), 'shift_over_scale'),
                            ((2., np.nan), 'shift_over_scale'))
  def test_refuses_bad_arguments(self, arguments, name):
    with self.assertRaisesRegex(ValueError, name):
      guarantees.laplace_rdp(*arguments)


class PureRdpTest(parameterized.TestCase):

  @parameterized.product(order=(1.001, 2, 9.5, 300),
                         epsilon=(1e-6, .7, 5., 50.))
  def test_is_that_of_binary_randomised_response(self, order, epsilon):
    with mpmath.workdps(80):
      a, e = mpmath.mpf(order), mpmath.mpf(epsilon)
      p, q = mpmath.exp(e) / (1 + mpmath.exp(e)), 1 / (1 + mpmath.exp(e))
      exact = mpmath.log(p**a * q**(1 - a) + q**a * p**(1 - a)) / (a - 1)
    self.assertAlmostEqual(float(guarantees.pure_rdp(order, epsilon) / exact),
                           1., delta=1e-12)

  @parameterized.product(categories=(2, 3, 10), epsilon=(.3, 2.))
  def test_covers_every_pure_mechanism_tried(self, categories, epsilon):
    orders = np.array([1.5, 2., 8., 64.])
    truth = math.exp(epsilon) / (math.exp(epsilon) + categories - 1.)
    lie = (1. - truth) / (categories - 1.)
    total = (truth**orders * lie**(1. - orders)
             + lie**orders * truth**(1. - orders) + (categories - 2.) * lie)
    bound = guarantees.pure_rdp(orders, epsilon)
    self.assertTrue(np.all(np.log(total) / (orders - 1.) <= bound + 1e-12))
    self.assertTrue(np.all(guarantees.laplace_rdp(orders, epsilon) < bound))

  def test_limits(self):
    self.assertEqual(guarantees.pure_rdp(np.inf, 3.), 3.)
    self.assertEqual(guarantees.pure_rdp(2., np.inf), np.inf)
    np.testing.assert_array_equal(guarantees.pure_rdp([1., 2., 50.], 0.), 0.)
    self.assertAlmostEqual(guarantees.pure_rdp(1., 2.), 2. * math.tanh(1.))
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      guarantees.pure_rdp(2., -1.)


class ConversionTest(parameterized.TestCase):

  def test_is_the_minimum_over_orders(self):
    orders, rdp, delta = [2., 5.], [1., 1.5], 1e-3
    by_hand = [r + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (
        a - 1) for a, r in zip(orders, rdp)]
    self.assertAlmostEqual(
        guarantees.rdp_epsilon(rdp, orders, delta), min(by_hand), delta=1e-12)

  def test_the_infinite_order_is_pure_and_needs_no_delta(self):
    self.assertEqual(guarantees.rdp_epsilon([3.], [np.inf], 0.), 3.)
    self.assertEqual(guarantees.rdp_epsilon([1., 3.], [2., np.inf], 0.), 3.)
    self.assertEqual(guarantees.rdp_epsilon([1.], [2.], 0.), np.inf)

  def test_never_falls_below_zero(self):
    self.assertEqual(guarantees.rdp_epsilon([1e-9], [2.], .5), 0.)

  def test_the_search_finds_the_minimum_of_a_gaussian(self):
    # rho a has its best order in closed form only without the logarithms of
    # the improved conversion; a fine grid is the oracle.
    for rho, delta in ((.02, 1e-6), (3., 1e-5), (.1, 1e-12)):
      fine = 1. + np.geomspace(1e-3, 1e6, 200_001)
      oracle = guarantees.rdp_epsilon(rho * fine, fine, delta)
      got = guarantees.best_epsilon(lambda a, r=rho: r * a, delta)
      self.assertAlmostEqual(got / oracle, 1., delta=1e-8)

  def test_nothing_stays_nothing(self):
    self.assertEqual(
        guarantees.best_epsilon(lambda a: np.full(a.shape, np.inf), .1), np.inf)
    self.assertEqual(guarantees.best_epsilon(np.zeros_like, .1), 0.)

  @parameterized.parameters(
      (([1.], [1.], .1), 'orders'), (([-1.], [2.], .1), 'rdp'),
      (([1., 2.], [2.], .1), 'shape'), (([], [], .1), 'shape'),
      (([1.], [2.], 1.), 'delta'), (([1.], [2.], -.1), 'delta'),
      (([np.nan], [2.], .1), 'rdp'))
  def test_refuses_bad_arguments(self, arguments, name):
    with self.assertRaisesRegex(ValueError, name):
      guarantees.rdp_epsilon(*arguments)


class LossLawTest(parameterized.TestCase):

  def assert_delta_within(self, delta, *setting, **more):
    low, high = (_hockey_stick(*setting, up, **more) for up in (False, True))
    self.assertLessEqual(low, delta)
    # The true delta lies between; where one atom rules, the conversion leaves
    # less slack than the grid, so the upper one may not be asked for.
    self.assertBetween(high, low, 1.08 * low)


class LaplaceVectorTest(LossLawTest):

  @parameterized.parameters((_MNIST, 48.6, 8.89), (_CIFAR, 734., 169.),
                            (_TINY, 2828., 416.))
  def test_published_scales_against_a_whole_image(self, setting, pure, approx):
    dimension, scale = setting
    arguments = dict(dimension=dimension, shift=2., scale=scale)
    got = guarantees.laplace_vector_epsilon(**arguments, delta=0.)
    self.assertEqual(got, dimension * (2. / scale))
    self.assertAlmostEqual(got / pure, 1., delta=.0005 / .486)
    got = guarantees.laplace_vector_epsilon(**arguments, delta=1e-5)
    self.assertAlmostEqual(got / approx, 1., delta=.003)  # half a last digit

  @parameterized.parameters((1., 226.), (2., 120.), (8., 35.))
  def test_scales_of_mnist(self, epsilon, scale):
    got = guarantees.laplace_vector_scale(epsilon, 1e-5, 784, 2.)
    self.assertEqual(round(got), scale)
    pure = guarantees.laplace_vector_scale(epsilon, 0., 784, 2.)
    self.assertAlmostEqual(pure, 1568. / epsilon, delta=1e-4)

  @parameterized.product(dimension=(1, 4, 24), shift=(.15, .8),
                         delta=(1e-6, 1e-3, .02))
  def test_the_exact_hockey_stick_never_exceeds_delta(
      self, dimension, shift, delta):
    got = guarantees.laplace_vector_epsilon(
        dimension=dimension, shift=shift, scale=1., delta=delta)
    self.assert_delta_within(delta, shift, dimension, got)
    if dimension == 1:  # the closed form has no grid
      self.assertLessEqual(-math.expm1((got - shift) / 2.), delta)
    # And the bound is of use: less than half of it would be a false claim.
    self.assertGreater(_hockey_stick(shift, dimension, got / 2., False), delta)

  def test_the_oracle_knows_one_coordinate_in_closed_form(self):
    for epsilon in (0., .2, .8):  # delta = 1 - exp((epsilon - s) / 2)
      exact = -math.expm1((epsilon - .8) / 2.)
      low, high = (_hockey_stick(.8, 1, epsilon, up, cells=4000)
                   for up in (False, True))
      self.assertBetween(exact, low, high)
      self.assertLess(high - low, 1e-3)

  def test_a_smaller_shift_in_some_coordinates_costs_no_more(self):
    got = guarantees.laplace_vector_epsilon(dimension=3, shift=.8, scale=1.,
                                            delta=.01)
    mixed = np.ones(1)
    for cells in (240, 120, 60):  # shifts .8, .4, .2 on one grid
      mixed = np.convolve(mixed, _losses(.8 * cells / 240, cells, True))
    loss = np.linspace(-1.4, 1.4, len(mixed))
    self.assertLess(np.sum(mixed * -np.expm1(np.minimum(got - loss, 0.))), .01)

  def test_epsilon_is_monotone_in_every_argument(self):
    base = dict(dimension=50, shift=2., scale=20., delta=1e-5, copies=2)
    grids = dict(dimension=(1, 10, 50, 4000), shift=(.01, 1., 2., 90.),
                 copies=(1, 2, 3, 40), scale=(.5, 5., 80., 1e5),
                 delta=(0., 1e-12, 1e-5, .3))
    for name, values in grids.items():
      epsilons = [guarantees.laplace_vector_epsilon(**base | {name: value})
                  for value in values]
      if name in ('scale', 'delta'):
        epsilons.reverse()
      self.assertTrue(np.all(np.diff(epsilons) > 0.), (name, epsilons))

  def test_scale_is_monotone_in_every_argument(self):
    base = dict(epsilon=2., delta=1e-5, dimension=50, shift=2., copies=2)
    grids = dict(epsilon=(.1, 1., 2., 60.), delta=(0., 1e-12, 1e-5, .3),
                 dimension=(1, 10, 50, 4000), shift=(.01, 1., 2., 90.),
                 copies=(1, 2, 3, 40))
    for name, values in grids.items():
      scales = [guarantees.laplace_vector_scale(**base | {name: value})
                for value in values]
      if name in ('epsilon', 'delta'):
        scales.reverse()
      self.assertTrue(np.all(np.diff(scales) > 0.), (name, scales))

  @parameterized.product(epsilon=(1e-3, .7, 9., 1e4), delta=(0., 1e-9, 1e-2),
                         dimension=(1, 2352))
  def test_the_returned_scale_is_safe_least_and_a_float32(
      self, epsilon, delta, dimension):
    scale = guarantees.laplace_vector_scale(epsilon, delta, dimension, 2.)
    self.assertEqual(scale, float(np.float32(scale)))

    def spent(scale):
      return guarantees.laplace_vector_epsilon(
          dimension=dimension, shift=2., scale=scale, delta=delta)
    self.assertLessEqual(spent(scale), epsilon)
    # Two float32 steps and the bisection's 1e-9 below, it no longer fits.
    self.assertGreater(spent(scale * (1. - 3. * 2.**-23)), epsilon)

  def test_copies_are_further_coordinates(self):
    once = guarantees.laplace_vector_epsilon(
        dimension=30, shift=2., scale=9., delta=1e-4)
    self.assertEqual(once, guarantees.laplace_vector_epsilon(
        dimension=10, copies=3, shift=2., scale=9., delta=1e-4))

  @parameterized.parameters(
      ('dimension', 0), ('dimension', 1.5), ('copies', 0), ('copies', True),
      ('shift', 0.), ('shift', np.inf), ('scale', -1.), ('scale', np.nan),
      ('delta', 1.), ('delta', None))
  def test_refuses_bad_arguments_by_name(self, name, value):
    good = dict(dimension=3, shift=2., scale=1., delta=.1)
    with self.assertRaisesRegex(ValueError, f'{name}={value}'):
      guarantees.laplace_vector_epsilon(**good | {name: value})
    good = dict(epsilon=1., delta=.1, dimension=3, shift=2.)
    if name != 'scale':
      with self.assertRaisesRegex(ValueError, f'{name}={value}'):
        guarantees.laplace_vector_scale(**good | {name: value})

  @parameterized.parameters(0., -1., np.inf, 1e-300)
  def test_refuses_a_budget_without_a_scale(self, epsilon):
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      guarantees.laplace_vector_scale(epsilon, 1e-5, 784, 2.)


class SampledGaussianTest(parameterized.TestCase):

  @parameterized.parameters((.01, 4., 10_000, 1.26, 1.035),
                            (256 / 60_000, 1.1, 60 * 60_000 // 256, 3.01, 2.60))
  def test_golden_vectors_of_both_conversions(self, q, noise, steps, classic,
                                              improved):
    orders = np.asarray(accounting.INTEGER_ORDERS)
    rdp = steps * guarantees.sampled_gaussian_rdp(orders, q, noise)
    self.assertAlmostEqual(
        np.min(rdp + math.log(1e5) / (orders - 1)), classic, delta=.005)
    got = guarantees.sampled_gaussian_epsilon(
        sampling_rate=q, noise_multiplier=noise, num_steps=steps, delta=1e-5)
    self.assertAlmostEqual(got, improved, delta=.005)

  @parameterized.product(order=(2, 8), q=(1e-4, .05, .7),
                         noise=(1., 5.))
  def test_is_the_integral_of_the_definition(self, order, q, noise):
    with mpmath.workdps(25):
      q, sigma = mpmath.mpf(q), mpmath.mpf(noise)
      # The ratio of the mixture to N(0, sigma^2), raised to the order.
      ratio = lambda x: 1 - q + q * mpmath.exp((2 * x - 1) / (2 * sigma**2))
      weight = lambda x: mpmath.npdf(x, 0, sigma) * ratio(x)**order
      # The integrand's humps lie at 0 ... order, each of width sigma.
      num = int((order + 24 * noise) / (1.5 * noise)) + 1
      ends = mpmath.linspace(-12 * sigma, order + 12 * sigma, num + 1)
      exact = mpmath.log(mpmath.quad(
          weight, ends, method='gauss-legendre')) / (order - 1)
    self.assertAlmostEqual(
        float(guarantees.sampled_gaussian_rdp(order, float(q), noise) / exact),
        1., delta=1e-12)

  def test_limits(self):
    self.assertEqual(guarantees.sampled_gaussian_rdp(7, 0., 2.), 0.)
    self.assertEqual(guarantees.sampled_gaussian_rdp(7, 1., 2.), 7. / 8.)
    np.testing.assert_allclose(
        guarantees.sampled_gaussian_rdp([2, 7], 1. - 1e-12, 2.),
        [2. / 8., 7. / 8.], rtol=1e-9)
    self.assertEqual(guarantees.sampled_gaussian_rdp(2, .1, 1e-200), np.inf)
    self.assertEqual(guarantees.sampled_gaussian_rdp(2, .1, 1e300), 0.)
    self.assertEqual(guarantees.sampled_gaussian_epsilon(
        sampling_rate=.1, noise_multiplier=1., num_steps=0, delta=1e-5), 0.)

  def test_is_monotone_in_every_argument(self):
    base = dict(sampling_rate=.02, noise_multiplier=1.5, num_steps=400,
                delta=1e-5)
    grids = dict(sampling_rate=(.001, .02, .3, 1.), num_steps=(1, 40, 4000),
                 noise_multiplier=(.7, 1.5, 9.), delta=(1e-9, 1e-5, 1e-2))
    for name, values in grids.items():
      epsilons = [guarantees.sampled_gaussian_epsilon(**base | {name: value})
                  for value in values]
      if name in ('noise_multiplier', 'delta'):
        epsilons.reverse()
      self.assertTrue(np.all(np.diff(epsilons) > 0.), (name, epsilons))

  @parameterized.parameters(
      (dict(order=1), 'order'), (dict(order=2.5), 'order'),
      (dict(order=np.inf), 'order'), (dict(sampling_rate=1.1), 'sampling_rate'),
      (dict(noise_multiplier=0.), 'noise_multiplier'))
  def test_refuses_bad_arguments(self, changed, name):
    good = dict(order=2, sampling_rate=.1, noise_multiplier=1.)
    with self.assertRaisesRegex(ValueError, name):
      guarantees.sampled_gaussian_rdp(**good | changed)

  def test_refuses_pure_dp(self):
    for delta in (0., 1.):
      with self.assertRaisesRegex(ValueError, 'delta'):
        guarantees.sampled_gaussian_epsilon(
            sampling_rate=.1, noise_multiplier=1., num_steps=1, delta=delta)


class LedgerTotalTest(LossLawTest):

  @parameterized.product(shift=(.2, .7), label_epsilon=(.4, 2.),
                         delta=(1e-6, 1e-2))
  def test_the_exact_joint_loss_never_exceeds_the_total(
      self, shift, label_epsilon, delta):
    total = guarantees.standard(
        noise_sharing='none', dimension=12, scale=2. / shift, delta=delta,
        labels='randomized_response', label_epsilon=label_epsilon)[-1]
    self.assertLessEqual(total['delta'], delta)
    self.assert_delta_within(delta, shift, 12, total['epsilon'],
                             odds=math.exp(label_epsilon))
    self.assertGreater(
        _hockey_stick(shift, 12, total['epsilon'] / 2., False,
                      odds=math.exp(label_epsilon)), delta)


class PeerTest(parameterized.TestCase):
  """Against dp_accounting, the extra `accounting`."""

  def setUp(self):
    super().setUp()
    try:
      self.dp = importlib.import_module('dp_accounting')
    except ImportError:
      self.skipTest('dp_accounting is not installed; extra `accounting`')

  @parameterized.product(order=(1.05, 1.5, 4., 200.), epsilon=(.01, 2., 30.))
  def test_laplace_divergences_agree(self, order, epsilon):
    peer = self.dp.rdp.RdpAccountant([order]).compose(
        self.dp.LaplaceDpEvent(1. / epsilon), 7).get_epsilon(1e-30)
    rdp = 7 * guarantees.laplace_rdp(order, epsilon)
    # What the conversion adds is up to 1400, with 2e-13 between two floats.
    self.assertAlmostEqual(
        peer, guarantees.rdp_epsilon([rdp], [order], 1e-30),
        delta=1e-9 * rdp + 1e-11)

  @parameterized.parameters((.01, 4., 10_000), (.004, 1.1, 14_000),
                            (.3, 8., 50))
  def test_sampled_gaussian_agrees(self, q, noise, steps):
    peer = self.dp.rdp.RdpAccountant(accounting.INTEGER_ORDERS).compose(
        self.dp.PoissonSampledDpEvent(q, self.dp.GaussianDpEvent(noise)), steps)
    ours = guarantees.sampled_gaussian_epsilon(
        sampling_rate=q, noise_multiplier=noise, num_steps=steps, delta=1e-5)
    self.assertAlmostEqual(peer.get_epsilon(1e-5) / ours, 1., delta=1e-6)

  @parameterized.parameters((784, 2. / 32.27), (40, .5))
  def test_a_loss_law_of_the_peer_never_exceeds_ours(self, dimension, ratio):
    peer = self.dp.pld.PLDAccountant(
        value_discretization_interval=1e-3).compose(
            self.dp.LaplaceDpEvent(1. / ratio), dimension).get_epsilon(1e-5)
    ours = guarantees.laplace_vector_epsilon(
        dimension=dimension, shift=ratio, scale=1., delta=1e-5)
    # The peer rounds losses up, so this is a bound on a bound; the conversion
    # of Rényi divergences loses a few per cent to it.
    self.assertLess(peer, ours * (1. + 1e-9))
    self.assertGreater(peer, .8 * ours)


class GridTest(parameterized.TestCase):

  def test_orders_are_what_the_docstrings_say(self):
    orders = np.asarray(accounting.ORDERS)
    self.assertEqual((orders[0], orders[-2], orders[-1]),
                     (1. + 1e-3, 1. + 1e6, np.inf))
    self.assertTrue(np.all(np.diff(orders) > 0.))
    pairs = itertools.pairwise(accounting.INTEGER_ORDERS)
    self.assertTrue(all(a < b for a, b in pairs))


if __name__ == '__main__':
  absltest.main()
