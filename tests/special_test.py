"""Lambert W and log-space pieces against mpmath at 50 digits."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from jaxdp import special

_MAX_ULP = 4.

_BRANCHES = parameterized.product(
    branch=(0, -1), dtype=(np.float32, np.float64))


def _nearest_branch_point(dtype):
  with mpmath.workdps(50):
    return dtype(-mpmath.exp(-1))


def _points_by_magnitude(branch, dtype, num):
  """Floats log-spaced in |x|, of both signs on branch 0."""
  info = np.finfo(dtype)
  small = np.log10(float(info.tiny)) + 1e-3
  negative = -np.logspace(small, np.log10(0.3678), num)
  if branch == -1:
    return negative.astype(dtype)
  large = 300. if dtype == np.float64 else np.log10(3e38)
  return np.concatenate(
      [negative[::2], np.logspace(small, large, num - num // 2)]).astype(dtype)


def _points_by_gap(branch, dtype, num):
  """Floats log-spaced in x + 1/e, from the first above -1/e on."""
  point = _nearest_branch_point(dtype)
  first = float(np.nextafter(point, dtype(0))) + float(np.exp(-1))
  if branch == -1:
    last = 0.36
  else:
    last = 1e300 if dtype == np.float64 else 3e38
  x = (np.geomspace(first, last, num) - np.exp(-1)).astype(dtype)
  return np.maximum(x, np.nextafter(point, dtype(0)))


_SPACINGS = {'magnitude': _points_by_magnitude, 'gap': _points_by_gap}


@functools.cache
def _points_and_reference(spacing, branch, dtype, num):
  """The inputs and W of them, the latter as a sum of two doubles."""
  x = np.unique(_SPACINGS[spacing](branch, dtype, num))
  with mpmath.workdps(50):
    exact = [mpmath.lambertw(mpmath.mpf(float(v)), branch) for v in x]
    if any(mpmath.im(w) for w in exact):
      raise AssertionError('the reference left the real line')
    for v, w in zip(x[::50], exact[::50]):
      residual = w * mpmath.exp(w) - mpmath.mpf(float(v))
      if abs(residual) > mpmath.mpf(10)**-46 * abs(float(v)):
        raise AssertionError(f'the reference is wrong at {v}')
    high = np.array([float(w) for w in exact])
    low = np.array([float(w - float(w)) for w in exact])
  return x, high, low


def _ulps(got, high, low):
  """Error of `got` in units of its format's spacing at the exact value."""
  spacing = np.spacing(np.abs(high).astype(got.dtype)).astype(np.float64)
  return np.abs((got.astype(np.float64) - high) - low) / spacing


def _evaluate(fun, x, mode):
  """`fun` of a NumPy array, with x64 on only where the input needs it."""
  with jax.enable_x64(x.dtype == np.float64):
    if mode == 'eager':
      with jax.disable_jit():
        return np.asarray(fun(jnp.asarray(x)))
    if mode == 'jit':
      fun = jax.jit(fun)
    elif mode == 'vmap':
      fun = jax.vmap(fun)
    return np.asarray(fun(jnp.asarray(x)))


def _lambertw(branch):
  return functools.partial(special.lambertw, branch=branch)


def _slope(branch):
  return jax.vmap(jax.grad(_lambertw(branch)))


def _curvature(branch):
  return jax.vmap(jax.grad(jax.grad(_lambertw(branch))))


