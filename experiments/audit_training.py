"""Training modes under audit: what is released of two neighbouring data sets.

A mode's release (``jaxdp.training.releases.release``) is run many times on two
data sets of two tiny images. In 'paper' mode they are neighbours of the
paper's own kind, L1 distance 1, and the score is the difference of the two
released records; in 'sound' mode one record is replaced by its opposite, label
included, and the score is the exact log-ratio of the two laws. Rows join those
of `experiments.audit_library`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import auditing
from jaxdp import guarantees
from jaxdp.training import releases

MODES = ('stobatch_paper', 'stobatch_sound')
TABLE = 'two 4x4 images'
_SIDE, _CLASSES = 4, 3
_IDS = np.arange(2, dtype=np.int32)
_LABEL_EPSILON = 1.


def calibration(mode, epsilon):
  """Returns the scales of a mode on 4x4 images.

  Args:
    mode: one of ``MODES``.
    epsilon: budget of the images: what the paper's Theorem 2 claims at L1
      distance 1, or what standard DP gives for a whole record.
  """
  paper = mode == 'stobatch_paper'
  pixels = _SIDE * _SIDE
  return releases.Calibration(
      mode='paper' if paper else 'sound', image_shape=(_SIDE, _SIDE, 1),
      hidden_shape=(1,), num_classes=_CLASSES, num_last=1,
      input_scale=1. / epsilon if paper else 2. * pixels / epsilon,
      hidden_scale=0., label_scale=0., label_epsilon=_LABEL_EPSILON,
      input_epsilon=epsilon)


def promise(mode, scales):
  """Returns the Guarantee that a mode's images and labels come with."""
  if mode == 'stobatch_paper':
    return guarantees.Guarantee(
        epsilon=1. / scales.input_scale, metric=guarantees.ADJACENCY,
        relation='two data sets, one image of which moves by 1 in L1',
        status='claimed', source='Phan et al. (2020), Theorem 2 and Lemma 3',
        conditions=(guarantees.REAL_ARITHMETIC, guarantees.IDEAL_RANDOM_BITS))
  rows = guarantees.standard(
      noise_sharing='none', dimension=_SIDE * _SIDE, scale=scales.input_scale,
      delta=0., labels='randomized_response',
      label_epsilon=releases.label_guarantee(scales).epsilon)
  total = rows[-1]
  return guarantees.Guarantee(
      epsilon=total['epsilon'], metric=guarantees.ADJACENCY,
      relation=total['relation'], status=total['status'],
      source=total['source'], conditions=tuple(total['conditions']))


def audit(mode, epsilon, *, key, num_trials, significance):
  """Audits one mode; returns (Guarantee, auditing.AuditResult)."""
  scales = calibration(mode, epsilon)

  def fun(key, records):
    images, labels = records
    released = releases.release(key, scales, images, labels, _IDS)
    return released.images, released.targets

  first, second = _neighbours(mode)
  result = auditing.audit(
      fun, first, second, key=key, num_trials=num_trials,
      significance=significance, score=_score(mode, scales, first, second))
  return promise(mode, scales), result


def _neighbours(mode):
  """Two data sets of two records each."""
  images = np.zeros((2, _SIDE, _SIDE, 1), np.float32)
  labels = np.zeros(2, np.int32)
  other = images.copy()
  if mode == 'stobatch_paper':
    other[0, 0, 0, 0] = 1.
    return (images, labels), (other, labels)
  images[0], other[0] = -1., 1.
  return (images, labels), (other, np.array([1, 0], np.int32))


def _score(mode, scales, first, second):
  """The score that tells the two data sets apart best."""
  if mode == 'stobatch_paper':
    return lambda out: out[0][0, 0, 0, 0] - out[0][1, 0, 0, 0]
  (images, labels), (other, other_labels) = first, second
  odds = math.exp(scales.label_epsilon)
  log_ratio = math.log(odds)

  def score(out):
    noisy, targets = out
    shift = jnp.abs(noisy[0] - other[0]) - jnp.abs(noisy[0] - images[0])
    answer = jnp.argmax(targets[0])
    label = (answer == labels[0]) * 1. - (answer == other_labels[0]) * 1.
    return jnp.sum(shift) / scales.input_scale + label * log_ratio

  return score


def row(mode, epsilon, *, seed, num_trials, significance):
  """Returns what `audit_library` needs of one mode.

  Returns:
    (Guarantee, measured epsilon, ceiling, trials, witness).
  """
  promised, result = audit(
      mode, epsilon, key=jax.random.key(seed), num_trials=num_trials,
      significance=significance)
  return (promised, result.epsilon_lower, result.ceiling, result.num_trials,
          [TABLE, mode, result.event])
