r"""CusText: the exponential mechanism inside groups of similar words.

The table, most frequent words first, is cut into groups: the first word that
has no group takes its K - 1 nearest words that have none. Inside a group

.. math::
  P(y \mid x) \propto e^{\epsilon u(x, y) / 2}, \quad
  u(x, y) = 1 - \frac{d(x, y) - d_{min}}{d_{max} - d_{min}}, \quad y \in G(x),

with the least (0, of x itself) and the greatest distance from x in its group.

*proved*: u lies in [0, 1], so the numerator and the normaliser each change by
at most :math:`e^{\epsilon / 2}` between two words of one group. This is local
differential privacy inside a group and nothing beyond: the group of a word can
be read off its replacement. Hence the metric ``same group``: distance 1 inside
a group, infinite between two. Scaling d per word leaves no metric epsilon.

CusText+, the setting ``stop_words``, keeps the most frequent words as they are.

Chen et al.'s "aggressive" lists, each word's own K nearest, are not offered.
Lists of two words then differ, a replacement that only one of them can produce
tells which it was, and no finite epsilon holds.

References: Chen et al. (2023), the mechanisms CusText and CusText+;
McSherry & Talwar (2007), Theorem 6.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special as sp_special

from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import comparable

METRIC = 'same group'

_LEADERS = 256  # words whose distances are computed at once
_BLOCK = 4096  # words whose laws are computed at once


class Params(NamedTuple):
  """What the calibrated mechanism needs; C groups of at most K words."""
  vectors: Any  # [V, D] float32, for the law only
  classes: Any  # [V] int32, the group of each word
  members: Any  # [C, K] int32, as they were taken; its last fills a short row
  thresholds: Any  # [V, K - 1, 2] uint32, law over the members of its group
  rate: Any  # [] float32, epsilon / 2, rounded down
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, group_size=20, stop_words=0):
  """Calibrates CusText, or CusText+ where ``stop_words`` is positive.

  About V^2 D / K multiply-adds. The last group takes what is left; where that
  would be a single word, which could only stay as it is, the word joins the
  group before it.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors, the most
      frequent words first; the order is public.
    epsilon: budget > 0 between two words of one group.
    group_size: K >= 2, words of a group.
    stop_words: how many of the table's first words are kept as they are and
      promised nothing; 0 keeps none. At most V - 2.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table, epsilon or setting.
  """
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  group_size = _check_int('group_size', group_size, 2, len(vectors))
  stop_words = _check_int('stop_words', stop_words, 0, len(vectors) - 2)
  wide = np.asarray(vectors, np.float64)
  groups = [np.array([word]) for word in range(stop_words)]
  groups += partition(wide, stop_words, group_size)
  width = max(map(len, groups))
  classes = np.empty(len(wide), np.int32)
  members = np.empty((len(groups), width), np.int32)
  for i, group in enumerate(groups):
    classes[group] = i
    members[i] = group[np.minimum(np.arange(width), len(group) - 1)]
  params = Params(vectors, classes, members, None,
                  calibration.float32_at_most(epsilon / 2),
                  _guarantee(epsilon, groups, stop_words))
  blocks = [samplers.thresholds(np.exp(_log_law(
      np.arange(i, min(i + _BLOCK, len(wide))), params)))
            for i in range(0, len(wide), _BLOCK)]
  return params._replace(thresholds=np.concatenate(blocks))


def _check_int(name, value, low, high):
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or (
      value < low) or (name == 'stop_words' and value > high):
    raise ValueError(f'{name}={value!r} must be an int of at least {low}' + (
        f' and at most V - 2 = {high}: two words must be left to compare'
        if name == 'stop_words' else ''))
  return min(int(value), high)


def _guarantee(epsilon, groups, stop_words):
  sizes = sorted(len(group) for group in groups[stop_words:])
  kept = (f'; the {stop_words} most frequent words of the table are kept as '
          'they are and promised nothing' if stop_words else '')
  return guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric=METRIC,
      unit='between two words of one group',
      relation='texts of equal length; distance is the number of positions at '
      'which the words differ, each pair from one group; words of two groups '
      'are incomparable (infinite distance): the group of each word, '
      f'{sizes[0]} to {sizes[-1]} words of the table, is released{kept}',
      status='proved', source='exponential mechanism, McSherry & Talwar '
      '(2007), Theorem 6, inside the groups of Chen et al. (2023)',
      conditions=calibration.REAL_CONDITIONS)


def partition(vectors, start, size):
  """Cuts the words from ``start`` on into groups, as the docstring above says.

  Privacy rests on this being *a* partition, not on which one: a near-tie that
  float64 decides either way is harmless.

  Args:
    vectors: float64 ``[V, D]``.
    start: first word, at most V - 2.
    size: K.

  Returns:
    List of int arrays, each from its first word outwards, ties by index.
  """
  groups, free = [], np.arange(start, len(vectors))
  while free.size:
    rows = vectors[free]
    half = np.einsum('vd,vd->v', rows, rows) / 2
    num_leaders = max(1, min(_LEADERS, 2**24 // free.size))
    scores = half - rows[:num_leaders] @ rows.T
    # Twice the rounding of a score, whose parts are at most 2 max(half).
    slack = (rows.shape[1] + 8) * 2.**-50 * half.max()
    left, num_left = np.ones(free.size, bool), free.size
    for leader in range(len(scores)):
      if not left[leader]:
        continue
      take = num_left if num_left <= size + 1 else size
      near = _nearest(rows, leader, scores[leader], left, take, slack)
      groups.append(free[near])
      left[near] = False
      num_left -= take
    free = free[left]
  return groups


def _nearest(rows, leader, scores, left, num, slack):
  """Positions of the num rows left that are nearest to the leader, in order."""
  scores = np.where(left, scores, np.inf)
  limit = np.partition(scores, num - 1)[num - 1] + slack
  close = np.flatnonzero(scores <= limit)
  gap = rows[close] - rows[leader]
  sq_distance = np.einsum('vd,vd->v', gap, gap)
  return close[np.lexsort((close, sq_distance))[:num]]


def privatize(key, ids, params, start=0):
  """Replaces each word by a word of its group.

  Guarantee: ``params.guarantee``, per text; not covered: float rounding (a
  word of probability under about 2**-53 is never drawn) and the generator.

  Args:
    key: typed key; consumed.
    ids: int32 word ids, any shape.
    params: Params of :func:`calibrate`.
    start: index of the first element; see ``samplers.split_index``.

  Returns:
    int32 ids of the same shape.

  Raises:
    ValueError: concrete ids that the table does not hold.
  """
  calibration.check_ids(ids, params.classes.shape[0])
  ids = jnp.asarray(ids, jnp.int32)
  if not ids.size:
    return ids
  return _privatize(key, ids, params.classes, params.members,
                    params.thresholds, samplers.split_index(start))


@jax.jit
def _privatize(key, ids, classes, members, thresholds, start):
  flat = ids.reshape(-1)
  keys = samplers.element_keys(key, samplers.OUTCOME, start, ids.size)
  place = samplers.map_elements(lambda k, word: samplers.categorical(
      k, thresholds=jnp.asarray(thresholds)[word]), keys, flat)
  out = jnp.asarray(members)[jnp.asarray(classes)[flat], place]
  return out.reshape(ids.shape)


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V]."""
  num_words = params.classes.shape[0]
  ids = calibration.flat_ids(ids, num_words)
  law = _log_law(ids, params)
  rows, places = np.nonzero(np.isfinite(law))
  out = np.full((len(ids), num_words), -np.inf)
  out[rows, np.asarray(params.members)[
      np.asarray(params.classes)[ids[rows]], places]] = law[rows, places]
  return out


def _log_law(ids, params):
  """Log-probabilities of the members of each word's group, float64 [B, K]."""
  classes, vectors = np.asarray(params.classes), np.asarray(params.vectors)
  own = classes[ids]
  sizes = np.bincount(classes)[own]
  members = np.asarray(params.members)[own]
  gap = (vectors[ids].astype(np.float64)[:, None]
         - vectors[members].astype(np.float64))
  distance = np.sqrt(np.sum(gap * gap, axis=-1))
  farthest = distance.max(axis=1, keepdims=True)
  score = 1 - distance / np.where(farthest > 0, farthest, 1.)
  fills = np.arange(members.shape[1]) >= sizes[:, None]
  logits = np.where(fills, -np.inf, float(params.rate) * score)
  return logits - sp_special.logsumexp(logits, axis=1, keepdims=True)


def distances(ids, params):
  """Returns the guarantee's metric, host float64 [B, V]: 0, 1 or infinite."""
  ids = calibration.flat_ids(ids, params.classes.shape[0])
  differ = ids[:, None] != np.arange(params.classes.shape[0])[None]
  return comparable.extended(differ.astype(np.float64), ids, params.classes)
