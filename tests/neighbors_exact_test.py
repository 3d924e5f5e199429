"""Tests of jaxdp.neighbors: k nearest, float64 and beyond, ranges, size."""

import fractions

import jax
import jax.numpy as jnp
import neighbors_test as cases
import numpy as np
import pytest
from absl.testing import parameterized

from jaxdp import neighbors
from jaxdp.neighbors import exact

_BATCH, _DIM, _K = cases.BATCH, cases.DIM, cases.K


class KNearestTest(parameterized.TestCase):

  @parameterized.parameters(*cases.CASES)
  def test_is_the_real_arithmetic_order_with_ties_by_index(self, name):
    queries, table = cases.case(name)
    want, distances = cases.answer(name)
    ids, got = neighbors.k_nearest(queries, table, _K)
    self.assertEqual((ids.dtype, got.dtype), (jnp.int32, jnp.float32))
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_allclose(got, distances, rtol=cases.HALF_ULP)

  def test_takes_a_prepared_table_of_any_precision(self):
    queries, table = cases.case('grid')
    for precision in ('float32', 'certified'):
      prepared = neighbors.prepare(table, precision=precision)
      ids, _ = neighbors.k_nearest(queries, prepared, _K)
      np.testing.assert_array_equal(ids, cases.answer('grid')[0])

  @parameterized.parameters(
      (7, 1, 3, 1), (257, 513, 3, 1), (7, 64, 2, 64), (65, 511, 50, 505),
      (1, 33, 1, 20))
  @pytest.mark.slow
  def test_any_k_from_one_to_all_rows(self, batch, num, dim, k):
    queries, table = cases.normal(11, batch, dim), cases.normal(12, num, dim)
    want, _ = cases.exact_nearest(queries, table, k)
    ids, distances = neighbors.k_nearest(queries, table, k)
    np.testing.assert_array_equal(ids, want)
    self.assertTrue(bool(jnp.all(distances[:, 1:] >= distances[:, :-1])))

  @pytest.mark.slow
  def test_a_row_of_the_table_is_its_own_first_neighbour(self):
    table = cases.normal(13, cases.NUM, _DIM)
    ids, distances = neighbors.k_nearest(table, table, 3)
    np.testing.assert_array_equal(ids[:, 0], np.arange(cases.NUM))
    self.assertEqual(float(jnp.max(distances[:, 0])), 0.)
    self.assertGreater(float(jnp.min(distances[:, 1])), 0.)

  def test_the_slower_steps_run_where_float32_cannot_decide(self):
    for name, step in (('one_ulp', 'exhausted'), ('duplicates', 'settled')):
      counts = cases.counted(*cases.case(name), k=_K)[1]
      self.assertEqual(int(getattr(counts, step)), _BATCH, name)

  @pytest.mark.slow
  def test_runs_inside_jit(self):
    queries, table = cases.case('grid')
    ids, _ = jax.jit(neighbors.k_nearest, static_argnums=2)(queries, table, _K)
    np.testing.assert_array_equal(ids, cases.answer('grid')[0])

  @parameterized.parameters(0, -1, 3, 1.5, True)
  def test_refuses_k_out_of_range(self, k):
    with self.assertRaisesRegex(ValueError, f'k={k} must be an int in'):
      neighbors.k_nearest(np.zeros((1, 2)), np.ones((2, 2)), k)

  def test_refuses_more_neighbours_than_a_part_of_the_table_has(self):
    queries, table = np.zeros((2, 2)), np.ones((9, 2))
    with self.assertRaisesRegex(ValueError, 'k=4 exceeds the rows of one of 4'):
      neighbors.k_nearest(queries, table, 4, mesh=cases.mesh_of(2, 4))

  @parameterized.parameters(((2,),), ((2, 4),), ((1, 8),))
  @pytest.mark.slow
  def test_a_mesh_changes_no_neighbour(self, shape):
    mesh = cases.mesh_of(*shape)
    for name in ('plain', 'duplicates', 'one_ulp', 'all_equal'):
      queries, table = cases.case(name)
      queries[:5] = table[-1] + np.float32(1e-3)  # near what pads a part
      ids, distances = neighbors.k_nearest(queries[:-1], table, _K, mesh=mesh)
      want, want_distances = neighbors.k_nearest(queries, table, _K)
      np.testing.assert_array_equal(ids, want[:-1], name)
      np.testing.assert_array_equal(distances, want_distances[:-1], name)
      np.testing.assert_array_equal(
          want, cases.exact_nearest(queries, table, _K)[0], name)

  @pytest.mark.slow
  def test_distances_below_the_normal_numbers_are_in_order(self):
    table = cases.one_ulp_table()[:80] * np.float32(2**-122)
    queries = table[:7]
    want, _ = cases.exact_nearest(queries, table, _K)
    ids, _ = neighbors.k_nearest(queries, table, _K)
    np.testing.assert_array_equal(ids, want)


