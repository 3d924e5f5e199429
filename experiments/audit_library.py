r"""Every mechanism of the library: its claim beside its audit, in one table.

  python -m experiments.audit_library --out=results/audit_library --quick

A word mechanism whose law can be written out is audited *exactly* on a small
table: the epsilon it has there is a number. One without a law is run many times
on a few pairs of words (the closest, the farthest, a random one), which gives a
*lower bound* at the stated significance, shared among the pairs. Mechanisms on
numbers are audited from their integer masses, or by trials; so are the
releases of the training modes (`experiments.audit_training`).

*not violated* means on this table, with so many runs, and is no proof; a proof
is what the status *proved* names, and a violation of one is a defect of this
library. One to two minutes on two cores with ``--quick``.
"""

import dataclasses
import functools
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import audit_training
from experiments import command_line
from experiments import habernal22_adept
from experiments import report
from experiments import xu20_theorem1
from jaxdp import auditing
from jaxdp import embeddings
from jaxdp import mechanisms
from jaxdp import neighbors
from jaxdp.mechanisms import numeric

KEY = ('mechanism', 'settings', 'table')
_TABLE, _LINE = 'gaussian-60-4', 'line-30'


class Case(NamedTuple):
  """One audit: what is calibrated, on which table, and how it is measured."""
  mechanism: str
  settings: dict
  table: str
  epsilon: float | None  # None: just above the bound of Gumbel noise
  how: str  # 'law', 'runs', 'masses', 'trials' or 'training'


