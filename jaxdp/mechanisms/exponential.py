r"""The law :math:`P(y \mid w) \propto e^{-\rho \min(d(w, y), c)}`, all words.

SanText, TEM and both forms of ``gumbel_exponential`` are this law. Device:
:func:`draw` by inverse CDF in float64, one row of weights for each *distinct*
word of the batch and never V draws a token. Host: :func:`log_prob`.

The float64 part is scoped by ``jax.enable_x64`` inside the jitted function, so
callers need no global switch; a device without float64 cannot run it.

There is no table of neighbours here: at small budgets most of the law lies
beyond any such table (on 27,958 GloVe words at epsilon 3, by
``santext.log_prob``, 71% of it is on none of the 64 nearest); the normaliser
takes all distances anyway.

References: Yue et al. (2021), Section 4.1; McSherry & Talwar (2007).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special as sp_special

from jaxdp.mechanisms import calibration

_TOKENS = 256  # tokens drawn at once from a block of rows
_TILE, _CPU_TILE = 2**13, 2**10  # words whose distances are taken at once
_CLOSE = 2.**-10  # d^2 / (|x|^2 + |y|^2) below which differences are taken


def log_prob(ids, vectors, *, rate, cap=math.inf):
  """Returns log Pr(output = column), host float64 [B, V].

  Args:
    ids: int ``[B]``.
    vectors: float32 ``[V, D]``.
    rate: rho > 0, in 1/distance.
    cap: distances above it count as it; infinite for none.
  """
  distance = calibration.l2_distances(ids, vectors)
  logits = -float(rate) * np.minimum(distance, float(cap))
  return logits - sp_special.logsumexp(logits, axis=-1, keepdims=True)


def draw(words, ids, vectors, *, rate, cap, active=None, columns=None):
  """Draws one output for each token. Device, jittable.

  Args:
    words: uint32 ``[B, 2]``, 64 random bits a token.
    ids: int32 ``[B]``.
    vectors: float32 ``[V, D]``.
    rate: float32 ``[]``, in 1/distance.
    cap: float32 ``[]``, in distance units; infinite for none.
    active: bool ``[B]``; tokens that are not cost nothing and get 0. None for
      all.
    columns: int32 ``[S]``, the words that may come out; None for all.

  Returns:
    int32 ``[B]``. A word keeps its probability to about 2**-53, and a distance
    11 digits of the 16 of float64.
  """
  num_tokens = ids.shape[0]
  num_words = vectors.shape[0] if columns is None else columns.shape[0]
  active = jnp.ones(ids.shape, bool) if active is None else active
  order = jnp.argsort(jnp.where(active, ids, vectors.shape[0]))
  sorted_ids, sorted_active = ids[order], active[order]
  is_new = jnp.concatenate([jnp.ones((1,), bool),
                            sorted_ids[1:] != sorted_ids[:-1]]) & sorted_active
  num_active = jnp.sum(active, dtype=jnp.int32)
  row_of = jnp.cumsum(is_new, dtype=jnp.int32) - 1
  num_rows = jnp.sum(is_new, dtype=jnp.int32)
  block_rows = min(64, num_tokens, max(16, 2**20 // num_words))
  # starts[r]: first sorted token of distinct word r; num_active past the last.
  starts = jnp.nonzero(is_new, size=num_tokens, fill_value=num_tokens)[0]
  starts = jnp.pad(starts.astype(jnp.int32), (0, block_rows + 1),
                   constant_values=num_tokens)
  starts = jnp.minimum(starts, num_active)
  words = words[order]

  def row_block(i, out):
    first_row = i * block_rows
    firsts = jax.lax.dynamic_slice(starts, (first_row,), (block_rows + 1,))
    row_ids = sorted_ids[jnp.minimum(firsts[:-1], num_tokens - 1)]
    law = _block_law(row_ids, vectors, rate, cap, columns)
    first, last = firsts[0], firsts[-1]

    def token_tile(j, out):
      at = first + j * _TOKENS + jnp.arange(_TOKENS, dtype=jnp.int32)
      token = jnp.minimum(at, num_tokens - 1)
      drawn = _invert(law, row_of[token] - first_row, words[token], num_words)
      return out.at[jnp.where(at < last, at, num_tokens)].set(
          drawn, mode='drop')

    return jax.lax.fori_loop(0, -((first - last) // _TOKENS), token_tile, out)

  out = jnp.zeros((num_tokens,), jnp.int32)
  out = jax.lax.fori_loop(0, -(-num_rows // block_rows), row_block, out)
  out = jnp.zeros_like(out).at[order].set(out)
  return out if columns is None else jnp.where(active, columns[out], 0)


def _block_law(row_ids, vectors, rate, cap, columns):
  """Weights [U, G, W] and cumulative group sums [U, G], float64.

  W is near sqrt(V): inverting first over groups, then within one, costs
  2 sqrt(V) a token where a flat inversion costs V.
  """
  num_words = vectors.shape[0] if columns is None else columns.shape[0]
  width = 2 ** math.ceil(math.log2(max(num_words, 2)) / 2)
  # On a CPU a tile in float64 stays in the cache.
  most = _CPU_TILE if jax.default_backend() == 'cpu' else _TILE
  tile = width * max(1, min(most, num_words) // width)
  with jax.enable_x64(True):
    distance = _distances(row_ids, vectors, columns, tile)
    distance = jnp.minimum(distance, cap.astype(jnp.float64))
    if columns is not None:
      # A word that may not come out itself can be far from all that may: then
      # every weight of its row would underflow.
      distance -= jnp.min(distance, axis=1, keepdims=True)
    weights = jnp.exp(-rate.astype(jnp.float64) * distance)
    real = jnp.arange(distance.shape[1], dtype=jnp.int32) < num_words
    weights = jnp.where(real[None], weights, 0.)
    weights = weights.reshape(-1, distance.shape[1] // width, width)
    return weights, jnp.cumsum(jnp.sum(weights, axis=2), axis=1)


def _distances(row_ids, vectors, columns, tile):
  """Euclidean distances [U, S] in float64; call inside an x64 scope.

  S is rounded up to whole tiles; the last word stands in for those beyond.
  """
  num_words = vectors.shape[0] if columns is None else columns.shape[0]
  points = vectors[row_ids].astype(jnp.float64)
  sq_norms = jnp.sum(points * points, axis=1)
  ones = jnp.ones((vectors.shape[1],), jnp.float64)
  matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

  # By tiles: a float64 copy of the table would be twice its size.
  def one(start):
    at = jnp.minimum(start + jnp.arange(tile, dtype=jnp.int32), num_words - 1)
    names = at if columns is None else columns[at]
    rows = vectors[names].astype(jnp.float64)
    both = sq_norms[:, None] + matmul(rows * rows, ones)[None]
    gram = both - 2 * matmul(points, rows.T)
    own = row_ids[:, None] == names[None]
    # The Gram form loses the digits of both / gram: not of words so close.
    close = jnp.any((gram < _CLOSE * both) & ~own)
    sq_distance = jax.lax.cond(
        close, lambda: jax.lax.map(
            lambda point: matmul(jnp.square(rows - point[None]), ones), points),
        lambda: gram)
    return jnp.where(own, 0., jnp.sqrt(jnp.maximum(sq_distance, 0.)))

  starts = jnp.arange(0, num_words, tile, dtype=jnp.int32)
  out = jax.lax.map(one, starts)
  return jnp.moveaxis(out, 0, 1).reshape(len(row_ids), -1)


def _invert(law, row, words, num_words):
  """Inverse CDF of the block's laws at 64 random bits; int32 [T]."""
  weights, cumulative = law
  width = weights.shape[2]
  with jax.enable_x64(True):
    high, low = words[:, 0].astype(jnp.float64), words[:, 1].astype(jnp.float64)
    u = (high + (low + 0.5) * 2.**-32) * 2.**-32
    mine = cumulative[row]
    target = u * mine[:, -1]
    group = jnp.sum(mine <= target[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, mine.shape[1] - 1)
    before = jnp.where(group > 0, jnp.take_along_axis(
        mine, jnp.maximum(group - 1, 0)[:, None], axis=1)[:, 0], 0.)
    within = jnp.cumsum(weights[row, group], axis=1)
    place = jnp.sum(within <= (target - before)[:, None], axis=1,
                    dtype=jnp.int32)
    return jnp.minimum(group * width + jnp.minimum(place, width - 1),
                       num_words - 1).astype(jnp.int32)
