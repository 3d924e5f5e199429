"""Accuracy of a trained network: as it is, attacked, and certified. Host.

One row is one cell: an attack, its size and steps, on stated test images. Two
deployments are measured side by side:

  run     the run's own draw and no fresh noise: one forward pass. Certifies
          nothing, and is what a network adapts to in 'paper' mode.
  votes   the smoothed network of Algorithm 3: the majority of ``num_samples``
          votes with fresh noise. What a certificate speaks about.

The attack is on the network of the same deployment, its noise included: each
step draws fresh noise, and labels are the true ones unless said. ``network=
'official'`` shows what the released code's attack would find instead, which
follows the gradients of a network that nobody deploys. A certificate
is computed at the CLEAN image; the certified accuracy at a size counts images
that are right there and whose radius exceeds it.

References: Phan et al. (2020), Equation 14 and Section 6; Athalye et al. (2018)
for attacks on randomised networks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import attacks
from jaxdp import certification
from jaxdp import samplers
from jaxdp.training import certificates
from jaxdp.training import stobatch

DEPLOYMENTS = ('run', 'votes')
ATTACKS = ('none', 'fgsm', 'ifgsm', 'mim', 'pgd')
NETWORKS = ('deployed', 'official')
_CHUNK = 250  # images attacked at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One attack of one deployment.

  Attributes:
    deployment: 'run' or 'votes'.
    attack: one of ``ATTACKS``.
    attack_bound: L-inf size on images in [-1, 1]; 0 with 'none'.
    num_steps: T of iterated attacks.
    num_samples: votes an image; not used by 'run'.
    num_draws: draws of noise that each step averages over.
    labels: 'true' or 'predicted', what the attack climbs away from.
    network: whose gradients the attack follows: 'deployed', or 'official', as
      the released MNIST code takes them: without the run's noise, normalised
      by mean 0 and variance 1; see :func:`networks`.
  """
  deployment: str = 'run'
  attack: str = 'none'
  attack_bound: float = 0.
  num_steps: int = 10
  num_samples: int = 200
  num_draws: int = 1
  labels: str = 'true'
  network: str = 'deployed'

  def __post_init__(self):
    for name, values in (('deployment', DEPLOYMENTS), ('attack', ATTACKS),
                         ('labels', ('true', 'predicted')),
                         ('network', NETWORKS)):
      if getattr(self, name) not in values:
        raise ValueError(f'{name}={getattr(self, name)!r} must be one of '
                         f'{values}')


def networks(config):
  """Returns whose gradients the attacks on a run follow, some of ``NETWORKS``.

  The released MNIST code attacks a network that nobody deploys; that for
  CIFAR-10 and Tiny ImageNet normalises otherwise, and so has no such rows.
  """
  official = (config.mode == 'paper' and config.norm == 'batch'
              and config.model in ('digits', 'mnist')
              and not config.official_batch_statistics)
  return NETWORKS[:1 + official]


def accuracy(key, config, state, images, labels, cell):
  """Returns the row of one cell, its own fields included.

  Args:
    key: typed key of the evaluation; protects nothing.
    config: stobatch.Config.
    state: stobatch.State.
    images: float32 ``[B, H, W, C]`` in [-1, 1].
    labels: int ``[B]``, the true ones.
    cell: Cell.
  """
  right = []
  for at in range(0, len(images), _CHUNK):
    part = jnp.asarray(images[at:at + _CHUNK], jnp.float32)
    truth = jnp.asarray(labels[at:at + _CHUNK], jnp.int32)
    part_key = jax.random.fold_in(key, at)
    attacked = _attacked(part_key, config, state, part, truth, cell)
    answers = _answers(part_key, config, state, attacked, cell)
    right.append(np.asarray(answers) == np.asarray(truth))
  return dataclasses.asdict(cell) | {
      'num_images': len(images),
      'accuracy': float(np.concatenate(right).mean())}


