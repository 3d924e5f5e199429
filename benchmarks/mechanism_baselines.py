r"""The word mechanisms as NumPy users write them: what ours are timed beside.

Host. Two forms, both in batches of 512 words, both of our law:

  from_vectors   a float32 matrix product with the whole table for each batch,
                 then an arg-min, a partition or an inverse CDF
  from_table     `truncated_gumbel` and `gumbel_exponential` only: our table of
                 the nearest words and their distances, made once; a draw then
                 looks a row up and adds noise to the candidates alone

>>> rng = np.random.default_rng(0)
>>> numpy_noise(rng, 2, 5, epsilon=1.).shape
(2, 5)

References: Feyisetan et al. (2020); Xu et al. (2020); Yue et al. (2021);
Carvalho et al. (2021).
"""

import math

import jax
import numpy as np

GEOMETRIC = ('truncated_gumbel', 'gumbel_exponential')  # have a table

_BATCH = 512
_NEAR = 64  # words that from_vectors partitions off


def from_vectors(name, params, rng):
  """ids -> ids by products with the whole table.

  Args:
    name: of the mechanism.
    params: of its ``calibrate``.
    rng: NumPy Generator.
  """
  params = jax.tree.map(np.asarray, params)  # JAX must not do its arithmetic
  vectors = params.vectors
  sq_norms = np.einsum('vd,vd->v', vectors, vectors)

  def distances(ids):
    sq = sq_norms[ids, None] + sq_norms - 2 * (vectors[ids] @ vectors.T)
    return np.sqrt(np.maximum(sq, 0))

  if name == 'multivariate_laplace':
    draw = lambda ids: np.argmin(sq_norms / 2 - (vectors[ids] + numpy_noise(
        rng, len(ids), vectors.shape[1], params.epsilon)) @ vectors.T, axis=1)
  elif name in GEOMETRIC:
    draw = lambda ids: _among_candidates(rng, distances(ids), _noise(
        name, params, rng))
  else:
    draw = lambda ids: _by_weights(rng, distances(ids), params)
  return _in_batches(draw)


def from_table(name, params, rng):
  """ids -> ids by a look-up of the nearest words and their distances.

  Args:
    name: one of `GEOMETRIC`.
    params: of its ``calibrate``.
    rng: NumPy Generator.
  """
  params = jax.tree.map(np.asarray, params)
  near, noise = params.neighbor_ids, _noise(name, params, rng)
  distance = np.concatenate([
      _distances(params.vectors, ids, near[ids]) for ids in np.array_split(
          np.arange(len(near)), -(-len(near) // _BATCH))])
  rate = math.log(len(near))

  def draw(ids):
    count = rng.poisson(rate, len(ids))
    whole = (count < 1) | (count > near.shape[1])  # K = V
    columns = max(1, count[~whole].max(initial=1))
    noisy = distance[ids, :columns] + noise((len(ids), columns))
    noisy[np.arange(columns) >= count[:, None]] = np.inf
    out = near[ids, np.argmin(noisy, axis=1)]
    for row in np.flatnonzero(whole):
      gaps = np.linalg.norm(params.vectors - params.vectors[ids[row]], axis=1)
      out[row] = np.argmin(gaps + noise(len(gaps)))
    return out

  return _in_batches(draw)


def _in_batches(draw):
  return lambda ids: np.concatenate([draw(ids[i:i + _BATCH])
                                     for i in range(0, len(ids), _BATCH)])


def _distances(vectors, ids, near):
  """Distances of words to their nearest ones, float32 [B, K]."""
  return np.linalg.norm(vectors[ids, None] - vectors[near], axis=-1)


def numpy_noise(rng, num, dim, epsilon):
  """Multivariate Laplace noise, float32 [num, D]."""
  noise = rng.standard_normal((num, dim), np.float32)
  noise /= np.linalg.norm(noise, axis=1, keepdims=True)
  radius = rng.standard_gamma(dim, (num, 1), np.float32)
  return noise * radius / np.float32(epsilon)


def _noise(name, params, rng):
  """shape -> noise of the candidates."""
  if name == 'gumbel_exponential':
    # A Gumbel is -log of an exponential; rng.gumbel is half as fast.
    return lambda shape: np.log(rng.standard_exponential(shape)) / float(
        params.rate)
  scale, bound = float(params.scale), float(params.bound)
  low, high = np.exp(-np.exp([bound / scale, -bound / scale]))
  return lambda shape: -scale * np.log(-np.log(rng.uniform(low, high, shape)))


def _among_candidates(rng, distance, noise):
  """Arg-min of noisy distances to the K nearest words, K Poisson(ln V)."""
  num, num_words = distance.shape
  near = np.argpartition(distance, _NEAR, axis=1)[:, :_NEAR]
  near_distance = np.take_along_axis(distance, near, axis=1)
  order = np.argsort(near_distance, axis=1)
  count = rng.poisson(math.log(num_words), num)
  noisy = np.take_along_axis(near_distance, order, axis=1) + noise(near.shape)
  noisy[np.arange(_NEAR) >= count[:, None]] = np.inf
  best = np.take_along_axis(order, np.argmin(noisy, axis=1)[:, None], axis=1)
  out = np.take_along_axis(near, best, axis=1)[:, 0]
  for row in np.flatnonzero((count < 1) | (count > _NEAR)):  # K = V
    out[row] = np.argmin(distance[row] + noise(num_words))
  return out


def _by_weights(rng, distance, params):
  """Inverse CDF of the weights of all words."""
  weights = np.exp(-params.rate * np.minimum(distance, params.cap))
  total = np.cumsum(weights, axis=1, dtype=np.float64)
  target = rng.random((len(distance), 1)) * total[:, -1:]
  return np.argmax(total > target, axis=1)
