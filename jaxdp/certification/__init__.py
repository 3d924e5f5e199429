"""How far an input may move before a smoothed classifier changes its mind.

A smoothed classifier answers with the class that wins the vote when its input
(or a hidden layer) is redrawn with noise. ``certify`` counts votes on the
device, bounds the two largest probabilities on the host, and turns the bounds
into radii; ``RADII`` lists the radius formulas, with the norm, the status and
the reason of each.

>>> import functools, jax, numpy as np
>>> from jaxdp import certification, samplers
>>> def predict_fn(key, x):  # the sign of x behind Laplace noise
...   score = x + samplers.laplace(key, x.shape, scale=.5)
...   return jax.numpy.concatenate([score, -score], axis=-1)
>>> radius_fn = functools.partial(certification.laplace_l1_radius, scale=.5)
>>> result = certification.certify(
...     jax.random.key(0), predict_fn, np.float32([[1.], [0.], [-2.]]),
...     num_samples=1_000, significance=.05, radii={'l1': radius_fn})
>>> result.label.tolist()  # the second input lies on the boundary: ABSTAIN
[0, -1, 1]
>>> radius = result.radii['l1']
>>> bool(radius[0] <= 1.), float(radius[1]), bool(radius[2] <= 2.)
(True, 0.0, True)
"""

import importlib

_HOMES = {
    'ABSTAIN': 'smoothing',
    'Certificate': 'smoothing',
    'Scores': 'smoothing',
    'Votes': 'smoothing',
    'certified_accuracy': 'smoothing',
    'certify': 'smoothing',
    'probability_bounds': 'smoothing',
    'tally': 'smoothing',
    'RADII': 'radii',
    'Radius': 'radii',
    'best_single_pass': 'radii',
    'claimed_radius': 'radii',
    'compose': 'radii',
    'gaussian_l2_radius': 'radii',
    'gaussian_renyi_l2_radius': 'radii',
    'hidden_linf_radius': 'radii',
    'laplace_l1_radius': 'radii',
    'laplace_linf_radius': 'radii',
    'laplace_renyi_linf_radius': 'radii',
    'noise_to_radius': 'radii',
    'pixeldp_gaussian_radius': 'radii',
    'pixeldp_laplace_radius': 'radii',
}

__all__ = list(_HOMES)


def __getattr__(name):
  if name in _HOMES:
    module = importlib.import_module(f'jaxdp.certification.{_HOMES[name]}')
    return getattr(module, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_HOMES])
