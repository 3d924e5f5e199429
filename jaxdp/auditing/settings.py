"""Checks of the arguments that audits and bounds share. Host."""

import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

MAX_COUNT = 2 ** 53  # float64 tells neighbouring counts apart up to here
LEAST_SIGNIFICANCE = 1e-12


def check_number(name, value, is_good, wanted):
  """The value as a float.

  Raises:
    ValueError: it is no single real number, or ``is_good`` refuses it; the
      message is ``name=value must be wanted``. NaN is refused, since it makes
      every comparison false.
  """
  try:
    number = math.nan
    if _is_real(value) and np.ndim(value) == 0:
      number = float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not is_good(number):
    raise ValueError(f'{name}={value!r} must be {wanted}')
  return number


def check_significance(value):
  """The probability that a bound is wrong, in [1e-12, 0.5).

  Float64 confidence limits come as 1 minus a small number: with far less the
  limits lose their digits and then become NaN, which no comparison finds.
  """
  return check_number(
      'significance', value, lambda x: LEAST_SIGNIFICANCE <= x < .5,
      'one number in [1e-12, 0.5); it is the probability that the bound is '
      'wrong, 0.05 rather than 0.95')


def check_delta(value):
  """The delta of (epsilon, delta)-DP, in [0, 1)."""
  return check_number(
      'delta', value, lambda x: 0. <= x < 1., 'one number in [0, 1); it is the '
      'delta of (epsilon, delta)-DP')


def check_whole(name, value, low, high):
  """A whole number in [low, high], as a Python int."""
  check_number(name, value,
               lambda x: low <= x <= high and x == math.floor(x),
               f'one whole number in [{low}, {high}]')
  return int(value)


def check_flag(name, value):
  """True or False; 'no' and 0 would be taken for one of them."""
  if not isinstance(value, (bool, np.bool_)):
    raise ValueError(f'{name}={value!r} must be True or False')
  return bool(value)


def check_key(key):
  """One typed key."""
  if not (isinstance(key, jax.Array)
          and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
          and key.shape == ()):
    raise ValueError(f'key={key!r} must be one typed key, as jax.random.key(0) '
                     'or samplers.secure_key(64) makes')
  return key


def check_array(name, value):
  """An array of real numbers in its own dtype, or ValueError by its name."""
  try:
    array = np.asarray(value)
    if array.dtype == object and array.size and all(
        _is_real(v) for v in array.flat):
      array = array.astype(np.float64)  # 10**400, or numbers in object arrays
    is_good = array.dtype.kind in 'fiub' or jnp.issubdtype(
        array.dtype, jnp.floating)
  except (TypeError, ValueError, OverflowError) as e:
    raise ValueError(f'{name}={_shown(value)} must be an array of real '
                     f'numbers: {e}') from e
  if not is_good:
    raise ValueError(f'{name}={_shown(value)} must be an array of real numbers '
                     f'and has dtype {array.dtype}')
  return array


def check_floats(name, value):
  """As `check_array`, in float64."""
  return check_array(name, value).astype(np.float64)


def check_tree(name, value):
  """The pytree with each leaf an array of real numbers."""
  def leaf(path, part):
    if isinstance(part, int) and not -2**63 <= part < 2**63:
      raise ValueError(f'{name}={_shown(part)} does not fit 64 bits; scale or '
                       'shift the inputs')
    return check_array(name + jax.tree_util.keystr(path), part)

  return jax.tree_util.tree_map_with_path(leaf, value)


def check_trials(name, trials):
  """Numbers of runs, float64."""
  trials = check_floats(name, trials)
  bad = ~((trials >= 1) & (trials <= MAX_COUNT) & (trials == np.floor(trials)))
  if np.any(bad):
    raise ValueError(f'{name}={trials[bad][0]} must be a whole number in '
                     '[1, 2**53]; without runs nothing is shown')
  return trials


def check_counts(hits, hits_prime, trials, trials_prime,
                 names=('hits', 'hits_prime', 'trials', 'trials_prime')):
  """((hits, trials), (hits_prime, trials_prime)), float64, one shape."""
  values = np.broadcast_arrays(
      check_floats(names[0], hits), check_floats(names[1], hits_prime),
      check_trials(names[2], trials), check_trials(names[3], trials_prime))
  sides = (values[0], values[2]), (values[1], values[3])
  for (k, n), name, of in zip(sides, names[:2], names[2:], strict=True):
    bad = ~((k >= 0) & (k <= n) & (k == np.floor(k)))
    if np.any(bad):
      raise ValueError(f'{name}={k[bad][0]} must be a whole number in '
                       f'[0, {of}={n[bad][0]:.0f}]; it counts runs, and is no '
                       'rate')
  return sides


def where_raised(error):
  """' at FILE:LINE' of the innermost frame outside of JAX and this library."""
  ours = pathlib.Path(__file__).parents[1]
  skipped = [str(ours), *(str(pathlib.Path(m.__file__).parent)
                          for m in (jax, np))]
  found, trace = '', error.__traceback__
  while trace is not None:
    file = trace.tb_frame.f_code.co_filename
    if not file.startswith(('<', *(s + os.sep for s in skipped))):
      found = f' at {file}:{trace.tb_lineno}'
    trace = trace.tb_next
  return found


def raised(error, when, name='fun'):
  """The ValueError to raise for whatever a user's function raised."""
  return ValueError(f'{name} raises {type(error).__name__}'
                    f'{where_raised(error)} when it is called with {when}: '
                    f'{error}')


def plain(value):
  """A Python float of a scalar; an array as it is."""
  return float(value) if np.ndim(value) == 0 else value


def _is_real(value):
  """Whether it is a number, and neither a truth value nor text."""
  if isinstance(value, (bool, str, bytes)) or value is None:
    return False
  dtype = getattr(value, 'dtype', None)
  if dtype is None:
    return isinstance(value, (int, float)) or hasattr(value, '__float__')
  try:
    return np.issubdtype(dtype, np.integer) or bool(
        jnp.issubdtype(dtype, jnp.floating))
  except TypeError:
    return False


def _shown(value):
  text = repr(value)
  return text if len(text) <= 80 else f'{text[:77]}...'
