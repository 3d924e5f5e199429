r"""First layers: affine, with tied weights to decode. Device, pure, jittable.

>>> import jax
>>> from jaxdp.models import encoders
>>> encoder = encoders.ConvEncoder((8, 8, 1), num_maps=16, kernel_size=3)
>>> encoder.hidden_shape, encoder.pads
((4, 4, 16), ((0, 1), (0, 1)))

``images`` says what each method promises; ``patches`` and ``decode_patches``
are the paper's reading of a convolution, in which each hidden unit sees, and
reconstructs, its own patch alone.

References: Phan et al. (2020), Section 4 and Appendix P.
"""

import functools
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
import numpy as np

from jaxdp.models import convolution
from jaxdp.models import norms
from jaxdp.models import tails

_FORMS = ('transpose', 'official')
_matmul = functools.partial(jnp.matmul, precision=convolution.PRECISION)


class ConvEncoder(nn.Module):
  """Strided convolution with bias; parameters ``kernel`` and ``bias``.

  The bias is part of the affine layer: noise that the published classifier
  adds before it and noise that is added after it are the same sum.

  Attributes:
    image_shape: (H, W, Cin).
    num_maps: F.
    kernel_size: k, of both axes.
    strides: of both axes.
    padding: 'SAME' or ((top, bottom), (left, right)).
    bias_start: first value of the bias.
  """
  image_shape: tuple[int, int, int]
  num_maps: int
  kernel_size: int
  strides: int = 2
  padding: Any = 'SAME'
  bias_start: float = 0.

  def setup(self):
    size, inputs = self.kernel_size, self.image_shape[2]
    self.kernel = self.param('kernel', tails.xavier_uniform,
                             (size, size, inputs, self.num_maps))
    self.bias = self.param('bias', nn.initializers.constant(self.bias_start),
                           (self.num_maps,))

  def __call__(self, x):
    return self.encode(x)

  def encode(self, x):
    """``[B, H, W, Cin]`` to ``[B, H', W', F]``."""
    check_shape('x', x, self.image_shape)
    return convolution.convolve(
        x, self.kernel, (self.strides,) * 2, self.pads) + self.bias[
            None, None, None]

  def decode(self, h, form='transpose'):
    """``[B, H', W', F]`` to ``[B, H, W, Cin]``; see :func:`decode`."""
    check_shape('h', h, self.hidden_shape)
    if form == 'transpose':
      return convolution.transpose(
          h, self.kernel, self.image_shape, (self.strides,) * 2, self.pads)
    if form != 'official':
      raise ValueError(f'form={form!r} is unknown; use one of {_FORMS}')
    rows, cols = (np.arange(size) * num // size for size, num in
                  zip(self.image_shape, self.hidden_shape[:2]))
    return convolution.convolve(
        h[:, rows][:, :, cols], self.kernel.transpose(1, 0, 3, 2), (1, 1),
        'SAME')

  def patches(self, x):
    """``[B, H, W, Cin]`` to ``[B, H', W', d]``, one row what a unit sees."""
    check_shape('x', x, self.image_shape)
    x = jnp.pad(x, ((0, 0), *self.pads, (0, 0)))
    spans = [self.strides * (num - 1) + 1 for num in self.hidden_shape[:2]]
    window = range(self.kernel_size)
    seen = [x[:, a:a + spans[0]:self.strides, b:b + spans[1]:self.strides]
            for a in window for b in window]
    return jnp.concatenate(seen, axis=-1)

  def decode_patches(self, h):
    """``[B, H', W', F]`` to ``[B, H', W', d]``: theta times h, by patch."""
    check_shape('h', h, self.hidden_shape)
    return _matmul(h, self.kernel.reshape(-1, self.num_maps).T)

  @property
  def pads(self):
    return norms.padding_pairs(self.image_shape[:2], (self.kernel_size,) * 2,
                               self.strides, self.padding)

  @property
  def hidden_shape(self):
    sides = [(size + sum(pad) - self.kernel_size) // self.strides + 1
             for size, pad in zip(self.image_shape, self.pads)]
    return (*sides, self.num_maps)


class DenseEncoder(nn.Module):
  """Matrix without bias; parameter ``kernel`` ``[d, beta]``.

  Attributes:
    image_shape: (H, W, Cin), of product d.
    num_units: beta.
  """
  image_shape: tuple[int, int, int]
  num_units: int

  def setup(self):
    self.kernel = self.param('kernel', tails.xavier_uniform,
                             (int(np.prod(self.image_shape)), self.num_units))

  def __call__(self, x):
    return self.encode(x)

  def encode(self, x):
    """``[B, H, W, Cin]`` to ``[B, beta]``."""
    return _matmul(self.patches(x), self.kernel)

  def decode(self, h, form='transpose'):
    """``[B, beta]`` to ``[B, H, W, Cin]``; see :func:`decode`."""
    if form != 'transpose':
      raise ValueError(f"form={form!r} must be 'transpose'; the other forms "
                       "are of first_layer='conv'")
    return self.decode_patches(h).reshape(-1, *self.image_shape)

  def patches(self, x):
    """``[B, H, W, Cin]`` to ``[B, d]``: each unit sees the whole image."""
    check_shape('x', x, self.image_shape)
    return x.reshape(x.shape[0], -1)

  def decode_patches(self, h):
    """``[B, beta]`` to ``[B, d]``."""
    check_shape('h', h, self.hidden_shape)
    return _matmul(h, self.kernel.T)

  @property
  def hidden_shape(self):
    return (self.num_units,)


def check_shape(name, array, shape):
  """Refuses, at trace time, arrays that are not float ``[B, *shape]``."""
  if array.ndim != len(shape) + 1 or tuple(array.shape[1:]) != tuple(shape):
    raise ValueError(f'{name} has shape {array.shape}; it must be [B, '
                     f'{", ".join(map(str, shape))}] for this model')
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise ValueError(f'{name} has dtype {array.dtype}; pass floats, images '
                     'scaled to [-1, 1]')
