r"""Word mechanisms with one fault each, and their exact laws. Host, float64.

In the room: `FAULTS`, small mechanisms, each with a fault that was seen in a
published implementation, written anew from its description and right in all
else; the toy tables that show it; and the counterpart of each in this library.
``experiments.peers_audit`` describes and audits them.

>>> import numpy as np
>>> law = tem_exception(make_table('line-30'), 1.)
>>> np.exp(law.log_probs[0]).round(3)[[0, 1, 29]].tolist()
[0.427, 0.259, 0.0]
"""

import functools
import math
from typing import Any, Callable, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxdp import embeddings
from jaxdp import mechanisms
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import multivariate_laplace
from jaxdp.mechanisms import truncated_gumbel_law

_ANGLES = 2**13
_RAY_ERROR = 1e-4  # of a log-probability by _ANGLES rays; 1e-6 is seen
_LOG_ERROR = 1e-9  # of max(1, |log p|), the others


class Law(NamedTuple):
  """A mechanism whose law is known, and the metric of its claim."""
  log_probs: Any  # float64 [V, V], row input, column output
  distances: Any  # float64 [V, V]
  error: float = _LOG_ERROR  # of log_probs, relative where they are below -1


class Fault(NamedTuple):
  """A mechanism with one fault and its counterpart without."""
  mechanism: str
  settings: dict
  table: str  # of `make_table`
  epsilon: float
  law: Callable  # (table, epsilon, **settings) -> Law
  sound: tuple  # mechanism and settings in this library
  source: str  # of the claim
  metric: str = 'l2'
  sound_law: Callable | None = None  # as law; None for the library's own


def make_table(name):
  """Builds a toy table.

  Args:
    name: 'line-V', V words on a line with growing gaps, the first of them 1;
      'short-V', the same at length 1/4; 'twins-V', the same with the last word
      moved to 0.02 from the one before; 'plane-V', a band of V words, long in
      one direction and thin in the other.

  Returns:
    An ``EmbeddingTable`` of words w0, w1, ...

  Raises:
    ValueError: another name.
  """
  kind, _, size = name.partition('-')
  i = np.arange(int(size or 0), dtype=np.float64)
  vectors = (i + .05 * i * (i - 1))[:, None]
  if kind == 'short':
    vectors = vectors / (4 * vectors[-1])
  elif kind == 'twins':
    vectors[-1] = vectors[-2] + .02
  elif kind == 'plane':
    vectors = np.append(vectors, .4 * np.cos(3 * i)[:, None], axis=1)
  elif kind != 'line':
    raise ValueError(f'name={name!r} must begin with line, short, twins or '
                     'plane')
  return embeddings.make_table([f'w{j}' for j in range(len(i))], vectors)


# --- The faulty mechanisms: (table, epsilon, **settings) -> Law


def l2(table):
  return calibration.l2_distances(np.arange(len(table.words)), table.vectors)


def _identity(num):
  return np.where(np.eye(num, dtype=bool), 0., -np.inf)


def normalized(logits):
  return logits - special.logsumexp(logits, axis=1, keepdims=True)


def _paper_gumbel(distance, epsilon, *, power=1, log_pmf=None):
  """The truncated mechanism of Xu et al. (2020), on a power of distances."""
  diameter, minimum = distance.max(), distance[distance > 0].min()
  scale = truncated_gumbel_law.paper_scale(
      epsilon, len(distance), diameter, minimum)
  return truncated_gumbel_law.log_prob(
      distance**power, scale=scale, bound=diameter, log_pmf=log_pmf)


def squared_distances(table, epsilon, power=2):
  """An index that returns squared distances; noise and bound are for plain."""
  distance = l2(table)
  return Law(_paper_gumbel(distance, epsilon, power=power), distance)


def one_random_word(table, epsilon, word):
  """Diameter and least distance as one word sees them."""
  distance = l2(table)
  seen = np.delete(distance[table.words.index(word)],
                   table.words.index(word))
  scale = truncated_gumbel_law.paper_scale(
      epsilon, len(distance), seen.max(), seen.min())
  return Law(truncated_gumbel_law.log_prob(
      distance, scale=scale, bound=seen.max()), distance)


