r"""Audits any function by trials: a valid lower bound on the epsilon it has.

For an event E fixed before the trials that test it are looked at,

.. math::
  \epsilon \ge \ln\frac{P(M(x) \in E) - \delta}{P(M(x') \in E)} ,

and the same with the two inputs exchanged and with the complement of E. Each
probability is replaced by its Clopper-Pearson limit, so ``epsilon_lower``
exceeds the true epsilon with probability at most ``significance``. It is never
infinite: ``ceiling`` is the most that so many trials can show.

>>> import jax
>>> from jaxdp import auditing, samplers
>>> def broken(key, x):  # noise for epsilon 1, calibrated with half the scale
...   return x + samplers.laplace(key, scale=.5)
>>> result = auditing.audit(broken, 0., 1., key=jax.random.key(0),
...                         num_trials=20_000, claim=1.)
>>> result.verdict, 1. < result.epsilon_lower < 2.
('violated', True)

An audit can show that a claim fails. It never shows that one holds.

References: Jagielski et al. (2020); Nasr et al. (2021) for the bounds;
Meinshausen, Meier & Buehlmann (2009) for the median of many splits.
"""

import dataclasses
from typing import Any, NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp.auditing import audit_settings
from jaxdp.auditing import bounds
from jaxdp.auditing import classifier
from jaxdp.auditing import events
from jaxdp.auditing import scores
from jaxdp.auditing import settings
from jaxdp.auditing import trials

SELECTIONS = audit_settings.SELECTIONS
_MOST_KEPT = 2**20  # scores of one input held in memory to choose an event
_MOST_TRAINED = 2**17  # trials of one input a classifier learns from
_MOST_FEATURES = 2**22  # outputs in all that it learns from
_LEAST_CHOSEN = 5_000
_GROUPS = 24  # parts that the splits of 'multisplit' are made of
_SPLITS = 15
_KEYS_TRIED = 16


class AuditResult(NamedTuple):
  """What an audit found. Numbers are Python floats and ints."""
  epsilon_lower: float  # valid bound, never infinite
  epsilon_point: float  # plug-in ratio of the event's frequencies; no bound
  ceiling: float  # the largest epsilon_lower so many trials can show
  delta: float
  significance: float  # probability that epsilon_lower is too high
  event: str  # 'score >= 0.5' or its complement
  direction: str  # the input under which the event is likelier
  hits: int  # trials on x that reached the threshold
  hits_prime: int  # the same on x_prime
  num_tested: int  # trials of each input that the bound rests on
  num_trials: int  # trials of each input in all
  score: str
  selection: str
  assumption: str  # 'none', or what vectorized=True takes for granted
  notes: tuple  # what a reader must know: NaNs, an ignored key
  claim: float | None = None  # epsilon that was claimed
  verdict: str | None = None  # 'violated', 'not violated'; None without a claim


