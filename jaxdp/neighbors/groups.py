"""The k nearest rows: least lower bounds by groups, ranked in float64.

Device. The scores of a block of queries are formed for all rows, so a block is
small: at most 64 MiB. The ``C`` groups of 16 rows with the least lower bounds
are looked into, and of their rows the ``C`` with the least bounds are ranked;
``C`` is k and a few more. The answer is certified when the least bound of all
that was left out exceeds what the k-th can be at most.

Shape letters: ``N`` queries of a block, ``V`` rows of the table, ``D``
dimensions, ``K`` neighbours, ``C`` candidates.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.neighbors import exact
from jaxdp.neighbors import resolve
from jaxdp.neighbors import rounding

_SLACK = 8  # candidates beyond k
_GROUP = 16  # columns of a group
_BLOCK_BYTES = 2**26  # what one block may hold in each array


def block_size(table, k):
  """Most queries of one block."""
  num, dim = table.shape
  most = 64 if jax.default_backend() == 'cpu' else 1024
  return max(1, min(most, _BLOCK_BYTES // (8 * _width(table, k) * dim),
                    _BLOCK_BYTES // (4 * num)))


def _width(table, k):
  return min(k + _SLACK, table.shape[0])


def finder(table, k):
  """A function: float32 queries ``[N, D]`` -> `resolve.Found` of K rows.

  Ids ascend by distance, ties by index.
  """
  padding = (0, -table.shape[0] % _GROUP)
  # Here, not in the loop over blocks: XLA would pad again for each.
  rows = jnp.pad(table.vectors * table.scale, (padding, (0, 0)))
  half, norm = jnp.pad(table.half, padding), jnp.pad(table.norm, padding)

  def find(queries):
    block = rounding.prepare_block(table, queries)
    product = rounding.FORMATS['float32'].product(rows, block.operand)
    low = _group_bounds(block, product, half, norm, table.shape[0])
    ids, certified = _candidates(block, product, low, table, k)
    return _ranked(table, k, queries, ids, certified)

  return find


def _group_bounds(block, product, half, norm, num):
  """Lower bounds of the least score of each group, ``[N, V / 16]``."""
  by_group = lambda a: a.reshape(-1, _GROUP, *a.shape[1:])
  score = half[:, None] * block.ratio - product
  own = jnp.arange(len(half), dtype=jnp.int32) < num
  least = jnp.min(by_group(jnp.where(own[:, None], score, jnp.inf)), axis=1)
  most = lambda a: jnp.max(by_group(a), axis=1)
  return (least - block.error(most(half), most(norm))).T


def _candidates(block, product, low, table, k):
  """The rows of least lower bound, and whether the k nearest are among them.

  Returns:
    int32 ``[N, C]``, bool ``[N]``.
  """
  num, width = table.shape[0], _width(table, k)
  num_groups = min(width, low.shape[1] - 1)
  # Without the barrier XLA turns a top_k that is sliced again into a sort.
  key, group = lax.optimization_barrier(lax.top_k(-low, num_groups + 1))
  rest = -key[:, -1]
  if num_groups < width:  # every group is looked at
    rest = jnp.full_like(rest, jnp.inf)
  else:
    group = group[:, :-1]
  member = jnp.arange(_GROUP, dtype=jnp.int32)[None, None]
  ids = (group[:, :, None] * _GROUP + member).reshape(len(group), -1)
  bounds, high = _row_bounds(block, product, ids, table)
  bounds = jnp.where(ids < num, bounds, jnp.inf)
  extra = min(width + 1, bounds.shape[1])
  key, index = lax.optimization_barrier(lax.top_k(-bounds, extra))
  if extra > width:
    rest = jnp.minimum(rest, -key[:, -1])
  ids, high = (jnp.take_along_axis(a, index[:, :width], axis=1)
               for a in (ids, high))
  return ids, rest > lax.sort(high)[:, k - 1]


def _row_bounds(block, product, ids, table):
  """Lower and upper bounds of the scores of rows ``ids [N, M]``."""
  column = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
  ratio, slope, weight = (
      a.T for a in (block.ratio, block.slope, block.weight))
  half, norm = (jnp.take(a, ids, mode='clip')
                for a in (table.half, table.norm))
  score = half * ratio - product[ids, column]
  error = norm * slope + half * weight + table.shape[1] * 2.**-120
  return score - error, score + error


def _ranked(table, k, queries, ids, certified):
  """Candidates in the order of their float64 distances, ties by index."""
  with jax.enable_x64(True):
    sums = exact.sq_distances(queries[:, None, :], table.vectors[ids])
    sums, ids = lax.sort((sums, ids), num_keys=2)
    close = sums[:, 1:] <= sums[:, :-1] * (1 + exact.unit64(queries.shape[1]))
    tied = jnp.any(close[:, :k], axis=-1)
  return resolve.Found(ids[:, :k], ids, jnp.ones(ids.shape, bool), tied,
                       certified)
