"""Mahalanobis, hyperbolic and von Mises-Fisher: noise, law, metric, epsilon."""

import functools
import math

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.spatial
import scipy.special
import scipy.stats

from jaxdp import embeddings
from jaxdp import mechanisms
from jaxdp.auditing import exact
from jaxdp.mechanisms import hyperbolic
from jaxdp.mechanisms import mahalanobis
from jaxdp.mechanisms import multivariate_laplace
from jaxdp.mechanisms import vmf

# pylint: disable=protected-access

_FALSE_ALARM = 1e-3
_DRAWS = 102_400  # whole tiles of map_elements: half of the compile time
_NAMES = ('mahalanobis', 'hyperbolic', 'vmf')


def _make(vectors):
  vectors = np.asarray(vectors, np.float32)
  return embeddings.EmbeddingTable(
      tuple(f'w{i}' for i in range(len(vectors))), vectors)


@functools.lru_cache
def _stretched(num_words=40, dim=4):
  """A table far wider along some slanted axes than along others."""
  rng = np.random.default_rng(0)
  turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
  wide = rng.normal(size=(num_words, dim)) * 3.**-np.arange(dim)
  return _make(wide @ turn)


def _flat():
  """Six words of the plane, in the unit disk, wider than high."""
  return _make([[0., .05], [.5, .1], [-.6, .15], [.85, -.2], [.1, .3],
                [-.2, -.25]])


def _matrix(table, mixing):
  """A of Xu et al. (2020b), by NumPy's covariance."""
  covariance = np.atleast_2d(np.cov(table.vectors.astype(np.float64).T))
  dim = len(covariance)
  return (mixing * covariance * dim / np.trace(covariance)
          + (1 - mixing) * np.eye(dim))


def _keys(num, seed=0):
  return jax.random.split(jax.random.key(seed), num)


def _ks(sample, cdf):
  return scipy.stats.kstest(np.asarray(sample, np.float64), cdf).pvalue


def _numeric_cdf(log_density, high, num=200_001):
  """The CDF on [0, high] of a density known up to a factor."""
  grid = np.linspace(0, high, num)
  with np.errstate(divide='ignore'):
    values = log_density(grid)
  values = np.exp(values - np.max(values))
  mass = scipy.integrate.cumulative_simpson(values, x=grid, initial=0)
  return lambda x: np.interp(x, grid, mass / mass[-1])


def _chi_square(counts, law):
  return scipy.stats.chisquare(counts, law * counts.sum()).pvalue


class MahalanobisNoiseTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.params = mahalanobis.calibrate(_stretched(), epsilon=3., mixing=.8)
    self.matrix = _matrix(_stretched(), .8)
    self.whiten = np.linalg.inv(np.linalg.cholesky(self.matrix))

  @functools.cached_property
  def noise(self):
    return np.asarray(jax.jit(mahalanobis._noise)(
        _keys(_DRAWS), self.params.factor, self.params.epsilon), np.float64)

  def _radius(self, noise):
    return np.linalg.norm(noise @ self.whiten.T, axis=1)

  def test_the_factor_is_that_of_the_regularised_covariance(self):
    np.testing.assert_allclose(
        self.params.factor, np.linalg.cholesky(self.matrix), rtol=2e-6,
        atol=1e-7)
    np.testing.assert_array_equal(
        mahalanobis.calibrate(_stretched(), epsilon=3., mixing=0.).factor,
        np.eye(4))

  def test_the_radius_is_gamma_in_the_metric_of_the_matrix(self):
    radius = self._radius(self.noise)
    self.assertGreater(_ks(radius, scipy.stats.gamma(4, scale=1 / 3).cdf),
                       _FALSE_ALARM)
    for epsilon in (3 / 1.05, 3 * 1.05):
      self.assertLess(_ks(radius, scipy.stats.gamma(4, scale=1 / epsilon).cdf),
                      _FALSE_ALARM)

  def test_the_radius_of_a_published_fault_is_told_apart(self):
    rng = np.random.default_rng(1)
    direction = rng.normal(size=(_DRAWS, 4))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    length = rng.gamma(4, 1 / 3, (_DRAWS, 1))
    stretched = direction @ np.linalg.cholesky(self.matrix).T
    norm = np.linalg.norm(stretched, axis=1, keepdims=True)
    ball = stretched * rng.uniform(size=(_DRAWS, 1))**(1 / 4)
    law = scipy.stats.gamma(4, scale=1 / 3).cdf
    self.assertGreater(_ks(self._radius(length * stretched), law), _FALSE_ALARM)
    for fault in (stretched / norm, ball):  # renormalised; not on the sphere
      self.assertLess(_ks(self._radius(length * fault), law), _FALSE_ALARM)

  def test_the_direction_is_uniform_once_whitened(self):
    white = self.noise @ self.whiten.T
    white /= np.linalg.norm(white, axis=1, keepdims=True)
    axis = scipy.stats.beta(.5, 1.5).cdf
    for column in (*white.T, white @ np.full(4, .5), white @ [.6, 0., -.8, 0.]):
      self.assertGreater(_ks(column**2, axis), _FALSE_ALARM / 12)
      self.assertGreater(
          scipy.stats.binomtest(int((column > 0).sum()), _DRAWS).pvalue,
          _FALSE_ALARM / 12)
    bare = self.noise / np.linalg.norm(self.noise, axis=1, keepdims=True)
    self.assertLess(_ks(bare[:, 0]**2, axis), _FALSE_ALARM)

  def test_the_covariance_is_five_ninths_of_the_matrix(self):
    # E r^2 = D (D + 1) / epsilon^2 and E u u^T = I / D. In the whitened axes
    # E z^4 = E r^4 * 3 / (D (D + 2)) bounds the spread of every entry.
    white = self.noise @ self.whiten.T
    spread = math.sqrt(4 * 5 * 6 * 7 / 3**4 * 3 / (4 * 6) / _DRAWS)
    np.testing.assert_allclose(white.T @ white / _DRAWS, 5 / 9 * np.eye(4),
                               atol=4.5 * spread)
    self.assertGreater(.05 * 5 / 9, 4.5 * spread)

  def test_the_batch_does_not_show_in_one_bit(self):
    rng = np.random.default_rng(0)
    for dim in (4, 50):
      rows = rng.normal(size=(1001, dim)).astype(np.float32)
      factor = np.tril(rng.normal(size=(dim, dim))).astype(np.float32)
      whole = np.asarray(mahalanobis._stretched(rows, factor))
      np.testing.assert_allclose(whole, rows @ factor.T, rtol=1e-4, atol=1e-4)
      for start, stop in ((0, 1), (3, 10), (1000, 1001), (200, 600)):
        np.testing.assert_array_equal(
            mahalanobis._stretched(rows[start:stop], factor), whole[start:stop])


@jax.jit
def _growths(keys, dim, gamma_shape):
  return jax.vmap(lambda key: hyperbolic._log_growth(key, dim, gamma_shape))(
      keys)


