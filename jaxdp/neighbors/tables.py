"""What may be asked of a table: the public functions and their arguments.

Device, but for the checks of concrete values. The work is in ``search``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.neighbors import exact
from jaxdp.neighbors import gate
from jaxdp.neighbors import rounding
from jaxdp.neighbors import search

PRECISIONS = ('auto', 'float32', 'certified')
_SMALL = 2**14  # rows below which 'auto' does not even measure
_IMPLS = ('xla',)


def nearest(queries, vectors, *, mesh=None, precision='auto', impl='xla'):
  r"""Finds the nearest row of a table for each query, exactly.

  Args:
    queries: points, float32 ``[B, D]``, finite; other dtypes are cast first.
    vectors: the table, float32 ``[V, D]``, finite, ``V >= 1``; or what
      :func:`prepare` made of it, which saves two passes over it a call.
    mesh: None, or a ``jax.sharding.Mesh``: its first axis splits the queries,
      its second, if it has one, the rows of the table. A table larger than one
      device goes through :func:`prepare` with the same mesh. The ids do not
      depend on it.
    precision: arithmetic of the first scan: ``'float32'``; ``'certified'``,
      operands in fewer bits and whatever they leave open again in float32;
      ``'auto'``, what :func:`timing` found faster here, float32 for less than
      16,384 rows and where several processes run. The answer does not depend
      on it. A prepared table has made the choice already.
    impl: ``'xla'``; the place for a kernel written by hand.

  Returns:
    ``(ids, distances)``: int32 ``[B]``, the row of least real-arithmetic
    Euclidean distance, the lowest index among ties; float32 ``[B]``, that
    distance (unsquared).

  Raises:
    ValueError: shapes do not fit, or ``precision`` or ``impl`` is unknown;
      outside ``jit`` also if an entry is not finite.

  Example:
    >>> ids, _ = nearest(jnp.zeros((1, 1)), jnp.array([[1.], [-1.]]))
    >>> ids.tolist()
    [0]
  """
  _check_choice('impl', impl, _IMPLS)
  queries, table = _prepared(queries, vectors, precision, mesh)
  if not queries.shape[0]:
    return jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.float32)
  ids, distances, _ = search.compiled(mesh)(queries, table)
  return ids, distances


def k_nearest(queries, vectors, k, *, mesh=None):
  r"""Finds the k nearest rows of a table for each query, exactly.

  A query that is itself a row of the table has that row first, at distance 0
  (the lowest such row, if the table holds it more than once).

  Args:
    queries: points, float32 ``[B, D]``, finite; other dtypes are cast first.
    vectors: the table, float32 ``[V, D]``, finite, or a prepared one.
    k: number of neighbours, ``1 <= k <= V``; a Python int.
    mesh: as in :func:`nearest`; each part of the table must hold k rows.

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
  queries, table = _prepared(queries, vectors, 'float32', mesh)
  num = table.num_rows
  if isinstance(k, bool) or not isinstance(k, (int, float, np.number)) or not (
      1 <= k <= num and k == int(k)):
    raise ValueError(f'k={k} must be an int in [1, {num}]; the table has {num} '
                     'rows')
  if mesh is not None and len(mesh.axis_names) > 1:
    parts = mesh.shape[mesh.axis_names[1]]
    if -(-num // parts) < k:
      raise ValueError(f'k={k} exceeds the rows of one of {parts} parts of a '
                       f'table of {num}; split the queries only')
  if not queries.shape[0]:
    return (jnp.zeros((0, int(k)), jnp.int32),
            jnp.zeros((0, int(k)), jnp.float32))
  ids, distances, _ = search.compiled(mesh, int(k))(
      queries, rounding.without_reduced(table))
  return ids.reshape(-1, int(k)), distances.reshape(-1, int(k))


def prepare(vectors, *, precision='auto', mesh=None):
  """Makes a table ready for many searches.

  Args:
    vectors: the table, float32 ``[V, D]``, finite, ``V >= 1``.
    precision: as in :func:`nearest`; fewer bits keep a second copy of the
      table, of half the size in bfloat16.
    mesh: None, or the mesh of the searches. Where its second axis splits the
      rows, each device gets its part alone, straight from the host where
      ``vectors`` is a NumPy array; then searches must name the mesh too, and
      this call must stand outside ``jit``.

  Returns:
    `PreparedTable`, a pytree to pass in place of ``vectors``.

  Raises:
    ValueError: as :func:`nearest`.

  Example:
    >>> table = prepare(jnp.array([[1.], [-1.]]))
    >>> nearest(jnp.zeros((1, 1)), table)[0].tolist()
    [0]
  """
  _check_choice('precision', precision, PRECISIONS)
  if _parts(mesh) > 1:
    vectors = np.asarray(vectors, np.float32)
    _check_shape('vectors', vectors)
    _check_finite('vectors', np.isfinite(vectors).all())
  else:
    vectors = _checked('vectors', vectors)
  num = vectors.shape[0]
  if num == 0:
    raise ValueError(f'vectors of shape {vectors.shape} must have a row')
  if _parts(mesh) > 1:
    vectors = _split(vectors, mesh)
  return _prepare(vectors, _format(precision, num), num)


def _parts(mesh):
  """Into how many parts a mesh splits the rows of a table."""
  if mesh is None or len(mesh.axis_names) < 2:
    return 1
  return mesh.shape[mesh.axis_names[1]]


def _split(vectors, mesh):
  """NumPy rows on the devices of a mesh, a part each; the last row repeats."""
  num, dim = vectors.shape
  total = num + -num % _parts(mesh)
  sharding = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(mesh.axis_names[1]))

  def part(index):
    rows = vectors[index[0]]
    missing = len(range(*index[0].indices(total))) - len(rows)
    return np.concatenate([rows, np.repeat(vectors[-1:], missing, axis=0)])

  return jax.make_array_from_callback((total, dim), sharding, part)


