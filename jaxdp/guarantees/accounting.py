r"""Epsilon of Laplace noise on vectors, of subsampled Gaussian noise. Host.

In the room: Rényi divergences (`laplace_rdp`, `pure_rdp`,
`sampled_gaussian_rdp`), their conversion to (epsilon, delta)
(`rdp_epsilon`, `best_epsilon`), and two mechanisms read through them:
`laplace_vector_epsilon` with its inverse `laplace_vector_scale`, and
`sampled_gaussian_epsilon`. NumPy and SciPy, float64, exponents in log space;
no keys. Divergences add over independent releases of the same record.

An image of 784 pixels in [-1, 1], Laplace noise of scale 32.27 on each:

  >>> pure = laplace_vector_epsilon(
  ...     dimension=784, shift=2., scale=32.27, delta=0.)
  >>> approximate = laplace_vector_epsilon(
  ...     dimension=784, shift=2., scale=32.27, delta=1e-5)
  >>> round(pure, 1), round(approximate, 2)
  (48.6, 8.89)
  >>> round(laplace_vector_scale(
  ...     epsilon=8., delta=1e-5, dimension=784, shift=2.), 1)
  35.3

References: Mironov (2017), Rényi differential privacy; Canonne, Kamath &
Steinke (2020), The discrete Gaussian for differential privacy; Mironov,
Talwar & Zhang (2019), Rényi differential privacy of the sampled Gaussian
mechanism.
"""

import math
import sys

import numpy as np
import scipy  # loads scipy.optimize when first used
from scipy import special as sp_special

from jaxdp.guarantees import statements

# Twenty orders a decade of order - 1, and the limit, which is pure DP.
ORDERS = tuple(1. + 10.**(k / 20.) for k in range(-60, 121)) + (math.inf,)
# The sum is for integers: all up to 128, then eight an octave.
INTEGER_ORDERS = tuple(range(2, 129)) + tuple(
    round(2.**(k / 8.)) for k in range(57, 89))


def checked_positive(name, value, advice):
  """Returns `value` as a finite float above 0, or raises by `name`."""
  value = statements.checked_real(name, value, advice, sys.float_info.max)
  if not value:
    raise ValueError(f'{name}={value!r} must be positive; {advice}')
  return value


def _checked_array(name, values, low, advice):
  """Returns `values` as float64, each at least `low`, or raises by `name`."""
  array = np.asarray(values, np.float64)
  if not np.all(array >= low):  # NaN too
    raise ValueError(f'{name}={values!r} must be at least {low}; {advice}')
  return array


def checked_delta(delta):
  """Returns `delta` as a float in [0, 1), or raises."""
  return statements.checked_real(
      'delta', delta, 'it is a probability below 1; 0 is pure DP',
      math.nextafter(1., 0.))


def laplace_rdp(order, shift_over_scale):
  r"""Rényi divergence of Laplace noise from itself shifted.

  .. math::
    D_\alpha = \frac{1}{\alpha - 1} \ln \Bigl[
      \frac{\alpha}{2 \alpha - 1} e^{(\alpha - 1) s}
      + \frac{\alpha - 1}{2 \alpha - 1} e^{-\alpha s} \Bigr]

  Its limits are :math:`s + e^{-s} - 1` at order 1 and s at infinity. It grows
  with both arguments, so a shift by AT MOST s is covered.

  Args:
    order: :math:`\alpha \in [1, \infty]`; broadcasts.
    shift_over_scale: :math:`s \ge 0`, shift over scale; broadcasts.

  Returns:
    float64 of the broadcast shape; a few ulp of the exact value.

  Raises:
    ValueError: an order below 1, or a negative shift.

  References: Mironov (2017), Proposition 6.
  """
  order = _checked_array('order', order, 1., 'infinity is pure DP')
  shift = _checked_array('shift_over_scale', shift_over_scale, 0.,
                         'it is a distance over a scale')
  pure = np.isinf(order)
  finite = np.where(pure, 2., order)
  near = finite * shift < 1.
  return np.where(
      pure, shift,
      np.where(near, _laplace_near(finite, np.where(near, shift, 0.)),
               _laplace_far(finite, np.where(near, 1., shift))))[()]


def _laplace_near(order, shift):
  """`laplace_rdp` for order * shift < 1, where both exponents nearly cancel."""
  # With h(x) = e^x - 1 - x = x^2 phi(x) the bracket is 1 + excess w, where
  # w = [order h(excess s) / excess + h(-order s)] / (2 order - 1): no term of
  # either sign is lost.
  excess = order - 1.
  mean = order * shift**2 * (
      excess * _phi(excess * shift) + order * _phi(-order * shift)) / (
          2. * order - 1.)
  return _over_excess(np.log1p(excess * mean), excess, mean)