class HyperbolicNoiseTest(parameterized.TestCase):

  @parameterized.parameters((3, 5.), (10, 20.), (50, 60.))
  def test_the_radius_has_the_density_of_hyperbolic_space(self, dim, epsilon):

    def cdf(rate):  # of the density sinh(r)^(D - 1) e^(-rate r)
      return _numeric_cdf(lambda r: (dim - 1) * np.log(-np.expm1(-2 * r)) - (
          rate - dim + 1) * r, 40.)

    params = hyperbolic.calibrate(_make(np.eye(dim) / 2), epsilon=epsilon)
    growth = _growths(_keys(_DRAWS), np.float32(dim), params.gamma_shape)
    radius = np.log1p(np.exp(np.asarray(growth, np.float64))) / 2
    self.assertGreater(_ks(radius, cdf(epsilon)), _FALSE_ALARM)
    for rate in (epsilon / 1.05, epsilon * 1.05):
      self.assertLess(_ks(radius, cdf(rate)), _FALSE_ALARM)

  def test_the_direction_is_uniform_on_the_sphere(self):
    draw = jax.jit(lambda keys: hyperbolic._draw(keys, 3, np.float32(1.5))[0])
    direction = np.asarray(draw(_keys(_DRAWS)), np.float64)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    for column in direction.T:  # Archimedes: uniform in three dimensions
      self.assertGreater(_ks(column, scipy.stats.uniform(-1, 2).cdf),
                         _FALSE_ALARM / 3)

  def _moved(self, points, direction, growth):
    points = np.asarray(points, np.float32)
    with jax.enable_x64(True):
      return np.asarray(hyperbolic._move(
          jnp.asarray(points), jnp.asarray(direction, jnp.float32),
          jnp.asarray(growth, jnp.float32)))

  def test_the_move_is_mobius_addition_up_to_the_boundary(self):
    """Against complex arithmetic of 60 digits, in the disk."""
    edge = 1 - 2.**-24
    points = np.float32([[0, 0], [.3, -.4], [edge, 0], [0, -edge], [.6, .7999],
                         [edge, 0], [.3, -.4], [edge, 0]])
    direction = np.float32([[1, 2], [3, -4], [-1, 0], [1, 1e-3], [-.6, -.8],
                            [-1, 1e-6], [.1, 1], [-1, 0]])
    growth = np.float32([.1, -3, 16., 5, 20., 30, 700, 3e38])
    moved = self._moved(points, direction, growth)
    self.assertLessEqual(np.linalg.norm(moved, axis=1).max(), 1 + 1e-15)
    with mpmath.workdps(60):
      for point, way, log_growth, got in zip(points, direction, growth, moved):
        x, u = (mpmath.mpc(*map(float, pair)) for pair in (point, way))
        length = mpmath.mpf(1)
        if log_growth < 1e6:
          length = mpmath.tanh(mpmath.log1p(mpmath.exp(float(log_growth))) / 4)
        v = length * u / abs(u)
        true = (v + x) / (1 + mpmath.conj(x) * v)
        # Float64 rounding of the result, and of v by the map's derivative.
        slope = (1 - abs(x)**2) / abs(1 + mpmath.conj(x) * v)**2
        self.assertLess(abs(mpmath.mpc(*map(float, got)) - true),
                        2.**-51 * (1 + slope), (point, way, log_growth))

  def test_the_move_is_mobius_addition_in_more_dimensions(self):
    rng = np.random.default_rng(0)
    x, u = rng.normal(size=(2, 500, 5))
    x = np.float32(x / np.linalg.norm(x, axis=1, keepdims=True)
                   * rng.uniform(0, .99, (500, 1))).astype(np.float64)
    u = np.float32(u).astype(np.float64)
    growth = np.float32(rng.uniform(-3, 6, 500))
    moved = self._moved(x, u, growth)
    radius = np.log1p(np.exp(np.float64(growth))) / 2
    v = u / np.linalg.norm(u, axis=1, keepdims=True) * np.tanh(
        radius / 2)[:, None]
    dot, xx, vv = (np.sum(a * b, 1, keepdims=True)
                   for a, b in ((x, v), (x, x), (v, v)))
    textbook = ((1 + 2 * dot + vv) * x + (1 - xx) * v) / (
        1 + 2 * dot + xx * vv)  # Ungar (2008)
    np.testing.assert_allclose(moved, textbook, atol=1e-12)
    gaps = (1 - xx[:, 0]) * (1 - np.sum(moved**2, 1))
    distance = np.arccosh(1 + 2 * np.sum((x - moved)**2, 1) / gaps)
    np.testing.assert_allclose(distance, radius, rtol=1e-7)


class HyperbolicSearchTest(parameterized.TestCase):

  def _nearest(self, points, vectors):
    with jax.enable_x64(True):
      return np.asarray(jax.jit(hyperbolic._nearest)(
          jnp.asarray(points, jnp.float64), jnp.asarray(vectors, jnp.float32)))

  def test_it_is_brute_force_everywhere_in_the_ball(self):
    rng = np.random.default_rng(0)
    ways = rng.normal(size=(600, 3))
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    radii = np.concatenate([rng.uniform(0, .9, 200), np.full(400, 1 - 2e-7)])
    vectors = np.float32(ways * radii[:, None])
    # Half of the words crowd one spot of the boundary: products alone err.
    crowd = ways[0] + 1e-7 * rng.normal(size=(300, 3))
    vectors[300:] = crowd / np.linalg.norm(crowd, axis=1, keepdims=True) * (
        1 - 2e-7)
    points = np.concatenate([
        rng.uniform(-.57, .57, (100, 3)), ways[:50],  # on the boundary itself
        vectors[250:400].astype(np.float64) + 1e-8 * rng.normal(size=(150, 3))])
    x, y = vectors.astype(np.longdouble), points.astype(np.longdouble)
    score = np.sum((y[:, None] - x[None])**2, -1) / (1 - np.sum(x**2, 1))
    with self.subTest('one block'):
      found = self._nearest(points, vectors)
      np.testing.assert_array_equal(found, np.argmin(score, 1))
    with self.subTest('blocks of four, the last one short'):
      old, hyperbolic._BLOCK = hyperbolic._BLOCK, 4 * 600
      self.addCleanup(setattr, hyperbolic, '_BLOCK', old)
      np.testing.assert_array_equal(self._nearest(points[:150], vectors),
                                    found[:150])

  def test_ties_go_to_the_lowest_index_and_inner_words_win(self):
    vectors = np.zeros((600, 3))
    vectors[:, 2] = np.linspace(.99, .999, 600)  # far from every point
    vectors[:5, :2] = [[.5, .5], [.5, -.5], [-.5, .5], [-.5, -.5], [.75, 0.]]
    vectors[5:7, :2] = [[0., .8], [0., .93]]
    vectors[:7, 2] = 0
    points = np.zeros((300, 3))
    points[:4, :2] = [[-.1, 0.], [0., 0.], [0., -.2], [0., .87]]
    # The last is Euclid-nearer to .93, but farther out distances are longer.
    self.assertEqual(self._nearest(points, vectors)[:4].tolist(), [2, 0, 1, 5])

  def test_memory_is_bounded(self):
    with jax.enable_x64(True):
      memory = jax.jit(hyperbolic._nearest).lower(
          jax.ShapeDtypeStruct((4096, 50), jnp.float64),
          jax.ShapeDtypeStruct((28_000, 50), jnp.float32)
      ).compile().memory_analysis()
    self.assertLess(memory.temp_size_in_bytes, 200e6)


