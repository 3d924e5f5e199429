"""Differential privacy and certified robustness in JAX, each claim audited.

Importing the package does no work: rooms load when first named.

  samplers      key-first draws, key purposes, secure keys
  neighbors     exact nearest neighbours on plain arrays
  embeddings    EmbeddingTable and readers of the usual formats
  guarantees    Guarantee, composition, the guarantee card
  mechanisms    word mechanisms: calibrate / privatize / log_prob
  deniability   how often a word stays, how many words it may become
  auditing      what a mechanism's epsilon really is
  attacks       adversarial examples of a model, by its gradient
  certification radii of smoothed classifiers, from votes
  models        Flax networks; no privacy inside
  training      private and robust training on one device or many
  special, confidence   the mathematics below
"""

import importlib

__version__ = '0.1.0'

_ROOMS = ('attacks', 'auditing', 'certification', 'confidence',
          'deniability', 'embeddings', 'guarantees', 'mechanisms', 'models',
          'neighbors', 'samplers', 'special', 'training')

__all__ = list(_ROOMS)


def __getattr__(name):
  if name in _ROOMS:
    return importlib.import_module(f'jaxdp.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_ROOMS])
