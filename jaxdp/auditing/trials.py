"""Trials of a mechanism on the device: run, score, count; keyed, streamed.

A trial is one call of the audited function on one input; its score is one real
number. Nothing of a trial leaves the device but its score, or only the count of
scores at or above a threshold, so any number of trials fits in memory.

Trial i uses the key folded with i (both 32-bit halves): chunks and devices
never show in a result. A *vectorised* function draws a block of trials from
one key; there block b of ``block_size`` trials uses the key folded with b.

>>> import jax, numpy as np
>>> from jaxdp import samplers
>>> run = Runner(lambda key, x, _: x + samplers.laplace(key, scale=1.),
...              lambda y, _: y)
>>> count = run.count(jax.random.key(0), samplers.TRIAL, np.float32(0.), None,
...                   None, np.float32([[0.]]), 0, 10_000)
>>> count.shape, bool(abs(count[0, 0] - 5_000) < 250)  # five deviations
((1, 1), True)
"""

import dataclasses
import functools
import hashlib
from typing import Any, Callable, NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp.auditing import settings

# Trials a device call counts: an int32 cannot overflow, and between two calls
# the process answers an interrupt.
_PER_CALL = 2**24
_CHUNK_ELEMENTS = 2**15  # outputs that stay in cache
_AXIS = 'devices'


