"""Convolution whose kernel gradient stays fast under ``vmap``. Device, pure.

The gradient of a convolution by its kernel is a convolution with the batch as
its features. Mapped over trainers it becomes one grouped convolution, which
XLA's CPU backend runs several times slower than the same gradients one after
the other. Here the kernel gradient, when it is mapped, is written out trainer
by trainer inside the one compiled function; everything else is XLA's own.

>>> import jax, jax.numpy as jnp
>>> x, kernel = jnp.ones((2, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
>>> convolve(x, kernel, (1, 1), 'VALID').shape
(2, 2, 2, 2)
"""

import functools

import jax
import jax.numpy as jnp

NHWC = ('NHWC', 'HWIO', 'NHWC')
# A GPU's own choice is TF32, of 10-bit mantissas; a CPU has float32 anyway.
PRECISION = jax.lax.Precision.HIGHEST
_MOST_UNROLLED = 32  # trainers on one device whose gradients are written out


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
