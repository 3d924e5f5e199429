r"""The exact output law of the truncated Gumbel word mechanism. Host, float64.

In the room: the law of the number of candidates, the paper's two noise scales,
and the law of the word that comes out, by adaptive quadrature in log space.
Nothing here draws and nothing here runs on a device; the sampler whose law this
is takes the ``k`` nearest words of ``w`` (itself at rank 1, distance 0; ties by
lowest index), adds Gumbel noise to each distance and returns the least sum.

With ``d_1 <= ... <= d_V`` the sorted distances, ``f`` the density and ``S`` the
survival function of the noise, and ``v`` the winning noisy distance,

.. math::
  P(r) = \sum_{k \ge r} \Pr(K = k)
         \int f(v - d_r) \prod_{j \le k, j \ne r} S(v - d_j)\, dv .

One grid over ``v`` serves all ranks, and the sum over ``k`` is one running
log-sum over the prefix products, so a word costs O(V) a grid point.

The law is that of the mechanism in real arithmetic: float32 noise has shorter
tails.

Example:
  >>> line = np.array([0., 1., 3., 7.])
  >>> np.exp(log_law(line, scale=2., bound=7.)).round(6)
  array([7.41331e-01, 2.28109e-01, 3.04280e-02, 1.33000e-04])

Reference: Xu et al. (2020), "Differentially Private Adversarial Robustness
Through Randomized Perturbations", Algorithms 1 and 2
<https://arxiv.org/abs/2009.12718>.
"""

from concurrent import futures
import math
import os
from typing import NamedTuple

import numpy as np
import scipy  # loads scipy.optimize when first used, half a second saved
from scipy import special

NOISES = ('truncated', 'clipped', 'untruncated')

MAX_WORDS = 2_000

# exp(-x / scale) and its reciprocal must stay normal float64 numbers.
_MAX_SCALES = 600.
# Noise below -log(_DEEPEST) scales has probability exp(-1e8); no word of a
# vocabulary this small is less likely than exp(-MAX_WORDS * _MAX_SCALES * 2).
_DEEPEST = 1e8
# A word that wins with noise above y scales wins more easily below it, so
# leaving out the noise above 40 scales costs a relative exp(-40).
_HIGHEST = 40.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_TOLERANCE = 1e-12
_MAX_SPLITS = 48
_CHUNK = 1 << 19
_ULP = np.finfo(np.float64).eps


class Law(NamedTuple):
  """A law of the output word for each input word, and how well it is known."""

  log_prob: np.ndarray  # [B, V]; log P(output = u)
  error: np.ndarray  # [B, V]; estimated absolute error of log_prob


def truncated_poisson_log_pmf(rate, low, high, max_candidates=None):
  r"""Log-probabilities of the number of candidates ``K``.

  ``Y ~ Poisson(rate)``; ``K = Y`` if ``low <= Y < high``, else ``K = high``.
  The atom at ``high`` holds both tails of ``Y``. It alone gives every word a
  chance from every input, so it may not be drawn again or clamped away.

  Args:
    rate: mean of ``Y``, finite, >= 0; the paper takes ``log(num_words)``.
    low: smallest value, an int >= 0; the paper takes 1.
    high: largest value, an int >= ``low``; the paper takes the number of words.
    max_candidates: width of a precomputed neighbour table, an int >= ``low``;
      the probability of ``max_candidates < K < high`` moves to ``high``, which
      keeps the argument for a finite epsilon. None moves nothing.

  Returns:
    float64 ``[high - low + 1]``, entry ``i`` for ``K = low + i``; ``-inf``
    where the probability is zero.

  Raises:
    ValueError: an argument is out of its range.

  Example:
    >>> np.exp(truncated_poisson_log_pmf(np.log(4), 1, 4)).round(6)
    array([0.346574, 0.240227, 0.111008, 0.302192])

  References: Xu et al. (2020), section 4 (the last sum of the paper's mass
  function starts one term late; here the probabilities sum to one).
  """
  if not (math.isfinite(rate) and rate >= 0):
    raise ValueError(f'rate={rate} must be finite and not negative; the paper '
                     'takes log(num_words)')
  low = _integer('low', low, 0)
  high = _integer('high', high, low)
  last = high - 1
  if max_candidates is not None:
    last = min(last, _integer('max_candidates', max_candidates, low))

  def log_poisson(k):
    return special.xlogy(k, rate) - rate - special.gammaln(k + 1.)

  log_pmf = np.full(high - low + 1, -np.inf)
  log_pmf[:last - low + 1] = log_poisson(np.arange(low, last + 1))
  # Past 2 * rate the terms halve, so this many reach the last bit.
  above = last + 1 + np.arange(2 * math.ceil(rate) + 200)
  tails = np.concatenate([np.arange(low), above])
  log_pmf[-1] = special.logsumexp(log_poisson(tails))
  return log_pmf