def poisson_by_rejection(table, epsilon):
  """K is drawn again until 1 <= K < V; nothing reaches K = V."""
  distance = l2(table)
  k = np.arange(1, len(distance))
  log_pmf = k * math.log(math.log(len(distance) - 1)) - special.gammaln(k + 1)
  log_pmf = np.append(log_pmf - special.logsumexp(log_pmf), -np.inf)
  return Law(_paper_gumbel(distance, epsilon, log_pmf=log_pmf), distance)


def lambert_real_part(table, epsilon):
  """alpha < 0: the complex W loses its imaginary part, the log is no number."""
  distance = l2(table)
  diameter, minimum = distance.max(), distance[distance > 0].min()
  alpha = (epsilon - 2 * (1 + math.log(len(distance))) / minimum) / 3
  assert alpha < 0, 'epsilon is not below its bound'
  scale = 2 * diameter / special.lambertw(2 * alpha * diameter).real
  return Law(truncated_gumbel_law.log_prob(
      distance, scale=scale, bound=diameter), distance)


def vickrey_without_input(table, epsilon):
  """The word nearest to the noisy vector, the input word excepted."""
  line = np.asarray(table.vectors, np.float64)[:, 0]
  log_probs = np.full((len(line), len(line)), -np.inf)
  for word in range(len(line)):
    others = np.delete(np.arange(len(line)), word)  # ascending, as the line is
    middle = (line[others][1:] + line[others][:-1]) / 2
    edges = np.concatenate([[-np.inf], middle, [np.inf]]) - line[word]
    log_probs[word, others] = multivariate_laplace.log_interval(
        epsilon * edges[None])[0]
  return Law(log_probs, l2(table))


def _tem(table, epsilon, outside_weight, beta=.001):
  """TEM by its near list; the weight outside is a function of two counts."""
  distance = l2(table)
  num_words = len(distance)
  radius = 2 / epsilon * math.log((1 - beta) * (num_words - 1) / beta)
  is_near = distance <= radius
  logits = np.where(is_near, -epsilon / 2 * distance, -np.inf)
  num_near = is_near.sum(axis=1)
  assert (num_near < num_words).all(), 'a near list holds every word'
  outside = -epsilon / 2 * radius + np.log(outside_weight(num_near, num_words))
  total = np.logaddexp(special.logsumexp(logits, axis=1), outside)
  return distance, is_near, logits - total[:, None], outside - total


def tem_outside_score(table, epsilon, package_words=None):
  """Bottom's weight: words of the package's vocabulary over the near ones.

  ``package_words=None`` is the right count, the words that are not near.
  """
  distance, is_near, log_probs, outside = _tem(
      table, epsilon, lambda near, num: (
          num - near if package_words is None else package_words / near))
  each = outside - np.log((~is_near).sum(axis=1))
  return Law(np.where(is_near, log_probs, each[:, None]), distance)


def tem_exception(table, epsilon):
  """Drawing outside the near list raises, and the input word is returned."""
  distance, _, log_probs, outside = _tem(
      table, epsilon, lambda near, num: num - near)
  own = np.diag_indices(len(distance))
  log_probs[own] = np.logaddexp(log_probs[own], outside)
  return Law(log_probs, distance)


def unknown_words(table, epsilon, known):
  """Only the first words have vectors; the others leave as they came."""
  distance = l2(table)
  num = len(distance)
  log_probs = _identity(num)
  log_probs[:known, :known] = multivariate_laplace.log_prob(
      np.arange(known), multivariate_laplace.Params(
          table.vectors[:known], epsilon, None))
  return Law(log_probs, distance)


def mahalanobis(table, epsilon, mixing, renormalised=True):
  """Noise r L u in the plane; the fault scales L u back to length one."""
  mechanism = mechanisms.get('mahalanobis')
  params = mechanism.calibrate(table, epsilon=epsilon, mixing=mixing)
  angle = (np.arange(_ANGLES) + .5) * 2 * np.pi / _ANGLES
  rays = np.stack([np.cos(angle), np.sin(angle)], axis=1)
  rays = rays @ np.asarray(params.factor, np.float64).T
  if renormalised:
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
  return Law(_ray_law(np.asarray(table.vectors, np.float64), rays, epsilon),
             mechanism.distances(np.arange(len(table.words)), params),
             _RAY_ERROR)


