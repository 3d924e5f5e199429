r"""Runs a mechanism twice on the same randomness and measures what is left.

An additive mechanism is a signal plus noise that does not look at the input,
:math:`M(k, x) = s(x) + Z(k)`. With the same key the noise cancels,

.. math:: M(k, x) - M(k, x') = s(x) - s(x'),

and what is left is the signal that the noise must hide: its norm is compared
with the sensitivity to which the noise was declared to be scaled. Exact and
deterministic, where a statistical audit needs thousands of runs; but it sees
one pair of inputs, and only the scale's numerator, not the noise.

The function under audit runs where it runs, on the device if it is jitted, and
as the caller compiled it; the rest is NumPy float64 on the host.

Example:
  >>> import jax
  >>> import jax.numpy as jnp
  >>> def adept(key, x):  # noise for a sensitivity of 1 whatever the dimension
  ...   return x + jax.random.laplace(key, x.shape)
  >>> result = replay(adept, jnp.zeros(8), jnp.ones(8), key=jax.random.key(0),
  ...                 claimed_sensitivity=1.)
  >>> round(result.sensitivity, 4), result.verdict
  (8.0, 'violated')

References:
  Cebere et al. (2026), Re:cord-play <https://arxiv.org/abs/2602.17454>.
  Habernal (2021), When differential privacy meets NLP: the devil is in the
    detail <https://arxiv.org/abs/2109.03175>.
"""

from typing import NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp.auditing import settings

# Roundings that an output may carry, each half a unit in its last place.
_ROUNDINGS = 8
_MOST_KEYS = 100_000  # all outputs are held


class ReplayResult(NamedTuple):
  """The measured and the declared sensitivity on one pair of inputs."""

  sensitivity: float  # max over keys of |M(k, x) - M(k, x')|, in data units
  claimed: float  # in data units
  verdict: str | None  # 'violated', 'not violated'; None: does not apply
  noise_cancels: bool  # the difference is the same for every key
  note: str  # empty, or why the check does not apply


def replay(fun, x, x_prime, *, key, num_keys=1, claimed_sensitivity, order=1):
  r"""Compares a mechanism's signal with the sensitivity its noise was made for.

  ``verdict`` is 'violated' when the difference exceeds the claim by more than
  the output's own rounding. It is None where the check does not apply, and
  ``note`` says why: the noise does not cancel (``noise_cancels`` is False, the
  difference measures nothing), ``fun`` ignores its key (but for a difference
  above the claim, which is 'violated'), or the inputs are equal. At least two
  keys are run to see this; a mechanism with few outputs may need more.

  Deterministic in ``key``. Warns with ``UserWarning`` when ``fun`` ignores its
  key.

  Args:
    fun: ``fun(key, x) -> y``, any pytree of floating arrays; jitted or not.
    x: input, any pytree that ``fun`` takes.
    x_prime: neighbouring input; its output has the same shapes.
    key: typed key; consumed.
    num_keys: how many keys the difference is measured on, in [1, 100000].
    claimed_sensitivity: declared bound on the difference, > 0, in data units.
    order: of the norm over all leaves together: 1 for Laplace, 2 for Gaussian
      noise, up to ``np.inf``.

  Returns:
    :class:`ReplayResult`.

  Raises:
    ValueError: an argument is out of its range; outputs are not floating, not
      finite, empty or differ in structure; ``fun`` raises.

  References: Cebere et al. (2026).
  """
  _check_settings(fun, key, num_keys, claimed_sensitivity, order)
  keys = samplers.element_keys(key, samplers.TRIAL, 0, max(2, int(num_keys)))
  runs = [_run(fun, k, x, x_prime) for k in keys]
  ignored = all(np.array_equal(first, other)
                for side in (0, 1)
                for first, other in [(runs[0][side][0], r[side][0])
                                     for r in runs[1:]])
  if ignored:
    warnings.warn(
        f'fun gives the same output for {len(keys)} different keys; it seems '
        'to ignore its key, and then nothing is private', UserWarning, 2)
  differences = [a - b for (a, _), (b, _) in runs]
  roundings = [a + b for (_, a), (_, b) in runs]
  cancels = all(
      np.all(abs(difference - differences[0]) <= rounding + roundings[0])
      for difference, rounding in zip(differences, roundings, strict=True))
  note = ''
  if _equal(x, x_prime):
    note = 'x and x_prime are equal: this pair shows nothing'
  elif not cancels:
    note = ('the difference changes with the key: the noise is not additive, '
            'and this check does not apply')
  elif ignored:
    note = ('fun gives the same output for every key: there is no noise to '
            'compare with, and nothing is private')
  return _result(differences, roundings, cancels, float(claimed_sensitivity),
                 order, note)