def audit(fun, x, x_prime, *, key, num_trials, delta=0., significance=.05,
          score='identity', selection='split', thresholds=None,
          direction='either', claim=None, vectorized=False, num_devices=None,
          common_noise=False):
  """Bounds from below the epsilon of any function ``(key, x) -> pytree``.

  Guarantee: with probability at least ``1 - significance`` over ``key``,
  ``epsilon_lower`` is at most the true epsilon at ``delta`` of these two
  inputs, for ideal random bits; *proved* for each selection below.

  Args:
    fun: ``(key, x) -> pytree`` of real, integer or boolean arrays; pure. One
      that JAX cannot trace is called from Python, with a warning. Two calls
      with the same function and shapes compile once.
    x: the first input, a pytree of arrays.
    x_prime: the second, of the same structure, shapes and dtypes.
    key: typed key; consumed.
    num_trials: calls of ``fun`` on each input.
    delta: in [0, 1).
    significance: probability that the bound is too high, in [1e-12, 0.5).
    score: a name of ``scores.NAMES`` or a function ``y -> float`` of one
      output. The learnt ones take a third of the trials for learning.
    selection: how the event ``score >= threshold`` is chosen.
      'split': on a tenth of the trials (at least 5,000, at most half and
      2**20); the others test it. 'fixed': ``thresholds`` is one number,
      declared beforehand. 'bonferroni': ``thresholds`` are m numbers declared
      beforehand; each is tested at significance / m. 'multisplit': the median
      over 15 splits, each at significance / 2.
    thresholds: see ``selection``; 'fixed' with score 'majority' takes 1.
    direction: 'either', or 'x' or 'x_prime', declared beforehand, for the input
      under which the event is likelier. Split selections find it themselves.
    claim: epsilon > 0 that the result's verdict is about, or None.
    vectorized: ``fun`` is ``(key, x, num) -> pytree`` with ``num`` trials on
      the first axis, drawn from one key and independent of each other: the
      bound is valid only then, and ``assumption`` says so.
    num_devices: local devices to use; None for all.
    common_noise: whether trial i has the same key on both inputs, which draws
      the noise once for the two. As valid: each probability has its own bound,
      and the two fail together no more often than the sum of their chances.

  Returns:
    AuditResult.

  Raises:
    ValueError: inputs or outputs whose structures, shapes or dtypes differ; a
      setting out of range; too few trials for any bound above 0.
  """
  vectorized = settings.check_flag('vectorized', vectorized)
  whole = (lambda key, x, num, _: fun(key, x, num)) if vectorized else (
      lambda key, x, _: fun(key, x))
  wrapped = _cached(fun, vectorized, whole)
  return _audit(wrapped, x, x_prime, None, key=key, num_trials=num_trials,
                delta=delta, significance=significance, score=score,
                selection=selection, thresholds=thresholds,
                direction=direction, claims=[claim], vectorized=vectorized,
                num_devices=num_devices, common_noise=common_noise)[0]


def audit_sweep(fun, x, x_prime, parameters, *, key, num_trials, delta=0.,
                significance=.05, score='identity', selection='split',
                thresholds=None, direction='either', claims=None,
                vectorized=False, num_devices=None, common_noise=False):
  """Audits one function at many parameters with the same random numbers.

  The noise is drawn once and serves every parameter. Each bound is as valid as
  `audit`'s; together they are not independent.

  Args:
    fun: ``(key, x, parameter) -> pytree``; ``(key, x, num, parameter)`` with
      ``vectorized``.
    parameters: pytree whose leaves have a leading axis of P parameters.
    claims: P claimed epsilons, or None.
    x, x_prime, key, num_trials, delta, significance, selection, direction,
      vectorized, num_devices, common_noise: as for `audit`.
    score: as for `audit`, but not one that is learnt.
    thresholds: as for `audit`; shared by all parameters.

  Returns:
    List of P AuditResults.

  Raises:
    ValueError: as for `audit`; a learnt score; parameters of no common length.
  """
  settings.check_flag('vectorized', vectorized)
  audit_settings.check_parameters(parameters)
  sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(parameters)}
  if len(sizes) != 1 or sizes == {()}:
    raise ValueError('parameters must have leaves with one common leading axis,'
                     f' and have {sorted(sizes)}')
  if score in scores.LEARNT:
    raise ValueError(f'score={score!r} is learnt for one parameter; call audit '
                     'for each')
  num = sizes.pop()[0]
  claims = [None] * num if claims is None else list(
      claims if isinstance(claims, (list, tuple)) else np.atleast_1d(claims))
  if not num or len(claims) != num:
    raise ValueError(f'parameters holds {num} and claims {len(claims)}; give '
                     'one claim for each of at least one parameter')
  return _audit(fun, x, x_prime, parameters, key=key, num_trials=num_trials,
                delta=delta, significance=significance, score=score,
                selection=selection, thresholds=thresholds,
                direction=direction, claims=claims, vectorized=vectorized,
                num_devices=num_devices, common_noise=common_noise)


_WRAPPED = {}


def _cached(fun, vectorized, wrapped):
  """The same wrapper for the same function, so that it compiles once."""
  try:
    # Named tuples of two classes are equal when their fields are.
    known = _WRAPPED.setdefault((type(fun), fun, vectorized), wrapped)
  except TypeError:
    return wrapped
  while len(_WRAPPED) > 64:
    _WRAPPED.pop(next(iter(_WRAPPED)))
  return known


@dataclasses.dataclass(frozen=True)  # a tuple would equal other wrappers
class _Named:
  """A user's score of the output alone; hashable, so it compiles once."""
  function: Any
  program: str = ''

  def __call__(self, y, context):
    return self.function(y)


