r"""The truncated Gumbel mechanism of Xu et al. (2020), as published.

For each word: K ~ TruncatedPoisson(ln V; 1, V); its K nearest words, itself
included, at distances d; the output is the arg-min of d + g with g
Gumbel(0, b) "truncated" to [-Delta, Delta],

.. math::
  b = 2 \Delta / \min\{W_0(2 \alpha \Delta), \ln(\alpha \Delta_0)\}, \quad
  \alpha = (\epsilon - 2 (1 + \ln V) / \Delta_0) / 3.

*claimed*, not proved: Theorem 1 uses the CDF of the untruncated Gumbel for
noise that is truncated, and one of its lemmas gives each of V words a
probability of at least :math:`e^{-\alpha \Delta_0}`, which contradicts itself
for :math:`\epsilon < (2 + 5 \ln V) / \Delta_0`: the sum exceeds one. Exact laws
show epsilon exceeded near its lower bound: on 100 random words 2.6 times by the
clipped reading (``experiments.xu20_theorem1``), and on larger tables by the
truncated one too: on 300 Gaussian words in 50 dimensions, at 1.01 times the
bound, the exact epsilon is 1.70 times the one claimed (truncated) and 6.75
times (clipped). The provable variant is ``gumbel_exponential``.

The paper reads three ways: Algorithm 1 truncates, Section 5 clips, the proof
does neither; ``noise`` chooses.

References: Xu et al. (2020), Algorithms 1 and 2, Theorem 1, Appendix A.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import candidates
from jaxdp.mechanisms import truncated_gumbel_law

NOISES = ('truncated', 'clipped', 'untruncated')
_BLOCK = 1024  # words of many candidates drawn at once


class Params(NamedTuple):
  """What the calibrated mechanism needs; k is at most a few dozen."""
  vectors: Any  # [V, D] float32
  neighbor_ids: Any  # [V, k] int32, itself first
  neighbor_distances: Any  # [V, k] float32, ascending
  count_thresholds: Any  # [k, 2] uint32, law of K
  scale: Any  # [] float32, b
  bound: Any  # [] float32, truncation; infinite for the other readings
  clip: Any  # [] float32, clamp; infinite for the other readings
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, noise='truncated', max_candidates=None,
              geometry=None):
  """Calibrates the published mechanism.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget per unit Euclidean distance, above (5 + 2 ln V) / Delta_0,
      Delta_0 the smallest distance between words; up to e^80 and beyond.
    noise: ``'truncated'`` (Algorithm 1), ``'clipped'`` (Section 5) or
      ``'untruncated'`` (the proof).
    max_candidates: columns of the neighbour table; None for the smallest whose
      rerouted mass is under 1e-9.
    geometry: what ``candidates.geometry(table)`` measured, to calibrate many
      budgets on one table; None to measure it here.

  Returns:
    Params; its guarantee is *claimed*.

  Raises:
    ValueError: a bad table or noise; epsilon at or below its bound, where b is
      negative or undefined.
  """
  if noise not in NOISES:
    raise ValueError(f'noise={noise!r} must be one of {NOISES}')
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  num_words = len(vectors)
  geometry = candidates.check_geometry(geometry, table, max_candidates)
  k_max = geometry.neighbor_ids.shape[1]
  scale = truncated_gumbel_law.paper_scale(
      epsilon, num_words, geometry.diameter, geometry.minimum)
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='l2', unit='per unit distance',
      relation=calibration.RELATION, status='claimed',
      source=f'Xu et al. (2020), Theorem 1, {noise} noise',
      conditions=calibration.REAL_CONDITIONS)
  limit, none = np.float32(geometry.diameter), np.float32(np.inf)
  return Params(
      vectors, geometry.neighbor_ids,
      geometry.neighbor_distances.astype(np.float32),
      samplers.thresholds(candidates.count_probabilities(num_words, k_max)),
      np.float32(scale), limit if noise == 'truncated' else none,
      limit if noise == 'clipped' else none, guarantee)


def privatize(key, ids, params, start=0):
  """Replaces each word by a noisy nearest of its K nearest words.

  Guarantee: ``params.guarantee`` is *claimed* only; see the module docstring.

  Args:
    key: typed key; consumed.
    ids: int32 word ids, any shape.
    params: Params of :func:`calibrate`.
    start: index of the first element; see ``samplers.split_index``.

  Returns:
    int32 ids of the same shape; ties go to the nearer word.

  Raises:
    ValueError: concrete ids that the table does not hold.
  """
  return calibration.run(_privatize, key, ids, params, params.vectors.shape[0],
                         start)


@jax.jit
def _privatize(key, ids, params, start):
  params = params._replace(vectors=jnp.asarray(params.vectors))
  flat = ids.reshape(-1)
  num, k_max = flat.shape[0], params.neighbor_ids.shape[1]
  if not num:
    return ids
  count_keys, noise_keys = (
      samplers.element_keys(key, purpose, start, num)
      for purpose in (samplers.NUM_CANDIDATES, samplers.CANDIDATE_NOISE))
  common = candidates.common_candidates(params.vectors.shape[0], k_max)

  def draw(count_keys, noise_keys, words):
    count = jax.vmap(lambda key: samplers.categorical(
        key, thresholds=jnp.asarray(params.count_thresholds)))(count_keys)
    return count, _from_candidates(noise_keys, words, count, params, common)

  count, out = samplers.map_tiles(draw, count_keys, noise_keys, flat)
  # Compacted, with dynamic trip counts: a cond under vmap would make every word
  # pay for the whole vocabulary. A draw from fewer columns begins as one from
  # more of them does, so the split never shows.
  more = count >= common
  size = min(_BLOCK, num)
  rows = jnp.nonzero(more, size=-(-num // size) * size, fill_value=num)[0]

  def block(i, out):
    some = jax.lax.dynamic_slice_in_dim(rows, i * size, size)
    at = jnp.minimum(some, num - 1)
    counts = jnp.where(some < num, count[at], 0)
    out = out.at[some].set(_from_candidates(
        noise_keys[at], flat[at], counts, params,
        jnp.minimum(jnp.max(counts) + 1, k_max)), mode='drop')
    whole = counts == k_max
    picked = jnp.nonzero(whole, size=size, fill_value=0)[0]

    def from_all(j, out):
      row = some[picked[j]]
      row_key = samplers.element_keys(
          key, samplers.VOCABULARY_NOISE, samplers.advance(start, row), 1)[0]
      return out.at[row].set(_from_all(row_key, flat[row], params))

    return jax.lax.fori_loop(0, jnp.sum(whole, dtype=jnp.int32), from_all, out)

  num_blocks = (jnp.sum(more, dtype=jnp.int32) + size - 1) // size
  return jax.lax.fori_loop(0, num_blocks, block, out).reshape(ids.shape)


def _from_candidates(keys, words, counts, params, columns):
  """Draws among the count + 1 nearest words, those in the first columns; [B].

  ``columns`` may be traced.
  """
  distances = jnp.asarray(params.neighbor_distances)

  # Over columns, each along the whole tile: noise fused into an arg-min over a
  # row would be scalar code.
  def step(column, least):
    value, choice = least
    noise = samplers.truncated_gumbel_entry(
        keys, column, scale=params.scale, bound=params.bound)
    noisy = distances[words, column] + _clipped(noise, params)
    noisy = jnp.where(column <= counts, noisy, jnp.inf)
    return (jnp.minimum(value, noisy),
            jnp.where(noisy < value, column, choice))

  _, choice = jax.lax.fori_loop(
      0, columns, step, (jnp.full(words.shape, jnp.inf),
                         jnp.zeros(words.shape, jnp.int32)))
  return jnp.asarray(params.neighbor_ids)[words, choice]


def _from_all(key, word, params):
  """One draw among all V words: a pass over the table."""
  distance = neighbors.distances(params.vectors[word], params.vectors)
  noise = samplers.truncated_gumbel(key, distance.shape, scale=params.scale,
                                    bound=params.bound)
  noisy = distance + _clipped(noise, params)
  # Noise fused into an arg-min would be scalar code; two minima are not.
  ids = jnp.arange(len(noisy), dtype=jnp.int32)
  return jnp.min(jnp.where(noisy == jnp.min(noisy), ids, len(noisy) - 1))


def _clipped(noise, params):
  return jnp.clip(noise, -params.clip, params.clip)


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V], by quadrature.

  The law of what :func:`privatize` draws, rerouted K included.

  Raises:
    ValueError: more than 2,000 words; the message names the Monte-Carlo route.
  """
  num_words, k_max = params.neighbor_ids.shape
  ids = calibration.flat_ids(ids, num_words)
  if num_words > truncated_gumbel_law.MAX_WORDS:
    raise ValueError(
        f'log_prob is computed up to {truncated_gumbel_law.MAX_WORDS} words; '
        f'the table has {num_words}; estimate it with '
        'jaxdp.deniability.measure')
  if not ids.size:
    return np.zeros((0, num_words))
  noise, bound = _reading(params)
  pmf = np.zeros(num_words)
  near = candidates.count_probabilities(num_words, k_max)
  pmf[:k_max] = near[:-1]
  pmf[-1] += near[-1]
  with np.errstate(divide='ignore'):
    log_pmf = np.log(pmf)
  return truncated_gumbel_law.log_prob(
      distances(ids, params), scale=float(params.scale), bound=bound,
      noise=noise, log_pmf=log_pmf)


def _reading(params):
  """Which reading of the noise params describe, and its limit."""
  for noise, limit in zip(NOISES, (params.bound, params.clip)):
    if math.isfinite(limit):
      return noise, float(limit)
  return 'untruncated', math.inf


def distances(ids, params):
  """Returns the guarantee's metric, Euclidean, host float64 [B, V]."""
  return calibration.l2_distances(ids, params.vectors)