class LambertWValueTest(parameterized.TestCase):

  @parameterized.product(
      branch=(0, -1), dtype=(np.float32, np.float64),
      spacing=tuple(_SPACINGS), mode=('plain', 'jit', 'eager', 'vmap'))
  def test_is_within_four_ulp_of_fifty_digits(
      self, branch, dtype, spacing, mode):
    x, high, low = _points_and_reference(spacing, branch, dtype, 500)
    got = _evaluate(_lambertw(branch), x, mode)
    self.assertEqual(got.dtype, dtype)
    self.assertLessEqual(_ulps(got, high, low).max(), _MAX_ULP)

  # The mark goes below: above, it would stay on the decorator's iterator.
  @parameterized.product(
      branch=(0, -1), dtype=(np.float32, np.float64), spacing=tuple(_SPACINGS))
  @pytest.mark.slow
  def test_is_within_four_ulp_at_ten_thousand_points(
      self, branch, dtype, spacing):
    x, high, low = _points_and_reference(spacing, branch, dtype, 10_000)
    for mode in ('jit', 'eager'):
      got = _evaluate(_lambertw(branch), x, mode)
      self.assertLessEqual(_ulps(got, high, low).max(), _MAX_ULP)

  @_BRANCHES
  def test_a_one_part_constant_would_not_pass(self, branch, dtype):
    x, high, low = _points_and_reference('gap', branch, dtype, 500)
    near = x < -0.3678
    self.assertGreater(near.sum(), 10)
    x, high, low = x[near], high[near], low[near]
    with jax.enable_x64(dtype == np.float64):
      shifted = x - _nearest_branch_point(dtype)
      p = np.sqrt(dtype(2. * np.e) * shifted) * dtype(1 if branch == 0 else -1)
      naive = np.asarray(special._branch_series(jnp.asarray(p)))
    self.assertGreater(_ulps(naive, high, low).max(), 100.)

  @_BRANCHES
  def test_the_floats_around_the_branch_point(self, branch, dtype):
    point = _nearest_branch_point(dtype)
    below, above = np.nextafter(point, dtype(-1)), np.nextafter(point, dtype(0))
    for mode in ('jit', 'eager'):
      got = _evaluate(
          _lambertw(branch), np.array([below, point, above], dtype), mode)
      self.assertTrue(np.isnan(got[0]))
      self.assertEqual(got[1], -1.)
      self.assertGreater((got[2] + 1.) * (1. if branch == 0 else -1.), 0.)

  @_BRANCHES
  def test_edges_are_as_documented(self, branch, dtype):
    x = np.array([0., -0., np.inf, -np.inf, np.nan, -1., 1.], dtype)
    nan, inf = np.nan, np.inf
    expected = (
        [0., -0., inf, nan, nan, nan, 0.5671432904097838] if branch == 0
        else [-inf, -inf, nan, nan, nan, nan, nan])
    got = _evaluate(_lambertw(branch), x, 'jit')
    np.testing.assert_array_almost_equal_nulp(
        got[np.isfinite(got)],
        np.array(expected, dtype)[np.isfinite(expected)], nulp=4)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))
    if branch == 0:
      np.testing.assert_array_equal(np.signbit(got[:2]), [False, True])

  @parameterized.product(
      dtype=(np.float32, np.float64), mode=('jit', 'eager', 'vmap'))
  def test_subnormals_count_as_the_zero_beside_them(self, dtype, mode):
    info = np.finfo(dtype)
    half = info.tiny / dtype(2)
    smallest = info.smallest_subnormal
    x = np.array([smallest, -smallest, half, -half], dtype)
    upper = _evaluate(_lambertw(0), x, mode)
    # Bits, not values: a comparison might flush both sides.
    np.testing.assert_array_equal(
        upper.view(f'u{info.bits // 8}'), x.view(f'u{info.bits // 8}'))
    lower = _evaluate(_lambertw(-1), x, mode)
    np.testing.assert_array_equal(lower, np.full(4, -np.inf))

  @parameterized.parameters(np.float32, np.float64)
  def test_the_smallest_normal_numbers_are_not_zero(self, dtype):
    tiny = np.finfo(dtype).tiny
    x = np.array([-tiny], dtype)
    with mpmath.workdps(50):
      exact = float(mpmath.lambertw(mpmath.mpf(float(x[0])), -1))
    got = _evaluate(_lambertw(-1), x, 'jit')
    self.assertLessEqual(_ulps(got, np.array([exact]), 0.).max(), _MAX_ULP)
    slope = _evaluate(_slope(-1), x, 'jit')
    np.testing.assert_allclose(
        slope, exact / (1. + exact) / x.astype(np.float64),
        rtol=16. * np.finfo(dtype).eps)
    self.assertTrue(
        np.isnan(_evaluate(_lambertw(-1), np.array([tiny], dtype), 'jit'))[0])

  @parameterized.parameters(0, -1)
  def test_every_float32_of_the_hardest_stretch_is_within_four_ulp(
      self, branch):
    # From the end of the series to the end of its use as a start; float64 is
    # held to mpmath above and is exact at this scale.
    first, last = np.array([0.24, 0.31], np.float32).view(np.int32)
    x = -np.arange(first, last, dtype=np.int32).view(np.float32)
    exact = _evaluate(_lambertw(branch), x.astype(np.float64), 'jit')
    got = _evaluate(_lambertw(branch), x, 'jit')
    self.assertLessEqual(_ulps(got, exact, 0.).max(), _MAX_ULP)

  def test_default_branch_is_the_upper_one(self):
    self.assertEqual(float(special.lambertw(-0.2)),
                     float(special.lambertw(-0.2, 0)))
    self.assertGreater(float(special.lambertw(-0.2)), -1.)
    self.assertLess(float(special.lambertw(-0.2, -1)), -1.)


