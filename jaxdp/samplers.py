r"""Key-first draws, key purposes and secure keys. Device, pure, jittable.

Every sampler takes ``key, shape, dtype, *, settings`` as ``jax.random`` does
and consumes its key. Logs are taken where they keep relative precision in
*both* tails: a uniform here is a side (one bit) and a fraction with a full
float mantissa at every magnitude down to ``2**-33`` (float32), so float32
noise reaches about 23 scales out instead of 16, without holes.

Laws with finitely many outcomes are drawn by comparing 64 random bits with
integer thresholds that NumPy computed in float64 (:func:`thresholds`).

Keys: a run has one root key. A stream is ``fold_in(fold_in(root, PURPOSE),
id)`` with a purpose constant of this module and an element index, never a
device or batch index; :func:`element_keys` is that rule.

>>> import jax
>>> noise = truncated_gumbel(jax.random.key(0), (1000,), scale=2., bound=3.)
>>> bool(abs(noise).max() <= 3.)
True

References: Xu et al. (2020), Algorithm 1 and Definition 1; Feyisetan et al.
(2020), Section 3.
"""

import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special as sp_special

from jaxdp import threefry

# One constant a stream. No two may be equal; a test holds it.
NUM_CANDIDATES = 1  # how many neighbours a word chooses among
CANDIDATE_NOISE = 2  # noise on the candidates of a neighbour table
VOCABULARY_NOISE = 3  # noise on the whole vocabulary, or a draw from all of it
VECTOR_NOISE = 4  # noise added to an embedding
OUTCOME = 5  # one draw from a closed-form law
UNKNOWN = 6  # replacement of words that no table holds
MEASURE = 7  # repeated runs of plausible deniability
SUBSAMPLE = 8  # which words a measurement looks at
KEEP = 9  # whether a word that is not sensitive is kept
TRIAL = 10  # an audit's runs on x
TRIAL_PRIME = 11  # an audit's runs on x_prime
CLASSIFIER = 12  # an audit's classifier: its start and its batches
SPLIT = 13  # which trials select an event and which test it
INPUT_NOISE = 14  # noise on a released image, by example
HIDDEN_NOISE = 15  # noise on the first layer's output, by example
LABEL_NOISE = 16  # randomised response, or the noise of a loss's coefficients
TRAIN = 17  # a training step: attack sizes, dropout
ATTACK = 18  # starting points of an attack, by example
VOTE = 19  # fresh noise of one vote of a smoothed classifier
INIT = 20  # first parameters of a model
AUGMENT = 21  # augmentation, by example and epoch
SHUFFLE = 22  # which examples form a batch, which batch a step takes
MOMENTS = 23  # noise on sums over a data set

_TILE = 1024  # elements drawn at once, each with numbers of its own
_FLAT_TILE = 4096  # elements drawn at once, one number of each after another
_WIDE_TILE = 2**16  # either, where there is no cache to stay in
_DRAWN = 2**16  # numbers drawn at once; more vectors go in tiles

PURPOSES = {
    'NUM_CANDIDATES': NUM_CANDIDATES,
    'CANDIDATE_NOISE': CANDIDATE_NOISE,
    'VOCABULARY_NOISE': VOCABULARY_NOISE,
    'VECTOR_NOISE': VECTOR_NOISE,
    'OUTCOME': OUTCOME,
    'UNKNOWN': UNKNOWN,
    'MEASURE': MEASURE,
    'SUBSAMPLE': SUBSAMPLE,
    'KEEP': KEEP,
    'TRIAL': TRIAL,
    'TRIAL_PRIME': TRIAL_PRIME,
    'CLASSIFIER': CLASSIFIER,
    'SPLIT': SPLIT,
    'INPUT_NOISE': INPUT_NOISE,
    'HIDDEN_NOISE': HIDDEN_NOISE,
    'LABEL_NOISE': LABEL_NOISE,
    'TRAIN': TRAIN,
    'ATTACK': ATTACK,
    'VOTE': VOTE,
    'INIT': INIT,
    'AUGMENT': AUGMENT,
    'SHUFFLE': SHUFFLE,
    'MOMENTS': MOMENTS,
}