@functools.partial(jax.jit, static_argnums=1)
def _vmf_angles(keys, dim, envelope):
  return jax.vmap(lambda key: vmf._angle(key, dim, envelope))(keys)


@jax.jit
def _vmf_directions(keys, mean, envelope):
  return jax.vmap(lambda key: vmf._von_mises_fisher(
      key, mean, envelope=envelope))(keys)


class VmfNoiseTest(parameterized.TestCase):

  @parameterized.parameters((2, 3.), (2, 1e-3), (2, 1e6), (3, 1e-3), (3, 4.),
                            (3, 1e6), (10, 1e-3), (10, 20.), (10, 1e6))
  def test_the_angle_has_its_density_and_no_other(self, dim, epsilon):

    def cdf(kappa):
      return _numeric_cdf(
          lambda t: -2 * kappa * np.sin(t / 2)**2 + (dim - 2) * np.log(
              np.sin(t)) if dim > 2 else -2 * kappa * np.sin(t / 2)**2,
          min(math.pi, 12 * math.sqrt(dim / kappa)))

    versine, sine = (np.asarray(x, np.float64) for x in _vmf_angles(
        _keys(_DRAWS), dim, vmf._envelope(epsilon, dim)))
    np.testing.assert_allclose(sine**2, versine * (2 - versine), rtol=2e-6,
                               atol=1e-6 * min(1, 4 / epsilon))
    angle = 2 * np.arcsin(np.sqrt(versine / 2))
    self.assertGreater(_ks(angle, cdf(epsilon)), _FALSE_ALARM)
    if epsilon > 1:  # at 1e-3 the law is uniform to three digits
      for kappa in (epsilon / 1.05, epsilon * 1.05):
        self.assertLess(_ks(angle, cdf(kappa)), _FALSE_ALARM)
    else:
      self.assertLess(_ks(angle, cdf(.1)), _FALSE_ALARM)

  @parameterized.parameters(([1., 2., -2.],), ([-3., .1, .2],),
                            ([-1., 0., 0.],), ([1., 0., 0.],))
  def test_the_direction_turns_about_the_mean_uniformly(self, mean):
    kappa = 4.
    mean = np.array(mean) / np.linalg.norm(mean)
    z = np.asarray(_vmf_directions(_keys(_DRAWS), np.float32(mean),
                                   vmf._envelope(kappa, 3)), np.float64)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    cosine = z @ mean
    # In three dimensions the cosine is an exponential cut to [-1, 1].
    law = lambda kappa: lambda w: np.expm1(kappa * (w + 1)) / np.expm1(
        2 * kappa)
    self.assertGreater(_ks(cosine, law(kappa)), _FALSE_ALARM)
    self.assertLess(_ks(cosine, law(1.05 * kappa)), _FALSE_ALARM)
    first = np.cross(mean, [.3, .5, .8])
    first /= np.linalg.norm(first)
    second = np.cross(mean, first)
    turn = np.arctan2(z @ first, z @ second) / (2 * np.pi) + .5
    self.assertGreater(_ks(turn, scipy.stats.uniform.cdf), _FALSE_ALARM)
    self.assertLess(abs(np.corrcoef(turn, cosine)[0, 1]),
                    4.5 / math.sqrt(_DRAWS))

  def test_the_concentration_is_epsilon_rounded_towards_noise(self):
    for dim in (2, 3, 300):
      for epsilon in (1e-30, 1e-3, 1., 77.7, 1e6, 1e30, 1e300):
        kappa = vmf._concentration(vmf._envelope(epsilon, dim), dim)
        self.assertLessEqual(kappa, epsilon)
        if epsilon < 1e31:
          resolved = epsilon * 2.**-22 + dim * 2.**-24
          self.assertGreaterEqual(kappa, epsilon - resolved)