class LambertWDerivativeTest(parameterized.TestCase):

  @parameterized.product(
      branch=(0, -1), dtype=(np.float32, np.float64), spacing=tuple(_SPACINGS))
  def test_matches_the_closed_form(self, branch, dtype, spacing):
    x, high, low = _points_and_reference(spacing, branch, dtype, 500)
    with mpmath.workdps(40):
      w = [mpmath.mpf(a) + mpmath.mpf(b) for a, b in zip(high, low)]
      exact = np.array([float(mpmath.exp(-v) / (1 + v)) for v in w])
      plus_one = np.array([float(1 + v) for v in w])
    got = _evaluate(_slope(branch), x, 'jit').astype(np.float64)
    # Smaller ones are subnormal and may be flushed.
    kept = np.abs(exact) >= np.finfo(dtype).tiny
    error = np.abs(got / exact - 1.)[kept]
    # Four ulp of W over 1 + W, and as much again for the quotient's roundings.
    tolerance = 8. * np.finfo(dtype).eps * (
        1. + np.maximum(np.abs(high), 1.) / np.abs(plus_one))[kept]
    self.assertLessEqual((error / tolerance).max(), 1.)
    if dtype == np.float64:
      self.assertLessEqual(error[np.abs(plus_one[kept]) > 1e-3].max(), 1e-12)

  @_BRANCHES
  def test_edges_are_as_documented(self, branch, dtype):
    point = _nearest_branch_point(dtype)
    x = np.array([point, 0., -0., np.inf, np.nan, -1.], dtype)
    nan, inf = np.nan, np.inf
    expected = (
        [inf, 1., 1., 0., nan, nan] if branch == 0
        else [-inf, -inf, -inf, nan, nan, nan])
    got = _evaluate(_slope(branch), x, 'jit')
    self.assertEqual(got.dtype, dtype)
    np.testing.assert_array_equal(got, np.array(expected, dtype))

  @_BRANCHES
  def test_the_second_derivative_matches_the_closed_form(self, branch, dtype):
    x = np.array([-0.35, -0.2, -1e-3], dtype)
    if branch == 0:
      x = np.concatenate([x, np.array([0., 0.5, 1., 2., 100.], dtype)])
    with mpmath.workdps(50):
      w = [mpmath.lambertw(mpmath.mpf(float(v)), branch) for v in x]
      exact = np.array(
          [float(-mpmath.exp(-2 * v) * (v + 2) / (1 + v)**3) for v in w])
      condition = np.array([float(abs(v / (1 + v))) for v in w])
    got = _evaluate(_curvature(branch), x, 'jit')
    # W enters the cube, the exponential and v + 2, which changes sign at -2.
    np.testing.assert_array_less(
        np.abs(got / exact - 1.),
        np.finfo(dtype).eps * (64. + 64. * condition))
    if branch == 0:
      self.assertEqual(got[3], -2.)

  @parameterized.parameters(0, -1)
  def test_jvp_is_linear_and_agrees_with_grad(self, branch):
    x = jnp.array([-0.3, -0.1], jnp.float32)
    fun = _lambertw(branch)
    _, tangent = jax.jvp(fun, (x,), (jnp.array([2., -4.], jnp.float32),))
    slope = _slope(branch)(x)
    np.testing.assert_allclose(tangent, slope * np.array([2., -4.]), rtol=1e-6)

  def test_a_sum_over_an_array_has_a_finite_gradient_through_zero(self):
    x = jnp.array([0., 1e-30, 0.5, 3., 1e30], jnp.float32)
    gradient = jax.grad(lambda v: special.lambertw(v).sum())(x)
    self.assertTrue(bool(jnp.isfinite(gradient).all()))
    np.testing.assert_array_equal(gradient[:2], [1., 1.])


