r"""Votes of a smoothed classifier: counted on the device, bounded on the host.

:func:`tally` is the device half: it draws votes in a jitted loop and keeps one
integer a class, whatever the number of votes. :func:`probability_bounds` is
the host half, NumPy float64: counts become a lower bound of the top class's
probability and an upper bound of every other's. :func:`certify` joins them and
applies radius formulas (``certification.radii``).

Vote s of image i uses the key folded with VOTE, with s (both halves) and i:
chunks of images and of votes never show in a result.

What ``significance`` covers, for ONE image: with that probability at most,
``p_low`` lies above the true probability of the class ``top`` or ``p_high``
below that of some other class. The top class is picked from the votes that are
bounded, and ``correction`` pays for it (K classes, one-sided bounds):

============  ===================  =============================================
correction    level of a bound     why, and what is covered
============  ===================  =============================================
'bonferroni'  significance/(K+2)   the lower bound of any class may be the one
                                   used (K events), an upper bound matters only
                                   for the two classes that are truly likeliest
                                   (2 events); covers significance
'two_stage'   significance/2       other votes picked the class: two events;
                                   covers significance, for any K
'published'   significance/K       the code of Phan et al. (2020); the same
                                   count proves only (1 + 2/K) significance
============  ===================  =============================================

>>> votes = Votes(counts=np.int32([[280, 15, 5]]), num_samples=300)
>>> top, p_low, p_high = probability_bounds(votes, significance=.05)
>>> top, p_low.round(3), p_high.round(3)
(array([0], dtype=int32), array([0.892]), array([0.087]))

References: Cohen et al. (2019), Certified adversarial robustness via randomized
smoothing; Lecuyer et al. (2019), Certified robustness to adversarial examples
with differential privacy; Phan et al. (2020), Scalable differential privacy
with certified robustness in adversarial learning, Section 4 and Algorithm 3.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import confidence
from jaxdp import samplers
from jaxdp import threefry

ABSTAIN = -1

_BOUNDS = ('clopper_pearson', 'hoeffding', 'empirical_bernstein')
_CORRECTIONS = ('bonferroni', 'two_stage', 'published')
_CHUNK = 256  # images at once, and images times votes of one step
# Votes of one device call: its int32 sums cannot overflow, and between two
# calls the process answers an interrupt.
_PER_CALL = 2**15
_GRID = 15  # bits of a softmax score


class Votes(NamedTuple):
  """How often each class won."""
  counts: np.ndarray  # [B, C] int32
  num_samples: int


class Scores(NamedTuple):
  """Moments of the softmax scores, rounded down to multiples of 2^-15."""
  mean: np.ndarray  # [B, C] float64
  variance: np.ndarray  # [B, C] float64, divisor num_samples - 1
  num_samples: int


class Certificate(NamedTuple):
  """What :func:`certify` found; one entry an image.

  Attributes:
    label: int32 ``[B]``, the top class, or ABSTAIN where the bounds of two
      classes overlap.
    top: int32 ``[B]``, the class with most votes, certain or not.
    p_low: float64 ``[B]``, lower bound of the top class's probability.
    p_high: float64 ``[B]``, upper bound of every other's.
    radii: dict of float64 ``[B]``, 0 where ``label`` is ABSTAIN.
    votes: Votes or Scores that the bounds come from.
    significance: what is really covered, per image; above the one asked for
      under ``correction='published'``.
  """
  label: np.ndarray
  top: np.ndarray
  p_low: np.ndarray
  p_high: np.ndarray
  radii: dict[str, np.ndarray]
  votes: Any
  significance: float


def certify(key, predict_fn, x, *, num_samples, significance=.05, radii=None,
            bound='clopper_pearson', score=None, correction='bonferroni',
            num_selection=100, chunk_size=_CHUNK, samples_per_step=None,
            per_image_keys=True, start=0):
  """Certifies a smoothed classifier at a batch of inputs.

  Guarantee: per image, a wrong ``p_low`` or ``p_high`` has at most the
  probability ``Certificate.significance``; the radii then hold as their
  formulas say. Not covered: several images at once (add up), noise in
  ``predict_fn`` other than the formulas assume, the generator.

  Args:
    key: typed key; consumed.
    predict_fn: ``(key, x) -> logits [B, C]``; draws its noise from its key and
      has no cross-example layers. A function with parameters is best passed as
      ``jax.tree_util.Partial(fun, params)``: new parameters do not recompile.
    x: clean inputs, ``[B, ...]``.
    num_samples: votes an image, >= 1.
    significance: in (0, 0.5); see the module.
    radii: dict of name to ``fun(p_low, p_high) -> radius``, settings bound by
      ``functools.partial``.
    bound: 'clopper_pearson' (votes only), 'hoeffding', 'empirical_bernstein'.
    score: 'vote', one vote a sample by arg-max, or 'softmax', whose mean is
      bounded instead. None is 'softmax' for 'empirical_bernstein', else 'vote'.
    correction: 'bonferroni', 'two_stage' or 'published'; see the module.
    num_selection: further votes that pick the class in two stages.
    chunk_size, samples_per_step, per_image_keys, start: as for `tally`.

  Returns:
    Certificate.

  Raises:
    ValueError: an argument out of range; what `tally` refuses.

  References: Phan et al. (2020), Algorithm 3; Cohen et al. (2019), Section 3.2.
  """
  score = _check_bound(bound, score)
  # Refuses a bad significance or correction before the votes are paid for.
  confidence.clopper_pearson(0, 1, significance=significance)
  _level(significance, correction, 2)
  count = functools.partial(
      tally, key, predict_fn, x, score=score, chunk_size=chunk_size,
      samples_per_step=samples_per_step, per_image_keys=per_image_keys,
      start=start)
  top, first = None, 0
  if correction == 'two_stage':
    selection = count(num_samples=num_selection)
    top, first = _top(selection), num_selection
  votes = count(num_samples=num_samples, first_sample=first)
  top, p_low, p_high = probability_bounds(
      votes, significance=significance, bound=bound, correction=correction,
      top=top)
  label = np.where(p_low > p_high, top, ABSTAIN).astype(np.int32)
  covered = _level(significance, correction, votes[0].shape[-1])[1]
  found = {name: np.asarray(fun(p_low, p_high))
           for name, fun in (radii or {}).items()}
  return Certificate(label, top, p_low, p_high, found, votes, covered)


def tally(key, predict_fn, x, *, num_samples, score='vote', first_sample=0,
          chunk_size=_CHUNK, samples_per_step=None, per_image_keys=True,
          start=0):
  """Counts votes, or adds softmax scores, of fresh draws of ``predict_fn``.

  Memory is independent of ``num_samples``, which does not recompile either.
  Softmax scores are rounded down to multiples of 2^-15 and summed as integers,
  so no order of summation shows; what is bounded is the rounded score's mean.

  Args:
    key: typed key; consumed.
    predict_fn: ``(key, x) -> logits [B, C]``; see `certify`.
    x: inputs, ``[B, ...]``.
    num_samples: votes an image, >= 1.
    score: 'vote' or 'softmax'.
    first_sample: index of the first vote; another range, other votes.
    chunk_size: images on the device at once, >= 1.
    samples_per_step: votes of an image evaluated at once, >= 1; None fills a
      step with 256 images. Neither size shows in the result, up to rounding
      inside ``predict_fn``.
    per_image_keys: True, and ``predict_fn`` is vmapped over batches of one
      image with a key of its own. False, and it sees all of ``x`` with one key
      a vote, which refuses chunks: the noise would depend on them.
    start: index of the first image, in [0, 2^31).

  Returns:
    Votes, or Scores for 'softmax'.

  Raises:
    ValueError: an argument out of range; ``x`` without a batch axis or empty;
      ``predict_fn`` returns another shape, ignores its key, or returns logits
      without a finite maximum, with the image named.
  """
  num_samples = _check_count(num_samples, 'num_samples', 1)
  first_sample = _check_count(first_sample, 'first_sample', 0)
  chunk_size = _check_count(chunk_size, 'chunk_size', 1)
  start = _check_count(start, 'start', 0)
  if np.ndim(x) < 2 or not len(x):
    raise ValueError(f'x has shape {np.shape(x)}; pass a batch [B, ...] of at '
                     'least one input')
  if not per_image_keys and len(x) > chunk_size:
    raise ValueError(f'per_image_keys=False needs chunk_size={chunk_size} '
                     f'of at least {len(x)}: noise would show the chunks')
  if not isinstance(predict_fn, jax.tree_util.Partial):
    predict_fn = jax.tree_util.Partial(predict_fn)
  num_classes = _check_predict(predict_fn, x, score, per_image_keys)
  # Chunks of one shape: the last one is padded by less than their number.
  size = -(-len(x) // -(-len(x) // chunk_size))
  per_step = (max(1, _CHUNK // size) if samples_per_step is None else
              _check_count(samples_per_step, 'samples_per_step', 1))
  run = functools.partial(
      _tally, samples_per_step=per_step, score=score, num_classes=num_classes,
      per_image_keys=per_image_keys)
  sums = [_chunk_sums(run, predict_fn, key, x, size, start, at, first_sample,
                      num_samples) for at in range(0, len(x), size)]
  return _summary(np.concatenate(sums, axis=1), num_samples)


def probability_bounds(votes, *, significance, bound='clopper_pearson',
                       correction='bonferroni', top=None):
  """Bounds the top class's probability from below, the others' from above.

  Guarantee: per image, as the module says; also where ``top`` depends on the
  votes, except under 'two_stage'. ``p_high`` is at most ``1 - p_low``, which
  needs no further event ('published' leaves that out, as the code does).

  Args:
    votes: Votes or Scores, ``[B, C]``.
    significance: in (0, 0.5), per image.
    bound: 'clopper_pearson' (Votes only), 'hoeffding', 'empirical_bernstein'.
    correction: 'bonferroni', 'two_stage' or 'published'.
    top: int ``[B]``, the class to bound; None is the one with most votes.
      'two_stage' needs it, from OTHER votes.

  Returns:
    ``(top, p_low, p_high)``: int32 and float64 ``[B]``.

  Raises:
    ValueError: an argument out of range; Clopper-Pearson on Scores; two stages
      without ``top``.

  References: Phan et al. (2020), Section 4; Cohen et al. (2019), Section 3.2;
  Lecuyer et al. (2019), Section III-D.
  """
  _check_bound(bound, 'vote' if isinstance(votes, Votes) else 'softmax')
  if top is None and correction == 'two_stage':
    raise ValueError("top=None: correction='two_stage' bounds a class that "
                     'other votes have picked; pass it')
  top = np.asarray(_top(votes) if top is None else top, np.int32)
  level, _ = _level(significance, correction, votes[0].shape[-1])
  low, _ = _interval(votes, bound, level, 'lower')
  _, high = _interval(votes, bound, level, 'upper')
  rows = np.arange(len(top))
  p_low = low[rows, top]
  high[rows, top] = 0.
  p_high = high.max(axis=-1)
  if correction != 'published':
    p_high = np.minimum(p_high, 1. - p_low)
  return top, p_low, p_high


def certified_accuracy(labels, truth, radii, attack_bounds):
  """Returns conventional accuracy, and certified accuracy at each bound.

  An image counts as certified where its label is right and its radius exceeds
  the attack bound, in the radius's norm.

  Args:
    labels: int ``[B]``: ``Certificate.label``, where to abstain is an error,
      or ``Certificate.top``, as Phan et al. count conventional accuracy.
    truth: int ``[B]``, the true classes, >= 0.
    radii: float ``[B]``, one entry of ``Certificate.radii``.
    attack_bounds: ``[M]``, each >= 0.

  Returns:
    ``(conventional, certified)``: a float and float64 ``[M]``.

  Raises:
    ValueError: shapes that differ or are empty; a negative or NaN radius or
      bound.

  Example:
    >>> certified_accuracy([1, 1, -1], [1, 0, 1], [.3, .9, 0.], [0., .5])
    (0.3333333333333333, array([0.33333333, 0.        ]))

  References: Phan et al. (2020), Section 5.
  """
  labels, truth = np.asarray(labels), np.asarray(truth)
  radii = np.asarray(radii, np.float64)
  bounds = np.atleast_1d(np.asarray(attack_bounds, np.float64))
  if not labels.shape == truth.shape == radii.shape or radii.ndim != 1:
    raise ValueError(f'labels, truth and radii have shapes {labels.shape}, '
                     f'{truth.shape} and {radii.shape}; pass [B] each')
  if not len(labels):
    raise ValueError('labels has no entry; accuracy needs at least one image')
  for name, value in (('radii', radii), ('attack_bounds', bounds)):
    if not np.all(value >= 0.):
      raise ValueError(f'{name}={value} must be at least 0; it is a size')
  right = labels == truth
  certified = right[:, None] & (radii[:, None] > bounds[None])
  return float(right.mean()), certified.mean(axis=0)


_element_keys = jax.jit(samplers.element_keys, static_argnums=(1, 3))


@functools.partial(jax.jit, static_argnames=(
    'samples_per_step', 'score', 'num_classes', 'per_image_keys'))
def _tally(predict_fn, vote_keys, x, ids, num, *, samples_per_step, score,
           num_classes, per_image_keys):
  """Adds up the votes of the first ``num`` keys.

  Returns int32 ``[P, B, C]``, the P sums of `_parts`, and bool ``[B]``, whether
  some logits had no finite maximum.
  """
  def step(i, carry):
    sums, bad = carry
    at = i * samples_per_step + jnp.arange(samples_per_step, dtype=jnp.int32)
    live = at < num
    keys = vote_keys[jnp.minimum(at, num - 1)]
    logits = _logits(predict_fn, keys, x, ids, per_image_keys)  # [S, B, C]
    parts = jnp.where(live[None, :, None, None], _parts(logits, score), 0)
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    return (sums + jnp.sum(parts, axis=1, dtype=jnp.int32),
            bad | jnp.any(~finite & live[:, None], axis=0))
  num_parts = 1 if score == 'vote' else 3
  carry = (jnp.zeros((num_parts, len(x), num_classes), jnp.int32),
           jnp.zeros(len(x), bool))
  num_steps = (num + samples_per_step - 1) // samples_per_step
  return jax.lax.fori_loop(jnp.int32(0), num_steps, step, carry)


def _logits(predict_fn, keys, x, ids, per_image_keys):
  """Logits of every image under the key of each vote, ``[S, B, C]``."""
  if not per_image_keys:
    return jax.vmap(lambda k: predict_fn(_fold(k, ids[0]), x))(keys)

  def one(vote_key, image, image_id):
    return predict_fn(_fold(vote_key, image_id), image[None])[0]
  return jax.vmap(jax.vmap(one, (None, 0, 0)), (0, None, None))(keys, x, ids)


def _fold(key, index):
  """``jax.random.fold_in`` of a threefry2x32 key; compiles and runs faster."""
  first, second = jax.random.key_data(key)
  words = threefry.threefry2x32(first, second, jnp.uint32(0), index)
  return jax.random.wrap_key_data(jnp.stack(words), impl='threefry2x32')


def _parts(logits, score):
  """Integers that add up, ``[P, S, B, C]``: wins; or scores and squares."""
  if score == 'vote':
    winner = jnp.argmax(logits, axis=-1)
    return jax.nn.one_hot(winner, logits.shape[-1], dtype=jnp.int32)[None]
  shares = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
  shares = jnp.floor(shares * 2**_GRID).astype(jnp.int32)
  square = shares * shares  # at most 2^30; in two halves its sum stays there
  return jnp.stack([shares, square >> _GRID, square & (2**_GRID - 1)])


def _chunk_sums(run, predict_fn, key, x, size, start, at, first_sample,
                num_samples):
  """Sums over all votes of images at, ..., at + size - 1; int64."""
  chunk = jnp.asarray(x[at:at + size])
  live = len(chunk)
  if live < size:
    pad = [(0, size - live)] + [(0, 0)] * (chunk.ndim - 1)
    chunk = jnp.pad(chunk, pad, mode='edge')
  ids = (np.arange(size, dtype=np.uint64) + (start + at)).astype(np.uint32)
  total = 0
  for done in range(0, num_samples, _PER_CALL):
    # A program of its own: compiled once, whatever votes.
    keys = _element_keys(key, samplers.VOTE, np.uint32(first_sample + done),
                         _PER_CALL)
    sums, bad = run(predict_fn, keys, chunk, ids,
                    np.int32(min(_PER_CALL, num_samples - done)))
    bad = np.asarray(bad)[:live]
    if bad.any():
      raise ValueError(
          f'predict_fn returns logits without a finite maximum (NaN or '
          f'infinite) for image {at + int(np.argmax(bad))}; such a vote counts '
          'for nobody')
    total = total + np.asarray(sums, np.int64)[:, :live]
  return total


def _summary(sums, num_samples):
  """Votes or Scores of int64 sums ``[P, B, C]``."""
  if len(sums) == 1:
    return Votes(sums[0].astype(np.int32), num_samples)
  total = sums[0].astype(np.float64)
  square = np.ldexp(sums[1].astype(np.float64), _GRID) + sums[2]
  spread = np.maximum(square - total * total / num_samples, 0.)
  return Scores(np.ldexp(total, -_GRID) / num_samples,
                np.ldexp(spread, -2 * _GRID) / max(num_samples - 1, 1),
                num_samples)


def _interval(votes, bound, level, side):
  """One-sided bounds of every class, float64 ``[B, C]``."""
  n = votes.num_samples
  if bound == 'clopper_pearson':
    return confidence.clopper_pearson(
        votes.counts, n, significance=level, side=side)
  mean, variance = (votes.mean, votes.variance) if isinstance(
      votes, Scores) else (votes.counts / n, None)
  if bound == 'hoeffding':
    return confidence.hoeffding(mean, n, significance=level, side=side)
  if variance is None:
    variance = mean * (1. - mean) * n / max(n - 1, 1)
  return confidence.empirical_bernstein(
      mean, variance, n, significance=level, side=side)


def _level(significance, correction, num_classes):
  """Significance of one one-sided bound, and what all of it covers."""
  if correction not in _CORRECTIONS:
    raise ValueError(f'correction={correction!r} must be one of '
                     f'{", ".join(_CORRECTIONS)}')
  if correction == 'two_stage':
    return significance / 2., significance
  if correction == 'bonferroni':
    return significance / (num_classes + 2), significance
  return significance / num_classes, significance * (1. + 2. / num_classes)


def _top(votes):
  """The class with most votes or the largest mean; ties to the lowest."""
  return np.argmax(votes[0], axis=-1).astype(np.int32)


def _check_bound(bound, score):
  """Returns the score that is bounded."""
  if bound not in _BOUNDS:
    raise ValueError(f'bound={bound!r} must be one of {", ".join(_BOUNDS)}')
  if score is None:
    score = 'softmax' if bound == 'empirical_bernstein' else 'vote'
  if score == 'softmax' and bound == 'clopper_pearson':
    raise ValueError("bound='clopper_pearson' counts votes and bounds no mean "
                     "of softmax scores; use score='vote' or bound='hoeffding'")
  return score


def _check_count(value, name, minimum):
  """Returns `value`, a Python int in [minimum, 2^31)."""
  is_whole = isinstance(value, (int, np.integer))
  if not is_whole or not minimum <= value < 2**31:
    raise ValueError(
        f'{name}={value!r} must be a whole number in [{minimum}, 2**31)')
  return int(value)


def _check_predict(predict_fn, x, score, per_image_keys):
  """Returns the number of classes; refuses what does not vote."""
  if score not in ('vote', 'softmax'):
    raise ValueError(f"score={score!r} must be 'vote' or 'softmax'")
  num = 1 if per_image_keys else len(x)
  example = jax.ShapeDtypeStruct(
      (num, *np.shape(x)[1:]), jnp.asarray(x[:1]).dtype)
  vote_key = jax.random.wrap_key_data(
      np.zeros(2, np.uint32), impl='threefry2x32')
  closed, out = jax.make_jaxpr(predict_fn, return_shape=True)(vote_key, example)
  shape = getattr(out, 'shape', None)
  if shape is None or len(shape) != 2 or shape[0] != num or shape[1] < 2:
    raise ValueError(f'predict_fn returns {out} for x of shape {example.shape};'
                     f' it must return logits [{num}, C] of C >= 2 classes')
  if score == 'softmax' and not jnp.issubdtype(out.dtype, jnp.floating):
    raise ValueError(f"predict_fn returns {out.dtype}; score='softmax' needs "
                     'real logits, labels or votes have none')
  if not any(_reached(closed.jaxpr, [True] + [False] * (
      len(closed.jaxpr.invars) - 1))):
    raise ValueError('predict_fn ignores its key: all votes would be one vote; '
                     'draw the noise inside it')
  return shape[1]


def _reached(jaxpr, flags):
  """Which outputs of a jaxpr may depend on the flagged inputs."""
  reached = {id(v) for v, flag in zip(jaxpr.invars, flags) if flag}
  for eqn in jaxpr.eqns:
    inputs = [id(v) in reached for v in eqn.invars]
    if not any(inputs):
      continue
    inner = getattr(eqn.params.get('jaxpr'), 'jaxpr', None)
    outputs = [True] * len(eqn.outvars)
    if eqn.primitive.name in ('jit', 'pjit') and inner is not None:
      outputs = _reached(inner, inputs)
    reached.update(id(v) for v, out in zip(eqn.outvars, outputs) if out)
  return [id(v) in reached for v in jaxpr.outvars]
