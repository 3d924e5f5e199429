r"""The exact law of a float32 mechanism: all its draws, not a sample of them.

``jax.random.uniform`` keeps the top 23 bits of a random word, so a mechanism
that turns one uniform into one number has 2^23 equally likely draws, whatever
real law it stands for. Here the word IS the key: an implementation of JAX's
generators whose only word is handed to it runs the mechanism, untouched, on
every draw. What comes out is its law as compiled for this device, with no
sampling error, and so is the privacy loss between two inputs.

Runs on the device, in batches; counting and the losses are on the host, in
float64. A law of a Laplace mechanism takes one or two seconds on two cores,
most of them counting.

  >>> add_uniform = lambda key, x: x + jax.random.uniform(key)
  >>> law = enumerate_law(add_uniform, 0.)
  >>> law_prime = enumerate_law(add_uniform, 2.)
  >>> len(law.values), int(law.counts.max())  # a float32 for each draw
  (8388608, 1)
  >>> len(law_prime.values), int(law_prime.counts.max())  # some round to one
  (4194305, 3)
  >>> exact_delta(law, law_prime, 1.), exact_epsilon(law, law_prime)
  (1.0, inf)

References: that floating-point noise leaks its input is Mironov (2012), "On
significance of the least significant bits for differential privacy".
"""

import functools
import math
from typing import NamedTuple

import jax
from jax.extend import random as extend_random
import jax.numpy as jnp
import numpy as np

from jaxdp.auditing import settings

NUM_DRAWS = 2**23

_LOW_BITS = 9  # of a word, which a float32 mantissa leaves out
_LOW_MASK = 2**_LOW_BITS - 1
# Operations that lead away from the one word of the key, or out of JAX.
_REFUSED = {
    'random_split': 'splits its key',
    'random_fold_in': 'folds its key',
    'random_unwrap': 'reads the data of its key',
    'random_wrap': 'makes a key of its own',
    'random_seed': 'makes a key of its own',
    'pure_callback': 'calls back to Python',
    'io_callback': 'calls back to Python',
    'rng_uniform': 'draws without a key',
    'rng_bit_generator': 'draws without a key',
}


class Law(NamedTuple):
  """Distinct outputs and how many equally likely draws give each."""
  values: np.ndarray  # f32 [M], ascending, distinct as bit patterns
  counts: np.ndarray  # i64 [M], positive; they sum to the number of draws


def enumerate_law(fun, x, *, batch=2**18):
  r"""The exact output law of a mechanism that consumes one 32-bit word.

  Runs ``jax.jit(jax.vmap(fun))`` at all :math:`2^{23}` values of the word's top
  23 bits. XLA may round ``x + scale * noise`` once instead of twice, so the law
  is of the function as it is compiled, not as it reads; compiled in another
  program, on another device or run without ``jit`` it may round differently.
  Values are told apart by their bits: -0. is not 0., and one NaN not another.

  Guarantee: measured 'exact' for words that are uniform. That the low 9 bits do
  not matter is checked at every draw with all of them clear, all set and one
  pattern between: a proof for a function that is monotone in its word, as an
  inverse CDF is, and a check of 3 patterns in 512 for others.

  Args:
    fun: ``fun(key, x) -> float32 []``, traceable by JAX, hashable; a second
      call with the same ``fun`` and shapes does not recompile.
    x: the input, an array or pytree that ``fun`` takes.
    batch: draws run at once, a power of two in [1, 2**23].

  Returns:
    :class:`Law`; ``counts`` sum to 2**23.

  Raises:
    ValueError: ``fun`` raises, cannot be traced, draws nothing or other than
      once and 32 bits, splits, folds, reads or makes a key, calls back to
      Python, has side effects, does not return one float32, or depends on the
      low 9 bits of its word; ``batch`` is not a power of two in range. The
      message names what was seen.

  Example:
    >>> coin = lambda key, x: jnp.float32(jax.random.uniform(key) < x)
    >>> law = enumerate_law(coin, .25)
    >>> law.values.tolist(), (law.counts / NUM_DRAWS).tolist()
    ([0.0, 1.0], [0.75, 0.25])
  """
  _check_batch(batch)
  _check_traced(fun, x)
  outputs = np.empty(NUM_DRAWS, np.uint32)
  for start in range(0, NUM_DRAWS, batch):
    clear, full, mixed = (
        np.asarray(_outputs(np.uint32(start), np.uint32(mask), np.uint32(ones),
                            x, fun=fun, batch=batch))
        for mask, ones in ((0, 0), (0, _LOW_MASK), (_LOW_MASK, 0)))
    _check_low_bits(clear, full, start)
    _check_low_bits(clear, mixed, start)
    outputs[start:start + batch] = clear
  ordered, counts = np.unique(_to_ordered(outputs), return_counts=True)
  return Law(_from_ordered(ordered), counts.astype(np.int64))


