r"""What an audit looks at: an output becomes one real number. Device, pure.

A score is a function ``(y, context) -> float []``; the events of an audit are
``score >= t`` and its complement. The context is an array argument and never a
closure, so another input does not compile again.

==============  ===========================================================
``identity``    the one number that is released
``linear``      outputs clipped to the range of the two inputs, summed along
                their difference: the log-ratio of Laplace noise up to a factor
``majority``    1 where more than half of the outputs are at least 1/2, a NaN
                counted as such: the vote of Habernal (2022), ties to 0
``bits``        exponent of the lowest set bit of any output: rounding leaves
                traces that no real number has
``support``     1 for values seen under x only, -1 under x_prime only, learnt
                on trials of their own
``classifier``  log-odds of a small network, learnt on trials of their own
==============  ===========================================================

>>> import jax.numpy as jnp
>>> float(majority(jnp.array([.5, .7, .1]), None)), float(
...     lowest_bit(jnp.array([1.5, 3.]), None))  # 1.5 = 3 * 2**-1
(1.0, -1.0)

References: Habernal (2022), Section 4; Mironov (2012) for the bits; Bichsel et
al. (2021) for classifiers.
"""

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ('identity', 'linear', 'majority', 'bits', 'support', 'classifier')
LEARNT = ('support', 'classifier')
_NO_BIT = 1000.  # a zero has no set bit; above every exponent


def flatten(y):
  """All numbers of an output as one float32 vector."""
  leaves = [jnp.asarray(leaf).astype(jnp.float32).reshape(-1)
            for leaf in jax.tree.leaves(y)]
  return jnp.concatenate(leaves)


def identity(y, context):
  """The single released number."""
  del context
  return flatten(y)[0]


def linear(y, context):
  """Clipped outputs along the direction from x to x_prime."""
  x, x_prime = context
  low, high = jnp.minimum(x, x_prime), jnp.maximum(x, x_prime)
  return jnp.sum(jnp.clip(flatten(y), low, high) * jnp.sign(x_prime - x))


def majority(y, context):
  """The vote of Habernal (2022); a tie is 0 and a NaN votes 1."""
  del context
  bits = ~(flatten(y) < 0.5)
  return (2 * jnp.sum(bits, dtype=jnp.int32) > bits.size).astype(jnp.float32)


def lowest_bit(y, context):
  """Smallest exponent of a set bit over all outputs."""
  del context
  return jnp.min(jnp.concatenate(
      [_lowest_bit(jnp.asarray(leaf).reshape(-1))
       for leaf in jax.tree.leaves(y)]))


def _lowest_bit(x):
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.int32)
  if jnp.issubdtype(x.dtype, jnp.integer):
    places = _trailing_zeros(x)
    return jnp.where(x == 0, _NO_BIT, places.astype(jnp.float32))
  if jnp.finfo(x.dtype).bits < 32:
    x = x.astype(jnp.float32)
  wide = x.dtype == jnp.float64
  word, mantissa, bias = ((jnp.uint64, 52, 1075) if wide
                          else (jnp.uint32, 23, 150))
  bits = jax.lax.bitcast_convert_type(x, word)
  exponent = (bits >> mantissa) & word(2**11 - 1 if wide else 2**8 - 1)
  normal = exponent > 0
  digits = (bits & word(2**mantissa - 1)) | jnp.where(
      normal, word(2**mantissa), word(0))
  place = (jnp.maximum(exponent, 1).astype(jnp.int32) - bias
           + _trailing_zeros(digits))
  # By its bits: the device may compare a subnormal number equal to 0.
  return jnp.where(digits == 0, _NO_BIT, place.astype(jnp.float32))


def _trailing_zeros(x):
  lowest = x & (~x + jnp.ones((), x.dtype))
  return jax.lax.population_count(lowest - jnp.ones((), x.dtype)).astype(
      jnp.int32)


def fingerprint(y, context=None):
  """The exact bits of an output mixed into uint32; equal bits, equal value."""
  del context
  words = [_words(jnp.asarray(leaf)) for leaf in jax.tree.leaves(y)]
  words = jnp.concatenate(words)
  if words.size == 1:
    return words[0]  # injective

  def mix(total, word):
    # Multiply-xorshift: a collision only hides a leak, it never invents one.
    total = (total ^ word) * jnp.uint32(0x9E3779B1)
    return total ^ (total >> 15), None

  return jax.lax.scan(mix, jnp.uint32(2166136261), words)[0]


def _words(leaf):
  """Bits of an array as uint32 words."""
  leaf = leaf.reshape(-1)
  if leaf.dtype == jnp.bool_:
    return leaf.astype(jnp.uint32)
  size = leaf.dtype.itemsize
  if size == 8:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1)
  word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
  return jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)


def support(y, context):
  """1 where only x gave this value in training, -1 where only x_prime did."""
  mine = fingerprint(y)

  def held(values):
    place = jnp.searchsorted(values, mine)
    return values[jnp.minimum(place, values.size - 1)] == mine

  only_x, only_x_prime = context
  return held(only_x).astype(jnp.float32) - held(only_x_prime).astype(
      jnp.float32)


def support_context(values, values_prime):
  """Sorted values that one input gave and the other did not, of fingerprints.

  Args:
    values: uint32 ``[N]``, outputs on x as `fingerprint` gives them.
    values_prime: the same on x_prime.

  Returns:
    Two sorted uint32 arrays; an empty set is one entry of the other's, which
    then cancels.
  """
  values, values_prime = np.unique(values), np.unique(values_prime)
  only = np.setdiff1d(values, values_prime, assume_unique=True)
  only_prime = np.setdiff1d(values_prime, values, assume_unique=True)
  # An array must not be empty: a common value in both sets scores 0.
  common = values[:1]
  return (only if only.size else common,
          only_prime if only_prime.size else common)


def linear_context(x, x_prime, output):
  """float32 vectors of the two inputs, or ValueError where shapes differ."""
  size = sum(leaf.size for leaf in jax.tree.leaves(output))
  x, x_prime = (np.asarray(flatten(v)) for v in (x, x_prime))
  if x.size != size or x_prime.size != size:
    raise ValueError(
        f"score='linear' clips {size} outputs to the range of the inputs, "
        f"which have {x.size} and {x_prime.size} numbers; use 'classifier' or "
        'a function of the output')
  return x, x_prime