def distances(query, vectors):
  """Computes the distances of one point to all rows. Device, jittable.

  Args:
    query: float32 ``[D]``.
    vectors: float32 ``[V, D]``.

  Returns:
    float32 ``[V]``, float64 sums of squared differences, rounded once; a row
    equal to the query is at 0 exactly.

  Example:
    >>> distances(jnp.zeros(2), jnp.array([[3., 4.], [0., 0.]])).tolist()
    [5.0, 0.0]
  """
  with jax.enable_x64(True):
    return exact.all_sq_distances(
        query, vectors, lambda sums: jnp.sqrt(sums).astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _prepare(vectors, name, num_rows):
  return rounding.prepare(vectors, name, num_rows)


def _format(precision, num):
  """Name of the operands' format."""
  # Processes that measured differently would run different programs.
  alone = jax.process_count() == 1
  if precision == 'float32' or precision == 'auto' and (
      num < _SMALL or not alone):
    return 'float32'
  if precision == 'auto':
    return gate.timing().choice
  fast = (gate.timing().choice if jax.default_backend() == 'gpu' and alone
          else 'bfloat16')
  return 'bfloat16' if fast == 'float32' else fast


def _prepared(queries, vectors, precision, mesh):
  """Checked queries, and the table prepared."""
  _check_choice('precision', precision, PRECISIONS)
  queries = _checked('queries', queries)
  if isinstance(vectors, rounding.PreparedTable):
    table, parts = vectors, _parts(mesh)
    repeats = table.num_rows < table.shape[0]  # some row stands there twice
    if repeats and (parts == 1 or table.shape[0] % parts):
      raise ValueError(f'vectors of {table.num_rows} rows were prepared for a '
                       f'mesh that splits them, and mesh={mesh} does not; pass '
                       'the mesh that prepare got')
  else:
    vectors = _checked('vectors', vectors)
    table = None
  shape = vectors.shape
  if shape[0] == 0 or queries.shape[1] != shape[1]:
    raise ValueError(
        f'vectors of shape {shape} must be [V, {queries.shape[1]}] with'
        f' V >= 1, as queries has shape {queries.shape}')
  if table is None:
    table = _prepare(vectors, _format(precision, shape[0]), shape[0])
  return queries, table


def _check_choice(name, value, choices):
  if value not in choices:
    raise ValueError(f'{name}={value!r} is unknown; use one of {choices}')


def _checked(name, array):
  """The array as float32 of rank 2; its values too, where concrete."""
  array = jnp.asarray(array, jnp.float32)
  _check_shape(name, array)
  if not isinstance(array, jax.core.Tracer):
    _check_finite(name, _all_finite(array))
  return array


def _check_shape(name, array):
  if array.ndim != 2 or array.shape[1] == 0:
    raise ValueError(
        f'{name} of shape {array.shape} must be [rows, D] with D >= 1')


def _check_finite(name, finite):
  if not finite:
    raise ValueError(f'{name} has entries that are not finite; they have no '
                     'nearest row')


@jax.jit
def _all_finite(array):
  return jnp.isfinite(array).all()
