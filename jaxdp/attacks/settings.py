"""What the settings of an attack must be; traced values are taken on trust.

Refusals are raised while tracing, on the host; nothing here runs on a device.

>>> per_example('attack_bound', .5, jnp.zeros((2, 3))).tolist()
[[0.5], [0.5]]
>>> assign(('fgsm', 'pgd'), None, 5, known=('fgsm', 'pgd')).tolist()
[0, 0, 0, 1, 1]
"""

import jax
import jax.numpy as jnp
import numpy as np


def per_example(name, value, like, wanted='positive'):
  """Returns a scalar or [B] setting as [B, 1]."""
  if not is_traced(value):
    known = np.asarray(value, np.float64)
    is_good = known >= 0 if wanted != 'positive' else known > 0
    if not np.all(is_good & np.isfinite(known)):
      raise ValueError(f'{name}={value} must be {wanted} and finite')
  num = like.shape[0]
  if jnp.shape(value) not in ((), (num,)):
    raise ValueError(f'{name} has shape {jnp.shape(value)}; pass a number or '
                     f'one an example, {(num,)}')
  column = jnp.asarray(value, like.dtype).reshape(-1, 1)
  return jnp.broadcast_to(column, (num, 1))


def check_count(name, value):
  """Refuses what is not a static int of at least 1."""
  is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
  if not is_int or value < 1:
    raise ValueError(f'{name}={value!r} must be an int of at least 1; it is '
                     'static')


def check_box(low, high):
  """Refuses an empty box."""
  if low is None or high is None or is_traced(low) or is_traced(high):
    return
  if not np.all(np.asarray(low) < np.asarray(high)):
    raise ValueError(f'low={low} must be below high={high}; None is unbounded')


def check_start(start, shape, num_restarts):
  """Returns starts as [num_restarts, B, ...]."""
  if start is None:
    return None
  start = jnp.asarray(start)
  if num_restarts == 1 and start.shape == shape:
    return start[None]
  if start.shape != (num_restarts, *shape):
    raise ValueError(f'start has shape {start.shape}, expected '
                     f'{(num_restarts, *shape)}: offsets from x, a set for '
                     'each restart')
  return start


def check_shape(name, value, expected, letters):
  """Refuses an array of another shape; None stands for any length."""
  is_good = len(jnp.shape(value)) == len(expected) and all(
      want in (None, got) for want, got in zip(expected, jnp.shape(value)))
  if not is_good:
    raise ValueError(f'{name} returned shape {jnp.shape(value)}, expected '
                     f'{letters} with B={expected[0]}')


def check_indices(name, values, limit):
  """Refuses known indices outside [0, limit)."""
  values = np.asarray(values)
  wrong = values[(values < 0) | (values >= limit)]
  if wrong.size:
    raise ValueError(f'{name} holds {wrong[0]}, which is not in [0, {limit})')


def assign(attacks, assignment, num_examples, *, known):
  """Index of each example's attack, int32 [B]."""
  unknown = [name for name in attacks if name not in known]
  if isinstance(attacks, str) or not attacks or unknown:
    raise ValueError(f'attacks={attacks!r} must name some of {known}')
  if assignment is None:
    parts = np.array_split(np.arange(num_examples), len(attacks))
    return np.repeat(np.arange(len(attacks)), [len(part) for part in parts])
  if jnp.shape(assignment) != (num_examples,):
    raise ValueError(f'assignment has shape {jnp.shape(assignment)}, expected '
                     f'[B] = {(num_examples,)}')
  if not is_traced(assignment):
    check_indices('assignment', assignment, len(attacks))
  return jnp.asarray(assignment)


def is_traced(value):
  """Whether a value is unknown until the program runs."""
  return isinstance(value, jax.core.Tracer)
