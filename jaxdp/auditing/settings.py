"""Checks of the numbers that audits and bounds share. Host."""

import math

import numpy as np


def check_number(name, value, is_good, wanted):
  """The value as a float.

  Raises:
    ValueError: it is no single real number, or ``is_good`` refuses it; the
      message is ``name=value must be wanted``. NaN is refused, since it makes
      every comparison false.
  """
  try:
    is_text = isinstance(value, (bool, str, bytes)) or np.ndim(value) != 0
    number = math.nan if is_text else float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not is_good(number):
    raise ValueError(f'{name}={value!r} must be {wanted}')
  return number


def check_significance(value):
  """The probability that a bound is wrong, in (0, 0.5)."""
  return check_number(
      'significance', value, lambda x: 0. < x < .5, 'one number in (0, 0.5); '
      'it is the probability that the bound is wrong, 0.05 rather than 0.95')


def check_delta(value):
  """The delta of (epsilon, delta)-DP, in [0, 1)."""
  return check_number(
      'delta', value, lambda x: 0. <= x < 1., 'one number in [0, 1); it is the '
      'delta of (epsilon, delta)-DP')


def check_whole(name, value, low, high):
  """A whole number in [low, high], as it was given."""
  check_number(name, value,
               lambda x: low <= x <= high and x == math.floor(x),
               f'one whole number in [{low}, {high}]')
  return value
