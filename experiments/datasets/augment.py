"""Random changes of scaled images that keep their label. Device, jittable.

Each example draws from its own key, folded from its id and the epoch: the same
example in the same epoch is changed in the same way in whatever batch, place
or device it comes. Images are floats: scaled ones (``images.scale``) stay in
[-1, 1]; released ones lie outside, where a flip or a shift keeps their values
and a brightness, which clips, would not. Each kind of change has a stream of
its own, so that switching one on leaves the others as they were.

>>> import jax
>>> import jax.numpy as jnp
>>> pictures = jnp.linspace(-1., 1., 2 * 8 * 8).reshape(2, 8, 8, 1)
>>> ids = jnp.array([40, 7])
>>> augment(jax.random.key(0), pictures, ids, 3, flip=True, crop=6).shape
(2, 6, 6, 1)

Guarantee: none. An image that was released (noised) once may be augmented
freely. Augmenting before the release makes each copy a release of its own: c
copies of a record cost c times the budget.

References: Phan et al. (2020) and the code released with it, whose settings
are :data:`PHAN20_CIFAR10`; it draws them once, when the files are read, also
for test images, where :func:`center_crop` has no luck to average over.
"""

import functools
import math
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp import threefry

BLUE = (2,)  # the channel that the released code scales and calls brightness
PHAN20_CIFAR10 = types.MappingProxyType(
    {'flip': True, 'brightness': (.25, 1.25), 'channels': BLUE, 'crop': 28})

_FLIP, _BRIGHTNESS, _CROP = range(3)  # draws of one example in one epoch


def augment(key, images, ids, epoch, *, flip=False, brightness=None,
            channels=None, pad=0, crop=None):
  """Flips, brightens and crops each image by draws of its own.

  In this order: a left-right flip, a factor on the values, clipped to [-1, 1],
  then a window of the padded image. Values are multiplied on the [-1, 1]
  scale, as the released code does: 0, the middle, is kept.

  Args:
    key: typed key; consumed.
    images: float [B, H, W, C], in [-1, 1] where brightness is set.
    ids: integer [B] in [0, 2**32): ids of the examples in their set.
    epoch: integer in [0, 2**31), may be traced: how often they were seen.
    flip: flips with probability one half; static, as all that follow.
    brightness: (low, high), 0 <= low <= high: bounds of a uniform factor; None
      for none.
    channels: channels that take the factor, such as ``BLUE``; None for all.
    pad: pixels of -1 (no light) added on each side before the crop.
    crop: side of a square window, at a uniform place; None for the size of the
      image.

  Returns:
    Float [B, crop or H, crop or W, C].

  Raises:
    ValueError: unscaled images or a setting out of range.
  """
  chex.assert_rank([images, ids], [4, 1])
  chex.assert_equal_shape_prefix([images, ids], 1)
  _check_scaled(images)
  size = images.shape[1:3] if crop is None else (crop, crop)
  if pad < 0 or not all(1 <= small <= side + 2 * pad
                        for small, side in zip(size, images.shape[1:3])):
    raise ValueError(f'crop={crop} must lie between 1 and the size of images '
                     f'{images.shape[1:3]} padded by pad={pad} >= 0')
  if brightness is not None:
    brightness = tuple(map(float, brightness))
    if (len(brightness) != 2
        or not 0 <= brightness[0] <= brightness[1] < math.inf):
      raise ValueError(f'brightness={brightness} must be (low, high) with 0 <= '
                       'low <= high')
  if channels is not None:
    channels = tuple(channels)
    if brightness is None or not set(channels) <= set(range(images.shape[3])):
      raise ValueError(f'channels={channels} must be channels of images with '
                       f'{images.shape[3]}, and need brightness=(low, high)')
  return _augment(key, images, ids, jnp.asarray(epoch, jnp.int32),
                  flip=bool(flip), brightness=brightness, channels=channels,
                  pad=pad, size=size)


def center_crop(images, side):
  """Returns the middle ``side`` x ``side`` window of images [..., H, W, C].

  Where the margin is odd, the window is nearer to the upper left.

  Raises:
    ValueError: the window is larger than the images.
  """
  height, width = images.shape[-3:-1]
  if not 1 <= side <= min(height, width):
    raise ValueError(f'side={side} must lie in [1, {min(height, width)}]')
  top, left = (height - side) // 2, (width - side) // 2
  return images[..., top:top + side, left:left + side, :]


def _check_scaled(images):
  if not jnp.issubdtype(images.dtype, jnp.floating):
    raise ValueError(f'images of {images.dtype} must be scaled to [-1, 1] '
                     'first: images.scale')


@functools.partial(jax.jit, static_argnames=(
    'flip', 'brightness', 'channels', 'pad', 'size'))
def _augment(key, images, ids, epoch, **settings):
  keys = samplers.id_keys(key, samplers.AUGMENT, ids)
  return jax.vmap(lambda example_key, image: _augment_one(
      jax.random.fold_in(example_key, epoch), image, **settings))(keys, images)


def _augment_one(key, image, *, flip, brightness, channels, pad, size):
  """One image [H, W, C]."""
  high, low = threefry.words(key, (3,))  # one hash for all that is drawn
  if flip:
    image = jnp.where(high[_FLIP] >> 31 == 1, image[:, ::-1], image)
  if brightness is not None:
    fraction = (high[_BRIGHTNESS] >> 8).astype(jnp.float32) / 2**24
    factor = brightness[0] + (brightness[1] - brightness[0]) * fraction
    bright = jnp.clip(image * factor.astype(image.dtype), -1, 1)
    is_scaled = np.ones(image.shape[2], bool)
    if channels is not None:
      is_scaled = np.isin(np.arange(image.shape[2]), channels)
    image = jnp.where(is_scaled[None, None], bright, image)
  if pad:
    image = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)),
                    constant_values=-1)
  margin = np.subtract(image.shape[:2], size)
  if margin.any():
    # The remainder favours small starts by (margin + 1) / 2**32 at most.
    start = [(word[_CROP] % np.uint32(most + 1)).astype(jnp.int32)
             for word, most in zip((high, low), margin)]
    image = jax.lax.dynamic_slice(
        image, (*start, 0), (*size, image.shape[2]))
  return image
