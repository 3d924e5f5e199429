"""Which words a guarantee compares, where it does not compare all. Host.

A mechanism that gives away a class of each word (its group, its part of
speech, the word itself where it is kept) promises nothing between classes:
their words are incomparable, at infinite distance. Its params hold ``classes``,
int32 ``[V]``; a word alone in its class is promised nothing at all.

>>> import numpy as np
>>> classes = np.int32([0, 0, 1])
>>> extended(np.float64([[0., 2., 3.]]), [0], classes)
array([[ 0.,  2., inf]])
>>> alone(classes).tolist(), incomparable_pairs(classes)
([False, False, True], 2)
"""

import numpy as np


def check(classes, num_words):
  """Returns classes numbered 0, 1, ..., int32 [V], or raises ValueError."""
  given = np.asarray(classes)
  if given.shape != (num_words,) or given.dtype.kind not in 'iu':
    shown = classes if given.dtype == object else (
        f'an array of {given.dtype} and shape {given.shape}')
    raise ValueError(f'classes={shown} must be an integer array of shape '
                     f'({num_words},): a public class for each table word')
  _, numbered = np.unique(given, return_inverse=True)
  numbered = numbered.astype(np.int32)
  if alone(numbered).all():
    raise ValueError('classes: no two words share a class, so nothing would '
                     'be promised; use coarser classes')
  return numbered


def extended(distance, ids, classes):
  """Returns distances [B, V] with infinity where the classes differ."""
  classes = np.asarray(classes)
  own = classes[np.asarray(ids).reshape(-1)]
  return np.where(own[:, None] == classes[None], distance, np.inf)


def alone(classes):
  """Returns whether each word is the only one of its class, bool [V]."""
  classes = np.asarray(classes)
  return np.bincount(classes)[classes] == 1


def incomparable_pairs(classes):
  """Returns how many of the V (V - 1) / 2 pairs are at infinite distance."""
  sizes = [int(n) for n in np.bincount(np.asarray(classes))]
  total = sum(sizes)
  return (total * total - sum(n * n for n in sizes)) // 2
