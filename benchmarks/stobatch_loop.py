"""The StoBatch step as its released code is organised: a Python loop.

The baseline of ``train_step_bench``. Trainer after trainer and attack after
attack, a Python loop over attack steps, each of which is one call of a jitted
gradient; then one jitted gradient a trainer, the mean of their arrays, and one
jitted update. Network and losses are the library's; what is written out here is
how they are called. Device, driven from the host.

References: Phan et al. (2020), Algorithm 4; its released code, and the attacks
of CleverHans that it calls.
"""

import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from jaxdp import models
from jaxdp import samplers
from jaxdp.attacks import gradient
from jaxdp.models import convolution
from jaxdp.training import objectives
from jaxdp.training import releases
from jaxdp.training import stobatch


class Share(NamedTuple):
  """What the loop holds of one trainer."""
  trainer: int
  benign: releases.Released
  sources: dict[str, releases.Released]  # by the attack they meet


class Parts(NamedTuple):
  """What the loop calls, each compiled on its own."""
  draw: Any  # (key, step, trainer) -> (attack key, own key, bound)
  statistics: Any  # (state, key, images, ids) -> those of the source batch
  labels: Any  # (state, images) -> int [B], the network's answers
  start: Any  # (key, ids, images, bound) -> images
  ascend: Any  # one step of an attack
  gradient: Any  # of one trainer
  update: Any  # (state, gradient, statistics) -> state


def shares(config, batch):
  """List of `Share` of a batch [N, M, ...]: shards joined, sources by attack.

  Args:
    config: stobatch.Config.
    batch: stobatch.Batch of host arrays.
  """
  made = []
  for row, trainer in enumerate(batch.trainer[:, 0].tolist()):
    benign, source, met = jax.tree.map(
        lambda x, row=row: x[row].reshape(-1, *x.shape[3:]), batch[:3])
    made.append(Share(trainer, jax.tree.map(jnp.asarray, benign), {
        name: jax.tree.map(lambda x, at=(met == i): jnp.asarray(x[at]), source)
        for i, name in enumerate(config.attacks)}))
  return made


@functools.cache
def parts(config, wrap=jax.jit):
  """`Parts` of a config; ``wrap`` makes of each what the loop calls."""
  return Parts(*(wrap(functools.partial(fun, config)) for fun in (
      _draw, _statistics, _labels, _start, _ascend, _gradient, _update)))


def stock(fun):
  """Compiles a part whose convolutions have XLA's own gradients."""
  def call(*args):
    with mock.patch.multiple(convolution, convolve=_convolve,
                             transpose=_transpose):
      return fun(*args)
  return jax.jit(call)


def _convolve(x, kernel, strides, padding):
  return jax.lax.conv_general_dilated(
      x, kernel, strides, padding, dimension_numbers=convolution.NHWC,
      precision=convolution.PRECISION)


def _transpose(h, kernel, image_shape, strides, padding):
  like = jax.ShapeDtypeStruct((len(h), *image_shape), h.dtype)
  return jax.linear_transpose(
      lambda x: _convolve(x, kernel, strides, padding), like)(h)[0]


def step(do, config, key, state, held):
  """One step; returns the next State.

  Args:
    do: `Parts`.
    config: stobatch.Config.
    key: typed key of the run.
    state: stobatch.State.
    held: list of `Share`.
  """
  found = []
  for share in held:
    attack_key, own_key, bound = do.draw(key, state.step, share.trainer)
    target = state
    if state.batch_stats:
      images, ids = (jnp.concatenate([
          getattr(source, field) for source in share.sources.values()])
                     for field in ('images', 'ids'))
      target = state._replace(
          batch_stats=do.statistics(state, attack_key, images, ids))
    attacked = [
        _attacked(do, config, name, attack_key, target, source, bound)
        for name, source in share.sources.items()]
    found.append(do.gradient(state, own_key, share.benign, attacked,
                             list(share.sources.values())))
  grads, stats = jax.tree.map(lambda *x: sum(x) / len(x), *found)
  return do.update(state, grads, stats)


def _attacked(do, config, name, key, state, source, bound):
  """The images that one attack makes of its sources, step after step."""
  images, momentum = source.images, jnp.zeros_like(source.images)
  labels = do.labels(state, images)
  if name == 'pgd':
    images = do.start(key, source.ids, images, bound)
  length = bound / config.attack_steps
  for _ in range(config.attack_steps):
    images, momentum = do.ascend(
        state, source.images, labels, bound, length,
        1. if name == 'mim' else 0., images, momentum)
  return images