def exact_delta(law, law_prime, epsilon):
  r"""The least delta of two laws at one epsilon, measured 'exact'.

  .. math::
    \delta(\epsilon) = \max\Big(\sum_y \max(0, P(y) - e^\epsilon P'(y)),
      \ \sum_y \max(0, P'(y) - e^\epsilon P(y))\Big)

  the larger of the two directions, as a symmetric relation needs.

  Args:
    law: :class:`Law` of one input.
    law_prime: :class:`Law` of the other.
    epsilon: finite, >= 0.

  Returns:
    float in [0, 1], up to float64 rounding (1e-9 for 2**23 draws).

  Raises:
    ValueError: ``epsilon`` is negative or not finite; a law has no counts, or
      counts that are not positive, or values that are not ascending float32.

  Example:
    >>> law = Law(np.float32([0, 1]), np.int64([3, 1]))
    >>> law_prime = Law(np.float32([0, 1]), np.int64([1, 3]))
    >>> exact_delta(law, law_prime, 0.)
    0.5
  """
  epsilon = settings.check_number(
      'epsilon', epsilon, lambda x: 0 <= x < math.inf, 'finite and not '
      'negative; it is the privacy loss that delta allows to be exceeded')
  p, p_prime = _aligned(law, law_prime)
  scale = math.exp(epsilon) if epsilon < 709 else math.inf
  with np.errstate(invalid='ignore'):
    # Infinity times zero, where an output is impossible, is zero.
    excess = lambda a, b: np.sum(
        np.maximum(0., a - np.where(b > 0, scale * b, 0.)))
    return float(min(1., max(excess(p, p_prime), excess(p_prime, p))))


def exact_epsilon(law, law_prime):
  r"""The least epsilon of two laws at delta zero, measured 'exact'.

  .. math::
    \epsilon = \max_y |\log P(y) - \log P'(y)|

  Args:
    law: :class:`Law` of one input.
    law_prime: :class:`Law` of the other.

  Returns:
    float >= 0; infinite when an output is possible under one law only, be it
    one draw in 2**23: see :func:`exact_delta` for how much mass that is.

  Raises:
    ValueError: as :func:`exact_delta` for the laws.

  Example:
    >>> law = Law(np.float32([0, 1]), np.int64([3, 1]))
    >>> law_prime = Law(np.float32([0, 1]), np.int64([1, 3]))
    >>> round(exact_epsilon(law, law_prime), 4)  # log 3
    1.0986
  """
  p, p_prime = _aligned(law, law_prime)
  if not (p.all() and p_prime.all()):
    return math.inf
  return float(np.abs(np.log(p) - np.log(p_prime)).max())


@functools.cache
def _word_prng():
  """A generator whose key is its one random word."""
  def random_bits(key, bit_width, shape):
    if bit_width != 32 or math.prod(shape) != 1:
      raise ValueError(f'fun draws {bit_width * math.prod(shape)} bits; only '
                       '32 can be enumerated')
    return jnp.broadcast_to(key[0], shape)

  def refuse(what):
    def raises(*unused_args):
      raise ValueError(f'fun {what}; only one word can be enumerated')
    return raises

  return extend_random.define_prng_impl(
      key_shape=(1,), seed=refuse(_REFUSED['random_seed']),
      split=refuse(_REFUSED['random_split']),
      fold_in=refuse(_REFUSED['random_fold_in']), random_bits=random_bits,
      name='jaxdp_enumerated_word', tag='word')


@functools.partial(jax.jit, static_argnames=('fun', 'batch'))
def _outputs(start, mask, ones, x, *, fun, batch):
  """Output bits at draws start, start + 1, ...: uint32 [batch]."""
  draw = start + jnp.arange(batch, dtype=jnp.uint32)
  low = (draw * np.uint32(2654435761) >> np.uint32(32 - _LOW_BITS)) & mask
  words = draw << np.uint32(_LOW_BITS) | low | ones
  keys = jax.random.wrap_key_data(words[:, None], impl=_word_prng())
  out = jax.vmap(fun, (0, None))(keys, x)
  return jax.lax.bitcast_convert_type(out, jnp.uint32)