def certified(key, config, calibration, state, images, labels, *, num_samples,
              attack_bounds, significance=.05):
  """Returns rows of certified accuracy, one a radius and size.

  Args:
    key, config, state, images, labels: as in :func:`accuracy`.
    calibration: of the run.
    num_samples: votes an image.
    attack_bounds: sizes in the norm of each radius.
    significance: probability that the radius of an image is wrong.
  """
  kernel = np.asarray(state.params['encoder']['kernel'])
  votes = _tally(key, config, state, images, num_samples)
  bounds = functools.cache(lambda correction: certification.probability_bounds(
      votes, significance=significance, correction=correction))
  return [
      _certified_row(name, radius_fn, bounds(certificates.correction(name)),
                     np.asarray(labels), size) | {
          'num_samples': num_samples, 'significance': significance,
          'num_images': len(images)}
      for size in attack_bounds
      for name, radius_fn in certificates.radii(
          config, calibration, kernel, attack_bound=size).items()]


def _certified_row(name, radius_fn, bounds, truth, size):
  """One radius at one size, from the bounds on its probabilities."""
  top, low, high = bounds
  label = np.where(low > high, top, certification.ABSTAIN)
  radius = np.asarray(radius_fn(low, high))
  _, right = certification.certified_accuracy(label, truth, radius, [size])
  return {
      'radius': name, 'attack_bound': float(size),
      'norm': certificates.RADII[name].norm,
      'status': certificates.RADII[name].status,
      'accuracy': float(np.mean(top == truth)),
      'abstained': float(np.mean(label == certification.ABSTAIN)),
      'certified_accuracy': float(right[0]),
      'median_radius': float(np.median(radius))}


def _tally(key, config, state, images, num_samples):
  """Votes of the smoothed network; new parameters do not compile again."""
  vote_fn = jax.tree_util.Partial(_voter(config),
                                  state._replace(opt_state=None))
  settings = {}
  if config.official_batch_statistics:  # a batch of one image has no variance
    settings = dict(per_image_keys=False, chunk_size=len(images))
  return certification.tally(key, vote_fn, np.asarray(images),
                             num_samples=num_samples, **settings)


@functools.cache
def _voter(config):
  """``(state, key, images) -> logits``: one vote."""
  predict = stobatch.make_predict(config)
  return lambda state, key, images: predict(key, state, images)


@functools.partial(jax.jit, static_argnames=('config', 'cell'))
def _attack(key, state, images, labels, bound, *, config, cell):
  predict = stobatch.make_predict(config)
  fresh = cell.deployment == 'votes' and cell.network == 'deployed'
  if cell.network == 'official':
    state = _as_attacked_officially(state)
  predict_fn = lambda k, x: predict(k, state, x, fresh)
  if cell.labels == 'predicted':
    labels = attacks.predicted_labels(key, predict_fn, images,
                                      num_draws=cell.num_draws)
  loss_fn = attacks.cross_entropy_loss(predict_fn, labels=labels)
  settings = dict(attack_bound=bound, num_draws=cell.num_draws)
  if cell.attack != 'fgsm':
    settings['num_steps'] = cell.num_steps
  return getattr(attacks, cell.attack)(key, loss_fn, images, **settings)


def _as_attacked_officially(state):
  """The state without the run's draw, its batch norm an identity."""
  noise = state.noise
  return state._replace(
      noise=noise._replace(inputs=jnp.zeros_like(noise.inputs),
                           hidden=jnp.zeros_like(noise.hidden)),
      batch_stats=jax.tree_util.tree_map_with_path(
          lambda path, leaf: jnp.full_like(leaf, path[-1].key == 'var'),
          state.batch_stats))


def _attacked(key, config, state, images, labels, cell):
  """The images under the cell's attack; ``state`` without its optimiser."""
  if cell.attack == 'none' or not cell.attack_bound:
    return images
  # The size is traced, so all sizes of an attack compile once.
  static = dataclasses.replace(cell, attack_bound=1., num_samples=1)
  return _attack(jax.random.fold_in(key, samplers.ATTACK),
                 state._replace(opt_state=None), images, labels,
                 cell.attack_bound, config=config, cell=static)


def _answers(key, config, state, images, cell):
  """Labels of the deployment, int ``[B]``."""
  if cell.deployment == 'run':
    return jnp.argmax(_run(state._replace(opt_state=None), images,
                           config=config), -1)
  votes = _tally(key, config, state, images, cell.num_samples)
  return np.argmax(votes.counts, -1)


@functools.partial(jax.jit, static_argnames=('config',))
def _run(state, images, *, config):
  return stobatch.make_predict(config)(None, state, images, False)