_FUNCTIONS = {
    'identity': scores.identity, 'linear': scores.linear,
    'majority': scores.majority, 'bits': scores.lowest_bit,
    'support': scores.support, 'classifier': classifier.log_odds}


class _Job(NamedTuple):
  """A checked audit: what to run, and which trials serve what."""
  run: trials.Runner
  key: Any
  inputs: tuple  # x, x_prime
  parameters: Any
  context: Any
  num_trials: int
  first: int  # trials before it were used to learn a score
  common_noise: bool

  def scores(self, start, num):
    return [self.run.scores(self.key, purpose, x, self.parameters, self.context,
                            start, num) for purpose, x in self._sides()]

  def counts(self, thresholds, start, num):
    if self.common_noise and not self.run.on_host:
      both = jax.tree.map(lambda *leaves: np.stack(leaves), *self.inputs)
      counts = self.run._replace(paired=True).count(
          self.key, samplers.TRIAL, both, self.parameters, self.context,
          np.concatenate([thresholds, thresholds]), start, num)
      return np.split(counts, 2)
    return [self.run.count(self.key, purpose, x, self.parameters, self.context,
                           thresholds, start, num)
            for purpose, x in self._sides()]

  def _sides(self):
    other = samplers.TRIAL if self.common_noise else samplers.TRIAL_PRIME
    return zip((samplers.TRIAL, other), self.inputs)


def _audit(fun, x, x_prime, parameters, *, key, num_trials, delta, significance,
           score, selection, thresholds, direction, claims, vectorized,
           num_devices, common_noise):
  audit_settings.check_settings(num_trials, delta, significance, score,
                                selection, thresholds, direction)
  claims = [audit_settings.check_claim(claim) for claim in claims]
  num_trials = int(num_trials)
  audit_settings.check_ceiling(num_trials, num_trials, delta, significance, 1,
                               1)
  settings.check_key(key)
  settings.check_flag('common_noise', common_noise)
  x, x_prime = audit_settings.check_inputs(x, x_prime)
  job = _prepare(fun, x, x_prime, parameters, key, num_trials, score,
                 vectorized, num_devices, common_noise)
  notes = _notes(job)
  if selection in ('fixed', 'bonferroni'):
    results = _declared(job, score, thresholds, delta, significance, direction)
  elif selection == 'split':
    results = _split(job, delta, significance)
  else:
    results = _multi_split(job, delta, significance)
  name = score if isinstance(score, str) else getattr(
      score, '__name__', type(score).__name__)
  return [AuditResult(
      **result, delta=float(delta), significance=float(significance),
      num_trials=num_trials, score=name, selection=selection,
      assumption=('the trials of one call are independent' if vectorized
                  else 'none'),
      notes=notes, claim=claim, verdict=_verdict(result, claim))
          for result, claim in zip(results, claims, strict=True)]


def _verdict(result, claim):
  if np.isnan(result['epsilon_lower']):  # no comparison would find it
    raise RuntimeError('epsilon_lower is NaN, and no verdict follows')
  if claim is None:
    return None
  return 'violated' if result['epsilon_lower'] > claim else 'not violated'


def _prepare(fun, x, x_prime, parameters, key, num_trials, score, vectorized,
             num_devices, common_noise):
  """Traces the function, learns the score where it is one that learns."""
  num_devices = len(jax.local_devices()) if num_devices is None else num_devices
  if not isinstance(num_devices, (int, np.integer)) or not (
      1 <= num_devices <= len(jax.local_devices())):
    raise ValueError(f'num_devices={num_devices!r} must lie in [1, '
                     f'{len(jax.local_devices())}]')
  function = _FUNCTIONS[score] if isinstance(score, str) else _Named(score)
  run = trials.runner(fun, function, x, x_prime, parameters=parameters,
                      vectorized=vectorized, num_devices=num_devices,
                      num_trials=num_trials)
  if not isinstance(score, str):
    run = run._replace(score=_Named(score, _score_program(run, x, parameters)))
  job = _Job(run, key, (x, x_prime), parameters, None, num_trials, 0,
             common_noise)
  if score == 'identity':
    size = sum(a.size for a in jax.tree.leaves(run.output(x, parameters)))
    if size != 1:
      raise ValueError(f"score='identity' needs one released number and fun "
                       f"returns {size}; use 'linear', 'classifier' or a "
                       'function of the output')
  if score == 'linear':
    return job._replace(context=scores.linear_context(
        x, x_prime, run.output(x, parameters)))
  return _learn(job, score) if score in scores.LEARNT else job


