"""Tests of the rounding bound of jaxdp.neighbors against exact rationals."""

import fractions
import functools

import jax
import jax.numpy as jnp
import neighbors_test as cases
import numpy as np
import pytest
from absl.testing import parameterized

from jaxdp import neighbors
from jaxdp.neighbors import rounding

_NUM, _BATCH = 32, 8
_DIMS = (3, 100)
_FORMATS = tuple(rounding.FORMATS)
_FEWER = ('bfloat16', 'tensorfloat32')
_BITS = {'bfloat16': 7, 'tensorfloat32': 10}  # explicit bits

_prepare = jax.jit(rounding.prepare, static_argnums=1)


@jax.jit
def _scored(table, queries):
  """Scores ``[V, B]``, their bound, and the `Block`, as a scan has them."""
  block = rounding.prepare_block(table, queries)
  rows = (table.vectors * table.scale if table.reduced is None
          else table.reduced)
  score = block.score(rounding.FORMATS[table.format], rows, table.half)
  return score, block.error(table.half, table.norm, table.residual), block


@functools.cache
def _flushes():
  """Whether the device takes what is below 2^-126 for zero."""
  return float(jax.jit(lambda x: x * 2.**100)(np.float32(1e-40))) == 0


def _exact_scores(queries, table, scales):
  """Real-arithmetic scores, Fractions ``[V, B]``."""
  least = 2.**-126 if _flushes() else 0.
  queries, table = (
      np.where(abs(a) < least, np.float32(0), a) for a in (queries, table))
  (queries, table), shift = cases.integers(queries, table)
  twice = (table * table).sum(axis=1)[:, None] - 2 * table @ queries.T
  unit = fractions.Fraction(2)**(-2 * shift - 1)
  factor = [fractions.Fraction(a) * fractions.Fraction(b) * unit
            for a, b in np.asarray(scales, np.float64).T]
  return twice * np.array(factor)[None]


def _rationals(array):
  return np.vectorize(fractions.Fraction, otypes=[object])(
      np.asarray(array, np.float64))


def _missed(queries, table, name):
  """What scores miss and its bound, Fractions ``[V, B]``; table and block."""
  prepared = _prepare(table, name)
  score, error, block = _scored(prepared, queries)
  want = _exact_scores(queries, table, block.scales)
  return abs(_rationals(score) - want), _rationals(error), prepared, block


def _pairs(dim, bits):
  """Named queries and tables that are hard on ``bits`` explicit bits."""
  rng = np.random.default_rng(dim)
  q, x = rng.normal(size=(_BATCH, dim)), rng.normal(size=(_NUM, dim))
  near = x[:1] + rng.normal(size=x.shape) * 10**rng.uniform(-8, -2, (_NUM, 1))
  sign = np.where(np.arange(dim) % 2, -1., 1.)[None]
  # A sum that begins with 1 loses each of the products that follow.
  lost = np.where(np.arange(dim) == 0, 1., 2.**-12 * (1 - 2.**-20))[None]
  middle = 1 + 2.**-(bits + 1) + 2.**-23 * rng.choice([-1, 0, 1], x.shape)
  hole = rng.random(x.shape) < .5
  first = (np.arange(_NUM) == 0)[:, None]
  pairs = {
      'plain': (q, x),
      'near ties': (near[:_BATCH] + q * 1e-6, near),
      'near ties, small': (near[:_BATCH] * 1e-30, near * 1e-30),
      'near ties, great': (near[:_BATCH] * 1e30, near * 1e30),
      'huge norms': (np.sign(q) * 3.4e38, np.sign(x) * 3.4e38),
      'huge and tiny': (np.sign(q) * 3.4e38, x * 1e-37),
      'tiny and huge': (q * 1e-37, np.sign(x) * 3.4e38),
      'partly subnormal': (np.where(hole[:_BATCH], q, 1e-40),
                           np.where(hole, x, 1e-40)),
      'near the subnormal': (q * 1e-37, x * 1e-37),
      'underflow': (np.full_like(q, 2.**-64),
                    np.where(first, 1, np.full_like(x, 2.**-64))),
      'any magnitude': (q * 10**rng.uniform(-18, 18, q.shape),
                        x * 10**rng.uniform(-18, 18, x.shape)),
      'any norm': (q * 10**rng.uniform(-30, 30, (_BATCH, 1)),
                   x * 10**rng.uniform(-30, 30, (_NUM, 1))),
      'alternating': (1 + q * 1e-3, sign * (1 + x * 1e-6)),
      'swallowed': (lost + q * 0, lost + x * 0),
      'swallowed, backward': ((lost + q * 0)[:, ::-1], (lost + x * 0)[:, ::-1]),
      'midpoints': (middle[:_BATCH], middle),
      'midpoints, alternating': (middle[:_BATCH] * sign, middle),
      'midpoints of any sign': (np.sign(q) * middle[:_BATCH],
                                np.sign(x) * middle),
      'zeros': (q * 0, x * 0),
      'zero queries': (q * 0, x),
  }
  return {key: tuple(np.asarray(a, np.float32) for a in pair)
          for key, pair in pairs.items()}