def _ray_law(vectors, rays, epsilon):
  """Law of the word nearest to w + r e, r of law Gamma(2), e a row of rays.

  On a ray every cell is an interval of r, between the last word that hands over
  to it and the first that takes over.
  """
  reach = 2 * rays @ vectors.T  # [T, V]
  gain = reach[:, :, None] - reach[:, None, :]  # [T, u, v]
  out = np.empty((len(vectors), len(vectors)))
  for word, vector in enumerate(vectors):
    sq_distance = np.sum((vectors - vector)**2, axis=1)
    with np.errstate(divide='ignore', invalid='ignore'):
      # u is nearer than v where r * gain > their difference at r = 0.
      meet = (sq_distance[:, None] - sq_distance[None]) / gain
    low = np.where(gain > 0, meet, 0.).max(axis=2).clip(min=0.)
    high = np.where(gain < 0, meet, np.inf).min(axis=2).clip(min=0.)
    mass = np.maximum(_survival(epsilon * low) - _survival(epsilon * high), 0.)
    with np.errstate(divide='ignore'):
      out[word] = np.log(mass.mean(axis=0))
  return out


def _survival(x):
  """Of the Gamma law of shape 2 and scale 1."""
  x = np.minimum(x, 700.)
  return (1 + x) * np.exp(-x)


def forked_workers(table, epsilon, shared=True):
  """Texts of two words, one a worker, drawn by inverting one uniform.

  Inputs and outputs are the V^2 pairs of words; distances add up.
  """
  distance = l2(table)
  num = len(distance)
  one = normalized(-epsilon / 2 * distance)
  both = one[:, None, :, None] + one[None, :, None, :]
  if shared:
    upper = np.cumsum(np.exp(one), axis=1)
    upper[:, -1] = 1.
    lower = np.append(np.zeros((num, 1)), upper[:, :-1], axis=1)
    overlap = (np.minimum(upper[:, None, :, None], upper[None, :, None, :])
               - np.maximum(lower[:, None, :, None], lower[None, :, None, :]))
    with np.errstate(divide='ignore'):
      both = np.log(np.maximum(overlap, 0.))
  pairs = distance[:, None, :, None] + distance[None, :, None, :]
  return Law(both.reshape(num**2, -1), pairs.reshape(num**2, -1))


def kept_words(table, epsilon, sensitive, keep_probability=.8):
  """The last words are sensitive; the others are kept or become one of them."""
  distance = l2(table)
  num_kept = len(distance) - sensitive
  logits = -epsilon / 2 * distance
  logits[:, :num_kept] = -np.inf
  log_probs = normalized(logits)
  kept = np.arange(num_kept)
  log_probs[kept] += math.log1p(-keep_probability)
  log_probs[kept, kept] = math.log(keep_probability)
  return Law(log_probs, distance)


def scaled_scores(table, epsilon):
  """One list of all words; scores scaled to [0, 1] for each input."""
  distance = l2(table)
  score = 1 - distance / distance.max(axis=1, keepdims=True)
  return Law(normalized(epsilon / 2 * score), distance)


def aggressive_lists(table, epsilon, group_size):
  """Scaled scores on the word's own nearest words."""
  distance = l2(table)
  nearest = np.argsort(distance, axis=1, kind='stable')[:, :group_size]
  listed = np.take_along_axis(distance, nearest, axis=1)
  logits = np.full(distance.shape, -np.inf)
  np.put_along_axis(logits, nearest, epsilon / 2 * (
      1 - listed / listed.max(axis=1, keepdims=True)), axis=1)
  return Law(normalized(logits), 1. - np.eye(len(distance)))


def stop_words(table, epsilon, num_stop_words):
  """The first words leave unchanged, the others share one list."""
  num = len(table.words)
  log_probs = _identity(num)
  rest = embeddings.subset(table, range(num_stop_words, num))
  log_probs[num_stop_words:, num_stop_words:] = scaled_scores(
      rest, epsilon).log_probs
  return Law(log_probs, 1. - np.eye(num))


