"""Convolution whose gradients stay fast on a CPU. Device, pure.

Two gradients are written otherwise than XLA's own; all else is XLA's.

By the kernel it is a convolution with the batch as its features. Mapped over
trainers it becomes one grouped convolution, which XLA's CPU backend runs
several times slower than the same gradients one after the other; here it is
written out trainer by trainer inside the one compiled function.

By the input, with strides, it is a convolution of a cotangent with zeros
between its entries, for which the CPU backend has slow loops. The inputs at one
offset within a stride meet every second (third, ...) tap of the kernel and no
zero, so they are a plain convolution; one for each offset, interleaved, is the
gradient.

>>> import jax, jax.numpy as jnp
>>> x, kernel = jnp.ones((2, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
>>> convolve(x, kernel, (1, 1), 'VALID').shape
(2, 2, 2, 2)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

NHWC = ('NHWC', 'HWIO', 'NHWC')
# A GPU's own choice is TF32, of 10-bit mantissas; a CPU has float32 anyway.
PRECISION = jax.lax.Precision.HIGHEST
_MOST_UNROLLED = 32  # trainers on one device whose gradients are written out
_FEW_CHANNELS = 8  # of an input, below which XLA's own gradient is the faster


def convolve(x, kernel, strides, padding):
  """Convolves images with a kernel.

  Args:
    x: ``[B, H, W, Cin]``.
    kernel: ``[kh, kw, Cin, F]``.
    strides: pair of ints.
    padding: 'SAME', 'VALID' or pairs (low, high) of both axes.

  Returns:
    ``[B, H', W', F]``; differentiable by both, not twice in forward mode.
  """
  if not isinstance(padding, str):
    padding = tuple(tuple(map(int, pair)) for pair in padding)
  return _convolution(tuple(strides), padding)(x, kernel)


def for_linen(x, kernel, window_strides, padding, *unused, **settings):
  """`convolve` in the place of ``nn.Conv.conv_general_dilated``."""
  del unused, settings  # plain NHWC layers without dilation or groups
  return convolve(x, kernel, window_strides, padding)


def _plain(x, kernel, strides, padding):
  return jax.lax.conv_general_dilated(x, kernel, strides, padding,
                                      dimension_numbers=NHWC,
                                      precision=PRECISION)


@functools.cache
def _convolution(strides, padding):
  """The convolution of one geometry, its gradients defined."""
  plain = functools.partial(_plain, strides=strides, padding=padding)
  fun = jax.custom_vjp(plain)

  def forward(x, kernel):
    return plain(x, kernel), (x, kernel)

  def backward(saved, cotangent):
    x, kernel = saved
    if (jax.default_backend() == 'cpu' and max(strides) > 1
        and x.shape[-1] >= _FEW_CHANNELS):
      to_x = input_gradient(cotangent, kernel, x.shape, strides, padding)
    else:
      to_x, = jax.vjp(lambda a: plain(a, kernel), x)[1](cotangent)
    return to_x, _kernel_gradient(strides, padding, kernel.shape)(x, cotangent)

  fun.defvjp(forward, backward)
  return fun


@functools.cache
def _kernel_gradient(strides, padding, shape):
  """``(x, cotangent) -> gradient`` by the kernel; written out under vmap."""
  def one(x, cotangent):
    zeros = jnp.zeros(shape, x.dtype)
    pull = jax.vjp(lambda k: _plain(x, k, strides, padding), zeros)[1]
    return pull(cotangent)[0]

  gradient = jax.custom_batching.custom_vmap(one)

  @gradient.def_vmap
  def _(axis_size, is_mapped, x, cotangent):
    if axis_size > _MOST_UNROLLED:
      axes = tuple(0 if m else None for m in is_mapped)
      return jax.vmap(one, axes)(x, cotangent), True
    pick = lambda a, m, i: a[i] if m else a
    return jnp.stack([
        gradient(pick(x, is_mapped[0], i), pick(cotangent, is_mapped[1], i))
        for i in range(axis_size)]), True

  return gradient


def input_gradient(cotangent, kernel, shape, strides, padding):
  """The gradient of a strided convolution by its input, without zeros.

  Args:
    cotangent: ``[B, H', W', F]``.
    kernel: ``[kh, kw, Cin, F]``.
    shape: ``(B, H, W, Cin)``, of the input.
    strides, padding: as for :func:`convolve`.

  Returns:
    ``[B, H, W, Cin]``.
  """
  pads = padding if not isinstance(padding, str) else jax.lax.padtype_to_pads(
      shape[1:3], kernel.shape[:2], strides, padding)
  # Taps of zero, so that every offset meets one.
  kernel = jnp.pad(kernel, [(0, max(0, stride - num)) for stride, num in zip(
      strides, kernel.shape)] + [(0, 0)] * 2)
  rows, columns = (
      [_taps(*args, offset) for offset in range(args[0])]
      for args in zip(strides, shape[1:3], kernel.shape[:2],
                      cotangent.shape[1:3], (low for low, _ in pads)))
  parts = jnp.stack([jnp.stack([
      _plain(cotangent, jnp.swapaxes(kernel[row.taps, column.taps], 2, 3)[
          ::-1, ::-1], (1, 1), (row.pads, column.pads))
      for column in columns], 3) for row in rows], 2)
  batch, height, down, width, right, channels = parts.shape
  return parts.reshape(batch, height * down, width * right, channels)[
      :, :shape[1], :shape[2]]


class _Taps(NamedTuple):
  """What the inputs at one offset within a stride meet, on one axis."""
  taps: slice  # of the kernel
  pads: tuple[int, int]  # of the cotangent; negative cuts


def _taps(stride, size, num_taps, num_out, low, offset):
  """Input ``offset + stride t`` meets ``first + stride m`` at ``t + q - m``.

  As many t for every offset, so that the parts interleave; what lies beyond
  the input is cut afterwards.
  """
  first = (offset + low) % stride
  taps = slice(first, None, stride)
  count = len(range(num_taps)[taps])
  before = count - 1 - (offset + low - first) // stride
  after = -(-size // stride) - 1 - num_out + count - before
  return _Taps(taps, (before, after))