def _grid(num=1000):
  """Quantiles of a radius and angles, midpoints of a polar grid."""
  middle = (np.arange(num) + .5) / num
  return middle, 2 * np.pi * middle


def _oracle(name, table, word, epsilon):
  """The law of one word in the plane, from a polar grid about it."""
  quantiles, angles = _grid()
  x = np.asarray(table.vectors, np.float64)
  if name == 'vmf':
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    turn = np.linspace(-np.pi, np.pi, 400_001)[:-1] + 1e-9
    weight = np.exp(epsilon * (np.cos(turn) - 1))
    middle = np.arctan2(*x[word][::-1])
    out = np.argmax(np.stack([np.cos(turn + middle), np.sin(turn + middle)], 1)
                    @ x.T, 1)
    return np.bincount(out, weight, len(x)) / weight.sum()
  circle = np.stack([np.cos(angles), np.sin(angles)], 1)
  if name == 'mahalanobis':
    radius = scipy.stats.gamma(2, scale=1 / epsilon).ppf(quantiles)
    noise = radius[:, None, None] * (
        circle @ scipy.linalg.sqrtm(_matrix(table, .2)))
    y = x[word] + noise.reshape(-1, 2)
    sq_distance = np.sum(y**2, 1)[:, None] - 2 * y @ x.T + np.sum(x**2, 1)
  else:
    cdf = _numeric_cdf(lambda r: np.log(np.sinh(r)) - epsilon * r, 60.)
    grid = np.linspace(0, 60., 200_001)
    radius = np.interp(quantiles, cdf(grid), grid)
    v = np.tanh(radius / 2)[:, None] * np.exp(1j * angles)
    z = x @ [1, 1j]
    y = (v + z[word]) / (1 + z[word].conjugate() * v)
    sq_distance = np.abs(y.reshape(-1, 1) - z)**2 / (1 - np.abs(z)**2)
  return np.bincount(np.argmin(sq_distance, 1), minlength=len(x)) / len(
      sq_distance)


