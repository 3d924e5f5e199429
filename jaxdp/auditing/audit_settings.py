"""What an audit by trials refuses: settings, inputs, too few trials. Host.

Every refusal is a ValueError that names the argument.

>>> check_claim(1)
1.0
>>> x, x_prime = check_inputs([0., 1.], [1., 1.])
>>> x[0].dtype
dtype('float64')
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.auditing import bounds
from jaxdp.auditing import scores
from jaxdp.auditing import settings

SELECTIONS = ('split', 'fixed', 'bonferroni', 'multisplit')


def check_settings(num_trials, delta, significance, score, selection,
                   thresholds, direction):
  """Refuses what no audit can be run with, by its name."""
  if isinstance(num_trials, bool) or not isinstance(
      num_trials, (int, np.integer)) or not 1 <= num_trials < 2**53:
    raise ValueError(f'num_trials={num_trials!r} must be an integer in '
                     '[1, 2**53)')
  settings.check_delta(delta)
  settings.check_significance(significance)
  if not (callable(score) or score in scores.NAMES):
    raise ValueError(f'score={score!r} must be one of {scores.NAMES} or a '
                     'function of one output')
  if selection not in SELECTIONS:
    raise ValueError(f'selection={selection!r} must be one of {SELECTIONS}')
  if direction not in ('either', 'x', 'x_prime'):
    raise ValueError(f"direction={direction!r} must be 'either', 'x' or "
                     "'x_prime'")
  _check_thresholds(score, selection, thresholds, direction)


def check_claim(claim):
  """The claimed epsilon as a float, or None."""
  if claim is None:
    return None
  return settings.check_number('claim', claim, lambda x: x > 0,
                               'an epsilon above 0')


def _check_thresholds(score, selection, thresholds, direction):
  declared = selection in ('fixed', 'bonferroni')
  if not declared and (thresholds is not None or direction != 'either'):
    raise ValueError(f'thresholds={thresholds!r} and direction={direction!r} '
                     "are declared beforehand with selection='fixed' or "
                     f"'bonferroni', and {selection!r} finds its own")
  if thresholds is None:
    if declared and not (selection == 'fixed' and score == 'majority'):
      raise ValueError(f'selection={selection!r} needs thresholds=, declared '
                       'before the trials are seen')
    return
  value = settings.check_floats('thresholds', thresholds)
  size = value.size
  if value.ndim > 1 or not np.all(np.abs(value) < 3e38) or (
      size != 1 if selection == 'fixed' else not 1 <= size <= 4096):
    raise ValueError(f'thresholds={thresholds!r} must be finite, one number '
                     "for 'fixed' and 1 to 4096 for 'bonferroni'")


def check_inputs(x, x_prime):
  """The two inputs as arrays of one structure."""
  if jax.tree.structure(x) != jax.tree.structure(x_prime):
    raise ValueError(f'x is {jax.tree.structure(x)} and x_prime is '
                     f'{jax.tree.structure(x_prime)}; neighbouring inputs must '
                     'have one structure')
  x, x_prime = (settings.check_tree(name, value)
                for name, value in (('x', x), ('x_prime', x_prime)))
  for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(x_prime)):
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      raise ValueError(
          f'x has a leaf of dtype {a.dtype} and shape {a.shape} and x_prime '
          f'one of dtype {b.dtype} and shape {b.shape}; give both as arrays '
          'of one shape and dtype, np.float32(0) and np.float32(1) say')
    if _lost(a, b):
      raise ValueError(f'x has dtype {a.dtype}, and what tells it from x_prime '
                       'does not fit the 32 bits that JAX uses; scale or shift '
                       'both inputs')
  if all(np.array_equal(a, b, equal_nan=a.dtype.kind == 'f') for a, b in zip(
      jax.tree.leaves(x), jax.tree.leaves(x_prime))):
    raise ValueError('x and x_prime are equal; an audit compares two inputs')
  return x, x_prime


def check_parameters(parameters):
  """Refuses parameters that are no numbers or do not fit the device."""
  leaves = settings.check_tree('parameters', [
      leaf for leaf in jax.tree.leaves(parameters)
      if not isinstance(leaf, jax.Array)])  # keys, and what is there already
  for leaf in leaves:
    with np.errstate(over='ignore'):  # found below
      there = np.asarray(jnp.asarray(leaf))
    if leaf.dtype.kind in 'iu':
      lost = there != leaf
    else:
      lost = ((there == 0) & (leaf != 0)) | (np.isinf(there) != np.isinf(leaf))
    if lost.any():
      raise ValueError(f'parameters hold {leaf[lost].flat[0]!r}, which does '
                       'not fit the 32 bits that JAX uses; scale or shift them')


def _lost(a, b):
  """Whether the device's 32 bits change an integer or equate two floats."""
  mine, theirs = (np.asarray(jnp.asarray(v)) for v in (a, b))
  if a.dtype.kind == 'f':
    return bool(((mine == theirs) & (a != b)).any())
  return bool((mine != a).any() or (theirs != b).any())


def check_ceiling(num_trials, num, delta, significance, num_events,
                  num_directions):
  """Refuses so few trials that no bound above 0 can come of them."""
  def ceiling(n):
    return bounds.epsilon_ceiling(
        n, delta=delta, significance=significance, num_events=num_events,
        num_directions=num_directions)

  if num < 1 or not ceiling(num) > 0:
    needed = 1
    while needed < 2**53 and not ceiling(needed) > 0:
      needed *= 2
    raise ValueError(f'num_trials={num_trials} is too few: {num} of them test '
                     f'the event and at least {needed} must, or nothing can be '
                     'shown at this significance and delta; give some '
                     f'{min(20 * needed, 2**53)} or more')