class ExactScoresTest(parameterized.TestCase):

  @parameterized.parameters(0, 60, 126)
  def test_keeps_every_bit(self, spread):
    # Powers of two up to `spread` either side, zeros, the largest float32.
    rng = np.random.default_rng(14)
    draw = lambda *shape: np.ldexp(
        rng.normal(size=shape), rng.integers(-spread, spread + 1, shape)
    ).astype(np.float32)
    query, rows = draw(30), draw(50, 30)
    rows[0], rows[1, :3], query[:2] = 0., np.finfo(np.float32).max, 0.
    with jax.enable_x64(True):
      limbs = np.asarray(jax.jit(exact.exact_scores)(query, rows))
    self.assertTrue((limbs[:, :-1] >= 0).all() and (limbs < 2**32).all())
    for got, row in zip(limbs, rows):
      want = sum(fractions.Fraction(float(x))**2
                 - 2 * fractions.Fraction(float(x)) * fractions.Fraction(
                     float(q))
                 for x, q in zip(row, query))
      value = sum(int(limb) << 32 * i for i, limb in enumerate(got))
      self.assertEqual(value, want * 2**298)

  def test_subnormal_entries_count(self):
    rows = np.float32([[2**-149, 2**-126], [2**-148, 2**-126], [0., 2**-127]])
    with jax.enable_x64(True):
      limbs = np.asarray(jax.jit(exact.exact_scores)(
          np.float32([2**-149, 0.]), rows))
    self.assertEqual(
        [sum(int(limb) << 32 * i for i, limb in enumerate(got))
         for got in limbs], [2**46 - 1, 2**46, 2**44])

  @parameterized.parameters(1, 3, 5)
  def test_least_is_a_sort_and_takes_no_row_twice(self, k):
    rng = np.random.default_rng(3)
    values = [int(v) for v in rng.integers(-3, 3, 12)]
    ids = np.int32([7, 3, 9, 3, 1, 0, 4, 6, 2, 8, 11, 10])
    values[3] = values[1]  # the same row twice
    live = np.arange(12) % 5 != 4
    limbs = np.zeros((12, exact._LIMBS), np.int64)
    limbs[:, 0] = [v % 2**32 for v in values]
    limbs[:, 1:-1] = np.where(np.int64(values)[:, None] < 0, 2**32 - 1, 0)
    limbs[:, -1] = np.where(np.int64(values) < 0, -1, 0)
    with jax.enable_x64(True):
      at = np.asarray(jax.jit(exact.least, static_argnums=3)(
          limbs, ids, live, k))
    want = sorted({(v, i) for v, i, own in zip(values, ids.tolist(), live)
                   if own})[:k]
    self.assertEqual([(values[i], int(ids[i])) for i in at], want)


