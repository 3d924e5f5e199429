r"""Figure 2 of Xu et al. (2020): S_w against N_w, mechanism beside mechanism.

  python -m experiments.xu20_fig2 --out=results/xu20_fig1 --quick

At equal N_w, the mechanism with the smaller S_w keeps substitutions closer to
the word. The rows are those of Figure 1: with the ``--out`` of an earlier
``xu20_fig1`` of the same settings nothing is measured again, and without one
the same measurement is made here. The S_w axis is logarithmic, as the paper's.

The paper: at equal N_w the multivariate Laplace mechanism "has a much broader
range of word substitutions". Here, ``--quick``: about 19 times broader at N_w =
500 of 1,000 and 5 to 6 times at 900, on both tables. The provable variant lies
on the curve of the published mechanism, at a far smaller epsilon.
"""

import os
import sys

import numpy as np

from experiments import command_line
from experiments import report
from experiments import xu20_fig1

Config, QUICK, run = xu20_fig1.Config, xu20_fig1.QUICK, xu20_fig1.run
_LEVELS = (.5, .7, .9)

FIGURES = (report.Figure(
    title='Figure 2: substitution range at equal N_w', image='fig2.png',
    mechanisms=(xu20_fig1.LAPLACE, xu20_fig1.GUMBEL, xu20_fig1.SOUND),
    paper='"when different mechanisms result in the same perturbation '
          'effects, the multivariate Laplace mechanism has a much broader '
          'range of word substitutions compared with the proposed truncated '
          'Gumbel mechanism"'),)


def at_level(curve, level):
  """(S_w, epsilon) where N_w is ``level``, by means; None off the curve.

  Linear in log S_w and log epsilon between neighbouring N_w.

  Args:
    curve: rows of one mechanism on one table.
    level: N_w, a fraction of the runs.
  """
  points = sorted((row['unchanged_mean'], row['support_mean'], row['epsilon'])
                  for row in curve)
  if not points or not points[0][0] <= level <= points[-1][0]:
    return None
  unchanged, *columns = map(np.array, zip(*points))
  return tuple(float(np.exp(np.interp(level, unchanged, np.log(column))))
               for column in columns)


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for table in dict.fromkeys(row['table'] for row in rows):
    for level in _LEVELS:
      parts = []
      for name in FIGURES[0].mechanisms:
        curve = xu20_fig1.curve_of(rows, table, name)
        found = at_level(curve, level)
        if found:
          runs, (support, epsilon) = curve[0]['num_runs'], found
          parts.append(f'S_w {support * runs:.1f} at epsilon {epsilon:.4g} '
                       f'({name}, {curve[0]["status"]})')
      if parts:
        out.append(f'{table} table, N_w = {level * runs:.0f} of {runs:,}: '
                   + '; '.join(parts) + '.')
  return out


def plot(rows, path):
  """Draws one PNG: a panel a table, log S_w against N_w."""
  from matplotlib.figure import Figure
  tables = list(dict.fromkeys(row['table'] for row in rows))
  canvas = Figure(figsize=(3.6 * len(tables), 3.4), layout='constrained')
  axes = canvas.subplots(1, len(tables), squeeze=False)[0]
  for axis, table in zip(axes, tables):
    for mechanism in FIGURES[0].mechanisms:
      curve = sorted(xu20_fig1.curve_of(rows, table, mechanism),
                     key=lambda row: row['unchanged_mean'])
      if curve:
        runs = curve[0]['num_runs']
        axis.semilogy(
            [row['unchanged_mean'] * runs for row in curve],
            [row['support_mean'] * runs for row in curve], 'o-', ms=3,
            color=xu20_fig1.COLORS[mechanism],
            label=f'{mechanism} ({curve[0]["status"]})')
    axis.set(xlabel='N_w', ylabel='S_w', title=f'{table} table')
    axis.grid(alpha=.3)
  axes[0].legend(fontsize='small')
  canvas.savefig(path, dpi=130)


def draw(rows, out):
  """Draws the figure into a directory."""
  plot(rows, os.path.join(out, FIGURES[0].image))


def execute(config, out):
  """Rows, if they are not there already, and the figure; returns the rows."""
  rows = command_line.collect(xu20_fig1, config, out)
  draw(rows, out)
  return rows


if __name__ == '__main__':
  command_line.main(sys.modules[__name__], 'xu20_fig1')
