r"""Theorem 1 of Xu et al. (2020), audited exactly.

  python -m experiments.xu20_theorem1 --out=results/xu20_theorem1 --quick

Theorem 1 says that the truncated Gumbel mechanism is epsilon-metric-DP. On
tables small enough for the whole output law, the epsilon a mechanism really has
is a number:

.. math::
  \epsilon^* = \max_{w \ne w', u}
      \frac{|\ln P(u | w) - \ln P(u | w')|}{d(w, w')} .

A row compares it with the claim of ``params.guarantee``. The verdict is
*violated* where epsilon* less its numerical error is above the claim, and *not
violated* otherwise: on this table, which is no proof for another one.

The paper reads three ways (truncated, clipped, untruncated noise); beside them
stand the provable variant and the other word mechanisms whose law is known.
Just above its lower bound, (5 + 2 ln V) / Delta_0, the clipped reading exceeds
its claim 2.6 times on 100 Gaussian words (``--quick``, half a minute on two
cores). The excess grows with the vocabulary: on 300 such words it is 6.75 times
in the clipped reading, and the truncated one, which kept its claim on 100,
exceeds it 1.70 times. The full form goes on to larger tables (an hour and
more). At large epsilon the claim is loose by many orders of magnitude.
"""

import dataclasses
import functools
import math
import sys

import numpy as np

from experiments import command_line
from experiments import report
from experiments.datasets import embedded
from jaxdp import auditing
from jaxdp import embeddings
from jaxdp import mechanisms
from jaxdp import neighbors


KEY = ('table', 'mechanism', 'settings', 'epsilon')
FIGURES = (report.Figure(
    title='Theorem 1: claimed and exact epsilon', image='theorem1.png',
    mechanisms=('truncated_gumbel', 'gumbel_exponential', 'tem', 'santext',
                'multivariate_laplace'),
    paper='"we propose a novel truncated Gumbel mechanism, which formally '
          'satisfies metric DP (see Appendix A)"'),)
# Log-probabilities of the laws are good to about 1e-11 of max(1, |log p|).
_LOG_ERROR = 1e-9
_GUMBEL = [('truncated_gumbel', {'noise': noise})
           for noise in ('truncated', 'clipped', 'untruncated')]
