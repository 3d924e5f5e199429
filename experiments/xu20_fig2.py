r"""Figure 2 of Xu et al. (2020): S_w against N_w, mechanism beside mechanism.

  python -m experiments.xu20_fig2 --out=results/xu20_fig1 --quick

At equal N_w, the mechanism with the smaller S_w keeps substitutions closer to
the word. The rows are those of Figure 1: with the ``--out`` of an earlier
``xu20_fig1`` of the same settings nothing is measured again, and without one
the same measurement is made here. The S_w axis is logarithmic, as the paper's.

The paper: at equal N_w the multivariate Laplace mechanism "has a much broader
range of word substitutions". Here, ``--quick``, at N_w = 500 of 1,000: several
times to some tens of times broader, on both tables.
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
    paper='"when different mechanisms result in the same perturbation effects, '
          'the multivariate Laplace mechanism has a much broader range of word '
          'substitutions compared with the proposed truncated Gumbel '
          'mechanism"'),)


def support_at(curve, level):
  """Mean S_w where mean N_w is ``level``, linear in log S_w; None off the curve.

  Args:
    curve: rows of one mechanism on one table.
    level: N_w, a fraction of the runs.
  """
  points = sorted((row['unchanged_mean'], row['support_mean'])
                  for row in curve)
  unchanged, support = map(np.array, zip(*points))
  if not unchanged[0] <= level <= unchanged[-1]:
    return None
  return float(np.exp(np.interp(level, unchanged, np.log(support))))


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for table in dict.fromkeys(row['table'] for row in rows):
    laplace, gumbel = (xu20_fig1.curve_of(rows, table, name)
                       for name in (xu20_fig1.LAPLACE, xu20_fig1.GUMBEL))
    for level in _LEVELS:
      broad, narrow = support_at(laplace, level), support_at(gumbel, level)
      if broad and narrow:
        runs = laplace[0]['num_runs']
        out.append(
            f'{table} table, at N_w = {level * runs:.0f} of {runs:,}: S_w '
            f'{broad * runs:.1f} ({xu20_fig1.LAPLACE}) against '
            f'{narrow * runs:.1f} ({xu20_fig1.GUMBEL}), ratio '
            f'{broad / narrow:.1f}.')
  return out


def plot(rows, path):
  """Draws one PNG: a panel a table, log S_w against N_w."""
  from matplotlib.figure import Figure
  tables = list(dict.fromkeys(row['table'] for row in rows))
  canvas = Figure(figsize=(4 * len(tables), 3.6), layout='constrained')
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
  canvas.savefig(path, dpi=110)


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
