r"""ADePT with its clipping, as printed and repaired (Habernal 2021, 2022).

  python -m experiments.habernal22_adept --out=results/habernal22_adept

ADePT clips a sentence's vector to l2 norm C and adds Laplace noise of scale
2 C / epsilon to each of its n coordinates. Two clipped vectors are up to
:math:`2 C \sqrt n` apart in l1, which is what Laplace noise answers to, so the
mechanism has :math:`\sqrt n\,\epsilon` and not epsilon. The two inputs here are
that far apart. Three repairs stand beside it: clip in l1, scale the noise by
:math:`\sqrt n`, or use Gaussian noise at (epsilon, delta).

Each row is an audit by trials; its event is chosen on a part of them.
"""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command_line
from experiments import report
from jaxdp import auditing
from jaxdp import guarantees
from jaxdp import samplers
from jaxdp.mechanisms import numeric

KEY = ('mechanism', 'epsilon', 'n')
FORMS = ('adept_as_printed', 'adept_l1', 'adept_l2', 'adept_gaussian')
FIGURES = (report.Figure(
    title='ADePT: as printed and repaired', image='adept.png',
    mechanisms=FORMS,
    paper='"We empirically confirm that ADePT suffered from the curse of '
          'dimensionality as the privacy loss explodes for larger '
          'dimensions."'),)
_CLIP = 1.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows.

  Attributes:
    seed: of the runs.
    epsilons: claimed budgets.
    dimensions: n.
    num_trials: runs on each input.
    delta: of the Gaussian repair; the audit of that row allows it.
    significance: probability that one epsilon_lower is too high.
  """
  seed: int = 0
  epsilons: tuple[float, ...] = (.1, 1., 5.)
  dimensions: tuple[int, ...] = (2, 8, 32, 128)
  num_trials: int = 1_000_000
  delta: float = 1e-5
  significance: float = .05


QUICK = Config(epsilons=(1.,), dimensions=(8,), num_trials=100_000)


def as_printed(key, x, epsilon):
  """l2 clipping with the noise of l1 sensitivity 2 C."""
  norm = jnp.linalg.norm(x)
  clipped = x * jnp.minimum(1., _CLIP / jnp.maximum(norm, 1e-30))
  return clipped + samplers.laplace(key, x.shape, scale=2 * _CLIP / epsilon)


def _repair(form, epsilon, n, delta):
  """(function, guarantee) of one form."""
  if form == 'adept_as_printed':
    return (lambda key, x: as_printed(key, x, epsilon)), guarantees.Guarantee(
        epsilon=epsilon, metric=guarantees.ADJACENCY,
        relation='any two inputs; an input is one row', status='claimed',
        source='Krishna et al. (2021), Theorem 1',
        conditions=(guarantees.REAL_ARITHMETIC, guarantees.IDEAL_RANDOM_BITS))
  settings = {'adept_l1': dict(norm='l1'), 'adept_l2': dict(norm='l2'),
              'adept_gaussian': dict(norm='l2', noise='gaussian', delta=delta)}
  params = numeric.calibrate_adept(clip=_CLIP, epsilon=epsilon,
                                   num_dimensions=n, **settings[form])
  return (lambda key, x: numeric.adept(key, x, params)), params.guarantee


def inputs(form, n):
  """Two inputs as far apart as the form's clipping allows."""
  if form == 'adept_l1':
    x = np.zeros(n, np.float32)
    x[0] = _CLIP
  else:
    x = np.full(n, _CLIP / math.sqrt(n), np.float32)
  return x, -x


def grid(config):
  """Returns (mechanism, epsilon, n) of every row, in order."""
  return [(form, epsilon, n) for n in config.dimensions
          for epsilon in config.epsilons for form in FORMS]


def run(config, done=frozenset()):
  """Yields one row an audit; those whose `KEY` is in ``done`` are skipped."""
  for form, epsilon, n in grid(config):
    if (form, epsilon, n) not in done:
      yield row(config, form, epsilon, n)


def row(config, form, epsilon, n):
  """Claim, bound and verdict of one form."""
  fun, promise = _repair(form, epsilon, n, config.delta)
  result = auditing.audit(
      fun, *inputs(form, n), key=jax.random.key(config.seed),
      num_trials=config.num_trials, delta=promise.delta,
      significance=config.significance,
      score=total if form == 'adept_gaussian' else 'linear', claim=epsilon)
  return {'mechanism': form, 'epsilon': epsilon, 'n': n, 'settings': {'n': n},
          'table': f'{n} dimensions', **report.guarantee_fields(promise),
          'epsilon_lower': result.epsilon_lower,
          'epsilon_point': result.epsilon_point, 'ceiling': result.ceiling,
          'num_trials': result.num_trials, 'event': result.event,
          'significance': result.significance,
          'true_epsilon': epsilon * math.sqrt(n) if form == 'adept_as_printed'
                          else epsilon,
          'measured': result.epsilon_lower, 'measured_kind': 'lower bound',
          'ratio': result.epsilon_lower / epsilon, 'verdict': result.verdict}


def total(y):
  """The log-ratio of Gaussian noise, up to a factor."""
  return jnp.sum(y)


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for form in dict.fromkeys(row['mechanism'] for row in rows):
    mine = [row for row in rows if row['mechanism'] == form]
    worst = max(mine, key=lambda row: row['ratio'])
    violated = sum(row['verdict'] == 'violated' for row in mine)
    out.append(f'{form}: status {mine[0]["status"]}; {violated} of {len(mine)} '
               f'audits violated; largest bound {worst["measured"]:.4g} for a '
               f'claim of {worst["epsilon"]:g} at n = {worst["n"]}.')
  return out


def plot(rows, path):
  """Draws one PNG: bound over claim against the dimension."""
  from matplotlib.figure import Figure
  canvas = Figure(figsize=(6, 3.6), layout='constrained')
  axis = canvas.subplots()
  for form in dict.fromkeys(row['mechanism'] for row in rows):
    for epsilon in sorted({row['epsilon'] for row in rows}):
      line = sorted((row['n'], row['ratio']) for row in rows
                    if (row['mechanism'], row['epsilon']) == (form, epsilon))
      axis.plot(*np.array(line).T, marker='o', ms=3,
                label=f'{form}, epsilon {epsilon:g}')
  axis.axhline(1., color='k', lw=.8)
  axis.set(xscale='log', yscale='symlog', xlabel='dimensions n',
           ylabel='measured / claimed epsilon')
  axis.grid(alpha=.3)
  axis.legend(fontsize='x-small')
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
  command_line.main(sys.modules[__name__], 'habernal22_adept')
