"""Tests of jaxdp.neighbors against exact integer arithmetic."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxdp import neighbors
from jaxdp.neighbors import exact
from jaxdp.neighbors import scan
from jaxdp.neighbors import search

_NUM, _DIM, _BATCH, _K = 700, 20, 40, 5  # one shape: compiled once


def _integers(*arrays):
  """Python ints proportional to the floats, and the log2 of the factor."""
  parts = [np.frexp(a.astype(np.float64)) for a in arrays]
  low = min(int(e[m != 0].min(initial=0)) for m, e in parts)
  ints = []
  for mantissa, exponent in parts:
    shift = np.where(mantissa == 0, 0, exponent - low)
    whole = (mantissa * 2**24).astype(np.int64)
    ints.append(np.vectorize(
        lambda m, s: int(m) << int(s), otypes=[object])(whole, shift))
  return ints, 24 - low


def _exact_sq_distances(queries, vectors):
  """Exact squared distances, Python ints ``[B, V]``, and their log2 factor."""
  (queries, vectors), shift = _integers(queries, vectors)
  diff = queries[:, None, :] - vectors[None, :, :]
  return (diff * diff).sum(axis=-1), 2 * shift


def _root(sq_distance, shift):
  """Square root of an exact integer over ``2 ** shift``, to 60 bits."""
  extra = 120 + shift % 2
  root = math.isqrt(int(sq_distance) << extra)
  return math.ldexp(root, -(shift + extra) // 2)


def _exact_nearest(queries, vectors, k):
  sq_distances, shift = _exact_sq_distances(queries, vectors)
  ids = np.array([sorted(range(len(row)), key=lambda j: (row[j], j))[:k]
                  for row in sq_distances])
  distances = np.array([[_root(row[j], shift) for j in js]
                        for row, js in zip(sq_distances, ids)])
  return ids, distances


def _normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _ulp_table():
  """Rows that differ from each other by one ulp in one or two entries."""
  rng = np.random.default_rng(3)
  table = np.repeat(_normal(4, 1, _DIM), _NUM, axis=0)
  for row in table:
    for j in rng.choice(_DIM, 2, replace=False):
      row[j] = np.nextafter(row[j], np.float32(rng.choice([-9, 9])))
  return table


def _case(name):
  """Queries and table of a named difficulty."""
  queries, table = _normal(1, _BATCH, _DIM), _normal(2, _NUM, _DIM)
  rng = np.random.default_rng(5)
  powers = [10**rng.uniform(-18, 18, (n, 1)) for n in (_BATCH, _NUM)]
  grid = np.zeros((_NUM, _DIM))
  grid[:, :4] = rng.integers(-2, 3, (_NUM, 4))
  # Two decades either side: the squares fit double-double but not float64.
  wide = _normal(6, 1, _DIM) * 10**rng.uniform(-2, 2, (1, _DIM))
  shuffled = rng.permuted(np.repeat(wide, _NUM, 0), axis=1)
  pair = {
      'plain': (queries, table),
      'tiny': (queries * 1e-18, table * 1e-18),
      'huge': (queries * 1e18, table * 1e18),
      'huge_queries': (queries * 1e18, table),
      'tiny_queries': (queries * 1e-18, table),
      'huge_table': (queries, table * 1e18),
      'tiny_table': (queries, table * 1e-18),
      'mixed_norms': (queries * powers[0], table * powers[1]),
      'far_from_the_origin': (queries + 1000, table + 1000),
      'grid': (grid[:_BATCH] + (grid[:_BATCH] != 0) / 2, grid),
      'one_ulp': (_ulp_table()[:_BATCH] + queries * 1e-7, _ulp_table()),
      'duplicates': (table[:_BATCH], np.tile(table[:_NUM // 7], (7, 1))),
      'permuted_rows': (np.zeros_like(queries), shuffled),
      'all_equal': (queries, np.ones_like(table)),
      'zeros': (np.zeros_like(queries), np.zeros_like(table)),
  }[name]
  return tuple(a.astype(np.float32) for a in pair)


_CASES = ('plain', 'tiny', 'huge', 'huge_queries', 'tiny_queries',
          'huge_table', 'tiny_table', 'mixed_norms', 'far_from_the_origin',
          'grid', 'one_ulp', 'duplicates', 'permuted_rows', 'all_equal',
          'zeros')


def _counted(queries, table, precision='float32', k=1):
  """Ids, and how many queries took the slower steps."""
  table = neighbors.prepare(table, precision=precision)
  ids, _, counts = search.compiled(None, k)(queries, table)
  return ids, counts


class NearestTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_is_the_real_arithmetic_arg_min_with_ties_to_the_lowest(self, name):
    queries, table = _case(name)
    want, distances = _exact_nearest(queries, table, 1)
    ids, got = neighbors.nearest(queries, table)
    self.assertEqual((ids.dtype, got.dtype), (jnp.int32, jnp.float32))
    np.testing.assert_array_equal(ids, want[:, 0])
    # One rounding to float32; the float64 sum before adds 2^-29 of that.
    np.testing.assert_allclose(got, distances[:, 0], rtol=1.01 * 2.**-24)

  @parameterized.parameters(
      (1, 1, 1), (7, 2, 3), (255, 511, 50), (256, 513, 1), (257, 513, 3),
      (1, 1025, 50))
  def test_odd_sizes_need_no_padding_from_the_caller(self, batch, num, dim):
    queries, table = _normal(7, batch, dim), _normal(8, num, dim)
    want, _ = _exact_nearest(queries, table, 1)
    ids, distances = neighbors.nearest(queries, table)
    chex.assert_shape([ids, distances], (batch,))
    np.testing.assert_array_equal(ids, want[:, 0])

  @parameterized.parameters(32_769, 40_001)  # jaxlib 0.10.2
  def test_tables_beyond_the_row_count_xla_once_miscompiled(self, num):
    queries, table = _normal(9, 257, 3), _normal(10, num, 3)
    table[1000::500] = 40 * queries[0]
    queries[:3] = 40 * queries[0]  # more ties than a list holds: step 4 at this size
    sq = sum((queries[:, None, j].astype(np.float64) - table[None, :, j])**2
             for j in range(3))
    ids, counts = _counted(queries, table)
    np.testing.assert_array_equal(ids, sq.argmin(axis=1))
    self.assertGreaterEqual(int(counts.exhausted), 3)
    ids, distances = neighbors.k_nearest(queries, table, 5)
    order = np.argsort(sq, axis=1, kind='stable')[:, :5]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(
        distances, np.sqrt(np.take_along_axis(sq, order, 1)),
        rtol=1.01 * 2.**-24)

  def test_the_slower_steps_run_where_float32_cannot_decide(self):
    for name, step in (('one_ulp', 'exhausted'), ('all_equal', 'exhausted'),
                       ('far_from_the_origin', 'exhausted'),
                       ('duplicates', 'settled')):
      counts = _counted(*_case(name))[1]
      self.assertEqual(int(getattr(counts, step)), _BATCH, name)
    counts = _counted(*_case('plain'))[1]
    self.assertEqual((int(counts.settled), int(counts.exhausted)), (0, 0))

  @parameterized.parameters((2, 0), (3, _BATCH))
  def test_near_ties_in_one_lane_are_all_looked_at(self, copies, exhausted):
    shape = scan.tiling(_DIM)
    apart = shape.group * shape.lanes
    table = np.tile(_normal(17, apart, _DIM), (copies, 1))
    for i in range(1, copies):
      table[i * apart:, 0] = np.nextafter(table[i * apart:, 0], np.float32(9))
    near = apart - _BATCH + np.arange(_BATCH)
    queries = table[near] + _normal(18, _BATCH, _DIM) / 10
    rows = near[:, None] + apart * np.arange(copies)[None]
    want = np.array([row[_exact_nearest(query[None], table[row], 1)[0][0, 0]]
                     for query, row in zip(queries, rows)])
    self.assertBetween(int((want < apart).sum()), 5, _BATCH - 5)
    ids, counts = _counted(queries, table)
    np.testing.assert_array_equal(ids, want)
    self.assertEqual(int(counts.exhausted), exhausted)

  @parameterized.parameters('one_ulp', 'far_from_the_origin')
  def test_the_hard_cases_defeat_plain_float32(self, name):
    queries, table = _case(name)
    scores = (table * table).sum(axis=1) / 2 - queries @ table.T
    want, _ = _exact_nearest(queries, table, 1)
    self.assertFalse(np.array_equal(scores.argmin(axis=1), want[:, 0]))

  @parameterized.parameters('huge_queries', 'permuted_rows')
  def test_two_cases_defeat_float64_differences_too(self, name):
    queries, table = _case(name)
    diff = queries[:, None].astype(np.float64) - table[None]
    want, _ = _exact_nearest(queries, table, 1)
    self.assertFalse(
        np.array_equal((diff**2).sum(axis=-1).argmin(axis=1), want[:, 0]))

  def test_runs_inside_jit_and_does_not_retrace(self):
    queries, table = _case('grid')
    want, _ = _exact_nearest(queries, table, 1)
    fun = jax.jit(chex.assert_max_traces(neighbors.nearest, n=1))
    for _ in range(2):
      np.testing.assert_array_equal(fun(queries, table)[0], want[:, 0])
    neighbors.nearest(queries, table)
    size = search.compiled(None)._cache_size()
    neighbors.nearest(table[:_BATCH], table + 1)
    self.assertEqual(search.compiled(None)._cache_size(), size)

  @parameterized.product(jit=(True, False), batch=(1, _BATCH - 1))
  def test_eight_devices_give_the_same_ids(self, jit, batch):
    queries, table = _case('grid')
    mesh = jax.make_mesh(
        (8,), ('shard',), axis_types=(jax.sharding.AxisType.Auto,))
    fun = lambda q, x: neighbors.nearest(q, x, mesh=mesh)
    ids, distances = (jax.jit(fun) if jit else fun)(queries[:batch], table)
    want, want_distances = neighbors.nearest(queries[:batch], table)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(distances, want_distances)

  def test_types_do_not_depend_on_the_64_bit_switch(self):
    queries, table = _case('one_ulp')
    want = neighbors.nearest(queries, table)
    with jax.enable_x64(True):
      got = neighbors.nearest(queries, table)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    np.testing.assert_array_equal(got[0], want[0])

  def test_takes_no_queries(self):
    ids, distances = neighbors.nearest(np.zeros((0, 3)), np.ones((2, 3)))
    chex.assert_shape([ids, distances], (0,))

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_refuses_entries_that_are_not_finite(self, value):
    good, bad = np.zeros((2, 3)), np.full((2, 3), value)
    with self.assertRaisesRegex(ValueError, 'queries has entries'):
      neighbors.nearest(bad, good)
    with self.assertRaisesRegex(ValueError, 'vectors has entries'):
      neighbors.nearest(good, bad)
    with self.assertRaisesRegex(ValueError, 'queries has entries'):
      neighbors.k_nearest(bad, good, 1)

  @parameterized.parameters(
      ((3,), (2, 3)), ((2, 3), (3,)), ((2, 3), (2, 4)), ((2, 3), (0, 3)),
      ((2, 0), (2, 0)))
  def test_refuses_shapes_that_do_not_fit(self, queries, vectors):
    with self.assertRaisesRegex(ValueError, 'of shape'):
      neighbors.nearest(np.zeros(queries), np.zeros(vectors))
    with self.assertRaisesRegex(ValueError, 'of shape'):
      jax.eval_shape(neighbors.nearest, np.zeros(queries), np.zeros(vectors))

  def test_refuses_an_unknown_precision(self):
    with self.assertRaisesRegex(ValueError, "precision='bfloat16'"):
      neighbors.nearest(np.zeros((1, 1)), np.zeros((1, 1)),
                        precision='bfloat16')
    ids, _ = neighbors.nearest(np.zeros((1, 1)), np.zeros((1, 1)),
                               precision='float32')
    self.assertEqual(ids.tolist(), [0])


class KNearestTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_is_the_real_arithmetic_order_with_ties_by_index(self, name):
    queries, table = _case(name)
    want, distances = _exact_nearest(queries, table, _K)
    ids, got = neighbors.k_nearest(queries, table, _K)
    self.assertEqual((ids.dtype, got.dtype), (jnp.int32, jnp.float32))
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_allclose(got, distances, rtol=1.01 * 2.**-24)

  @parameterized.parameters(
      (7, 1, 3, 1), (257, 513, 3, 1), (7, 64, 2, 64), (65, 511, 50, 505),
      (1, 33, 1, 20))
  def test_any_k_from_one_to_all_rows(self, batch, num, dim, k):
    queries, table = _normal(11, batch, dim), _normal(12, num, dim)
    want, _ = _exact_nearest(queries, table, k)
    ids, distances = neighbors.k_nearest(queries, table, k)
    np.testing.assert_array_equal(ids, want)
    self.assertTrue(bool(jnp.all(distances[:, 1:] >= distances[:, :-1])))

  def test_a_row_of_the_table_is_its_own_first_neighbour(self):
    table = _normal(13, _NUM, _DIM)
    ids, distances = neighbors.k_nearest(table, table, 3)
    np.testing.assert_array_equal(ids[:, 0], np.arange(_NUM))
    self.assertEqual(float(jnp.max(distances[:, 0])), 0.)
    self.assertGreater(float(jnp.min(distances[:, 1])), 0.)

  def test_the_slower_steps_run_where_float32_cannot_decide(self):
    for name, step in (('one_ulp', 'exhausted'), ('duplicates', 'settled')):
      counts = _counted(*_case(name), k=_K)[1]
      self.assertEqual(int(getattr(counts, step)), _BATCH, name)

  def test_runs_inside_jit(self):
    queries, table = _case('grid')
    want, _ = _exact_nearest(queries, table, _K)
    ids, _ = jax.jit(neighbors.k_nearest, static_argnums=2)(queries, table, _K)
    np.testing.assert_array_equal(ids, want)

  @parameterized.parameters(0, -1, 3)
  def test_refuses_k_out_of_range(self, k):
    with self.assertRaisesRegex(ValueError, f'k={k} must be an int in'):
      neighbors.k_nearest(np.zeros((1, 2)), np.ones((2, 2)), k)


class PreciseSqDistancesTest(parameterized.TestCase):

  @parameterized.parameters(1., 1e18)
  def test_keeps_every_bit_of_ordinary_differences(self, scale):
    # With |q| = 1e18 |x| the differences themselves do not fit a float64.
    queries = (_normal(14, 50, 30) * scale).astype(np.float32)
    rows = _normal(15, 50, 30)
    with jax.enable_x64(True):
      high, low = jax.jit(exact.precise_sq_distances)(queries, rows)
    for i in range(50):
      want, shift = _exact_sq_distances(queries[i:i + 1], rows[i:i + 1])
      (got, rest), digits = _doubles(float(high[i]), float(low[i]))
      error = abs(((got + rest) << shift) - (int(want[0, 0]) << digits))
      limit = 0 if scale == 1 else (int(want[0, 0]) << digits) >> 98
      self.assertLessEqual(error, limit)


def _doubles(*values):
  """Ints proportional to the doubles, and the log2 of the factor."""
  ratios = [value.as_integer_ratio() for value in values]
  digits = max(down.bit_length() - 1 for _, down in ratios)
  return [(up << digits) // down for up, down in ratios], digits


class ExactTiesTest(parameterized.TestCase):

  @parameterized.parameters(2, 2500)
  def test_ties_that_float64_breaks_go_to_the_lowest_index(self, num):
    table = self._ties(num)
    queries = np.zeros((1, _DIM), np.float32)
    ids, _ = neighbors.nearest(queries, table)
    self.assertEqual(ids.tolist(), [0])
    ids, _ = neighbors.k_nearest(queries, table, 2)
    self.assertEqual(ids.tolist(), [[0, 1]])

  def _ties(self, num):
    """Rows of equal norm whose float64 sum is greater in the first half."""
    rng = np.random.default_rng(19)
    row = _normal(20, 1, _DIM) * 10**rng.uniform(-2, 2, (1, _DIM))
    rows = rng.permuted(np.repeat(row, 200, 0), axis=1).astype(np.float32)
    zero = np.zeros((1, _DIM), np.float32)
    fun = jax.jit(exact.sq_distances)
    with jax.enable_x64(True):
      order = np.argsort(fun(zero, rows))
    # XLA orders the sum by the shape, so a few pairs are tried.
    for low, high in zip(order[:50], order[::-1]):
      table = np.repeat(rows[[high, low]], num // 2, axis=0)
      with jax.enable_x64(True):
        sums = fun(zero, table)
      if sums[0] > sums[-1]:
        return table
    return self.fail('no order of the entries makes float64 break the tie')


class DistanceRangeTest(parameterized.TestCase):

  @parameterized.parameters(*(c for c in _CASES
                              if c not in ('all_equal', 'zeros')))
  def test_equals_the_exact_least_and_greatest(self, name):
    table = _case(name)[1]
    sq_distances, shift = _exact_sq_distances(table, table)
    want = (_root(min(sq_distances[sq_distances > 0]), shift),
            _root(sq_distances.max(), shift))
    # Half the D + 3 float64 roundings of a sum, and one of the root.
    np.testing.assert_allclose(
        neighbors.distance_range(table), want, rtol=_DIM * 2.**-53)

  def test_spans_several_tiles(self):
    table = _normal(16, 2500, 3)
    table[2400] = table[3] + np.float32(1e-6)
    table[1500] = -30
    table[10] = 30
    got = neighbors.distance_range(table)
    self.assertEqual(got, tuple(
        float(np.linalg.norm(table[i].astype(np.float64) - table[j]))
        for i, j in ((2400, 3), (1500, 10))))

  def test_rows_that_differ_in_the_sign_of_zero_are_equal(self):
    self.assertEqual(
        neighbors.distance_range([[0., 1.], [-0., 1.], [0., 3.]]), (2., 2.))

  @parameterized.parameters(
      ([[1., 2.]], 'distinct row'), ([[1.], [1.]], 'distinct row'),
      ([1., 2.], 'must be'), ([[np.nan], [1.]], 'not finite'),
      ([[]], 'distinct row'))
  def test_refuses_a_table_without_a_range(self, vectors, message):
    with self.assertRaisesRegex(ValueError, message):
      neighbors.distance_range(vectors)
