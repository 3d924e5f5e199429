"""The pass over the table: a lower bound of every score, kept by lanes.

Device. The rows are read in tiles of ``T`` groups of ``G``; the groups are the
tile's *lanes*. Only the least score of a group is kept: one subtraction and one
minimum a score, which is what lets the matrix product set the pace. A running
minimum over the tiles then keeps, for each lane, where its two least groups are
and a bound for the others; that is done once a group, so it is cheap. No array
of shape ``[B, V]`` is ever formed.

Shape letters: ``N`` queries of a block, ``V`` rows of the table, ``D``
dimensions, ``G`` rows of a group, ``T`` lanes of a tile.

Reference: the lane-wise minimum is that of Chern et al. (2022), "TPU-KNN",
https://arxiv.org/abs/2206.14286; there a lane loses all but its least row, here
none is lost, so the search is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.neighbors import rounding


class Tiling(NamedTuple):
  """Shape of the work. It never shows in a result."""
  queries: int  # N, most rows of a block
  group: int  # G
  lanes: int  # T

  def fit(self, num):
    """The same, with tiles no longer than a table of ``num`` rows."""
    group = min(self.group, num)
    return self._replace(group=group, lanes=min(self.lanes, num // group))

  def rows(self, tile, lane, num):
    """Rows of the groups in lane ``lane`` of tile ``tile``, int32 [..., G].

    Also which of them an earlier tile has not seen: the last tile starts early
    rather than late, so that nothing is padded.
    """
    size = self.group * self.lanes
    member = jnp.arange(self.group, dtype=jnp.int32)
    first = (jnp.minimum(tile * size, num - size)
             + lane % self.lanes * self.group)
    rows = first[..., None] + jnp.broadcast_to(
        member, (*first.shape, self.group))
    return rows, rows >= (tile * size)[..., None]


class Lanes(NamedTuple):
  """What a pass keeps of each lane: lower bounds of the scores of groups.

  Columns 0 to T - 1 are the least groups of the lanes, T to 2 T - 1 the next.
  """
  low: jax.Array  # [N, 2 T]
  tile: jax.Array  # [N, 2 T], int32, where the group is
  rest: jax.Array  # [N], bound of every group that is not kept


class _Least(NamedTuple):
  """The running minima of a pass, ``[T, N]`` each."""
  first: jax.Array
  second: jax.Array
  third: jax.Array
  first_tile: jax.Array
  second_tile: jax.Array


# Few, long tiles off the CPU: scores are written and read once, the rest is a
# sixteenth of that.
_ACCELERATOR = Tiling(2048, 16, 4096)
_CPU_TILE_BYTES = 320 * 2**10  # rows of a tile that stay in the cache


def tiling(dim, itemsize=4):
  """The `Tiling` of this platform for rows of ``dim`` entries."""
  if jax.default_backend() != 'cpu':
    return _ACCELERATOR
  lanes = 64
  while lanes > 8 and lanes * 16 * dim * itemsize > _CPU_TILE_BYTES:
    lanes //= 2
  return Tiling(512, 16, lanes)


def scan(table, block, shape):
  """Runs over the table once for a block of queries.

  Args:
    table: `rounding.PreparedTable`.
    block: `rounding.Block` of N queries.
    shape: `Tiling` that fits the table.

  Returns:
    `Lanes`; a group without a row of its own has bound infinity.
  """
  num, size = table.shape[0], shape.group * shape.lanes

  def step(least, tile):
    low = _tile_bounds(table, block, shape, tile * size)
    return _insert(least, low, tile), None

  infinite = jnp.full((shape.lanes, block.operand.shape[1]), jnp.inf)
  nowhere = jnp.zeros(infinite.shape, jnp.int32)
  least = _Least(infinite, infinite, infinite, nowhere, nowhere)
  whole, rest = divmod(num, size)
  least, _ = lax.scan(step, least, jnp.arange(whole, dtype=jnp.int32))
  if rest:  # apart, so that the others need no mask
    low = _tile_bounds(table, block, shape, num - size, whole * size)
    least = _insert(least, low, jnp.int32(whole))
  both = lambda a, b: jnp.concatenate([a, b]).T
  return Lanes(both(least.first, least.second),
               both(least.first_tile, least.second_tile),
               jnp.min(least.third, axis=0))


def _insert(old, low, tile):
  """The minima after one more tile of group bounds ``[T, N]``."""
  first, second = low < old.first, low < old.second
  return _Least(
      jnp.minimum(old.first, low),
      jnp.minimum(old.second, jnp.maximum(old.first, low)),
      jnp.minimum(old.third, jnp.maximum(old.second, low)),
      jnp.where(first, tile, old.first_tile),
      jnp.where(first, old.first_tile,
                jnp.where(second, tile, old.second_tile)))


def _tile_bounds(table, block, shape, start, new_from=None):
  """Lower bounds of the least score of each group of a tile, ``[T, N]``."""
  size = shape.group * shape.lanes
  cut = lambda a: lax.dynamic_slice_in_dim(a, start, size)
  by_group = lambda a: a.reshape(shape.lanes, shape.group, *a.shape[1:])
  most = lambda a: jnp.max(by_group(cut(a)), axis=1)
  rows = (cut(table.vectors) * table.scale if table.reduced is None
          else cut(table.reduced))
  score = block.score(rounding.FORMATS[table.format], rows, cut(table.half))
  if new_from is not None:
    new = start + jnp.arange(size, dtype=jnp.int32) >= new_from
    score = jnp.where(new[:, None], score, jnp.inf)
  least = jnp.min(by_group(score), axis=1)
  residual = None if table.residual is None else most(table.residual)
  return least - block.error(most(table.half), most(table.norm), residual)
