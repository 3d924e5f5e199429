"""The candidate lists of Xu et al.: neighbour table and how many of it.

A word's candidates depend on the word alone, so they are computed once, in
``calibrate``. The number of candidates K is truncated Poisson with rate ln V on
1..V. The table holds the nearest ``k_max`` words; K between k_max and V is
moved to V, "the whole vocabulary", which keeps every privacy argument (they
use a lower bound on Pr(K = V)). That happens with probability under 1e-9 for
the default number of columns, and more often for a smaller ``max_candidates``.
"""

import hashlib
import math
import os
import pathlib
import tempfile
from typing import NamedTuple
import zipfile

import numpy as np
from scipy import special as sp_special

from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import calibration

_REROUTED = 1e-9  # at most this much of K's law is moved to V


def max_candidates(num_words):
  """Smallest multiple of 8 whose Poisson(ln V) tail is under 1e-9, or V."""
  rate = math.log(num_words)
  k_max = 8
  while sp_special.pdtrc(k_max, rate) > _REROUTED:
    k_max += 8
  return min(k_max, num_words)


def common_candidates(num_words, k_max):
  """Columns that most words need: K exceeds them for under one in ten.

  The others are drawn again from more columns, so this is only speed.
  """
  rate = math.log(num_words)
  common = 4
  while sp_special.pdtrc(common, rate) > .1:
    common += 1
  return min(common, k_max)


def check_max_candidates(value, num_words):
  """Returns the number of table columns, or raises ValueError."""
  if value is None:
    return max_candidates(num_words)
  if isinstance(value, bool) or not isinstance(
      value, (int, np.integer)) or value < 1:
    raise ValueError(f'max_candidates={value!r} must be a positive int or None')
  return min(int(value), num_words)


def count_probabilities(num_words, k_max):
  """Law of K as it runs: Pr(K = 1), ..., Pr(K = k_max), Pr(K = V by table).

  Returns:
    float64 ``[k_max + 1]``; the last entry is "the whole vocabulary", and 0
    where the table already holds all V words.
  """
  pmf = samplers.truncated_poisson_probabilities(
      rate=math.log(num_words), low=1, high=num_words, max_value=k_max)
  if k_max >= num_words:
    return np.append(pmf, 0.)
  return np.append(pmf[:k_max], pmf[-1])


class Geometry(NamedTuple):
  """What calibration needs to know of a table; the same for every epsilon."""
  minimum: float  # smallest distance between two words
  diameter: float  # largest
  neighbor_ids: np.ndarray  # [V, k] int32, itself first
  neighbor_distances: np.ndarray  # [V, k] float64 from differences, ascending
  digest: str  # SHA-256 of the vectors it was measured on


def geometry(table, *, max_candidates=None, cache_dir=None):
  """Measures a table once, to calibrate many mechanisms or budgets from it.

  This is the slow half of ``calibrate``: seconds for 28,000 words. Pass the
  result as ``geometry=`` to the ``calibrate`` of ``truncated_gumbel`` or
  ``gumbel_exponential`` with the same table.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    max_candidates: columns of the neighbour table; None for the smallest
      whose rerouted mass is under 1e-9.
    cache_dir: folder where the result is kept and looked for, by the digest of
      the vectors; None touches no file. Guarantees rest on what it holds: name
      one that only you can write to.

  Raises:
    ValueError: a bad table, max_candidates or cache_dir, or a damaged file.
  """
  vectors = calibration.check_table(table)
  k_max = check_max_candidates(max_candidates, len(vectors))
  digest = _digest(vectors)
  path = None if cache_dir is None else _cache_path(cache_dir, digest, k_max)
  if path is not None and path.exists():
    return _load(path, digest, (len(vectors), k_max))
  minimum, diameter = neighbors.distance_range(vectors)
  made = Geometry(minimum, diameter, *_neighbor_table(vectors, k_max), digest)
  if path is not None:
    _save(path, made)
  return made


