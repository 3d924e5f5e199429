"""Sixty-four random bits for each entry of an array, at one hash an entry.

Device, pure, jittable. ``jax.random.bits`` hashes once for every 32 bits and,
on a CPU, keeps the state of the rounds in memory; here the twenty rounds of
Threefry-2x32 are plain array code that fuses with what uses the words: several
times faster, the same function. Entry i of an array (flattened) is the hash of
counter i under the key, so a shorter draw is the beginning of a longer one.

>>> import jax
>>> high, low = words(jax.random.key(0), (3,))
>>> high.shape, bool((words(jax.random.key(0), (2,))[0] == high[:2]).all())
((3,), True)

Reference: Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3",
Section 3.3; the constants are those of their Random123 library.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def words(key, shape):
  """Returns two uint32 arrays of ``shape``: the halves of 64 random bits.

  Args:
    key: typed key; consumed. Of an implementation other than JAX's default
      ``threefry2x32``, ``jax.random.bits`` makes the words.
    shape: tuple of ints, under 2^32 entries.
  """
  shape = tuple(shape)
  if str(jax.random.key_impl(key)) != 'threefry2x32':
    high, low = jax.random.bits(key, (2, *shape), jnp.uint32)
    return high, low
  size = math.prod(shape)
  if size >= 2**32:
    raise ValueError(f'shape={shape} has {size} entries; draw fewer than 2^32 '
                     'from one key')
  counter = jnp.arange(size, dtype=jnp.uint32).reshape(shape)
  first, second = jax.random.key_data(key)
  return threefry2x32(first, second, jnp.zeros_like(counter), counter)


def threefry2x32(key_0, key_1, x_0, x_1):
  """Hashes the counter words ``(x_0, x_1)`` under a key of two words.

  All uint32; the counter words have one shape, the key words broadcast.
  """
  keys = (key_0, key_1, key_0 ^ key_1 ^ _PARITY)
  x_0, x_1 = x_0 + keys[0], x_1 + keys[1]
  for i in range(5):
    for rotation in _ROTATIONS[i % 2]:
      x_0 = x_0 + x_1
      x_1 = (x_1 << np.uint32(rotation)) | (x_1 >> np.uint32(32 - rotation))
      x_1 = x_1 ^ x_0
    x_0 = x_0 + keys[(i + 1) % 3]
    x_1 = x_1 + keys[(i + 2) % 3] + np.uint32(i + 1)
  return x_0, x_1
