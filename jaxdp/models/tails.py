"""All of a classifier but its first layer. Device, pure, jittable.

A tail reads the affine output of the first layer, noise already added, and
returns the last hidden layer, clipped to [-1, 1], and the logits. Its last
layer is called ``last``: a mechanism perturbs the loss's coefficients there.

>>> import jax
>>> from jaxdp.models import tails
>>> tail = tails.Digits(num_classes=10, norm='group')
>>> h = jax.ShapeDtypeStruct((2, 4, 4, 16), 'float32')
>>> (hidden, logits), variables = jax.eval_shape(
...     tail.init_with_output, jax.random.key(0), h)
>>> hidden.shape, logits.shape, sorted(variables['params'])
((2, 64), (2, 10), ['conv2', 'fc', 'last'])

Normalisation neither scales nor shifts by trained numbers, as the published
code leaves its own at (1, 0). 'batch' mixes the examples of a batch: an
example's output, and so its certificate, depends on its batch-mates wherever
batch statistics are used. 'group' never mixes examples and is the only form
that may stand under per-example privacy accounting.

References: Phan et al. (2020), Appendices N and P, and its published code for
layer sizes. Ioffe and Szegedy (2015). Wu and He (2018), group normalisation.
"""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from jaxdp import threefry
from jaxdp.models import convolution

NORMS = ('batch', 'group')
STATISTICS = ('running', 'batch')

_NORM_EPS = 1e-3
# MNIST passes its data in 11 steps: .99 would average over 9 passes.
MOMENTUM = .9
_GROUP_SIZE = 16


@functools.partial(jax.jit, static_argnums=(1, 2))
def xavier_uniform(key, shape, dtype=jnp.float32):
  """Draws a kernel uniform within the square root of 6 / (fan in + fan out).

  As Flax's initialiser of that name, in an eighth of the time to compile: a
  ResNet-18 has a dozen shapes of kernel to draw.

  Args:
    key: typed key; consumed.
    shape: ``[..., fan in, fan out]``; leading axes count into both.
    dtype: float dtype.
  """
  fans = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
  high, _ = threefry.words(key, shape)
  centred = (high >> 8).astype(dtype) * 2.**-23 + (2.**-24 - 1.)
  return math.sqrt(6. / fans) * centred


class Normalize(nn.Module):
  """Batch or group normalisation without trained scale and offset.

  Attributes:
    norm: 'batch' or 'group' (groups of 16 features, or one group where 16
      does not divide their number).
    axis_name: mapped axes over which batch statistics are taken too.
  """
  norm: str
  axis_name: str | tuple[str, ...] | None = None

  @nn.compact
  def __call__(self, x, use_running, counted=None):
    # Two-pass variances: noise that all examples share makes means large
    # beside the spread, where E[x^2] - E[x]^2 loses its digits.
    fixed = dict(epsilon=_NORM_EPS, use_bias=False, use_scale=False,
                 use_fast_variance=False)
    if self.norm == 'group':
      num = x.shape[-1]
      size = _GROUP_SIZE if num % _GROUP_SIZE == 0 else num
      return nn.GroupNorm(num_groups=None, group_size=size, **fixed)(x)
    if not (use_running or self.is_initializing()):
      _check_bound(self.axis_name)
    mask = None if counted is None else jnp.broadcast_to(
        counted.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
    return nn.BatchNorm(use_running_average=use_running, momentum=MOMENTUM,
                        axis_name=self.axis_name, **fixed)(x, mask=mask)


def _check_bound(axis_name):
  """Refuses an axis that no map around this call binds."""
  if axis_name is None:
    return
  try:
    jax.lax.axis_size(axis_name)
  except NameError:
    raise ValueError(f'axis_name={axis_name!r} is bound by no map here; pass '
                     'axis_name=None for a batch that is not split') from None


class Dropout(nn.Module):
  """Drops units at rate 1/2, by a key folded with each example's id.

  ``flax.linen.Dropout`` draws one mask for a batch: it would change with the
  split of the batch over devices.
  """

  @nn.compact
  def __call__(self, x, example_ids):
    if not self.has_rng('dropout'):
      raise ValueError('key=None must be a typed key: this network drops units '
                       'in training')
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        self.make_rng('dropout'), example_ids)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, .5, x.shape[1:]))(
        keys)
    return jnp.where(keep, 2. * x, 0.)