def _cache_path(cache_dir, digest, k_max):
  folder = pathlib.Path(cache_dir)
  if not folder.is_dir():
    raise ValueError(f'cache_dir={str(cache_dir)!r} is not a folder; make it '
                     'first')
  return folder / f'geometry-{digest[:32]}-{k_max}.npz'


def _content(range_, ids, distances):
  """SHA-256 of what a cached file holds."""
  content = hashlib.sha256()
  for array in (range_, ids, distances):
    content.update(np.ascontiguousarray(array).tobytes())
  return content.hexdigest()


def _save(path, made):
  """Writes a `Geometry`, whole or not at all."""
  arrays = (np.array([made.minimum, made.diameter]), made.neighbor_ids,
            made.neighbor_distances)
  with tempfile.NamedTemporaryFile(
      dir=path.parent, suffix='.partial', delete=False) as file:
    try:
      np.savez(file, range=arrays[0], ids=arrays[1], distances=arrays[2],
               digest=made.digest, content=_content(*arrays))
      file.close()
      os.replace(file.name, path)
    except BaseException:
      os.unlink(file.name)
      raise


def _load(path, digest, shape):
  """Reads a `Geometry` of that table back; a damaged one is refused."""
  try:
    with np.load(path, allow_pickle=False) as held:
      arrays = held['range'], held['ids'], held['distances']
      whole = (str(held['digest']) == digest
               and str(held['content']) == _content(*arrays)
               and arrays[1].shape == arrays[2].shape == shape)
  except (OSError, EOFError, ValueError, KeyError,
          zipfile.BadZipFile) as error:
    raise ValueError(f'{path} is no neighbour table ({error}); remove it and '
                     'it is made again') from error
  if not whole:
    raise ValueError(f'{path} is damaged or of another table; remove it and it '
                     'is made again')
  (minimum, diameter), ids, distances = arrays
  return Geometry(float(minimum), float(diameter), ids, distances, digest)


def _digest(vectors):
  vectors = np.ascontiguousarray(vectors, '<f4')
  return hashlib.sha256(f'{vectors.shape}'.encode() + vectors.tobytes()
                        ).hexdigest()


def check_geometry(given, table, max_candidates):
  """Returns the given geometry if it fits the table, else measures one."""
  if given is None:
    return geometry(table, max_candidates=max_candidates)
  if max_candidates is not None:
    raise ValueError(f'max_candidates={max_candidates!r} belongs to '
                     'candidates.geometry when geometry is given')
  if not isinstance(given, Geometry):
    raise ValueError(f'geometry={given!r} must be what '
                     'candidates.geometry(table) returned, or None')
  rows = given.neighbor_ids.shape[0]
  if rows != len(table.words):
    raise ValueError(f'geometry is of {rows} words and the table has '
                     f'{len(table.words)}; measure it with '
                     'candidates.geometry(table)')
  if given.digest != _digest(table.vectors):
    raise ValueError('geometry was measured on other vectors than those of '
                     'this table, so what it promises would be false; measure '
                     'it with candidates.geometry(table)')
  return given


def _neighbor_table(vectors, k_max):
  """The k_max nearest words of each word, itself first.

  Returns:
    ids int32 ``[V, k_max]``; distances float64 ``[V, k_max]`` from
    differences, ascending, ties in the order of the ids.
  """
  ids, _ = neighbors.k_nearest(vectors, vectors, k_max)
  ids = np.asarray(ids)
  exact = np.empty(ids.shape)
  wide = np.asarray(vectors, np.float64)
  block = max(1, 2**23 // (k_max * wide.shape[1]))
  for i in range(0, len(wide), block):
    gap = wide[i:i + block, None] - wide[ids[i:i + block]]
    exact[i:i + block] = np.sqrt(np.sum(gap * gap, axis=-1))
  return ids, exact