def paper_scale(epsilon, num_words, diameter, minimum_distance):
  r"""The noise scale that Xu et al. (2020) calibrate to ``epsilon``.

  .. math::
    b = \frac{2 \Delta}{\min\{W_0(2 \alpha \Delta), \log(\alpha \Delta_0)\}},
    \quad \alpha = \frac{1}{3}
      \left(\epsilon - \frac{2 (1 + \log n)}{\Delta_0}\right)

  Guarantee: none. The lemma behind it contradicts itself for small epsilon, and
  the exact law exceeds the claimed epsilon there: a calibration, not a proof.

  Args:
    epsilon: claimed budget per unit distance, up to exp(80) and beyond.
    num_words: number of words ``n``, an int >= 2.
    diameter: largest distance between two words, > 0.
    minimum_distance: smallest distance between two different words, > 0.

  Returns:
    The scale ``b``, a float in distance units.

  Raises:
    ValueError: an argument is out of its range, or ``epsilon`` is at most
      ``(5 + 2 log n) / minimum_distance``, where ``b`` would not be positive.

  References: Xu et al. (2020), Algorithm 2 and its appendix.
  """
  _check_geometry(epsilon, num_words, diameter, minimum_distance)
  log_n = math.log(num_words)
  stated = 2 * (1 + log_n) / minimum_distance
  least = (5 + 2 * log_n) / minimum_distance
  alpha = (epsilon - stated) / 3
  if epsilon <= least or alpha * minimum_distance <= 1:
    raise ValueError(
        f'epsilon={epsilon} must exceed (5 + 2 log(num_words)) / '
        f'minimum_distance = {least}: the scale is not positive below it, '
        "although the paper's own bound is only 2 (1 + log(num_words)) / "
        f'minimum_distance = {stated}; raise epsilon or use the variant '
        "'gumbel_exponential'")
  return float(2 * diameter / min(
      special.lambertw(2 * alpha * diameter).real,
      math.log(alpha * minimum_distance)))


def tight_scale(epsilon, num_words, diameter, minimum_distance):
  r"""The least noise scale that the paper's own argument allows.

  Solves :math:`(2 \log n + e^x) / \Delta_0 + x e^x / \Delta = \epsilon` for
  :math:`x = 2 \Delta / b` by bracketing, without the paper's case split and
  its spare constant. Up to 2.7 times smaller than :func:`paper_scale`.

  Guarantee: none; it rests on the same faulty lemma.

  Args:
    epsilon: claimed budget per unit distance.
    num_words: number of words ``n``, an int >= 2.
    diameter: largest distance between two words, > 0.
    minimum_distance: smallest distance between two different words, > 0.

  Returns:
    The scale ``b``, a float in distance units.

  Raises:
    ValueError: an argument is out of its range, or ``epsilon`` is at most
      ``(1 + 2 log n) / minimum_distance``, where there is no solution.
  """
  _check_geometry(epsilon, num_words, diameter, minimum_distance)
  log_n = math.log(num_words)
  least = (1 + 2 * log_n) / minimum_distance
  room = epsilon - 2 * log_n / minimum_distance
  if epsilon <= least or room * minimum_distance <= 1:
    raise ValueError(
        f'epsilon={epsilon} must exceed (1 + 2 log(num_words)) / '
        f'minimum_distance = {least}; no scale meets it')

  def excess(x):
    # In logs: exp(x) reaches epsilon itself.
    return x + math.log(1 / minimum_distance + x / diameter) - math.log(room)

  x = scipy.optimize.bisect(excess, 0., math.log(room * minimum_distance),
                            xtol=1e-300, rtol=4 * _ULP, maxiter=2_000)
  return float(2 * diameter / x)


