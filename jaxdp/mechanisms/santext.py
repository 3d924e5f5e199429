r"""SanText: the exponential mechanism over the whole table.

.. math::  P(y \mid w) \propto e^{-\epsilon d(w, y) / 2}

*proved*: the numerator and the normaliser each change by at most
:math:`e^{\epsilon d(w, w') / 2}` (triangle inequality). SanText+, which keeps
"non-sensitive" words, is another mechanism and promises less.

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


class Params(NamedTuple):
  """What a calibrated exponential mechanism needs."""
  vectors: Any  # [V, D] float32
  rate: Any  # [] float32, epsilon / 2 in 1/distance, rounded down
  cap: Any  # [] float32, distances count up to it; infinite for SanText
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon):
  """Calibrates SanText.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget > 0 per unit Euclidean distance.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table or epsilon.
  """
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
    params: Params of :func:`calibrate`.
    start: index of the first element; see ``samplers.split_index``.

  Returns:
    int32 ids of the same shape.

  Raises:
    ValueError: concrete ids that the table does not hold.
  """
  calibration.check_ids(ids, params.vectors.shape[0])
  ids = jnp.asarray(ids, jnp.int32)
  if not ids.size:
    return ids
  # Without the static guarantee: another budget does not compile again.
  return _privatize(key, ids, params._replace(guarantee=None),
                    samplers.split_index(start))


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
  return exponential.log_prob(ids, params.vectors, rate=params.rate,
                              cap=params.cap)


def distances(ids, params):
  """Returns the guarantee's metric, Euclidean, host float64 [B, V]."""
  return calibration.l2_distances(ids, params.vectors)