def secure_key(bits=128):
  """Returns a fresh typed key from the operating system's entropy. Host.

  ``jax.random.key(int)`` carries 32 bits without x64: a release drawn from it
  can be inverted by trying every seed. This key carries ``bits`` bits. JAX's
  generators are not vetted for cryptography; that limit stays.

  Args:
    bits: 128 (``threefry4x32``) or 64 (``threefry2x32``, JAX's default).

  Returns:
    Typed key, ``[]``. Never store it beside what it protected.

  Raises:
    ValueError: ``bits`` is neither 64 nor 128.
  """
  impl = {128: 'threefry4x32', 64: 'threefry2x32'}.get(bits)
  if impl is None:
    raise ValueError(f'bits={bits!r} must be 64 or 128')
  words = np.frombuffer(os.urandom(bits // 8), np.uint32)
  return jax.random.wrap_key_data(jnp.asarray(words), impl=impl)


def split_index(index):
  """Returns uint32 ``[2]`` (high, low) of an element index below 2**64.

  Args:
    index: Python int in [0, 2**64), a scalar integer array (traced or not;
      its high half is taken as 0), or an already split uint32 ``[2]``.

  Raises:
    ValueError: a Python int out of range or an array of another shape.
  """
  if isinstance(index, (int, np.integer)):
    if not 0 <= int(index) < 2**64:
      raise ValueError(f'start={index} must lie in [0, 2**64)')
    return jnp.asarray(divmod(int(index), 2**32), jnp.uint32)
  index = jnp.asarray(index)
  if not jnp.issubdtype(index.dtype, jnp.integer):
    raise ValueError(f'start has dtype {index.dtype}; it is an element index')
  if index.shape == ():
    return jnp.stack([jnp.uint32(0), index.astype(jnp.uint32)])
  if index.shape != (2,):
    raise ValueError(f'start has shape {index.shape}; pass an int or a uint32 '
                     'array of shape (2,)')
  return index.astype(jnp.uint32)


def advance(start, steps):
  """Returns the index so many elements after ``start``, as :func:`split_index`.

  Args:
    start: as of :func:`split_index`.
    steps: integer ``[]`` in [0, 2**32).
  """
  high, low = split_index(start)
  moved = low + jnp.asarray(steps).astype(jnp.uint32)
  return jnp.stack([high + (moved < low).astype(jnp.uint32), moved])


def element_keys(key, purpose, start, num):
  """Returns one key for each of the elements start, start + 1, ...

  Both halves of the 64-bit element index are folded in, so two chunks of one
  file never share a stream and the split into chunks never shows.

  Each key returned has 64 bits, whatever the root has: 2**64 trials go through
  all the noise one element can have had. Of a 128-bit root two half keys are
  folded and their results combined by exclusive or: from the keys of a few
  elements all others follow by 2**128 trials, or by about 2**64 and as much
  memory, where two lists meet.

  Args:
    key: typed key of any JAX implementation; consumed.
    purpose: one of this module's purpose constants.
    start: index of the first element; see :func:`split_index`.
    num: number of keys, static.

  Returns:
    Typed ``threefry2x32`` keys, ``[num]``.
  """
  high, low = split_index(start)
  lows = low + jnp.arange(num, dtype=jnp.uint32)
  carried = lows < low
  data = jax.random.key_data(jax.random.fold_in(key, purpose))
  folded = [_fold_halves(half, high, lows, carried)
            for half in data.reshape(-1, 2)]
  words = folded[0] if len(folded) == 1 else jnp.bitwise_xor(*folded)
  return jax.random.wrap_key_data(words, impl='threefry2x32')


def id_keys(key, purpose, ids):
  """Returns one key for each id, as :func:`element_keys` gives element ``id``.

  Args:
    key: typed key of any JAX implementation; consumed.
    purpose: one of this module's purpose constants.
    ids: integer ``[...]`` in [0, 2**32), in any order and any batch.

  Returns:
    Typed ``threefry2x32`` keys of the shape of ``ids``.
  """
  ids = jnp.asarray(ids)
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise ValueError(f'ids has dtype {ids.dtype}; they are element indices')
  lows = ids.astype(jnp.uint32).ravel()
  data = jax.random.key_data(jax.random.fold_in(key, purpose))
  folded = [_fold_halves(half, jnp.uint32(0), lows, jnp.zeros_like(lows, bool))
            for half in data.reshape(-1, 2)]
  words = folded[0] if len(folded) == 1 else jnp.bitwise_xor(*folded)
  return jax.random.wrap_key_data(words.reshape(*ids.shape, 2),
                                  impl='threefry2x32')


def _fold_halves(data, high, lows, carried):
  """Folds (high, low) into one 64-bit half key; uint32 [num, 2]."""
  half = jax.random.wrap_key_data(data, impl='threefry2x32')
  bases = [jax.random.key_data(jax.random.fold_in(half, high + jnp.uint32(c)))
           for c in (0, 1)]
  chosen = jnp.where(carried[:, None], bases[1][None], bases[0][None])
  keys = jax.random.wrap_key_data(chosen, impl='threefry2x32')
  return jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, lows))


