r"""Confidence intervals for a proportion or a mean in [0, 1].

Host code: NumPy float64 in and out, no keys. Every interval is exact in finite
samples, never asymptotic: it misses the truth with probability at most
``significance``, whatever the truth is. This is the only room that reads
``significance``; whoever makes several claims splits it among them first.

``side`` says what is claimed and so where ``significance`` goes:

=============  =================================  ============================
``side``       claim                              significance of each end
=============  =================================  ============================
'two-sided'    ``low <= truth <= high``           half of it
'lower'        ``low <= truth``; ``high`` is 1    all of it, at ``low``
'upper'        ``truth <= high``; ``low`` is 0    all of it, at ``high``
=============  =================================  ============================

Example:
  >>> from jaxdp import confidence
  >>> low, high = confidence.clopper_pearson(8, 10, significance=0.05)
  >>> print(f'{low:.4f} {high:.4f}')
  0.4439 0.9748
  >>> low, _ = confidence.clopper_pearson(
  ...     10, 10, significance=0.05, side='lower')
  >>> print(f'{low:.4f}')
  0.7411

References:
  Clopper and Pearson (1934), The use of confidence or fiducial limits
    illustrated in the case of the binomial
    <https://doi.org/10.1093/biomet/26.4.404>.
  Hoeffding (1963), Probability inequalities for sums of bounded random
    variables <https://doi.org/10.1080/01621459.1963.10500830>.
  Maurer and Pontil (2009), Empirical Bernstein bounds and sample-variance
    penalization <https://arxiv.org/abs/0907.3740>.
"""

import numpy as np
import numpy.typing as npt
import scipy.special

_SIDES = ('two-sided', 'lower', 'upper')

# Above this a float64 no longer tells neighbouring counts apart.
_MAX_COUNT = 2.**53


def clopper_pearson(
    successes: npt.ArrayLike,
    trials: npt.ArrayLike,
    *,
    significance: float,
    side: str = 'two-sided',
) -> tuple[np.ndarray, np.ndarray]:
  r"""Bounds the probability of success from independent trials.

  .. math::
    low = B^{-1}(\alpha'; k, n - k + 1), \quad
    high = B^{-1}(1 - \alpha'; k + 1, n - k)

  with :math:`B^{-1}` the quantile of the beta law and :math:`\alpha'` the
  significance of one end: half of ``significance`` when two-sided, else all of
  it. ``low`` is 0 at ``k = 0``, ``high`` is 1 at ``k = n``.

  Guarantee: for every true probability the interval contains it with
  probability at least ``1 - significance``, in exact arithmetic; the two ends
  carry the rounding of SciPy's beta quantiles, about 1e-16 absolute. The trials
  must be independent and alike, and their number fixed before they are seen.

  Args:
    successes: :math:`k`, whole numbers in ``[0, trials]``; broadcasts against
      ``trials``.
    trials: :math:`n`, whole numbers in ``[1, 2**53]``.
    significance: probability that the claim is wrong, in (0, 0.5).
    side: 'two-sided', 'lower' or 'upper'; see the module.

  Returns:
    ``(low, high)``, float64 of the broadcast shape (NumPy scalars for scalars).

  Raises:
    ValueError: ``significance`` is outside (0, 0.5); ``side`` is unknown;
      ``trials`` or ``successes`` is not finite, not whole or out of range.

  Example:
    >>> low, high = clopper_pearson([0, 5], 5, significance=0.05)
    >>> print(low.round(4), high.round(4))
    [0.     0.4782] [0.5218 1.    ]

  References: Clopper and Pearson (1934).
  """
  tail = _tail(significance, side)
  n = _check_trials(trials, 1)
  k = _check_whole(successes, 'successes')
  k, n = np.broadcast_arrays(k, n)
  if np.any((k < 0) | (k > n)):
    where = _first((k < 0) | (k > n))
    raise ValueError(
        f'successes={k[where]} must lie in [0, trials={n[where]}]; '
        'count each trial once')
  low, high = np.zeros(k.shape), np.ones(k.shape)
  if side != 'upper':
    # The inverse is NaN where a shape is 0; those entries keep their end.
    some = k > 0
    low[some] = scipy.special.betaincinv(k[some], n[some] - k[some] + 1, tail)
  if side != 'lower':
    some = k < n
    # The complemented inverse: 1 - tail would round a small tail away.
    high[some] = scipy.special.betainccinv(k[some] + 1, n[some] - k[some], tail)
  return low[()], high[()]


def hoeffding(
    mean: npt.ArrayLike,
    trials: npt.ArrayLike,
    *,
    significance: float,
    side: str = 'two-sided',
) -> tuple[np.ndarray, np.ndarray]:
  r"""Bounds the expectation of variables in [0, 1] from their sample mean.

  .. math::
    mean \pm \sqrt{\ln(1 / \alpha') / (2 n)}

  cut to [0, 1], with :math:`\alpha'` the significance of one end.

  Guarantee: misses the true expectation with probability at most
  ``significance``. The variables must be independent, each in [0, 1], and their
  number fixed before they are seen; they need not be alike.

  Args:
    mean: sample mean, in [0, 1]; broadcasts against ``trials``.
    trials: number of variables, whole numbers in ``[1, 2**53]``.
    significance: probability that the claim is wrong, in (0, 0.5).
    side: 'two-sided', 'lower' or 'upper'; see the module.

  Returns:
    ``(low, high)``, float64 of the broadcast shape (NumPy scalars for scalars).

  Raises:
    ValueError: ``significance`` is outside (0, 0.5); ``side`` is unknown;
      ``trials`` is not whole or below 1; ``mean`` is outside [0, 1].

  Example:
    >>> low, high = hoeffding(0.5, 200, significance=0.05)
    >>> print(f'{low:.4f} {high:.4f}')
    0.4040 0.5960

  References: Hoeffding (1963), Theorem 1, eq. (2.3).
  """
  tail = _tail(significance, side)
  n = _check_trials(trials, 1)
  mean = _check_range(mean, 'mean', 1., 'scale the variables to [0, 1] first')
  return _around(mean, np.sqrt(-np.log(tail) / (2. * n)), side)


