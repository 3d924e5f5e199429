r"""StoBatch: private adversarial training with certified robustness. Device.

Host: `Config`, `calibrate`, `network`. Device, pure, jittable:
`init`, `make_train_step`, `make_predict`. A run in five lines, one trainer::

  config = Config(mode='sound', model='digits', num_examples=1_440, ...)
  state = init(key, config)
  scales = calibrate(config, state.params['encoder']['kernel'])
  batch = Batch(release(key, scales, ...), release(...), assignment, trainer)
  run = parallel.map_trainers(make_train_step(config), num_trainers=1)
  state, info = run(key, state, batch)  # a batch has leaves [N, M, b / M, ...]

Two modes, side by side in every table. ``paper`` is the published algorithm:
one shared draw on all inputs, exact labels, batch normalisation; its privacy
theorems are *claimed* and fail under standard accounting. ``sound`` releases
each record once with its own noise and randomised labels (*proved*) and
trains on that for as long as it likes. Privacy lives in ``releases.release``
and ``moments.release``; certificates in ``certificates``.

A step is written for one trainer and one of its shards: adversarial examples
from the released source batch, local gradient, mean over shards, clip of the
trainer, mean over trainers, update.

References: Phan et al. (2020), Scalable differential privacy with certified
robustness in adversarial learning, Algorithms 1, 3 and 4.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import guarantees
from jaxdp import models
from jaxdp import samplers
from jaxdp.attacks import gradient
from jaxdp.training import layouts
from jaxdp.training import objectives
from jaxdp.training import parallel
from jaxdp.training import releases
from jaxdp.training.stobatch_config import Config  # noqa: F401
from jaxdp.training.stobatch_config import MODES  # noqa: F401
from jaxdp.training.stobatch_config import PUBLISHED  # noqa: F401
from jaxdp.training.stobatch_config import published  # noqa: F401


class Batch(NamedTuple):
  """What one shard of one trainer gets for one step.

  Attributes:
    benign: Released, the fixed batch B_i1.
    source: Released, the fixed batch B_i2 that adversarial examples start at.
    assignment: int32 ``[B]``, which attack of the ensemble a source meets.
    trainer: int32 ``[]``, index of the trainer among all of them.
  """
  benign: releases.Released
  source: releases.Released
  assignment: jax.Array
  trainer: jax.Array


class State(NamedTuple):
  """What the next step needs. Holds no key and no record.

  Attributes:
    step: int32 ``[]``, steps done.
    params: {'encoder': ..., 'tail': ...}.
    batch_stats: running statistics of the tail; empty with 'group'.
    opt_state: of optax.
    noise: releases.Noise, one draw a run.
    moments: moments.Moments or None.
  """
  step: jax.Array
  params: Any
  batch_stats: Any
  opt_state: Any
  noise: releases.Noise
  moments: Any = None


class Info(NamedTuple):
  """What someone may want to look at; float32 scalars, means over trainers.

  Attributes:
    loss: what was minimised.
    reconstruction: an example's part of it, summed over pixels, benign and
      adversarial; with moments a patch's.
    classification: an example's part of it, benign and adversarial.
    accuracy: of the benign half against the released targets.
    adversarial_accuracy: of the adversarial half, the same.
    attack_bound: mean attack size of the step.
    gradient_norm: L2 norm of a trainer's gradient before its clip.
  """
  loss: jax.Array
  reconstruction: jax.Array
  classification: jax.Array
  accuracy: jax.Array
  adversarial_accuracy: jax.Array
  attack_bound: jax.Array
  gradient_norm: jax.Array


@functools.cache
def network(config):
  """Returns the ImageModel of a config."""
  return models.images.get(config.model, first_layer=config.first_layer,
                           norm=config.norm)


def calibrate(config, kernel):
  """Returns the scales of a run, from its budget and its first layer. Host.

  Args:
    config: Config.
    kernel: the INITIAL kernel of the first layer; 'paper' divides by its norm.

  Returns:
    releases.Calibration.

  References: Phan et al. (2020), Lemmas 2-4 and Theorem 4.
  """
  model = network(config)
  fields = dict(
      mode=config.mode, image_shape=model.image_shape,
      hidden_shape=model.hidden_shape, num_classes=model.num_classes,
      num_last=model.num_last, label_epsilon=config.label_epsilon,
      channel_copies=config.channel_copies)
  if config.mode == 'sound':
    return releases.Calibration(
        **fields, hidden_scale=config.hidden_scale, label_scale=0.,
        input_scale=_sound_scale(config, model), input_epsilon=config.epsilon
        - config.label_epsilon - config.moments_epsilon)
  return releases.Calibration(**fields, **_paper_scales(config, model, kernel))


def _sound_scale(config, model):
  """Laplace scale that spends what labels and moments leave."""
  return guarantees.laplace_vector_scale(
      config.epsilon - config.label_epsilon - config.moments_epsilon,
      config.delta, math.prod(model.image_shape), shift=2.)


def _paper_scales(config, model, kernel):
  """The paper's chain: sensitivities, gammas, epsilon_1, scales."""
  matrix = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
  norm = (models.norms.spectral_norm(matrix) if config.official_initial_norm
          else models.norms.column_norm(matrix))
  sensitivities = guarantees.stobatch_sensitivities(
      inputs_per_unit=model.inputs_per_unit,
      units_per_map=model.units_per_map, num_last=model.num_last)
  gamma, gamma_x = guarantees.stobatch_gammas(
      sensitivities.reconstruction, config.batch_size, norm)
  first = guarantees.stobatch_budget(
      config.epsilon, config.label_epsilon, gamma, gamma_x)
  scales = guarantees.noise_scales(
      sensitivity=sensitivities.reconstruction,
      label_sensitivity=sensitivities.labels, batch_size=config.batch_size,
      epsilon_1=first, label_epsilon=config.label_epsilon)
  return dict(
      input_scale=scales.inputs, hidden_scale=scales.hidden,
      label_scale=scales.labels, input_epsilon=first, gamma=gamma,
      gamma_x=gamma_x, norm=norm)


