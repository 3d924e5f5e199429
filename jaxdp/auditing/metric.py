r"""Metric privacy of laws over tens of thousands of words. Host, float64.

Two ways to the least :math:`\epsilon^*` with
:math:`P(u \mid w) \le e^{\epsilon^* d(w, w')} P(u \mid w')`, where all triples
are too many to look at:

* :func:`metric_epsilon_lower_bound` looks at all outputs of chosen pairs, a
  block of rows at a time: a 'lower bound', which shows a claim to be wrong and
  never to be right;
* :func:`exponential_metric_epsilon` is 'exact' for laws
  :math:`P(y \mid w) \propto e^{-\rho \min(d(w, y), c)}`, where the worst output
  of a pair is one of the two words.

  >>> vectors = np.float32([[0.], [1.], [3.]])  # an EmbeddingTable will do
  >>> def log_prob(ids):
  ...   logits = -np.abs(np.float64(vectors[ids]) - vectors[:, 0])
  ...   return logits - np.log(np.exp(logits).sum(1, keepdims=True))
  >>> found = metric_epsilon_lower_bound(log_prob, vectors)
  >>> round(found.epsilon, 4), found.triple, found.measured, found.num_pairs
  (1.1189, (2, 1, 2), 'lower bound', 3)
  >>> exact = exponential_metric_epsilon(vectors, 1.)
  >>> round(exact.epsilon, 4), exact.triple, exact.measured
  (1.1189, (2, 1, 2), 'exact')

Shape letters: ``V`` words, ``U`` outputs, ``D`` dimensions, ``B`` rows, ``P``
pairs.
"""

from concurrent import futures
import math
import os
from typing import NamedTuple

import numpy as np
from scipy import special
from scipy.spatial import distance as spatial

from jaxdp import neighbors
from jaxdp.auditing import exact
from jaxdp.auditing import settings

_CALL_ROWS = 64  # rows asked of a law at once
_SLAB_BYTES = 2**24  # differences of rows held at once
_DISTANCE_ROWS = 128  # rows of distances held at once, by each thread
_BLOCK_PAIRS = 8192  # between two calls of on_block, at most
_POOL = 64  # words that stand in for the whole table, far and random pairs


class MetricEpsilon(NamedTuple):
  """An epsilon per unit distance and a triple that needs all of it."""
  epsilon: float
  triple: tuple | None  # (w, w', u) ints: u is likelier from w than from w'
  measured: str  # 'exact' or 'lower bound'
  num_pairs: int  # pairs of words looked at


