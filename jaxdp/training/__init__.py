"""Training runs, from one trainer's step to many devices and restarts.

Device, except what reads or writes a file. Modules load when first named.

  stobatch      StoBatch in both modes: config, step, deployed network
  releases      what it does to records first: the mechanism
  objectives, moments   what it minimises; its auto-encoder from two noisy sums
  certificates  the three ledgers of a run and the radii of its predictions
  parallel      one trainer's step on one device, many devices, many hosts
  checkpoints   the last state and the best, whole or not at all
"""

import importlib

_MODULES = ('certificates', 'checkpoints', 'layouts', 'moments', 'objectives',
            'parallel', 'releases', 'stobatch')

__all__ = list(_MODULES)


def __getattr__(name):
  if name in _MODULES:
    return importlib.import_module(f'jaxdp.training.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_MODULES])