def _check_traced(fun, x):
  """Refuses a function that does not make one float32 of one word."""
  key = jax.random.wrap_key_data(jnp.zeros((1,), jnp.uint32),
                                 impl=_word_prng())
  if not callable(fun):
    raise ValueError(f'fun={fun!r} must be a function (key, x) -> float32 []')
  settings.check_tree('x', x)
  try:
    jaxpr, out = jax.make_jaxpr(fun, return_shape=True)(key, x)
  except NotImplementedError as e:
    raise ValueError(f'fun asks the generator for more than words: {e}; only '
                     'one draw of 32 bits can be enumerated') from e
  except Exception as e:  # whatever the caller's function does
    if isinstance(e, ValueError) and str(e).startswith('fun '):
      raise  # by the generator above
    raise settings.raised(
        e, 'a key and x to be traced by JAX; write it with jax.numpy') from e
  equations = list(_equations(jaxpr.jaxpr))
  for equation in equations:
    what = _REFUSED.get(equation.primitive.name)
    if what:
      raise ValueError(f'fun {what}; only a function that draws one 32-bit '
                       'word from the key it is given can be enumerated')
  if jaxpr.effects:
    raise ValueError('fun has side effects; only a function of its key and x '
                     'can be enumerated')
  draws = [e for e in equations if e.primitive.name == 'random_bits']
  bits = sum(e.params['bit_width'] * e.outvars[0].aval.size for e in draws)
  if draws and (len(draws) > 1 or bits != 32):
    raise ValueError(f'fun draws {bits} bits in {len(draws)} calls; only one '
                     'draw of 32 bits, a scalar float32, can be enumerated')
  if not (isinstance(out, jax.ShapeDtypeStruct) and out.shape == ()
          and out.dtype == jnp.float32):
    raise ValueError(f'fun returns {out}; it must return one float32 scalar '
                     '(jnp.float32 makes one of a bool or a small integer)')
  if not draws:
    raise ValueError('fun draws nothing from the key it is given: without '
                     'noise its law is one point, and nothing is private')


def _equations(jaxpr):
  """Yields the equations of a jaxpr and of all that it holds."""
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      for item in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(item, 'jaxpr', item)
        if hasattr(inner, 'eqns'):
          yield from _equations(inner)


def _check_low_bits(block, other, start):
  bad = block != other
  if bad.any():
    i = int(np.argmax(bad))
    one, two = np.stack([block[i], other[i]]).view(np.float32)
    raise ValueError(
        f'fun depends on the low {_LOW_BITS} bits of its word: draw '
        f'{start + i} gives {one} or {two}; enumeration covers what is made of '
        'the top 23 bits, as jax.random.uniform is in float32')


def _check_batch(batch):
  if (not isinstance(batch, int) or isinstance(batch, bool)
      or not 1 <= batch <= NUM_DRAWS
      or batch & (batch - 1)):
    raise ValueError(f'batch={batch!r} must be a power of two in [1, 2**23]; '
                     'it is how many draws run at once')


def _aligned(law, law_prime):
  """Probabilities of both laws over the union of their outputs."""
  values, counts = _check_law(law, 'law')
  values_prime, counts_prime = _check_law(law_prime, 'law_prime')
  place = np.minimum(np.searchsorted(values_prime, values),
                     len(values_prime) - 1)
  both = values_prime[place] == values
  unmet = np.ones(len(values_prime), bool)
  unmet[place[both]] = False
  only_prime = counts_prime[unmet]
  p = np.concatenate([counts, np.zeros(len(only_prime))])
  p_prime = np.concatenate([np.where(both, counts_prime[place], 0), only_prime])
  return p / counts.sum(), p_prime / counts_prime.sum()


def _check_law(law, name):
  """Returns a law's values, as ascending integers, and counts."""
  if not (isinstance(law, tuple) and len(law) == 2):
    raise ValueError(f'{name} is a {type(law).__name__} and must be a Law, as '
                     'enumerate_law returns')
  values = settings.check_array(f'{name}.values', law[0])
  counts = settings.check_array(f'{name}.counts', law[1])
  if values.dtype != np.float32 or values.ndim != 1 or not values.size:
    raise ValueError(f'{name}.values of dtype {values.dtype} and shape '
                     f'{values.shape} must be float32 [M] with M >= 1')
  if counts.shape != values.shape or counts.dtype.kind not in 'iu':
    raise ValueError(f'{name}.counts of dtype {counts.dtype} and shape '
                     f'{counts.shape} must be integers, one a value')
  if counts.min() < 1:
    raise ValueError(f'{name}.counts holds {counts.min()}; leave out values '
                     'that no draw gives')
  ordered = _to_ordered(values.view(np.uint32))
  if (ordered[1:] <= ordered[:-1]).any():
    raise ValueError(f'{name}.values must ascend, each output once; sort them '
                     'and add the counts of equal ones')
  return ordered, counts


def _to_ordered(bits):
  """Maps float32 bits to integers that ascend with the value."""
  sign = np.uint32(2**31)
  return np.where(bits & sign, ~bits, bits | sign)


def _from_ordered(ordered):
  sign = np.uint32(2**31)
  return np.where(ordered & sign, ordered ^ sign, ~ordered).view(np.float32)
