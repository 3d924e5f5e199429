r"""Exact nearest neighbours on plain arrays: the hot kernel.

``nearest`` and ``k_nearest`` run on the device and may be called under
``jax.jit``; ``distance_range`` runs on the host. Tiling and sharding are hidden
inside, and no array of shape ``[B, V]`` is ever formed.

*Exact* means: the answer is the arg-min of the real-arithmetic Euclidean
distance between the float32 inputs, ties going to the lowest index. A row is
answered in up to three steps, each only for the rows the one before could not
decide:

1. float32 scores ``|x|^2 / 2 - x . q``, a running minimum for each lane of the
   vocabulary tiles, and a rigorous rounding bound that says which rows of the
   table may still be the nearest;
2. a few survivors: squared differences in double-double arithmetic (about 100
   bits), which decides near-ties and recognises exact ties;
3. too many survivors: float64 differences over the whole table, and
   double-double among those that float64 cannot separate.

So near-duplicates, huge norms and badly scaled tables cost time, not a wrong
answer. Range: entries are finite; subnormal ones (below 2^-126) count as zero
where the device flushes them; a distance beyond 3.4e38 is returned as infinity,
with the right id. Double-double is itself a rounded arithmetic: it holds ties
exactly while the squares of a row's differences span at most 106 bits. The
bound is proved for float32 arithmetic (CPU, NVIDIA); the bfloat16 passes of a
TPU have not been checked.

Shape letters: ``B`` queries, ``V`` rows of the table, ``D`` dimensions, ``K``
neighbours, ``T`` lanes of a tile.

  >>> table = jnp.array([[0., 0.], [3., 4.], [0., 1.]])
  >>> ids, distances = nearest(jnp.array([[3., 3.]]), table)
  >>> int(ids[0]), float(distances[0])
  (1, 1.0)
  >>> distance_range(table)
  (1.0, 5.0)

References: the lane-wise minimum is that of Chern et al. (2022), "TPU-KNN",
https://arxiv.org/abs/2206.14286, with one lane a column, which is exact; the
rounding bound is eq. (3.5) of Higham (2002), "Accuracy and Stability of
Numerical Algorithms".
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_NUM_CANDIDATES = 8  # lanes looked at closely for each query
_SLACK = 8  # candidates of k_nearest beyond k
_GROUP = 16  # columns of a group in k_nearest
_EXACT_TILE = 1024  # rows of the table in one step of the exhaustive path
_BLOCK_BYTES = 2**26  # what one block of k_nearest may hold in each array
_INT32_MAX = np.iinfo(np.int32).max


class _Tiling(NamedTuple):
  lanes: int  # columns of one score tile
  queries: int  # rows of one score tile


# CPU: tiles stay in the L2 cache. Elsewhere: fewer launches, L2 of 50 MB.
_TILINGS = {'cpu': _Tiling(512, 1024)}
_ACCELERATOR_TILING = _Tiling(8192, 1024)


class _Table(NamedTuple):
  vectors: jax.Array  # [V, D], as given
  scale: jax.Array  # [], power of two: max |vectors| * scale is about 1
  half: jax.Array  # [V], |x|^2 / 2 of the scaled rows
  norm: jax.Array  # [V], |x| of the scaled rows


class _Block(NamedTuple):
  queries: jax.Array  # [N, D], scaled
  ratio: jax.Array  # [N], scale of the query over that of the table
  slope: jax.Array  # [N], rounding bound a unit of the row's norm


class _Counts(NamedTuple):
  settled: jax.Array  # [], queries decided in double-double
  exhausted: jax.Array  # [], queries searched exhaustively


def nearest(queries, vectors, *, mesh=None, precision='auto'):
  r"""Finds the nearest row of a table for each query, exactly.

  Args:
    queries: points, float32 ``[B, D]``, finite; other dtypes are cast first.
    vectors: the table, float32 ``[V, D]``, finite, ``V >= 1``.
    mesh: None, or a ``jax.sharding.Mesh``: queries are split over its first
      axis, the table is replicated. The ids do not depend on it.
    precision: arithmetic of the first step, ``'auto'`` or ``'float32'``. The
      answer does not depend on it.

  Returns:
    ``(ids, distances)``: int32 ``[B]``, the row of least real-arithmetic
    Euclidean distance, the lowest index among ties; float32 ``[B]``, that
    distance (unsquared).

  Raises:
    ValueError: shapes do not fit, or ``precision`` is unknown; outside ``jit``
      also if an entry is not finite.

  Example:
    >>> ids, _ = nearest(jnp.zeros((1, 1)), jnp.array([[1.], [-1.]]))
    >>> ids.tolist()
    [0]
  """
  if precision not in ('auto', 'float32'):
    raise ValueError(
        f"precision={precision!r} is unknown; use 'auto' or 'float32'")
  queries, vectors = _checked(queries, vectors)
  ids, distances, _ = _search(mesh)(queries, vectors)
  return ids, distances


def k_nearest(queries, vectors, k):
  r"""Finds the k nearest rows of a table for each query, exactly.

  A query that is itself a row of the table has that row first, at distance 0
  (the lowest such row, if the table holds it more than once).

  Args:
    queries: points, float32 ``[B, D]``, finite; other dtypes are cast first.
    vectors: the table, float32 ``[V, D]``, finite.
    k: number of neighbours, ``1 <= k <= V``; a Python int.

  Returns:
    ``(ids, distances)``: int32 and float32 ``[B, k]``, ascending by
    real-arithmetic Euclidean distance, ties by index.

  Raises:
    ValueError: shapes do not fit or ``k`` is out of range; outside ``jit``
      also if an entry is not finite.

  Example:
    >>> ids, distances = k_nearest(
    ...     jnp.zeros((1, 1)), jnp.array([[5.], [0.], [-1.]]), 2)
    >>> ids.tolist(), distances.tolist()
    ([[1, 2]], [[0.0, 1.0]])
  """
  queries, vectors = _checked(queries, vectors)
  if not 1 <= k <= vectors.shape[0]:
    raise ValueError(f'k={k} must lie in [1, {vectors.shape[0]}]; the table has'
                     f' {vectors.shape[0]} rows')
  ids, distances, _ = _k_search(queries, vectors, int(k))
  return ids, distances


def distance_range(vectors):
  r"""Computes the least and the greatest distance between distinct rows.

  Float64 products with a rigorous rounding bound find the pairs in question;
  the result comes from float64 differences of those pairs. Rows that are equal
  count once, so the minimum is always positive.

  Args:
    vectors: the table, float32 ``[V, D]``, finite, with two distinct rows.

  Returns:
    ``(minimum, diameter)``, Python floats, unsquared.

  Raises:
    ValueError: not of rank 2, not finite, or fewer than two distinct rows.

  Example:
    >>> distance_range([[0.], [1.], [1.], [4.]])
    (1.0, 4.0)
  """
  vectors = np.asarray(vectors, np.float32)
  if vectors.ndim != 2:
    raise ValueError(f'vectors of shape {vectors.shape} must be [V, D]')
  if not np.isfinite(vectors).all():
    raise ValueError('vectors has entries that are not finite; remove them')
  rows = _distinct(vectors) if vectors.size else vectors[:0]
  if len(rows) < 2:
    raise ValueError(
        f'vectors of shape {vectors.shape} has {len(rows)} distinct row(s); a '
        'distance range takes two')
  low, high = _sq_range(rows.astype(np.float64))
  return math.sqrt(low), math.sqrt(high)


def _checked(queries, vectors):
  """Both arrays as float32 of fitting shapes; values too, where concrete."""
  arrays = []
  for name, array in (('queries', queries), ('vectors', vectors)):
    array = jnp.asarray(array, jnp.float32)
    if array.ndim != 2 or array.shape[1] == 0:
      raise ValueError(
          f'{name} of shape {array.shape} must be [rows, D] with D >= 1')
    if not isinstance(array, jax.core.Tracer) and not _all_finite(array):
      raise ValueError(f'{name} has entries that are not finite; they have no '
                       'nearest row')
    arrays.append(array)
  queries, vectors = arrays
  if vectors.shape[0] == 0 or queries.shape[1] != vectors.shape[1]:
    raise ValueError(
        f'vectors of shape {vectors.shape} must be [V, {queries.shape[1]}] with'
        f' V >= 1, as queries has shape {queries.shape}')
  return queries, vectors


@jax.jit
def _all_finite(array):
  return jnp.isfinite(array).all()


@functools.cache
def _search(mesh):
  """The compiled search: whole on one device, or queries split over a mesh."""
  if mesh is None:
    return jax.jit(_nearest)
  axis, spec = mesh.axis_names[0], jax.sharding.PartitionSpec

  def sharded(queries, vectors):
    num = queries.shape[0]
    padding = -num % mesh.shape[axis]
    ids, distances, counts = jax.shard_map(
        lambda q, x: jax.tree.map(jnp.atleast_1d, _nearest(q, x)),
        mesh=mesh, in_specs=(spec(axis), spec()), out_specs=spec(axis),
        check_vma=False)(jnp.pad(queries, ((0, padding), (0, 0))), vectors)
    return ids[:num], distances[:num], jax.tree.map(jnp.sum, counts)

  return jax.jit(sharded)


def _nearest(queries, vectors):
  """Returns ids, distances and how many queries took the slower steps."""
  tiling = _TILINGS.get(jax.default_backend(), _ACCELERATOR_TILING)
  table = _prepare(vectors)
  block_fn = functools.partial(_nearest_block, table, tiling.lanes)
  ids, distances, counts = _map_blocks(block_fn, queries, tiling.queries)
  return ids[:, 0], distances[:, 0], counts


@functools.partial(jax.jit, static_argnums=2)
def _k_search(queries, vectors, k):
  """Returns ids, distances and how many queries took the slower steps."""
  num, dim = vectors.shape
  width = min(k + _SLACK, num)
  most = 64 if jax.default_backend() == 'cpu' else 1024
  size = min(most, _BLOCK_BYTES // (8 * width * dim),
             _BLOCK_BYTES // (4 * num))
  table = _prepare(vectors)
  padding = _GROUP - num % _GROUP  # at least one column more than rows
  scaled = jnp.pad(vectors * table.scale, ((0, padding), (0, 0)))
  block_fn = functools.partial(_k_nearest_block, table, scaled, k, width)
  return _map_blocks(block_fn, queries, max(1, size))


def _map_blocks(block_fn, queries, size):
  """Runs ``block_fn(queries, valid)`` over blocks of at most ``size``."""
  num = queries.shape[0]
  num_blocks = max(1, -(-num // size))
  size = max(1, -(-num // num_blocks))
  queries = jnp.pad(queries, ((0, num_blocks * size - num), (0, 0)))
  valid = (jnp.arange(num_blocks * size) < num).reshape(num_blocks, size)
  ids, distances, counts = lax.map(
      lambda args: block_fn(*args),
      (queries.reshape(num_blocks, size, queries.shape[1]), valid))
  ids = ids.reshape(num_blocks * size, -1)[:num]
  distances = distances.reshape(num_blocks * size, -1)[:num]
  return ids, distances, jax.tree.map(jnp.sum, counts)


# Step 1: float32 scores with a rounding bound.


def _inverse_power(size):
  """The power of two that brings ``size`` into [1/2, 1), within float32."""
  exponent = lax.bitcast_convert_type(size, jnp.int32) >> 23
  exponent = jnp.clip(253 - exponent, 1, 254)
  return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _norm(scaled):
  # Squares below 2^-126 are flushed; the last term stands in for them.
  return (jnp.sqrt(jnp.sum(scaled * scaled, axis=-1))
          + scaled.shape[-1] * 2.**-62)


def _prepare(vectors):
  scale = _inverse_power(jnp.max(jnp.abs(vectors)))
  half = jnp.sum(jnp.square(vectors * scale), axis=-1) / 2
  return _Table(vectors, scale, half, _norm(vectors * scale))


def _prepare_block(table, queries):
  # Each query has its own power of two: one huge query spoils no other.
  scale = jnp.minimum(
      _inverse_power(jnp.max(jnp.abs(queries), axis=-1)), table.scale)
  scaled = queries * scale[:, None]
  return _Block(scaled, scale / table.scale,
                _unit(queries.shape[1]) * _norm(scaled))


def _unit(dim):
  # Twice the D + 4 roundings of half a unit a score goes through, in any order
  # and fused or not: the other half is for the bound's own arithmetic and for
  # the norms. It takes float32 products: HIGHEST on a CPU or an NVIDIA GPU.
  return (dim + 8) * 2.**-23


def _error(block, half, norm):
  """Bounds the rounding error of scores of rows with this half and norm."""
  dim = block.queries.shape[1]
  relative = norm * block.slope[:, None] + _unit(dim) * (
      half * block.ratio[:, None])
  return relative + dim * 2.**-120  # underflow, in units of the scaled data


def _lower_scores(block, scaled, half, norm):
  """A float32 lower bound of the score of each row of ``scaled``, ``[N, T]``.

  The score, (distance^2 - |q|^2) / 2, is in units of both scales.
  """
  products = lax.dot_general(
      block.queries, scaled, (((1,), (1,)), ((), ())),
      precision=lax.Precision.HIGHEST)
  half, norm = half[None, :], norm[None, :]
  return half * block.ratio[:, None] - products - _error(block, half, norm)


def _nearest_block(table, lanes, queries, valid):
  block = _prepare_block(table, queries)
  best, second, rows = _scan_tiles(table, block, lanes)
  ids, low, rest = _least_lanes(best, rows)
  high = low + 2 * _error(block, table.half[ids], table.norm[ids])
  least = jnp.min(high, axis=-1)
  live = low <= least[:, None]
  certified = jnp.minimum(rest, jnp.min(second, axis=-1)) > least
  several = jnp.sum(live, axis=-1) > 1
  return _finish(table.vectors, queries, ids[:, :1], ids, live,
                 valid & certified & several, valid & ~certified)


def _scan_tiles(table, block, lanes):
  """Two least lower bounds of each lane, and the row of the least."""
  num = table.vectors.shape[0]
  lanes = min(lanes, num)
  size = block.queries.shape[0]

  def step(carry, tile):
    best, second, rows = carry
    # The last tile starts early rather than late: nothing is padded, and the
    # rows that an earlier tile has seen are masked.
    start = jnp.minimum(tile * lanes, num - lanes)
    vectors, half, norm = (lax.dynamic_slice_in_dim(a, start, lanes)
                           for a in (table.vectors, table.half, table.norm))
    low = _lower_scores(block, vectors * table.scale, half, norm)
    new = start + jnp.arange(lanes, dtype=jnp.int32) >= tile * lanes
    low = jnp.where(new[None, :], low, jnp.inf)
    second = jnp.minimum(second, jnp.maximum(best, low))
    rows = jnp.where(low < best, start, rows)
    return (jnp.minimum(best, low), second, rows), None

  infinite = jnp.full((size, lanes), jnp.inf, jnp.float32)
  rows = jnp.zeros((size, lanes), jnp.int32)
  (best, second, rows), _ = lax.scan(
      step, (infinite, infinite, rows),
      jnp.arange(-(-num // lanes), dtype=jnp.int32))
  return best, second, rows + jnp.arange(lanes, dtype=jnp.int32)[None, :]


def _least_lanes(best, rows):
  """The rows and bounds of the least lanes, and the least bound left over."""
  lane = jnp.arange(best.shape[1], dtype=jnp.int32)[None, :]

  def take(best, _):
    low = jnp.min(best, axis=-1)
    first = jnp.min(
        jnp.where(best == low[:, None], lane, _INT32_MAX), axis=-1)
    taken = lane == first[:, None]
    row = jnp.max(jnp.where(taken, rows, 0), axis=-1)
    return jnp.where(taken, jnp.inf, best), (row, low)

  # Masked minima, not top_k: on a CPU top_k costs as much as the search.
  best, (ids, low) = lax.scan(take, best, length=_NUM_CANDIDATES)
  return ids.T, low.T, jnp.min(best, axis=-1)


def _k_nearest_block(table, scaled, k, width, queries, valid):
  """The least of the lower bounds, by groups, ranked by float64 differences."""
  block = _prepare_block(table, queries)
  num, dim = table.vectors.shape
  padding = (0, scaled.shape[0] - num)
  low = _lower_scores(block, scaled, jnp.pad(table.half, padding),
                      jnp.pad(table.norm, padding))
  low = jnp.where(jnp.arange(low.shape[1])[None, :] < num, low, jnp.inf)
  # The least width + 1 lie in the width + 1 groups with the least minima.
  groups = low.reshape(low.shape[0], -1, _GROUP)
  num_groups = min(width + 1, groups.shape[1])
  _, group = lax.top_k(-jnp.min(groups, axis=-1), num_groups)
  low = jnp.take_along_axis(groups, group[:, :, None], axis=1)
  lane = jnp.arange(_GROUP, dtype=jnp.int32)
  ids = group[:, :, None] * _GROUP + lane[None, None, :]
  low, ids = low.reshape(low.shape[0], -1), ids.reshape(low.shape[0], -1)
  # Without the barrier XLA turns a top_k that is sliced again into a sort.
  negative, index = lax.optimization_barrier(lax.top_k(-low, width + 1))
  ids = jnp.take_along_axis(ids, index[:, :width], axis=-1)
  low, rest = -negative[:, :width], -negative[:, width]

  high = low + 2 * _error(block, table.half[ids], table.norm[ids])
  certified = rest > lax.sort(high)[:, k - 1]
  with jax.enable_x64(True):
    sq_distances = _sq_distances(queries[:, None, :], table.vectors[ids])
    sq_distances, ids = lax.sort((sq_distances, ids), num_keys=2)
    close = sq_distances[:, 1:] <= sq_distances[:, :-1] * (1 + _unit64(dim))
    several = jnp.any(close[:, :k], axis=-1)
  return _finish(table.vectors, queries, ids[:, :k], ids,
                 jnp.ones(ids.shape, bool), valid & certified & several,
                 valid & ~certified)


# Steps 2 and 3: float64 and double-double, traced with 64-bit types on. There
# integers are 32-bit by name: a cached jnp function (argmax, nonzero) that was
# traced to int64 does not lower outside.


def _finish(vectors, queries, found, ids, live, settle, exhaust):
  """Redoes the rows of ``settle`` and ``exhaust``; adds the distances."""
  k = found.shape[1]
  counts = _Counts(jnp.sum(settle, dtype=jnp.int32),
                   jnp.sum(exhaust, dtype=jnp.int32))
  index = jnp.arange(len(settle), dtype=jnp.int32)

  # One row a turn: a vmapped cond would run the slow branch for every row.
  def redo(carry):
    found, left = carry
    row = jnp.min(jnp.where(left, index, _INT32_MAX))
    again = lax.cond(
        exhaust[row],
        lambda: _exhaustive(queries[row], vectors, k),
        lambda: _rank(queries[row], vectors, ids[row], live[row], k))
    return found.at[row].set(again), left & (index != row)

  with jax.enable_x64(True):
    found, _ = lax.while_loop(
        lambda carry: jnp.any(carry[1]), redo, (found, settle | exhaust))
    sq_distances = _sq_distances(queries[:, None, :], vectors[found])
    distances = jnp.sqrt(sq_distances).astype(jnp.float32)
  return found, distances, counts


def _rank(query, vectors, ids, live, k):
  high, low = _precise_sq_distances(query[None, :], vectors[ids])
  return _smallest(jnp.where(live, high, jnp.inf), low, ids, k)


def _exhaustive(query, vectors, k):
  """The k nearest of all rows, by float64 and, where close, double-double."""
  num, dim = vectors.shape
  size = min(_EXACT_TILE, num)
  num_tiles = np.int32(-(-num // size))

  def tile(index):
    start = jnp.minimum(index * size, num - size)
    return start, lax.dynamic_slice_in_dim(vectors, start, size)

  def coarse(index, sq_distances):
    start, rows = tile(index)
    return lax.dynamic_update_slice_in_dim(
        sq_distances, _sq_distances(query[None, :], rows), start, 0)

  def fine(index, pair):
    start, rows = tile(index)
    old = [lax.dynamic_slice_in_dim(a, start, size) for a in pair]
    new = lax.cond(jnp.any(old[0] <= cutoff),
                   lambda: _precise_sq_distances(query[None, :], rows),
                   lambda: tuple(old))
    return tuple(lax.dynamic_update_slice_in_dim(a, b, start, 0)
                 for a, b in zip(pair, new))

  everything = jnp.full((num,), jnp.inf, jnp.float64)
  sq_distances = lax.fori_loop(0, num_tiles, coarse, everything)
  kth = jnp.min(sq_distances) if k == 1 else lax.sort(sq_distances)[k - 1]
  cutoff = kth * (1 + _unit64(dim))
  high, low = lax.fori_loop(
      0, num_tiles, fine, (sq_distances, jnp.zeros_like(sq_distances)))
  return _smallest(high, low, jnp.arange(num, dtype=jnp.int32), k)


def _smallest(high, low, ids, k):
  """The ids of the k least ``(high, low, id)``, in order."""
  if k > 1:
    return lax.sort((high, low, ids), num_keys=3)[2][:k]
  first = high == jnp.min(high)
  low = jnp.where(first, low, jnp.inf)
  return jnp.min(jnp.where(low == jnp.min(low), ids, _INT32_MAX))[None]


def _unit64(dim):
  # Four times the D + 3 roundings of a sum of squared differences: two sums
  # whose quotient exceeds 1 + this are in their true order.
  return (dim + 4) * 2.**-51


def _sq_distances(queries, rows):
  diff = queries.astype(jnp.float64) - rows.astype(jnp.float64)
  return jnp.sum(diff * diff, axis=-1)


def _two_sum(a, b):
  total = a + b
  b_rounded = total - a
  return total, (a - (total - b_rounded)) + (b - b_rounded)


def _precise_sq_distances(queries, rows):
  """Squared distances as unevaluated sums ``high + low`` of two float64."""
  diff, diff_low = _two_sum(
      queries.astype(jnp.float64), -rows.astype(jnp.float64))
  # Halves of 26 bits have exact products; a multiplication by 2^27 + 1, the
  # usual way to split, does not survive contraction to fused multiply-adds.
  head = lax.reduce_precision(diff, exponent_bits=11, mantissa_bits=25)
  tail = diff - head
  square = diff * diff
  square_low = ((head * head - square) + 2 * head * tail) + tail * tail
  square_low = square_low + 2 * diff * diff_low

  def add(a, b):
    high, low = _two_sum(a[0], b[0])
    low = low + (a[1] + b[1])
    total = high + low
    return total, low - (total - high)

  zero = jnp.zeros((), jnp.float64)
  return lax.reduce(
      (square, square_low), (zero, zero), add, (square.ndim - 1,))


# The host half: distance_range.


def _distinct(vectors):
  vectors = np.ascontiguousarray(vectors + np.float32(0))  # -0 becomes 0
  rows = vectors.view(np.dtype((np.void, vectors.shape[1] * 4))).ravel()
  return vectors[np.unique(rows, return_index=True)[1]]


def _sq_range(rows, size=1024):
  """Least and greatest squared distance between distinct float64 rows."""
  num, dim = rows.shape
  sq_norms = np.einsum('vd,vd->v', rows, rows)
  # One product gives |a|^2 + |b|^2 - 2 a . b, with D + 2 terms whose absolute
  # values add up to at most 2 (|a|^2 + |b|^2).
  left = np.column_stack([rows, sq_norms, np.ones(num)])
  right = np.column_stack([-2 * rows, np.ones(num), sq_norms])
  starts = range(0, num, size)
  bounds = {i: (dim + 8) * 2.**-51 * sq_norms[i:i + size].max()
            for i in starts}
  low, high = np.inf, 0.
  for i in starts:
    for j in starts[i // size:]:
      product = left[i:i + size] @ right[j:j + size].T
      if i == j:
        product[np.tril_indices(len(product))] = np.nan
      error = bounds[i] + bounds[j]
      least, most = np.fmin.reduce(product, None), np.fmax.reduce(product, None)
      if least <= low + error:
        close = product <= min(low, least + error) + error
        low = min(low, _recomputed(rows[i:], rows[j:], close, np.min))
      if most >= high - error:
        far = product >= max(high, most - error) - error
        high = max(high, _recomputed(rows[i:], rows[j:], far, np.max))
  return low, high


def _recomputed(left, right, mask, reduce_fn):
  """Reduces the squared distances of the masked pairs, from differences."""
  first, second = np.nonzero(mask)
  step = max(1, _BLOCK_BYTES // (8 * left.shape[1]))
  parts = []
  for i in range(0, len(first), step):
    diff = left[first[i:i + step]] - right[second[i:i + step]]
    parts.append(reduce_fn(np.einsum('nd,nd->n', diff, diff)))
  return float(reduce_fn(parts))
