r"""Finite laws whose probabilities are integers over :math:`2^{64}`.

Host: integer masses become thresholds and back, the largest ratio of two
masses is found by cross multiplication, and its logarithm is rounded up.
Device: :func:`draw` compares 64 random bits with the thresholds in a number
of steps that depends on nothing but their count.

>>> cuts = thresholds([2**62, 2**63, 2**62])
>>> masses(cuts).tolist() == [2**62, 2**63, 2**62]
True
>>> import jax
>>> draw(jax.random.key(0), (2, 3), cuts).shape
(2, 3)
"""

import decimal
import itertools
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import threefry

TOTAL = 2**64
# exp and ln of `decimal` are correctly rounded: at 80 digits every value used
# here is right to 1e-75.
CONTEXT = decimal.Context(prec=80)
_SLACK = decimal.Decimal('1e-75')


def positive(name, value, advice):
  """Returns value as a finite float above 0, or raises by `name`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real) or (
      not 0 < float(value) < math.inf):
    raise ValueError(f'{name}={value!r} must be positive and finite; {advice}')
  return float(value)


def is_traced(*arrays):
  """Whether a value is unknown until the compiled function runs."""
  return any(isinstance(array, jax.core.Tracer) for array in arrays)


def check_index(name, value, num):
  """Checks concrete integers in [0, num); traced ones are clamped later.

  Raises:
    ValueError: another dtype, or a concrete value out of range.
  """
  if not is_traced(value):
    value = np.asarray(value)
  if not jnp.issubdtype(value.dtype, jnp.integer):
    raise ValueError(f'{name} has dtype {value.dtype}; pass integers in '
                     f'[0, {num})')
  if is_traced(value) or not value.size:
    return
  low, high = int(value.min()), int(value.max())
  if low < 0 or high >= num:
    raise ValueError(f'{name} holds {low if low < 0 else high}; it must lie '
                     f'in [0, {num})')


def check_real(name, value):
  """Raises ValueError for an array that is not of real numbers."""
  dtype = value.dtype if is_traced(value) else np.asarray(value).dtype
  if not (jnp.issubdtype(dtype, jnp.floating)
          or jnp.issubdtype(dtype, jnp.integer)):
    raise ValueError(f'{name} has dtype {dtype}; pass real numbers')


def thresholds(integer_masses):
  """Returns the cumulative sums of K masses, uint32 ``[K - 1, 2]``. Host.

  Args:
    integer_masses: K >= 2 Python ints, each at least 1, of sum 2**64.
  """
  cumulative = list(itertools.accumulate(integer_masses))
  assert min(integer_masses) >= 1 and cumulative[-1] == TOTAL
  cut = np.array(cumulative[:-1], np.uint64)
  return np.stack([cut >> np.uint64(32), cut & np.uint64(2**32 - 1)],
                  axis=-1).astype(np.uint32)


def cumulative_masses(cuts):
  """Returns the thresholds as uint64 ``[..., K - 1]``. Host."""
  cuts = np.asarray(cuts, np.uint64)
  return (cuts[..., 0] << np.uint64(32)) | cuts[..., 1]


def masses(cuts):
  """Returns the integer masses behind thresholds, uint64 ``[..., K]``."""
  cumulative = cumulative_masses(cuts)
  zero = np.zeros((*cumulative.shape[:-1], 1), np.uint64)
  # 2**64 is 0 modulo 2**64, and every difference is below it.
  return np.diff(np.concatenate([zero, cumulative, zero], -1), axis=-1)


def log_probabilities(integer_masses):
  """Returns log(mass / 2**64), float64, right to float64 rounding."""
  return np.log(np.ldexp(np.asarray(integer_masses).astype(np.float64), -64))


def largest_ratio(pairs):
  """Returns the pair (a, b) of integers whose a / b >= 1 is largest."""
  best, over = 1, 1
  for a, b in pairs:
    a, b = (a, b) if a >= b else (b, a)
    if a * over > best * b:
      best, over = a, b
  return best, over


def log_rounded_up(ratio, per=1.):
  """Returns a float64 at least log(a / b) / per for ratio (a, b), tight."""
  a, b = ratio
  if a == b:
    return 0.
  with decimal.localcontext(CONTEXT):
    exact = (decimal.Decimal(a) / decimal.Decimal(b)).ln() + _SLACK
    exact /= decimal.Decimal(per)
    value = float(exact)
    return math.nextafter(value, math.inf) if value < exact else value


def draw(key, shape, cuts, row=None):
  """Draws outcomes of integer laws, int32. Device, jittable.

  Every entry takes two 32-bit words and ``ceil(log2 K)`` comparisons, whatever
  is drawn.

  Args:
    key: typed key; consumed.
    shape: shape of the result.
    cuts: uint32 ``[K - 1, 2]``, or ``[N, K - 1, 2]`` with ``row``.
    row: int32 of ``shape``, which of the N laws; None for a single one.

  Returns:
    int32 of ``shape`` in [0, K): how many thresholds the bits reach.
  """
  high, low = threefry.words(key, shape)
  num = cuts.shape[-2]
  flat = jnp.asarray(cuts).reshape(-1, 2)
  top, rest = flat[:, 0], flat[:, 1]
  first = 0 if row is None else row * num

  def step(i, count):
    reach = count + (jnp.int32(1) << (num.bit_length() - 1 - i))
    at = first + jnp.minimum(reach, num) - 1
    over = (high > top[at]) | ((high == top[at]) & (low >= rest[at]))
    return jnp.where(over & (reach <= num), reach, count)

  count = jnp.zeros(shape, jnp.int32)
  # Unrolled, XLA's CPU code draws half as many entries a second.
  return jax.lax.fori_loop(0, num.bit_length(), step, count)
