"""Tests of jaxdp.neighbors.nearest against exact integer arithmetic."""

import functools
import math
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxdp import neighbors
from jaxdp.neighbors import gate
from jaxdp.neighbors import scan
from jaxdp.neighbors import search

# One shape, compiled once; no mesh of the tests divides its rows.
NUM, DIM, BATCH, K = 701, 20, 40, 5
HALF_ULP = 1.01 * 2.**-24  # one rounding to float32, after a float64 sum


def integers(*arrays):
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


def exact_sq_distances(queries, vectors):
  """Exact squared distances, Python ints ``[B, V]``, and their log2 factor."""
  (queries, vectors), shift = integers(queries, vectors)
  diff = queries[:, None, :] - vectors[None, :, :]
  return (diff * diff).sum(axis=-1), 2 * shift


def root(sq_distance, shift):
  """Square root of an exact integer over ``2 ** shift``, to 60 bits."""
  extra = 120 + shift % 2
  whole = math.isqrt(int(sq_distance) << extra)
  return math.ldexp(whole, -(shift + extra) // 2)


def exact_nearest(queries, vectors, k):
  """Ids and distances of the k nearest, ties by index."""
  sq_distances, shift = exact_sq_distances(queries, vectors)
  ids = np.argsort(sq_distances, axis=1, kind='stable')[:, :k]
  distances = np.array([[root(row[j], shift) for j in js]
                        for row, js in zip(sq_distances, ids)])
  return ids, distances


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def one_ulp_table():
  """Rows that differ from each other by one ulp in one or two entries."""
  rng = np.random.default_rng(3)
  table = np.repeat(normal(4, 1, DIM), NUM, axis=0)
  for row in table:
    for j in rng.choice(DIM, 2, replace=False):
      row[j] = np.nextafter(row[j], np.float32(rng.choice([-9, 9])))
  return table


def case(name):
  """Queries and table of a named difficulty."""
  queries, table = normal(1, BATCH, DIM), normal(2, NUM, DIM)
  rng = np.random.default_rng(5)
  powers = [10**rng.uniform(-18, 18, (n, 1)) for n in (BATCH, NUM)]
  grid = np.zeros((NUM, DIM))
  grid[:, :4] = rng.integers(-2, 3, (NUM, 4))
  # Two decades either side: the squares do not fit a float64.
  wide = normal(6, 1, DIM) * 10**rng.uniform(-2, 2, (1, DIM))
  shuffled = rng.permuted(np.repeat(wide, NUM, 0), axis=1)
  # Here they span 250 bits, and the least entry decides.
  decades = np.repeat(normal(7, 1, DIM) * 10**np.linspace(-18, 18, DIM), NUM, 0)
  decades[:, 0] = rng.permutation(np.arange(1, NUM + 1) // 2) * 1e-18
  pair = {
      'plain': (queries, table),
      'tiny': (queries * 1e-18, table * 1e-18),
      'huge': (queries * 1e18, table * 1e18),
      'huge_queries': (queries * 1e18, table),
      'vast_queries': (queries * 2.**118, one_ulp_table()),
      'decades': (np.zeros_like(queries), decades),
      'tiny_queries': (queries * 1e-18, table),
      'huge_table': (queries, table * 1e18),
      'tiny_table': (queries, table * 1e-18),
      'mixed_norms': (queries * powers[0], table * powers[1]),
      'far_from_the_origin': (queries + 1000, table + 1000),
      'one_cluster': (table[:1] + queries / 100, table[:1] + table / 100),
      'grid': (grid[:BATCH] + (grid[:BATCH] != 0) / 2, grid),
      'one_ulp': (one_ulp_table()[:BATCH] + queries * 1e-7, one_ulp_table()),
      'duplicates': (table[:BATCH], table[np.arange(NUM) % 100]),
      'permuted_rows': (np.zeros_like(queries), shuffled),
      'all_equal': (queries, np.ones_like(table)),
      'zeros': (np.zeros_like(queries), np.zeros_like(table)),
  }[name]
  return tuple(a.astype(np.float32) for a in pair)


CASES = ('plain', 'tiny', 'huge', 'huge_queries', 'vast_queries', 'decades',
         'tiny_queries', 'huge_table', 'tiny_table', 'mixed_norms',
         'far_from_the_origin', 'one_cluster', 'grid', 'one_ulp', 'duplicates',
         'permuted_rows', 'all_equal', 'zeros')


@functools.cache
def answer(name):
  """`exact_nearest` of a case, K of them."""
  return exact_nearest(*case(name), K)


def counted(queries, table, precision='float32', k=1):
  """Ids, and how many queries took the slower steps."""
  table = neighbors.prepare(table, precision=precision)
  # As `nearest` calls it, so that nothing is compiled again.
  fun = search.compiled(None) if k == 1 else search.compiled(None, k)
  ids, _, counts = fun(jnp.asarray(queries), table)
  return ids, counts


def mesh_of(*shape):
  axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
  return jax.make_mesh(
      shape, ('queries', 'rows')[:len(shape)], axis_types=axis_types)


class NearestTest(parameterized.TestCase):

  @parameterized.product(name=CASES, precision=('float32', 'certified'))
  def test_is_the_real_arithmetic_arg_min_with_ties_to_the_lowest(
      self, name, precision):
    queries, table = case(name)
    want, distances = answer(name)
    ids, got = neighbors.nearest(queries, table, precision=precision)
    self.assertEqual((ids.dtype, got.dtype), (jnp.int32, jnp.float32))
    np.testing.assert_array_equal(ids, want[:, 0])
    np.testing.assert_allclose(got, distances[:, 0], rtol=HALF_ULP)

  @parameterized.product(
      shape=((1, 1, 1), (7, 2, 3), (255, 511, 50), (256, 513, 1),
             (257, 513, 3), (1, 1025, 50)),
      precision=('float32', 'certified'))
  @pytest.mark.slow
  def test_odd_sizes_need_no_padding_from_the_caller(self, shape, precision):
    batch, num, dim = shape
    queries, table = normal(7, batch, dim), normal(8, num, dim)
    want, _ = exact_nearest(queries, table, 1)
    ids, distances = neighbors.nearest(queries, table, precision=precision)
    chex.assert_shape([ids, distances], (batch,))
    np.testing.assert_array_equal(ids, want[:, 0])

  @parameterized.parameters(32_769, 40_001)  # jaxlib 0.10.2
  @pytest.mark.slow
  def test_tables_beyond_the_row_count_xla_once_miscompiled(self, num):
    queries, table = normal(9, 257, 3), normal(10, num, 3)
    table[1000::500] = 40 * queries[0]
    queries[:3] = 40 * queries[0]  # more ties than a list holds: step 4
    sq = sum((queries[:, None, j].astype(np.float64) - table[None, :, j])**2
             for j in range(3))
    for precision in ('float32', 'certified'):
      ids, counts = counted(queries, table, precision)
      np.testing.assert_array_equal(ids, sq.argmin(axis=1))
      self.assertGreaterEqual(int(counts.exhausted), 3)
    ids, distances = neighbors.k_nearest(queries, table, 5)
    order = np.argsort(sq, axis=1, kind='stable')[:, :5]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(
        distances, np.sqrt(np.take_along_axis(sq, order, 1)), rtol=HALF_ULP)

  @parameterized.parameters('one_ulp', 'far_from_the_origin')
  def test_the_hard_cases_defeat_plain_float32(self, name):
    queries, table = case(name)
    scores = (table * table).sum(axis=1) / 2 - queries @ table.T
    self.assertFalse(
        np.array_equal(scores.argmin(axis=1), answer(name)[0][:, 0]))

  @parameterized.parameters('huge_queries', 'vast_queries', 'decades',
                            'permuted_rows')
  def test_some_cases_defeat_float64_differences_too(self, name):
    queries, table = case(name)
    diff = queries[:, None].astype(np.float64) - table[None]
    self.assertFalse(np.array_equal((diff**2).sum(axis=-1).argmin(axis=1),
                                    answer(name)[0][:, 0]))

  def test_runs_inside_jit_and_does_not_retrace(self):
    queries, table = normal(7, 7, 3), normal(8, 2, 3)
    want, _ = exact_nearest(queries, table, 1)
    fun = jax.jit(chex.assert_max_traces(
        lambda q, x: neighbors.nearest(
            q, neighbors.prepare(x, precision='certified')), n=1))
    for _ in range(2):
      np.testing.assert_array_equal(fun(queries, table)[0], want[:, 0])
    queries, table = case('plain')
    neighbors.nearest(queries, table)
    size = search.compiled(None)._cache_size()
    neighbors.nearest(table[:BATCH], table + 1)
    self.assertEqual(search.compiled(None)._cache_size(), size)

  @pytest.mark.slow
  def test_types_do_not_depend_on_the_64_bit_switch(self):
    queries, table = normal(7, 7, 3), np.repeat(normal(8, 1, 3), 2, axis=0)
    want = neighbors.nearest(queries, table, precision='certified')
    with jax.enable_x64(True):
      got = neighbors.nearest(queries, table, precision='certified')
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    np.testing.assert_array_equal(got[0], np.zeros(7))

  @parameterized.parameters('float32', 'certified')
  def test_takes_no_queries(self, precision):
    nobody, table = np.zeros((0, 3)), np.ones((2, 3))
    for mesh in (None, mesh_of(8)):
      ids, distances = neighbors.nearest(
          nobody, table, mesh=mesh, precision=precision)
      chex.assert_shape([ids, distances], (0,))
      self.assertEqual((ids.dtype, distances.dtype), (jnp.int32, jnp.float32))
      chex.assert_shape(neighbors.k_nearest(nobody, table, 2, mesh=mesh),
                        (0, 2))

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_refuses_entries_that_are_not_finite(self, value):
    good, bad = np.zeros((2, 3)), np.full((2, 3), value)
    with self.assertRaisesRegex(ValueError, 'queries has entries'):
      neighbors.nearest(bad, good)
    with self.assertRaisesRegex(ValueError, 'vectors has entries'):
      neighbors.nearest(good, bad)
    with self.assertRaisesRegex(ValueError, 'vectors has entries'):
      neighbors.prepare(bad)
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

  @parameterized.parameters(
      ({'precision': 'bfloat16'}, "precision='bfloat16' is unknown"),
      ({'impl': 'pallas'}, "impl='pallas' is unknown"))
  def test_refuses_an_unknown_choice(self, choice, message):
    with self.assertRaisesRegex(ValueError, message):
      neighbors.nearest(np.zeros((1, 1)), np.zeros((1, 1)), **choice)


class StepsTest(parameterized.TestCase):

  @parameterized.parameters('float32', 'certified')
  def test_the_slower_steps_run_where_the_scan_cannot_decide(self, precision):
    for name, step in (('one_ulp', 'exhausted'), ('all_equal', 'exhausted'),
                       ('far_from_the_origin', 'exhausted'),
                       ('duplicates', 'settled')):
      counts = counted(*case(name), precision)[1]
      self.assertEqual(int(getattr(counts, step)), BATCH, name)
    counts = counted(*case('plain'), precision)[1]
    self.assertEqual((int(counts.settled), int(counts.exhausted)), (0, 0))

  def test_near_ties_within_bfloat16_are_left_to_float32(self):
    ids, counts = counted(*case('one_cluster'), 'certified')
    np.testing.assert_array_equal(ids, answer('one_cluster')[0][:, 0])
    self.assertEqual((int(counts.uncertified), int(counts.exhausted)),
                     (BATCH, 0))
    counts = counted(*case('one_cluster'))[1]
    self.assertEqual((int(counts.uncertified), int(counts.exhausted)), (0, 0))

  def test_bfloat16_decides_nearly_all_of_plain_data(self):
    queries, table = case('plain')
    counts = counted(queries, table, 'certified')[1]
    self.assertLess(int(counts.uncertified), BATCH // 20)

  def test_a_few_rows_of_huge_norm_make_no_query_exhaustive(self):
    queries, table = case('plain')
    table[100:500:100] *= 1e5  # wide bounds, in four groups
    ids, counts = counted(queries, table)
    want, _ = exact_nearest(queries, table, 1)
    np.testing.assert_array_equal(ids, want[:, 0])
    self.assertEqual(int(counts.exhausted), 0)

  @parameterized.parameters((2, 0), (3, BATCH))
  @pytest.mark.slow
  def test_near_ties_in_one_lane_are_all_looked_at(self, copies, exhausted):
    shape = scan.tiling(DIM)
    apart = shape.group * shape.lanes
    table = np.tile(normal(17, apart, DIM), (copies, 1))
    for i in range(1, copies):
      table[i * apart:, 0] = np.nextafter(table[i * apart:, 0], np.float32(9))
    near = apart - BATCH + np.arange(BATCH)
    queries = table[near] + normal(18, BATCH, DIM) / 10
    rows = near[:, None] + apart * np.arange(copies)[None]
    want = np.array([row[exact_nearest(query[None], table[row], 1)[0][0, 0]]
                     for query, row in zip(queries, rows)])
    self.assertBetween(int((want < apart).sum()), 5, BATCH - 5)
    ids, counts = counted(queries, table)
    np.testing.assert_array_equal(ids, want)
    self.assertEqual(int(counts.exhausted), exhausted)


class PrepareTest(parameterized.TestCase):

  @parameterized.parameters('float32', 'certified')
  def test_a_prepared_table_gives_what_its_vectors_give(self, precision):
    queries, table = case('grid')
    prepared = neighbors.prepare(table, precision=precision)
    self.assertEqual(prepared.shape, table.shape)
    got = neighbors.nearest(queries, prepared)
    want = neighbors.nearest(queries, table, precision=precision)
    for a, b in zip(got, want):
      np.testing.assert_array_equal(a, b)

  def test_prepared_tables_cross_jit_as_pytrees(self):
    prepared = neighbors.prepare(normal(2, 9, 3), precision='certified')
    got = jax.jit(lambda table: table)(prepared)
    self.assertIsInstance(got, neighbors.PreparedTable)
    self.assertEqual(got.format, 'bfloat16')
    chex.assert_trees_all_equal(got, prepared)

  @parameterized.parameters((3,), (0, 3), (2, 0), (2, 3, 4))
  def test_refuses_what_is_no_table(self, *shape):
    with self.assertRaisesRegex(ValueError, 'vectors of shape'):
      neighbors.prepare(np.zeros(shape))

  def test_refuses_an_unknown_precision(self):
    with self.assertRaisesRegex(ValueError, "precision='bfloat16' is unknown"):
      neighbors.prepare(np.zeros((1, 1)), precision='bfloat16')

  def test_refuses_queries_that_do_not_fit(self):
    prepared = neighbors.prepare(np.zeros((2, 3)))
    with self.assertRaisesRegex(ValueError, 'vectors of shape'):
      neighbors.nearest(np.zeros((2, 4)), prepared)
    with self.assertRaisesRegex(ValueError, 'vectors of shape'):
      neighbors.k_nearest(np.zeros((2, 4)), prepared, 1)


class GateTest(parameterized.TestCase):

  def _traced(self, num=2**14):
    """What a table is prepared to while its caller is traced."""
    return jax.eval_shape(  # a new function each time: traces are cached
        lambda x: neighbors.prepare(x), np.zeros((num, 2), np.float32))

  @parameterized.parameters(
      ({'float32': 1., 'bfloat16': .5}, 'bfloat16'),
      ({'float32': 1., 'bfloat16': .9}, 'float32'),  # gains less than it costs
      ({'float32': 1., 'bfloat16': 2.}, 'float32'))
  def test_takes_fewer_bits_only_where_they_are_much_faster(
      self, seconds, choice):
    formats = {id(gate.rounding.FORMATS[name]): s
               for name, s in seconds.items()}
    with mock.patch.object(gate, '_seconds', lambda form: formats[id(form)]):
      self.assertEqual(gate.timing.__wrapped__(),
                       gate.Timing(choice, seconds))

  def test_a_format_that_the_backend_refuses_is_left_out(self):
    def seconds(form):
      if form is not gate.rounding.FORMATS['float32']:
        raise jax.errors.JaxRuntimeError('UNIMPLEMENTED')
      return 1.

    with mock.patch.object(gate, '_seconds', seconds):
      self.assertEqual(gate.timing.__wrapped__(),
                       gate.Timing('float32', {'float32': 1.}))

  def test_several_processes_measure_nothing(self):
    with mock.patch.object(gate, 'timing', side_effect=AssertionError), \
        mock.patch.object(jax, 'process_count', lambda: 2):
      self.assertEqual(self._traced().format, 'float32')

  def test_measures_once_and_even_while_a_caller_is_traced(self):
    gate.timing.cache_clear()
    table = self._traced()
    timing = neighbors.timing()
    self.assertIs(neighbors.timing(), timing)
    self.assertEqual(gate.timing.cache_info().misses, 1)
    self.assertContainsSubset({'float32', 'bfloat16'}, timing.seconds)
    for seconds in timing.seconds.values():
      self.assertIsInstance(seconds, float)
      self.assertGreater(seconds, 0)
    self.assertIn(timing.choice, timing.seconds)
    self.assertEqual(table.format, timing.choice)

  @parameterized.parameters('float32', 'bfloat16', 'tensorfloat32')
  def test_auto_takes_what_was_chosen(self, choice):
    with mock.patch.object(gate, 'timing', lambda: gate.Timing(choice, {})):
      table = self._traced()
      self.assertEqual(table.format, choice)
      self.assertEqual(table.reduced is None, choice == 'float32')
      jaxpr = str(jax.make_jaxpr(lambda x: neighbors.nearest(x[:3], x))(
          np.zeros((2**14, 2))))
    # Of the 8 bits that float32 has; float64 splits its halves with 11.
    self.assertEqual('exponent_bits=8' in jaxpr, choice != 'float32')

  def test_small_tables_are_not_worth_the_measurement(self):
    with mock.patch.object(gate, 'timing', side_effect=AssertionError):
      table = self._traced(2**14 - 1)
    self.assertEqual(table.format, 'float32')

  @parameterized.parameters('float32', 'bfloat16')
  def test_certified_is_fewer_bits_whatever_was_measured(self, choice):
    with mock.patch.object(gate, 'timing', lambda: gate.Timing(choice, {})):
      table = neighbors.prepare(np.ones((1, 1)), precision='certified')
    self.assertNotEqual(table.format, 'float32')
    self.assertIsNotNone(table.reduced)

  @pytest.mark.slow
  def test_auto_is_exact_in_a_jitted_call_that_measures(self):
    queries, table = normal(22, 40, 2), normal(23, 2**14, 2)
    gate.timing.cache_clear()
    ids, _ = jax.jit(neighbors.nearest)(queries, table)
    diff = queries[:, None].astype(np.float64) - table[None]
    np.testing.assert_array_equal(ids, (diff**2).sum(axis=-1).argmin(axis=1))
    self.assertEqual(gate.timing.cache_info().misses, 1)


class MeshTest(parameterized.TestCase):

  def test_a_mesh_that_splits_both_changes_no_answer(self):
    self._check((2, 4), 'float32')

  @parameterized.parameters(
      ((1,), 'float32'), ((2,), 'float32'), ((8,), 'certified'),
      ((1, 8), 'float32'), ((4, 2), 'float32'), ((2, 4), 'certified'))
  @pytest.mark.slow
  def test_nor_do_others(self, shape, precision):
    self._check(shape, precision)

  def _check(self, shape, precision):
    mesh = mesh_of(*shape)
    # Ties in different parts, near ties, rows that pad a part, plain data.
    for name in ('duplicates', 'all_equal', 'grid', 'one_ulp', 'mixed_norms',
                 'huge_queries', 'vast_queries', 'decades', 'permuted_rows',
                 'plain'):
      queries, table = case(name)
      if name == 'plain':
        queries[:5] = table[-1] + np.float32(1e-3)
      ids, distances = neighbors.nearest(
          queries[:-1], table, mesh=mesh, precision=precision)
      want = neighbors.nearest(queries, table, precision=precision)
      if name != 'plain':
        np.testing.assert_array_equal(ids, answer(name)[0][:-1, 0], name)
      np.testing.assert_array_equal(ids, want[0][:-1], name)
      np.testing.assert_array_equal(distances, want[1][:-1], name)

  @pytest.mark.slow
  def test_a_prepared_table_lies_in_parts_and_is_searched_there(self):
    mesh = mesh_of(2, 4)
    for name, precision in (('decades', 'float32'), ('grid', 'certified')):
      queries, table = case(name)
      ready = neighbors.prepare(table, precision=precision, mesh=mesh)
      for leaf in jax.tree.leaves(ready):
        for shard in leaf.addressable_shards:
          self.assertEqual(
              shard.data.shape, (-(-NUM // 4), *leaf.shape[1:])[:leaf.ndim])
      ids, _ = neighbors.nearest(queries, ready, mesh=mesh)
      np.testing.assert_array_equal(ids, answer(name)[0][:, 0])
      near, _ = neighbors.k_nearest(queries, ready, K, mesh=mesh)
      np.testing.assert_array_equal(near, answer(name)[0])
    for other in (None, mesh_of(8)):
      with self.assertRaisesRegex(ValueError, 'pass the mesh'):
        neighbors.nearest(queries, ready, mesh=other)

  @pytest.mark.slow
  def test_copies_for_another_split_crowd_out_no_row(self):
    table = normal(31, NUM, DIM)
    table[:NUM // 2] += 100.  # all neighbours lie where the copies do
    ready = neighbors.prepare(table, mesh=mesh_of(2, 4))  # three copies
    got, _ = neighbors.k_nearest(table[-1:], ready, K, mesh=mesh_of(4, 2))
    np.testing.assert_array_equal(got, exact_nearest(table[-1:], table, K)[0])

  @parameterized.parameters(True, False)
  @pytest.mark.slow
  def test_needs_no_query_for_every_device(self, jit):
    queries, table = case('grid')
    mesh = mesh_of(8)
    fun = lambda q, x: neighbors.nearest(q, x, mesh=mesh)
    ids, distances = (jax.jit(fun) if jit else fun)(queries[:1], table)
    want, want_distances = answer('grid')
    np.testing.assert_array_equal(ids, want[:1, 0])
    np.testing.assert_allclose(
        distances, want_distances[:1, 0], rtol=HALF_ULP)
