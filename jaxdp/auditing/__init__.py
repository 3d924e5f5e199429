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
    'EpsilonBound': 'bounds',
    'GaussianDpBound': 'bounds',
    'delta_lower_bound': 'bounds',
    'epsilon_ceiling': 'bounds',
    'epsilon_lower_bound': 'bounds',
    'epsilon_lower_bound_assuming_gaussian_dp': 'bounds',
    'epsilon_point': 'bounds',
    'multi_split_bound': 'bounds',
    'one_run_epsilon_lower_bound': 'bounds',
    'BettingResult': 'betting',
    'Bettor': 'betting',
    'betting_test': 'betting',
    'ReplayResult': 'same_key_replay',
    'replay': 'same_key_replay',
    'AuditResult': 'black_box',
    'audit': 'black_box',
    'audit_sweep': 'black_box',
    'ExactEpsilon': 'exact',
    'exact_metric_epsilon': 'exact',
    'MetricEpsilon': 'metric',
    'metric_epsilon_lower_bound': 'metric',
    'exponential_metric_epsilon': 'metric',
    'SampledEpsilon': 'sampled',
    'sampled_epsilon_lower_bound': 'sampled',
    'Law': 'enumeration',
    'enumerate_law': 'enumeration',
    'exact_delta': 'enumeration',
    'exact_epsilon': 'enumeration',
}

__all__ = list(_HOMES)


def __getattr__(name):
  if name in _HOMES:
    module = importlib.import_module(f'jaxdp.auditing.{_HOMES[name]}')
    return getattr(module, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_HOMES])