class LambertWArgumentsTest(parameterized.TestCase):

  @parameterized.parameters(1, -2, -1., 0.5, None, 'upper')
  def test_other_branches_are_refused_by_name(self, branch):
    with self.assertRaisesRegex(ValueError, r'branch=.*must be'):
      special.lambertw(0.1, branch)

  @parameterized.parameters(
      jnp.complex64, jnp.bool_, jnp.float16, jnp.bfloat16)
  def test_other_dtypes_are_refused_by_name(self, dtype):
    for fun in (special.lambertw, special.log1mexp):
      with self.assertRaisesRegex(ValueError, 'x has dtype.*cast'):
        fun(jnp.ones(2, dtype))

  @parameterized.parameters(False, True)
  def test_integers_become_the_default_float(self, x64):
    default = np.float64 if x64 else np.float32
    with jax.enable_x64(x64):
      for x in (np.array([0, 1, 5], np.int32), 1, 1.):
        self.assertEqual(special.lambertw(x).dtype, default)
        self.assertEqual(special.log1mexp(x).dtype, default)
      got = np.asarray(special.lambertw(np.array([0, 1], np.int8)))
    np.testing.assert_allclose(got, [0., 0.5671432904097838], rtol=5e-7)

  def test_float32_stays_float32_under_x64(self):
    with jax.enable_x64(True):
      x = jnp.array([0.5], jnp.float32)
      self.assertEqual(special.lambertw(x).dtype, jnp.float32)
      self.assertEqual(jax.vmap(jax.grad(special.lambertw))(x).dtype,
                       jnp.float32)
      self.assertEqual(special.log1mexp(x).dtype, jnp.float32)

  def test_shape_is_kept(self):
    self.assertEqual(special.lambertw(jnp.zeros((2, 0, 3))).shape, (2, 0, 3))
    self.assertEqual(special.lambertw(1.).shape, ())


class BranchSeriesTest(absltest.TestCase):

  def test_coefficients_are_those_of_the_paper(self):
    # Corless et al. (1996), eq. (4.22).
    self.assertEqual(
        special._branch_coefficients(6),
        (-1., 1., -1. / 3., 11. / 72., -43. / 540., 769. / 17280.))

  def test_the_two_parts_make_one_over_e(self):
    for dtype, (high, low) in special._INV_E.items():
      self.assertEqual(high, float(-_nearest_branch_point(dtype.type)))
      with mpmath.workdps(50):
        error = mpmath.mpf(high) + mpmath.mpf(low) - mpmath.exp(-1)
      self.assertLess(abs(error), float(np.finfo(dtype).eps)**2 / 4.)


class Log1mexpTest(parameterized.TestCase):

  @parameterized.product(
      dtype=(np.float32, np.float64), mode=('jit', 'eager'))
  def test_is_within_four_ulp_of_fifty_digits(self, dtype, mode):
    largest = 87. if dtype == np.float32 else 708.
    x = np.concatenate([
        np.geomspace(float(np.finfo(dtype).tiny) * 2., largest, 1000),
        np.linspace(0.6, 0.8, 200)]).astype(dtype)
    with mpmath.workdps(400):
      exact = [mpmath.log(1 - mpmath.exp(-mpmath.mpf(float(v)))) for v in x]
      high = np.array([float(v) for v in exact])
      low = np.array([float(v - float(v)) for v in exact])
    got = _evaluate(special.log1mexp, x, mode)
    self.assertEqual(got.dtype, dtype)
    self.assertLessEqual(_ulps(got, high, low).max(), _MAX_ULP)
    naive = np.log(dtype(1) - np.exp(-x[(x > 1e-6) & (x < 1e-4)]))
    self.assertGreater(
        _ulps(naive, high[(x > 1e-6) & (x < 1e-4)], 0.).max(), 100.)

  @parameterized.parameters(np.float32, np.float64)
  def test_edges_are_as_documented(self, dtype):
    x = np.array([0., -0., np.inf, -1., np.nan], dtype)
    got = _evaluate(special.log1mexp, x, 'jit')
    np.testing.assert_array_equal(got, [-np.inf, -np.inf, 0., np.nan, np.nan])

  def test_derivative_is_the_odds(self):
    x = np.geomspace(1e-30, 700., 100)
    got = _evaluate(jax.vmap(jax.grad(special.log1mexp)), x, 'jit')
    np.testing.assert_allclose(got, 1. / np.expm1(x), rtol=1e-14)

  def test_gives_the_log_of_the_complement(self):
    logp = jnp.log(jnp.array([0.1, 0.5, 0.9], jnp.float32))
    np.testing.assert_allclose(
        jnp.exp(special.log1mexp(-logp)), [0.9, 0.5, 0.1], rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
