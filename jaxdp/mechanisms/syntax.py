r"""Syntax-guided mechanism: a noisy vector, then a near word of the same class.

Every word has one public class, a coarse part of speech. The multivariate
Laplace mechanism makes the vector noisy; of its k nearest words the nearest
that has the INPUT word's class comes out, or the nearest of all if none has.

*proved* between words of one class, where the output is post-processing of the
noisy vector by a fixed rule. The rule looks at the class, so words of different
classes are incomparable (infinite distance): a mechanism that reads the class
of the secret after adding noise cannot hide it. Classes belong to table words;
a tag read from the surrounding text would make each word depend on others.

References: Arnold et al. (2023), "Guiding Text-to-Text Privatization by
Syntax"; the number of candidates is this library's choice. Feyisetan et al.
(2020), Section 3.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp import neighbors
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import comparable
from jaxdp.mechanisms import multivariate_laplace

_LINE_WORDS = 256  # log_prob on a line takes V^3 time


class Params(NamedTuple):
  """What the calibrated mechanism needs."""
  vectors: Any  # [V, D] float32
  epsilon: Any  # [] float32, rounded down
  classes: Any  # [V] int32, 0, 1, ...
  ranks: Any  # [k] int32, 0, 1, ...; k is the number of candidates
  guarantee: guarantees.Guarantee


def calibrate(table, *, epsilon, classes=None, num_candidates=16):
  """Calibrates the syntax-guided mechanism.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget > 0 per unit Euclidean distance.
    classes: int ``[V]``, the class of each word, such as its most usual part
      of speech; public. Required.
    num_candidates: k >= 1, words near the noisy vector that are looked at;
      capped at V.

  Returns:
    Params; its guarantee is *proved* for real arithmetic, inside each class.

  Raises:
    ValueError: a bad table, epsilon or setting; no two words share a class.
  """
  epsilon = calibration.check_epsilon(epsilon)
  vectors = calibration.check_table(table)
  calibration.check_noise(epsilon, vectors)
  if classes is None:
    raise ValueError('classes=None: give an int array with a public class '
                     '(part of speech) for each word of the table')
  classes = comparable.check(classes, len(vectors))
  if isinstance(num_candidates, bool) or not isinstance(
      num_candidates, (int, np.integer)) or num_candidates < 1:
    raise ValueError(f'num_candidates={num_candidates!r} must be an int of at '
                     'least 1')
  ranks = np.arange(min(int(num_candidates), len(vectors)), dtype=np.int32)
  return Params(vectors, calibration.float32_at_most(epsilon), classes, ranks,
                _guarantee(epsilon, classes))


def _guarantee(epsilon, classes):
  num_alone = int(comparable.alone(classes).sum())
  return guarantees.Guarantee(
      epsilon=epsilon, delta=0., metric='l2', unit='per unit distance',
      relation=f'{calibration.RELATION}; words of different classes are '
      'incomparable (infinite distance): the class of each word, one of '
      f'{classes.max() + 1}, is released'
      + (f', and the {num_alone} words alone in their class are promised '
         'nothing' if num_alone else ''),
      status='proved', source='Feyisetan et al. (2020), Theorem 1, and '
      'post-processing that depends on the class alone',
      conditions=calibration.REAL_CONDITIONS)


def privatize(key, ids, params, start=0):
  """Replaces each word by a word near its noisy vector, of its class if any.

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
  flat = ids.reshape(-1)
  vectors, classes = jnp.asarray(params.vectors), jnp.asarray(params.classes)
  noisy = multivariate_laplace.noisy_vectors(
      key, flat, vectors, params.epsilon, start)
  near, _ = neighbors.k_nearest(noisy, vectors, params.ranks.shape[0])
  # The first match; rank 0, the nearest of all, where nothing matches.
  rank = jnp.argmax(classes[near] == classes[flat][:, None], axis=1)
  out = jnp.take_along_axis(near, rank[:, None], axis=1)[:, 0]
  return out.reshape(ids.shape)


def log_prob(ids, params):
  """Returns log Pr(output = column | ids), host float64 [B, V], for D = 1.

  On a line the order of the candidates changes only where two words are
  equally far. In more dimensions the law has no closed form.

  Raises:
    ValueError: D > 1, or more than 256 words; use ``deniability.measure`` or
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
  classes = np.asarray(params.classes)
  middles = np.unique(np.add.outer(line, line)[np.triu_indices(num_words, 1)])
  edges = np.concatenate([[-np.inf], middles / 2, [np.inf]])
  inside = np.concatenate([[edges[1] - 1], (edges[1:-2] + edges[2:-1]) / 2,
                           [edges[-2] + 1]])
  near = np.argsort(np.abs(inside[:, None] - line[None]), axis=1,
                    kind='stable')[:, :params.ranks.shape[0]]
  mass = multivariate_laplace.log_interval(
      float(params.epsilon) * (edges[None] - line[ids][:, None]))
  out = np.full((len(ids), num_words), -np.inf)
  for row, word in enumerate(ids):
    rank = np.argmax(classes[near] == classes[word], axis=1)
    np.logaddexp.at(out[row], near[np.arange(len(near)), rank], mass[row])
  return out


def distances(ids, params):
  """Returns the guarantee's metric, host float64 [B, V].

  Euclidean inside a class, infinite between classes.
  """
  ids = calibration.flat_ids(ids, params.vectors.shape[0])
  return comparable.extended(calibration.l2_distances(ids, params.vectors),
                             ids, params.classes)