def optimizer(config):
  """Returns the optax optimiser; the first layer has a rate of its own."""
  rules = {'adam': optax.adam, 'sgd': optax.sgd}
  first = optax.set_to_zero()
  if config.reconstruction_rate:
    first = rules[config.reconstruction_optimizer](config.reconstruction_rate)
  return optax.multi_transform(
      {'encoder': first, 'tail': rules[config.optimizer](config.learning_rate)},
      {'encoder': 'encoder', 'tail': 'tail'})


def init(key, config):
  """Returns the State before the first step.

  Args:
    key: typed key of the run, the one that ``releases.release`` takes too.
    config: Config.
  """
  model = network(config)
  variables = models.images.init(
      jax.random.fold_in(key, samplers.INIT), model)
  params = {'encoder': variables['encoder'], 'tail': variables['tail']}
  calibration = calibrate(config, params['encoder']['kernel'])
  return State(
      step=jnp.int32(0), params=params, batch_stats=variables['batch_stats'],
      opt_state=optimizer(config).init(params),
      noise=releases.draw_noise(key, calibration))


def make_train_step(config):
  """Returns ``train_step(key, state, batch) -> (state, info)`` of one trainer.

  It runs under the axis names of ``parallel`` (see ``map_trainers``), for one
  shard of one trainer. ``key`` is the run's; no draw depends on the shard.

  References: Phan et al. (2020), Algorithm 4, lines 4-11.
  """
  model, rule = network(config), optimizer(config)

  def train_step(key, state, batch):
    keys = _keys(key, state.step, batch.trainer)

    def gradient_of(params, part):
      return jax.value_and_grad(
          lambda p: _objective(p, keys, config, model, state, part),
          has_aux=True)(params)

    (_, (info, stats)), grads = parallel.accumulate(
        gradient_of, config.num_microbatches)(
            state.params, batch._replace(trainer=None))
    grads, info, stats = parallel.mean_over_shards((grads, info, stats))
    norm = optax.tree.norm(grads)
    grads = _clip(grads, norm, config.clip_norm)
    # Whatever is added once (the label noise) is in every trainer's gradient
    # alike, so the mean adds it once.
    grads, info, stats, norm = parallel.mean_over_trainers(
        (grads, info, stats, norm))
    updates, opt_state = rule.update(grads, state.opt_state, state.params)
    state = state._replace(
        step=state.step + 1, opt_state=opt_state, batch_stats=stats,
        params=optax.apply_updates(state.params, updates))
    return state, info._replace(gradient_norm=norm)

  return train_step


class _Keys(NamedTuple):
  """Keys of one step: its starts by example, the others by trainer."""
  attack: jax.Array
  size: jax.Array
  dropout: jax.Array