_PROVABLE = [('gumbel_exponential', {'num_candidates': 'poisson'}),
             ('gumbel_exponential', {'num_candidates': 'all'}),
             ('tem', {}), ('santext', {})]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows.

  Attributes:
    seed: of the generated tables; 1 is the table of the README's numbers.
    tables: names of `make_table`: kind-words, or kind-words-dimensions.
    factors: epsilons in units of the paper's lower bound of the table.
    log_epsilons: further epsilons, as their logarithm.
    line_epsilons: epsilons of ``multivariate_laplace`` on 'line-...' tables.
  """
  seed: int = 1
  tables: tuple[str, ...] = (
      'gaussian-30-50', 'gaussian-100-50', 'uniform-30-2', 'embedded-100',
      'line-30', 'gaussian-300-50')
  factors: tuple[float, ...] = (1.01, 2., 10.)
  log_epsilons: tuple[float, ...] = (20.,)
  line_epsilons: tuple[float, ...] = (.5, 2., 10.)


QUICK = Config(tables=('gaussian-100-50', 'uniform-30-2', 'embedded-100',
                       'line-30'),
               factors=(1.01,), log_epsilons=(), line_epsilons=(2.,))


def make_table(name, seed):
  """Builds one of the toy tables.

  Args:
    name: 'gaussian-V-D', 'uniform-V-D', 'line-V' (one dimension) or
      'embedded-V', the V most frequent of the embedded words.
    seed: of the generated ones.

  Returns:
    An ``EmbeddingTable``.

  Raises:
    ValueError: another name.
  """
  kind, *sizes = name.split('-')
  sizes = tuple(map(int, sizes))
  rng = np.random.default_rng(seed)
  if kind == 'embedded':
    return embeddings.subset(embedded.table(), range(*sizes))
  if kind not in ('gaussian', 'uniform', 'line'):
    raise ValueError(f'name={name!r} must begin with gaussian, uniform, line '
                     'or embedded')
  shape = sizes if len(sizes) == 2 else (*sizes, 1)
  vectors = rng.normal(size=shape) if kind == 'gaussian' else rng.uniform(
      size=shape)
  return embeddings.make_table([f'w{i}' for i in range(len(vectors))], vectors)


def grid(config):
  """Returns (table, mechanism, settings, epsilon) of every row, in order."""
  points = []
  for name in config.tables:
    if name.startswith('line'):
      points += [(name, 'multivariate_laplace', {}, epsilon)
                 for epsilon in config.line_epsilons]
      continue
    bound = _paper_bound(name, config.seed)
    epsilons = [bound * factor for factor in config.factors]
    epsilons += [math.exp(x) for x in config.log_epsilons
                 if math.exp(x) > bound]
    points += [(name, mechanism, settings, epsilon) for epsilon in epsilons
               for mechanism, settings in _GUMBEL + _PROVABLE]
  return points


@functools.lru_cache
def _paper_bound(name, seed):
  """(5 + 2 ln V) / Delta_0: the noise scale is positive above it."""
  vectors = make_table(name, seed).vectors
  minimum, _ = neighbors.distance_range(vectors)
  return (5 + 2 * math.log(len(vectors))) / minimum


def run(config, done=frozenset()):
  """Yields one row an audit; those whose `KEY` is in ``done`` are skipped."""
  for name, mechanism, settings, epsilon in grid(config):
    if (name, mechanism, tuple(settings.items()), epsilon) not in done:
      yield {'table': name, 'mechanism': mechanism, 'settings': settings,
             'epsilon': epsilon, 'log_epsilon': math.log(epsilon),
             **audit(make_table(name, config.seed), mechanism, settings,
                     epsilon)}


def audit(table, mechanism_name, settings, epsilon):
  """Claim, exact epsilon, its witness and the verdict, on one table.

  Args:
    table: an ``EmbeddingTable`` whose laws are within reach.
    mechanism_name: a name of ``mechanisms.names()``.
    settings: further arguments of its ``calibrate``.
    epsilon: budget per unit distance.

  Returns:
    A dict of row fields.
  """
  mechanism = mechanisms.get(mechanism_name)
  return audit_params(mechanism, mechanism.calibrate(
      table, epsilon=epsilon, **settings), table)


def audit_params(mechanism, params, table):
  """As `audit`, of a mechanism that is calibrated already."""
  ids = np.arange(len(table.words), dtype=np.int32)
  log_probs = mechanism.log_prob(ids, params)
  distances = mechanism.distances(ids, params)
  measured, (w, w_prime, u) = auditing.exact_metric_epsilon(
      log_probs, distances)
  claim = report.guarantee_fields(params.guarantee)
  low = measured - _error(log_probs, distances, w, w_prime, u)
  return claim | {
      'measured': float(measured), 'measured_low': float(low),
      'measured_kind': 'exact', 'ratio': measured / claim['claimed_epsilon'],
      'witness': [table.words[i] for i in (w, w_prime, u)],
      'verdict': ('violated' if low > claim['claimed_epsilon']
                  else 'not violated'),
      'vocabulary': len(table.words), 'dimension': table.vectors.shape[1]}


def _error(log_probs, distances, w, w_prime, u):
  """What the witness's log-ratio may be off, per unit distance."""
  pair = np.abs([log_probs[w, u], log_probs[w_prime, u]])
  if not np.isfinite(pair).all():
    return 0.  # one of the two never draws u: no rounding makes that finite
  return _LOG_ERROR * np.maximum(pair, 1.).sum() / distances[w, w_prime]


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for verdict in dict.fromkeys(row['verdict'] for row in rows):
    mine = [row for row in rows if row['verdict'] == verdict]
    worst = max(mine, key=lambda row: row['ratio'])
    out.append(
        f'{verdict}: {len(mine)} of {len(rows)} audits; the largest ratio of '
        f'measured to claimed epsilon is {worst["ratio"]:.4g}, '
        f'{label(worst)} on {worst["table"]}, claimed '
        f'{worst["claimed_epsilon"]:.4g}, measured {worst["measured"]:.4g} '
        f'({worst["measured_kind"]}).')
  return out


def label(row):
  """'truncated_gumbel, noise=clipped' of a row."""
  return ', '.join([row['mechanism']] + [
      f'{k}={v}' for k, v in row.get('settings', {}).items()])


def plot(rows, path):
  """Draws one PNG: measured over claimed epsilon of every audit."""
  from matplotlib.figure import Figure
  canvas = Figure(figsize=(7, 1 + .26 * len(rows)), layout='constrained')
  axis = canvas.subplots()
  names = [f'{label(row)}\n{row["table"]}, claimed {row["claimed_epsilon"]:.3g}'
           for row in rows]
  verdicts = list(dict.fromkeys(row['verdict'] for row in rows))
  for i, verdict in enumerate(verdicts):
    at = [j for j, row in enumerate(rows) if row['verdict'] == verdict]
    axis.scatter([rows[j]['ratio'] for j in at], at, s=16, label=verdict,
                 marker='os'[i % 2])
  axis.axvline(1., color='k', lw=.8)
  axis.set(xscale='log', xlabel='measured epsilon / claimed epsilon')
  axis.set_yticks(range(len(rows)), names, fontsize=6)
  axis.invert_yaxis()
  axis.grid(alpha=.3)
  axis.legend(fontsize='small')
  canvas.savefig(path, dpi=130)


def draw(rows, out):
  """Draws the figure into a directory."""
  plot(rows, f'{out}/{FIGURES[0].image}')


def execute(config, out):
  """Rows and figure, into a directory; returns the rows."""
  rows = command_line.collect(sys.modules[__name__], config, out)
  draw(rows, out)
  return rows


if __name__ == '__main__':
  command_line.main(sys.modules[__name__], 'xu20_theorem1')
