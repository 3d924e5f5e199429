"""No image is broken inside a proved radius; beyond it, attacks do break them.

A small network on the embedded digits is smoothed with the noise of each
formula and certified; projected gradient descent with 20 restarts, over the
expectation of the noise, then searches the ball of each image's own radius.
An image counts as broken when fresh votes certify ANOTHER class there.
"""

import functools
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.datasets import images
from jaxdp.attacks import gradient
from jaxdp.certification import radii
from jaxdp.certification import smoothing

pytestmark = pytest.mark.slow  # 20 restarts of 100 images, twice a formula

_NUM = 100  # images
_VOTES = 2_000
_PIXELS = 64
# For one bound at one image; all of this module's stay below .01 together.
_SIGNIFICANCE = 1e-5


class Case(NamedTuple):
  """A radius, the noise that it is about, and its norm."""
  noise: str
  norm: str
  radius: object  # (p_low, p_high) -> radius
  beyond: float  # radii at which the attack must succeed


_SCALE = {'gaussian': .7, 'laplace': .5}
_LAPLACE = dict(scale=_SCALE['laplace'])
_WIDE = _LAPLACE | dict(dimension=_PIXELS)
_CASES = {
    'gaussian_l2': Case('gaussian', 'l2', functools.partial(
        radii.gaussian_l2_radius, stddev=_SCALE['gaussian']), 4.),
    'gaussian_renyi_l2': Case('gaussian', 'l2', functools.partial(
        radii.gaussian_renyi_l2_radius, stddev=_SCALE['gaussian']), 6.),
    'laplace_l1': Case('laplace', 'l1', functools.partial(
        radii.laplace_l1_radius, **_LAPLACE), 16.),
    'laplace_linf': Case('laplace', 'linf', functools.partial(
        radii.laplace_linf_radius, **_WIDE), 40.),
    'laplace_renyi_linf': Case('laplace', 'linf', functools.partial(
        radii.laplace_renyi_linf_radius, **_WIDE), 10.),
}


def _noise(name, key, shape):
  draw = jax.random.normal if name == 'gaussian' else jax.random.laplace
  return _SCALE[name] * draw(key, shape)


def _logits(params, x):
  (first, bias), (last, top) = params
  return jax.nn.relu(x @ first + bias[None]) @ last + top[None]


def _initial(key):
  sizes = (_PIXELS, 64, 10)
  return [(jax.random.normal(jax.random.fold_in(key, at), (a, b)) / a**.5,
           jnp.zeros(b)) for at, (a, b) in enumerate(zip(sizes, sizes[1:]))]


@functools.cache
def _model(noise):
  """A trained ``(key, x) -> logits`` and its parameters; noise in training."""
  data = images.load('digits')
  x = jnp.array(images.scale(data.train_images)).reshape(-1, _PIXELS)
  y = jnp.array(data.train_labels)
  optimizer = optax.adam(3e-3)

  def predict(params, key, x):
    return _logits(params, x + _noise(noise, key, x.shape))

  def step(carry, key):
    params, state = carry
    loss = lambda params: optax.softmax_cross_entropy_with_integer_labels(
        predict(params, key, x), y).mean()
    updates, state = optimizer.update(jax.grad(loss)(params), state)
    return (optax.apply_updates(params, updates), state), None

  params = _initial(jax.random.key(0))
  (params, _), _ = jax.jit(lambda carry, keys: jax.lax.scan(
      step, carry, keys))((params, optimizer.init(params)),
                          jax.random.split(jax.random.key(1), 300))
  return jax.tree_util.Partial(predict, params)


@functools.cache
def _certified(name):
  """Images that a formula certifies with their true label, and how far."""
  case, data = _CASES[name], images.load('digits')
  x = images.scale(data.test_images[:_NUM]).reshape(_NUM, -1)
  found = smoothing.certify(
      jax.random.key(2), _model(case.noise), x, num_samples=_VOTES,
      significance=_SIGNIFICANCE, radii={'r': case.radius})
  use = (found.label == data.test_labels[:_NUM]) & (found.radii['r'] > 0)
  return x[use], found.label[use], found.radii['r'][use]


def _attacked(name, factor):
  """Labels by fresh votes after the attack inside ``factor`` radii."""
  case = _CASES[name]
  x, labels, radius = _certified(name)
  predict = _model(case.noise)

  @jax.jit
  def attack(key, x, labels, bound):
    loss = gradient.cross_entropy_loss(predict, labels=labels)
    return gradient.pgd(
        key, loss, x, attack_bound=bound, attack_norm=case.norm, num_steps=20,
        num_restarts=20, num_draws=16, low=None, high=None)

  moved = attack(jax.random.key(3), x, labels,
                 jnp.float32(radius * factor * (1 - 1e-5)))
  return smoothing.certify(
      jax.random.key(4), predict, moved, num_samples=_VOTES,
      significance=_SIGNIFICANCE).label


class AttackTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_half_of_the_images_are_certified(self, name):
    self.assertGreaterEqual(len(_certified(name)[0]), 50)

  @parameterized.parameters(*_CASES)
  def test_none_is_broken_inside_its_radius(self, name):
    after, labels = _attacked(name, 1.), _certified(name)[1]
    broken = (after != labels) & (after != smoothing.ABSTAIN)
    np.testing.assert_array_equal(np.flatnonzero(broken), [])

  @parameterized.parameters(*_CASES)
  def test_the_same_attack_breaks_them_beyond(self, name):
    after, labels = _attacked(name, _CASES[name].beyond), _certified(name)[1]
    broken = (after != labels) & (after != smoothing.ABSTAIN)
    self.assertGreaterEqual(np.mean(broken), .2)


if __name__ == '__main__':
  absltest.main()
