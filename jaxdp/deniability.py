"""Plausible deniability of word mechanisms: N_w, S_w and what they calibrate.

Two statistics of one word under repeated draws of a mechanism M, as fractions
of ``num_runs`` (papers print counts out of 100 or 1,000 runs):

* ``unchanged`` (N_w): how often M(w) = w;
* ``support`` (S_w): how many distinct words came out, w itself counted.

They describe the average draw, not the likelihood ratio: a mechanism that
draws from 200 words kept for one input alone passes both and is invertible.
They are measurements, never a guarantee. `bayes_vulnerability` is the
companion that sees such a mechanism.

The draws of `measure` run on the device, in chunks of bounded memory;
counting, `exact`, `calibrate_epsilon` and `bayes_vulnerability` run on the
host in NumPy float64. The mechanism is an argument: anything with
``privatize(key, ids, params, start=0)``, and ``log_prob`` for `exact`.

>>> import jax
>>> import jax.numpy as jnp
>>> from types import SimpleNamespace
>>> copy = SimpleNamespace(privatize=lambda key, ids, params, start=0: ids)
>>> rows = measure(jax.random.key(0), copy, jnp.arange(3), None, num_runs=100)
>>> rows.unchanged.tolist(), rows.support.tolist()
([1.0, 1.0, 1.0], [0.01, 0.01, 0.01])

References:
  Xu et al. (2020), "Differentially Private Adversarial Robustness Through
  Randomized Perturbations", section 6.1; Arnold et al. (2023), "Driving
  Context into Text-to-Text Privatization", section 4.
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxdp import samplers

# A chunk of int32 draws; mechanisms hold a few hundred bytes a draw beside it.
_CHUNK_SIZE = 1 << 16
_EXACT_BYTES = 1 << 27


class DeniabilityRows(NamedTuple):
  """One entry a word, in the order of ``ids``; fractions of ``num_runs``."""

  unchanged: np.ndarray  # [B] f64, N_w
  support: np.ndarray  # [B] f64, S_w, the word itself counted
  unchanged_stderr: np.ndarray  # [B] f64, of the runs; 0 where exact
  support_stderr: np.ndarray  # [B] f64, of the runs; 0 where exact


class Summary(NamedTuple):
  """A statistic over words: the curve, its shadow and the curve's error."""

  mean: float
  std: float  # over words, population form
  stderr: float  # of the mean


class Calibration(NamedTuple):
  """Where the deniability curves cross their threshold, never extrapolated."""

  epsilon: float  # min of the two crossings; nan unless status is 'ok'
  epsilon_unchanged: float  # crossing of N_w; nan when off the grid
  epsilon_support: float  # crossing of S_w; nan when off the grid
  bracket: tuple[float, float]  # neighbouring grid points, 0 and inf outside
  status: str  # 'ok', 'below_grid' or 'above_grid'


class _Crossing(NamedTuple):
  epsilon: float
  bracket: tuple[float, float]
  status: str


# --- N_w and S_w