def _score_program(run, x, parameters):
  """What a user's score does, or ValueError where it cannot be one."""
  zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype),
                       run.output(x, parameters))
  try:
    return trials.program(lambda y: trials.Real(run.score)(y, None), zeros)
  except ValueError:
    raise
  except Exception as e:
    raise ValueError(f'score raises {type(e).__name__}'
                     f'{settings.where_raised(e)} on an output of fun; it must'
                     f' be y -> one number in jax.numpy: {e}') from e


def _learn(job, score):
  """Learns a score on the first third of the trials."""
  third = job.num_trials // 3
  block = job.run.block_size or 1
  third = -(-third // block) * block
  most = _MOST_KEPT
  if score == 'classifier':
    size = sum(a.size for a in jax.tree.leaves(
        job.run.output(job.inputs[0], None)))
    most = min(_MOST_TRAINED, max(2_000, _MOST_FEATURES // size))
  project = scores.fingerprint if score == 'support' else classifier.features
  seen = [job.run._replace(score=project).project(
      job.key, purpose, x, None, None, 0, min(third, most))[0]
          for purpose, x in job._sides()]
  context = (scores.support_context(*seen) if score == 'support'
             else classifier.train(job.key, *seen))
  return job._replace(context=context, first=third)


def _notes(job):
  """Warnings about a few trials: an ignored key, NaNs."""
  # Whole blocks of a vectorised function share a key: look at several blocks.
  block = job.run.block_size or 1
  run = job.run._replace(score=_Glance(job.run.score))
  seen = np.stack([run.project(
      job.key, purpose, x, job.parameters, job.context,
      -(-job.num_trials // block) * block, _KEYS_TRIED * block)
                   for purpose, x in job._sides()])  # [2, P, n, 3]
  inside = seen[..., 1].reshape(*seen.shape[:2], _KEYS_TRIED, block)
  seen = seen[:, :, ::block]
  no_score = np.isnan(np.ascontiguousarray(seen[..., 0]).view(np.float32))
  if (no_score | (seen[..., 2] > 0)).all(axis=(0, 2)).any():
    raise ValueError(f'fun or its score gave NaN for all {_KEYS_TRIED} keys '
                     'tried on both inputs; nothing can be audited')
  notes, alike = [], (seen[..., 1] == seen[:, :, :1, 1]).all() and not (
      no_score.any() or seen[..., 2].any())
  if alike:
    notes.append(f'fun gave one output for {_KEYS_TRIED} keys: it may ignore '
                 'its key')
  elif block > 1 and (inside == inside[..., :1]).all():
    raise ValueError('fun gives the same output for all trials of one call; '
                     'with vectorized=True each of the num trials needs noise '
                     'of its own')
  if no_score.any():
    notes.append('some outputs have a NaN score; it counts as below every '
                 'threshold')
  for note in notes:
    warnings.warn(note, UserWarning, stacklevel=4)
  return tuple(notes)


@dataclasses.dataclass(frozen=True)
class _Glance:
  """Bits of a score and of its output, and whether all is NaN; uint32 [3]."""
  score: Any

  def __call__(self, y, context):
    score = trials.Real(self.score)(y, context)
    bits = jax.lax.bitcast_convert_type(score, jnp.uint32)
    empty = jnp.isnan(scores.flatten(y)).all().astype(jnp.uint32)
    return jnp.stack([bits, scores.fingerprint(y), empty])


# --- Selections


def _declared(job, score, thresholds, delta, significance, direction):
  """Events declared beforehand: one, or m at significance / m each."""
  if thresholds is None:
    thresholds = 1.
  declared = np.atleast_1d(np.asarray(thresholds, np.float32))
  num_events = declared.size
  num = job.num_trials - job.first
  audit_settings.check_ceiling(
      job.num_trials, num, delta, significance, num_events,
      2 if direction == 'either' else 1)
  many = np.tile(declared, (_num_parameters(job), 1))
  hits, hits_prime = job.counts(many, job.first, num)
  return [_best(declared, h, hp, num, delta, significance, num_events,
                direction)
          for h, hp in zip(hits, hits_prime)]


def _split(job, delta, significance):
  """An event chosen on some trials, tested on the others."""
  num_chosen, num = _parts(job)
  audit_settings.check_ceiling(job.num_trials, num, delta, significance, 1, 1)
  chosen = [events.choose(s, sp, num, delta, significance)
            for s, sp in zip(*job.scores(job.first, num_chosen))]
  many = np.float32([[threshold] for threshold, _ in chosen])
  counts = job.counts(many, job.first + num_chosen, num)
  return [_best(many[i], counts[0][i], counts[1][i], num, delta, significance,
                1, direction) for i, (_, direction) in enumerate(chosen)]


def _multi_split(job, delta, significance):
  """The median of bounds over random halves of groups of trials."""
  num_chosen, rest = _parts(job)
  block = job.run.block_size or 1
  size = rest // _GROUPS // block * block
  half = _GROUPS // 2 * size
  if not size:
    raise ValueError(f'num_trials={job.num_trials} is too small for '
                     f"selection='multisplit'; use at least "
                     f'{2 * _GROUPS * max(block, 100)}')
  # Half of the significance each: as for two events.
  audit_settings.check_ceiling(job.num_trials, half, delta, significance, 2, 1)
  looked = np.stack([
      events.candidates(np.concatenate([s, sp]))
      for s, sp in zip(*job.scores(job.first, num_chosen))])
  start = job.first + num_chosen
  groups = np.stack([job.counts(looked, start + g * size, size)
                     for g in range(_GROUPS)])  # [G, 2, P, m]
  rng = np.random.default_rng(np.asarray(
      jax.random.key_data(jax.random.fold_in(job.key, samplers.SPLIT))).ravel())
  halves = [rng.permutation(_GROUPS) for _ in range(_SPLITS)]
  return [_median(groups[:, :, p], looked[p], halves, half, delta, significance)
          for p in range(_num_parameters(job))]


def _median(groups, looked, halves, half, delta, significance):
  """The result of the split whose bound is the median; one parameter."""
  results = []
  for order in halves:
    mine, theirs = order[:_GROUPS // 2], order[_GROUPS // 2:]
    i, direction = events.choose_counts(
        *groups[mine].sum(axis=0), half, half, delta, significance / 2)
    hits, hits_prime = groups[theirs].sum(axis=0)[:, i]
    results.append(_best(looked[i:i + 1], hits[None], hits_prime[None], half,
                         delta, significance, 2, direction))
  results.sort(key=lambda r: r['epsilon_lower'])
  return results[len(results) // 2]


def _parts(job):
  """How many trials choose the event and how many test it."""
  num = job.num_trials - job.first
  num_chosen = min(max(num // 10, _LEAST_CHOSEN), num // 2, _MOST_KEPT)
  block = job.run.block_size or 1
  num_chosen = -(-num_chosen // block) * block
  return num_chosen, num - num_chosen


def _best(thresholds, hits, hits_prime, num, delta, significance, num_events,
          direction):
  """The fields of a result: the event with the highest bound."""
  bound = bounds.epsilon_lower_bound(
      hits, hits_prime, num, num, delta=delta, significance=significance,
      num_events=num_events, direction=direction)
  lower = np.atleast_1d(bound.epsilon_lower)
  i = int(np.argmax(lower))
  hit = np.atleast_1d(bound.event)[i] == 'hit'
  likelier = str(np.atleast_1d(bound.direction)[i])
  if not hit:  # the bound speaks of the hits, the result of its event
    likelier = 'x_prime' if likelier == 'x' else 'x'
  return dict(
      epsilon_lower=float(lower[i]),
      epsilon_point=float(bounds.epsilon_point(
          int(hits[i]), int(hits_prime[i]), num, num, delta=delta)),
      ceiling=float(bounds.epsilon_ceiling(
          num, delta=delta, significance=significance, num_events=num_events,
          num_directions=2 if direction == 'either' else 1)),
      event=f'score {">=" if hit else "not >="} {thresholds[i]:.9g}',
      direction=likelier, hits=int(hits[i]), hits_prime=int(hits_prime[i]),
      num_tested=int(num))


def _num_parameters(job):
  if job.parameters is None:
    return 1
  return len(jax.tree.leaves(job.parameters)[0])