def log_law(distances, *, scale, bound, noise='truncated', log_pmf=None):
  """Log-probabilities of every output word for one input word.

  Args:
    distances: ``[V]``, distance of each word from the input word, unsquared, in
      any order; rank is ascending distance, ties by lowest index.
    scale: Gumbel scale, > 0, in distance units.
    bound: the noise lies in ``[-bound, bound]``, > 0, in distance units; the
      paper takes the diameter. Not read when ``noise='untruncated'``.
    noise: ``'truncated'`` conditions the Gumbel on the interval, ``'clipped'``
      moves what is outside to its ends (equal sums go to the lower rank),
      ``'untruncated'`` leaves it alone.
    log_pmf: ``[V]``, entry ``k - 1`` is log Pr(K = k); None is the paper's
      ``truncated_poisson_log_pmf(log(V), 1, V)``. Give the one that runs,
      with its ``max_candidates``.

  Returns:
    float64 ``[V]``, log P(output = u) in the order of ``distances``.

  Raises:
    ValueError: an argument is out of its range; more than 2,000 words (use the
      Monte-Carlo route, ``jaxdp.deniability.measure``).

  Example:
    >>> logp = log_law([3., 0., 1.], scale=1., bound=3., noise='clipped')
    >>> int(logp.argmax()), bool(abs(np.exp(logp).sum() - 1) < 1e-10)
    (1, True)
  """
  distances = np.asarray(distances, np.float64)
  if distances.ndim != 1:
    raise ValueError(f'distances of shape {distances.shape} must be [V]; '
                     'log_prob takes several rows')
  return law(distances[None], scale=scale, bound=bound, noise=noise,
             log_pmf=log_pmf).log_prob[0]


def log_prob(distances, *, scale, bound, noise='truncated', log_pmf=None):
  """:func:`log_law` of each row of ``distances`` ``[B, V]``: ``[B, V]``."""
  return law(distances, scale=scale, bound=bound, noise=noise,
             log_pmf=log_pmf).log_prob


def law(distances, *, scale, bound, noise='truncated', log_pmf=None):
  """The laws of several input words and the error of each log-probability.

  The interval is cut where the integrand has a corner, and each piece in halves
  until the two halves agree with the whole to 1e-12 of every probability they
  contribute to (at very small probabilities to the rounding error of their
  logarithm). The error is the sum of the last disagreements, of rules 2^-12
  times as good as the disagreement shows, plus a rounding allowance: an
  estimate, far above what is seen, but not an enclosure. It is about 1e-12 near
  zero and 3e-11 at a log-probability of -1e4; rows sum to one within 1e-10.

  Args:
    distances: ``[B, V]``, each row as in :func:`log_law`.
    scale: as in :func:`log_law`.
    bound: as in :func:`log_law`.
    noise: as in :func:`log_law`.
    log_pmf: as in :func:`log_law`.

  Returns:
    A :class:`Law` of two float64 arrays ``[B, V]``.

  Raises:
    ValueError: as in :func:`log_law`.
  """
  distances = np.asarray(distances, np.float64)
  log_pmf = _check_law(distances, scale, bound, noise, log_pmf)
  log_probs = np.empty_like(distances)
  errors = np.empty_like(distances)

  def fill(row):
    order = np.argsort(distances[row], kind='stable')
    log_probs[row, order], errors[row, order] = _ranked_law(
        distances[row, order], float(scale), float(bound), noise, log_pmf)

  if len(distances) == 1:
    fill(0)
  else:
    # Rows do not share state, and NumPy lets go of the interpreter's lock.
    with futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
      list(pool.map(fill, range(len(distances))))
  return Law(log_probs, errors)


def _ranked_law(distance, scale, bound, noise, log_pmf):
  """Log P(rank) [V] and its error [V] for ascending distances [V]."""
  integrand = _integrand(distance, scale, bound, noise, log_pmf)
  edges = _edges(distance, scale, bound, noise)
  log_p = np.full(len(distance), -np.inf)
  log_error = log_p
  if len(edges) > 1:
    log_p, log_error = _integrate(integrand, edges, len(distance))
  if noise == 'clipped':
    log_p = np.logaddexp(log_p, _atoms(distance, scale, bound, log_pmf))
  total = special.logsumexp(log_p)
  assert abs(total) < 1e-9, f'probabilities sum to exp({total})'
  known = np.isfinite(log_p)
  size = np.where(known, log_p, 0.)
  error = np.exp(log_error - size) + 8 * _ULP * (np.abs(size) + len(distance))
  return log_p, np.where(known, error, 0.)