def metric_epsilon_lower_bound(
    log_prob_fn, table, pairs=None, *, distance_fn=None, num_pairs=100_000,
    seed=0, log_prob_error=0., tolerance=1e-6, block_bytes=2**27,
    on_block=None):
  """Bounds from below the least epsilon that a law over many words satisfies.

  Every output of every chosen pair is looked at. Holds ``block_bytes`` of
  log-probabilities, whatever the number of words, and what ``log_prob_fn``
  needs for 64 rows. The pairs are searched in this order, in which shared rows
  are computed once a block: half are the closest pairs of the table, a quarter
  join words with the farthest of a sample of 64 words, the rest are random.

  Args:
    log_prob_fn: ``log_prob_fn(ids) -> float64 [B, U]`` for int ids ``[B]``:
      natural log-probabilities of all outputs, minus infinity for an impossible
      one; at most 64 ids a call.
    table: ``EmbeddingTable`` of V words, or its vectors ``[V, D]``.
    pairs: int ``[P, 2]``, ids of two different words, or None for the choice
      above, which takes all pairs where ``num_pairs`` allows.
    distance_fn: ``distance_fn(ids, other_ids) -> float64 [P]``, the distance of
      each ``ids[i]`` to ``other_ids[i]``, infinite for words that are not
      comparable and add nothing. None: Euclidean. It does not change the
      choice of pairs, which is Euclidean.
    num_pairs: at most how many pairs to choose; unused if ``pairs`` is given.
    seed: of the random part of the choice.
    log_prob_error: bound on the absolute error of each log-probability, a
      scalar; it rounds epsilon DOWN, by twice itself over the distance.
    tolerance: how far the sum of a row's probabilities may be from one.
    block_bytes: memory for log-probabilities; at least two rows are held.
    on_block: None, or called after each block as
      ``on_block(pairs looked at, pairs, epsilon so far)``.

  Returns:
    :class:`MetricEpsilon`, measured 'lower bound'. Stops at the first infinite
    ratio, so ``num_pairs`` is how many pairs were looked at. Without one
    comparable pair epsilon is 0. and the triple None.

  Raises:
    ValueError: pairs are not int ``[P, 2]`` ids of different words; fewer than
      two words; a log-probability is NaN or a row does not sum to one; a
      distance is NaN or negative; shapes do not match; a setting is out of
      range.
  """
  vectors = _check_vectors(getattr(table, 'vectors', table))
  _check_settings(num_pairs, log_prob_error, block_bytes, seed)
  exact.check_tolerance(tolerance)
  _check_functions(log_prob_fn=log_prob_fn)
  _check_functions(**{k: f for k, f in (
      ('distance_fn', distance_fn), ('on_block', on_block)) if f is not None})
  if pairs is None:
    pairs = _choose_pairs(vectors, num_pairs, np.random.default_rng(seed))
  else:
    pairs = _check_pairs(pairs, len(vectors))
  distances = _pair_distances(pairs, vectors, distance_fn)
  law = _Rows(log_prob_fn, len(vectors), tolerance, block_bytes)
  best, done = (-1., None), 0
  for stop in _blocks(pairs, law.capacity):
    block, done = slice(done, stop), stop
    law.load(np.unique(pairs[block]))
    found = _worst_pair(law, pairs[block], distances[block], log_prob_error)
    best = max(best, found, key=lambda pair: pair[0])
    if on_block is not None:
      on_block(done, len(pairs), max(best[0], 0.))
    if math.isinf(best[0]):
      break
  return MetricEpsilon(max(best[0], 0.), best[1], 'lower bound', done)


