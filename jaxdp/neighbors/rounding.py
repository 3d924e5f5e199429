r"""Tables and queries made ready for the scan, and how wrong a score can be.

Device. Everything is scaled by powers of two first, which is exact: the table
by :math:`s_x`, so that its largest entry is about 1, and each query by its own
:math:`s_q \le s_x`, so that one huge query spoils no other. With
:math:`\tilde x = s_x x`, :math:`\tilde q = s_q q` and
:math:`r = s_q / s_x` the score of row x is

.. math::
  \sigma = r |\tilde x|^2 / 2 - \tilde q \cdot \tilde x
         = s_q s_x (|q - x|^2 - |q|^2) / 2,

least where the distance is. The scan computes it in float32 from operands that
may have been rounded further, :math:`\hat q` and :math:`\hat x` (bfloat16, say;
in float32 they are :math:`\tilde q`, :math:`\tilde x` themselves). What the
computed score s misses is bounded by the triangle inequality and
Cauchy-Schwarz:

.. math::
  |s - \sigma| \le
     |\tilde q - \hat q| |\tilde x| + |\hat q| |\tilde x - \hat x|
     + u |\hat q| |\hat x| + u \, r |\tilde x|^2 / 2 + D \, 2^{-120}.

The first two terms are what rounding the operands took away: *measured* norms
of the residuals, which float32 holds exactly, two to three times smaller than
their worst case. The next two are what D products and sums lose in whatever
order, fused or not: :math:`\gamma_{D+4}` of Higham (2002), eq. (3.5), with
:math:`u` = (D + 8) 2^-23 about twice that, the other half paying for the norms
and for the arithmetic of the bound itself. Tensor cores truncate when
they align and add, so :math:`u` is doubled for reduced operands off the CPU.
The last term covers what underflow flushes.

Shape letters: ``N`` queries of a block, ``V`` rows of the table, ``D``
dimensions.

Reference: Higham (2002), "Accuracy and Stability of Numerical Algorithms".
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Format(NamedTuple):
  """Operands of the matrix product of a scan.

  Attributes:
    mantissa_bits: explicit bits an entry is rounded to; None for float32.
    dtype: what holds such an entry.
    precision: how a product of two arrays of ``dtype`` is asked for, so that
      its terms are exact and its sums float32; by platform, default last.
  """
  mantissa_bits: int | None
  dtype: jnp.dtype
  precision: tuple[tuple[str, object], ...]

  def product(self, rows, operand):
    """``rows [T, D] @ operand [D, N]``, float32 sums, precision named."""
    platform = jax.default_backend()
    precision = dict(self.precision).get(platform, lax.Precision.HIGHEST)
    return jnp.matmul(rows, operand, precision=precision,
                      preferred_element_type=jnp.float32)


# HIGHEST is float32 on a CPU and an NVIDIA GPU, whose default is TF32. Entries
# that TF32 or bfloat16 holds exactly lose nothing in a product of that name.
FORMATS = {
    'float32': Format(None, jnp.dtype(jnp.float32), ()),
    'bfloat16': Format(7, jnp.dtype(jnp.bfloat16),
                       (('gpu', lax.Precision.DEFAULT),
                        ('tpu', lax.Precision.DEFAULT))),
    'tensorfloat32': Format(10, jnp.dtype(jnp.float32), (
        ('gpu', lax.DotAlgorithmPreset.TF32_TF32_F32),)),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedTable:
  """A table with what every search in it needs; a pytree.

  Attributes:
    vectors: float32 ``[V, D]``, as given.
    scale: power of two, ``[]``; ``max |vectors| * scale`` is about 1.
    half: ``|x|^2 / 2`` of the scaled rows, ``[V]``.
    norm: ``|x|`` of the scaled rows, ``[V]``.
    reduced: the scaled rows in fewer bits, ``[V, D]``, or None.
    residual: norms of what that took away, ``[V]``, or None.
    format: name of the operands' format; static.
    num_rows: rows of the caller; what follows repeats the last, so that parts
      are equal; static.
  """
  vectors: jax.Array
  scale: jax.Array
  half: jax.Array
  norm: jax.Array
  reduced: jax.Array | None
  residual: jax.Array | None
  format: str = dataclasses.field(metadata={'static': True})
  num_rows: int = dataclasses.field(metadata={'static': True})

  @property
  def shape(self):
    """``(V, D)`` of what lies here, one part of a split table say."""
    return self.vectors.shape


class Block(NamedTuple):
  """Queries of one block, scaled, and their part of the bound."""
  operand: jax.Array  # [D, N], in the format
  ratio: jax.Array  # [1, N], r
  slope: jax.Array  # [1, N], bound a unit of the row's norm
  tilt: jax.Array  # [1, N], bound a unit of the row's residual
  weight: jax.Array  # [1, N], bound a unit of the row's half
  scales: jax.Array  # [2, N], s_q and s_x

  def score(self, form, rows, half):
    """Scores of rows ``[T, D]`` in the format, float32 ``[T, N]``."""
    # Queries last and transposed once: the product needs no packing of them
    # for each tile, and every reduction over rows runs along whole vectors.
    return half[:, None] * self.ratio - form.product(rows, self.operand)

  def error(self, half, norm, residual=None):
    """Bounds what scores of rows with these facts miss, ``[T, N]``."""
    total = norm[:, None] * self.slope + half[:, None] * self.weight
    if residual is not None:
      total = total + residual[:, None] * self.tilt
    return total + self.operand.shape[0] * 2.**-120


def prepare(vectors, name, num_rows=None):
  """A `PreparedTable` of float32 ``[V, D]`` for the format ``name``."""
  scale = inverse_power(jnp.max(jnp.abs(vectors)))
  scaled = vectors * scale
  half = jnp.sum(jnp.square(scaled), axis=-1) / 2
  reduced = residual = None
  if name != 'float32':
    rounded = _rounded(scaled, FORMATS[name])
    reduced = rounded.astype(FORMATS[name].dtype)
    residual = _norm(scaled - rounded)
  return PreparedTable(vectors, scale, half, _norm(scaled), reduced, residual,
                       name, num_rows or len(vectors))


def without_reduced(table):
  """The same table for a scan in float32."""
  return dataclasses.replace(
      table, reduced=None, residual=None, format='float32')


def prepare_block(table, queries):
  """The `Block` of float32 queries ``[N, D]``."""
  form, dim = FORMATS[table.format], queries.shape[1]
  unit = _unit(dim)
  if form.mantissa_bits is not None and jax.default_backend() != 'cpu':
    unit *= 2
  scale = jnp.minimum(
      inverse_power(jnp.max(jnp.abs(queries), axis=-1)), table.scale)
  scaled = queries * scale[:, None]
  rounded, lost = scaled, jnp.zeros_like(scale)
  if form.mantissa_bits is not None:
    rounded = _rounded(scaled, form)
    lost = _norm(scaled - rounded) * (1 + unit)
  tilt = _norm(rounded) * (1 + 2 * unit)
  ratio = scale / table.scale
  return Block(
      rounded.astype(form.dtype).T, ratio[None], (lost + unit * tilt)[None],
      tilt[None], (unit * ratio)[None],
      jnp.stack([scale, jnp.broadcast_to(table.scale, scale.shape)]))


def inverse_power(size):
  """The power of two that brings ``size`` into [1/2, 1), within float32."""
  exponent = lax.bitcast_convert_type(size, jnp.int32) >> 23
  exponent = jnp.clip(253 - exponent, 1, 254)
  return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _rounded(scaled, form):
  # Not a cast there and back, which XLA may drop as excess precision.
  return lax.reduce_precision(scaled, exponent_bits=8,
                              mantissa_bits=form.mantissa_bits)


def _norm(scaled):
  # Squares below 2^-126 are flushed; the last term stands in for them.
  return (jnp.sqrt(jnp.sum(scaled * scaled, axis=-1))
          + scaled.shape[-1] * 2.**-62)


def _unit(dim):
  return (dim + 8) * 2.**-23
