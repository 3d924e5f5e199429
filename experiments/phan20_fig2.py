r"""Figure 2 of Phan et al. (2020): accuracy under attack against the budget.

  python -m experiments.phan20_fig2 --out=results/phan20_fig2 --quick

Conventional accuracy of StoBatch under four L-inf attacks of size .2, on
images in [-1, 1], against the total epsilon. 'paper' is the published
algorithm, 'sound' the one whose budget standard accounting proves; each is
measured in two deployments:

  run     one pass with the run's own draw, as the network was trained
  votes   the majority of votes with fresh noise, which a certificate needs

The attack is on the network of the same deployment, with the true labels. The
paper's is on another network than the one that answers, in the released code
without its noise and with other statistics of batch normalisation, and its
label is the network's own answer.

Runs are trained in OUT/runs, or in ``--runs_dir``, which Figures 5, 7 and 8
can share. The full form needs MNIST (``--data_dir``) and an accelerator;
``--quick`` takes the digits that come with the code, and a few minutes on
two cores.

The paper: 82.7% on MNIST at epsilon .2.
"""

import dataclasses
import os
import sys

from experiments import phan20_runs
from experiments import report

KEY = phan20_runs.KEY
PUBLISHED = {'mnist': (.2, .2, .827)}  # epsilon, size, accuracy

FIGURES = (report.Figure(
    title='Figure 2: accuracy under attack against the privacy budget',
    image='fig2.png', mechanisms=phan20_runs.MECHANISMS,
    paper='on MNIST, at epsilon .2: "our StoBatch achieves 82.7%, compared '
          'with 11.2% and 41.64% correspondingly for SecureSGD-AGM and '
          'SecureSGD"'),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(phan20_runs.Config):
  """What determines the rows; see phan20_runs.Config.

  Attributes:
    attacks: 'none' is the accuracy without one.
    attack_bound: L-inf size on images in [-1, 1].
    attack_steps: T_a of the iterated ones.
  """
  paper_epsilons: tuple[float, ...] = (.2, .5, 1., 2.)
  sound_epsilons: tuple[float, ...] = (.2, .5, 1., 2., 20., 100., 400., 1_600.)
  attacks: tuple[str, ...] = ('none', *phan20_runs.ATTACKS)
  attack_bound: float = .2
  attack_steps: int = 10


QUICK = Config(**phan20_runs.QUICK, paper_epsilons=(.2, 2.),
               sound_epsilons=(.2, 2., 200.))


def grid(config):
  """Returns the points of every row, in order."""
  return phan20_runs.attacked(
      config, attacks=config.attacks, bounds=(config.attack_bound,),
      steps=(config.attack_steps,))


def run(config, done=frozenset(), **places):
  """Yields one row a point; ``places`` as for `phan20_runs.run_points`."""
  return phan20_runs.run_points(config, grid(config), done, **places)


def findings(rows):
  """Sentences about the rows, every number of ours read from them."""
  return [_finding(rows, *names) for names in phan20_runs.distinct(
      rows, 'mode', 'epsilon', 'deployment')]


def _finding(rows, mode, epsilon, deployment):
  mine = phan20_runs.where(rows, mode=mode, epsilon=epsilon,
                           deployment=deployment)
  parts = [f'{phan20_runs.percent(row["accuracy"])} under {row["attack"]}'
           if row['attack'] != 'none' else
           f'{phan20_runs.percent(row["accuracy"])} without attack'
           for row in mine]
  first = max(mine, key=lambda row: row['attack_bound'])
  known = PUBLISHED.get(first['dataset'])
  beside = ''
  if known and known[:2] == (epsilon, first['attack_bound']):
    beside = f' The paper has {phan20_runs.percent(known[2])}.'
  return (f'{phan20_runs.standing(first)}, {deployment}: '
          f'{", ".join(parts)}; size {first["attack_bound"]:g}, '
          f'{first["num_images"]:,} images of {first["dataset"]}.{beside}')


def plot(rows, path):
  """Draws one PNG: a panel an attack, a line a mode and deployment."""
  attacks = phan20_runs.distinct(rows, 'attack')
  canvas, axes = phan20_runs.figure_of(len(attacks))
  for axis, (attack,) in zip(axes, attacks):
    for mode, deployment in phan20_runs.distinct(rows, 'mode', 'deployment'):
      line = sorted(phan20_runs.where(
          rows, mode=mode, deployment=deployment, attack=attack),
                    key=lambda row: row['epsilon'])
      axis.semilogx(
          [row['epsilon'] for row in line], [row['accuracy'] for row in line],
          phan20_runs.LINES[deployment], marker='o', ms=3,
          color=phan20_runs.COLORS[mode],
          label=f'{mode}, {deployment} ({phan20_runs.status(line[0])})')
    axis.set(title=attack, xlabel='total epsilon, as the mode counts it',
             ylabel='accuracy')
  phan20_runs.save(canvas, axes, path)


def draw(rows, out):
  """Draws the figure into a directory."""
  plot(rows, os.path.join(out, FIGURES[0].image))


def execute(config, out, **places):
  """Rows and figure, into a directory; returns the rows."""
  rows = phan20_runs.collect(sys.modules[__name__], config, out, **places)
  draw(rows, out)
  return rows


if __name__ == '__main__':
  phan20_runs.main(sys.modules[__name__], 'phan20_fig2')
