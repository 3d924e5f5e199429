"""What a StoBatch run is made of, the data and the key apart. Host.

>>> Config(mode='sound', num_examples=60_000, batch_size=2_499, epsilon=.2,
...        label_epsilon=.1).norm
'group'

References: Phan et al. (2020), Section 6 and Appendix P, for the values.
"""

import dataclasses
import math

from jaxdp.training import objectives

MODES = ('paper', 'sound')
OPTIMIZERS = ('adam', 'sgd')
ATTACKS = ('ifgsm', 'mim', 'pgd')
INFERENCES = ('product', 'single')


# Phan et al. (2020), Section 6 and Appendix P; where the text has no value, the
# released code's. Optimisers and the first layer's rate are the code's. The
# text draws attack sizes from (0, 1] everywhere; the code stops at .5 on
# CIFAR-10 and at .1 on Tiny ImageNet. 'digits' is ours.
PUBLISHED = {
    'mnist': dict(
        model='mnist', batch_size=2_499, epsilon=.2, label_epsilon=.1,
        adversarial_weight=1., attack_steps=10, max_attack_bound=1.,
        learning_rate=1e-4, reconstruction_rate=1e-4),
    'cifar10': dict(
        model='cifar10', batch_size=1_851, epsilon=2., label_epsilon=1.,
        adversarial_weight=1.5, attack_steps=3, max_attack_bound=1.,
        learning_rate=5e-2, optimizer='sgd', reconstruction_rate=5e-2,
        reconstruction_optimizer='adam', weight_penalty=.004),
    'tiny_imagenet': dict(
        model='tiny_imagenet', batch_size=4_500, epsilon=5., label_epsilon=1.,
        adversarial_weight=1.5, attack_steps=10, max_attack_bound=1.,
        learning_rate=1e-2, reconstruction_rate=1e-2),
    'digits': dict(
        model='digits', batch_size=120, epsilon=2., label_epsilon=1.,
        adversarial_weight=1., attack_steps=3, max_attack_bound=.5,
        learning_rate=3e-3, reconstruction_rate=1e-3),
}
PUBLISHED['fashion_mnist'] = PUBLISHED['mnist']


