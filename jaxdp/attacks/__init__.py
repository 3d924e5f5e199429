"""Attacks on randomised networks, by gradient. Device, pure, jittable.

Receives the loss it climbs as an argument, never a network, so it attacks ours
and anyone's alike. Modules load when a name is first used.

>>> import jax
>>> import jax.numpy as jnp
>>> from jaxdp import attacks
>>> loss_fn = lambda key, x: x @ jnp.array([1., -2.])
>>> x = jnp.zeros((1, 2))
>>> attacks.fgsm(jax.random.key(0), loss_fn, x, attack_bound=.25).tolist()
[[0.25, -0.25]]
"""

import importlib

_HOMES = {
    'cross_entropy_loss': 'losses',
    'ensemble': 'gradient',
    'fgsm': 'gradient',
    'ifgsm': 'gradient',
    'mim': 'gradient',
    'pgd': 'gradient',
    'predicted_labels': 'losses',
    'random_starts': 'gradient',
}

__all__ = list(_HOMES)


def __getattr__(name):
  if name in _HOMES:
    module = importlib.import_module(f'jaxdp.attacks.{_HOMES[name]}')
    return getattr(module, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_HOMES])