def _keys(key, step, trainer):
  # A key of 128 bits becomes one of 64 here: XLA compiles the wide generator
  # inside a step for minutes, and starts and sizes of attacks need no secret.
  step_key = samplers.element_keys(key, samplers.TRAIN, step, 1)[0]
  of_trainer = jax.random.fold_in(
      jax.random.fold_in(step_key, samplers.TRAIN), trainer)
  return _Keys(*(jax.random.fold_in(parent, purpose) for parent, purpose in (
      (step_key, samplers.ATTACK), (of_trainer, samplers.ATTACK),
      (of_trainer, samplers.TRAIN))))


def _clip(grads, norm, clip_norm):
  """Scales a trainer's gradient down to ``clip_norm``; None leaves it."""
  if clip_norm is None:
    return grads
  factor = jnp.minimum(1., clip_norm / jnp.maximum(norm, 1e-30))
  return jax.tree.map(lambda g: g * factor, grads)


def _objective(params, keys, config, model, state, batch):
  """The loss of one part of a batch; aux: Info and the running statistics."""
  bound = config.max_attack_bound * (
      1. - jax.random.uniform(keys.size))  # (0, max], as the paper's
  attacked = jax.lax.stop_gradient(adversarial_examples(
      keys.attack, config, state, batch, attack_bound=bound,
      axis_name=layouts.SHARD))
  images = jnp.concatenate([batch.benign.images, attacked])
  targets = jnp.concatenate([batch.benign.targets, batch.source.targets])
  num = batch.benign.images.shape[0]
  weights = jnp.concatenate([
      jnp.ones(num), jnp.full(len(attacked), config.adversarial_weight)])
  weights = weights / (num + config.adversarial_weight * len(attacked))

  hidden = models.images.encode(model, params['encoder'], images)
  noisy = hidden + state.noise.hidden[None]
  rebuilt = _reconstruction(params, config, model, state, noisy, images, num)
  # The first layer learns from the reconstruction alone. A batch's statistics
  # are of its benign half, for that is what a deployed network has.
  (_, logits), stats = models.images.classify(
      model, params['tail'], state.batch_stats, jax.lax.stop_gradient(noisy),
      train=True, key=keys.dropout, axis_name=layouts.SHARD,
      example_ids=jnp.concatenate([batch.benign.ids, batch.source.ids]),
      counted=jnp.arange(len(images)) < num)
  scores = jax.nn.softmax(logits) if config.official_softmax_taylor else logits
  classified = jnp.sum(weights * objectives.taylor_loss(scores, targets))
  penalty = .5 * config.weight_penalty * jnp.sum(
      params['tail']['fc']['kernel']**2)
  loss = rebuilt + classified + penalty + objectives.label_noise_term(
      params['tail']['last']['kernel'], state.noise.label)
  right = jnp.argmax(logits, -1) == jnp.argmax(targets, -1)
  return loss, (Info(
      loss=loss, reconstruction=rebuilt, classification=classified,
      accuracy=jnp.mean(right[:num]), adversarial_accuracy=jnp.mean(
          right[num:]), attack_bound=bound, gradient_norm=loss), stats)


def _reconstruction(params, config, model, state, noisy, images, num):
  """The auto-encoder's loss: mean over ``num`` of benign + adversarial."""
  if state.moments is not None:
    kernel = params['encoder']['kernel']
    return objectives.moment_reconstruction(
        kernel.reshape(-1, kernel.shape[-1]), state.moments.first,
        state.moments.second, ridge=config.moments_ridge)
  if config.reconstruction == 'published':  # by the adjoint: no decoder
    return jnp.sum(models.images.pair_with_decoded(
        model, params['encoder'], .5 - images,
        jax.lax.stop_gradient(noisy))) / num
  decode = lambda hidden: models.images.decode(
      model, params['encoder'], hidden,
      form='official' if config.reconstruction == 'official' else 'transpose')
  return jnp.sum(objectives.reconstruction(
      decode, noisy, images, form=config.reconstruction)) / num