def _integrand(distance, scale, bound, noise, log_pmf):
  """A function from v [G] to the log-integrand of each rank, [V, G]."""
  possible = np.flatnonzero(log_pmf > -np.inf)
  # Rank r is a candidate under the values of K from this one on.
  first = np.searchsorted(possible, np.arange(len(distance)))

  corners = distance - (np.inf if noise == 'untruncated' else bound)

  def fun(v):
    # Below its corner a word cannot win and is always beaten.
    active = np.searchsorted(corners, v.max(), side='right')
    log_f, log_s = _log_noise(v - distance[:active, None], scale, bound, noise)
    log_k = np.cumsum(log_s, axis=0)[np.minimum(possible, active - 1)]
    log_k += log_pmf[possible, None]
    mixture = np.full((len(possible) + 1, len(v)), -np.inf)
    mixture[:-1] = np.logaddexp.accumulate(log_k[::-1], axis=0)[::-1]
    out = np.full((len(distance), len(v)), -np.inf)
    with np.errstate(invalid='ignore'):
      log_f -= log_s
      log_f += mixture[first[:active]]
    # nan only at the end of the support, where the density has no room left.
    out[:active] = np.where(np.isnan(log_f), -np.inf, log_f)
    return out

  return fun


def _log_noise(x, scale, bound, noise):
  """Log-density and log-survival of the noise at x, inside its support."""
  with np.errstate(over='ignore', divide='ignore'):
    if noise == 'truncated':
      # F(bound) - F(x) = F(bound) (1 - exp(-hazard)); F(bound) cancels.
      floor = math.exp(-bound / scale)
      hazard = floor * np.expm1((bound - x) / scale)
      log_mass = np.log(-np.expm1(-floor * np.expm1(2 * bound / scale)))
    else:
      hazard = np.exp(-x / scale)
      log_mass = 0.
    log_s = np.log(-np.expm1(-hazard)) - log_mass
    log_f = -x / scale - hazard - (math.log(scale) + log_mass)
  if noise != 'untruncated':
    below = x <= -bound
    log_s[below] = 0.
    log_f[below] = -np.inf
  return log_f, log_s


def _edges(distance, scale, bound, noise):
  """Ends of the first pieces: corners of the integrand, at most 2 scales."""
  low = distance[0] - scale * math.log(_DEEPEST)
  high = distance[-1] + scale * _HIGHEST
  corners = []
  if noise != 'untruncated':
    # The nearest word's sum cannot exceed its distance plus the bound.
    low = max(low, distance[0] - bound)
    high = min(high, distance[0] + bound)
    corners = distance - bound
  even = np.linspace(low, high, 1 + math.ceil((high - low) / (2 * scale)))
  edges = np.unique(np.concatenate([even, corners]))
  return edges[(edges >= low) & (edges <= high)]


def _integrate(integrand, edges, num_ranks):
  """Logs of the integrals [V] and of their absolute error estimates [V]."""
  low, high = edges[:-1], edges[1:]
  narrowest = 64 * _ULP * (np.abs(edges).max())
  whole = _panels(integrand, low, high, num_ranks)
  log_done = np.full(num_ranks, -np.inf)
  log_error = np.full(num_ranks, -np.inf)
  for split in range(_MAX_SPLITS):
    middle = (low + high) / 2
    left = _panels(integrand, low, middle, num_ranks)
    right = _panels(integrand, middle, high, num_ranks)
    halves = np.logaddexp(left, right)
    log_change = _log_difference(whole, halves)
    log_p = np.logaddexp(log_done, np.logaddexp.reduce(halves, axis=1))
    log_p = np.where(np.isfinite(log_p), log_p, 0.)
    allowed = _TOLERANCE + 8 * _ULP * np.abs(log_p)
    settled = np.all(log_change <= (np.log(allowed) + log_p)[:, None], axis=0)
    settled |= high - low < narrowest
    if split == _MAX_SPLITS - 1:
      settled[:] = True
    log_done = np.logaddexp(
        log_done, np.logaddexp.reduce(halves[:, settled], axis=1))
    log_error = np.logaddexp(
        log_error, np.logaddexp.reduce(log_change[:, settled], axis=1))
    if settled.all():
      break
    more = ~settled
    whole = np.concatenate([left[:, more], right[:, more]], axis=1)
    low, middle, high = low[more], middle[more], high[more]
    low = np.concatenate([low, middle])
    high = np.concatenate([middle, high])
  return log_done, log_error