class BoundTest(parameterized.TestCase):

  @parameterized.product(name=_FORMATS, dim=_DIMS)
  def test_no_score_misses_more_than_its_bound(self, name, dim):
    self._check_bound(name, dim)

  @parameterized.product(name=_FORMATS, dim=(1, 300))
  @pytest.mark.slow
  def test_nor_does_one_of_fewer_or_more_entries(self, name, dim):
    self._check_bound(name, dim)

  def _check_bound(self, name, dim):
    for key, (queries, table) in _pairs(dim, _BITS.get(name, 7)).items():
      missed, bound, _, _ = _missed(queries, table, name)
      self.assertTrue((missed <= bound).all(), key)

  @parameterized.parameters(*_FORMATS)
  @pytest.mark.slow
  def test_nor_does_one_in_a_product_of_the_size_of_a_tile(self, name):
    dim = 100
    rng = np.random.default_rng(21)
    table = rng.normal(size=(1024, dim)).astype(np.float32)
    queries = rng.normal(size=(512, dim)).astype(np.float32)
    lost = _pairs(dim, 7)['swallowed'][0][0]
    queries[::2], table[::2] = lost, lost * np.sign(table[::2])
    prepared = _prepare(table, name)
    score, bound, block = _scored(prepared, queries)
    scales = np.asarray(block.scales, np.float64)
    wide = table.astype(np.float64)
    want = (np.sum(wide * wide, axis=1)[:, None] / 2 - wide @ queries.T)
    missed = abs(score - want * (scales[0] * scales[1])[None])
    # The float64 oracle itself misses at most 2^-30 of the bound.
    self.assertTrue((missed <= bound * (1 + 2.**-29)).all())

  @parameterized.product(name=_FEWER, dim=_DIMS, which=('both', 'q', 'x'))
  def test_adversarial_rounding_takes_nine_tenths_of_the_bound(
      self, name, dim, which):
    # Entries just above a midpoint lose half a unit each, all one way: the
    # residual is parallel to the other operand, so Cauchy-Schwarz is tight.
    above = 1 + 2.**-(_BITS[name] + 1) + 2.**-23
    queries, table = (
        np.full((num, dim), above if which in ('both', side) else 1, np.float32)
        for num, side in ((_BATCH, 'q'), (_NUM, 'x')))
    missed, bound, prepared, block = _missed(queries, table, name)
    sums = _rationals(block._replace(slope=_sums_slope(block, dim)).error(
        prepared.half, prepared.norm))
    self.assertTrue((missed <= bound).all())
    # The sums, of the product and half of that of the row, take
    # 1.5 (D + 8) 2^-23 beside the residual's 2^-11: a 25th at D = 100.
    self.assertTrue((missed >= fractions.Fraction(9, 10) * bound).all())
    # So a bound without the residuals is wrong, by far.
    self.assertTrue((missed > 5 * sums).all())

  @parameterized.parameters(*_FORMATS)
  def test_a_bad_order_of_the_sum_takes_a_part_of_the_bound(self, name):
    queries, table = _pairs(100, 7)['swallowed']
    missed, bound, _, _ = _missed(queries, table, name)
    # One running sum would take (D - 1) / (2 D + 16); 8 apart, an eighth.
    self.assertGreater(float((missed / bound).min()), .05)

  @parameterized.parameters(
      ('slope', 'huge and tiny'), ('weight', 'zero queries'),
      (None, 'underflow'))
  def test_no_other_term_can_be_left_out(self, term, key):
    queries, table = _pairs(100, 7)[key]
    missed, bound, prepared, block = _missed(queries, table, 'float32')
    self.assertTrue((missed <= bound).all())
    if term is None:
      less = np.asarray(bound, np.float64) - 100 * 2.**-120
      self.assertEqual(bool((missed > less).any()), _flushes())
    else:
      block = block._replace(**{term: jnp.zeros_like(getattr(block, term))})
      less = block.error(prepared.half, prepared.norm)
      self.assertTrue((missed > _rationals(less)).any())