def operations(do, run):
  """FLOP of a loop, as XLA counts its parts before it optimises them.

  Args:
    do: `Parts`, jitted.
    run: function of `Parts`, called once with parts that count.

  Returns:
    A number, or None where XLA does not count.
  """
  known, met = {}, []

  def counting(part):
    def call(*args):
      shapes = part, tuple(map(jnp.shape, jax.tree.leaves(args)))
      if shapes not in known:
        known[shapes] = (part.lower(*args).cost_analysis() or {}).get('flops')
      met.append(known[shapes])
      return part(*args)
    return call

  run(Parts(*map(counting, do)))
  return None if None in met else float(sum(met))


def _draw(config, key, step_index, trainer):
  """Keys and attack size of a trainer's step."""
  fold = jax.random.fold_in
  step_key = samplers.element_keys(key, samplers.TRAIN, step_index, 1)[0]
  own = fold(fold(step_key, samplers.TRAIN), trainer)
  bound = config.max_attack_bound * (
      1. - jax.random.uniform(fold(own, samplers.ATTACK)))
  return (fold(step_key, samplers.ATTACK), fold(own, samplers.TRAIN), bound)


def _statistics(config, state, key, images, ids):
  """Statistics of the tail on a batch of released images."""
  return stobatch.make_statistics(config)(
      key, state, releases.Released(images, None, ids))


def _logits(config, state, images):
  model = stobatch.network(config)
  hidden = models.images.encode(model, state.params['encoder'], images)
  (_, logits), _ = models.images.classify(
      model, state.params['tail'], state.batch_stats,
      hidden + state.noise.hidden[None])
  return logits


def _labels(config, state, images):
  return jnp.argmax(_logits(config, state, images), axis=-1)


def _start(config, key, ids, images, bound):
  del config
  return images + gradient.random_starts(key, ids, images.shape[1:],
                                         attack_bound=bound)


def _ascend(config, state, origin, labels, bound, length, decay, images,
            momentum):
  """A step along the sign of the momentum, then back into the ball."""
  def loss(x):
    scores = jax.nn.log_softmax(_logits(config, state, x))
    right = (jnp.argmax(scores, axis=-1)
             if config.attack_labels == 'repredicted' else labels)
    return -jnp.sum(jnp.take_along_axis(scores, right[:, None], axis=1))

  slope = jax.grad(loss)(images)
  size = jnp.mean(jnp.abs(slope), axis=(1, 2, 3), keepdims=True)
  momentum = decay * momentum + slope / jnp.where(size == 0, 1., size)
  moved = images + length * jnp.sign(momentum)
  return jnp.clip(moved, origin - bound, origin + bound), momentum


def _gradient(config, state, own_key, benign, attacked, sources):
  """One trainer's gradient and the statistics of its batch."""
  model = stobatch.network(config)
  images = jnp.concatenate([benign.images, *attacked])
  targets, ids = (jnp.concatenate(x) for x in zip(
      benign[1:], *(source[1:] for source in sources)))

  def loss(params):
    encoder, tail = params['encoder'], params['tail']
    hidden = models.images.encode(
        model, encoder, images) + state.noise.hidden[None]
    rebuilt = objectives.reconstruction(
        functools.partial(models.images.decode, model, encoder), hidden,
        images, form=config.reconstruction)
    (_, logits), stats = models.images.classify(
        model, tail, state.batch_stats, jax.lax.stop_gradient(hidden),
        train=True, key=own_key, example_ids=ids,
        counted=jnp.arange(len(ids)) < len(benign.ids))
    total = jnp.sum(rebuilt) / len(benign.images) + _classification(
        config, objectives.taylor_loss(logits, targets), len(benign.images))
    return (total + objectives.label_noise_term(
        tail['last']['kernel'], state.noise.label) + .5 * (
            config.weight_penalty) * jnp.sum(tail['fc']['kernel']**2)), stats

  return jax.grad(loss, has_aux=True)(state.params)


def _classification(config, losses, num):
  """Mean loss over ``num`` benign examples and as many attacked ones."""
  weight = config.adversarial_weight
  total = jnp.sum(losses[:num]) + weight * jnp.sum(losses[num:])
  return total / (num * (1. + weight))


def _update(config, state, grads, stats):
  updates, opt_state = stobatch.optimizer(config).update(
      grads, state.opt_state, state.params)
  return state._replace(
      step=state.step + 1, opt_state=opt_state, batch_stats=stats,
      params=optax.apply_updates(state.params, updates))