class ExactTiesTest(parameterized.TestCase):

  @parameterized.parameters(2, 2500)
  @pytest.mark.slow
  def test_ties_that_float64_breaks_go_to_the_lowest_index(self, num):
    table = self._ties(num)
    queries = np.zeros((1, _DIM), np.float32)
    for precision in ('float32', 'certified'):
      ids, _ = neighbors.nearest(queries, table, precision=precision)
      self.assertEqual(ids.tolist(), [0])
    ids, _ = neighbors.k_nearest(queries, table, 2)
    self.assertEqual(ids.tolist(), [[0, 1]])

  def _ties(self, num):
    """Rows of equal norm whose float64 sum is greater in the first half."""
    rng = np.random.default_rng(19)
    row = cases.normal(20, 1, _DIM) * 10**rng.uniform(-2, 2, (1, _DIM))
    rows = rng.permuted(np.repeat(row, 200, 0), axis=1).astype(np.float32)
    zero = np.zeros((1, _DIM), np.float32)
    fun = jax.jit(exact.sq_distances)
    with jax.enable_x64(True):
      order = np.argsort(fun(zero[0], rows))
    # XLA orders the sum by the shape, so a few pairs are tried.
    for low, high in zip(order[:50], order[::-1]):
      table = np.repeat(rows[[high, low]], num // 2, axis=0)
      with jax.enable_x64(True):
        sums = fun(zero[0], table)
      if sums[0] > sums[-1]:
        return table
    return self.fail('no order of the entries makes float64 break the tie')


class DistanceRangeTest(parameterized.TestCase):

  @parameterized.parameters(*(c for c in cases.CASES
                              if c not in ('all_equal', 'zeros')))
  def test_equals_the_exact_least_and_greatest(self, name):
    table = cases.case(name)[1][:150]
    sq_distances, shift = cases.exact_sq_distances(table, table)
    want = (cases.root(min(sq_distances[sq_distances > 0]), shift),
            cases.root(sq_distances.max(), shift))
    # Half the D + 3 float64 roundings of a sum, and one of the root.
    np.testing.assert_allclose(
        neighbors.distance_range(table), want, rtol=_DIM * 2.**-53)

  def test_spans_several_tiles(self):
    table = cases.normal(16, 2500, 3)
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


class LargeTest(parameterized.TestCase):
  """Sizes of use: 33,000 rows of 100 entries, 20,000 queries."""

  _NUM, _QUERIES, _SIZE = 33_000, 20_000, 100

  @parameterized.parameters('float32', 'certified')
  @pytest.mark.slow
  def test_every_id_is_right_on_clustered_and_badly_scaled_rows(
      self, precision):
    queries, table = self._clustered()
    ids, counts = cases.counted(queries, table, precision)
    wrong = [i for i, want in enumerate(self._answers(queries, table))
             if int(ids[i]) != want]
    self.assertEqual(wrong, [])
    # Both halves of the data do what they are for.
    self.assertGreater(int(counts.settled), 100)
    self.assertGreater(int(counts.exhausted), 100)
    if precision == 'certified':
      self.assertBetween(int(counts.uncertified), 100, self._QUERIES // 2)

  def _clustered(self):
    """Rows in fours, equal or an ulp apart; some scaled; a great cluster."""
    rng = np.random.default_rng(24)
    num_centres = self._NUM // 4
    centres = rng.normal(size=(num_centres, self._SIZE)).astype(np.float32)
    # Alike rows side by side: a great norm makes the bound of a group useless,
    # and every query is then searched exhaustively, which is right but slow.
    powers = np.sort(rng.uniform(-8, 8, 300))
    centres[-300:] *= 10**powers[:, None].astype(np.float32)
    which = np.concatenate([
        rng.permutation(np.arange(self._NUM - 1200) % (num_centres - 300)),
        num_centres - 300 + np.arange(1200) // 4])
    which[rng.choice(self._NUM - 1200, 600, replace=False)] = 0
    table = centres[which]
    column = rng.integers(0, self._SIZE, self._NUM)
    rows = np.flatnonzero(np.arange(self._NUM) % 3)  # the others stay equal
    at = (rows, column[rows])
    table[at] = np.nextafter(
        table[at], rng.choice(np.float32([-np.inf, np.inf]), len(rows)))
    near = rng.integers(0, self._NUM, self._QUERIES)
    near[:100] = np.flatnonzero(which == 0)[:100]
    norm = np.linalg.norm(table[near].astype(np.float64), axis=1)
    noise = rng.normal(size=(self._QUERIES, self._SIZE)) / self._SIZE**.5
    size = norm * 10**rng.uniform(-7.5, .3, self._QUERIES)
    size[::50] = 0
    return (table[near] + noise * size[:, None]).astype(np.float32), table

  def _answers(self, queries, table):
    """Nearest rows: float64, and exact integers among what it cannot tell."""
    wide = table.astype(np.float64)
    norm = np.linalg.norm(wide, axis=1)
    # Twice what D products and sums, in any order, and the norms lose.
    unit = (self._SIZE + 8) * 2.**-52
    for start in range(0, len(queries), 256):
      block = queries[start:start + 256].astype(np.float64)
      score = norm**2 / 2 - block @ wide.T
      error = unit * norm * (
          np.linalg.norm(block, axis=1)[:, None] + norm / 2)
      least = np.min(score + error, axis=1)
      score -= error
      for query, low, high in zip(block, score, least):
        yield self._least(query, table, wide, np.flatnonzero(low <= high))

  def _least(self, query, table, wide, rows):
    sq = np.sum((wide[rows] - query)**2, axis=1)
    rows = rows[sq <= sq.min() * (1 + (self._SIZE + 8) * 2.**-51)]
    if (table[rows] == table[rows[0]]).all():
      return rows[0]
    query = query.astype(np.float32)[None]
    return rows[cases.exact_nearest(query, table[rows], 1)[0][0, 0]]
