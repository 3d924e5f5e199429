r"""Figure 1 of Xu et al. (2020): N_w and S_w against the budget.

  python -m experiments.xu20_fig1 --out=results/xu20_fig1 --quick

For each word of a table: N_w, how often the mechanism returns the word itself,
and S_w, how many distinct words it returns (the word itself counted), over
1,000 runs. The curve is the mean over words, the shadow one standard deviation.
Rows hold fractions of ``num_runs``; the plots, as the paper's, show counts.

* Figure 1a, 1b: ``multivariate_laplace`` against epsilon, on a seeded sample of
  words, as each draw searches the whole vocabulary.
* Figure 1c, 1d: ``truncated_gumbel`` against log epsilon, from just above
  (5 + 2 ln V) / Delta_0, where its noise scale is first defined. Beside it
  ``gumbel_exponential``, at the same epsilons and near its own, lower bound.

The paper has two vocabularies (IMDB, SNLI) of 300-dimensional GloVe. Here: the
27,958 words x 50 dimensions that come with the code, raw and scaled to length
one. Numbers differ with the table; the shapes are what is compared. What was
measured stands in the README, and in the report that `experiments.reproduce`
writes.

The paper does not say how its vectors were scaled: N_w moves over its epsilons
for vectors of length one. ``--quick`` takes fewer grid points and samples of
words for all mechanisms (a row's ``num_words`` says how many) and two to three
minutes on two cores; the full form takes hours there.
"""

import dataclasses
import functools
import math
import os
import sys
import zlib

import jax
import numpy as np

from experiments import command_line
from experiments import report
from experiments.datasets import embedded
from jaxdp import deniability
from jaxdp import embeddings
from jaxdp import mechanisms
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import candidates

LAPLACE, GUMBEL = 'multivariate_laplace', 'truncated_gumbel'
SOUND = 'gumbel_exponential'
KEY = ('table', 'mechanism', 'epsilon')
_STATISTICS = {'support': 'S_w', 'unchanged': 'N_w'}
COLORS = {LAPLACE: 'tab:blue', GUMBEL: 'tab:red', SOUND: 'tab:green'}