class Tail(nn.Module):
  """What all tails share: the bounded last hidden layer and the last layer.

  Attributes:
    num_classes: C.
    norm: 'batch' or 'group'.
    num_last: P, units of the last hidden layer.
    bias_start: first value of the hidden layers' biases, and of the last's.
    axis_name: mapped axes over which batch statistics are taken too, so that
      the statistics of one trainer are over all its shards.
  """
  num_classes: int
  norm: str = 'batch'
  num_last: int = 256
  bias_start: float = 0.
  axis_name: str | tuple[str, ...] | None = None

  @nn.compact
  def __call__(self, h, train=False, *, statistics='running',
               example_ids=None, counted=None):
    """Classifies the first layer's output.

    Args:
      h: float ``[B, ...]``, affine first layer plus noise.
      train: static; whether units are dropped and statistics are the batch's.
      statistics: 'running' or 'batch', those of 'batch' norm outside training.
      example_ids: int ``[B]``; needed where units are dropped.
      counted: bool ``[B]``, the examples that batch statistics are of; None
        for all.

    Returns:
      ``(hidden, logits)``: ``[B, P]`` in [-1, 1] and ``[B, C]``.
    """
    use_running = not train and statistics == 'running'
    normalize = lambda name, x: Normalize(
        self.norm, self.axis_name, name=name)(x, use_running, counted)
    drop = lambda name, x: _drop(name, x, example_ids) if train else x
    hidden = jnp.clip(self.features(h, normalize, drop), -1., 1.)
    return hidden, self.dense('last', self.num_classes)(hidden)

  def features(self, h, normalize, drop):
    """Returns the last hidden layer before its clip, ``[B, P]``."""
    raise NotImplementedError

  def dense(self, name, num):
    return nn.Dense(num, kernel_init=xavier_uniform, name=name,
                    precision=convolution.PRECISION,
                    bias_init=nn.initializers.constant(self.bias_start))

  def conv(self, name, num, size, strides=1):
    return nn.Conv(num, (size, size), strides, padding='SAME', name=name,
                   conv_general_dilated=convolution.for_linen,
                   kernel_init=xavier_uniform,
                   bias_init=nn.initializers.constant(self.bias_start))


def _drop(name, x, example_ids):
  if example_ids is None:
    raise ValueError('example_ids=None must be the examples\' ids, int [B]: '
                     'units are dropped by example, whatever the batch split')
  return Dropout(name=name)(x, example_ids)


def _pool(x):
  return nn.avg_pool(x, (2, 2), strides=(2, 2))


def _flatten(x):
  return x.reshape(x.shape[0], -1)


class Mnist(Tail):
  """ReLU, norm, mean pool, 5x5 stride 2 to 64 maps, dense, norm."""

  def features(self, h, normalize, drop):
    x = _pool(normalize('norm1', nn.relu(h)))
    x = nn.relu(self.conv('conv2', 64, 5, 2)(x))
    return normalize('norm2', self.dense('fc', self.num_last)(_flatten(x)))


class Cifar10(Tail):
  """ReLU, norm; 5x5 to 128 maps beside its input; 5x5 to 256; dense.

  The published code also penalises ``fc`` by 0.004 times half its squared L2
  norm; that belongs to the loss.
  """

  def features(self, h, normalize, drop):
    first = normalize('norm1', nn.relu(h))
    x = nn.relu(self.conv('conv2', 128, 5)(first))
    x = normalize('norm2', jnp.concatenate([x, first], axis=-1))
    x = normalize('norm3', nn.relu(self.conv('conv3', 256, 5)(x)))
    x = self.dense('fc', self.num_last)(_flatten(_pool(x)))
    return normalize('norm4', x)


class Digits(Tail):
  """ReLU, norm, 3x3 to 32 maps, dense, norm: for 8x8 images."""
  num_last: int = 64

  def features(self, h, normalize, drop):
    x = nn.relu(self.conv('conv2', 32, 3)(normalize('norm1', nn.relu(h))))
    return normalize('norm2', self.dense('fc', self.num_last)(_flatten(x)))


class Dense(Tail):
  """ReLU, norm, dense, norm: behind a dense first layer."""

  def features(self, h, normalize, drop):
    x = normalize('norm1', nn.relu(h))
    return normalize('norm2', self.dense('fc', self.num_last)(x))
