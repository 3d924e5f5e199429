r"""Squared distances in float64, and who is least in real arithmetic.

Device; traced with 64-bit types on (``jax.enable_x64``), whatever the caller's
setting. Indices here are 32-bit by name: a cached jnp function (argmax,
nonzero) that was traced to int64 does not lower outside.

What float64 cannot separate is compared as integers. With the query fixed,
rows are in the order of :math:`|x|^2 - 2 q \cdot x`, whose terms are products
of two float32 mantissas; their sum is a multiple of 2^-298 and is kept exactly
in limbs of 32 bits. No rounding, no order of summation and no
contraction to fused multiply-adds can change it, on any device, for any finite
float32.

Shape letters: ``B`` queries, ``V`` rows of the table, ``R`` rows of a list,
``D`` dimensions, ``K`` neighbours, ``L`` limbs.
"""

import jax
import jax.numpy as jnp
from jax import lax
import numpy as np

_TILE, _CPU_TILE = 1024, 128  # rows in one step over all of the table
INT32_MAX = np.iinfo(np.int32).max
_INT64_MAX = np.iinfo(np.int64).max

_LOWEST = 298  # minus the power of two of a product of the least subnormals
_BITS, _SHIFT = 32, 5  # of a limb; log2 of that
_MASK = 2**_BITS - 1
# The highest place is 298 + 209 + 24; one limb more has carries and the sign.
_LIMBS = (_LOWEST + 209 + 24) // _BITS + 2


def unit64(dim):
  """Relative gap beyond which two float64 sums of squares are in true order."""
  # Four times the D + 3 roundings of a sum of squared differences.
  return (dim + 4) * 2.**-51


def sq_distances(query, rows):
  """Float64 squared distances of one query ``[D]`` to rows ``[R, D]``."""
  diff = rows.astype(jnp.float64) - query.astype(jnp.float64)[None]
  # A product with ones: XLA's CPU code adds up a row one term at a time.
  return jnp.matmul(diff * diff, jnp.ones((diff.shape[1],), jnp.float64),
                    precision=lax.Precision.HIGHEST)


def exact_scores(query, rows):
  r""":math:`2^{298} (|x|^2 - 2 q \cdot x)` of rows ``[R, D]``, as integers.

  Returns:
    int64 ``[R, L]`` limbs in base 2^32, the least significant first; all but
    the last lie in [0, 2^32), the last has the sign. Equal values have equal
    limbs, and values are in the order of the limbs read from the last.
  """
  x, x_power = _mantissa(rows)
  q, q_power = _mantissa(query[None])
  value = jnp.concatenate([x * x, -(q * x)], axis=1)
  place = _LOWEST + jnp.concatenate(
      [2 * x_power, q_power + x_power + 1], axis=1)
  # Below 2^48: two pieces, so that each can be shifted within 64 bits.
  pieces = jnp.stack([value & (2**24 - 1), value >> 24], axis=-1)
  place = jnp.stack([place, place + 24], axis=-1)
  pieces = pieces << (place & (_BITS - 1)).astype(jnp.int64)
  limb = place >> _SHIFT
  row = jnp.broadcast_to(
      jnp.arange(len(rows), dtype=jnp.int32)[:, None, None], limb.shape)
  total = jnp.zeros((len(rows), _LIMBS), jnp.int64)
  total = total.at[row, limb].add(pieces & _MASK)
  return _carried(total.at[row, limb + 1].add(pieces >> _BITS))


def _mantissa(x):
  """``(m, e)`` with float32 ``x = m 2^e``: int64 and int32."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  power = (bits >> 23) & 255
  size = (bits & (2**23 - 1)) | jnp.where(power > 0, 2**23, 0)
  return (jnp.where(bits < 0, -size, size).astype(jnp.int64),
          jnp.maximum(power, 1) - 150)


def _carried(total):
  """Limbs in [0, 2^32) but for the last, of the same value."""
  def step(carry, limb):
    limb = limb + carry
    return limb >> _BITS, limb & _MASK

  carry, low = lax.scan(step, total[:, 0] * 0, total[:, :-1].T)
  return jnp.concatenate([low.T, (total[:, -1] + carry)[:, None]], axis=1)


def least(scores, ids, live, k):
  """Where the k least live ``(score, id)`` are, in order; int32 ``[K]``.

  Args:
    scores: int64 ``[R, L]`` of :func:`exact_scores`.
    ids: int32 ``[R]``; one that occurs twice is taken once.
    live: bool ``[R]``.
    k: static; R - 1 stands where fewer are live.
  """
  def narrow(step, some):
    limb = scores[:, _LIMBS - 1 - step]
    return some & (limb == jnp.min(jnp.where(some, limb, _INT64_MAX)))

  def take(live, _):
    some = lax.fori_loop(np.int32(0), np.int32(_LIMBS), narrow, live)
    best = jnp.min(jnp.where(some, ids, INT32_MAX))
    at = jnp.sum((jnp.cumsum((some & (ids == best)).astype(jnp.int32),
                             dtype=jnp.int32) == 0), dtype=jnp.int32)
    return live & (ids != best), jnp.minimum(at, np.int32(len(ids) - 1))

  return lax.scan(take, live, None, length=k)[1]


def rank(query, vectors, ids, live, k):
  """The ids of the k least among the live ``ids``, in real arithmetic."""
  return ids[least(exact_scores(query, vectors[ids]), ids, live, k)]


def _tile_rows():
  return _CPU_TILE if jax.default_backend() == 'cpu' else _TILE


def _tile(vectors, index):
  """First row and rows of a tile; the last one starts early."""
  num = vectors.shape[0]
  size = min(_tile_rows(), num)
  start = jnp.minimum(index * size, num - size)
  return start, lax.dynamic_slice_in_dim(vectors, start, size)


def _num_tiles(vectors):
  return np.int32(-(-vectors.shape[0] // _tile_rows()))


def all_sq_distances(query, vectors, finish=lambda sums: sums):
  """Float64 squared distances of one query ``[D]`` to all rows, ``[V]``.

  ``finish`` is applied to the sums of each tile.
  """
  def step(index, out):
    start, rows = _tile(vectors, index)
    sums = finish(sq_distances(query, rows))
    return lax.dynamic_update_slice_in_dim(out, sums, start, 0)

  empty = finish(jnp.zeros((vectors.shape[0],), jnp.float64))
  return lax.fori_loop(0, _num_tiles(vectors), step, empty)


def exhaustive(query, vectors, k):
  """The k nearest of all rows, in real arithmetic; int32 ``[K]``."""
  num, dim = vectors.shape
  sums = all_sq_distances(query, vectors)
  kth = jnp.min(sums) if k == 1 else lax.sort(sums)[k - 1]
  cutoff = kth * (1 + unit64(dim))

  def merge(index, best):
    start, rows = _tile(vectors, index)
    close = lax.dynamic_slice_in_dim(sums, start, len(rows)) <= cutoff
    own = start.astype(jnp.int32) + jnp.arange(len(rows), dtype=jnp.int32)

    def join():
      scores, ids, live = (jnp.concatenate(pair) for pair in zip(
          best, (exact_scores(query, rows), own, close)))
      at = least(scores, ids, live, k)
      return scores[at], ids[at], live[at]

    return lax.cond(jnp.any(close), join, lambda: best)

  # Ids of their own: none of them is a row.
  nothing = (jnp.zeros((k, _LIMBS), jnp.int64),
             num + jnp.arange(k, dtype=jnp.int32), jnp.zeros((k,), bool))
  return lax.fori_loop(np.int32(0), _num_tiles(vectors), merge, nothing)[1]