class Runner(NamedTuple):
  """Runs one audited function. Hashable: equal runners share compiled code.

  Attributes:
    fun: ``(key, x, parameter) -> y``, or ``(key, x, num, parameter) -> y`` with
      a leading axis of ``num`` trials where ``block_size`` is given.
    score: ``(y, context) -> float []`` of one trial.
    block_size: trials of one call of a vectorised function, or None.
    num_devices: local devices to use.
    on_host: whether ``fun`` is called trial by trial, outside of JAX.
    program: what ``fun`` does, as text. Functions that are equal may differ
      after their state changed; compiled code of the old one must not serve.
    paired: whether ``x`` holds two inputs on a leading axis that see the same
      noise; results then have 2 P rows, those of the first input first.
  """
  fun: Callable[..., Any]
  score: Callable[..., Any]
  block_size: int | None = None
  num_devices: int = 1
  on_host: bool = False
  program: str = ''
  paired: bool = False

  def scores(self, key, purpose, x, parameters, context, start, num):
    """Returns the scores of trials start, ..., start + num - 1.

    Args:
      key: typed key of the whole audit.
      purpose: ``samplers.TRIAL`` or ``TRIAL_PRIME``.
      x: the input, a pytree of arrays.
      parameters: pytree with a leading axis of P parameters, or None (P = 1);
        all of them see the same noise.
      context: what the score needs besides the output.
      start: first trial; a multiple of ``block_size`` where that is given.
      num: number of trials; they are held in memory.

    Returns:
      NumPy float32 ``[P, num]``.
    """
    return self._replace(score=Real(self.score)).project(
        key, purpose, x, parameters, context, start, num)

  def project(self, key, purpose, x, parameters, context, start, num):
    """As `scores`, for a score that gives an array of any shape and dtype.

    Returns:
      NumPy ``[P, num, ...]``.
    """
    size, parts = self._chunk(x, parameters), []
    chunks, first = -(-num // size), 0
    run = self._host_project if self.on_host else _project
    while first < chunks:
      here = 64 if chunks - first >= 64 else 1  # two programs, not one a length
      parts.append(np.asarray(run(
          self._plain(), size, here, key, purpose, x, parameters, context,
          self._start(start + first * size))))
      first += here
    return np.concatenate(parts, axis=1)[:, :num]

  def count(self, key, purpose, x, parameters, context, thresholds, start, num):
    """Counts the trials whose score reaches each threshold.

    Args:
      key, purpose, x, parameters, context, start, num: as for `scores`.
      thresholds: float32 ``[P, m]``.

    Returns:
      NumPy int64 ``[P, m]``; a NaN score reaches no threshold.
    """
    if self.on_host:
      return self._host_count(key, purpose, x, parameters, context, thresholds,
                              start, num)
    size = self._chunk(x, parameters)
    total = np.zeros(thresholds.shape, np.int64)
    for first in range(0, num, _PER_CALL):
      here = min(_PER_CALL, num - first)
      total += np.asarray(_count(
          self, size, key, purpose, x, parameters, context, thresholds,
          self._start(start + first), here))
    return total

  def output(self, x, parameters):
    """Abstract output of one trial, without running it."""
    one = jax.tree.map(lambda p: p[0], parameters)
    x = jax.tree.map(lambda v: v[0], x) if self.paired else x
    key = jax.random.key(0)
    if self.on_host:
      return jax.tree.map(
          lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype),
          self.fun(key, x, None))
    if self.block_size is None:
      return jax.eval_shape(self.fun, key, x, one)
    out = jax.eval_shape(
        lambda key, x, p: self.fun(key, x, self.block_size, p), key, x, one)
    for leaf in jax.tree.leaves(out):
      if leaf.shape[:1] != (self.block_size,):
        raise ValueError(f'fun returns a leaf of shape {leaf.shape}; with '
                         f'vectorized=True its first axis holds num='
                         f'{self.block_size} trials')
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), out)

  def _plain(self):
    return self._replace(num_devices=1)

  def _start(self, start):
    """Index of the first key: of a trial, or of a block."""
    if self.block_size is None:
      return samplers.split_index(start)
    if start % self.block_size:
      raise ValueError(f'start={start} must be a multiple of block_size='
                       f'{self.block_size}')
    return samplers.split_index(start // self.block_size)

  def _chunk(self, x, parameters):
    if self.block_size is not None:
      return self.block_size
    if self.on_host:
      return 256
    leaves = jax.tree.leaves(self.output(x, parameters))
    size = sum(leaf.size for leaf in leaves)
    copies = 1 if parameters is None else len(jax.tree.leaves(parameters)[0])
    copies *= 2 if self.paired else 1
    return int(np.clip(_CHUNK_ELEMENTS // max(1, size * copies), 64, 2**14))

  def _host_project(self, runner, size, chunks, key, purpose, x, parameters,
                   context, start):
    """As `_project`, one call after the other in Python."""
    keys = samplers.element_keys(key, purpose, start, size * chunks)
    ys = [jax.tree.map(np.asarray, runner.fun(k, x, None)) for k in keys]
    shapes = {jax.tree.structure(y) for y in ys} | {
        tuple((a.shape, a.dtype) for a in jax.tree.leaves(y)) for y in ys}
    if len(shapes) != 2:
      raise ValueError('fun returns outputs of different structures, shapes or '
                       'dtypes; every trial must return the same')
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *ys)
    return _score_batch(runner.score, stacked, context)[None]

  def _host_count(self, key, purpose, x, parameters, context, thresholds, start,
                  num):
    total = np.zeros(thresholds.shape, np.int64)
    for first in range(0, num, 4096):
      here = min(4096, num - first)
      scores = self.scores(key, purpose, x, parameters, context, start + first,
                           here)
      total += (scores[:, :, None] >= thresholds[:, None]).sum(axis=1)
    return total


@functools.partial(jax.jit, static_argnums=0)
def _score_batch(score, outputs, context):
  return jax.vmap(lambda y: score(y, context))(outputs)


@dataclasses.dataclass(frozen=True)  # a tuple would equal other wrappers
class Real:
  """A score held to one float32; hashable as the score is."""
  score: Callable[..., Any]

  def __call__(self, y, context):
    value = jnp.asarray(self.score(y, context))
    if value.shape != ():
      raise ValueError(f'score returns shape {value.shape}; it must return one '
                       'number a trial')
    return value.astype(jnp.float32)


def _chunk_scores(runner, size, key, purpose, x, parameters, context, start):
  """Scores [P, size, ...] of the chunk that starts at a split index."""
  if runner.block_size is None:
    keys = samplers.element_keys(key, purpose, start, size)
    outputs = lambda x, p: jax.vmap(lambda k: runner.fun(k, x, p))(keys)
  else:
    block = samplers.element_keys(key, purpose, start, 1)[0]
    outputs = lambda x, p: runner.fun(block, x, size, p)

  def one(x, p):
    return jax.vmap(lambda y: runner.score(y, context))(outputs(x, p))

  def one_input(x):
    if parameters is None:
      return one(x, None)[None]
    # The keys carry no parameter axis: the noise is drawn once for all.
    return jax.vmap(one, in_axes=(None, 0))(x, parameters)

  if not runner.paired:
    return one_input(x)
  scores = jax.vmap(one_input)(x)
  return scores.reshape(-1, *scores.shape[2:])


def _advance(start, steps):
  """A split index plus a uint32."""
  low = start[1] + steps
  return jnp.stack([start[0] + (low < start[1]).astype(jnp.uint32), low])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _project(runner, size, chunks, key, purpose, x, parameters, context, start):
  step = 1 if runner.block_size is not None else size

  def chunk(i):
    return _chunk_scores(runner, size, key, purpose, x, parameters, context,
                         _advance(start, i * jnp.uint32(step)))

  out = jax.lax.map(chunk, jnp.arange(chunks, dtype=jnp.uint32))
  return jnp.moveaxis(out, 0, 1).reshape(
      out.shape[1], -1, *out.shape[3:])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _count(runner, size, key, purpose, x, parameters, context, thresholds,
           start, num):
  """Counts over chunks dealt out to the devices in turn."""
  step = jnp.uint32(1 if runner.block_size is not None else size)
  devices = runner.num_devices

  def deal(key, x, parameters, context, thresholds, start, num):
    chunks = -(-num // size)
    first = jax.lax.axis_index(_AXIS) if devices > 1 else 0

    def chunk(turn, total):
      i = turn * devices + first
      scores = _chunk_scores(
          runner._replace(score=Real(runner.score)), size, key, purpose, x,
          parameters, context, _advance(start, i.astype(jnp.uint32) * step))
      inside = jnp.arange(size, dtype=jnp.int32) < num - i * size
      return total + _reaching(scores, inside, thresholds)

    total = jnp.zeros(thresholds.shape, jnp.int32)
    total = jax.lax.fori_loop(0, -(-chunks // devices), chunk, total)
    return jax.lax.psum(total, _AXIS) if devices > 1 else total

  args = (key, x, parameters, context, thresholds, start,
          jnp.asarray(num, jnp.int32))
  if devices == 1:
    return deal(*args)
  mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:devices]), (_AXIS,))
  return jax.shard_map(deal, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
                       check_vma=False)(*args)


def _reaching(scores, inside, thresholds):
  """How many scores of each parameter reach each threshold, [P, m]."""
  if thresholds.shape[1] <= 16:
    reached = scores[:, None] >= thresholds[:, :, None]
    return jnp.sum(reached & inside[None, None], axis=2, dtype=jnp.int32)

  def one_parameter(scores, thresholds):
    # Bin j holds the scores that reach exactly the j lowest thresholds.
    order = jnp.argsort(thresholds)
    place = jnp.searchsorted(thresholds[order], scores, side='right')
    place = jnp.where(inside & ~jnp.isnan(scores), place, 0)
    bins = jnp.zeros(thresholds.shape[0] + 1, jnp.int32).at[place].add(1)
    reached = jnp.cumsum(bins[::-1], dtype=jnp.int32)[::-1][1:]
    return jnp.zeros_like(reached).at[order].set(reached)

  return jax.vmap(one_parameter)(scores, thresholds)


_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError)


def program(fun, *args):
  """What a function does to such arguments: its jaxpr and constants."""
  # A new lambda: JAX must not answer from an earlier trace of an equal one.
  jaxpr = jax.make_jaxpr(lambda *args: fun(*args))(*args)
  digest = hashlib.sha256()
  for const in jaxpr.consts:
    if jnp.issubdtype(getattr(const, 'dtype', np.int32), jax.dtypes.prng_key):
      const = jax.random.key_data(const)
    digest.update(np.asarray(const).tobytes())
  return f'{jaxpr.jaxpr} {digest.hexdigest()}'


def runner(fun, score, x, x_prime, *, parameters, vectorized, num_devices,
           num_trials):
  """Checks an audited function and returns its Runner.

  Raises:
    ValueError: outputs of different structure, shape or dtype on the two
      inputs; complex or non-numeric outputs; a function that raises.
  """
  run = Runner(fun, score, 8 if vectorized else None, num_devices)
  try:
    out, out_prime = run.output(x, parameters), run.output(x_prime, parameters)
  except _UNTRACEABLE as e:
    if parameters is not None or vectorized:
      raise ValueError('fun cannot be traced by JAX, which a sweep and '
                       'vectorized=True need; audit it one parameter and one '
                       'trial a call') from e
    run = _host_runner(run, x, x_prime)
    warnings.warn('fun cannot be traced by JAX: it is called once a trial from '
                  'Python, thousands of times slower, and scored in float32; '
                  'write it with jax.numpy', UserWarning, stacklevel=5)
    return run
  except Exception as e:
    if isinstance(e, ValueError) and not settings.where_raised(e):
      raise  # our own, which names what is wrong
    raise settings.raised(e, 'a key and x') from e
  _check_outputs(out, out_prime)
  if vectorized:
    size = max(1, sum(leaf.size for leaf in jax.tree.leaves(out)))
    # Not a large part of the trials: whole blocks choose and test events.
    block = min(2**16 // size, num_trials // 20)
    run = run._replace(block_size=2**max(0, block.bit_length() - 1))
  return run._replace(program=_program_of(run, x, parameters))


def _program_of(run, x, parameters):
  one = jax.tree.map(lambda p: p[0], parameters)
  key = jax.random.key(0)
  if run.block_size is None:
    return program(lambda key, x, p: run.fun(key, x, p), key, x, one)
  return program(lambda key, x, p: run.fun(key, x, run.block_size, p), key, x,
                 one)


def _host_runner(run, x, x_prime):
  """The runner of a function that is called from Python, tried once."""
  run = run._replace(on_host=True, num_devices=1)
  try:
    out, out_prime = run.output(x, None), run.output(x_prime, None)
  except Exception as e:
    raise settings.raised(e, 'a key and x') from e
  _check_outputs(out, out_prime)
  return run


def _check_outputs(out, out_prime):
  if jax.tree.structure(out) != jax.tree.structure(out_prime):
    raise ValueError(
        f'fun returns {jax.tree.structure(out)} on x and '
        f'{jax.tree.structure(out_prime)} on x_prime; an output that tells by '
        'its structure needs no audit')
  if not jax.tree.leaves(out):
    raise ValueError('fun returns no array; return what is released')
  for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(out_prime)):
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      raise ValueError(
          f'fun returns {a.dtype}{list(a.shape)} on x and '
          f'{b.dtype}{list(b.shape)} on x_prime; shapes and dtypes that depend '
          'on the input leak it; make them the same')
    if not (jnp.issubdtype(a.dtype, jnp.floating)
            or jnp.issubdtype(a.dtype, jnp.integer)
            or a.dtype == jnp.bool_):
      raise ValueError(f'fun returns dtype {a.dtype}; real numbers, integers '
                       'and booleans can be audited')