def _sums_slope(block, dim):
  """The slope that stays when the residual of the query is left out."""
  return block.tilt * (dim + 8) * 2.**-23


class RoundingTest(parameterized.TestCase):

  @parameterized.parameters(*_FEWER)
  def test_operands_are_rounded_to_nearest_under_jit(self, name):
    queries, table = _pairs(100, _BITS[name])['midpoints of any sign']
    prepared = _prepare(table, name)
    _, _, block = _scored(prepared, queries)
    for got, want in (
        (prepared.reduced, table * np.asarray(prepared.scale)),
        (block.operand.T, queries * np.asarray(block.scales[0])[:, None])):
      self.assertEqual(got.dtype, rounding.FORMATS[name].dtype)
      np.testing.assert_array_equal(
          np.asarray(got, np.float32), _nearest_even(want, _BITS[name]))

  @parameterized.parameters(*_FEWER)
  def test_the_compiler_does_not_lose_the_residual(self, name):
    # Were the cast dropped as excess precision, it would be 0.
    queries, table = _pairs(100, _BITS[name])['plain']
    prepared = _prepare(table, name)
    scaled = table.astype(np.float64) * float(prepared.scale)
    want = np.linalg.norm(scaled - _nearest_even(scaled, _BITS[name]), axis=1)
    self.assertGreater(float(prepared.residual.min()), 0)
    np.testing.assert_allclose(prepared.residual, want, rtol=100 * 2.**-24)
    _, _, block = _scored(prepared, queries)
    scaled = queries.astype(np.float64) * np.asarray(block.scales[0])[:, None]
    want = np.linalg.norm(scaled - _nearest_even(scaled, _BITS[name]), axis=1)
    lost = (block.slope - _sums_slope(block, 100))[0]
    # Computed here as a difference, hence the second term.
    np.testing.assert_allclose(
        lost, want, rtol=300 * 2.**-24, atol=2.**-22 * float(lost.max()))

  def test_certified_tables_have_a_residual_and_others_none(self):
    table = _pairs(3, 7)['plain'][1]
    prepared = neighbors.prepare(table, precision='certified')
    self.assertGreater(float(prepared.residual.min()), 0)
    plain = neighbors.prepare(table, precision='float32')
    self.assertIsNone(plain.residual)
    self.assertIsNone(plain.reduced)

  def test_scales_are_powers_of_two_into_one_half_to_one(self):
    sizes = np.ldexp(np.float32([1, 1.9999999]), np.arange(-126, 126)[:, None])
    sizes = sizes.astype(np.float32)
    powers = np.asarray(rounding.inverse_power(sizes))
    np.testing.assert_array_equal(np.frexp(powers)[0], .5)
    scaled = sizes.astype(np.float64) * powers
    self.assertBetween(scaled.min(), .5, .5)
    self.assertLess(scaled.max(), 1)
    ends = np.asarray(rounding.inverse_power(
        np.float32([0, np.finfo(np.float32).max])))
    self.assertEqual(ends.tolist(), [2.**126, 2.**-126])


def _nearest_even(array, bits):
  """Float32 values rounded to ``bits`` explicit bits, ties to even."""
  mantissa, exponent = np.frexp(np.asarray(array, np.float64))
  # np.round takes ties to even.
  return np.ldexp(np.round(mantissa * 2.**(bits + 1)), exponent - bits - 1)