def _equal(x, x_prime):
  if jax.tree.structure(x) != jax.tree.structure(x_prime):
    return False
  return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(
      jax.tree.leaves(x), jax.tree.leaves(x_prime), strict=True))


def _run(fun, key, x, x_prime):
  """Both outputs of one key, flat, each with its rounding."""
  outputs = []
  for name, value in (('x', x), ('x_prime', x_prime)):
    try:
      outputs.append(fun(key, value))
    except Exception as e:  # whatever the caller's function does
      raise settings.raised(e, f'a key and {name}') from e
  shapes, shapes_prime = (jax.tree.map(np.shape, y) for y in outputs)
  if shapes != shapes_prime:
    raise ValueError(f'fun gives outputs of shapes {shapes} for x and '
                     f'{shapes_prime} for x_prime; only equal shapes have a '
                     'difference')
  return tuple(_flat(y) for y in outputs)


def _result(differences, roundings, cancels, claimed, order, note):
  """The verdict from the differences and how far rounding can move them."""
  norms = [float(np.linalg.norm(d, order)) for d in differences]
  # The triangle inequality: rounding alone never makes a violation.
  shown = max(norm - float(np.linalg.norm(r, order))
              for norm, r in zip(norms, roundings, strict=True))
  if cancels and shown > claimed:
    verdict = 'violated'
  else:
    verdict = None if note else 'not violated'
  return ReplayResult(max(norms), claimed, verdict, bool(cancels), note)


def _flat(output):
  """All leaves in one float64 vector, and the rounding error of each entry."""
  values, errors = [np.zeros(0)], [np.zeros(0)]
  for path, leaf in jax.tree_util.tree_leaves_with_path(output):
    leaf = np.asarray(leaf)
    name = jax.tree_util.keystr(path) or 'its output'
    if leaf.dtype.kind in 'OUS' or not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(f'fun returns {leaf.dtype} at {name}; only floating '
                       'arrays have a difference, ids and flags have none')
    value = leaf.astype(np.float64).ravel()
    if not np.isfinite(value).all():
      raise ValueError(f'fun returns a value that is not finite at {name}; its '
                       'difference is no number')
    values.append(value)
    errors.append(abs(value) * (_ROUNDINGS / 2. * jnp.finfo(leaf.dtype).eps))
  values, errors = np.concatenate(values), np.concatenate(errors)
  if not values.size:
    raise ValueError('fun returns no numbers; return what is released')
  return values, errors


def _check_settings(fun, key, num_keys, claimed_sensitivity, order):
  if not callable(fun):
    raise ValueError(f'fun={fun!r} must be a function (key, x) -> y')
  settings.check_key(key)
  settings.check_whole('num_keys', num_keys, 1, _MOST_KEYS)
  settings.check_number(
      'claimed_sensitivity', claimed_sensitivity, lambda x: 0. < x < np.inf,
      'one positive finite number, in the unit of the data')
  settings.check_number('order', order, lambda x: x >= 1., 'a number of at '
                        'least 1; below there is no norm')