class LawTest(parameterized.TestCase):

  @parameterized.parameters(('mahalanobis', 5.), ('hyperbolic', 2.6),
                            ('vmf', 3.))
  def test_words_of_the_plane_come_out_by_the_integrated_law(
      self, name, epsilon):
    mech, table = mechanisms.get(name), _flat()
    params = mech.calibrate(table, epsilon=epsilon)
    ids = np.repeat(np.int32([1, 4]), 2 * _DRAWS)
    out = np.asarray(mech.privatize(jax.random.key(0), ids, params))
    if name == 'hyperbolic':
      self._boundary_law(mech, ids)
    laws = {}
    for word in range(6):
      laws[word] = _oracle(name, table, word, epsilon)
    for word in (1, 4):
      counts = np.bincount(out[ids == word], minlength=6)
      self.assertLess(laws[word].max(), .9)  # else any noise would pass
      self.assertGreater(_chi_square(counts, laws[word]), _FALSE_ALARM)
      for other in (epsilon / 1.05, epsilon * 1.05):
        wrong = _oracle(name, table, word, other)
        self.assertLess(_chi_square(counts, wrong), _FALSE_ALARM)
    # The integrated laws keep epsilon in the metric that `distances` states.
    law = np.log(np.stack(list(laws.values())))
    distance = mech.distances(np.arange(6), params)
    measured, _ = exact.exact_metric_epsilon(law, distance, tolerance=1e-5)
    self.assertLessEqual(measured, epsilon * (1 + 1e-3))
    self.assertGreater(measured, epsilon / 3)
    if name == 'vmf':
      np.testing.assert_allclose(mech.log_prob(np.arange(6), params), law,
                                 atol=1e-4)

  def _boundary_law(self, mech, ids):
    """Barely held, 99.8% of the points round to the boundary."""
    loose = mech.calibrate(_flat(), epsilon=1 + 1e-4)
    out = np.asarray(mech.privatize(jax.random.key(0), ids, loose))
    z = np.asarray(_flat().vectors, np.float64) @ [1, 1j]
    circle = np.exp(1j * np.linspace(-np.pi, np.pi, 20_001)[1:])
    for word in (1, 4):
      y = (circle + z[word]) / (1 + z[word].conjugate() * circle)
      nearest = np.argmin(np.abs(y[:, None] - z)**2 / (1 - np.abs(z)**2), 1)
      # 0.2% are not there yet; 4.5 standard errors are 0.5%.
      np.testing.assert_allclose(
          np.bincount(out[ids == word], minlength=6) / (2 * _DRAWS),
          np.bincount(nearest, minlength=6) / len(y), atol=.01)

  def test_a_hyperbolic_line_has_the_law_of_its_density(self):
    table = _make([[-.9], [-.2], [.1], [.5], [.97]])
    epsilon, line = 1.3, table.vectors[:, 0].astype(np.float64)
    params = hyperbolic.calibrate(table, epsilon=epsilon)
    law = np.exp(hyperbolic.log_prob(np.arange(5), params))
    x, step = np.tanh(np.linspace(-15, 15, 300_001) / 2), 1e-4
    distance = np.arccosh(1 + 2 * (x - line[:, None])**2 / (
        (1 - x**2) * (1 - line[:, None]**2)))
    cell = np.argmin(distance, 0)
    weight = np.exp(-epsilon * distance) * step * epsilon / 2
    expected = np.stack([np.bincount(cell, row, 5) for row in weight])
    np.testing.assert_allclose(law, expected, atol=2e-4)

  def test_a_mahalanobis_line_is_a_laplace_line(self):
    table = _make([[-3.], [0.], [.5], [7.]])
    params = mahalanobis.calibrate(table, epsilon=.7, mixing=1.)
    plain = multivariate_laplace.calibrate(table, epsilon=.7)
    ids = np.arange(4)
    np.testing.assert_array_equal(params.factor, [[1.]])
    np.testing.assert_allclose(mahalanobis.log_prob(ids, params),
                               multivariate_laplace.log_prob(ids, plain))
    # Where the line is measured in units of two, so is epsilon.
    scaled = params._replace(factor=np.float32([[2.]]))
    half = multivariate_laplace.calibrate(table, epsilon=.35)
    np.testing.assert_allclose(mahalanobis.log_prob(ids, scaled),
                               multivariate_laplace.log_prob(ids, half))
    np.testing.assert_allclose(mahalanobis.distances(ids, scaled),
                               mahalanobis.distances(ids, params) / 2)

  @parameterized.product(
      case=(('mahalanobis', 1), ('hyperbolic', 1), ('vmf', 2)),
      epsilon=(.05, 1., 10., 300.))
  def test_no_proved_epsilon_is_exceeded(self, case, epsilon):
    name, dim = case
    vectors = np.random.default_rng(2).uniform(-.98, .98, (20, dim))
    mech = mechanisms.get(name)
    params = mech.calibrate(_make(vectors), epsilon=epsilon)
    self.assertEqual(params.guarantee.status, 'proved')
    self.assertEqual(params.guarantee.epsilon, epsilon)
    ids = np.arange(20)
    law, distance = mech.log_prob(ids, params), mech.distances(ids, params)
    np.testing.assert_allclose(np.exp(law).sum(1), 1, rtol=1e-11)
    measured, _ = exact.exact_metric_epsilon(law, distance)
    self.assertLessEqual(measured, epsilon * (1 + 1e-9))
    self.assertGreater(measured, epsilon * .9)
    # A law 20% louder than its claim is caught, exactly.
    louder = mech.calibrate(_make(vectors), epsilon=epsilon * 1.2)
    measured, _ = exact.exact_metric_epsilon(
        mech.log_prob(ids, louder), distance)
    self.assertGreater(measured, epsilon)

  def test_arcs_of_a_circle_match_forty_digits(self):
    vectors = [[1., 0.], [.9, .5], [0., 1.], [-1., .1], [-.6, -1.]]
    angles = np.arctan2(*np.array(vectors).T[::-1])
    for epsilon in (.01, 3., 1e4):
      params = vmf.calibrate(_make(vectors), epsilon=epsilon)
      kappa = vmf._concentration(params.envelope, 2)
      law = vmf.log_prob(np.array([0]), params)[0]
      with mpmath.workdps(40):
        density = lambda t, k=kappa: mpmath.exp(k * (mpmath.cos(t) - 1))
        whole = 2 * mpmath.quad(
            density, mpmath.linspace(0, 1 / math.sqrt(kappa + 1), 5)
            + mpmath.linspace(1 / math.sqrt(kappa + 1), mpmath.pi, 40)[1:])
        for word in (1, 2):  # the cells right of the mean
          low = float(angles[word - 1] + angles[word]) / 2
          high = float(angles[word] + angles[word + 1]) / 2
          step = min(high - low, 60 / (kappa * math.sin(low) + 1))
          mass = mpmath.quad(density, mpmath.linspace(low, low + step, 20))
          if low + step < high:
            mass += mpmath.quad(density, [low + step, high])
          np.testing.assert_allclose(law[word], float(mpmath.log(mass / whole)),
                                     rtol=1e-6, atol=1e-6)

  @parameterized.parameters(*_NAMES)
  def test_no_log_prob_where_none_is_known(self, name):
    table = _make(np.random.default_rng(0).uniform(-.5, .5, (8, 3)))
    params = mechanisms.get(name).calibrate(table, epsilon=5.)
    with self.assertRaisesRegex(ValueError, 'D=3.*deniability.measure'):
      mechanisms.get(name).log_prob(np.array([0]), params)