@functools.cache
def gumbel_range():
  """The ends of ``jax.random.gumbel``, mode 'low', float32: (low, high)."""
  ends = jnp.float32([np.finfo(np.float32).tiny, 1 - 2.**-23])
  low, high = np.asarray(-jnp.log(-jnp.log(ends)), np.float64)
  return float(low), float(high)


def jax_categorical(table, epsilon):
  """The exponential mechanism of two words, drawn by arg-max of Gumbel noise.

  Written out only where the other word is beyond the noise's reach and the law
  has no randomness left.
  """
  distance = l2(table)
  low, high = gumbel_range()
  assert len(distance) == 2 and epsilon / 2 * distance.max() > high - low
  return Law(_identity(2), distance)


# --- Faults, claims and counterparts


_XU = 'Xu et al. (2020), Theorem 1'
_FEYISETAN = 'Feyisetan et al. (2020), Theorem 1'
_TEM = 'Carvalho et al. (2021), Theorem 1'
_YUE = 'Yue et al. (2021), Theorem 1'
_CHEN = 'Chen et al. (2023), epsilon of its exponential mechanism'
_EVERY_PAIR = ', read as holding between every two words'
_POISSON = ('gumbel_exponential', {'num_candidates': 'poisson'})
_ALL = ('gumbel_exponential', {'num_candidates': 'all'})
_INDEPENDENT = functools.partial(forked_workers, shared=False)

FAULTS = (
    Fault('mldp: squared distances', {}, 'line-12', 12., squared_distances,
          _POISSON, _XU),
    Fault('mldp: one random word', {'word': 'w3'}, 'twins-12', 12.,
          one_random_word, _ALL, _XU),
    Fault('mldp: Poisson by rejection', {}, 'line-12', 12.,
          poisson_by_rejection, _POISSON, _XU),
    Fault('mldp: Lambert W, real part', {}, 'line-12', .5, lambert_real_part,
          _ALL, _XU),
    Fault('mldp: Vickrey, no input word', {}, 'line-8', 2.,
          vickrey_without_input, ('vickrey', {'tuning': 0.}),
          'Xu et al. (2021), the epsilon of its noise'),
    Fault('mldp: TEM, outside score', {'package_words': 400_000}, 'line-30', 1.,
          tem_outside_score, ('tem', {}), _TEM),
    Fault('mldp: unknown words', {'known': 6}, 'line-8', 2., unknown_words,
          ('multivariate_laplace', {}), _FEYISETAN),
    Fault('pypantera: Mahalanobis', {'mixing': .8}, 'plane-8', 2., mahalanobis,
          ('mahalanobis', {'mixing': .8}), 'Xu et al. (2020b)', 'mahalanobis',
          functools.partial(mahalanobis, renormalised=False)),
    Fault('pypantera: TEM, exception', {}, 'line-30', 1., tem_exception,
          ('tem', {}), _TEM),
    Fault('santext: forked workers', {}, 'line-5', 1., forked_workers,
          ('santext', {}), _YUE + ', for texts of two words',
          sound_law=_INDEPENDENT),
    Fault('santext+: kept words', {'sensitive': 3}, 'line-6', 2., kept_words,
          ('santext', {}), _YUE + _EVERY_PAIR),
    Fault('custext: scaled scores', {}, 'short-6', 2., scaled_scores,
          ('santext', {}), _CHEN + ', read per unit distance'),
    Fault('custext: aggressive lists', {'group_size': 3}, 'line-8', 2.,
          aggressive_lists, ('custext', {'group_size': 3}),
          _CHEN + _EVERY_PAIR, 'distinct words'),
    Fault('custext: stop words', {'num_stop_words': 2}, 'line-8', 2.,
          stop_words, ('custext', {'group_size': 8}), _CHEN + _EVERY_PAIR,
          'distinct words'),
    Fault('jax: categorical', {}, 'line-2', 42., jax_categorical,
          ('santext', {}), _YUE),
)
