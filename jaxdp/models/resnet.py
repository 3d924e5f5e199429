"""ResNet-18 v2 without its first convolution, for Tiny ImageNet. Device.

Each block normalises before it convolves; a stage's first block has a 1x1
projection on its shortcut. Stages of two blocks have 64, 128, 256 and 512 maps
and strides 1, 1, 2, 2. No convolution has a bias. The published code starts
from weights trained on ImageNet; this one starts from random ones.

>>> import jax
>>> from jaxdp.models import resnet
>>> tail = resnet.ResNet18(num_classes=30, norm='group')
>>> h = jax.ShapeDtypeStruct((2, 8, 8, 64), 'float32')
>>> hidden, logits = jax.eval_shape(
...     tail.init_with_output, jax.random.key(0), h)[0]
>>> hidden.shape, logits.shape
((2, 256), (2, 30))

References: He et al. (2016), Identity mappings in deep residual networks,
Figure 4(e). Phan et al. (2020), Appendix P, for its use.
"""

from flax import linen as nn

from jaxdp.models import convolution
from jaxdp.models import tails

_WIDTHS = (64, 128, 256, 512)
_STRIDES = (1, 1, 2, 2)
_BLOCKS = 2


class ResNet18(tails.Tail):
  """The stages, norm, ReLU, mean, drop, dense, drop; nothing before the clip.

  The last hidden layer is clipped without normalisation, as published.
  """

  def features(self, h, normalize, drop):
    x = h
    for stage, (num, strides) in enumerate(zip(_WIDTHS, _STRIDES), 1):
      for block in range(1, _BLOCKS + 1):
        name = f'stage{stage}_block{block}'
        x = (_block(name, x, normalize, num, strides, projects=True)
             if block == 1 else
             _block(name, x, normalize, num, 1, projects=False))
    x = nn.relu(normalize('norm', x)).mean(axis=(1, 2))
    return drop('drop2', self.dense('fc', self.num_last)(drop('drop1', x)))


def _block(name, x, normalize, num, strides, *, projects):
  """norm, ReLU, 3x3, norm, ReLU, 3x3, plus the shortcut."""
  y = nn.relu(normalize(f'{name}_norm1', x))
  if projects:  # of the activations, which the shortcut itself lacks
    x = _conv(f'{name}_shortcut', num, 1, strides)(y)
  y = _conv(f'{name}_conv1', num, 3, strides)(y)
  y = nn.relu(normalize(f'{name}_norm2', y))
  return x + _conv(f'{name}_conv2', num, 3, 1)(y)


def _conv(name, num, size, strides):
  pad = (size - 1) // 2
  return nn.Conv(num, (size, size), strides, padding=((pad, pad), (pad, pad)),
                 use_bias=False, conv_general_dilated=convolution.for_linen,
                 kernel_init=tails.xavier_uniform, name=name)
