r"""Figure 8 of Phan et al. (2020): attacks of hundreds and thousands of steps.

  python -m experiments.phan20_fig8 --out=results/phan20_fig8 --quick

I-FGSM, MIM and Madry et al.'s attack with up to 2,000 steps, at sizes .05 to .5
on images in [-1, 1]: conventional accuracy under each, in both deployments, and
certified accuracy at its size. A certificate speaks about every attack of a
size at once and is computed at the CLEAN image, so it does not move with the
steps; the published one is computed at the attacked image. The sound test of a
*proved* radius is in each row: no attack takes the accuracy of 'votes' below
what is certified, but for the failure probability of votes.

The full form attacks the first 1,000 test images of MNIST (``--data_dir``) and
needs an accelerator; the runs are those of Figure 5, trained on attacks of 10
steps, and with its ``--runs_dir`` nothing is trained again. ``--quick`` takes
the digits that come with the code, and a few minutes on two cores.

The paper's figure is of CIFAR-10 with 200 steps in training; no number of it
is comparable.
"""

import dataclasses
import os
import sys

from experiments import phan20_runs
from experiments import report

KEY = phan20_runs.KEY

FIGURES = (report.Figure(
    title='Figure 8: strong iterative attacks', image='fig8.png',
    mechanisms=phan20_runs.MECHANISMS,
    paper='on CIFAR-10, other data than here: "our StoBatch achieves '
          '45.25±1.6% and 42.59±1.58% in conventional and certified '
          'accuracies, compared with 29.08±11.95% and 19.58±5.0% of '
          'SecureSGD"'),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(phan20_runs.Config):
  """What determines the rows; see phan20_runs.Config.

  Attributes:
    attacks: iterated ones.
    attack_steps: T_a.
    certified_bounds: L-inf sizes, of attacks and of certificates.
    num_draws: one; so many steps average over the noise by themselves.
  """
  attacks: tuple[str, ...] = ('ifgsm', 'mim', 'pgd')
  attack_steps: tuple[int, ...] = (100, 500, 1_000, 2_000)
  certified_bounds: tuple[float, ...] = (.05, .1, .2, .3, .4, .5)
  num_draws: int = 1


QUICK = Config(**phan20_runs.QUICK, sound_epsilons=(.2, 200.),
               attacks=('pgd',), attack_steps=(10, 50),
               certified_bounds=(.05, .2, .5), num_images=200)


def grid(config):
  """Returns the points of every row, in order."""
  return phan20_runs.attacked(
      config, attacks=config.attacks, bounds=config.certified_bounds,
      steps=config.attack_steps)


def run(config, done=frozenset(), **places):
  """Yields one row a point; ``places`` as for `phan20_runs.run_points`."""
  return phan20_runs.run_points(config, grid(config), done, **places)


def worst_curve(rows):
  """At each size the row of the attack that leaves the least accuracy."""
  return [min(phan20_runs.where(rows, attack_bound=size),
              key=lambda row: row['accuracy'])
          for size in sorted(x for (x,) in phan20_runs.distinct(
              rows, 'attack_bound'))]


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for mode, epsilon, deployment in phan20_runs.distinct(
      rows, 'mode', 'epsilon', 'deployment'):
    mine = phan20_runs.where(rows, mode=mode, epsilon=epsilon,
                             deployment=deployment)
    for (steps,) in phan20_runs.distinct(mine, 'num_steps'):
      curve = worst_curve(phan20_runs.where(mine, num_steps=steps))
      values = ', '.join(
          f'{phan20_runs.percent(row["accuracy"])} at '
          f'{row["attack_bound"]:g} ({row["attack"]})' for row in curve)
      out.append(f'{phan20_runs.standing(curve[0])}, {deployment}: after '
                 f'{steps:,} steps {values}; {curve[0]["num_images"]:,} images '
                 f'of {curve[0]["dataset"]}.')
    out += _certified(worst_curve(mine))
  return out


def _certified(curve):
  """One sentence a radius; none where nothing is certified."""
  return [
      f'{phan20_runs.standing(curve[0])}: certified by {name} '
      f'({curve[0]["radius_status"][name]}, {curve[0]["radius_norm"][name]}): '
      + ', '.join(f'{phan20_runs.percent(row["certified"][name])} at '
                  f'{row["attack_bound"]:g}' for row in curve) + '.'
      for name in curve[0].get('certified', ())]


def plot(rows, path):
  """Draws one PNG: a panel a run and deployment, a line a number of steps."""
  cells = phan20_runs.distinct(rows, 'mode', 'epsilon', 'deployment')
  canvas, axes = phan20_runs.figure_of(len(cells), columns=2)
  for axis, (mode, epsilon, deployment) in zip(axes, cells):
    mine = phan20_runs.where(rows, mode=mode, epsilon=epsilon,
                             deployment=deployment)
    steps_of = phan20_runs.distinct(mine, 'num_steps')
    for place, (steps,) in enumerate(steps_of):
      curve = worst_curve(phan20_runs.where(mine, num_steps=steps))
      axis.plot([row['attack_bound'] for row in curve],
                [row['accuracy'] for row in curve], 'o-', ms=3,
                color=str(.7 * place / len(steps_of)),
                label=f'accuracy, {steps:,} steps, worst attack')
    _draw_certified(axis, worst_curve(mine))
    axis.set(title=f'{mode}, epsilon {epsilon:g}, {deployment} '
                   f'({phan20_runs.status(mine[0])})',
             xlabel='attack size, L-inf on [-1, 1]', ylabel='accuracy')
  phan20_runs.save(canvas, axes, path)


def _draw_certified(axis, curve):
  for name in curve[0].get('certified', ()):
    if curve[0]['radius_norm'][name] == 'linf':
      axis.plot([row['attack_bound'] for row in curve],
                [row['certified'][name] for row in curve], '--',
                color=phan20_runs.RADIUS_COLORS[name],
                label=f'certified, {name} ({curve[0]["radius_status"][name]})')


def draw(rows, out):
  """Draws the figure into a directory."""
  plot(rows, os.path.join(out, FIGURES[0].image))


def execute(config, out, **places):
  """Rows and figure, into a directory; returns the rows."""
  rows = phan20_runs.collect(sys.modules[__name__], config, out, **places)
  draw(rows, out)
  return rows


if __name__ == '__main__':
  phan20_runs.main(sys.modules[__name__], 'phan20_fig8')