FIGURES = (
    report.Figure(
        title='Figures 1a and 1b: multivariate Laplace',
        image='fig1_multivariate_laplace.png', mechanisms=(LAPLACE,),
        paper='"the number of distinct substitutions S_w decreases [...] while '
              'the times of maintaining the original word N_w shows the '
              'opposite trend"; N_w moves from 0 to 1,000 over epsilon 50 to '
              '200'),
    report.Figure(
        title='Figures 1c and 1d: truncated Gumbel, and the provable variant',
        image='fig1_truncated_gumbel.png', mechanisms=(GUMBEL, SOUND),
        paper='"minor increase or decrease in epsilon does not influence word '
              'substitutions produced by truncated Gumbel"; the most distinct '
              'substitutions of one word are around 20 on IMDB and 17.5 on '
              'SNLI; N_w rises from about 400 to 1,000'),
    report.Figure(
        title='The provable variant near its own lower bound',
        image='fig1_gumbel_exponential.png', mechanisms=(SOUND,),
        paper='not in the paper: above, this curve is a line at the left edge'),
)
# How far above its lower bound the provable variant is drawn on its own.
_NEAR_BOUND = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows.

  Attributes:
    seed: of the words sampled and of all draws.
    num_runs: draws a word; the paper has 1,000.
    tables: 'raw' and 'unit', the embedded words as they are and at length one.
    vocabulary: the first so many words of the table; 0 for all.
    laplace_words: words sampled for ``multivariate_laplace``; 0 for all.
    gumbel_words: words sampled for the others; 0 for all.
    raw_epsilons: grid of ``multivariate_laplace`` on 'raw'.
    unit_epsilons: grid of ``multivariate_laplace`` on 'unit'.
    log_epsilons: grid of ``truncated_gumbel``, cut at its lower bound.
    rates: ``gumbel_exponential`` is added at its own lower bound plus these.
  """
  seed: int = 0
  num_runs: int = 1_000
  tables: tuple[str, ...] = ('raw', 'unit')
  vocabulary: int = 0
  laplace_words: int = 1_000
  gumbel_words: int = 0
  raw_epsilons: tuple[float, ...] = (
      1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 12., 14., 16., 20., 30., 40.)
  unit_epsilons: tuple[float, ...] = (
      5., 10., 15., 20., 25., 30., 35., 40., 45., 50., 60., 70., 80., 100.,
      150., 200.)
  log_epsilons: tuple[float, ...] = (
      4.5, 5., 6., 7., 8., 9., 10., 12., 14., 17., 20., 25., 30., 40., 50.,
      60., 70., 80.)
  rates: tuple[float, ...] = (.1, .3, .6, 1., 1.5, 2., 3., 5., 8., 20.)


QUICK = Config(
    laplace_words=100, gumbel_words=300, raw_epsilons=(2., 5., 8., 12., 20.),
    unit_epsilons=(10., 25., 40., 60., 100.),
    log_epsilons=(5., 6., 10., 20., 40., 80.), rates=(.3, 1., 2., 5., 8., 14.))


# --- Rows


def run(config, done=frozenset()):
  """Yields one row a grid point; those whose `KEY` is in ``done`` are skipped.

  Args:
    config: the Config.
    done: set of tuples of the fields `KEY`, as `records.Records.done` returns.
  """
  for table_name, mechanism_name, epsilon in grid(config):
    if (table_name, mechanism_name, epsilon) not in done:
      yield _measure(config, table_name, mechanism_name, epsilon)


def grid(config):
  """Returns the grid points, tuples of the fields `KEY`, in order."""
  points = []
  for name in config.tables:
    laplace = getattr(config, f'{name}_epsilons')
    points += [(name, LAPLACE, epsilon) for epsilon in laplace]
    paper, sound = lower_bounds(name, config.vocabulary)
    gumbel = [1.01 * paper] + [
        math.exp(x) for x in config.log_epsilons if math.exp(x) > 1.01 * paper]
    points += [(name, GUMBEL, epsilon) for epsilon in gumbel]
    own = [sound + rate for rate in config.rates]
    points += [(name, SOUND, epsilon) for epsilon in sorted({*own, *gumbel})]
  return points


@functools.lru_cache(maxsize=4)
def lower_bounds(name, vocabulary):
  """Epsilons above which `GUMBEL` and `SOUND` are defined on a table."""
  # Not from the whole geometry: a run with nothing left to do needs only this.
  minimum, _ = neighbors.distance_range(_load(name, vocabulary).vectors)
  log_n = math.log(len(_load(name, vocabulary).words))
  return (5 + 2 * log_n) / minimum, 2 * log_n / minimum


@functools.lru_cache(maxsize=4)
def _load(name, vocabulary):
  table = embedded.table(normalize=name == 'unit')
  return embeddings.subset(table, range(vocabulary)) if vocabulary else table


def _measure(config, table_name, mechanism_name, epsilon):
  """One row: a mechanism on a table at one epsilon."""
  table = _load(table_name, config.vocabulary)
  mechanism = mechanisms.get(mechanism_name)
  known = {} if mechanism_name == LAPLACE else {
      'geometry': _geometry(table_name, config.vocabulary)}
  params = mechanism.calibrate(table, epsilon=epsilon, **known)
  key = jax.random.key(config.seed)
  wanted = (config.laplace_words if mechanism_name == LAPLACE
            else config.gumbel_words)
  ids = _sample(key, len(table.words), wanted)
  # The point's own stream, whatever else is on the grid.
  point = zlib.crc32(f'{table_name} {mechanism_name} {epsilon!r}'.encode())
  rows = deniability.measure(
      jax.random.fold_in(key, point), mechanism, ids, params,
      num_runs=config.num_runs)
  row = {'table': table_name, 'mechanism': mechanism_name, 'epsilon': epsilon,
         'log_epsilon': math.log(epsilon), 'num_runs': config.num_runs,
         'num_words': ids.size, 'vocabulary': len(table.words),
         'dimension': table.vectors.shape[1]}
  for name in _STATISTICS:
    summary = deniability.summarize(getattr(rows, name))
    stderr = None if math.isnan(summary.stderr) else summary.stderr
    row |= {f'{name}_mean': summary.mean, f'{name}_std': summary.std,
            f'{name}_stderr': stderr}
  return row | report.guarantee_fields(params.guarantee)


def _sample(key, num_words, wanted):
  """Sorted ids of a seeded sample; a larger sample holds the smaller ones."""
  order = np.asarray(jax.random.permutation(
      jax.random.fold_in(key, samplers.SUBSAMPLE), num_words))
  return np.sort(order[:wanted or num_words]).astype(np.int32)


@functools.lru_cache(maxsize=4)
def _geometry(name, vocabulary):
  """A table's distances, which no epsilon changes."""
  return candidates.geometry(_load(name, vocabulary))