def _panels(integrand, low, high, num_ranks):
  """Log of the Gauss-Legendre sum of each piece [P] for each rank: [V, P]."""
  out = np.empty((num_ranks, len(low)))
  step = max(1, _CHUNK // (num_ranks * len(_NODES)))
  for start in range(0, len(low), step):
    part = slice(start, start + step)
    radius = (high[part] - low[part])[:, None] / 2
    v = low[part, None] + radius * (1 + _NODES)
    h = integrand(v.ravel()).reshape(num_ranks, *v.shape)
    top = h.max(axis=-1, keepdims=True)
    top[np.isneginf(top)] = 0.
    h -= top
    with np.errstate(divide='ignore'):
      out[:, part] = np.log(np.exp(h, out=h) @ _WEIGHTS) + top[..., 0]
      out[:, part] += np.log(radius[:, 0])
  return out


def _log_difference(log_x, log_y):
  """log|x - y| of logs, -inf where they are equal."""
  top = np.maximum(log_x, log_y)
  with np.errstate(invalid='ignore', divide='ignore'):
    gap = np.where(np.isneginf(top), 0., np.abs(log_x - log_y))
    return top + np.log(-np.expm1(-gap))


def _atoms(distance, scale, bound, log_pmf):
  """Log-probability [V] of winning with noise clipped to one of its ends."""
  log_bottom = -math.exp(bound / scale)
  log_top = np.log(-np.expm1(-math.exp(-bound / scale)))

  def log_survival(x, log_at_bottom, log_at_top):
    log_s = _log_noise(x, scale, bound, 'clipped')[1]
    log_s[x == -bound] = log_at_bottom
    log_s[x == bound] = log_at_top
    log_s[x > bound] = -np.inf
    return log_s

  num_words = len(distance)
  log_at_least = np.logaddexp.accumulate(log_pmf[::-1])[::-1]
  log_p = log_at_least + log_bottom
  log_not_bottom = np.log(-np.expm1(log_bottom))
  for r in range(num_words):
    # At the bottom, ranks above r are never less and ranks below r win ties.
    log_p[r] += log_survival(distance[r] - distance[:r] - bound,
                             log_not_bottom, -np.inf).sum()
  # At the top only the first rank can win, ties included.
  log_rivals = log_survival(bound + distance[0] - distance[1:], 0., log_top)
  log_k = np.concatenate([[0.], np.cumsum(log_rivals)]) + log_pmf
  log_p[0] = np.logaddexp(log_p[0], log_top + special.logsumexp(log_k))
  return log_p


def _integer(name, value, least):
  if int(value) != value or value < least:
    raise ValueError(f'{name}={value} must be an integer of at least {least}')
  return int(value)


def _check_geometry(epsilon, num_words, diameter, minimum_distance):
  if not (math.isfinite(epsilon) and epsilon > 0):
    raise ValueError(f'epsilon={epsilon} must be positive and finite; it is a '
                     'budget per unit distance')
  _integer('num_words', num_words, 2)
  if not minimum_distance > 0:
    raise ValueError(f'minimum_distance={minimum_distance} must be positive; '
                     'remove duplicate words, no finite epsilon covers them')
  if not minimum_distance <= diameter < math.inf:
    raise ValueError(f'diameter={diameter} must be finite and at least '
                     f'minimum_distance={minimum_distance}')


def _check_law(distances, scale, bound, noise, log_pmf):
  """Refuses what has no law within reach; returns log_pmf as an array."""
  if distances.ndim != 2 or 0 in distances.shape:
    raise ValueError(f'distances of shape {distances.shape} must be [B, V] '
                     'with neither empty')
  num_words = distances.shape[1]
  if num_words > MAX_WORDS:
    raise ValueError(
        f'distances has {num_words} words; the exact law is computed up to '
        f'{MAX_WORDS}: estimate it by Monte Carlo, jaxdp.deniability.measure')
  if not (np.isfinite(distances).all() and (distances >= 0).all()):
    raise ValueError('distances must be finite and not negative; the least is '
                     f'{distances.min()}')
  if noise not in NOISES:
    raise ValueError(f'noise={noise!r} must be one of {NOISES}')
  longest = distances.max()
  if noise != 'untruncated':
    if not (math.isfinite(bound) and bound > 0):
      raise ValueError(f'bound={bound} must be positive and finite; it is in '
                       'distance units, the paper takes the diameter')
    longest = max(longest, bound)
  if not (math.isfinite(scale) and scale > 0):
    raise ValueError(f'scale={scale} must be positive and finite; it is in '
                     'distance units')
  if longest > _MAX_SCALES * scale:
    raise ValueError(
        f'scale={scale} is below {longest} / {_MAX_SCALES:.0f}: float64 does '
        'not hold the law of so little noise; use a larger scale')
  if log_pmf is None:
    return truncated_poisson_log_pmf(math.log(num_words), 1, num_words)
  log_pmf = np.asarray(log_pmf, np.float64)
  if log_pmf.shape != (num_words,):
    raise ValueError(f'log_pmf of shape {log_pmf.shape} must be '
                     f'({num_words},), entry k - 1 for K = k')
  total = special.logsumexp(log_pmf)
  if not abs(total) < 1e-10:
    raise ValueError(f'log_pmf must sum to one, not to exp({total})')
  return log_pmf
