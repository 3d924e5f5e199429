"""The k nearest rows: least lower bounds by groups, ranked in float64.

Device. A pass over the table keeps a lower bound of the least score of every
group of rows, and no score. The ``C`` groups with the least bounds are looked
into in float64; ``C`` is k and a few more. The answer is certified when the
least bound of all that was left out exceeds what the k-th nearest can be.

Shape letters: ``N`` queries of a block, ``V`` rows of the table, ``D``
dimensions, ``K`` neighbours, ``C`` candidates.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.neighbors import exact
from jaxdp.neighbors import resolve
from jaxdp.neighbors import rounding
from jaxdp.neighbors import scan

_SLACK = 6  # groups, and rows, beyond k
_GROUP = 8  # rows of a group
_BLOCK_BYTES = 2**26  # what the bounds of one block may take
_GATHER_BYTES = 2**26  # what the rows looked into at once may take


def block_size(table):
  """Most queries of one block."""
  most = 512 if jax.default_backend() == 'cpu' else 2048
  return max(1, min(most, _BLOCK_BYTES * _GROUP // (4 * table.shape[0])))


def finder(table, k):
  """A function: float32 queries ``[N, D]`` -> `resolve.Found` of K rows.

  Ids ascend by distance, ties by index.
  """
  num, dim = table.shape
  tile = _GROUP * min(scan.tiling(dim).lanes * 2, -(-num // _GROUP))
  padding = (0, -num % tile)
  # Here, not in the loop over blocks: XLA would pad again for each.
  rows = jnp.pad(table.vectors * table.scale, (padding, (0, 0)))
  half, norm = jnp.pad(table.half, padding), jnp.pad(table.norm, padding)
  own = jnp.arange(len(half), dtype=jnp.int32) < num
  tiles = jax.tree.map(lambda a: a.reshape(-1, tile, *a.shape[1:]),
                       (rows, half, norm, own))

  def find(queries):
    block = rounding.prepare_block(table, queries)
    low = lax.map(lambda args: _tile_bounds(block, *args), tiles)
    low = low.reshape(-1, len(queries)).T
    count = min(k + _SLACK, low.shape[1])
    key, group = _top_k(-low, min(count + 1, low.shape[1]))
    left = jnp.full((len(queries),), jnp.inf) if count == low.shape[1] else (
        -key[:, -1])
    return _look(table, k, block, queries, group[:, :count], left)

  return find


def _tile_bounds(block, rows, half, norm, own):
  """Lower bounds of the least score of each group of a tile, ``[T, N]``."""
  by_group = lambda a: a.reshape(-1, _GROUP, *a.shape[1:])
  score = block.score(rounding.FORMATS['float32'], rows, half)
  least = jnp.min(by_group(jnp.where(own[:, None], score, jnp.inf)), axis=1)
  most = lambda a: jnp.max(by_group(a), axis=1)
  return least - block.error(most(half), most(norm))


def _look(table, k, block, queries, group, left):
  """`resolve.Found` from the groups ``[N, C]``; the others are above left."""
  num, dim = table.shape
  # On a CPU one query at a time, whose rows stay in the cache.
  size = 1 if jax.default_backend() == 'cpu' else max(
      1, _GATHER_BYTES // (4 * dim * _GROUP * group.shape[1]))
  width = min(k + _SLACK, num)
  with jax.enable_x64(True):
    sums, ids = lax.map(
        lambda args: _nearest_rows(table.vectors, width, *args),
        (queries, group), batch_size=None if size == 1 else size)
    kth, last = sums[:, k - 1], sums[:, -1]
    close = sums[:, 1:] <= sums[:, :-1] * (1 + exact.unit64(dim))
    # What the width cut off is no nearer than the last, up to its rounding.
    # Beyond these its float32 root is no order.
    ordered = (last < 1e76) & (last > 1e-74)
    whole = (width == num) | (last > kth * (1 + 2.**-21)) & ordered
    high = resolve.upper_bound(block, queries, kth)
    distance = jnp.sqrt(sums[:, :k]).astype(jnp.float32)
    return resolve.Found(ids[:, :k], distance, ids, jnp.isfinite(sums),
                         jnp.any(close[:, :k], axis=-1), whole & (left > high))


def _nearest_rows(vectors, width, query, group):
  """The ``width`` nearest rows of some groups, float64 and int32, in order."""
  num = vectors.shape[0]
  member = jnp.arange(_GROUP, dtype=jnp.int32)
  ids = (group[:, None] * _GROUP + member[None]).ravel()
  rows = vectors[jnp.minimum(ids, num - 1)]
  sums = jnp.where(ids < num, exact.sq_distances(query, rows), jnp.inf)
  # float32 to select, which XLA does without a sort; float64 to rank.
  _, index = _top_k(-jnp.sqrt(sums).astype(jnp.float32), width)
  return lax.sort((sums[index], ids[index]), num_keys=2)


def _top_k(values, k):
  # Without a barrier XLA turns a top_k that is sliced again into a sort; one
  # around both results aborts inside a shard_map.
  values, index = lax.top_k(values, k)
  return lax.optimization_barrier(values), lax.optimization_barrier(index)