def measure(key, mechanism, ids, params, *, num_runs, chunk_size=_CHUNK_SIZE):
  """Counts N_w and S_w over ``num_runs`` independent draws of every word.

  Run r of the word at position i is element ``i * num_runs + r`` of the
  mechanism's stream, so the result does not depend on ``chunk_size`` and a
  longer list of words begins with the rows of a shorter one.

  Args:
    key: typed key; consumed.
    mechanism: has ``privatize(key, ids, params, start=0)``. It is called as
      it is, so that it may refuse ids; jit it unless it does so itself.
    ids: i32 [B], word positions in the table.
    params: what the mechanism's ``calibrate`` returned.
    num_runs: draws a word, >= 1.
    chunk_size: draws a device call, >= 1; bounds the memory.

  Returns:
    `DeniabilityRows`. ``unchanged_stderr`` is the binomial plug-in;
    ``support_stderr`` the jackknife over runs, which is biased upwards
    (Efron and Stein, 1981) and needs only the number of words seen once.

  Raises:
    ValueError: ``num_runs`` or ``chunk_size`` no int of at least 1, ``ids`` no
      integers [B], or ids that the mechanism refuses.

  References: Xu et al. (2020), section 6.1, with 1,000 runs.
  """
  num_runs = _check_count('num_runs', num_runs)
  chunk_size = _check_count('chunk_size', chunk_size)
  ids = _flat_ids(ids)
  # A release under the same root key must not share this noise.
  key = jax.random.fold_in(key, samplers.MEASURE)
  params = _on_device(params)
  # Whole words reach the counter; draws reach the device in chunk_size lots.
  chunk_size = min(chunk_size, ids.size * num_runs)
  num_words = max(1, chunk_size // num_runs)
  counts = []
  for low in range(0, ids.size, num_words):
    block = ids[low:low + num_words]
    draws = _draw(
        key, mechanism.privatize, block, params, low * num_runs, num_runs,
        chunk_size
    )
    counts.append(_count(block, draws))
  unchanged, support, singletons = (
      np.concatenate(column) for column in zip(*counts)
  )
  p = unchanged / num_runs
  return DeniabilityRows(
      unchanged=p,
      support=support / num_runs,
      unchanged_stderr=np.sqrt(p * (1 - p) / num_runs),
      support_stderr=np.sqrt(singletons * (1 - singletons / num_runs))
      / num_runs,
  )


def exact(mechanism, ids, params, num_runs):
  r"""N_w and the expectation of S_w from the mechanism's exact law.

  .. math::
    N_w = P(w|w), \quad
    E\,S_w = \frac{1}{R} \sum_y \left[1 - (1 - P(y|w))^R\right]

  Args:
    mechanism: has ``log_prob(ids, params)``, float64 [B, V].
    ids: i32 [B], word positions in the table.
    params: what the mechanism's ``calibrate`` returned.
    num_runs: R >= 1.

  Returns:
    `DeniabilityRows` whose standard errors are zero.

  Raises:
    ValueError: ``num_runs`` no int of at least 1, ``ids`` no integers [B], or
      a mechanism whose law is out of reach (its own ``log_prob`` says so).

  References: Arnold et al. (2023), section 4 for N_w and S_w; the expectation
  is that of an occupancy count.
  """
  num_runs = _check_count('num_runs', num_runs)
  ids = _flat_ids(ids)
  if mechanism.log_prob is None:
    raise ValueError(
        'mechanism.log_prob=None: this mechanism has no exact law; draw with '
        'deniability.measure'
    )
  unchanged, support = [], []
  low, num_words = 0, 1
  while low < ids.size:
    block = ids[low:low + num_words]
    logp = np.asarray(mechanism.log_prob(block, params), np.float64)
    unchanged.append(np.exp(logp[np.arange(block.size), block]))
    support.append(_expected_support(logp, num_runs) / num_runs)
    low += block.size
    num_words = max(1, _EXACT_BYTES // (8 * logp.shape[1]))
  zeros = np.zeros(ids.size)
  return DeniabilityRows(
      np.concatenate(unchanged), np.concatenate(support), zeros, zeros
  )


def summarize(values):
  """Mean, standard deviation over words and standard error of the mean.

  The standard error is ``std / sqrt(B)``: it holds the spread between words
  as well as the noise of the runs, so it is the error of a mean over words
  drawn from a vocabulary, and an upper bound on the error of the mean over
  the very words measured. With one word it is nan.

  Args:
    values: [B], a column of `DeniabilityRows`.

  Returns:
    `Summary`.
  """
  values = np.asarray(values, np.float64)
  num_words = values.size
  stderr = (
      values.std(ddof=1) / np.sqrt(num_words) if num_words > 1 else np.nan
  )
  return Summary(float(values.mean()), float(values.std()), float(stderr))


# --- What they are used for


def calibrate_epsilon(curves, epsilons, *, quantile=0.9, threshold=0.5):
  """The largest epsilon on a grid at which most words stay deniable.

  At every grid point a = the ``quantile`` of N_w over words and b = the
  ``1 - quantile`` of S_w. A running maximum (minimum) makes a (b) monotone,
  which errs towards the smaller epsilon. The crossings with ``threshold``
  are interpolated linearly in log epsilon between their two grid points.

  Args:
    curves: function ``epsilon -> rows`` or a sequence of rows aligned with
      ``epsilons``; rows are `DeniabilityRows` or a pair (unchanged, support)
      of [B] fractions.
    epsilons: grid, positive; infinite points are ignored.
    quantile: q in (0.5, 1]: the share of words that must be deniable.
    threshold: in (0, 1), for both statistics.

  Returns:
    `Calibration`. Off the grid the crossing is nan, ``status`` says on which
    side, and ``bracket`` is ``(0, first)`` or ``(last, inf)``.

  Raises:
    ValueError: an empty, non-positive or NaN grid, a length mismatch, a
      ``quantile`` or ``threshold`` out of range.

  References: Arnold et al. (2023), section 4 (q = 0.90, threshold 0.5); the
  interpolation is ours.
  """
  if not 0.5 < quantile <= 1:
    raise ValueError(
        f'quantile={quantile} must lie in (0.5, 1]; it is the share of words '
        'that must be deniable'
    )
  if not 0 < threshold < 1:
    raise ValueError(
        f'threshold={threshold} must lie in (0, 1); N_w and S_w are fractions '
        'of num_runs'
    )
  epsilons, rows = _grid(curves, epsilons)
  a = [np.quantile(row[0], quantile) for row in rows]
  b = [np.quantile(row[1], 1 - quantile) for row in rows]
  n = _crossing(epsilons, np.maximum.accumulate(a), threshold)
  # b >= threshold is -b <= -threshold, so one rule serves both.
  s = _crossing(epsilons, -np.minimum.accumulate(b), -threshold)
  binding = min(n, s, key=lambda crossing: (crossing.bracket, crossing.epsilon))
  return Calibration(
      epsilon=binding.epsilon,
      epsilon_unchanged=n.epsilon,
      epsilon_support=s.epsilon,
      bracket=binding.bracket,
      status=binding.status,
  )


def bayes_vulnerability(log_probs, prior):
  r"""Chance that the best guesser names the word from one output.

  .. math:: \sum_y \max_w \pi(w) P(y|w)

  Args:
    log_probs: [W, V], the law of W inputs over V outputs, natural log.
    prior: [W], probabilities of the inputs; sums to one.

  Returns:
    A float in [max prior, 1].

  Raises:
    ValueError: shapes that do not match, or a prior that is no distribution.

  References: Alvim et al. (2020), "The Science of Quantitative Information
  Flow", definition 5.2.
  """
  log_probs = np.asarray(log_probs, np.float64)
  prior = np.asarray(prior, np.float64)
  if log_probs.ndim != 2 or prior.shape != log_probs.shape[:1]:
    raise ValueError(
        f'prior of shape {prior.shape} must be [W] for log_probs [W, V] of '
        f'shape {log_probs.shape}'
    )
  if not (prior >= 0).all() or abs(prior.sum() - 1) > 1e-6:
    raise ValueError(
        f'prior sums to {prior.sum()}; it must be a distribution over the '
        'rows of log_probs'
    )
  return float((prior[:, None] * np.exp(log_probs)).max(axis=0).sum())


# --- Pieces


def _check_count(name, value):
  if isinstance(value, bool) or not isinstance(
      value, (int, np.integer)) or value < 1:
    raise ValueError(f'{name}={value!r} must be at least 1 and an int')
  return int(value)


def _flat_ids(ids):
  ids = np.asarray(ids)
  if ids.ndim != 1 or not ids.size:
    raise ValueError(
        f'ids of shape {ids.shape} must be [B] with B >= 1; flatten them'
    )
  if not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f'ids has dtype {ids.dtype}; word ids are integers')
  low, high = int(ids.min()), int(ids.max())
  if low < 0 or high >= 2**31:
    raise ValueError(
        f'ids holds {low if low < 0 else high}; word ids are positions in the '
        'table'
    )
  return ids.astype(np.int32)


def _on_device(params):
  # The guarantee is static: left in, every epsilon of a sweep would compile
  # anew. Nothing drawn depends on it.
  if hasattr(params, '_replace') and hasattr(params, 'guarantee'):
    params = params._replace(guarantee=None)
  return jax.device_put(params)


def _draw(key, privatize, block, params, start, num_runs, chunk_size):
  """Draws [words, num_runs], every device call of the same static shape."""
  total = block.size * num_runs
  chunk_size = min(chunk_size, max(1, chunk_size // num_runs) * num_runs)
  draws = np.empty(total, np.int32)
  for low in range(0, total, chunk_size):
    element = np.arange(low, low + chunk_size)
    # The padding repeats the last word: same shape, no second compilation.
    inputs = block[np.minimum(element // num_runs, block.size - 1)]
    index = np.uint32(divmod(start + low, 2**32))
    out = np.asarray(privatize(key, inputs, params, start=index))
    draws[low:low + chunk_size] = out[:total - low]
  return draws.reshape(block.size, num_runs)


def _count(block, draws):
  """[words] numbers of unchanged, distinct and once-seen outputs."""
  unchanged = (draws == block[:, None]).sum(axis=1)
  # Columns of the sorted runs where a new value begins; the end begins one.
  order = np.sort(draws, axis=1)
  edge = np.ones((len(order), 1), bool)
  begins = np.hstack([edge, order[:, 1:] != order[:, :-1], edge])
  support = begins[:, :-1].sum(axis=1)
  singletons = (begins[:, :-1] & begins[:, 1:]).sum(axis=1)
  return unchanged, support, singletons


def _expected_support(logp, num_runs):
  # log(1 - p) from log p: log1p loses p near one, expm1 near zero.
  logp = np.minimum(logp, 0.)
  with np.errstate(divide='ignore'):
    missed = np.where(
        logp > -np.log(2.), np.log(-np.expm1(logp)), np.log1p(-np.exp(logp))
    )
  return -np.expm1(num_runs * missed).sum(axis=1)


def _grid(curves, epsilons):
  epsilons = np.asarray(epsilons, np.float64)
  if epsilons.ndim != 1 or not (epsilons > 0).all():
    raise ValueError(
        f'epsilons={epsilons} must be a list of positive budgets'
    )
  order = [i for i in np.argsort(epsilons) if np.isfinite(epsilons[i])]
  if not order:
    raise ValueError(f'epsilons={epsilons} holds no finite grid point')
  if not callable(curves) and len(curves) != epsilons.size:
    raise ValueError(
        f'{len(curves)} rows for {epsilons.size} epsilons; give one a point'
    )
  rows = [
      curves(float(epsilons[i])) if callable(curves) else curves[i]
      for i in order
  ]
  return epsilons[order], rows


def _crossing(epsilons, values, threshold):
  """Last point where non-decreasing ``values`` are within ``threshold``."""
  within = np.flatnonzero(values <= threshold)
  if not within.size:
    return _Crossing(np.nan, (0., float(epsilons[0])), 'below_grid')
  i = int(within[-1])
  if i + 1 == epsilons.size:
    last = float(epsilons[i])
    if values[i] == threshold:
      return _Crossing(last, (last, last), 'ok')
    return _Crossing(np.nan, (last, np.inf), 'above_grid')
  share = (threshold - values[i]) / (values[i + 1] - values[i])
  log_low, log_high = np.log(epsilons[i]), np.log(epsilons[i + 1])
  return _Crossing(
      float(np.exp(log_low + share * (log_high - log_low))),
      (float(epsilons[i]), float(epsilons[i + 1])),
      'ok',
  )
