"""Networks, in Flax linen. Device, pure, jittable; no privacy inside.

  images    the image classifiers: get, init, encode, decode, classify
  encoders  their first layers
  tails     all but the first layer: MNIST, CIFAR-10, digits, dense
  resnet    the same for Tiny ImageNet, a ResNet-18 without its first layer
  norms     operator norms of a first layer (host)

A classifier comes in two pieces because a mechanism adds noise between them.

>>> import jax
>>> from jaxdp import models
>>> model = models.images.get('digits', norm='group')
>>> variables = models.images.init(jax.random.key(0), model)
>>> x = jax.numpy.zeros((2, *model.image_shape))
>>> h = models.images.encode(model, variables['encoder'], x)
>>> h.shape
(2, 4, 4, 16)

Modules load when first named.
"""

import importlib

_MODULES = ('encoders', 'images', 'norms', 'resnet', 'tails')

__all__ = list(_MODULES)


def __getattr__(name):
  if name in _MODULES:
    return importlib.import_module(f'jaxdp.models.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_MODULES])
