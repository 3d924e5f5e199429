"""What a mechanism's epsilon really is: exact where its law can be written out.

Host, NumPy float64. Receives laws and distances as arrays, never a mechanism,
so it audits ours and anyone's alike. Modules load when a name is first used.

>>> import numpy as np
>>> from jaxdp import auditing
>>> law = np.log([[.8, .2], [.4, .6]])
>>> epsilon, (w, w_prime, u) = auditing.exact_metric_epsilon(
...     law, np.array([[0., 2.], [2., 0.]]))
>>> round(epsilon, 4), (w, w_prime, u)  # log(.6 / .2) / 2
(0.5493, (1, 0, 1))
"""

import importlib

_HOMES = {
    'ExactEpsilon': 'exact',
    'exact_metric_epsilon': 'exact',
}

__all__ = list(_HOMES)


def __getattr__(name):
  if name in _HOMES:
    module = importlib.import_module(f'jaxdp.auditing.{_HOMES[name]}')
    return getattr(module, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_HOMES])