def _laplace_far(order, shift):
  """`laplace_rdp` for order * shift >= 1; no exponent can overflow."""
  excess = order - 1.
  rest = excess / (2. * order - 1.) * np.expm1(-(2. * order - 1.) * shift)
  return shift + _over_excess(np.log1p(rest), excess, np.expm1(-shift))


def _phi(x):
  """Returns (e^x - 1 - x) / x^2 for abs(x) <= 1, where 20 terms suffice."""
  value = np.zeros_like(x)
  for k in reversed(range(20)):
    value = value * x + 1. / math.factorial(k + 2)
  return value


def _over_excess(value, excess, limit):
  """Returns value / excess, and `limit` at order 1."""
  return np.where(excess > 0., value / np.where(excess > 0., excess, 1.), limit)


def pure_rdp(order, epsilon):
  r"""Largest Rényi divergence of any mechanism with pure DP.

  .. math::
    D_\alpha = \frac{1}{\alpha - 1} \ln \frac{e^{\alpha \epsilon}
      + e^{(1 - \alpha) \epsilon}}{1 + e^\epsilon}

  attained by binary randomised response, of which every
  :math:`\epsilon`-DP pair of laws is a post-processing.

  Args:
    order: :math:`\alpha \in [1, \infty]`; broadcasts.
    epsilon: budget :math:`\ge 0`; broadcasts.

  Returns:
    float64 of the broadcast shape.

  Raises:
    ValueError: an order below 1, or a negative budget.

  References: Mironov (2017), Proposition 5; Kairouz, Oh & Viswanath (2015),
  The composition theorem for differential privacy.
  """
  order = _checked_array('order', order, 1., 'infinity is pure DP')
  epsilon = _checked_array('epsilon', epsilon, 0., 'it is a budget')
  pure = np.isinf(order) | np.isinf(epsilon)
  a, e = np.where(pure, 2., order), np.where(pure, 1., epsilon)
  excess = a - 1.
  # The fraction is 1 + (e^{a e} - 1) (1 - e^{(1 - a) e}) / (1 + e^e).
  with np.errstate(divide='ignore'):  # log 0 is right at order 1 and budget 0
    log_gain = (a * e + np.log(-np.expm1(-a * e))
                + np.log(-np.expm1(-excess * e)) - np.logaddexp(0., e))
  value = _over_excess(np.logaddexp(0., log_gain), excess,
                       e * np.tanh(e / 2.))
  return np.where(pure, epsilon, np.minimum(value, e))[()]


def sampled_gaussian_rdp(order, sampling_rate, noise_multiplier):
  r"""Rényi divergence of one step of the Poisson-sampled Gaussian mechanism.

  .. math::
    D_\alpha = \frac{1}{\alpha - 1} \ln \sum_{k=0}^\alpha \binom{\alpha}{k}
      (1 - q)^{\alpha - k} q^k e^{(k^2 - k) / (2 \sigma^2)}

  for data sets that differ by ONE RECORD ADDED OR REMOVED, each record
  sampled independently. Replacing a record is two such steps.

  Args:
    order: integer :math:`\alpha \ge 2`, or an array of them.
    sampling_rate: q in [0, 1].
    noise_multiplier: :math:`\sigma > 0`, standard deviation over the L2 norm
      that one record's contribution is clipped to.

  Returns:
    float64 of the shape of `order`.

  Raises:
    ValueError: an order that is not an integer >= 2, or a bad rate or noise.

  References: Mironov, Talwar & Zhang (2019), Theorem 4 and Section 3.3.
  """
  orders = _checked_array('order', order, 2., 'the sum is for integers')
  if not np.all(orders == np.rint(orders)) or np.isinf(orders).any():
    raise ValueError(f'order={order!r} must be an integer >= 2; the sum is for '
                     'integers')
  q = statements.checked_real('sampling_rate', sampling_rate,
                              'it is a probability', 1.)
  noise = checked_positive('noise_multiplier', noise_multiplier,
                           'it is the standard deviation over the clip norm')
  if q == 1.:
    with np.errstate(over='ignore'):
      return (orders / 2. / noise / noise)[()]
  values = [_sampled_gaussian(int(a), q, noise) for a in orders.reshape(-1)]
  return np.reshape(values, orders.shape)[()]


