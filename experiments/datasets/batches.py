"""Which examples form a batch, which batches a step takes, and prefetching.

The batches of StoBatch are fixed once, disjoint, and chosen without a look at
the data; a step's trainers and batches depend on the key and the step alone. A
run that is restarted at step 900 goes on as it would have gone on, and no
result depends on how many devices share the work. Batches are made on the
host; :func:`schedule` is pure and jittable.

>>> import jax
>>> key = jax.random.key(0)
>>> ids = fixed_batches(key, 1440, 60)
>>> ids.shape
(24, 60)
>>> trainers, benign, source = schedule(key, len(ids), 8, 900)
>>> trainers.shape, len(set(benign.tolist() + source.tolist()))
((8,), 16)

References: Phan et al. (2020), Algorithms 1 and 4.
"""

import collections
import functools

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp import threefry

# Ids in the stream SHUFFLE; step t is _FIRST_STEP + t.
_EXAMPLES, _PAIRS, _FIRST_STEP = range(3)


def fixed_batches(key, num_examples, batch_size, *, remainder='refuse'):
  """Divides examples into disjoint batches of one size, at random, once. Host.

  Args:
    key: typed key; consumed.
    num_examples: size N of the set.
    batch_size: size m of each batch.
    remainder: where m does not divide N, 'refuse', or 'drop' the last N mod m
      of the permutation: they are never trained on, and the log says how many.

  Returns:
    Ids of examples, int32 [N // m, m].

  Raises:
    ValueError: sizes out of range, or a remainder that is refused.
  """
  if not 1 <= batch_size <= num_examples < 2**31:
    raise ValueError(f'batch_size={batch_size} must lie between 1 and '
                     f'num_examples={num_examples}')
  if remainder not in ('refuse', 'drop'):
    raise ValueError(f"remainder={remainder!r} must be 'refuse' or 'drop'")
  num_batches, num_dropped = divmod(num_examples, batch_size)
  if num_dropped and remainder == 'refuse':
    raise ValueError(f'num_examples={num_examples} leaves {num_dropped} over '
                     f"in batches of {batch_size}; pass remainder='drop' to "
                     'leave them out, or another batch_size')
  if num_dropped:
    logging.info('%d batches of %d; %d of %d examples dropped', num_batches,
                 batch_size, num_dropped, num_examples)
  order = np.asarray(_example_order(key, num_examples))
  return order[:num_batches * batch_size].reshape(num_batches, batch_size)


def schedule(key, num_batches, num_trainers, step, *, roles='auto'):
  """Which trainers are active at a step, and their two batches.

  With fixed roles (Algorithm 4) the batches are paired at random, once; each
  of the ``num_batches // 2`` local trainers holds one pair, the first batch
  benign for ever, the second for ever the source of adversarial examples; a
  step draws N of the trainers without replacement. An odd batch is not used.
  So a record plays one role: what the paper's parallel composition rests on.

  With rotating roles (Algorithm 1) one trainer takes batch ``step`` in turn,
  and the next batch is the source: every record plays both roles.

  Args:
    key: typed key; consumed. The one given to :func:`fixed_batches` will do.
    num_batches: number of fixed batches, static.
    num_trainers: number N of active trainers, static.
    step: integer in [0, 2**31), may be traced.
    roles: 'fixed', 'rotating', or 'auto': rotating for one trainer and fixed
      for more.

  Returns:
    int32 [N] each: ids of trainers, of their benign batches, and of the
    batches that their adversarial examples are made from.

  Raises:
    ValueError: more trainers than pairs of batches, rotating roles with
      several trainers, or a negative step.
  """
  if roles == 'auto':
    roles = 'rotating' if num_trainers == 1 else 'fixed'
  if roles not in ('fixed', 'rotating'):
    raise ValueError(f"roles={roles!r} must be 'auto', 'fixed' or 'rotating'")
  if num_trainers < 1 or num_trainers > num_batches // 2:
    raise ValueError(f'num_trainers={num_trainers} must lie between 1 and '
                     f'{num_batches // 2}: each holds two of the '
                     f'num_batches={num_batches} batches')
  if roles == 'rotating' and num_trainers != 1:
    raise ValueError(f"roles='rotating' is for one trainer, not num_trainers="
                     f'{num_trainers}')
  if isinstance(step, (int, np.integer)) and not 0 <= step < 2**31:
    raise ValueError(f'step={step} must lie in [0, 2**31)')
  if roles == 'rotating':
    step = jnp.asarray(step, jnp.int32)[None]
    return jnp.zeros_like(step), step % num_batches, (step + 1) % num_batches
  orders = _trainer_order(key, jnp.asarray(step, jnp.int32), num_batches)
  return tuple(order[:num_trainers] for order in orders)


@functools.partial(jax.jit, static_argnums=2)
def _trainer_order(key, step, num_batches):
  """All trainers in the order in which a step draws them, and their batches."""
  num_pairs = num_batches // 2
  ids = jnp.stack([jnp.int32(_PAIRS), _FIRST_STEP + step])
  keys = samplers.id_keys(key, samplers.SHUFFLE, ids)
  pairs = _permutation(keys[0], num_batches)[:2 * num_pairs]
  pairs = pairs.reshape(num_pairs, 2)
  trainers = _permutation(keys[1], num_pairs)
  return trainers, pairs[trainers, 0], pairs[trainers, 1]


@functools.partial(jax.jit, static_argnums=1)
def _example_order(key, num_examples):
  ids = jnp.array([_EXAMPLES], jnp.int32)
  keys = samplers.id_keys(key, samplers.SHUFFLE, ids)
  return _permutation(keys[0], num_examples)


def _permutation(key, num):
  # Sorting by 64 bits: two equal ones have probability below num**2 / 2**65.
  high, low = threefry.words(key, (num,))
  return jax.lax.sort((high, low, jnp.arange(num, dtype=jnp.int32)),
                      num_keys=2)[2]


def prefetch(items, size=2, *, sharding=None):
  """Puts items on the device ahead of their use.

  Transfers run beside the computation, as both are asynchronous: while a step
  is at work, the next ``size`` items are on their way. No thread, so nothing
  is left behind when the loop ends early.

  Args:
    items: iterable of pytrees of arrays.
    size: how many items are ahead, at least 1.
    sharding: device or sharding, or pytree of them, as ``jax.device_put``
      takes; None for the default device.

  Returns:
    Generator of the items, on the device, in order. An error of ``items``
    comes after the items before it. Closing it closes ``items``.

  Raises:
    ValueError: size below 1.
  """
  if size < 1:
    raise ValueError(f'size={size} must be at least 1: items that are ahead')
  return _prefetch(iter(items), size, sharding)


def _prefetch(items, size, sharding):
  ahead, failure = collections.deque(), None
  try:
    while True:
      while failure is None and len(ahead) < size:
        try:
          ahead.append(jax.device_put(next(items), sharding))
        except Exception as error:  # its turn comes after what is ahead of it
          failure = error
      if not ahead:
        break
      yield ahead.popleft()
  finally:
    if hasattr(items, 'close'):
      items.close()
  if not isinstance(failure, StopIteration):
    raise failure
