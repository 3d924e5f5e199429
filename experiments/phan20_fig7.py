r"""Figure 7 of Phan et al. (2020): certified accuracy against attack size.

  python -m experiments.phan20_fig7 --out=results/phan20_fig7 --quick

An image counts at a size where the vote is right and the radius around it
exceeds the size. One tally of votes at the CLEAN image gives all radii:

  claimed             the published one: sensitivities of two units, the scale
                      of the noise of training in place of the fresh one
  composed_linf       the same composition with true norms and fresh noise
  laplace_linf        one pass, noise on the input, by its L1 sensitivity
  laplace_renyi_linf  one pass, by the Renyi divergence; grows as 1 / sqrt(D)
  hidden_linf         one pass, noise on the first layer, by its true norm
  best_linf           one pass with both noises, the largest of the three
  laplace_l1          as laplace_linf, of attacks of that size in L1

A *claimed* radius stands beside every *proved* one. Two passes and their
product ('product', Algorithm 3) have the composed radius alone; the same
network with both noises in one pass ('single') has the others, so 'paper' is
measured both ways. The deployment 'run' draws nothing fresh: it certifies
nothing, and its accuracy without attack is the dotted line.

With the ``--runs_dir`` of Figure 2 or 5 nothing is trained again. The full form
needs MNIST (``--data_dir``) and an accelerator; ``--quick`` takes the digits
that come with the code, and a few minutes on two cores.

The paper's figure is of CIFAR-10 at epsilon 2; no number of it is comparable.
"""

import dataclasses
import os
import sys

from experiments import phan20_runs
from experiments import report

KEY = phan20_runs.KEY

FIGURES = (report.Figure(
    title='Figure 7: certified accuracy against the size of the attack',
    image='fig7.png', mechanisms=phan20_runs.MECHANISMS,
    paper='on CIFAR-10, other data than here: "We register an improvement of '
          '21.01% in our StoBatch model given the certified accuracy over '
          'SecureSGD model"'),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(phan20_runs.Config):
  """What determines the rows; see phan20_runs.Config."""
  paper_epsilons: tuple[float, ...] = (.2, 2.)
  sound_epsilons: tuple[float, ...] = (.2, 2., 400.)
  certified_bounds: tuple[float, ...] = (
      .001, .01, .02, .05, .1, .2, .3, .4, .5, .6)


QUICK = Config(**phan20_runs.QUICK, sound_epsilons=(.2, 2., 200.),
               certified_bounds=(.001, .01, .02, .05, .2, .6))


def grid(config):
  """Returns the points of every row, in order."""
  points = []
  for mode, epsilon in phan20_runs.budgets(config):
    usual = phan20_runs.INFERENCE[mode]
    points.append(phan20_runs.Point(mode, epsilon, usual, 'run', 'none', 0., 0))
    points += [
        phan20_runs.Point(mode, epsilon, inference, 'votes', 'none', size, 0)
        for inference in dict.fromkeys((usual, 'single'))
        for size in config.certified_bounds]
  return points


def run(config, done=frozenset(), **places):
  """Yields one row a point; ``places`` as for `phan20_runs.run_points`."""
  return phan20_runs.run_points(config, grid(config), done, **places)


def radii_of(rows):
  """Names of the radii that the rows of one run and inference draw.

  The claim is about a product of two passes and stands with it alone.
  """
  return [name for name in rows[0]['certified']
          if name != 'claimed' or rows[0]['inference'] == 'product']


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for mode, epsilon, inference in phan20_runs.distinct(
      phan20_runs.where(rows, deployment='votes'),
      'mode', 'epsilon', 'inference'):
    mine = phan20_runs.where(rows, mode=mode, epsilon=epsilon,
                             inference=inference, deployment='votes')
    first = mine[0]
    for name in radii_of(mine):
      values = ', '.join(
          f'{phan20_runs.percent(row["certified"][name])} at '
          f'{row["attack_bound"]:g}' for row in mine)
      out.append(
          f'{phan20_runs.standing(first)}, {inference} inference, '
          f'{phan20_runs.percent(first["accuracy"])} right without attack; '
          f'certified by {name} ({first["radius_status"][name]}, '
          f'{first["radius_norm"][name]}): {values}; '
          f'{first["num_images"]:,} images of {first["dataset"]}, '
          f'{first["num_samples"]:,} votes.')
  return out


def plot(rows, path):
  """Draws one PNG: a panel a run, a line a radius."""
  runs = phan20_runs.distinct(rows, 'mode', 'epsilon')
  canvas, axes = phan20_runs.figure_of(len(runs))
  for axis, (mode, epsilon) in zip(axes, runs):
    mine = phan20_runs.where(rows, mode=mode, epsilon=epsilon)
    for row in phan20_runs.where(mine, deployment='run'):
      axis.axhline(row['accuracy'], color='k', ls=':',
                   label='run, without attack (certifies nothing)')
    votes = phan20_runs.where(mine, deployment='votes')
    for (inference,) in phan20_runs.distinct(votes, 'inference'):
      _draw_radii(axis, phan20_runs.where(votes, inference=inference))
    axis.set(title=f'{mode}, epsilon {epsilon:g} '
                   f'({phan20_runs.status(mine[0])})',
             xlabel='attack size, on [-1, 1]', ylabel='certified accuracy',
             xscale='log')
  phan20_runs.save(canvas, axes, path)


def _draw_radii(axis, rows):
  """Draws the curves of one run and inference."""
  inference = rows[0]['inference']
  for name in radii_of(rows):
    axis.plot(
        [row['attack_bound'] for row in rows],
        [row['certified'][name] for row in rows], marker='o', ms=3,
        color=phan20_runs.RADIUS_COLORS[name],
        ls='-' if inference == 'product' else '--',
        label=f'{name}, {inference} ({rows[0]["radius_status"][name]}, '
              f'{rows[0]["radius_norm"][name]})')


def draw(rows, out):
  """Draws the figure into a directory."""
  plot(rows, os.path.join(out, FIGURES[0].image))


def execute(config, out, **places):
  """Rows and figure, into a directory; returns the rows."""
  rows = phan20_runs.collect(sys.modules[__name__], config, out, **places)
  draw(rows, out)
  return rows


if __name__ == '__main__':
  phan20_runs.main(sys.modules[__name__], 'phan20_fig7')
