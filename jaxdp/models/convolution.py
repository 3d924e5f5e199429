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
gradient. Where the input has few channels, one product gives what every output
sends to each pixel of its window, and the shifted parts are added.

>>> import jax, jax.numpy as jnp
>>> x, kernel = jnp.ones((2, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
>>> convolve(x, kernel, (1, 1), 'VALID').shape
(2, 2, 2, 2)
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

NHWC = ('NHWC', 'HWIO', 'NHWC')
# A GPU's own choice is TF32, of 10-bit mantissas; a CPU has float32 anyway.
PRECISION = jax.lax.Precision.HIGHEST
_MOST_UNROLLED = 32  # trainers on one device whose gradients are written out
_FEW_CHANNELS = 8  # of an input, below which a product beats convolutions
_MOST_BYTES = 2**29  # that the product may take


def convolve(x, kernel, strides, padding):
  """Convolves images with a kernel.

  Args:
    x: ``[B, H, W, Cin]``.
    kernel: ``[kh, kw, Cin, F]``.
    strides: pair of ints.
    padding: 'SAME', 'VALID' or pairs (low, high) of both axes.

  Returns:
    ``[B, H', W', F]``; differentiable by both, in reverse mode only.
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
    return (_adjoint(cotangent, kernel, x.shape, strides, padding),
            _kernel_gradient(strides, padding, kernel.shape)(x, cotangent))

  fun.defvjp(forward, backward)
  return fun


def transpose(h, kernel, image_shape, strides, padding):
  """The adjoint of a convolution by its input: ``<conv(x), h> = <x, this>``.

  Args:
    h: ``[B, H', W', F]``.
    kernel: ``[kh, kw, Cin, F]``, of the convolution.
    image_shape: ``(H, W, Cin)``, of its input.
    strides, padding: as for :func:`convolve`.

  Returns:
    ``[B, H, W, Cin]``; differentiable by both, in reverse mode only.

  Raises:
    ValueError: an ``h`` or a kernel that no convolution of such images has.
  """
  if not isinstance(padding, str):
    padding = tuple(tuple(map(int, pair)) for pair in padding)
  _check_output(h.shape, kernel.shape, tuple(image_shape), strides, padding)
  return _transposition(tuple(image_shape), tuple(strides), padding)(h, kernel)


def _check_output(shape, kernel_shape, image_shape, strides, padding):
  if kernel_shape[2] != image_shape[2]:
    raise ValueError(f'kernel has shape {kernel_shape}; its third entry must '
                     f'be the channels of image_shape={image_shape}')
  like = lambda *size: jax.ShapeDtypeStruct(size, jnp.float32)
  want = jax.eval_shape(
      functools.partial(_plain, strides=tuple(strides), padding=padding),
      like(shape[0], *image_shape), like(*kernel_shape)).shape
  if shape != want:
    raise ValueError(f'h has shape {shape}; a convolution of images of shape '
                     f'{image_shape} by this kernel has {want}')


@functools.cache
def _transposition(image_shape, strides, padding):
  """The adjoint of one geometry, its gradients defined."""
  def apply(h, kernel):
    return _adjoint(h, kernel, (len(h), *image_shape), strides, padding)

  fun = jax.custom_vjp(apply)

  def forward(h, kernel):
    return apply(h, kernel), (h, kernel)

  def backward(saved, cotangent):
    h, kernel = saved
    return (_plain(cotangent, kernel, strides, padding),
            _kernel_gradient(strides, padding, kernel.shape)(cotangent, h))

  fun.defvjp(forward, backward)
  return fun


def _adjoint(cotangent, kernel, shape, strides, padding):
  """The fastest of three forms of the gradient by the input."""
  if jax.default_backend() == 'cpu' and max(strides) > 1:
    spread = math.prod(cotangent.shape[:3]) * math.prod(kernel.shape[:3])
    form = (spread_gradient if kernel.shape[2] < _FEW_CHANNELS
            and 4 * spread <= _MOST_BYTES else input_gradient)
    return form(cotangent, kernel, shape, strides, padding)
  like = jax.ShapeDtypeStruct(shape, cotangent.dtype)
  return jax.linear_transpose(
      lambda x: _plain(x, kernel, strides, padding), like)(cotangent)[0]


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
  pads = _pairs(shape, kernel.shape, strides, padding)
  # Taps of zero, so that every offset meets one.
  kernel = jnp.pad(kernel, [(0, max(0, stride - num)) for stride, num in zip(
      strides, kernel.shape)] + [(0, 0)] * 2)
  rows, columns = (
      [_taps(*args, offset) for offset in range(args[0])]
      for args in zip(strides, shape[1:3], kernel.shape[:2],
                      cotangent.shape[1:3], (low for low, _ in pads)))
  return _interleave([[
      _plain(cotangent, jnp.swapaxes(kernel[row.taps, column.taps], 2, 3)[
          ::-1, ::-1], (1, 1), (row.pads, column.pads))
      for column in columns] for row in rows], shape)


def spread_gradient(cotangent, kernel, shape, strides, padding):
  """As :func:`input_gradient`, by one product and shifted sums.

  Memory: kh kw Cin floats for each output position.
  """
  pads = _pairs(shape, kernel.shape, strides, padding)
  parts = jnp.einsum('byxf,klcf->byxklc', cotangent, kernel,
                     precision=PRECISION)

  def pixels(offsets):
    """The sum over the outputs that see the pixels at these offsets."""
    seen = [_windows(*args) for args in zip(
        offsets, strides, shape[1:3], kernel.shape[:2], cotangent.shape[1:3],
        (low for low, _ in pads))]
    return sum(
        jax.lax.pad(parts[:, :, :, row, column], jnp.zeros((), parts.dtype),
                    ((0, 0, 0), (*up, 0), (*left, 0), (0, 0, 0)))
        for row, up in seen[0] for column, left in seen[1])

  return _interleave([[pixels((row, column)) for column in range(strides[1])]
                      for row in range(strides[0])], shape)


def _pairs(shape, kernel_shape, strides, padding):
  return padding if not isinstance(padding, str) else jax.lax.padtype_to_pads(
      shape[1:3], kernel_shape[:2], strides, padding)


def _interleave(parts, shape):
  """Parts [B, h, w, C] by offset within a stride, rows of columns, as one."""
  parts = jnp.stack([jnp.stack(row, 3) for row in parts], 2)
  batch, height, down, width, right, channels = parts.shape
  return parts.reshape(batch, height * down, width * right, channels)[
      :, :shape[1], :shape[2]]


def _windows(offset, stride, size, num_taps, num_out, low):
  """Taps that meet input ``offset + stride t``, and pads that align them to t.

  It meets tap k of output ``t + (offset + low - k) / stride``, on one axis. At
  an offset that no tap meets the first one is cut to zeros.
  """
  count = -(-size // stride)
  met = []
  for tap in range((offset + low) % stride, num_taps, stride):
    ahead = (offset + low - tap) // stride
    met.append((tap, (-ahead, count - num_out + ahead)))
  return met or [(0, (count, -num_out))]


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