def empirical_bernstein(
    mean: npt.ArrayLike,
    variance: npt.ArrayLike,
    trials: npt.ArrayLike,
    *,
    significance: float,
    side: str = 'two-sided',
) -> tuple[np.ndarray, np.ndarray]:
  r"""Bounds an expectation as `hoeffding` does, closer where variance is small.

  .. math::
    mean \pm \left(\sqrt{\frac{2 V \ln(2 / \alpha')}{n}}
        + \frac{7 \ln(2 / \alpha')}{3 (n - 1)}\right)

  cut to [0, 1], with :math:`V` the sample variance and :math:`\alpha'` the
  significance of one end. At ``significance=0.05`` it is the wider of the two
  below 59 trials or above a variance of 0.21; choose between them before
  seeing the data, or split ``significance``.

  Guarantee: misses the true expectation with probability at most
  ``significance``. The variables must be independent, each in [0, 1], and their
  number fixed before they are seen.

  Args:
    mean: sample mean, in [0, 1]; broadcasts.
    variance: sample variance with divisor ``trials - 1`` (``ddof=1``), in
      ``[0, trials / (4 (trials - 1))]``; broadcasts.
    trials: number of variables, whole numbers in ``[2, 2**53]``; broadcasts.
    significance: probability that the claim is wrong, in (0, 0.5).
    side: 'two-sided', 'lower' or 'upper'; see the module.

  Returns:
    ``(low, high)``, float64 of the broadcast shape (NumPy scalars for scalars).

  Raises:
    ValueError: ``significance`` is outside (0, 0.5); ``side`` is unknown;
      ``trials`` is not whole or below 2; ``mean`` is outside [0, 1];
      ``variance`` is one that no sample in [0, 1] has.

  Example:
    >>> low, high = empirical_bernstein(0.5, 0.01, 2000, significance=0.05)
    >>> print(f'{low:.4f} {high:.4f}')
    0.4883 0.5117

  References: Maurer and Pontil (2009), Theorem 4.
  """
  tail = _tail(significance, side)
  n = _check_trials(trials, 2)
  mean = _check_range(mean, 'mean', 1., 'scale the variables to [0, 1] first')
  # The slack admits variances that were summed in float32.
  variance = _check_range(
      variance, 'variance', n / (4. * (n - 1.)) * (1. + 1e-6),
      'it is the sample variance (ddof=1) of variables in [0, 1]')
  log_term = np.log(2.) - np.log(tail)
  deviation = (
      np.sqrt(2. * variance * log_term / n) + 7. * log_term / (3. * (n - 1.)))
  return _around(mean, deviation, side)


def _tail(significance, side) -> float:
  """Returns the significance of one end."""
  if side not in _SIDES:
    raise ValueError(f'side={side!r} must be one of {", ".join(_SIDES)}')
  # Written so that NaN is refused too.
  if np.ndim(significance) or not 0. < significance < 0.5:
    raise ValueError(
        f'significance={significance} must be one number in (0, 0.5); it is '
        'the probability that the bound is wrong, 0.05 rather than 0.95')
  return float(significance) / 2. if side == 'two-sided' else float(
      significance)


def _around(mean, deviation, side):
  """Returns mean -+ deviation, cut to [0, 1] and opened at the free end."""
  low = np.maximum(mean - deviation, 0.)
  high = np.minimum(mean + deviation, 1.)
  if side == 'lower':
    high = np.ones_like(high)
  if side == 'upper':
    low = np.zeros_like(low)
  return low[()], high[()]


def _check_trials(trials, minimum):
  """Returns `trials` as float64, whole and at least `minimum`."""
  trials = _check_whole(trials, 'trials')
  bad = (trials < minimum) | (trials > _MAX_COUNT)
  if np.any(bad):
    raise ValueError(
        f'trials={trials[_first(bad)]} must lie in [{minimum}, 2**53]; '
        'fewer give no interval and more are not exact in float64')
  return trials


def _check_whole(value, name):
  """Returns `value` as float64 and finite whole numbers."""
  value = np.asarray(value, np.float64)
  bad = ~np.isfinite(value) | (value != np.floor(value))
  if np.any(bad):
    raise ValueError(
        f'{name}={value[_first(bad)]} must be a whole number; it is a count, '
        'not a rate')
  return value


def _check_range(value, name, maximum, advice):
  """Returns `value` as float64, in [0, maximum]."""
  value = np.asarray(value, np.float64)
  value, maximum = np.broadcast_arrays(value, maximum)
  bad = ~((value >= 0.) & (value <= maximum))
  if np.any(bad):
    where = _first(bad)
    raise ValueError(
        f'{name}={value[where]} must lie in [0, {maximum[where]:g}]; {advice}')
  return value


def _first(bad):
  """Index of the first true entry."""
  return np.unravel_index(np.argmax(bad), np.shape(bad))
