r"""Special functions: the real Lambert W and log-space pieces.

Device code: pure functions of arrays, for use under ``jit``, ``vmap`` and
``grad``. No keys and no privacy here. Float32 in, float32 out; float64 needs
``jax_enable_x64``.

Example:
  >>> import jax
  >>> from jaxdp import special
  >>> w = special.lambertw(1.)
  >>> print(f'{w:.6f} {w * jax.numpy.exp(w):.6f}')
  0.567143 1.000000
  >>> print(f'{jax.grad(special.lambertw)(0.):.1f}')
  1.0

References:
  Corless et al. (1996), On the Lambert W function
    <https://doi.org/10.1007/BF02124750>.
  Fritsch, Shafer and Crowley (1973), Algorithm 443
    <https://doi.org/10.1145/361952.361970>.
  Winitzki (2003), Uniform approximations for transcendental functions
    <https://doi.org/10.1007/3-540-44839-X_82>.
  Mächler (2012), Accurately computing log(1 - exp(-|a|))
    <https://cran.r-project.org/package=Rmpfr/vignettes/log1mexp-note.pdf>.
"""

import fractions
import functools

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np

# 1/e in two parts, the first the float nearest to it. In both formats the first
# is the larger, so -1/e itself lies strictly between two floats.
_INV_E = {
    np.dtype('float32'): (0.3678794503211975, -9.149755619830557e-09),
    np.dtype('float64'): (0.36787944117144233, -1.2428753672788363e-17),
}

# The branch series alone is used for p below the first number, where any
# iteration loses digits because x hardly moves with W; up to the second it
# starts the iteration.
_SERIES_P = 0.6
_SERIES_START_P = 0.8
_SERIES_TERMS = {np.dtype('float32'): 20, np.dtype('float64'): 44}


def lambertw(x: jax.typing.ArrayLike, branch: int = 0) -> jax.Array:
  r"""The real Lambert W function: solves ``w * exp(w) == x`` for ``w``.

  Branch 0 is the solution ``w >= -1``, real for ``x >= -1/e``; branch -1 is the
  solution ``w <= -1``, real for ``-1/e <= x < 0``.

  Guarantee: within 4 units in the last place of the exact value at every
  normal float tested, in both formats and on both branches, up to the branch
  point. ``-1/e`` is not a float; the float nearest to it gives exactly -1 on
  both branches and the next one below gives NaN. At the edges:

  ============  =========  ==========  ===============  ================
  x             W0         W-1         dW0/dx           dW-1/dx
  ============  =========  ==========  ===============  ================
  nearest -1/e  -1         -1          +inf             -inf
  0. and -0.    x itself   -inf        1                -inf
  x > 0         finite     NaN         finite           NaN
  +inf          +inf       NaN         0                NaN
  NaN, < -1/e   NaN        NaN         NaN              NaN
  ============  =========  ==========  ===============  ================

  Subnormal ``x`` of either sign counts as the zero next to it, on every
  backend and whether or not the backend flushes such numbers: W0 returns ``x``
  itself, which is its correctly rounded value, and W-1 returns ``-inf``.

  The derivative is :math:`1 / (e^W (1 + W))`, finite at 0, and can be taken
  again. It inherits the error of ``1 + W``: near the branch point its relative
  error is a few roundings over ``abs(1 + W)``. Where it is itself subnormal (in
  float32, ``x`` above about 8e37) it may be flushed to 0.

  Args:
    x: argument, any shape; float32 or float64, integers and Python numbers
      become the default float.
    branch: 0 or -1; a Python integer, static under ``jit``.

  Returns:
    Array of the shape and float dtype of ``x``.

  Raises:
    ValueError: ``branch`` is not the integer 0 or -1, or ``x`` has another
      dtype (complex, boolean, half precision).

  Example:
    >>> print(f'{lambertw(-0.1):.5f} {lambertw(-0.1, -1):.5f}')
    -0.11183 -3.57715

  References: Corless et al. (1996), eq. (4.22)-(4.24) near the branch point;
  Fritsch et al. (1973) for the iteration; Winitzki (2003) for its start.
  """
  if not isinstance(branch, (int, np.integer)) or branch not in (0, -1):
    raise ValueError(
        f'branch={branch!r} must be the integer 0 or -1; the other branches '
        'of Lambert W are not real')
  return _lambertw(_as_float(x, 'x'), int(branch))