_WORDS = [
    *[Case('truncated_gumbel', {'noise': noise}, _TABLE, None, 'law')
      for noise in ('truncated', 'clipped', 'untruncated')],
    *[Case('gumbel_exponential', {'num_candidates': k}, _TABLE, None, 'law')
      for k in ('poisson', 'all')],
    Case('tem', {}, _TABLE, 2., 'law'), Case('santext', {}, _TABLE, 2., 'law'),
    Case('santext', {'sensitive': .5}, _TABLE, 2., 'law'),
    Case('custext', {'group_size': 6}, _TABLE, 2., 'law'),
    Case('custext', {'group_size': 6, 'stop_words': 10}, _TABLE, 2., 'law'),
    Case('multivariate_laplace', {}, _LINE, 5., 'law'),
    Case('mahalanobis', {}, _LINE, 5., 'law'),
    Case('vickrey', {'tuning': .5}, _LINE, 5., 'law'),
    Case('syntax', {}, _LINE, 5., 'law'),
    Case('hyperbolic', {}, 'ball-30-1', 4., 'law'),
    Case('vmf', {}, 'gaussian-30-2', 3., 'law'),
    Case('multivariate_laplace', {}, _TABLE, 2., 'runs'),
    Case('mahalanobis', {'mixing': .5}, _TABLE, 2., 'runs'),
    Case('vickrey', {'tuning': .5}, _TABLE, 2., 'runs'),
    Case('hyperbolic', {}, 'ball-60-3', 4., 'runs'),
    Case('syntax', {}, _TABLE, 2., 'runs'),
    Case('vmf', {}, _TABLE, 3., 'runs'),
]
_NUMBERS = [
    Case('grid_laplace', {'grid': 2.**-8}, 'inputs in [-10, 10]', 1., 'masses'),
    Case('grid_laplace', {'grid': 2.**-8, 'score': 'bits'}, '0 and 1', 1.,
         'trials'),
    Case('grid_laplace', {'grid': 2.**-8, 'score': 'support'}, '0 and 1', 1.,
         'trials'),
    Case('grid_exponential', {'candidates': 20}, '30 inputs', 1., 'masses'),
    Case('randomized_response', {'categories': 5}, '5 values', 1., 'masses'),
]
FIGURES = (report.Figure(
    title='Every mechanism: claimed and measured epsilon', image='library.png',
    mechanisms=tuple(dict.fromkeys(
        case.mechanism for case in [*_WORDS, *_NUMBERS]))
    + habernal22_adept.FORMS + audit_training.MODES,
    paper='Habernal (2022): "It is impossible to empirically verify that a '
          'given DP-mechanism implementation is actually DP (Ding et al. '
          '2018). However, it is possible to detect a DP-violating mechanism '
          'with a fair degree of certainty."'),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows.

  Attributes:
    seed: of tables and runs.
    num_runs: runs of a mechanism without a law, on each word of a pair.
    num_trials: runs of a mechanism on numbers, on each input.
    significance: probability that one row's bound is too high.
  """
  seed: int = 1
  num_runs: int = 2_000_000
  num_trials: int = 10_000_000
  significance: float = .01


QUICK = Config(num_runs=60_000, num_trials=1_000_000)


def grid(config):
  """Returns the cases of all rows, in order."""
  del config
  adept = [Case(form, {'n': 16}, '16 dimensions', 1., 'trials')
           for form in habernal22_adept.FORMS]
  training = [Case(mode, {}, audit_training.TABLE, 1., 'training')
              for mode in audit_training.MODES]
  return [*_WORDS, *_NUMBERS, *adept, *training]


def run(config, done=frozenset()):
  """Yields one row a case; those whose `KEY` is in ``done`` are skipped."""
  for case in grid(config):
    if (case.mechanism, tuple(case.settings.items()), case.table) not in done:
      yield {'mechanism': case.mechanism, 'settings': case.settings,
             'table': case.table, **_AUDITS[case.how](config, case)}


@functools.lru_cache
def make_table(name, seed):
  """A table of `xu20_theorem1`, or 'ball-V-D' inside the unit ball."""
  if not name.startswith('ball'):
    return xu20_theorem1.make_table(name, seed)
  table = xu20_theorem1.make_table(name.replace('ball', 'gaussian'), seed)
  norm = np.linalg.norm(table.vectors, axis=1, keepdims=True)
  return embeddings.make_table(table.words, .9 * table.vectors / (1 + norm))


def _calibrated(config, case):
  """(mechanism, its params, the table, epsilon) of a case."""
  table = make_table(case.table, config.seed)
  epsilon, settings = case.epsilon, dict(case.settings)
  if epsilon is None:
    minimum, _ = neighbors.distance_range(table.vectors)
    epsilon = 1.01 * (5 + 2 * math.log(len(table.words))) / minimum
  if case.mechanism == 'syntax':
    settings['classes'] = np.arange(len(table.words)) % 3
  mechanism = mechanisms.get(case.mechanism)
  return mechanism, mechanism.calibrate(table, epsilon=epsilon,
                                        **settings), table, epsilon


def _law(config, case):
  """The exact epsilon of a law on a small table."""
  mechanism, params, table, epsilon = _calibrated(config, case)
  return {'epsilon': epsilon} | xu20_theorem1.audit_params(
      mechanism, params, table)


def _runs(config, case):
  """A lower bound from many runs on a few pairs of words."""
  mechanism, params, table, epsilon = _calibrated(config, case)
  ids = np.arange(len(table.words), dtype=np.int32)
  distances = np.asarray(mechanism.distances(ids, params))
  pairs = _pairs(distances, config.seed)
  best = None
  for number, (w, w_prime) in enumerate(pairs):
    key = jax.random.fold_in(jax.random.key(config.seed), number)
    outputs = [np.asarray(mechanism.privatize(
        jax.random.fold_in(key, side), np.full(config.num_runs, word, np.int32),
        params)) for side, word in enumerate((w, w_prime))]
    found = auditing.sampled_epsilon_lower_bound(
        *outputs, distances[w, w_prime], num_outcomes=len(table.words),
        significance=config.significance / len(pairs))
    if best is None or found.epsilon_lower > best[0].epsilon_lower:
      best = found, (w, w_prime)
  found, (w, w_prime) = best
  return {'epsilon': epsilon, **_verdict(
      params.guarantee, found.epsilon_lower, 'lower bound',
      ceiling=found.ceiling, num_trials=config.num_runs,
      significance=config.significance,
      witness=[table.words[i] for i in (w, w_prime, *found.outcomes[:1])])}


def _pairs(distances, seed):
  """The closest, the farthest and a random comparable pair."""
  rows, columns = np.nonzero(np.triu(np.isfinite(distances), 1))
  order = np.argsort(distances[rows, columns], kind='stable')
  middle = order[np.random.default_rng(seed).integers(len(order))]
  return [(int(rows[i]), int(columns[i]))
          for i in (order[0], order[-1], middle)]


def _masses(config, case):
  """The exact log-ratio of integer masses, recomputed from the law."""
  if case.mechanism == 'grid_laplace':
    return _grid_masses(case)
  params, log_probs, distances = _number_law(config, case)
  measured, (x, x_prime, y) = auditing.exact_metric_epsilon(
      _square(log_probs), distances)
  # float64 logs of masses of at least 2**10: a few ulp each.
  slack = 8 * np.finfo(np.float64).eps * 64 / distances[x, x_prime]
  return {'epsilon': case.epsilon, **_verdict(
      params.guarantee, float(measured), 'exact', slack=slack,
      witness=[str(x), str(x_prime), str(y)])}


def _grid_masses(case):
  """All neighbouring inputs over all outputs; a longer distance is a path."""
  step = case.settings['grid']
  params = numeric.calibrate_grid_laplace(
      scale=1 / case.epsilon, grid=step, low=-10., high=10.)
  inputs = np.arange(-10., 10. + step / 2, step, dtype=np.float32)
  worst = (-1., 0, 0)
  for start in range(0, len(inputs) - 1, 256):
    log_probs = params.log_prob(inputs[start:start + 257])
    gap = np.abs(np.diff(log_probs, axis=0))
    row, y = np.unravel_index(np.argmax(gap), gap.shape)
    worst = max(worst, (float(gap[row, y]) / step, start + int(row), int(y)))
  measured, row, y = worst
  # Two float64 logarithms below 64 in size, a few ulp each.
  slack = 8 * np.finfo(np.float64).eps * 64 / step
  return {'epsilon': case.epsilon, **_verdict(
      params.guarantee, measured, 'exact', slack=slack, witness=[
          str(inputs[row]), str(inputs[row + 1]), str(params.outputs[y])])}


def _number_law(config, case):
  """(params, log-probabilities, distances) of a mechanism on numbers."""
  if case.mechanism == 'grid_exponential':
    scores = np.random.default_rng(config.seed).uniform(
        size=(30, case.settings['candidates']))
    params = numeric.calibrate_grid_exponential(
        scores, epsilon=case.epsilon, sensitivity=1.)
    log_probs = params.log_prob(np.arange(30))
  else:
    params = numeric.calibrate_randomized_response(
        num_categories=case.settings['categories'], epsilon=case.epsilon)
    log_probs = params.log_prob(np.arange(case.settings['categories']))
  return params, log_probs, 1. - np.eye(len(log_probs))


def _square(log_probs):
  """As many columns as rows: impossible outputs added."""
  rows, columns = log_probs.shape
  return np.pad(log_probs, ((0, 0), (0, rows - columns)),
                constant_values=-np.inf)


def _trials(config, case):
  """A lower bound by trials on two inputs."""
  if case.mechanism in habernal22_adept.FORMS:
    adept = habernal22_adept.Config(
        seed=config.seed, num_trials=config.num_trials // 10,
        significance=config.significance)
    return habernal22_adept.row(adept, case.mechanism, case.epsilon,
                                case.settings['n']) | {'table': case.table}
  params = numeric.calibrate_grid_laplace(
      scale=1 / case.epsilon, grid=case.settings['grid'], low=-10., high=10.)
  result = auditing.audit(
      functools.partial(_grid_laplace, params=params._replace(guarantee=None)),
      np.float32(0), np.float32(1), key=jax.random.key(config.seed),
      num_trials=config.num_trials, significance=config.significance,
      score=case.settings['score'])
  return {'epsilon': case.epsilon, **_verdict(
      params.guarantee, result.epsilon_lower, 'lower bound',
      ceiling=result.ceiling, num_trials=result.num_trials,
      significance=config.significance, witness=['0', '1', result.event])}


def _grid_laplace(key, x, params):
  return numeric.grid_laplace(key, jnp.asarray(x), params)


def _training(config, case):
  """A lower bound by trials of what a training mode releases."""
  promise, measured, ceiling, num_trials, witness = audit_training.row(
      case.mechanism, case.epsilon, seed=config.seed,
      num_trials=config.num_trials // 10, significance=config.significance)
  return {'epsilon': case.epsilon, **_verdict(
      promise, measured, 'lower bound', ceiling=ceiling,
      num_trials=num_trials, significance=config.significance,
      witness=witness)}


def _verdict(promise, measured, kind, *, slack=0., **fields):
  """Claim, measurement and verdict of one row."""
  claim = report.guarantee_fields(promise)
  violated = measured - slack > claim['claimed_epsilon']
  return claim | fields | {
      'measured': measured, 'measured_kind': kind,
      'ratio': measured / claim['claimed_epsilon'],
      'verdict': 'violated' if violated else 'not violated'}


_AUDITS: dict[str, Any] = {'law': _law, 'runs': _runs, 'masses': _masses,
                           'trials': _trials, 'training': _training}


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for status in dict.fromkeys(row['status'] for row in rows):
    mine = [row for row in rows if row['status'] == status]
    violated = [row for row in mine if row['verdict'] == 'violated']
    worst = max(mine, key=lambda row: row['ratio'])
    names = ', '.join(xu20_theorem1.label(row) for row in violated) or 'none'
    out.append(f'{status}: {len(violated)} of {len(mine)} audits violated '
               f'({names}); largest ratio of measured to claimed '
               f'{worst["ratio"]:.4g}, {xu20_theorem1.label(worst)}.')
  return out


def draw(rows, out):
  """Draws the figure into a directory."""
  xu20_theorem1.plot(rows, f'{out}/{FIGURES[0].image}')


def execute(config, out):
  """Rows and figure, into a directory; returns the rows."""
  rows = command_line.collect(sys.modules[__name__], config, out)
  draw(rows, out)
  return rows


if __name__ == '__main__':
  command_line.main(sys.modules[__name__], 'audit_library')
