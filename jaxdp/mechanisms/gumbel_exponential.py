r"""The provable form of the Gumbel mechanism: the noise's other tail.

``argmin(d + g)`` with ordinary Gumbel noise uses its doubly exponential lower
tail. With *minus* a Gumbel, untruncated, the step given K = k is exactly the
exponential mechanism, :math:`P(r \mid k) = e^{-d_r / b} / Z_k`.

``num_candidates='poisson'`` keeps K of Xu et al.; *proved* with

.. math::  \epsilon = 1 / b + 2 \ln V / \Delta_0.

Proof: :math:`Z_k \ge 1` since a word is at distance 0 from itself, so
:math:`P(u \mid w) \le e^{-d(w, u) / b}`; and :math:`P(u \mid w') \ge
\Pr(K = V) e^{-d(w', u) / b} / Z_V \ge e^{-d(w', u) / b} / V^2`. The ratio is
at most :math:`V^2 e^{d(w, w') / b}`, and :math:`d(w, w') \ge \Delta_0`. Moving
mass of K to V, as the neighbour table does, only raises Pr(K = V).

``num_candidates='all'`` draws from the whole vocabulary; *proved* with
epsilon = 2 / b, the exponential mechanism itself.

Even so epsilon times distance is large in absolute terms: 2 ln V is 21 for
48,210 words, at the closest pair.

References: McSherry & Talwar (2007); Durfee & Rogers (2019), Section 3.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special as sp_special

from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import candidates
from jaxdp.mechanisms import exponential

_BLOCK = 4096  # words whose laws are computed at once on the host
_FEW = 16  # draws from all words of a batch that are made one by one


class Params(NamedTuple):
  """What the calibrated mechanism needs; k = 0 for the whole vocabulary."""
  vectors: Any  # [V, D] float32
  neighbor_ids: Any  # [V, k] int32, itself first
  rank_thresholds: Any  # [V, k, 2] uint32, law over ranks, then "all words"
  rate: Any  # [] float32, 1 / b, rounded down
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, num_candidates='poisson',
              max_candidates=None, geometry=None):
  """Calibrates the provable variant.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget per unit Euclidean distance; for ``'poisson'`` above
      2 ln V / Delta_0, Delta_0 the smallest distance between words.
    num_candidates: ``'poisson'`` or ``'all'``.
    max_candidates: columns of the neighbour table, ``'poisson'`` only; None
      for the smallest whose rerouted mass is under 1e-9.
    geometry: what ``candidates.geometry(table)`` measured, to calibrate many
      budgets on one table, ``'poisson'`` only; None to measure it here.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table or setting; epsilon at or below its bound.
  """
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  if num_candidates == 'all':
    if max_candidates is not None or geometry is not None:
      raise ValueError('max_candidates and geometry have no meaning with '
                       "num_candidates='all'; leave them None")
    return _whole_vocabulary(vectors, epsilon)
  if num_candidates != 'poisson':
    raise ValueError(f"num_candidates={num_candidates!r} must be 'poisson' or "
                     "'all'")
  geometry = candidates.check_geometry(geometry, table, max_candidates)
  rate = calibration.float32_at_most(
      _poisson_rate(len(vectors), geometry.minimum, epsilon))
  ids, distance = geometry.neighbor_ids, geometry.neighbor_distances
  pmf = candidates.count_probabilities(len(vectors), ids.shape[1])
  blocks = [samplers.thresholds(_near_probabilities(
      distance[i:i + _BLOCK], pmf, float(rate)))
            for i in range(0, len(vectors), _BLOCK)]
  return Params(vectors, ids, np.concatenate(blocks), rate,
                _guarantee(epsilon, 'K mixture, epsilon = 1/b + 2 ln V/d_min'))


def _whole_vocabulary(vectors, epsilon):
  num_words = len(vectors)
  return Params(vectors, np.zeros((num_words, 0), np.int32),
                np.zeros((num_words, 0, 2), np.uint32),
                calibration.float32_at_most(epsilon / 2),
                _guarantee(epsilon, 'all words, epsilon = 2/b'))


def _guarantee(epsilon, form):
  return guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='l2', unit='per unit distance',
      relation=calibration.RELATION, status='proved',
      source=f'exponential mechanism, {form}; proof in '
             'jaxdp.mechanisms.gumbel_exponential',
      conditions=calibration.REAL_CONDITIONS)


def _poisson_rate(num_words, minimum, epsilon):
  """1 / b = epsilon - 2 ln V / Delta_0, checked to be positive."""
  bound = 2 * math.log(num_words) / minimum
  if not epsilon > bound:
    raise ValueError(
        f'epsilon={epsilon} must be above 2 ln V / minimum distance = '
        f'{bound:.6g} (V={num_words}, minimum distance {minimum:.6g}) for '
        "num_candidates='poisson'; raise it or use num_candidates='all'")
  return epsilon - bound


def _near_probabilities(distance, pmf, rate):
  """Pr(rank r, K within the table) and Pr(all words); [B, k + 1]."""
  return np.append(np.exp(_log_near(distance, pmf, rate)),
                   np.full((len(distance), 1), pmf[-1]), axis=1)


def _log_near(distance, pmf, rate):
  """log of sum over k >= r of Pr(K = k) e^{-d_r / b} / Z_k; [B, k]."""
  logits = -rate * distance
  log_z = np.logaddexp.accumulate(logits, axis=1)
  with np.errstate(divide='ignore'):
    terms = np.log(pmf[:-1])[None] - log_z
  tails = np.logaddexp.accumulate(terms[:, ::-1], axis=1)[:, ::-1]
  return logits + tails


def privatize(key, ids, params, start=0):
  """Replaces each word by a draw from its row of the law.

  Guarantee: ``params.guarantee``, per text; not covered: float rounding (a
  word of probability under about 2**-53 is never drawn) and the generator.

  Args:
    key: typed key; consumed.
    ids: int32 word ids, any shape.
    params: Params of :func:`calibrate`.
    start: index of the first element; see ``samplers.split_index``.

  Returns:
    int32 ids of the same shape.

  Raises:
    ValueError: concrete ids that the table does not hold.
  """
  return calibration.run(_privatize, key, ids, params, params.vectors.shape[0],
                         start)


@jax.jit
def _privatize(key, ids, params, start):
  flat = ids.reshape(-1)
  num, k_max = flat.shape[0], params.neighbor_ids.shape[1]
  if not k_max or not num:
    return _from_all(key, flat, params, start, None).reshape(ids.shape)
  keys = samplers.element_keys(key, samplers.OUTCOME, start, num)
  rank = samplers.map_elements(lambda k, word: _rank(k, word, params), keys,
                               flat)
  near = jnp.asarray(params.neighbor_ids)[flat, jnp.minimum(rank, k_max - 1)]
  everyone = rank == k_max
  num_whole = jnp.sum(everyone, dtype=jnp.int32)
  few = min(_FEW, num)
  rows = jnp.nonzero(everyone, size=few, fill_value=0)[0]

  def one(i, out):
    row = rows[i]
    return out.at[row].set(_from_all(
        key, flat[row][None], params, samplers.advance(start, row), None)[0])

  # Sorting the batch by word pays only where many draw from all words.
  out = jax.lax.cond(
      num_whole <= few,
      lambda: jax.lax.fori_loop(0, num_whole, one, near),
      lambda: jnp.where(everyone, _from_all(key, flat, params, start, everyone),
                        near))
  return out.reshape(ids.shape)


def _from_all(key, flat, params, start, active):
  """Draws of elements from ``start`` on among all words; int32 ``[B]``."""
  keys = samplers.element_keys(key, samplers.VOCABULARY_NOISE, start,
                               flat.shape[0])
  words = jax.vmap(lambda k: jax.random.bits(k, (2,)))(keys)
  return exponential.draw(words, flat, jnp.asarray(params.vectors),
                          rate=jnp.asarray(params.rate),
                          cap=jnp.float32(jnp.inf), active=active)


def _rank(key, word, params):
  return samplers.categorical(
      key, thresholds=jnp.asarray(params.rank_thresholds)[word])


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V].

  The law of what :func:`privatize` draws, rerouted K included.
  """
  num_words, k_max = params.neighbor_ids.shape
  ids = calibration.flat_ids(ids, num_words)
  distance = distances(ids, params)
  rate = float(params.rate)
  logits = -rate * distance
  whole = logits - sp_special.logsumexp(logits, axis=1, keepdims=True)
  if not k_max:
    return whole
  pmf = candidates.count_probabilities(num_words, k_max)
  near_ids = np.asarray(params.neighbor_ids)[ids]
  near = _log_near(np.take_along_axis(distance, near_ids, axis=1), pmf, rate)
  with np.errstate(divide='ignore'):
    out = whole + np.log(pmf[-1])
  both = np.logaddexp(np.take_along_axis(out, near_ids, axis=1), near)
  np.put_along_axis(out, near_ids, both, axis=1)
  return out


def distances(ids, params):
  """Returns the guarantee's metric, Euclidean, host float64 [B, V]."""
  return calibration.l2_distances(ids, params.vectors)