def log1mexp(x: jax.typing.ArrayLike) -> jax.Array:
  r"""Computes :math:`\log(1 - e^{-x})` for ``x >= 0`` without cancellation.

  The sign convention is that of ``jax.nn.log1mexp``, which does the work. So
  ``log1mexp(-logp)`` is the log of the complement of a log-probability.

  Args:
    x: argument, any shape, ``x >= 0``; float32 or float64, integers and Python
      numbers become the default float.

  Returns:
    Array of the shape and float dtype of ``x``: ``-inf`` at 0, 0 at ``inf``,
    NaN for negative ``x``. Subnormal arguments and results may count as 0.

  Raises:
    ValueError: ``x`` has another dtype (complex, boolean, half precision).

  Example:
    >>> print(f'{log1mexp(1e-10):.4f} {log1mexp(10.):.4e}')
    -23.0259 -4.5401e-05

  References: Mächler (2012).
  """
  return jax.nn.log1mexp(_as_float(x, 'x'))


def _as_float(x: jax.typing.ArrayLike, name: str) -> jax.Array:
  """Returns `x` as a float32 or float64 array, or refuses it."""
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.integer):
    x = x.astype(jnp.result_type(float))
  if x.dtype not in _INV_E:
    raise ValueError(
        f'{name} has dtype {x.dtype}, which must be float32, float64 or an '
        'integer type; cast it first')
  return x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)
def _lambertw(x, branch):
  """Lambert W of a float array, `branch` 0 or -1."""
  inv_e, inv_e_low = _INV_E[x.dtype]
  # Without the barrier XLA may fold (x + a) + b into x + (a + b), which throws
  # the low part away and with it every digit near the branch point.
  shifted = jax.lax.optimization_barrier(x + inv_e)
  p = jnp.sqrt(2. * np.e * jnp.maximum(shifted + inv_e_low, 0.))
  series = _branch_series(p if branch == 0 else -p)
  solve = _solve_upper if branch == 0 else _solve_lower
  w = jnp.where(p < _SERIES_P, series, solve(x, series, p < _SERIES_START_P))
  w = jnp.where(x < -inv_e, jnp.nan, w)
  if branch == 0:
    w = jnp.where(x == jnp.inf, x, w)
    # W0(x) = x - x^2 + ...; the selection keeps the sign of zero and the bits
    # of subnormals.
    return jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).eps / 4., x, w)
  w = jnp.where(x > 0., jnp.nan, w)
  return jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, -jnp.inf, w)


@_lambertw.defjvp
def _lambertw_jvp(branch, primals, tangents):
  """dW = dx / (exp(W) (1 + W)), in the form that is accurate where used."""
  x, = primals
  dx, = tangents
  w = _lambertw(x, branch)
  if branch == -1:
    # Four times x, or the product would be subnormal for the smallest x. (Two
    # divisions do not help: XLA joins them into one by the product.)
    return w, 4. * (dx / ((1. + 1. / w) * (-4. * jnp.abs(x))))
  # exp(W) = x / W: the first form is finite at 0, the second keeps the digits
  # of a large W. Inputs are made harmless where the other form is chosen, or
  # the second derivative would be NaN.
  small = jnp.abs(x) < 1.
  w_small, w_large = jnp.where(small, w, 0.), jnp.where(small, 1., w)
  slope_small = jnp.exp(-w_small) / (1. + w_small)
  slope_large = 1. / ((1. + 1. / w_large) * jnp.where(small, 1., x))
  return w, dx * jnp.where(small, slope_small, slope_large)


