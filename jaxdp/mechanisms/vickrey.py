r"""Vickrey mechanism: a noisy vector, then its first or second nearest word.

With multivariate Laplace noise and a, b the words nearest to the noisy vector
at distances :math:`d_a \le d_b` (unsquared),

.. math::
  P(a) = \frac{(1 - t) d_b}{t d_a + (1 - t) d_b}, \quad P(b) = 1 - P(a).

*proved*, with the epsilon of the multivariate Laplace mechanism: the choice
reads the noisy vector and nothing else. It stays so only because the input word
may come out. An implementation that takes the input off the list first, to be
sure that every word changes, looks at the secret after the noise and has no
finite epsilon: M(w) = w has probability 0 and M(w') = w has not.

References: Xu et al. (2021), "On a Utilitarian Approach to Privacy Preserving
Text Generation"; Feyisetan et al. (2020), Section 3.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # loads scipy.integrate when first used

from jaxdp import guarantees
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import multivariate_laplace

_LINE_WORDS = 2_000  # log_prob on a line takes V^2 memory
_REACH = 60.  # in noise scales; e^-60 is nothing beside the rest of a piece


class Params(NamedTuple):
  """What the calibrated mechanism needs."""
  vectors: Any  # [V, D] float32
  epsilon: Any  # [] float32, rounded down
  tuning: Any  # [] float32, t
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, tuning=0.5):
  """Calibrates the Vickrey mechanism.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget > 0 per unit Euclidean distance.
    tuning: t in [0, 1]. At 0 the nearest word comes out, as in the
      multivariate Laplace mechanism; at 1 the second nearest. The default of
      a half is this library's choice: odds are d_b to d_a.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table, epsilon or tuning.
  """
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  calibration.check_noise(epsilon, vectors)
  if isinstance(tuning, bool) or not isinstance(
      tuning, (int, float, np.floating)) or not 0 <= tuning <= 1:
    raise ValueError(f'tuning={tuning!r} must lie in [0, 1]; 0 takes the '
                     'nearest word, 1 the second nearest')
  guarantee = guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='l2', unit='per unit distance',
      relation=calibration.RELATION, status='proved',
      source='Feyisetan et al. (2020), Theorem 1, and post-processing',
      conditions=calibration.REAL_CONDITIONS)
  return Params(vectors, calibration.float32_at_most(epsilon),
                np.float32(tuning), guarantee)


def privatize(key, ids, params, start=0):
  """Replaces each word by the first or second nearest to its noisy vector.

  Guarantee: ``params.guarantee``, per text; not covered: the missing float32
  tails of the noise (about 2**-23 a coordinate) and the generator.

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
  return calibration.run(_privatize, key, ids, params, params.vectors.shape[0],
                         start)


@jax.jit
def _privatize(key, ids, params, start):
  vectors, tuning = jnp.asarray(params.vectors), jnp.asarray(params.tuning)
  noisy = multivariate_laplace.noisy_vectors(
      key, ids.reshape(-1), vectors, params.epsilon, start)
  near, distance = neighbors.k_nearest(noisy, vectors, 2)
  keys = samplers.element_keys(key, samplers.OUTCOME, start, ids.size)
  u = samplers.map_elements(jax.random.uniform, keys)
  # Multiplied out: at t = 1 and d_a = 0 the quotient would be 0 / 0.
  first = (1 - tuning) * distance[:, 1]
  is_first = u * (tuning * distance[:, 0] + first) < first
  out = jnp.where(is_first, near[:, 0], near[:, 1])
  return out.reshape(ids.shape)


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V], for D = 1.

  A line falls into pieces on which a and b are fixed and both distances are
  linear; the choice is integrated over each by adaptive quadrature, to a
  relative error of about 1e-10.

  Raises:
    ValueError: D > 1, or more than 2,000 words; use ``deniability.measure`` or
      an audit by trials.
  """
  num_words, dim = params.vectors.shape
  ids = calibration.flat_ids(ids, num_words)
  if dim != 1 or num_words > _LINE_WORDS:
    raise ValueError(
        f'log_prob is out of reach for {num_words} words in D={dim} '
        f'dimensions (at most {_LINE_WORDS} on a line); estimate it with '
        'jaxdp.deniability.measure or by auditing trials')
  line = np.asarray(params.vectors, np.float64)[:, 0]
  epsilon = float(params.epsilon)
  edges, near = _pieces(line)
  masses = _masses(edges, line[near], epsilon, float(params.tuning))
  out = np.full((len(ids), num_words), -np.inf)
  for row, word in zip(out, ids):
    # A word is an edge, so that each piece lies on one side of it.
    is_right = edges[:-1] >= line[word]
    gap = np.where(is_right, edges[:-1] - line[word], line[word] - edges[1:])
    mass = masses[:, np.where(is_right, 0, 1), np.arange(len(near))]
    for which in (0, 1):
      np.logaddexp.at(row, near[:, which],
                      mass[which] - epsilon * gap - math.log(2))
  return out


def _pieces(line):
  """Edges [n + 1] of the pieces of a line, and their words a, b [n, 2]."""
  ordered = np.sort(line)
  inner = np.unique(np.concatenate([
      line, (ordered[1:] + ordered[:-1]) / 2,
      (ordered[2:] + ordered[:-2]) / 2]))
  inside = np.concatenate([[inner[0] - 1], (inner[1:] + inner[:-1]) / 2,
                           [inner[-1] + 1]])
  near = np.argsort(np.abs(inside[:, None] - line[None]), axis=1,
                    kind='stable')[:, :2]
  return np.concatenate([[-np.inf], inner, [np.inf]]), near


def _masses(edges, pair, epsilon, tuning):
  """Log of each piece's share of a and b, float64 [a or b, right or left, n].

  In units of half the noise density at the edge that the word looks at: the
  word is at or beyond the piece's left edge (the piece is right of it) or its
  right edge. Pieces without end count towards one side alone.
  """
  out = np.full((2, 2, len(pair)), -np.inf)
  for i, (a, b) in enumerate(pair):
    width = min(epsilon * (edges[i + 1] - edges[i]), _REACH)
    for side, (edge, step) in enumerate(((edges[i], 1 / epsilon),
                                         (edges[i + 1], -1 / epsilon))):
      if not math.isfinite(edge):
        continue

      def share(s, which, edge=edge, step=step, a=a, b=b):
        x = edge + step * s
        first, second = (1 - tuning) * abs(x - b), tuning * abs(x - a)
        return math.exp(-s) * (second if which else first) / (first + second)

      for which in (0, 1):
        mass, _ = scipy.integrate.quad(
            share, 0., width, (which,), epsabs=0., epsrel=1e-11, limit=200)
        out[which, side, i] = math.log(mass) if mass > 0 else -np.inf
  return out


def distances(ids, params):
  """Returns the guarantee's metric, Euclidean, host float64 [B, V]."""
  return calibration.l2_distances(ids, params.vectors)
