"""Sixty-four random bits for each entry of an array, at one hash an entry.

Device, pure, jittable. ``jax.random.bits`` hashes once for every 32 bits and,
on a CPU, keeps the state of the rounds in memory; here the twenty rounds of
Threefry are plain array code that fuses with what uses the words: several times
faster. Entry i of an array (flattened) is the hash of counter i under the key,
so a shorter draw is the beginning of a longer one. Keys of 64 bits go into
Threefry-2x32, keys of 128 bits into Threefry-4x32, of whose four words an entry
takes two.

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
_WIDE_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5),
                   (6, 20), (17, 11), (25, 10), (18, 20))
_PARITY = np.uint32(0x1BD11BDA)


def words(key, shape):
  """Returns two uint32 arrays of ``shape``: the halves of 64 random bits.

  Args:
    key: typed key; consumed. Of an implementation other than ``threefry2x32``
      and ``threefry4x32``, ``jax.random.bits`` makes the words.
    shape: tuple of ints, under 2^32 entries.
  """
  shape = tuple(shape)
  if not is_hashed(key):
    high, low = jax.random.bits(key, (2, *shape), jnp.uint32)
    return high, low
  return words_at(
      key, jnp.arange(check_size(shape), dtype=jnp.uint32).reshape(shape))


def check_size(shape):
  """Returns the entries of a shape; ValueError from 2^32 on: counters end."""
  size = math.prod(shape)
  if size >= 2**32:
    raise ValueError(f'shape={shape} has {size} entries; draw fewer than 2^32 '
                     'from one key')
  return size


def is_hashed(key):
  """Whether the words of a key are the hashes of counters."""
  return str(jax.random.key_impl(key)) in ('threefry2x32', 'threefry4x32')


def words_at(key, counter):
  """The entries of `words` at uint32 positions, for keys that `is_hashed`."""
  data, zero = jax.random.key_data(key), jnp.zeros_like(counter)
  if data.shape[-1] == 2:
    return threefry2x32(*data, zero, counter)
  return threefry4x32(data, (zero, zero, zero, counter))[:2]


def threefry2x32(key_0, key_1, x_0, x_1):
  """Hashes the counter words ``(x_0, x_1)`` under a key of two words.

  All uint32; the counter words have one shape, the key words broadcast.
  """
  keys = (key_0, key_1, key_0 ^ key_1 ^ _PARITY)
  x_0, x_1 = x_0 + keys[0], x_1 + keys[1]
  for i in range(5):
    for rotation in _ROTATIONS[i % 2]:
      x_0, x_1 = _mixed(x_0, x_1, rotation)
    x_0 = x_0 + keys[(i + 1) % 3]
    x_1 = x_1 + keys[(i + 2) % 3] + np.uint32(i + 1)
  return x_0, x_1


def threefry4x32(key, counter):
  """Hashes four counter words under a key of four words; four words.

  All uint32; the counter words have one shape, the key words broadcast.
  """
  parity = key[0] ^ key[1] ^ key[2] ^ key[3] ^ _PARITY
  keys = (*key, parity)
  x = [word + extra for word, extra in zip(counter, keys)]
  for i in range(20):
    # The second words of the two pairs change places every round.
    second = (1, 3) if i % 2 == 0 else (3, 1)
    for first, other, rotation in zip((0, 2), second, _WIDE_ROTATIONS[i % 8]):
      x[first], x[other] = _mixed(x[first], x[other], rotation)
    if i % 4 == 3:
      turn = (i + 1) // 4
      x = [word + keys[(turn + j) % 5] for j, word in enumerate(x)]
      x[3] = x[3] + np.uint32(turn)
  return tuple(x)


def _mixed(first, second, rotation):
  """One mix of two words: add, rotate, exclusive or."""
  first = first + second
  second = ((second << np.uint32(rotation))
            | (second >> np.uint32(32 - rotation)))
  return first, second ^ first
