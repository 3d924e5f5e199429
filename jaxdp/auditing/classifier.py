r"""A small network that learns which input an output came from.

Device and host.

Its log-odds are a score for an audit: whatever tells the two inputs apart, a
threshold on them is an event. Trained on trials that the audit uses for nothing
else, so the bound stays valid however it was trained.

>>> import jax, numpy as np
>>> rng = np.random.default_rng(0)
>>> bank = jax.vmap(lambda y: features(y, None))
>>> network = train(jax.random.key(0), bank(rng.normal(size=(2000, 2))),
...                 bank(rng.normal(size=(2000, 2)) + 3.), num_steps=100)
>>> bool(log_odds(np.float32([3., 3.]), network) > log_odds(
...     np.float32([0., 0.]), network))
True

References: Bichsel et al. (2021), "DP-Sniper: Black-Box Discovery of
Differential Privacy Violations using Classifiers"; Lokna et al. (2023).
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import samplers
from jaxdp.auditing import scores

_HIDDEN = 32
_SORTED = 1024  # outputs up to which the sorted ones are features
_FAR = 20.  # standardised features are cut there
# Else a GPU takes TF32 and the audit's bound depends on the device.
_PRECISION = jax.lax.Precision.HIGHEST


class Classifier(nn.Module):
  """Features to log-odds of x_prime."""

  @nn.compact
  def __call__(self, features):
    dense = functools.partial(nn.Dense, precision=_PRECISION)
    hidden = nn.relu(dense(_HIDDEN)(features))
    hidden = nn.relu(dense(_HIDDEN)(hidden))
    return (dense(1)(hidden) + dense(1)(features))[..., 0]


class Network(NamedTuple):
  """A trained classifier: arrays, an argument and never a constant."""
  variables: Any
  mean: Any  # [F] of the features in training
  deviation: Any  # [F]


def features(y, context=None):
  """Feature bank of one output, float32 [F], finite.

  Values, magnitudes, sorted values, their sum cut to [0, 1], the lowest set
  bits, and flags of NaN and infinity.
  """
  del context
  raw = scores.flatten(y)
  bad = jnp.stack([jnp.isnan(raw), jnp.isposinf(raw), jnp.isneginf(raw)])
  values = jnp.where(jnp.isfinite(raw), jnp.clip(raw, -1e30, 1e30), 0.)
  ordered = jnp.sort(values) if values.size <= _SORTED else values[:0]
  bits = scores.lowest_bit(y, None)[None]
  return jnp.concatenate([
      values, jnp.abs(values), ordered,
      jnp.sum(jnp.clip(values, 0., 1.))[None], bits,
      bad.astype(jnp.float32).reshape(-1)])


def log_odds(y, network):
  """Log-odds that the output came from x_prime, float32 []."""
  mine = (features(y) - network.mean) / network.deviation
  return Classifier().apply(network.variables, jnp.clip(mine, -_FAR, _FAR))


def train(key, bank, bank_prime, *, num_steps=600, batch_size=2048):
  """Trains a classifier on outputs of both inputs.

  Args:
    key: typed key; consumed.
    bank: float32 ``[N, F]``, `features` of N trials on x.
    bank_prime: the same on x_prime.
    num_steps: steps of Adam.
    batch_size: trials of each input a step.

  Returns:
    Network, the ``context`` of `log_odds`.
  """
  both = [np.asarray(b, np.float32) for b in (bank, bank_prime)]
  # By quantiles: one huge output must not hide all the others.
  low, mean, high = np.quantile(np.concatenate(both), (.16, .5, .84), axis=0)
  deviation = (high - low) / 2
  deviation = np.where(deviation > 0, deviation, 1.).astype(np.float32)
  mean = mean.astype(np.float32)
  scaled = [jnp.clip((b - mean) / deviation, -_FAR, _FAR) for b in both]
  variables = _fit(jax.random.fold_in(key, samplers.CLASSIFIER), *scaled,
                   num_steps=num_steps, batch_size=batch_size)
  return Network(variables, jnp.asarray(mean), jnp.asarray(deviation))


@functools.partial(jax.jit, static_argnames=('num_steps', 'batch_size'))
def _fit(key, features, features_prime, *, num_steps, batch_size):
  start_key, step_key = jax.random.split(key)
  model, optimizer = Classifier(), optax.adam(
      optax.cosine_decay_schedule(1e-2, num_steps))
  variables = model.init(start_key, features[0])

  def loss(variables, mine, theirs):
    return jnp.mean(jax.nn.softplus(model.apply(variables, mine))
                    + jax.nn.softplus(-model.apply(variables, theirs)))

  def step(carry, i):
    variables, state = carry
    keys = jax.random.split(jax.random.fold_in(step_key, i))
    mine, theirs = (
        f[jax.random.randint(k, (batch_size,), 0, f.shape[0])]
        for k, f in zip(keys, (features, features_prime)))
    gradient = jax.grad(loss)(variables, mine, theirs)
    updates, state = optimizer.update(gradient, state, variables)
    return (optax.apply_updates(variables, updates), state), None

  state = optimizer.init(variables)
  (variables, _), _ = jax.lax.scan(step, (variables, state),
                                   jnp.arange(num_steps))
  return variables