def _solve_upper(x, series, near):
  """Branch 0 away from the branch point; `series` starts it where `near`."""
  y, shift = _float32_parts(jnp.where(x > -0.3, x, 1.), 1)
  log1p = jnp.log1p(y) + shift
  # Winitzki (2003): within 4% wherever it is used.
  w = log1p * (1. - jnp.log1p(log1p) / (2. + log1p))
  w = _fritsch_step(w, jnp.log(y / w) + shift - w)
  w = jnp.where(near, series, w.astype(x.dtype))
  return _fritsch_step(w, jnp.log(x / w) - w)


def _solve_lower(x, series, near):
  """Branch -1 away from the branch point; `series` starts it where `near`."""
  y, shift = _float32_parts(-x, -1)
  # Corless et al. (1996), section 4: the logarithmic series at 0-.
  log_x = jnp.log(y) + shift
  l1 = jnp.where(near, -2., log_x)
  l2 = jnp.log(-l1)
  w = l1 - l2 + l2 * (2. * l1 + l2 - 2.) / (2. * l1 * l1)
  # Not log(x / w): the quotient is exp(w), subnormal for the smallest x.
  w = _fritsch_step(w, log_x - jnp.log(-w) - w)
  w = jnp.where(near, series, w.astype(x.dtype))
  if x.dtype == jnp.float32:
    return _fritsch_step(w, log_x - jnp.log(-w) - w)
  # One float64 logarithm, not two: it costs more than all of the above.
  y, shift = _scaled(-x, -1)
  return _fritsch_step(w, jnp.log(y / -w) + shift - w)


def _float32_parts(x, sign):
  """`_scaled` in float32: there the first steps are as good, and cheaper."""
  if x.dtype == jnp.float32:
    return x, 0.
  return tuple(a.astype(jnp.float32) for a in _scaled(x, sign))


def _scaled(x, sign):
  """(y, s), log(x) = log(y) + s, large (sign 1) or small (-1) x brought to 1.

  By comparisons: the bits of a float64 are out of reach on a TPU.
  """
  shift = jnp.zeros_like(x)
  for power in (512, 256, 128, 64):
    y = x * 2.**(-sign * power)
    moves = y >= 1. if sign == 1 else y <= 1.
    x = jnp.where(moves, y, x)
    shift += jnp.where(moves, sign * power * np.log(2.), 0.)
  return x, shift


def _fritsch_step(w, z):
  """One quartic step, from the residual z = log(x / w) - w; one division."""
  plus_one = 1. + w
  q = 2. * plus_one * (plus_one + z * (2. / 3.))
  return w * (1. + z * (q - z) / (plus_one * (q - 2. * z)))


def _branch_series(p):
  """The series of W in p = +-sqrt(2 (e x + 1)), Corless et al. eq. (4.22).

  Every second term apart: two short chains of additions, not a long one.
  """
  first, *rest = _branch_coefficients(_SERIES_TERMS[np.dtype(p.dtype)])
  odd, even = (_polynomial(p * p, rest[i::2]) for i in (0, 1))
  return first + p * (odd + p * even)


def _polynomial(x, coefficients):
  """Horner's rule, the constant first among the coefficients."""
  total = jnp.zeros_like(x)
  for coefficient in reversed(coefficients):
    total = total * x + coefficient
  return total


@functools.cache
def _branch_coefficients(num_terms: int) -> tuple[float, ...]:
  """Corless et al. (1996), eq. (4.23)-(4.24), in exact rationals."""
  Fraction = fractions.Fraction
  mu, alpha = [Fraction(-1), Fraction(1)], [Fraction(2), Fraction(-1)]
  for k in range(2, num_terms):
    alpha.append(sum((mu[j] * mu[k + 1 - j] for j in range(2, k)), Fraction(0)))
    mu.append(
        Fraction(k - 1, k + 1) * (mu[k - 2] / 2 + alpha[k - 2] / 4)
        - alpha[k] / 2 - mu[k - 1] / (k + 1))
  return tuple(float(m) for m in mu)