def _sampled_gaussian(order, q, noise):
  """`sampled_gaussian_rdp` of one order, q < 1."""
  if q == 0.:
    return 0.
  # The binomial weights add up to 1, and k = 0, 1 have exponent 0: the sum is
  # 1 + sum over k >= 2 of weight * expm1(exponent), without cancellation.
  k = np.arange(2, order + 1, dtype=np.float64)
  with np.errstate(over='ignore'):  # infinite where there is no noise
    exponent = k * (k - 1.) / 2. / noise / noise
  if np.isinf(exponent).any():
    return math.inf
  log_weight = (
      sp_special.gammaln(order + 1.) - sp_special.gammaln(k + 1.)
      - sp_special.gammaln(order - k + 1.)
      + (order - k) * math.log1p(-q) + k * math.log(q))
  with np.errstate(divide='ignore'):  # an exponent may underflow to 0
    log_expm1 = exponent + np.log(-np.expm1(-exponent))
  return float(np.logaddexp(
      0., sp_special.logsumexp(log_weight + log_expm1))) / (order - 1)


def rdp_epsilon(rdp, orders, delta) -> float:
  r"""Returns the smallest epsilon over orders of a Rényi divergence.

  .. math::
    \epsilon = \min_\alpha D_\alpha + \ln \frac{\alpha - 1}{\alpha}
      - \frac{\ln \delta + \ln \alpha}{\alpha - 1}

  Every order gives a valid epsilon; the minimum needs no further budget.

  Args:
    rdp: divergences >= 0, of the shape of `orders`.
    orders: each in :math:`(1, \infty]`; at infinity epsilon is the divergence.
    delta: in [0, 1); 0 leaves the infinite order alone.

  Raises:
    ValueError: orders not above 1, negative divergences, shapes that differ,
      or a bad delta.

  References: Canonne, Kamath & Steinke (2020), Proposition 12.
  """
  orders = np.atleast_1d(_checked_array(
      'orders', orders, math.nextafter(1., 2.), 'order 1 converts to nothing'))
  rdp = np.atleast_1d(_checked_array('rdp', rdp, 0., 'it is a divergence'))
  if rdp.shape != orders.shape or not orders.size:
    raise ValueError(f'rdp has shape {rdp.shape} and orders {orders.shape}; '
                     'give one divergence an order')
  return max(0., float(np.min(rdp + _conversion(orders, checked_delta(delta)))))


def _conversion(orders, delta):
  """Returns what is added to the divergence of each order."""
  finite = np.where(np.isinf(orders), 2., orders)
  log_delta = math.log(delta) if delta else -math.inf
  added = np.log1p(-1. / finite) - (log_delta + np.log(finite)) / (finite - 1.)
  return np.where(np.isinf(orders), 0., added)


def best_epsilon(rdp_fn, delta) -> float:
  """Returns epsilon at the best order of a divergence known at all orders.

  The minimum over `ORDERS` (20 a decade of order - 1, from 1.001 to 1 + 1e6,
  and infinity), refined between the neighbours of the best one. A search that
  stops early gives a larger epsilon, never an invalid one.

  Args:
    rdp_fn: float64 array of orders in (1, inf] -> divergences, same shape;
      must accept infinity, where it is the pure epsilon or infinite.
    delta: in [0, 1).

  Raises:
    ValueError: a bad delta, or what `rdp_epsilon` refuses.

  Example:
    >>> round(best_epsilon(lambda order: 100 * laplace_rdp(order, .1), 1e-6), 3)
    4.984
  """
  delta = checked_delta(delta)
  orders = np.asarray(ORDERS)
  rdp = np.asarray(rdp_fn(orders), np.float64)
  coarse = rdp_epsilon(rdp, orders, delta)
  best = int(np.argmin(rdp + _conversion(orders, delta)))
  if coarse in (0., math.inf) or math.isinf(orders[best]):
    return coarse
  ends = [math.log(orders[k] - 1.) for k in (
      max(best - 1, 0), min(best + 1, len(orders) - 2))]

  def epsilon(log_excess):
    order = np.asarray([1. + math.exp(log_excess)])
    return rdp_epsilon(rdp_fn(order), order, delta)
  found = scipy.optimize.minimize_scalar(
      epsilon, bounds=ends, method='bounded', options={'xatol': 1e-9})
  return min(coarse, float(found.fun))