class DistancesTest(parameterized.TestCase):

  def test_mahalanobis_is_scipys(self):
    table = _stretched()
    params = mahalanobis.calibrate(table, epsilon=1., mixing=.8)
    inverse = np.linalg.inv(_matrix(table, .8))
    x = table.vectors.astype(np.float64)
    np.testing.assert_allclose(
        mahalanobis.distances(np.array([3, 0]), params),
        scipy.spatial.distance.cdist(x[[3, 0]], x, 'mahalanobis', VI=inverse),
        rtol=1e-5)
    # In the whole covariance, of trace D, they are not Euclidean at all.
    self.assertGreater(np.max(
        mahalanobis.distances(np.arange(40), params)
        / (scipy.spatial.distance.cdist(x, x) + np.eye(40))), 1.8)

  def test_hyperbolic_is_arcosh_in_forty_digits(self):
    edge = 1 - 2.**-24
    vectors = [[0., 0.], [1e-4, 0.], [.6, .6], [edge, 0.], [1 - 2.**-23, 1e-5],
               [-edge, 0.]]
    params = hyperbolic.calibrate(_make(vectors), epsilon=2.)
    got = hyperbolic.distances(np.arange(6), params)
    with mpmath.workdps(40):
      rows = [[mpmath.mpf(float(v)) for v in row] for row in params.vectors]
      gap = [1 - sum(v * v for v in row) for row in rows]
      for i, x in enumerate(rows):
        for j, y in enumerate(rows):
          square = sum((a - b)**2 for a, b in zip(x, y))
          true = mpmath.acosh(1 + 2 * square / (gap[i] * gap[j]))
          np.testing.assert_allclose(got[i, j], float(true), rtol=1e-8)
    self.assertBetween(got[0, 3], 17.3, 17.4)  # as the error message says

  def test_chordal_is_twice_the_sine_of_half_the_angle(self):
    table = _stretched()
    params = vmf.calibrate(table, epsilon=1.)
    x = table.vectors.astype(np.float64)
    cosine = 1 - scipy.spatial.distance.cdist(x, x, 'cosine')
    np.testing.assert_allclose(
        vmf.distances(np.arange(40), params),
        2 * np.sin(np.arccos(np.clip(cosine, -1, 1)) / 2), atol=1e-6)


class InterfaceTest(parameterized.TestCase):

  def test_they_are_registered_and_state_their_own_metric(self):
    units = {'mahalanobis': 'mahalanobis', 'hyperbolic': 'hyperbolic',
             'vmf': 'chordal'}
    for name, metric in units.items():
      self.assertIn(name, mechanisms.names())
      guarantee = mechanisms.get(name).calibrate(_flat(), epsilon=2.).guarantee
      self.assertEqual(guarantee.metric, metric)
      self.assertIn(metric, guarantee.unit.lower())
      self.assertIn('real arithmetic', guarantee.conditions)

  @parameterized.parameters(('mahalanobis', 5.), ('hyperbolic', 8.),
                            ('vmf', 9.))
  @pytest.mark.slow
  def test_output_does_not_depend_on_batch_or_jit(self, name, epsilon):
    rng = np.random.default_rng(0)
    mech = mechanisms.get(name)
    table = _make(rng.uniform(-.5, .5, (60, 3)))
    params = mech.calibrate(table, epsilon=epsilon)
    ids = rng.integers(0, 60, 1001).astype(np.int32)
    key = jax.random.key(4)
    whole = np.asarray(mech.privatize(key, ids, params))
    self.assertTrue(np.any(whole != ids))
    for size, last in ((1, 20), (1000, 1001)):
      parts = [mech.privatize(key, ids[i:min(i + size, last)], params, start=i)
               for i in range(0, last, size)]
      np.testing.assert_array_equal(np.concatenate(parts), whole[:last])
    jitted = jax.jit(mech.privatize)(key, ids.reshape(7, 143), params)
    np.testing.assert_array_equal(np.ravel(jitted), whole)
    later = mech.privatize(key, ids, params, start=2**32)
    self.assertTrue(np.any(np.asarray(later) != whole))
    still = mech.calibrate(table, epsilon=1e8)
    np.testing.assert_array_equal(mech.privatize(key, ids, still), ids)


