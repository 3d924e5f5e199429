"""Blocks of queries, the steps that follow the scan, and devices.

Device. A query is answered in up to four steps, each only for the queries the
one before could not decide:

1. a scan of operands in fewer bits (``precision='certified'``), and the live
   groups of it in float64;
2. a scan in float32, likewise; the first step of ``precision='float32'``;
3. a list of rows that float64 cannot separate: integers (`exact`);
4. everything: float64 differences over the whole table, and integers among
   those that float64 cannot separate.

Shape letters: ``B`` queries, ``N`` of a block, ``V`` rows of the table, ``D``
dimensions, ``K`` neighbours.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
import numpy as np

from jaxdp.neighbors import exact
from jaxdp.neighbors import groups
from jaxdp.neighbors import resolve
from jaxdp.neighbors import rounding
from jaxdp.neighbors import scan

_REDO = 128  # uncertified queries of one block of step 2


class Counts(NamedTuple):
  """How many queries took the slower steps."""
  uncertified: jax.Array  # [], step 2 after step 1
  settled: jax.Array  # [], step 3
  exhausted: jax.Array  # [], step 4


def compiled(mesh, k=1):
  """The search ``(queries, table) -> (ids, distances, counts)``, jitted.

  Args:
    mesh: None, or a mesh whose first axis splits the queries and whose second,
      if it has one, the rows of the table.
    k: neighbours; with 1 the results have no axis of k.
  """
  return _compiled(mesh, k)  # one entry, whether k is spelt out or not


@functools.cache
def _compiled(mesh, k):
  if mesh is None:
    return jax.jit(lambda queries, table: _flat(_local(queries, table, k), k))
  axes = mesh.axis_names
  split = axes[1] if len(axes) > 1 else None
  spec = jax.sharding.PartitionSpec

  def sharded(queries, table):
    num = queries.shape[0]
    # A zero among unit rows would be as near to all of them.
    queries = jnp.pad(queries, ((0, -num % mesh.shape[axes[0]]), (0, 0)),
                      mode='edge')
    table = _padded(table, 1 if split is None else mesh.shape[split])
    extra = table.shape[0] - table.num_rows  # prepare may have padded for more

    def here(queries, table):
      # Copies of the last row must not crowd out a real one of their part.
      most = k if k == 1 else min(k + extra, table.shape[0])
      ids, distances, counts = _local(queries, table, most)
      if split is not None:
        ids, distances = _combine(queries, table, ids, mesh, k)
      return ids, distances, jax.tree.map(jnp.atleast_1d, counts)

    rows = jax.tree.map(lambda a: spec(split) if a.ndim else spec(), table)
    ids, distances, counts = jax.shard_map(
        here, mesh=mesh, in_specs=(spec(axes[0]), rows),
        out_specs=(spec(axes[0]), spec(axes[0]), spec(axes[:2])),
        check_vma=False)(queries, table)
    return _flat((ids[:num], distances[:num],
                  jax.tree.map(jnp.sum, counts)), k)

  return jax.jit(sharded)


def _flat(result, k):
  ids, distances, counts = result
  return (ids[:, 0], distances[:, 0], counts) if k == 1 else result


def _padded(table, parts):
  """The table with rows repeated at its end, so that ``parts`` divide it.

  The last row again ties with itself and has a higher index, so it is never
  the answer.
  """
  extra = -table.shape[0] % parts
  if not extra:
    return table
  return jax.tree.map(
      lambda a: jnp.pad(a, ((0, extra),) + ((0, 0),) * (a.ndim - 1),
                        mode='edge') if a.ndim else a, table)


def _combine(queries, table, found, mesh, k):
  """The k least of what the parts of the table found, ids and distances.

  Args:
    queries: float32 ``[B, D]``, those of this part of the mesh.
    table: `rounding.PreparedTable`, this part's rows.
    found: int32 ``[B, K]``, rows of this part.
    mesh: of two axes.
    k: static, how many to keep of them all.
  """
  queries_axis, rows_axis = mesh.axis_names[:2]
  gather = lambda a: lax.all_gather(a, rows_axis, axis=1, tiled=True)
  with jax.enable_x64(True):
    rows = table.vectors
    own = found + lax.axis_index(rows_axis).astype(jnp.int32) * np.int32(
        len(rows))
    near = lax.map(lambda args: exact.sq_distances(
        args[0], rows[args[1]]), (queries, found))
    near = jnp.where(own < table.num_rows, near, jnp.inf)
    sums, ids = gather(near), gather(own)
    at = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    order, _, at = lax.sort((sums, ids, at), num_keys=2)
    close = order[:, 1:k + 1] <= order[:, :-1][:, :k] * (
        1 + exact.unit64(rows.shape[1]))
    left = jnp.any(close & jnp.isfinite(order[:, 1:k + 1]))

    def settle():
      scores = gather(lax.map(lambda args: exact.exact_scores(
          args[0], rows[args[1]]), (queries, found)))
      return lax.map(lambda args: exact.least(
          args[0], args[1], args[1] < table.num_rows, k), (scores, ids))

    # The same branch everywhere, for there are collectives in it.
    left = lax.psum(left.astype(jnp.int32), (queries_axis, rows_axis))
    at = lax.cond(left > 0, settle, lambda: at[:, :k])
    take = lambda a: jnp.take_along_axis(a, at, axis=1)
    return take(ids), jnp.sqrt(take(sums)).astype(jnp.float32)


def _local(queries, table, k):
  """The search on one device: ids and distances [B, K], and `Counts`."""
  if k > 1:
    return map_blocks(
        functools.partial(_whole_block, table, groups.finder(table, k)),
        queries, groups.block_size(table))
  shape = _tiling(table)
  if table.format == 'float32':
    find = functools.partial(_scanned, table, shape)
    return map_blocks(functools.partial(_whole_block, table, find),
                      queries, shape.queries)
  return _again(table, queries, *map_blocks(
      functools.partial(_reduced_block, table, shape), queries, shape.queries))


def _tiling(table):
  num, dim = table.shape
  itemsize = rounding.FORMATS[table.format].dtype.itemsize
  return scan.tiling(dim, itemsize).fit(num)


def _scanned(table, shape, queries):
  """Steps 1 or 2, by the format of the table."""
  block = rounding.prepare_block(table, queries)
  lanes = scan.scan(table, block, shape)
  return resolve.resolve(table, block, queries, lanes, shape)


def _whole_block(table, find, queries, valid):
  """Ids, distances and counts of a block, nothing left open."""
  found = find(queries)
  return _finish(table.vectors, queries, found, valid,
                 valid & ~found.certified)


def _reduced_block(table, shape, queries, valid):
  """As `_whole_block`, but what is not certified is left: bool ``[N, 1]``."""
  found = _scanned(table, shape, queries)
  left = valid & ~found.certified
  ids, distances, counts = _finish(
      table.vectors, queries, found, valid & ~left, jnp.zeros_like(left))
  return ids, distances, counts._replace(
      uncertified=jnp.sum(left, dtype=jnp.int32)), left[:, None]


def _again(table, queries, ids, distances, counts, left):
  """Step 2 for the queries that step 1 left, compacted, in small blocks."""
  num = queries.shape[0]
  plain = rounding.without_reduced(table)
  find = functools.partial(_scanned, plain, _tiling(plain))
  size = min(_REDO, num)

  def redo(carry):
    left, ids, distances, counts = carry
    some = resolve.pick(left, size)
    here = jnp.minimum(some, num - 1)
    new_ids, new_distances, more = _whole_block(
        plain, find, queries[here], some < num)
    return (left.at[some].set(False, mode='drop'),
            ids.at[some].set(new_ids, mode='drop'),
            distances.at[some].set(new_distances, mode='drop'),
            jax.tree.map(jnp.add, counts, more))

  return lax.while_loop(lambda carry: jnp.any(carry[0]), redo,
                        (left[:, 0], ids, distances, counts))[1:]


def map_blocks(block_fn, queries, size):
  """Runs ``block_fn(queries, valid)`` over blocks of at most ``size``.

  Returns:
    What it returns, rows joined and `Counts` added up.
  """
  num = queries.shape[0]
  num_blocks = max(1, -(-num // size))
  size = max(1, -(-num // num_blocks))
  queries = jnp.pad(queries, ((0, num_blocks * size - num), (0, 0)))
  valid = (jnp.arange(num_blocks * size) < num).reshape(num_blocks, size)
  out = lax.map(lambda args: block_fn(*args),
                (queries.reshape(num_blocks, size, queries.shape[1]), valid))
  return tuple(
      jax.tree.map(jnp.sum, part) if isinstance(part, Counts)
      else part.reshape(num_blocks * size, -1)[:num] for part in out)


def _finish(vectors, queries, found, valid, exhaust):
  """Steps 3 and 4 for the rows that need them; adds the distances.

  Args:
    vectors: float32 ``[V, D]``.
    queries: float32 ``[N, D]``.
    found: `resolve.Found` of them.
    valid: bool ``[N]``; the others are padding, or left to another step.
    exhaust: bool ``[N]``, those to search exhaustively.

  Returns:
    int32 ids and float32 distances ``[N, K]``, `Counts`.
  """
  k = found.ids.shape[1]
  index = jnp.arange(len(valid), dtype=jnp.int32)
  settle = valid & ~exhaust & found.tied

  # One row a turn: a vmapped cond would run the slow branch for every row.
  def redo(carry):
    ids, distances, left = carry
    row = jnp.min(jnp.where(left, index, exact.INT32_MAX))
    again = lax.cond(
        exhaust[row],
        lambda: exact.exhaustive(queries[row], vectors, k),
        lambda: exact.rank(queries[row], vectors, found.rows[row],
                           found.live[row], k))
    sums = exact.sq_distances(queries[row], vectors[again])
    return (ids.at[row].set(again),
            distances.at[row].set(jnp.sqrt(sums).astype(jnp.float32)),
            left & (index != row))

  with jax.enable_x64(True):
    ids, distances, _ = lax.while_loop(
        lambda carry: jnp.any(carry[-1]), redo,
        (found.ids, found.distance, settle | exhaust))
  total = lambda mask: jnp.sum(mask, dtype=jnp.int32)
  return ids, distances, Counts(jnp.int32(0), total(settle), total(exhaust))
