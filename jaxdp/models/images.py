r"""Image classifiers in two pieces, with room for noise between. Device.

The first piece, the encoder, is one affine layer, trained as an auto-encoder
with tied weights: :math:`h = \theta^\top x`, :math:`\tilde x = \theta h`. The
second, the tail, is the rest. Neither adds noise; images are NHWC floats, in
[-1, 1] where a mechanism's sensitivity is meant to hold.

>>> import jax
>>> from jaxdp.models import images
>>> model = images.get('digits', norm='group')
>>> variables = images.init(jax.random.key(0), model)
>>> x = jax.random.uniform(jax.random.key(1), (2, *model.image_shape))
>>> h = images.encode(model, variables['encoder'], x)
>>> (hidden, logits), _ = images.classify(
...     model, variables['tail'], variables['batch_stats'], h)
>>> h.shape, hidden.shape, logits.shape
((2, 4, 4, 16), (2, 64), (2, 10))
>>> model.inputs_per_unit * (model.units_per_map + 2)  # d (beta + 2)
162

`get` and `init` run on the host; the rest is pure and jittable. Keys: `init`
folds 0 and 1 for the two pieces; `classify` draws by example, so a batch may be
split over devices in any way.

References: Phan et al. (2020), Scalable differential privacy with certified
robustness in adversarial learning, Section 4, Appendices N and P.
"""

from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models import encoders
from jaxdp.models import norms
from jaxdp.models import resnet
from jaxdp.models import tails

_FIRST_LAYERS = ('conv', 'dense')
_SMALLEST = 8  # pixels a side; every tail keeps a position to look at


class ImageModel(NamedTuple):
  """A classifier; hashable, so it may be a static argument. Holds no arrays.

  Attributes:
    encoder: Flax module of the first layer.
    tail: Flax module of the rest.
    image_shape: (H, W, Cin).
    num_classes: C.
    hidden_shape: of the first layer's output, (H', W', F) or (beta,).
    inputs_per_unit: the paper's d, inputs that one hidden unit sees.
    units_per_map: its beta, hidden units of one feature map.
    num_maps: F; 1 of a dense layer.
    num_last: units of the last hidden layer, its \\|h_pi\\|.
  """
  encoder: nn.Module
  tail: nn.Module
  image_shape: tuple[int, int, int]
  num_classes: int
  hidden_shape: tuple[int, ...]
  inputs_per_unit: int
  units_per_map: int
  num_maps: int
  num_last: int


class _Layout(NamedTuple):
  """One published network."""
  image_shape: tuple[int, int, int]
  num_classes: int
  encoder: dict[str, Any]  # of encoders.ConvEncoder
  tail: type[tails.Tail]
  num_last: int = 256
  num_units: int = 256  # of a dense first layer
  bias_start: float = 0.  # of the tail


_LAYOUTS = {
    'mnist': _Layout(
        (28, 28, 1), 10, dict(num_maps=32, kernel_size=5, bias_start=1e-4),
        tails.Mnist, bias_start=1e-4),
    'cifar10': _Layout(
        (28, 28, 3), 10, dict(num_maps=128, kernel_size=4), tails.Cifar10,
        bias_start=.1),
    'tiny_imagenet': _Layout(
        (64, 64, 3), 30,
        dict(num_maps=64, kernel_size=7, padding=((3, 3), (3, 3))),
        resnet.ResNet18),
    'digits': _Layout(
        (8, 8, 1), 10, dict(num_maps=16, kernel_size=3), tails.Digits,
        num_last=64, num_units=64),
}


def names():
  """Returns the names that :func:`get` knows."""
  return tuple(_LAYOUTS)