def published(dataset, **settings):
  """Returns the Config of the paper's experiment on a data set.

  Args:
    dataset: a key of ``PUBLISHED``.
    **settings: fields that differ; ``mode`` and ``num_examples`` at least.

  Raises:
    ValueError: no such experiment, or a setting out of range.
  """
  if dataset not in PUBLISHED:
    raise ValueError(f'dataset={dataset!r} must be one of {sorted(PUBLISHED)}')
  fields = PUBLISHED[dataset] | settings
  if fields['mode'] == 'paper' and dataset in ('cifar10', 'tiny_imagenet'):
    fields = {'noise_divisor': 10.} | fields
  return Config(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines a StoBatch run, the data and the key apart. Hashable.

  Attributes:
    mode: 'paper' or 'sound'.
    model: 'mnist', 'cifar10', 'tiny_imagenet' or 'digits'.
    first_layer: 'conv' or 'dense'.
    norm: 'batch' or 'group'; None is 'batch' in 'paper' and 'group' in
      'sound', which refuses statistics of a batch.
    num_examples: N, records of the training set.
    batch_size: m, records of a fixed batch; the paper's noise is divided by it.
    epsilon: total budget > 0.
    label_epsilon: its part for labels, the paper's epsilon_2; < epsilon.
    moments_epsilon: 'sound': part of the one-shot moments of the
      auto-encoder; 0 leaves them out and trains it on released images.
    delta: 'sound': failure of DP of the inputs; 0 asks for pure DP.
    adversarial_weight: xi >= 0, weight of adversarial examples.
    noise_divisor: psi >= 1; fresh noise of a vote has 1/psi of the scale. None
      is 2 in 'paper' (the value for MNIST) and 1 in 'sound'.
    inference: 'product' of two passes as Algorithm 3 (default in 'paper'), or
      'single', one pass with both noises (default in 'sound').
    hidden_scale: 'sound': Laplace scale of fresh noise on hidden units; the
      release is private without it, and a 'product' has no second pass.
    attacks: the ensemble A, a part of the batch each.
    attack_steps: steps of each attack.
    attack_labels: 'repredicted' at each step, as the paper writes (default in
      'paper'), or 'predicted' once, as the released code does (default in
      'sound').
    max_attack_bound: the attack size is uniform on (0, max_attack_bound].
    reconstruction: see ``objectives.reconstruction``; 'published' has no lower
      bound and in the end turns all units of the first layer to one direction.
    reconstruction_rate: learning rate of the first layer; 0 freezes it.
    learning_rate: of all other layers.
    optimizer: 'adam' or 'sgd' (the paper's rule), of all other layers.
    reconstruction_optimizer: of the first layer; None is ``optimizer``.
    clip_norm: bound on the L2 norm of one trainer's gradient; None: none.
    num_microbatches: parts of a shard's batch whose gradients are accumulated.
    weight_penalty: L2 penalty, halved, on the layer before the last.
    moments_ridge: see ``objectives.moment_reconstruction``.
    channel_copies: one draw a pixel copied over channels (released code,
      row 1); 'paper' only.
    official_clean_adversarial: adversarial examples start from the records
      WITHOUT noise and are used without noise (released code, row 2).
    official_batch_statistics: predictions use the statistics of the batch
      they are in (rows 16 and 17), which has to be a whole test set.
    official_softmax_taylor: softmax before the Taylor loss (row 6).
    official_initial_norm: the largest singular value of the initial kernel in
      place of its column norm (row 11).
    official_input_sensitivity: the published radius counts the pixels of an
      image and not their channels (row 22).
  """
  mode: str
  model: str = 'mnist'
  first_layer: str = 'conv'
  norm: str | None = None
  num_examples: int
  batch_size: int
  epsilon: float
  label_epsilon: float
  moments_epsilon: float = 0.
  delta: float = 1e-5
  adversarial_weight: float = 1.
  noise_divisor: float | None = None
  inference: str | None = None
  hidden_scale: float = 0.
  attacks: tuple[str, ...] = ATTACKS
  attack_steps: int = 10
  attack_labels: str | None = None
  max_attack_bound: float = 1.
  reconstruction: str = 'clipped'
  reconstruction_rate: float = 1e-4
  learning_rate: float = 1e-4
  optimizer: str = 'adam'
  reconstruction_optimizer: str | None = None
  clip_norm: float | None = None
  num_microbatches: int = 1
  weight_penalty: float = 0.
  moments_ridge: float = 1.
  channel_copies: bool = False
  official_clean_adversarial: bool = False
  official_batch_statistics: bool = False
  official_softmax_taylor: bool = False
  official_initial_norm: bool = False
  official_input_sensitivity: bool = False

  def __post_init__(self):
    _check_choices(self)
    _fill(self)
    _check_numbers(self)
    _check_mode(self)


def _check_choices(config):
  for name, values in (
      ('mode', MODES), ('norm', ('batch', 'group', None)),
      ('inference', (*INFERENCES, None)),
      ('attack_labels', ('repredicted', 'predicted', None)),
      ('optimizer', OPTIMIZERS),
      ('reconstruction_optimizer', (*OPTIMIZERS, None)),
      ('reconstruction', objectives.RECONSTRUCTIONS)):
    if getattr(config, name) not in values:
      raise ValueError(f'{name}={getattr(config, name)!r} must be one of '
                       f'{tuple(v for v in values if v is not None)}')
  if config.reconstruction == 'official' and config.first_layer != 'conv':
    raise ValueError('reconstruction=\'official\' decodes as the released '
                     'convolution does; use \'published\' with a dense first '
                     'layer')
  if (not isinstance(config.attacks, tuple) or not config.attacks
      or not all(attack in ATTACKS for attack in config.attacks)):
    raise ValueError(f'attacks={config.attacks!r} must name some of {ATTACKS}')


def _fill(config):
  """Puts the mode's own value where None was given."""
  paper = config.mode == 'paper'
  for name, value in (('norm', 'batch' if paper else 'group'),
                      ('noise_divisor', 2. if paper else 1.),
                      ('inference', 'product' if paper else 'single'),
                      ('attack_labels', 'repredicted' if paper
                       else 'predicted'),
                      ('reconstruction_optimizer', config.optimizer)):
    if getattr(config, name) is None:
      object.__setattr__(config, name, value)


def _check_numbers(config):
  for name, least in (('num_examples', 1), ('batch_size', 1),
                      ('attack_steps', 1), ('num_microbatches', 1)):
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
      raise ValueError(f'{name}={value!r} must be an integer >= {least}')
  for name in ('epsilon', 'label_epsilon', 'noise_divisor', 'max_attack_bound',
               'learning_rate', 'moments_ridge'):
    _check_real(config, name, positive=True)
  for name in ('moments_epsilon', 'adversarial_weight', 'hidden_scale',
               'reconstruction_rate', 'weight_penalty'):
    _check_real(config, name, positive=False)
  if config.noise_divisor < 1.:
    raise ValueError(f'noise_divisor={config.noise_divisor!r} must be at least '
                     '1: fresh noise is the training draw\'s or less; for more '
                     'of it lower epsilon')
  if config.clip_norm is not None:
    _check_real(config, 'clip_norm', positive=True)
  if config.batch_size > config.num_examples:
    raise ValueError(f'batch_size={config.batch_size} must not exceed '
                     f'num_examples={config.num_examples}')
  parts = config.label_epsilon + config.moments_epsilon
  if parts >= config.epsilon:
    raise ValueError(
        f'label_epsilon={config.label_epsilon!r} and moments_epsilon='
        f'{config.moments_epsilon!r} must leave a part of epsilon='
        f'{config.epsilon!r} for the inputs; lower them or raise epsilon')
  _check_real(config, 'delta', positive=False)
  if config.delta >= 1.:
    raise ValueError(f'delta={config.delta!r} must lie in [0, 1)')


def _check_real(config, name, positive):
  value = getattr(config, name)
  if (isinstance(value, bool) or not isinstance(value, (int, float))
      or not (0. < value if positive else 0. <= value) or math.isinf(value)):
    raise ValueError(f'{name}={value!r} must be a finite number '
                     + ('> 0' if positive else '>= 0'))


def _check_mode(config):
  """Refuses what one of the modes has no meaning for."""
  if config.mode == 'sound':
    wrong = [name for name in (
        'channel_copies', 'official_clean_adversarial',
        'official_batch_statistics', 'official_initial_norm',
        'official_input_sensitivity')
             if getattr(config, name)]
    if wrong:
      raise ValueError(f'{wrong[0]}=True belongs to mode=\'paper\'; \'sound\' '
                       'would lose its guarantee or its certificate')
    if config.norm == 'batch':
      raise ValueError('norm=\'batch\' makes an example\'s output depend on '
                       'its batch, which no certificate covers; use '
                       '\'group\' in mode=\'sound\'')
    if config.inference == 'product' and not config.hidden_scale:
      raise ValueError('inference=\'product\' with hidden_scale=0 has a pass '
                       'without fresh noise, which certifies nothing; set '
                       'hidden_scale > 0, or use \'single\'')
    return
  for name in ('moments_epsilon', 'hidden_scale'):
    if getattr(config, name):
      raise ValueError(f'{name}={getattr(config, name)!r} belongs to '
                       'mode=\'sound\'; the paper has no such part')