def map_elements(fun, *arrays):
  """``jax.vmap(fun)`` over the leading axis, in tiles that stay in cache.

  Drawing for a whole batch at once writes the random bits of every element to
  memory and reads them again: three times the time on a CPU at 65,536 elements
  of 80 words. The tile never shows in the result.

  Args:
    fun: a function of one element of each array.
    *arrays: arrays or typed keys, ``[B, ...]``.
  """
  return jax.lax.map(lambda element: fun(*element), arrays,
                     batch_size=_tile(_TILE))


def map_tiles(fun, *arrays):
  """As :func:`map_elements`, for a function of a whole tile of each array.

  The function loops over an element's numbers itself, each for the whole tile.

  The leading axis is padded with copies of its first entry to whole tiles.
  """
  num = arrays[0].shape[0]
  size = min(_tile(_FLAT_TILE), num)
  at = jnp.arange(-(-num // size) * size, dtype=jnp.int32)
  at = jnp.where(at < num, at, 0).reshape(-1, size)
  out = jax.lax.map(lambda tile: fun(*(a[tile] for a in arrays)), at)
  return jax.tree.map(
      lambda a: a.reshape(-1, *a.shape[2:])[:num], out)


def _tile(size):
  return size if jax.default_backend() == 'cpu' else _WIDE_TILE


def laplace(key, shape=(), dtype=jnp.float32, *, scale):
  r"""Draws Laplace noise of density :math:`e^{-|x|/b} / 2b`.

  Args:
    key: typed key; consumed.
    shape: shape of the result.
    dtype: float dtype of the result.
    scale: :math:`b \ge 0`, in the data's unit; broadcasts against ``shape``.

  Returns:
    Array of ``shape`` and ``dtype``; in float32 within 23 scales of 0. The
    last :math:`2^{-33}` of the tail is missing: a guarantee computed for real
    arithmetic does not cover a float release (see ``mechanisms.numeric``).

  Example:
    >>> laplace(jax.random.key(0), (3,), scale=2.).shape
    (3,)
  """
  _check_scale(scale)
  upper, fraction = _two_sided_uniform(key, shape, dtype)
  magnitude = -jnp.log(fraction)
  return jnp.where(upper, magnitude, -magnitude) * jnp.asarray(scale, dtype)


def multivariate_laplace(key, shape, dtype=jnp.float32, *, epsilon):
  r"""Draws vectors of density proportional to :math:`e^{-\epsilon\|x\|_2}`.

  A direction uniform on the *sphere* times a radius of law Gamma(D, 1/epsilon):
  a direction from the ball, as Xu et al. (2020) word it, has another density.

  Args:
    key: typed key; consumed.
    shape: shape of the result; its last axis is the dimension D.
    dtype: float dtype of the result.
    epsilon: rate > 0 in 1/distance; infinity gives zeros. A scalar, or
      broadcasts against ``shape[:-1]``.

  Returns:
    Array of ``shape``; the mean norm is D / epsilon.

  Example:
    >>> multivariate_laplace(jax.random.key(0), (4, 50), epsilon=10.).shape
    (4, 50)

  References: Feyisetan et al. (2020), Section 3.2; Xu et al. (2020), Section 3.
  """
  shape = tuple(shape)
  if not shape:
    raise ValueError('shape=() has no last axis; the last axis is D')
  _check(epsilon, 'epsilon', lambda x: x > 0, 'positive; it is a rate in '
         '1/distance')
  direction_key, radius_key = jax.random.split(key)
  radius = _gamma(radius_key, shape[-1], shape[:-1], dtype)
  radius = radius / jnp.asarray(epsilon, dtype)
  if math.prod(shape) <= _DRAWN:
    return _isotropic(direction_key, radius, shape[-1])
  return _isotropic_tiles(direction_key, radius.ravel(), shape[-1]).reshape(
      shape)


def _isotropic(key, radius, dim):
  """Vectors of uniform direction and length ``radius``, ``[..., D]``."""
  direction = jax.random.normal(key, (*radius.shape, dim), radius.dtype)
  norm = jnp.linalg.norm(direction, axis=-1, keepdims=True)
  return direction * (radius[..., None] / norm)


@functools.partial(jax.jit, static_argnums=2)
def _isotropic_tiles(key, radius, dim):
  """`_isotropic` of ``[N]`` in tiles that stay in cache, a key for each."""
  rows = 2**max(0, (_DRAWN // dim).bit_length() - 1)
  num = -(-len(radius) // rows)
  keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(
      jnp.arange(num, dtype=jnp.uint32))
  padded = jnp.pad(radius, (0, num * rows - len(radius))).reshape(num, rows)
  out = jax.lax.map(lambda tile: _isotropic(*tile, dim), (keys, padded))
  return out.reshape(-1, dim)[:len(radius)]


def _gamma(key, concentration, shape, dtype):
  """Gamma draws; with a key of 128 bits, a key of its own for each.

  ``jax.random.gamma`` splits its key once a draw, which takes 10 us of a
  ``threefry4x32`` key and nothing of a ``threefry2x32`` one.
  """
  if jax.random.key_data(key).size == 2 or not math.prod(shape):
    return jax.random.gamma(key, concentration, shape, dtype)
  keys = element_keys(key, VECTOR_NOISE, 0, math.prod(shape))
  return jax.vmap(lambda k: jax.random.gamma(k, concentration, (), dtype))(
      keys).reshape(shape)


def gumbel(key, shape=(), dtype=jnp.float32, *, scale=1.):
  r"""Draws Gumbel noise of CDF :math:`\exp(-e^{-x/b})`, both tails in full.

  Args:
    key: typed key; consumed.
    shape: shape of the result.
    dtype: float dtype of the result.
    scale: :math:`b \ge 0`, in the data's unit; broadcasts against ``shape``.

  Returns:
    Array of ``shape`` and ``dtype``; in float32 between -3.2 and 23 scales,
    where the missing tails weigh :math:`2^{-34}` each.
  """
  return truncated_gumbel(key, shape, dtype, scale=scale, bound=math.inf)


def truncated_gumbel(key, shape=(), dtype=jnp.float32, *, scale, bound):
  r"""Draws Gumbel noise conditioned on ``|x| <= bound``, by inverse CDF.

  With :math:`E = e^{-x/b}` a truncated exponential on
  :math:`[e^{-B/b}, e^{B/b}]`,

  .. math::
    E = e^{-B/b} - \log(1 - u (1 - e^{-(e^{B/b} - e^{-B/b})})),
    \quad x = -b \log E, \quad u \sim U[0, 1].

  Guarantee: every entry lies in ``[-bound, bound]``; one uniform an entry,
  so the cost does not depend on the bound. Relative precision is kept as u
  nears 0 (upper tail) and 1 (lower tail, where an arg-min decides).

  Args:
    key: typed key; consumed.
    shape: shape of the result.
    dtype: float dtype of the result.
    scale: :math:`b \ge 0`, in distance units; broadcasts against ``shape``.
    bound: :math:`B > 0`, in distance units, may be infinite (no truncation);
      broadcasts against ``shape``.

  Returns:
    Array of ``shape`` and ``dtype``.

  Example:
    >>> x = truncated_gumbel(jax.random.key(0), (1000,), scale=2., bound=3.)
    >>> bool(abs(x).max() <= 3.)
    True

  References: Xu et al. (2020), Algorithm 1.
  """
  return _truncated_gumbel(lambda: _two_sided_uniform(key, shape, dtype),
                           dtype, scale, bound)


def truncated_gumbel_entry(keys, index, *, scale, bound):
  """Entry ``index`` of ``truncated_gumbel(key, (n,))`` for each of the keys.

  For a loop over the candidates of a whole batch: arrays run along the batch,
  whole vectors at a time, where a row of candidates would be a few entries.

  Args:
    keys: typed ``threefry2x32`` keys, ``[B]``, as :func:`element_keys` makes.
    index: int32 ``[]``.
    scale: as for :func:`truncated_gumbel`, a scalar.
    bound: likewise.

  Returns:
    float32 ``[B]``.
  """
  first, second = jax.random.key_data(keys).T
  counter = jnp.full(first.shape, index, jnp.uint32)
  words = lambda: threefry.threefry2x32(
      first, second, jnp.zeros_like(counter), counter)
  return _truncated_gumbel(
      lambda: _side_and_fraction(*words(), jnp.float32), jnp.float32, scale,
      bound)


def _truncated_gumbel(uniform, dtype, scale, bound):
  """The noise of a two-sided uniform ``uniform()``."""
  _check_scale(scale)
  _check(bound, 'bound', lambda x: x > 0, 'positive; infinity is no bound')
  scale = jnp.asarray(scale, dtype)
  bound = jnp.asarray(bound, dtype)
  ratio = bound / scale
  if ratio.ndim == 0:  # one branch runs, not both; the draw fuses with it
    noise = jax.lax.cond(ratio <= 1,
                         lambda: _narrow_gumbel(*uniform(), scale, bound),
                         lambda: _wide_gumbel(*uniform(), scale, bound))
  else:
    noise = jnp.where(ratio <= 1,
                      _narrow_gumbel(*uniform(), scale, bound),
                      _wide_gumbel(*uniform(), scale, bound))
  return jnp.clip(noise, -bound, bound)


def _narrow_gumbel(upper, fraction, scale, bound):
  """For B <= b, where E is near 1: log E itself would lose its digits."""
  span = 2 * jnp.sinh(bound / scale)  # e^{B/b} - e^{-B/b}
  u = jnp.where(upper, 1 - fraction / 2, fraction / 2)
  excess = -jnp.log1p(jnp.expm1(-span) * u)
  return bound - scale * jnp.log1p(jnp.exp(bound / scale) * excess)


def _wide_gumbel(upper, fraction, scale, bound):
  """For B > b, where both tails of E need their relative precision."""
  ratio = bound / scale
  span = 2 * jnp.sinh(ratio)
  mass = -jnp.expm1(-span)
  small = fraction / 2  # u below the middle, 1 - u above it
  excess = jnp.where(upper, -jnp.log(mass * small + jnp.exp(-span)),
                     -jnp.log1p(-mass * small))
  return -scale * jnp.log(jnp.exp(-ratio) + excess)


def truncated_gumbel_argmin(key, values, *, scale, bound):
  """Returns the arg-min of values plus truncated Gumbel noise.

  Args:
    key: typed key; consumed.
    values: float ``[..., K]``; infinite entries are never chosen.
    scale: noise scale b >= 0, in the unit of ``values``; scalar.
    bound: truncation B > 0, in the unit of ``values``; scalar.

  Returns:
    int32 ``[...]``; ties go to the lowest index.

  Example:
    >>> int(truncated_gumbel_argmin(jax.random.key(0), jax.numpy.array(
    ...     [5., 0., 9.]), scale=.01, bound=1.))
    1

  References: Xu et al. (2020), Algorithm 1. No privacy by itself: the claim
  and what is wrong with it stand in ``mechanisms.truncated_gumbel``.
  """
  values = jnp.asarray(values)
  noise = truncated_gumbel(key, values.shape, values.dtype, scale=scale,
                           bound=bound)
  return jnp.argmin(values + noise, axis=-1).astype(jnp.int32)


def truncated_poisson_probabilities(*, rate, low, high, max_value=None):
  """Returns Pr(X = low + i), float64 ``[high - low + 1]``. Host.

  Y ~ Poisson(rate); X = Y where low <= Y < high, and X = high otherwise: the
  overflow atom takes Y < low *and* Y >= high, so it is at least e^-rate. The
  paper's last sum, from b + 1, would lose Pr(Y = b).

  Args:
    rate: lambda > 0.
    low: smallest value, >= 0.
    high: largest value and overflow atom, > low (== low gives one atom).
    max_value: with low <= max_value < high, values between it and high are
      moved to the overflow atom too, which only raises Pr(X = high).

  Raises:
    ValueError: rate not positive and finite, or low, high out of order.

  References: Xu et al. (2020), Definition 1.
  """
  _check_rate(rate)
  if not 0 <= low <= high:
    raise ValueError(f'low={low}, high={high} must satisfy 0 <= low <= high')
  values = np.arange(low, high)
  log_pmf = values * math.log(rate) - rate - sp_special.gammaln(values + 1.)
  pmf = np.exp(log_pmf)
  if max_value is not None:
    pmf[values > max_value] = 0.
  below = sp_special.pdtr(low - 1, rate) if low > 0 else 0.
  last = high - 1 if max_value is None else min(max_value, high - 1)
  above = sp_special.pdtrc(last, rate) if last >= 0 else 1.
  return np.append(pmf, below + above if high > low else 1.)


def truncated_poisson(key, shape=(), *, rate, low, high):
  """Draws the truncated Poisson law with its overflow atom at high.

  Args:
    key: typed key; consumed.
    shape: shape of the result.
    rate: lambda > 0, a Python float (static: thresholds are made on the host).
    low: smallest value, static int.
    high: largest value and overflow atom, static int.

  Returns:
    int32 of ``shape``, exact to 2**-64; see
    :func:`truncated_poisson_probabilities` for the law.

  Example:
    >>> bool(truncated_poisson(jax.random.key(0), (9,), rate=4.6, low=1,
    ...                        high=100).min() >= 1)
    True

  References: Xu et al. (2020), Definition 1.
  """
  _check_rate(rate)
  # Beyond this the mass is under 2**-64: it joins the overflow atom.
  last = max(low, int(rate + 12 * math.sqrt(rate) + 64))
  pmf = truncated_poisson_probabilities(rate=rate, low=low, high=high,
                                        max_value=last)
  kept = pmf if high <= last else np.append(pmf[:last + 1 - low], pmf[-1])
  index = categorical(key, shape, thresholds=thresholds(kept))
  overflow = len(kept) - 1
  return jnp.where(index == overflow, high, low + index).astype(jnp.int32)


def thresholds(probabilities):
  """Returns integer thresholds of a finite law, uint32 ``[..., K - 1, 2]``.

  Host, float64 cumulative sums. Outcome i is drawn when exactly i thresholds
  are at most the 64 random bits, so probability p is kept to 2**-53: a word
  of probability 1e-9 keeps it to seven digits.

  Args:
    probabilities: float ``[..., K]``, rows summing to 1 within 1e-9.

  Raises:
    ValueError: negative or non-finite entries, or a row off 1.
  """
  p = np.asarray(probabilities, np.float64)
  if p.ndim < 1 or p.shape[-1] < 1 or not np.all(p >= 0):
    raise ValueError('probabilities must be non-negative, [..., K >= 1]')
  cumulative = np.cumsum(p, axis=-1)
  worst = np.max(np.abs(cumulative[..., -1] - 1), initial=0.)
  if not worst < 1e-9:
    raise ValueError(f'probabilities: a row is off 1 by {worst}; normalise it')
  cut = np.clip(cumulative[..., :-1], 0., 1.)
  top = np.minimum(np.floor(cut * 2.**32), 2.**32 - 1)
  rest = np.minimum(np.floor((cut - top * 2.**-32) * 2.**64), 2.**32 - 1)
  return np.stack([top, rest], axis=-1).astype(np.uint32)


def categorical(key, shape=(), *, thresholds):
  """Draws outcomes of the law behind integer thresholds, int32.

  Args:
    key: typed key; consumed.
    shape: shape of the result.
    thresholds: uint32 ``[..., K - 1, 2]`` of :func:`thresholds`, whose
      leading axes broadcast against ``shape``.

  Returns:
    int32 of ``shape`` in [0, K).
  """
  thresholds, shape = jnp.asarray(thresholds), tuple(shape)
  num = threefry.check_size(shape)
  size = _tile(_FLAT_TILE)
  if thresholds.ndim > 2 or num <= size or not threefry.is_hashed(key):
    return count_thresholds(*threefry.words(key, shape), thresholds)
  # In tiles: one pass a threshold over arrays that stay in the cache.
  at = jnp.arange(-(-num // size) * size, dtype=jnp.uint32).reshape(-1, size)
  out = jax.lax.map(lambda tile: count_thresholds(
      *threefry.words_at(key, tile), thresholds), at)
  return out.reshape(-1)[:num].reshape(shape)


def count_thresholds(high, low, thresholds):
  """Counts thresholds at most the 64 bits (high, low), over the last axis."""
  if thresholds.ndim == 2:  # the same for all: a vector of entries at a time
    def step(count, threshold):
      return count + _reached(high, low, threshold).astype(jnp.int32), None
    return jax.lax.scan(step, jnp.zeros(high.shape, jnp.int32), thresholds,
                        unroll=8)[0]
  high, low = high[..., None], low[..., None]
  if thresholds.ndim - 1 < high.ndim:
    pad = (1,) * (high.ndim - thresholds.ndim + 1)
    thresholds = thresholds.reshape(pad + thresholds.shape)
  return jnp.sum(_reached(high, low, thresholds), axis=-1, dtype=jnp.int32)


def _reached(high, low, threshold):
  top, rest = threshold[..., 0], threshold[..., 1]
  return (high > top) | ((high == top) & (low >= rest))


def _check_scale(scale):
  _check(scale, 'scale', lambda x: x >= 0, 'at least 0; it is a noise scale')


def _check_rate(rate):
  if not (rate > 0 and math.isfinite(rate)):
    raise ValueError(f'rate={rate} must be positive and finite')


def _check(value, name, is_good, wanted):
  """Refuses numbers out of range where they are known; never under tracing."""
  is_known = isinstance(value, (int, float, np.number, np.ndarray))
  if is_known and not np.all(is_good(np.asarray(value))):  # a NaN is not good
    raise ValueError(f'{name}={value} must be {wanted}')


def _two_sided_uniform(key, shape, dtype):
  """A fair side and a uniform in (0, 1) of full resolution near 0.

  The exponent is a run of zero bits, the mantissa comes from other bits: a
  uniform made of 23 bits alone has holes and a floor at 2**-23.
  """
  if jnp.finfo(dtype).bits == 64:
    return _side_and_fraction(*jax.random.bits(key, (2, *shape), jnp.uint64),
                              dtype)
  return _side_and_fraction(*threefry.words(key, shape), dtype)


def _side_and_fraction(exponent_word, mantissa_word, dtype):
  wide = exponent_word.dtype.itemsize == 8
  word, mantissa, bias = ((jnp.uint64, 52, 1022) if wide
                          else (jnp.uint32, 23, 126))
  zeros = jax.lax.clz(exponent_word)
  tail = mantissa_word & word(2**mantissa - 1)
  pattern = ((word(bias) - zeros) << word(mantissa)) | tail
  fraction = jax.lax.bitcast_convert_type(
      pattern, jnp.float64 if wide else jnp.float32)
  side = word(word.dtype.itemsize * 8 - 1)
  return (mantissa_word >> side) == 1, fraction.astype(dtype)