def laplace_vector_epsilon(*, dimension, shift, scale, delta,
                           copies=1) -> float:
  r"""Returns epsilon of independent Laplace noise on every entry of a record.

  The record lies in :math:`[-t/2, t/2]^D` with t the `shift`, and is replaced
  by any other one: the smaller of :math:`c D t / b` and the conversion of
  :math:`c D \cdot D_\alpha(t / b)`.

  Guarantee: *proved* for the law in real arithmetic, with independent noise on
  every entry and every copy. Noise that entries or records share has no
  finite epsilon; see ``ledgers.standard``.

  Args:
    dimension: D >= 1, entries of a record.
    shift: t > 0, largest change of one entry; 2 for [-1, 1].
    scale: b > 0 of the Laplace noise, in the unit of `shift`.
    delta: in [0, 1); 0 gives pure DP.
    copies: c >= 1, releases of the record with independent noise.

  Raises:
    ValueError: an argument out of range.

  References: Dwork & Roth (2014), Theorem 3.6; Mironov (2017), Proposition 6;
  Canonne, Kamath & Steinke (2020), Proposition 12.
  """
  number = (statements.checked_count('dimension', dimension, 1)
            * statements.checked_count('copies', copies, 1))
  shift = checked_positive('shift', shift, 'it is the range of one entry')
  ratio = shift / checked_positive('scale', scale, 'it is the noise\'s scale')
  pure = number * ratio
  if math.isinf(pure) or not checked_delta(delta):
    return pure
  return min(pure, best_epsilon(
      lambda order: number * laplace_rdp(order, ratio), delta))


def laplace_vector_scale(epsilon, delta, dimension, shift, copies=1) -> float:
  """Returns the least scale whose `laplace_vector_epsilon` is at most epsilon.

  It is rounded UP to a float32 number, so that a device which stores it in
  single precision uses the very scale that was checked here.

  Args:
    epsilon: budget > 0.
    delta: in [0, 1); 0 asks for pure DP.
    dimension: D >= 1, entries of a record.
    shift: t > 0, largest change of one entry.
    copies: c >= 1, releases of the record.

  Raises:
    ValueError: an argument out of range, or a scale that float32 cannot hold.
  """
  epsilon = checked_positive('epsilon', epsilon, 'it is a budget')

  def fits(scale):
    return laplace_vector_epsilon(
        dimension=dimension, shift=shift, scale=scale, delta=delta,
        copies=copies) <= epsilon
  tiny, largest = (float(x) for x in (np.finfo(np.float32).tiny,
                                      np.finfo(np.float32).max))
  pure = laplace_vector_epsilon(dimension=dimension, shift=shift, scale=1.,
                                delta=0., copies=copies) / epsilon
  if not pure * (1. + 1e-6) < largest:
    raise ValueError(f'epsilon={epsilon!r} is too small: scale={pure!r} does '
                     'not fit float32')
  high = max(pure, tiny)  # enough at any delta, up to its rounding
  if delta:
    low, high = _bracket(fits, tiny, high)
    while high > low * (1. + 1e-9):
      middle = math.sqrt(low) * math.sqrt(high)
      low, high = (low, middle) if fits(middle) else (middle, high)
  return _float32_above(high, fits)


def _bracket(fits, tiny, high):
  """Returns scales of which the lower does not fit, or is the least one."""
  low = high
  while low > tiny and fits(low):
    low, high = max(low / 2., tiny), low
  return low, high


def _float32_above(scale, fits):
  """Returns the first float32 number at or above `scale` that fits."""
  rounded = np.float32(scale)
  while float(rounded) < scale or not fits(float(rounded)):
    rounded = np.nextafter(rounded, np.float32(np.inf))
  return float(rounded)


def sampled_gaussian_epsilon(*, sampling_rate, noise_multiplier, num_steps,
                             delta) -> float:
  """Returns epsilon of `num_steps` steps of the sampled Gaussian mechanism.

  Guarantee: *proved* in real arithmetic for data sets that differ by one
  record added or removed, Poisson sampling anew at each step, and each
  record's contribution clipped by itself. Not covered: batches of fixed size
  or a fixed order, a clip of the batch's mean, batch normalisation.

  Args:
    sampling_rate: q in [0, 1], expected batch over the number of records.
    noise_multiplier: standard deviation over the clip norm, > 0.
    num_steps: T >= 0.
    delta: in (0, 1).

  Raises:
    ValueError: an argument out of range.

  Example:
    >>> epsilon = sampled_gaussian_epsilon(
    ...     sampling_rate=.01, noise_multiplier=4., num_steps=10_000,
    ...     delta=1e-5)
    >>> round(epsilon, 3)
    1.035

  References: Abadi et al. (2016), Deep learning with differential privacy;
  Mironov, Talwar & Zhang (2019), Section 3.3, at `INTEGER_ORDERS`.
  """
  checked_positive('delta', delta, 'Gaussian noise has no pure DP')
  steps = statements.checked_count('num_steps', num_steps)
  orders = np.asarray(INTEGER_ORDERS)
  rdp = sampled_gaussian_rdp(orders, sampling_rate, noise_multiplier)
  return rdp_epsilon(steps * rdp, orders, delta) if steps else 0.