def get(name, *, first_layer='conv', norm='batch', num_classes=None,
        image_shape=None, num_units=None):
  """Returns one of the published networks, or a variant of it. Host.

  Args:
    name: 'mnist', 'cifar10', 'tiny_imagenet' or 'digits' (8x8, small).
    first_layer: 'conv', or 'dense', behind which a tail of one hidden layer
      stands.
    norm: 'batch', or 'group', which never mixes examples.
    num_classes: C >= 2; None takes the data set's.
    image_shape: (H, W, Cin) with H, W >= 8 and the data set's channels; None
      takes the published size.
    num_units: width >= 2 of a dense first layer, and only of that.

  Returns:
    ImageModel.

  Raises:
    ValueError: an unknown name, first_layer or norm; num_classes, image_shape
      or num_units out of range; num_units beside a convolution.

  References: Phan et al. (2020), Appendix P; layer sizes from its code.
  """
  layout = _LAYOUTS.get(name) if isinstance(name, str) else None
  if layout is None:
    raise ValueError(f'name={name!r} is unknown; use one of {names()}')
  _check_choice('first_layer', first_layer, _FIRST_LAYERS)
  _check_choice('norm', norm, tails.NORMS)
  num_classes = _at_least_two('num_classes', num_classes, layout.num_classes)
  image_shape = _checked_image_shape(image_shape, layout.image_shape)
  settings = dict(num_classes=num_classes, norm=norm, num_last=layout.num_last,
                  bias_start=layout.bias_start)
  if first_layer == 'dense':
    units = _at_least_two('num_units', num_units, layout.num_units)
    encoder = encoders.DenseEncoder(image_shape, units)
    return _model(encoder, tails.Dense(**settings),
                  int(np.prod(image_shape)), units, 1)
  if num_units is not None:
    raise ValueError(f"num_units={num_units} is for first_layer='dense'; the "
                     'maps of a convolution are the published ones')
  encoder = encoders.ConvEncoder(image_shape, **layout.encoder)
  rows, cols, num_maps = encoder.hidden_shape
  return _model(encoder, layout.tail(**settings),
                encoder.kernel_size**2 * image_shape[2], rows * cols, num_maps)


def _model(encoder, tail, inputs_per_unit, units_per_map, num_maps):
  return ImageModel(encoder, tail, encoder.image_shape, tail.num_classes,
                    encoder.hidden_shape, inputs_per_unit, units_per_map,
                    num_maps, tail.num_last)


def init(key, model):
  """Draws first parameters: Xavier uniform kernels, constant biases.

  Args:
    key: typed key, already folded with ``samplers.INIT``; consumed.
    model: ImageModel.

  Returns:
    Dict of 'encoder' and 'tail' (parameters) and 'batch_stats' (running
    statistics of the tail, means 0 and variances 1; empty with 'group').
    ``['tail']['last']['kernel']`` is ``[P, C]``.
  """
  like = lambda shape: jax.ShapeDtypeStruct((1, *shape), jnp.float32)
  encoder = model.encoder.lazy_init(
      jax.random.fold_in(key, 0), like(model.image_shape))
  tail = model.tail.lazy_init(
      jax.random.fold_in(key, 1), like(model.hidden_shape))
  return {'encoder': encoder['params'], 'tail': tail['params'],
          'batch_stats': tail.get('batch_stats', {})}


def encode(model, params, x):
  """Applies the affine first layer, without noise or activation.

  Args:
    model: ImageModel.
    params: the encoder's parameters.
    x: float ``[B, H, W, Cin]``.

  Returns:
    h, ``[B, *model.hidden_shape]``.
  """
  return model.encoder.apply({'params': params}, x, method='encode')


def decode(model, params, h, *, form='transpose'):
  r"""Reconstructs images from the first layer with its own weights.

  'transpose' is the adjoint of the linear part of :func:`encode`:
  ``<encode(x) - bias, h> = <x, decode(h)>``; of a dense layer
  :math:`\theta h`. Of a convolution it sums the patches that
  :func:`decode_patches` gives, where they overlap: about (k / stride)^2 of them
  at a pixel. 'official' is the published code's form: maps resized to the
  image by nearest neighbour, then a stride-1 convolution with the kernel whose
  two spatial axes, and whose inputs and maps, are swapped. It is no adjoint.

  Args:
    model: ImageModel.
    params: the encoder's parameters; no bias enters.
    h: float ``[B, *model.hidden_shape]``.
    form: 'transpose' or, of a convolution, 'official'.

  Returns:
    ``[B, H, W, Cin]``, without activation (the published code adds a ReLU).

  References: Phan et al. (2020), Section 4 and Appendix P.
  """
  return model.encoder.apply({'params': params}, h, form, method='decode')


def pair_with_decoded(model, params, x, h):
  """Returns ``<x, decode(h)>`` of each example without decoding.

  The adjoint moved to the other side, ``<encode(x) - bias, h>``: cheaper, and
  its gradient by the kernel is that of a convolution.

  Args:
    model: ImageModel.
    params: the encoder's parameters.
    x: float ``[B, H, W, Cin]``.
    h: float ``[B, *model.hidden_shape]``.

  Returns:
    ``[B]``.
  """
  linear = params | {name: jnp.zeros_like(value)
                     for name, value in params.items() if name == 'bias'}
  product = encode(model, linear, x) * h
  return jnp.sum(product, tuple(range(1, h.ndim)))


