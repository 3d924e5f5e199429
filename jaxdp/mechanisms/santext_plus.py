r"""SanText+: SanText for the sensitive words, and for them alone.

Calibrated by ``santext`` with ``sensitive``. With S the sensitive words,

.. math::
  P(y \mid w) \propto e^{-\epsilon d(w, y) / 2}, \quad y \in S, w \in S,

and a word outside S is kept as it is with a fixed probability and otherwise
drawn by the same rule, from S.

*proved* between two words of S, by the argument of SanText. A word outside S
is promised nothing: when it is kept, the reader knows it for certain, since no
other word ever becomes it. So it is incomparable (infinite distance) with every
other word. Which words are sensitive is public: a list made from the private
text, as a frequency count over it would be, is not covered.

References: Yue et al. (2021), the mechanism SanText+.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special as sp_special

from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import comparable
from jaxdp.mechanisms import exponential


class Params(NamedTuple):
  """What calibrated SanText+ needs; S of the V words are sensitive."""
  vectors: Any  # [V, D] float32
  rate: Any  # [] float32, epsilon / 2 in 1/distance, rounded down
  output_ids: Any  # [S] int32, the sensitive words, ascending
  keep_thresholds: Any  # [1, 2] uint32, of the law (keep, draw)
  classes: Any  # [V] int32, 0 for sensitive words, else a number of its own
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, sensitive, keep_probability):
  """Calibrates SanText+; see ``santext.calibrate``."""
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  mask = _check_sensitive(sensitive, len(vectors))
  keep = _check_probability(keep_probability)
  num_kept = int(np.sum(~mask))
  classes = np.zeros(len(vectors), np.int32)
  classes[~mask] = 1 + np.arange(num_kept)
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='l2', unit='per unit distance',
      relation=f'{calibration.RELATION}; {num_kept} words of the table are '
      f'not sensitive and are promised nothing: each is kept with probability '
      f'{keep:g} and incomparable (infinite distance) with every other word',
      status='proved', source='Yue et al. (2021), Theorem 1, for the '
      'sensitive words', conditions=calibration.REAL_CONDITIONS)
  return Params(vectors, calibration.float32_at_most(epsilon / 2),
                np.flatnonzero(mask).astype(np.int32),
                samplers.thresholds([keep, 1 - keep]), classes, guarantee)


def _check_sensitive(sensitive, num_words):
  """Returns the bool [V] mask that a fraction or a mask stands for."""
  if isinstance(sensitive, (int, float)) and not isinstance(sensitive, bool):
    if not 0 < sensitive < 1:
      raise ValueError(f'sensitive={sensitive!r} must lie in (0, 1); leave it '
                       'None for plain SanText, where every word is sensitive')
    # 0.1 of 30 words is 3, not 4.
    num = math.ceil(sensitive * num_words - 1e-9)
    mask = np.arange(num_words) >= num_words - num
  else:
    mask = np.asarray(sensitive)
    if mask.dtype != bool or mask.shape != (num_words,):
      raise ValueError(f'sensitive={sensitive!r} must be None, a fraction in '
                       f'(0, 1) or a bool array of shape ({num_words},)')
  if mask.sum() < 2:
    raise ValueError(f'sensitive covers {mask.sum()} of {num_words} words; '
                     'nothing is promised to fewer than 2, so cover more')
  return mask


def _check_probability(value):
  if isinstance(value, bool) or not isinstance(
      value, (int, float, np.floating)) or not 0 <= value <= 1:
    raise ValueError(f'keep_probability={value!r} must lie in [0, 1]; it is '
                     'the chance that a word that is not sensitive stays')
  return float(value)


def privatize(key, ids, params, start=0):
  """As ``santext.privatize``."""
  return calibration.run(_privatize, key, ids, params, params.vectors.shape[0],
                         start)


@jax.jit
def _privatize(key, ids, params, start):
  flat = ids.reshape(-1)
  thresholds = jnp.asarray(params.keep_thresholds)
  coins = samplers.map_elements(
      lambda k: samplers.categorical(k, thresholds=thresholds),
      samplers.element_keys(key, samplers.KEEP, start, ids.size))
  kept = (jnp.asarray(params.classes)[flat] > 0) & (coins == 0)
  keys = samplers.element_keys(key, samplers.OUTCOME, start, ids.size)
  words = jax.vmap(lambda k: jax.random.bits(k, (2,)))(keys)
  drawn = exponential.draw(words, flat, jnp.asarray(params.vectors),
                           rate=jnp.asarray(params.rate),
                           cap=jnp.float32(jnp.inf), active=~kept,
                           columns=jnp.asarray(params.output_ids))
  return jnp.where(kept, flat, drawn).reshape(ids.shape)


def log_prob(ids, params):
  """As ``santext.log_prob``."""
  ids = calibration.flat_ids(ids, params.vectors.shape[0])
  classes = np.asarray(params.classes)
  logits = -float(params.rate) * calibration.l2_distances(ids, params.vectors)
  logits[:, classes > 0] = -np.inf
  out = logits - sp_special.logsumexp(logits, axis=1, keepdims=True)
  # As it runs: the law of the integer threshold.
  high, low = (float(x) for x in np.asarray(params.keep_thresholds)[0])
  keep = (high + low * 2.**-32) * 2.**-32
  rows = np.flatnonzero(classes[ids] > 0)
  with np.errstate(divide='ignore'):
    out[rows] += np.log1p(-keep)
    out[rows, ids[rows]] = np.log(keep)
  return out


def distances(ids, params):
  """As ``santext.distances``: infinite from or to a word that may be kept."""
  ids = calibration.flat_ids(ids, params.vectors.shape[0])
  return comparable.extended(calibration.l2_distances(ids, params.vectors),
                             ids, params.classes)
