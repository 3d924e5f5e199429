"""From lanes to the nearest row: the few groups that may hold it, in float64.

Device. A group is *live* while its lower bound does not exceed an upper bound
of the least score, which comes from the float64 distance of the best row seen
so far. The groups are looked at in the order of their bounds until none is
live; each costs G rows, and most queries need one group. A query is *certified*
when every group it did not look at is known not to be live: then the row found
has the least float64 distance, and what float64 cannot separate is handed on
as a list of rows to rank as integers (`exact`).

Shape letters: ``N`` queries of a block, ``L`` groups that the lanes kept, ``G``
rows of a group, ``R`` queries that look at one more group in the same turn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
import numpy as np

from jaxdp.neighbors import exact

_TURN, _WIDE_TURN = 64, 256  # queries that look again together; off a CPU
_MOST_GROUPS = 32  # live groups beyond which a query is given up,
_TRIES = 8  # but not before so many were looked at: a row of huge norm has a
# wide bound, so it comes first, and says nothing of where the nearest is


class Found(NamedTuple):
  """The K nearest rows of each query of a block, as far as float64 sees."""
  ids: jax.Array  # [N, K] int32, right where certified and not tied
  distance: jax.Array  # [N, K] float32, of those rows
  rows: jax.Array  # [N, C] int32, C >= K, to rank where tied
  live: jax.Array  # [N, C] bool, which of the rows
  tied: jax.Array  # [N] bool, whether float64 leaves the order open
  certified: jax.Array  # [N] bool, whether no other row can be among them


class _State(NamedTuple):
  low: jax.Array  # [N, L], bounds of the groups not looked at
  ids: jax.Array  # [N, G] int32, the least rows so far
  sq_distance: jax.Array  # [N, G] float64
  high: jax.Array  # [N], upper bound of the least score
  live: jax.Array  # [N] bool, whether to look at one more group
  looks: jax.Array  # [N] int32, groups looked at
  whole: jax.Array  # [N] bool, whether the list holds every row it must


def resolve(table, block, queries, lanes, shape):
  """Looks at the live groups of each query.

  Args:
    table: `rounding.PreparedTable`.
    block: `rounding.Block` of the queries.
    queries: float32 ``[N, D]``, unscaled.
    lanes: `scan.Lanes` of them.
    shape: `scan.Tiling` of the scan.

  Returns:
    `Found`.
  """
  num_queries = queries.shape[0]
  on_cpu = jax.default_backend() == 'cpu'
  turn = min(_TURN if on_cpu else _WIDE_TURN, num_queries)
  with jax.enable_x64(True):
    def look(low, tiles, points):
      """The least group of each query: bounds without it, rows, distances."""
      lane = _first(low)
      tile = jnp.take_along_axis(tiles, lane[:, None], axis=1)[:, 0]
      ids, new = shape.rows(tile, lane, table.shape[0])
      # On a CPU one query after the other: 16 rows stay in its cache.
      sums = lax.map(
          lambda args: exact.sq_distances(args[0], table.vectors[args[1]]),
          (points, ids), batch_size=None if on_cpu else len(ids))
      taken = jnp.arange(low.shape[1], dtype=jnp.int32)[None] == lane[:, None]
      return (jnp.where(taken, jnp.inf, low), ids,
              jnp.where(new, sums, jnp.inf))

    def bound(least, some=slice(None)):
      return upper_bound(block._replace(scales=block.scales[:, some]),
                         queries[some], least)

    def begin():
      low, ids, sums = look(lanes.low, lanes.tile, queries)
      high = bound(jnp.min(sums, axis=-1))
      live = jnp.any(low <= high[:, None], axis=-1)
      return _State(low, ids, sums, high, live, jnp.ones_like(live, jnp.int32),
                    jnp.ones_like(live))

    def again(state):
      some = pick(state.live, turn)
      here = jnp.minimum(some, num_queries - 1)
      low, ids, sums = look(state.low[here], lanes.tile[here], queries[here])
      sums, ids = lax.sort(
          (jnp.concatenate([state.sq_distance[here], sums], axis=1),
           jnp.concatenate([state.ids[here], ids], axis=1)), num_keys=2)
      size = state.ids.shape[1]
      dropped = sums[:, size] <= _tie(sums[:, 0], queries.shape[1])
      high = bound(sums[:, 0], here)
      count = jnp.sum(low <= high[:, None], axis=-1, dtype=jnp.int32)
      looks = state.looks[here] + 1
      lost = (count > _MOST_GROUPS) & (looks >= _TRIES)
      new = _State(low, ids[:, :size], sums[:, :size], high,
                   (count > 0) & ~lost, looks,
                   state.whole[here] & ~dropped & ~lost)
      return jax.tree.map(
          lambda old, part: old.at[some].set(part, mode='drop'), state, new)

    state = lax.while_loop(lambda s: jnp.any(s.live), again, begin())
    least = jnp.min(state.sq_distance, axis=-1)
    live = state.sq_distance <= _tie(least, queries.shape[1])[:, None]
    ids = jnp.min(jnp.where(live, state.ids, exact.INT32_MAX), axis=-1)
    tied = jnp.sum(live, axis=-1, dtype=jnp.int32) > 1
    hidden = lanes.rest <= state.high
    distance = jnp.sqrt(least).astype(jnp.float32)
  return Found(ids[:, None], distance[:, None], state.ids, live, tied,
               state.whole & ~hidden)


def upper_bound(block, queries, sq_distance):
  """Upper bounds of the scores at float64 squared distances, float32 ``[N]``.

  The scores in real arithmetic, in units of the block's scales.
  """
  wide = queries.astype(jnp.float64)
  norms, unit = jnp.sum(wide * wide, axis=-1), exact.unit64(queries.shape[1])
  score = (sq_distance - norms + unit * (sq_distance + norms)) / 2
  return _up(score * jnp.prod(block.scales.astype(jnp.float64), axis=0))


def _tie(sq_distance, dim):
  """Up to where another float64 sum may be the lesser one in truth."""
  return sq_distance * (1 + exact.unit64(dim))


def _first(low):
  """Lane of the least bound, the first among equal ones; int32 [R]."""
  lane = jnp.arange(low.shape[1], dtype=jnp.int32)
  least = jnp.min(low, axis=-1, keepdims=True)
  # The last lane where all are NaN, which no finite input gives.
  return jnp.min(jnp.where(low == least, lane, np.int32(low.shape[1] - 1)),
                 axis=-1)


def pick(live, turn):
  """Indices of the first ``turn`` live queries; N where there are fewer."""
  num = live.shape[0]
  order = jnp.cumsum(live.astype(jnp.int32), dtype=jnp.int32) - 1
  slot = jnp.where(live & (order < turn), order, np.int32(turn))
  return jnp.full((turn,), num, jnp.int32).at[slot].set(
      jnp.arange(num, dtype=jnp.int32), mode='drop')


def _up(score):
  """The float32 at or above a float64 score."""
  near = score.astype(jnp.float32)
  return near + jnp.abs(near) * np.float32(2.**-22) + np.float32(2.**-120)
