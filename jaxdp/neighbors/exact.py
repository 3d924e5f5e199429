"""Squared distances in float64 and in double-double, and who is least.

Device; traced with 64-bit types on (``jax.enable_x64``), whatever the caller's
setting. Integers here are 32-bit by name: a cached jnp function (argmax,
nonzero) that was traced to int64 does not lower outside.

Double-double holds a number as an unevaluated sum ``high + low`` of two
float64, about 100 bits: two distances that differ in real arithmetic compare
rightly, and equal ones compare equal, while the squares of a row's differences
span at most 106 bits.

Shape letters: ``B`` queries, ``V`` rows of the table, ``D`` dimensions.
"""

import jax.numpy as jnp
from jax import lax
import numpy as np

TILE = 1024  # rows of the table in one step over all of them
INT32_MAX = np.iinfo(np.int32).max


def unit64(dim):
  """Relative gap beyond which two float64 sums of squares are in true order."""
  # Four times the D + 3 roundings of a sum of squared differences.
  return (dim + 4) * 2.**-51


def sq_distances(queries, rows):
  """Float64 squared distances over the last axis, from differences."""
  diff = queries.astype(jnp.float64) - rows.astype(jnp.float64)
  return jnp.sum(diff * diff, axis=-1)


def sq_distances_to(query, rows):
  """Float64 squared distances of one query ``[D]`` to rows ``[R, D]``."""
  diff = rows.astype(jnp.float64) - query.astype(jnp.float64)[None]
  # A product with ones: XLA's CPU code adds up a row one term at a time.
  return jnp.matmul(diff * diff, jnp.ones((diff.shape[1],), jnp.float64),
                    precision=lax.Precision.HIGHEST)


def two_sum(a, b):
  """The float64 sum and its rounding error, exactly."""
  total = a + b
  b_rounded = total - a
  return total, (a - (total - b_rounded)) + (b - b_rounded)


def precise_sq_distances(queries, rows):
  """Squared distances as unevaluated sums ``high + low`` of two float64."""
  diff, diff_low = two_sum(
      queries.astype(jnp.float64), -rows.astype(jnp.float64))
  # Halves of 26 bits have exact products; a multiplication by 2^27 + 1, the
  # usual way to split, does not survive contraction to fused multiply-adds.
  head = lax.reduce_precision(diff, exponent_bits=11, mantissa_bits=25)
  tail = diff - head
  square = diff * diff
  square_low = ((head * head - square) + 2 * head * tail) + tail * tail
  square_low = square_low + 2 * diff * diff_low

  def add(a, b):
    high, low = two_sum(a[0], b[0])
    low = low + (a[1] + b[1])
    total = high + low
    return total, low - (total - high)

  zero = jnp.zeros((), jnp.float64)
  return lax.reduce(
      (square, square_low), (zero, zero), add, (square.ndim - 1,))


def rank(query, vectors, ids, live, k):
  """The ids of the k least among the live ``ids``, by double-double."""
  high, low = precise_sq_distances(query[None, :], vectors[ids])
  return smallest(jnp.where(live, high, jnp.inf), low, ids, k)


def _tile(vectors, index):
  """First row and rows of a tile; the last one starts early."""
  num = vectors.shape[0]
  size = min(TILE, num)
  start = jnp.minimum(index * size, num - size)
  return start, lax.dynamic_slice_in_dim(vectors, start, size)


def _num_tiles(vectors):
  return np.int32(-(-vectors.shape[0] // TILE))


def all_sq_distances(query, vectors, finish=lambda sums: sums):
  """Float64 squared distances of one query ``[D]`` to all rows, ``[V]``.

  ``finish`` is applied to the sums of each tile.
  """
  def step(index, out):
    start, rows = _tile(vectors, index)
    sums = finish(sq_distances_to(query, rows))
    return lax.dynamic_update_slice_in_dim(out, sums, start, 0)

  empty = finish(jnp.zeros((vectors.shape[0],), jnp.float64))
  return lax.fori_loop(0, _num_tiles(vectors), step, empty)


def exhaustive(query, vectors, k):
  """The k nearest of all rows, by float64 and, where close, double-double."""
  num, dim = vectors.shape
  sums = all_sq_distances(query, vectors)
  kth = jnp.min(sums) if k == 1 else lax.sort(sums)[k - 1]
  cutoff = kth * (1 + unit64(dim))

  def fine(index, pair):
    start, rows = _tile(vectors, index)
    old = [lax.dynamic_slice_in_dim(a, start, len(rows)) for a in pair]
    new = lax.cond(jnp.any(old[0] <= cutoff),
                   lambda: precise_sq_distances(query[None, :], rows),
                   lambda: tuple(old))
    return tuple(lax.dynamic_update_slice_in_dim(a, b, start, 0)
                 for a, b in zip(pair, new))

  high, low = lax.fori_loop(
      0, _num_tiles(vectors), fine, (sums, jnp.zeros_like(sums)))
  return smallest(high, low, jnp.arange(num, dtype=jnp.int32), k)


def smallest(high, low, ids, k):
  """The ids of the k least ``(high, low, id)``, in order."""
  if k > 1:
    return lax.sort((high, low, ids), num_keys=3)[2][:k]
  first = high == jnp.min(high)
  low = jnp.where(first, low, jnp.inf)
  return jnp.min(jnp.where(low == jnp.min(low), ids, INT32_MAX))[None]