def adversarial_examples(key, config, state, batch, *, attack_bound,
                         axis_name=None):
  """Crafts adversarial examples from the RELEASED source of a batch.

  The network that is attacked has the run's own draw and, where it normalises
  by the batch, the statistics of the source batch: running ones lag behind, and
  an attack on them misses the network that the step trains. They stay as they
  are during the attack, so the loss of an example depends on it alone. The
  labels are the network's predictions, so no label and no record enters here
  that was not released; post-processing in 'sound' mode.

  Args:
    key: typed key of the step; starts fold the examples' ids.
    config: Config.
    state: State.
    batch: Batch; its source and assignment are read.
    attack_bound: L-inf size, may be traced.
    axis_name: mapped axis over which a trainer's batch is split, or None.

  Returns:
    Like ``batch.source.images``, at most ``attack_bound`` away; with
    ``official_clean_adversarial`` away from the records without their noise.

  References: Phan et al. (2020), Equations 7 and 8; every step is the bound
    over ``attack_steps``, PGD's too.
  """
  source, model = batch.source, network(config)
  shift = state.noise.inputs[None] if config.official_clean_adversarial else 0.
  start = source.images - shift
  box = (-1., 1.) if config.official_clean_adversarial else (None, None)
  if state.batch_stats:
    state = state._replace(batch_stats=_batch_statistics(
        key, model, state, source, axis_name))

  def predict(key, images):
    del key  # nothing fresh: the network of a training step
    return _forward(model, state, images + shift,
                    state.noise.hidden[None], 'running')

  labels = ('repredicted' if config.attack_labels == 'repredicted'
            else jnp.argmax(predict(None, start), -1))
  return gradient.ensemble(
      key, gradient.cross_entropy_loss(predict, labels=labels), start,
      attacks=config.attacks, attack_bound=attack_bound,
      num_steps=config.attack_steps,
      step_size=attack_bound / config.attack_steps, low=box[0], high=box[1],
      start=gradient.random_starts(key, source.ids, start.shape[1:],
                                   attack_bound=attack_bound),
      assignment=batch.assignment)


def _forward(model, state, images, hidden_noise, statistics):
  """Logits without dropout, ``[B, C]``."""
  hidden = models.images.encode(model, state.params['encoder'], images)
  (_, logits), _ = models.images.classify(
      model, state.params['tail'], state.batch_stats, hidden + hidden_noise,
      train=False, statistics=statistics)
  return logits


def make_predict(config):
  """Returns ``predict(key, state, images, fresh=True)``, the deployed network.

  With ``fresh`` it is one vote of Algorithm 3: the run's own draw plus fresh
  noise of 1 / noise_divisor of its scale, by ``config.inference`` in one pass
  or as the product of two. Without, the run's own draw alone: deterministic,
  certifies nothing. Attacks at test time and certificates call this function.

  Returns:
    A function to log-probabilities ``[B, C]`` (a product is not normalised)
    of images ``[B, H, W, C]`` in [-1, 1].

  References: Phan et al. (2020), Algorithm 3 and Appendix N.
  """
  model = network(config)
  statistics = 'batch' if config.official_batch_statistics else 'running'

  def predict(key, state, images, fresh=True):
    noise = state.noise
    base, own = images + noise.inputs[None], noise.hidden[None]
    run = lambda x, h: jax.nn.log_softmax(
        _forward(model, state, x, h, statistics))
    if not fresh:
      return run(base, own)
    noisy = base + samplers.laplace(
        jax.random.fold_in(key, samplers.INPUT_NOISE), images.shape,
        scale=noise.input_scale / config.noise_divisor)
    hidden = own + samplers.laplace(
        jax.random.fold_in(key, samplers.HIDDEN_NOISE),
        (len(images), *noise.hidden.shape),
        scale=noise.hidden_scale / config.noise_divisor)
    if config.inference == 'single':
      return run(noisy, hidden)
    return run(noisy, own) + run(base, hidden)

  return predict


def make_statistics(config):
  """Returns ``statistics(key, state, released) -> batch_stats`` of one batch.

  The means and variances that normalisation would use on released records
  with the parameters of ``state``. Averaged over the fixed batches they are
  the statistics of the FINAL network. Running ones lag behind parameters that
  move, and where all images share one draw of noise a lag of a percent is
  larger than what tells images apart. Post-processing of the release.

  Returns:
    A function to the tail's statistics; only for norm 'batch'.
  """
  model = network(config)

  return lambda key, state, released: _batch_statistics(
      key, model, state, released)


def _batch_statistics(key, model, state, released, axis_name=None):
  """The tail's statistics on one released batch, all shards together."""
  hidden = models.images.encode(
      model, state.params['encoder'], released.images)
  empty = jax.tree.map(jnp.zeros_like, state.batch_stats)
  _, stats = models.images.classify(
      model, state.params['tail'], empty, hidden + state.noise.hidden[None],
      train=True, key=key, axis_name=axis_name, example_ids=released.ids)
  # From zero, a running statistic is (1 - momentum) times the batch's.
  return jax.tree.map(lambda s: s / (1. - models.tails.MOMENTUM), stats)


def patches_fn(config, encoder):
  """Returns the function from images to patches ``[..., d]``."""
  model = network(config)
  return lambda images: models.images.patches(model, encoder, images)
