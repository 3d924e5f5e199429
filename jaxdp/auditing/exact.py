r"""The exact epsilon of a mechanism whose whole law is known. Host, float64.

Metric differential privacy at ``epsilon`` says
``P(u | w) <= exp(epsilon d(w, w')) P(u | w')`` for every two inputs and every
output, so the least epsilon that holds is a maximum over three indices,

.. math::
  \epsilon^* = \max_{w \ne w', u}
    \frac{|\log P(u | w) - \log P(u | w')|}{d(w, w')} .

All triples are looked at: the result is 'exact', not a lower bound, up to the
error of the log-probabilities given. Two inputs at infinite distance are not
comparable: metric privacy promises nothing between them, whatever their laws.

Example:
  >>> distances = np.abs(np.subtract.outer([0., 1., 3.], [0., 1., 3.]))
  >>> softmax = -distances - np.log(np.exp(-distances).sum(1, keepdims=True))
  >>> epsilon, (w, w_prime, u) = exact_metric_epsilon(softmax, distances)
  >>> round(epsilon, 4), (w, w_prime, u)  # (2 + log(Z_1 / Z_2)) / 2
  (1.1189, (2, 1, 2))
"""

from concurrent import futures
import os
from typing import NamedTuple

import numpy as np
from scipy import special
from scipy.spatial import distance as spatial

from jaxdp.auditing import settings

MAX_WORDS = 4_000

_BLOCK = 128


class ExactEpsilon(NamedTuple):
  """The least epsilon of a law, and a triple that needs all of it."""

  epsilon: float  # per unit distance
  triple: tuple | None  # (w, w', u) ints: u is likelier from w than from w'


def exact_metric_epsilon(log_probs, distances, *, log_prob_error=0.,
                         tolerance=1e-6):
  """The least epsilon of metric differential privacy that a law satisfies.

  Both zero probabilities make a ratio of one; one zero makes epsilon infinite.
  Two words at distance zero add nothing when their laws are equal to the last
  bit and make epsilon infinite otherwise. Two words at infinite distance add
  nothing, even where one allows an output that the other does not. Takes O(V^3)
  time (a minute at V = 4,000 on two cores) and O(V^2) memory.

  Args:
    log_probs: ``[V, V]``, row ``w`` is log P(output = u | input = w), natural.
    distances: ``[V, V]``, unsquared, symmetric, zero on the diagonal, infinite
      for words that are not comparable; of two entries that differ by rounding
      the smaller counts.
    log_prob_error: bound on the absolute error of each log-probability, a
      scalar, ``[V]`` for each input or ``[V, V]``. It rounds epsilon UP: a
      pair's ratio grows by the largest error of either row, so a scalar adds
      2 * error / distance. Give what the quadrature reports.
    tolerance: how far the sum of a row's probabilities may be from one.

  Returns:
    :class:`ExactEpsilon`: ``(epsilon, (w, w', u))``, a float, measured
    'exact' up to ``log_prob_error``, and ints. ``u`` is likelier from ``w``
    than from ``w'``. Where all laws agree and no error is given it is 0. with
    the first comparable pair and output 0; where no two words are comparable
    it is 0. with None for the triple.

  Raises:
    ValueError: shapes do not match; fewer than 2 or more than 4,000 words; a
      NaN; a row that does not sum to one; distances that are negative, not
      symmetric or not zero on the diagonal; an error that is negative or not
      finite.
  """
  check_tolerance(tolerance)
  log_probs = _check_log_probs(log_probs, tolerance)
  num_words = len(log_probs)
  distances = _check_distances(distances, num_words)
  error = _row_errors(log_prob_error, num_words)
  possible = np.isfinite(log_probs)
  support = _supports(possible)
  finite = np.where(possible, log_probs, 0.)

  def block_worst(start):
    # The Chebyshev distance of two rows is their largest log-ratio; it comes
    # without a [V, V, V] array.
    rows = slice(start, start + _BLOCK)
    gap = spatial.cdist(finite[rows], finite[start:], 'chebyshev')
    gap[support[rows, None] != support[None, start:]] = np.inf
    return _block_worst(gap, distances[rows, start:],
                        error[rows, None] + error[None, start:], start)

  # SciPy lets go of the interpreter's lock inside cdist.
  with futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
    worst = list(pool.map(block_worst, range(0, num_words, _BLOCK)))
  epsilon, w, w_prime = max(worst, key=lambda block: block[0])
  if epsilon < 0:
    return ExactEpsilon(0., None)
  return ExactEpsilon(
      epsilon, witness(log_probs[w], log_probs[w_prime], w, w_prime))