def patches(model, params, x):
  """Returns what each hidden unit sees, zeros beyond the border.

  Args:
    model: ImageModel.
    params: the encoder's parameters; their values do not matter.
    x: float ``[B, H, W, Cin]``.

  Returns:
    ``[B, H', W', d]`` with features in the order of
    ``kernel.reshape(d, F)``, so that ``patches @ kernel.reshape(d, F) + bias``
    is :func:`encode`; ``[B, d]`` of a dense layer.
  """
  return model.encoder.apply({'params': params}, x, method='patches')


def decode_patches(model, params, h):
  r"""Reconstructs each unit's own patch, :math:`\sum_f \theta_{jf} h_f`.

  This is the paper's reading of a convolution: each position reconstructs its
  own d inputs and nothing else, which is what its sensitivity counts.

  Args:
    model: ImageModel.
    params: the encoder's parameters.
    h: float ``[B, *model.hidden_shape]``.

  Returns:
    Like :func:`patches`.

  References: Phan et al. (2020), Appendix P.
  """
  return model.encoder.apply({'params': params}, h, method='decode_patches')


def classify(model, params, batch_stats, h, *, train=False,
             statistics='running', key=None, example_ids=None, counted=None,
             axis_name=None):
  """Applies the tail to the first layer's output, noise included.

  Args:
    model: ImageModel.
    params: the tail's parameters.
    batch_stats: its running statistics; empty with norm 'group'.
    h: float ``[B, *model.hidden_shape]``.
    train: static; True drops units (Tiny ImageNet), normalises by the batch
      and updates the running statistics.
    statistics: outside training and with norm 'batch': 'running', or 'batch',
      as the published code tests: predictions then depend on batch-mates.
    key: typed key of the step; needed where units are dropped.
    example_ids: int ``[B]``; needed where units are dropped.
    counted: bool ``[B]``, the examples that statistics of the batch are of;
      None for all.
    axis_name: mapped axes over which one trainer's batch is split, whose
      shards share batch statistics; None where it is not split.

  Returns:
    ``((hidden, logits), batch_stats)``: ``[B, P]`` in [-1, 1], ``[B, C]``, and
    the statistics, new ones after ``train``.

  Raises:
    ValueError: at trace time; a wrong shape of ``h``, unknown ``statistics``,
      an ``axis_name`` that no map binds, or no key or ids to drop units by.
  """
  encoders.check_shape('h', h, model.hidden_shape)
  _check_choice('statistics', statistics, tails.STATISTICS)
  tail = model.tail.clone(axis_name=axis_name)
  out, state = tail.apply(
      {'params': params, 'batch_stats': batch_stats}, h, train=train,
      statistics=statistics, example_ids=example_ids, counted=counted,
      mutable=['batch_stats'],
      rngs={} if key is None else {'dropout': key})
  return out, state.get('batch_stats', {}) if train else batch_stats


def operator_norms(model, params):
  """Returns every norm of a model's first layer. Host.

  Args:
    model: ImageModel.
    params: the encoder's parameters, concrete.

  Returns:
    ``norms.OperatorNorms``.
  """
  if isinstance(model.encoder, encoders.DenseEncoder):
    return norms.operator_norms(params['kernel'])
  return norms.operator_norms(
      params['kernel'], image_shape=model.image_shape,
      strides=model.encoder.strides, padding=model.encoder.padding)


def _check_choice(name, value, choices):
  if value not in choices:
    raise ValueError(f'{name}={value!r} is unknown; use one of {choices}')


def _at_least_two(name, value, default):
  if value is None:
    return default
  if isinstance(value, bool) or not isinstance(
      value, (int, np.integer)) or value < 2:
    raise ValueError(f'{name}={value!r} must be an int of at least 2')
  return int(value)


def _checked_image_shape(image_shape, default):
  if image_shape is None:
    return default
  shape = tuple(image_shape) if np.iterable(image_shape) else ()
  if (len(shape) != 3 or not all(isinstance(n, (int, np.integer))
                                 for n in shape)
      or shape[2] != default[2] or min(shape[:2]) < _SMALLEST):
    raise ValueError(f'image_shape={image_shape} must be (H, W, {default[2]}) '
                     f'with H and W of at least {_SMALLEST}')
  return tuple(int(n) for n in shape)
