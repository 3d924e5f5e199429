r"""SanText: the exponential mechanism over the whole table.

.. math::  P(y \mid w) \propto e^{-\epsilon d(w, y) / 2}

*proved*: the numerator and the normaliser each change by at most
:math:`e^{\epsilon d(w, w') / 2}` (triangle inequality). SanText+, the setting
``sensitive``, protects some of the words and is written down in
``santext_plus``.

References: Yue et al. (2021), Section 4.1, Theorem 1.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import exponential
from jaxdp.mechanisms import santext_plus

_KEEP_PROBABILITY = 0.8  # p = 0.2 in Yue et al.


class Params(NamedTuple):
  """What a calibrated exponential mechanism needs."""
  vectors: Any  # [V, D] float32
  rate: Any  # [] float32, epsilon / 2 in 1/distance, rounded down
  cap: Any  # [] float32, distances count up to it; infinite for SanText
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, sensitive=None,
              keep_probability=_KEEP_PROBABILITY):
  """Calibrates SanText, or SanText+ where ``sensitive`` is given.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget > 0 per unit Euclidean distance.
    sensitive: None protects every word. SanText+: a fraction in (0, 1), that
      share of the words (rounded up) from the END of the table, whose most
      frequent words come first; or a bool ``[V]`` array. Public either way.
    keep_probability: SanText+: chance in [0, 1] that a word that is not
      sensitive is kept as it is.

  Returns:
    Params, or ``santext_plus.Params``; the guarantee is *proved* for real
    arithmetic. That of SanText+ promises nothing to words not sensitive.

  Raises:
    ValueError: a bad table, epsilon or setting.
  """
  if sensitive is not None:
    return santext_plus.calibrate(table, epsilon=epsilon, sensitive=sensitive,
                                  keep_probability=keep_probability)
  if keep_probability != _KEEP_PROBABILITY:
    raise ValueError(f'keep_probability={keep_probability!r} has no meaning '
                     'without sensitive, which says who may be kept')
  return calibrate_capped(table, epsilon=epsilon, cap=math.inf,
                          source='Yue et al. (2021), Theorem 1')


def calibrate_capped(table, *, epsilon, cap, source):
  """Params of the law with distances capped; SanText's cap is infinite."""
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='l2', unit='per unit distance',
      relation=calibration.RELATION, status='proved', source=source,
      conditions=calibration.REAL_CONDITIONS)
  return Params(vectors, calibration.float32_at_most(epsilon / 2),
                np.float32(cap), guarantee)


def privatize(key, ids, params, start=0):
  """Replaces each word by a draw from its row of the law.

  Guarantee: ``params.guarantee``, per text; not covered: float rounding (a
  word of probability under about 2**-53 is never drawn) and the generator.

  Args:
    key: typed key; consumed.
    ids: int32 word ids, any shape.
    params: what :func:`calibrate` returned.
    start: index of the first element; see ``samplers.split_index``.

  Returns:
    int32 ids of the same shape.

  Raises:
    ValueError: concrete ids that the table does not hold.
  """
  if isinstance(params, santext_plus.Params):
    return santext_plus.privatize(key, ids, params, start)
  return calibration.run(_privatize, key, ids, params, params.vectors.shape[0],
                         start)


@jax.jit
def _privatize(key, ids, params, start):
  keys = samplers.element_keys(key, samplers.OUTCOME, start, ids.size)
  words = jax.vmap(lambda k: jax.random.bits(k, (2,)))(keys)
  out = exponential.draw(words, ids.reshape(-1), jnp.asarray(params.vectors),
                         rate=jnp.asarray(params.rate),
                         cap=jnp.asarray(params.cap))
  return out.reshape(ids.shape)


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V]."""
  calibration.check_ids(ids, params.vectors.shape[0])
  if isinstance(params, santext_plus.Params):
    return santext_plus.log_prob(ids, params)
  return exponential.log_prob(ids, params.vectors, rate=params.rate,
                              cap=params.cap)


def distances(ids, params):
  """Returns the guarantee's metric, host float64 [B, V].

  Euclidean; in SanText+ infinite between a word that is not sensitive and any
  other.
  """
  if isinstance(params, santext_plus.Params):
    return santext_plus.distances(ids, params)
  return calibration.l2_distances(ids, params.vectors)