def exponential_metric_epsilon(vectors_or_distance_rows, rate, cap=math.inf):
  r"""The exact epsilon of the law exp(-rate min(d, cap)), in O(V^2) time.

  With :math:`m = \min(d, c)`, itself a metric, and :math:`Z_w = \sum_y
  e^{-\rho m(w, y)}`,

  .. math::
    \log\frac{P(y \mid w)}{P(y \mid w')}
      = \rho\,(m(w', y) - m(w, y)) + \log Z_{w'} - \log Z_w
      \le \rho\,m(w, w') + \log Z_{w'} - \log Z_w ,

  by the triangle inequality, with equality at :math:`y = w`. So

  .. math::
    \epsilon^* = \max_{w \ne w'}
      \frac{\rho\,m(w, w') + |\log Z_w - \log Z_{w'}|}{d(w, w')} .

  No ``[V, V]`` array is held; distances are computed twice. Inputs and outputs
  are the same words.

  Args:
    vectors_or_distance_rows: ``[V, D]`` for Euclidean distances, or a function
      of int ids ``[B]`` that returns their distances ``[B, V]`` to all words,
      unsquared, float64. They must satisfy the triangle inequality, which is
      not checked; infinite for words that are not comparable.
    rate: rho > 0, in 1/distance.
    cap: distances above it count as it; infinite for none.

  Returns:
    :class:`MetricEpsilon`, measured 'exact' up to float64 rounding. Two words
    at distance zero add nothing if they have the same Z, as they do when their
    rows are the same, and make epsilon infinite otherwise.

  Raises:
    ValueError: ``rate`` or ``cap`` is not positive; vectors are not finite
      ``[V, D]`` with at least two rows; a distance is NaN, negative, or not
      zero from a word to itself.

  References: the law is that of McSherry and Talwar (2007), eq. (1), with the
  distance for its score.
  """
  rate = settings.check_number('rate', rate, lambda x: 0 < x < math.inf,
                               'positive and finite, in 1/distance')
  cap = settings.check_number('cap', cap, lambda x: x > 0,
                              'positive; infinite caps nothing')
  rows_fn, num_words = _distance_rows(vectors_or_distance_rows)
  starts = range(0, num_words, _DISTANCE_ROWS)

  def block_log_z(start):
    distance = rows_fn(start)
    return special.logsumexp(-rate * np.minimum(distance, cap), axis=1)

  def block_worst(start):
    # Only pairs (w, w') with w < w'; a block holds both orders of some.
    distance = rows_fn(start)
    rows = slice(start, start + len(distance))
    with np.errstate(divide='ignore', invalid='ignore'):
      gap = rate * np.minimum(distance, cap) + np.abs(
          log_z[rows, None] - log_z)
      ratio = gap / distance
    ratio = np.where(distance == 0, np.where(gap == 0, 0., np.inf), ratio)
    ratio[np.isinf(distance)] = -1.
    ratio[np.tril_indices(len(ratio), k=start, m=num_words)] = -1.
    row, column = np.unravel_index(np.argmax(ratio), ratio.shape)
    return float(ratio[row, column]), int(row) + start, int(column)

  with futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
    log_z = np.concatenate(list(pool.map(block_log_z, starts)))
    worst = list(pool.map(block_worst, starts))
  epsilon, w, w_prime = max(worst, key=lambda block: block[0])
  triple = (w, w_prime, w) if log_z[w] <= log_z[w_prime] else (w_prime, w,
                                                               w_prime)
  return MetricEpsilon(max(epsilon, 0.), triple if epsilon >= 0 else None,
                       'exact', num_words * (num_words - 1) // 2)


class _Rows:
  """Rows of a law, as many at a time as the memory allows."""

  def __init__(self, log_prob_fn, num_words, tolerance, block_bytes):
    self._log_prob_fn = log_prob_fn
    self._tolerance = tolerance
    self._num_outputs = None
    self._ask(np.zeros((1,), np.int64))
    self.capacity = max(2, min(num_words,
                               block_bytes // (8 * self._num_outputs)))
    self.log_probs = np.empty((self.capacity, self._num_outputs))
    self._held = np.full((self.capacity,), -1)  # the word of each row
    self._row_of = np.full((num_words,), -1)

  def load(self, ids):
    """Makes room for the rows of ``ids``, at most capacity; keeps old ones."""
    missing = ids[self._row_of[ids] < 0]
    free = np.flatnonzero(~np.isin(self._held, ids))[:len(missing)]
    old = self._held[free]
    self._row_of[old[old >= 0]] = -1
    for start in range(0, len(missing), _CALL_ROWS):
      part = slice(start, start + _CALL_ROWS)
      self.log_probs[free[part]] = self._ask(missing[part])
    self._held[free], self._row_of[missing] = missing, free

  def row_of(self, ids):
    return self._row_of[ids]

  def _ask(self, ids):
    log_probs = settings.check_floats('log_prob_fn(ids)',
                                      _call('log_prob_fn', self._log_prob_fn,
                                            ids))
    expected = (len(ids), self._num_outputs or log_probs.shape[-1:][0]
                if log_probs.ndim else 0)
    if log_probs.shape != expected:
      raise ValueError(f'log_prob_fn returns shape {log_probs.shape} for '
                       f'{len(ids)} ids, not {expected}; one row an id')
    self._num_outputs = expected[1]
    if np.isnan(log_probs).any():
      row = int(np.argmax(np.isnan(log_probs).any(axis=1)))
      raise ValueError(f'log_prob_fn returns a NaN for word {ids[row]}; a zero '
                       'probability is -inf')
    total = np.exp(special.logsumexp(log_probs, axis=1))
    bad = ~(np.abs(total - 1) <= self._tolerance)
    if bad.any():
      row = int(np.argmax(bad))
      raise ValueError(
          f'log_prob_fn returns a row that sums to {total[row]} for word '
          f'{ids[row]}, not to one within tolerance={self._tolerance}; return '
          'natural logarithms of all outputs')
    return log_probs


def _blocks(pairs, capacity):
  """Yields the ends of blocks of pairs whose words fit into ``capacity``."""
  start, words = 0, set()
  for i, pair in enumerate(pairs.tolist()):
    new = words.union(pair)
    if len(new) > capacity or i - start == _BLOCK_PAIRS:
      yield i
      start, new = i, set(pair)
    words = new
  yield len(pairs)


def _worst_pair(law, pairs, distances, error):
  """The largest ratio of loaded pairs, and its triple or None."""
  rows = law.row_of(pairs)
  gap = np.empty(len(pairs))
  step = max(1, _SLAB_BYTES // law.log_probs[0].nbytes)
  for start in range(0, len(pairs), step):
    part = slice(start, start + step)
    with np.errstate(invalid='ignore'):
      difference = law.log_probs[rows[part, 0]] - law.log_probs[rows[part, 1]]
    # Minus infinity twice is no difference; fmax passes over the NaN.
    gap[part] = np.fmax.reduce(np.abs(difference, out=difference), axis=1)
  ratio = _ratio(np.maximum(gap - 2 * error, 0.), distances)
  i = int(np.argmax(ratio))
  if ratio[i] < 0:
    return -1., None
  laws = law.log_probs[rows[i]]
  return float(ratio[i]), exact.witness(*laws, *(int(w) for w in pairs[i]))


def _ratio(gap, distance):
  """Gap a unit of distance; -1 for pairs that are not comparable."""
  with np.errstate(divide='ignore', invalid='ignore'):
    ratio = gap / distance
  ratio = np.where(distance == 0, np.where(gap == 0, 0., np.inf), ratio)
  return np.where(np.isinf(distance), -1., ratio)


def _choose_pairs(vectors, num_pairs, generator):
  """The pairs to search, [P, 2]: closest, then far, then random ones."""
  num_words = len(vectors)
  if num_pairs >= num_words * (num_words - 1) // 2:
    return np.stack(np.triu_indices(num_words, 1), axis=1)
  quarter = num_pairs // 4
  pairs = np.concatenate([
      _closest_pairs(vectors, num_pairs - 2 * quarter),
      _far_pairs(vectors, quarter, generator),
      _random_pairs(num_words, quarter, generator)])
  return pairs[np.sort(_first_of_each(pairs, num_words))]


def _first_of_each(pairs, num_words):
  """Where each unordered pair comes first; pairs of one word are left out."""
  low, high = pairs.min(axis=1), pairs.max(axis=1)
  _, first = np.unique(low * num_words + high, return_index=True)
  return first[low[first] != high[first]]


def _closest_pairs(vectors, num):
  num_words = len(vectors)
  # A pair may be found from both of its words.
  k = min(num_words, 1 + -(-2 * num // num_words))
  ids, distances = (
      np.asarray(x) for x in neighbors.k_nearest(vectors, vectors, k))
  pairs = np.stack([np.repeat(np.arange(num_words), k),
                    ids.reshape(-1).astype(np.int64)], axis=1)
  first = _first_of_each(pairs, num_words)
  closest = first[np.argsort(distances.reshape(-1)[first], kind='stable')[:num]]
  return pairs[np.sort(closest)]


def _far_pairs(vectors, num, generator):
  num_words = len(vectors)
  pool = generator.choice(num_words, min(_POOL, num_words), replace=False)
  words = np.sort(generator.permutation(num_words)[:num])
  each = min(len(pool), -(-num // max(1, len(words))))
  parts = [np.zeros((0, 2), np.int64)]
  for start in range(0, len(words), 1024):
    part = words[start:start + 1024]
    distance = spatial.cdist(vectors[part], vectors[pool])
    far = pool[np.argsort(-distance, axis=1)[:, :each]]
    parts.append(np.stack([np.repeat(part, each), far.reshape(-1)], axis=1))
  return np.concatenate(parts)[:num]


def _random_pairs(num_words, num, generator):
  pool = generator.choice(num_words, min(_POOL, num_words), replace=False)
  words = np.sort(generator.integers(num_words, size=num))
  return np.stack([words, generator.choice(pool, size=num)], axis=1)


def _pair_distances(pairs, vectors, distance_fn):
  """Distances of pairs, float64 [P]."""
  if distance_fn is None:
    distance_fn = lambda ids, other_ids: np.linalg.norm(
        np.float64(vectors[ids]) - vectors[other_ids], axis=1)
  distances = np.empty(len(pairs))
  for start in range(0, len(pairs), _CALL_ROWS):
    part = pairs[start:start + _CALL_ROWS]
    found = settings.check_floats('distance_fn(ids, other_ids)',
                                  _call('distance_fn', distance_fn,
                                        part[:, 0], part[:, 1]))
    if found.shape != (len(part),):
      raise ValueError(f'distance_fn returns shape {found.shape} for '
                       f'{len(part)} pairs; one distance for each')
    bad = ~(found >= 0)
    if bad.any():
      i = int(np.argmax(bad))
      raise ValueError(f'distance_fn returns {found[i]} for words {part[i, 0]} '
                       f'and {part[i, 1]}; a distance is not negative')
    distances[start:start + _CALL_ROWS] = found
  return distances


def _distance_rows(source):
  """A function of a block's first word that returns distances, and V."""
  if callable(source):
    first = settings.check_floats('distance rows',
                                  source(np.zeros((1,), np.int64)))
    if first.ndim != 2:
      raise ValueError(f'distance rows of shape {first.shape} must be [B, V]')
    num_words = first.shape[1]
    rows_fn = source
  else:
    vectors = _check_vectors(source).astype(np.float64)
    num_words = len(vectors)
    rows_fn = lambda ids: spatial.cdist(vectors[ids], vectors)

  def block(start):
    ids = np.arange(start, min(num_words, start + _DISTANCE_ROWS))
    distance = settings.check_floats('distance rows', rows_fn(ids))
    if distance.shape != (len(ids), num_words):
      raise ValueError(f'distance rows of shape {distance.shape} must be '
                       f'({len(ids)}, {num_words}), one row a word')
    bad = ~(distance >= 0)
    if bad.any() or distance[np.arange(len(ids)), ids].any():
      raise ValueError(f'distance rows from word {start} must not be negative '
                       'or NaN, and zero from each word to itself')
    return distance

  return block, num_words


def _check_vectors(vectors):
  vectors = settings.check_array('vectors', vectors)
  if (vectors.ndim != 2 or vectors.dtype.kind not in 'fiu'
      or not np.isfinite(vectors).all()):
    raise ValueError(f'vectors of shape {vectors.shape} and dtype '
                     f'{vectors.dtype} must be finite [V, D]')
  if len(vectors) < 2:
    raise ValueError(f'vectors has {len(vectors)} words; epsilon compares at '
                     'least 2')
  return vectors


def _check_pairs(pairs, num_words):
  pairs = settings.check_array('pairs', pairs)
  if (pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs)
      or pairs.dtype.kind not in 'iu'):
    raise ValueError(f'pairs of shape {pairs.shape} and dtype {pairs.dtype} '
                     'must be int [P, 2] with P >= 1')
  if pairs.min() < 0 or pairs.max() >= num_words:
    raise ValueError(f'pairs reach from {pairs.min()} to {pairs.max()}; ids '
                     f'lie in [0, {num_words})')
  same = pairs[:, 0] == pairs[:, 1]
  if same.any():
    raise ValueError(f'pairs[{int(np.argmax(same))}] is a word with itself; '
                     'compare two different words')
  return pairs.astype(np.int64)


def _call(name, function, *ids):
  """What the caller's function returns; what it raises, by its name."""
  try:
    return function(*ids)
  except ValueError:
    raise
  except Exception as e:
    raise settings.raised(e, 'ids', name) from e


def _check_functions(**functions):
  for name, function in functions.items():
    if not callable(function):
      raise ValueError(f'{name}={function!r} must be a function')


def _check_settings(num_pairs, log_prob_error, block_bytes, seed):
  for name, value in (('num_pairs', num_pairs), ('block_bytes', block_bytes)):
    if not (isinstance(value, (int, np.integer)) and value >= 1):
      raise ValueError(f'{name}={value!r} must be a positive integer')
  settings.check_number('log_prob_error', log_prob_error,
                        lambda x: 0 <= x < math.inf,
                        'one finite number, not negative')
  settings.check_whole('seed', seed, 0, settings.MAX_COUNT)