class BadInputTest(parameterized.TestCase):

  @parameterized.product(name=_NAMES, epsilon=(0., -1., math.nan, math.inf,
                                               'ten', None))
  def test_an_epsilon_that_is_no_budget_is_refused(self, name, epsilon):
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      mechanisms.get(name).calibrate(_flat(), epsilon=epsilon)

  @parameterized.product(name=_NAMES, ids=([-1, 0], [0, 6], [.5]))
  def test_ids_that_are_no_words_are_refused(self, name, ids):
    mech = mechanisms.get(name)
    params = mech.calibrate(_flat(), epsilon=3.)
    with self.assertRaisesRegex(ValueError, 'ids'):
      mech.privatize(jax.random.key(0), np.array(ids), params)
    line = params if name == 'vmf' else mech.calibrate(
        _make(np.arange(6)[:, None] / 10), epsilon=3.)
    with self.assertRaisesRegex(ValueError, 'ids'):
      mech.log_prob(np.array(ids), line)

  @parameterized.parameters(*_NAMES)
  def test_tables_that_cannot_be_privatised_are_refused(self, name):
    calibrate = functools.partial(mechanisms.get(name).calibrate, epsilon=5.)
    for message, vectors in (('word', [[.5, .1]]), ('same', [[.5, .1]] * 2),
                             ('NaN', [[.5, .1], [.1, math.nan]])):
      with self.assertRaisesRegex(ValueError, message):
        calibrate(_make(vectors))

  @parameterized.parameters(-.1, 1.5, math.nan, 'all', None, True, '0.5',
                            10**400)
  def test_a_mixing_that_is_no_weight_is_refused(self, mixing):
    with self.assertRaisesRegex(ValueError, 'mixing'):
      mahalanobis.calibrate(_flat(), epsilon=1., mixing=mixing)

  def test_a_flat_covariance_is_refused_by_name(self):
    # Three words span a plane at most, and these columns are all but equal.
    for vectors in (np.eye(4)[:3], [[0, 0, 1], [1, 1, 2], [3, 3, 5], [2, 2, 9]],
                    np.random.default_rng(0).normal(size=(9, 1)) * [1., 3.]):
      with self.assertRaisesRegex(ValueError, 'mixing=1.*singular.*smaller'):
        mahalanobis.calibrate(_make(vectors), epsilon=1., mixing=1.)
      mahalanobis.calibrate(_make(vectors), epsilon=1., mixing=.9)
    mahalanobis.calibrate(_stretched(), epsilon=1., mixing=1.)

  def test_vectors_outside_the_ball_are_refused_by_their_row(self):
    for bad in ([1., 0.], [.8, .7], [3., 4.]):
      with self.assertRaisesRegex(ValueError, r"row 1 \('w1'\) of norm .*17.3"):
        hyperbolic.calibrate(_make([[0., .5], bad, [5., 5.]]), epsilon=2.)
    hyperbolic.calibrate(_make([[0., .5], [1 - 2.**-24, 0.]]), epsilon=2.)

  @parameterized.parameters((2, 1.), (2, .3), (5, 4.), (50, 30.))
  def test_an_epsilon_below_the_growth_of_space_names_the_bound(
      self, dim, epsilon):
    table = _make(np.eye(dim) / 2)
    with self.assertRaisesRegex(ValueError, f'exceed D - 1 = {dim - 1}:'):
      hyperbolic.calibrate(table, epsilon=epsilon)
    self.assertGreater(
        hyperbolic.calibrate(table, epsilon=dim - 1 + 1e-9).gamma_shape, 0)

  def test_directions_that_do_not_exist_or_coincide_are_refused(self):
    with self.assertRaisesRegex(ValueError, r"row 1 \('w1'\).*zero"):
      vmf.calibrate(_make([[1., 0.], [0., 0.]]), epsilon=1.)
    with self.assertRaisesRegex(ValueError, 'scaling.*row 2'):
      vmf.calibrate(_make([[1., 2.], [3., 1.], [2., 4.]]), epsilon=1.)
    with self.assertRaisesRegex(ValueError, 'D=1'):
      vmf.calibrate(_make([[1.], [-2.]]), epsilon=1.)
