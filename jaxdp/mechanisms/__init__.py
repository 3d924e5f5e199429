"""Word mechanisms of metric differential privacy, all with one interface.

A mechanism replaces each word of a text, independently, by a word of a public
table. Calibration runs once on the host and may raise; ``privatize`` is a pure
device function and never raises under jit; ``log_prob`` is the law of what
``privatize`` draws.

>>> import jax, numpy as np
>>> from jaxdp import embeddings, mechanisms
>>> table = embeddings.EmbeddingTable(
...     ('cold', 'cool', 'warm'), np.float32([[0.], [1.], [5.]]))
>>> mech = mechanisms.get('santext')
>>> params = mech.calibrate(table, epsilon=2.)
>>> ids = np.int32([0, 0, 2])
>>> out = mech.privatize(jax.random.key(0), ids, params)
>>> out.shape, params.guarantee.status
((3,), 'proved')
>>> np.exp(mech.log_prob(ids[:1], params)).round(3).tolist()
[[0.727, 0.268, 0.005]]

Element i of the flattened ids uses keys folded with ``start + i``: a text may
be cut into chunks and spread over devices in any way and comes out the same.
"""

import importlib
from typing import Any, Callable, NamedTuple

_MODULES = {
    'multivariate_laplace': 'multivariate_laplace',
    'truncated_gumbel': 'truncated_gumbel',
    'gumbel_exponential': 'gumbel_exponential',
    'tem': 'tem',
    'santext': 'santext',
    'custext': 'custext',
    'mahalanobis': 'mahalanobis',
    'vickrey': 'vickrey',
    'hyperbolic': 'hyperbolic',
    'syntax': 'syntax',
    'vmf': 'vmf',
}


class Mechanism(NamedTuple):
  """A word mechanism.

  Attributes:
    calibrate: ``(table, *, epsilon, **settings) -> params``. Host, float64;
      raises ValueError. ``params`` is a NamedTuple of arrays and one static
      ``guarantee``; it holds no words.
    privatize: ``(key, ids, params, start=0) -> ids``. Device, pure, jittable;
      int32 in and out, same shape.
    log_prob: ``(ids, params) -> float64 [B, V]``, log Pr(output = column).
      Host. Raises ValueError naming the Monte-Carlo route out of its reach.
    distances: ``(ids, params) -> float64 [B, V]``, the metric in which
      ``params.guarantee`` is stated. Host.
  """
  calibrate: Callable[..., Any]
  privatize: Callable[..., Any]
  log_prob: Callable[..., Any]
  distances: Callable[..., Any]


def names():
  """Returns the names that :func:`get` knows, in the order of the papers."""
  return tuple(_MODULES)


def get(name):
  """Returns the mechanism of that name.

  Raises:
    ValueError: an unknown name; the message lists the known ones.
  """
  if not isinstance(name, str) or name not in _MODULES:
    raise ValueError(f'mechanism={name!r} is unknown; use one of {names()}')
  module = importlib.import_module(f'jaxdp.mechanisms.{_MODULES[name]}')
  return Mechanism(module.calibrate, module.privatize, module.log_prob,
                   module.distances)