def witness(log_prob, log_prob_prime, w, w_prime):
  """The triple (w, w', u) that shows the largest log-ratio of two laws [U]."""
  with np.errstate(invalid='ignore'):
    difference = log_prob - log_prob_prime
  # Impossible under both, minus infinity twice: no difference.
  difference = np.where(np.isnan(difference), 0., difference)
  u = int(np.argmax(np.abs(difference)))
  if difference[u] < 0:
    w, w_prime = w_prime, w
  return w, w_prime, u


def _block_worst(gap, distance, error, start):
  """The largest ratio of a block of pairs and its two words."""
  with np.errstate(divide='ignore', invalid='ignore'):
    ratio = (gap + error) / distance
  ratio = np.where(distance == 0, np.where(gap == 0, 0., np.inf), ratio)
  ratio[np.isinf(distance)] = -1.
  # A word with itself, and pairs that the block holds the other way round.
  ratio[np.tril_indices(len(ratio), m=ratio.shape[1])] = -1.
  row, column = np.unravel_index(np.argmax(ratio), ratio.shape)
  return float(ratio[row, column]), int(row) + start, int(column) + start


def _supports(possible):
  """A number for each row, [V]: equal where the same outputs are possible."""
  if (possible == possible[0]).all():
    return np.zeros(len(possible), int)
  packed = np.packbits(possible, axis=1)
  return np.unique(packed, axis=0, return_inverse=True)[1].reshape(-1)


def _row_errors(log_prob_error, num_words):
  """The largest error of each row, [V]."""
  error = settings.check_floats('log_prob_error', log_prob_error)
  if error.shape not in ((), (num_words,), (num_words, num_words)):
    raise ValueError(f'log_prob_error of shape {error.shape} must be a scalar, '
                     f'[V] or [V, V] with V = {num_words}')
  if not (np.isfinite(error).all() and (error >= 0).all()):
    raise ValueError('log_prob_error must be finite and not negative; it has '
                     f'an entry {error.flat[_first_bad(error)]}')
  if error.ndim == 2:
    return error.max(axis=1)
  return np.broadcast_to(error, (num_words,))


def _first_bad(x):
  return int(np.argmax(~(np.isfinite(x) & (x >= 0))))


def _check_log_probs(log_probs, tolerance):
  log_probs = settings.check_floats('log_probs', log_probs)
  if log_probs.ndim != 2 or log_probs.shape[0] != log_probs.shape[1]:
    raise ValueError(f'log_probs of shape {log_probs.shape} must be square, '
                     '[V, V]: one row an input, one column an output')
  num_words = len(log_probs)
  if not 2 <= num_words <= MAX_WORDS:
    raise ValueError(
        f'log_probs has {num_words} words; epsilon compares at least 2, and '
        f'exactly at most {MAX_WORDS}: beyond, look for a lower bound on '
        'chosen pairs')
  bad = np.isnan(log_probs).any(axis=1)
  if bad.any():
    raise ValueError(f'log_probs has a NaN in row {int(np.argmax(bad))}; a '
                     'zero probability is -inf')
  total = np.exp(special.logsumexp(log_probs, axis=1))
  bad = ~(np.abs(total - 1) <= tolerance)
  if bad.any():
    row = int(np.argmax(bad))
    raise ValueError(f'log_probs row {row} sums to {total[row]}, not to one '
                     f'within tolerance={tolerance}; pass natural logarithms '
                     'of all outputs')
  return log_probs


def _check_distances(distances, num_words):
  distances = settings.check_floats('distances', distances)
  if distances.shape != (num_words, num_words):
    raise ValueError(f'distances of shape {distances.shape} must match '
                     f'log_probs, ({num_words}, {num_words})')
  bad = ~(distances >= 0)
  if bad.any():
    w, v = _first(bad)
    raise ValueError(f'distances[{w}, {v}]={distances[w, v]} must not be '
                     'negative; infinite is for words that are not comparable')
  infinite = np.isinf(distances)
  with np.errstate(invalid='ignore'):
    bad = np.abs(distances - distances.T) > 1e-6 * distances
  bad |= infinite != infinite.T
  if bad.any():
    w, v = _first(bad)
    raise ValueError(f'distances[{w}, {v}]={distances[w, v]} but the other way '
                     f'round {distances[v, w]}; a metric is symmetric')
  bad = np.diag(distances) != 0
  if bad.any():
    w = int(np.argmax(bad))
    raise ValueError(f'distances[{w}, {w}]={distances[w, w]} must be zero; '
                     'compute distances from differences, not from products')
  return np.minimum(distances, distances.T)


def check_tolerance(tolerance):
  """How far a row's sum may be from one, in [0, 1)."""
  settings.check_number('tolerance', tolerance, lambda x: 0. <= x < 1.,
                        'one number in [0, 1)')


def _first(bad):
  return tuple(int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