# --- What the rows show


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for table in dict.fromkeys(row['table'] for row in rows):
    for name in (LAPLACE, GUMBEL, SOUND):
      curve = curve_of(rows, table, name)
      if not curve:
        continue
      first, last = curve[0], curve[-1]
      most = max(curve, key=lambda row: row['support_mean'])
      out.append(
          f'{name} on the {table} table, {first["num_words"]:,} words x '
          f'{first["num_runs"]:,} runs: mean N_w {_count(first, "unchanged")} '
          f'at epsilon {first["epsilon"]:.4g} and {_count(last, "unchanged")} '
          f'at {last["epsilon"]:.4g} (log epsilon {first["log_epsilon"]:.2f} '
          f'to {last["log_epsilon"]:.2f}); mean S_w at most '
          f'{_count(most, "support")}, at epsilon {most["epsilon"]:.4g}.')
  return out


def curve_of(rows, table, mechanism):
  """The rows of one curve, by rising epsilon."""
  return sorted((row for row in rows if row['table'] == table
                 and row['mechanism'] == mechanism),
                key=lambda row: row['epsilon'])


def _count(row, name):
  return f'{row[f"{name}_mean"] * row["num_runs"]:.1f}'


def plot(rows, path, figure):
  """Draws one PNG: a line of panels a table, S_w left and N_w right.

  Args:
    rows: of `run`.
    path: the PNG.
    figure: one of `FIGURES`.
  """
  from matplotlib.figure import Figure
  tables = list(dict.fromkeys(row['table'] for row in rows))
  canvas = Figure(figsize=(7, 2.7 * len(tables)), layout='constrained')
  axes = canvas.subplots(len(tables), 2, squeeze=False)
  x = 'log_epsilon' if GUMBEL in figure.mechanisms else 'epsilon'
  for line, table in zip(axes, tables):
    for axis, (name, label) in zip(line, _STATISTICS.items()):
      for mechanism in figure.mechanisms:
        curve = curve_of(rows, table, mechanism)
        if figure.mechanisms == (SOUND,):
          curve = [row for row in curve
                   if row['epsilon'] < _NEAR_BOUND * curve[0]['epsilon']]
        _draw_curve(axis, curve, name, mechanism, x)
      axis.set(xlabel=x.replace('_', ' '), ylim=(0, None),
               ylabel=f'{label}, of {rows[0]["num_runs"]:,} runs',
               title=f'{label}, {table} table')
      axis.grid(alpha=.3)
  axes[0][-1].legend(fontsize='small')
  canvas.savefig(path, dpi=130)


def _draw_curve(axis, curve, name, mechanism, x):
  if not curve:
    return
  num_runs, places = curve[0]['num_runs'], [row[x] for row in curve]
  mean, std = (np.array([row[f'{name}_{part}'] for row in curve]) * num_runs
               for part in ('mean', 'std'))
  axis.plot(places, mean, 'o-', ms=3, color=COLORS[mechanism],
            label=f'{mechanism} ({curve[0]["status"]})')
  axis.fill_between(places, np.maximum(mean - std, 0),
                    np.minimum(mean + std, num_runs), alpha=.2,
                    color=COLORS[mechanism], lw=0)


# --- The binary


def draw(rows, out):
  """Draws all figures of this module into a directory."""
  for figure in FIGURES:
    plot(rows, os.path.join(out, figure.image), figure)


def execute(config, out):
  """Rows and figures, into a directory; returns the rows."""
  rows = command_line.collect(sys.modules[__name__], config, out)
  draw(rows, out)
  return rows


if __name__ == '__main__':
  command_line.main(sys.modules[__name__], 'xu20_fig1')
