r"""ADePT made sound: clip a vector, then add enough noise.

ADePT clips a vector to :math:`\|r\|_2 \le C` and adds Laplace noise of scale
:math:`2C / \epsilon` to every entry. Two such vectors may be
:math:`2 C \sqrt D` apart in the l1 norm that Laplace noise answers to, so it
spends :math:`\sqrt D` times the epsilon it states. Three repairs:

=====  ========  ==========================================
clip   noise     scale
=====  ========  ==========================================
l1     Laplace   :math:`2C / \epsilon`
l2     Laplace   :math:`2C \sqrt D / \epsilon`
l2     Gaussian  analytic, l2 sensitivity :math:`2C`
=====  ========  ==========================================

Calibration is on the host, :func:`adept` on the device.

>>> import jax
>>> params = calibrate_adept(clip=1., epsilon=8., num_dimensions=4)
>>> float(params.scale)
0.25
>>> adept(jax.random.key(0), jax.numpy.ones((3, 4)), params).shape
(3, 4)

References: Krishna et al. (2021), ADePT; Habernal (2021), When differential
privacy meets NLP: the devil is in the detail; Balle & Wang (2018), Improving
the Gaussian mechanism for differential privacy, Theorem 8.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special as sp_special

from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.mechanisms.numeric import laws

FORMS = (('l1', 'laplace'), ('l2', 'laplace'), ('l2', 'gaussian'))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdeptForm:
  """Which repair; static under `jax.jit`."""
  norm: str
  noise: str
  num_dimensions: int


class AdeptParams(NamedTuple):
  """What a calibrated repair needs."""
  clip: Any  # [] float32, C in the data's unit
  scale: Any  # [] float32, Laplace's scale or the Gaussian's stddev, rounded up
  form: AdeptForm
  guarantee: guarantees.Guarantee


def calibrate_adept(*, clip, epsilon, num_dimensions, norm='l1',
                    noise='laplace', delta=0.):
  """Calibrates one of ADePT's three repairs. Host.

  Guarantee: *proved* for real arithmetic: (epsilon, delta)-DP between any two
  inputs, an input being one row. Not covered: float rounding of the noise
  (use ``grid_laplace`` where it matters), the generator, and whatever a
  decoder was trained on.

  Args:
    clip: C > 0, the norm rows are clipped to, in the data's unit.
    epsilon: budget > 0 a row.
    num_dimensions: D >= 1, the length of a row.
    norm: 'l1' or 'l2', the norm that is clipped.
    noise: 'laplace', or 'gaussian' with norm 'l2'.
    delta: 0 for Laplace; in (0, 1) for the Gaussian.

  Returns:
    AdeptParams.

  Raises:
    ValueError: a value out of range, or a pair that is no repair.

  References: Habernal (2021); Dwork & Roth (2014), Theorem 3.6;
  Balle & Wang (2018), Theorem 8.
  """
  clip = laws.positive('clip', clip, 'it is a norm, in the unit of the data')
  epsilon = laws.positive('epsilon', epsilon, 'it is a budget for each row')
  if (isinstance(num_dimensions, bool)
      or not isinstance(num_dimensions, (int, np.integer))
      or num_dimensions < 1):
    raise ValueError(f'num_dimensions={num_dimensions!r} must be an integer '
                     '>= 1')
  if (norm, noise) not in FORMS:
    raise ValueError(f'norm={norm!r}, noise={noise!r} is no repair; use one of '
                     f'{FORMS}')
  _check_delta(delta, noise)
  source = 'Dwork & Roth (2014), Theorem 3.6'
  if noise == 'gaussian':
    source = 'Balle & Wang (2018), Theorem 8'
    scale = 2 * clip * gaussian_noise_multiplier(epsilon, delta)
  else:
    l1_over_norm = 1. if norm == 'l1' else math.sqrt(num_dimensions)
    scale = 2 * clip * l1_over_norm / epsilon
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=float(delta), metric=guarantees.ADJACENCY,
      relation='any two inputs; an input is one row', status='proved',
      source=source, conditions=(guarantees.REAL_ARITHMETIC,
                                 guarantees.IDEAL_RANDOM_BITS))
  form = AdeptForm(norm=norm, noise=noise, num_dimensions=int(num_dimensions))
  return AdeptParams(_float32(clip, 'clip', up=False),
                     _float32(scale, 'scale', up=True), form, guarantee)


def adept(key, x, params):
  """Clips each row and adds noise to every entry. Device.

  Guarantee: ``params.guarantee``, for each row.

  Args:
    key: typed key; consumed.
    x: float ``[..., D]``.
    params: AdeptParams.

  Returns:
    float32 of x's shape. A traced NaN counts as 0 and a traced infinity as
    the largest float32, which keeps the guarantee.

  Raises:
    ValueError: rows of another length; concrete x that is not finite.
  """
  size = params.form.num_dimensions
  if jnp.ndim(x) < 1 or jnp.shape(x)[-1] != size:
    raise ValueError(f'x has shape {jnp.shape(x)}; its last axis must be '
                     f'num_dimensions={size}')
  laws.check_real('x', x)
  if not laws.is_traced(x):
    # NaN compares false; a float64 beyond float32 would become infinite.
    bad = ~(np.abs(np.asarray(x, np.float64)) <= np.finfo(np.float32).max)
    if bad.any():
      raise ValueError(f'x holds {np.asarray(x)[bad].flat[0]}; rows must be '
                       'finite in float32')
  return _adept(key, jnp.asarray(x, jnp.float32), params.clip, params.scale,
                form=params.form)


@functools.partial(jax.jit, static_argnames='form')
def _adept(key, x, clip, scale, *, form):
  clipped = _clip_rows(x, clip, form.norm)
  if form.noise == 'gaussian':
    return clipped + scale * jax.random.normal(key, x.shape)
  return clipped + samplers.laplace(key, x.shape, scale=scale)


def _clip_rows(x, clip, norm):
  """Scales rows down to the norm; no square and no sum can overflow."""
  x = jnp.nan_to_num(x)
  largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
  # A reciprocal beyond 2**126 would be subnormal, and flushed to 0.
  shrink = jnp.where(largest > 2.**64, 2.**-64, 1.)
  unit = x * shrink / jnp.where(largest > 0, largest * shrink, 1.)
  if norm == 'l1':
    size = jnp.sum(jnp.abs(unit), axis=-1, keepdims=True)
  else:
    size = jnp.linalg.norm(unit, axis=-1, keepdims=True)
  reach = clip / jnp.maximum(size, 1.)  # the largest entry of a clipped row
  return jnp.where(largest > reach, unit * reach, x)


def gaussian_noise_multiplier(epsilon, delta):
  r"""Returns the least stddev / sensitivity of (epsilon, delta)-DP. Host.

  Bisection, to float64, on the mechanism's exact delta

  .. math::
    \delta(s) = \Phi(1/2s - \epsilon s) - e^\epsilon \Phi(-1/2s - \epsilon s).

  Args:
    epsilon: > 0.
    delta: in (0, 1).

  References: Balle & Wang (2018), Theorem 8.
  """
  low = high = 1.
  while _gaussian_delta(high, epsilon) > delta:
    high *= 2
  while _gaussian_delta(low, epsilon) <= delta:
    low /= 2
  while True:
    middle = math.sqrt(low * high)
    if not low < middle < high:
      return high
    if _gaussian_delta(middle, epsilon) > delta:
      low = middle
    else:
      high = middle


def _gaussian_delta(multiplier, epsilon):
  """delta(s), from logarithms: both terms may underflow, or nearly cancel."""
  half, shift = 0.5 / multiplier, epsilon * multiplier
  first = sp_special.log_ndtr(half - shift)
  second = epsilon + sp_special.log_ndtr(-half - shift)
  # Never below the true delta: what float64 may be off counts against us.
  error = 2.**-50 * (1 + abs(first))
  return math.exp(first + error) * -math.expm1(min(second - first, 0.) - error)


def _check_delta(delta, noise):
  """Raises ValueError where delta does not go with the noise."""
  if noise == 'laplace' and delta != 0:
    raise ValueError(f'delta={delta!r} must be 0 with Laplace noise, which is '
                     'pure; or use noise=\'gaussian\'')
  if noise == 'gaussian' and not 0 < delta < 1:
    raise ValueError(f'delta={delta!r} must lie in (0, 1) with Gaussian noise')


def _float32(value, name, *, up):
  """Returns value in float32, rounded towards more privacy."""
  with np.errstate(over='ignore', under='ignore'):
    rounded = np.float32(value)
  if not np.finfo(np.float32).tiny <= rounded < np.inf:
    raise ValueError(f'{name}={value!r} is out of float32\'s range; use '
                     'another clip or epsilon')
  if (float(rounded) < value) if up else (float(rounded) > value):
    rounded = np.nextafter(rounded, np.float32(np.inf if up else 0))
  return rounded
