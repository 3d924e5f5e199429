r"""Figure 1 of Habernal (2022): mechanisms audited by a majority vote.

  python -m experiments.habernal22_fig1 --out=results/habernal22_fig1

Inputs are X = (0, ..., 0) and X' = (1, ..., 1) in n dimensions. Each mechanism
claims epsilon; the attack rounds every output to a bit, takes the majority and
compares how often each input gives each vote. ``epsilon_point`` is the paper's
loss, ``epsilon_lower`` the Clopper-Pearson bound of the same counts, ``exact``
the closed form of the loss.

====================  =====================================================
``laplace``           Laplace noise of scale n / epsilon: correct
``adept``             the same noise at scale 1 / epsilon (Krishna et al. 2021):
                      n epsilon on this pair
``dptext``            Beigi et al. (2019): U in place of U - 1/2, which is half
                      an atom at 0 and half an exponential: infinite
``copy``, ``random``  the two extremes
``wrong_sensitivity`` half of ``laplace``'s output, in the authors' code and in
                      no panel: mere post-processing, so epsilon holds
====================  =====================================================

The paper states 10 M runs; its code overwrites instead of adding up its counts
above n = 16, so those cells rest on 1 M (``--legacy_counts``). Infinities
published for ``adept`` are empty counts: the true loss there is finite.
"""

import dataclasses
import math
import sys
import warnings

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments import command_line
from experiments import report
from jaxdp import auditing
from jaxdp import guarantees
from jaxdp import threefry

KEY = ('mechanism', 'epsilon', 'n')
PANELS = ('copy', 'random', 'laplace', 'adept', 'dptext', 'wrong_sensitivity')
FIGURES = (report.Figure(
    title='Figure 1: empirical loss of five mechanisms', image='fig1.png',
    mechanisms=PANELS,
    paper='"The vanilla Laplace mechanism behaves as expected; all empirical '
          'losses for all dimensions (1 up to 128) are bounded by epsilon. '
          '[...] The last panel confirms our previous theoretical DPText '
          'results, which (regardless of dimensionality) has infinite privacy '
          'loss."'),)
_LEGACY_ABOVE = 16  # dimensions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows.

  Attributes:
    seed: of the runs.
    mechanisms: names of `PANELS`.
    epsilons: claimed budgets; one draw of the noise serves all of them.
    dimensions: n.
    num_trials: runs on each input.
    legacy_counts: a tenth of the runs above n = 16, as the published numbers.
    significance: probability that one epsilon_lower is too high.
  """
  seed: int = 0
  mechanisms: tuple[str, ...] = PANELS
  epsilons: tuple[float, ...] = (.1, .2, .5, 1., 2., 5., 10.)
  dimensions: tuple[int, ...] = (1, 2, 8, 32, 64, 128)
  num_trials: int = 10_000_000
  legacy_counts: bool = False
  significance: float = .05


QUICK = Config(dimensions=(1, 8, 128), num_trials=200_000)


# --- The mechanisms, as published: (key, x, num, epsilon) -> [num, n]


def _uniform(key, num, x):
  """Multiples of 2^-23 in [0, 1), [num, n], two of them a hash."""
  words = jnp.concatenate(threefry.words(key, (num, -(-x.size // 2))), axis=1)
  return (words[:, :x.size] >> 9).astype(jnp.float32) * np.float32(2.**-23)


def _noise(key, num, x):
  """Laplace noise of scale 1 by inverse CDF, as the authors draw it."""
  centred = _uniform(key, num, x) - .5
  return -jnp.sign(centred) * jnp.log1p(-2 * jnp.abs(centred))


def laplace(key, x, num, epsilon):
  """Sensitivity n: the l1 distance of the two inputs."""
  return x[None] + _noise(key, num, x) * (x.size / epsilon)


def adept(key, x, num, epsilon):
  """Sensitivity 1, whatever the dimension."""
  return x[None] + _noise(key, num, x) * (1. / epsilon)


def dptext(key, x, num, epsilon):
  """U in place of U - 1/2: the log of a negative number, NaN, becomes 0."""
  u = _uniform(key, num, x)
  noise = -jnp.log1p(-2 * u)
  return x[None] + jnp.where(jnp.isnan(noise), 0., noise) * (x.size / epsilon)


def wrong_sensitivity(key, x, num, epsilon):
  """Half of the correct output; the class's name notwithstanding, it is DP."""
  return .5 * laplace(key, x, num, epsilon)


def copy(key, x, num, epsilon):
  """The input as it is."""
  del key, epsilon
  return jnp.broadcast_to(x[None], (num, x.size))


def random(key, x, num, epsilon):
  """Fair bits that ignore the input."""
  del epsilon
  return jnp.round(_uniform(key, num, x))


_MECHANISMS = {f.__name__: f for f in (
    copy, random, laplace, adept, dptext, wrong_sensitivity)}
_REAL = (guarantees.REAL_ARITHMETIC, guarantees.IDEAL_RANDOM_BITS)
_CLAIMS = {
    'laplace': ('proved', 'Dwork et al. (2006), Theorem 1'),
    'adept': ('claimed', 'Krishna et al. (2021), Theorem 1'),
    'dptext': ('claimed', 'Beigi et al. (2019), Theorem 2'),
    'wrong_sensitivity': ('proved', 'post-processing of laplace'),
}


def guarantee(mechanism, epsilon):
  """What is said about the mechanism and by whom."""
  common = dict(metric=guarantees.ADJACENCY,
                relation='(0, ..., 0) and (1, ..., 1) in n dimensions')
  if mechanism == 'copy':
    return guarantees.Guarantee(epsilon=math.inf, status='none',
                                source='releases its input', **common)
  if mechanism == 'random':
    return guarantees.Guarantee(epsilon=0., status='proved', conditions=_REAL,
                                source='ignores its input', **common)
  status, source = _CLAIMS[mechanism]
  return guarantees.Guarantee(epsilon=epsilon, status=status, source=source,
                              conditions=_REAL, **common)


# --- The closed form


def vote_probabilities(mechanism, epsilon, n):
  """(Pr(vote = 1 | X), Pr(vote = 1 | X')), each as (log, log of complement)."""
  half_tail = {
      'laplace': .5 * math.exp(-epsilon / (2 * n)),
      'adept': .5 * math.exp(-epsilon / 2), 'random': .5, 'copy': 0.,
      'wrong_sensitivity': .5 * math.exp(-epsilon / n),
      'dptext': .5 * math.exp(-epsilon / (2 * n))}[mechanism]
  other = {'laplace': 1 - half_tail, 'adept': 1 - half_tail, 'random': .5,
           'copy': 1., 'wrong_sensitivity': .5, 'dptext': 1.}[mechanism]
  # A vote is 1 when more than half of the bits are: a tie is 0.
  return tuple((stats.binom.logsf(n // 2, n, p),
                stats.binom.logcdf(n // 2, n, p)) for p in (half_tail, other))


def exact_loss(mechanism, epsilon, n):
  """The loss of infinitely many runs; infinite for an empty vote."""
  one, other = vote_probabilities(mechanism, epsilon, n)
  gaps = [abs(a - b) for a, b in zip(one, other)
          if not (np.isneginf(a) and np.isneginf(b))]
  return float(max(gaps))


# --- Rows


def grid(config):
  """Returns (mechanism, epsilon, n) of every row, in order."""
  return [(mechanism, epsilon, n) for mechanism in config.mechanisms
          for n in config.dimensions for epsilon in config.epsilons]


def run(config, done=frozenset()):
  """Yields one row a cell; a sweep whose cells are all done is skipped."""
  for mechanism in config.mechanisms:
    for n in config.dimensions:
      missing = [e for e in config.epsilons if (mechanism, e, n) not in done]
      if missing:
        for row in sweep(config, mechanism, n):
          if row['epsilon'] in missing:
            yield row


def sweep(config, mechanism, n):
  """The rows of one mechanism and dimension, the noise shared by epsilons."""
  num_trials = config.num_trials
  if config.legacy_counts and n > _LEGACY_ABOVE:
    num_trials //= 10
  promises = [guarantee(mechanism, e) for e in config.epsilons]
  claims = [p.epsilon if 0 < p.epsilon < math.inf else None for p in promises]
  with warnings.catch_warnings():
    if mechanism == 'copy':  # it is meant to ignore its key
      warnings.filterwarnings('ignore', message='fun gave one output')
    results = auditing.audit_sweep(
        _MECHANISMS[mechanism], np.zeros(n, np.float32), np.ones(n, np.float32),
        np.float32(config.epsilons), key=jax.random.key(config.seed),
        num_trials=num_trials, significance=config.significance,
        score='majority', selection='fixed', claims=claims, vectorized=True,
        common_noise=True)
  return [row_of(mechanism, n, epsilon, promise, result)
          for epsilon, promise, result in zip(
              config.epsilons, promises, results)]


def row_of(mechanism, n, epsilon, promise, result):
  """One row: the claim, the counts, the bound, and the closed form."""
  claim = report.guarantee_fields(promise)
  row = {'mechanism': mechanism, 'epsilon': epsilon, 'n': n,
         'settings': {'n': n}, **claim, **{
             name: getattr(result, name) for name in (
                 'epsilon_point', 'epsilon_lower', 'ceiling', 'hits',
                 'hits_prime', 'num_trials', 'significance', 'score',
                 'selection')},
         'exact': exact_loss(mechanism, epsilon, n)}
  if result.verdict is None:
    return row
  return row | {'measured': result.epsilon_lower,
                'measured_kind': 'lower bound',
                'ratio': result.epsilon_lower / epsilon,
                'verdict': result.verdict, 'table': f'{n} dimensions'}


def findings(rows):
  """Sentences about the rows, every number read from them."""
  out = []
  for mechanism in dict.fromkeys(row['mechanism'] for row in rows):
    mine = [row for row in rows if row['mechanism'] == mechanism]
    violated = sum(row.get('verdict') == 'violated' for row in mine)
    worst = max(mine, key=lambda row: row['epsilon_lower'] / row['epsilon'])
    out.append(
        f'{mechanism}: status {mine[0]["status"]}; {violated} of {len(mine)} '
        f'cells violated; the largest bound against its epsilon is '
        f'{worst["epsilon_lower"]:.4g} at epsilon {worst["epsilon"]:g}, n = '
        f'{worst["n"]} (point {worst["epsilon_point"]:.4g}, exact '
        f'{worst["exact"]:.4g}, ceiling {worst["ceiling"]:.4g}).')
  return out


def plot(rows, path):
  """Draws one PNG: a panel a mechanism, the claim as a dashed line."""
  from matplotlib.figure import Figure
  names = list(dict.fromkeys(row['mechanism'] for row in rows))
  canvas = Figure(figsize=(11, 3.2 * -(-len(names) // 3)), layout='constrained')
  axes = np.atleast_1d(canvas.subplots(-(-len(names) // 3), 3, squeeze=False)
                       ).ravel()
  for axis, name in zip(axes, names):
    mine = [row for row in rows if row['mechanism'] == name]
    for n in sorted({row['n'] for row in mine}):
      line = sorted((row['epsilon'], row['epsilon_point'], row['epsilon_lower'])
                    for row in mine if row['n'] == n)
      epsilon, point, lower = np.array(line).T
      shown = np.isfinite(point)
      color = axis.plot(epsilon[shown], point[shown], marker='o', ms=3,
                        label=f'n = {n}')[0].get_color()
      axis.plot(epsilon, lower, color=color, ls=':', lw=1)
    ends = sorted({row['epsilon'] for row in mine})
    axis.plot(ends, ends, 'k--', lw=.8)
    axis.set(title=name, xscale='log', yscale='symlog',
             xlabel='claimed epsilon', ylabel='loss (dotted: bound)')
    axis.grid(alpha=.3)
  axes[0].legend(fontsize='small')
  for axis in axes[len(names):]:
    axis.set_visible(False)
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
  flags.DEFINE_bool('legacy_counts', False, 'A tenth of the runs above n = 16.')
  command_line.main(
      sys.modules[__name__], 'habernal22_fig1',
      adapt=lambda config: dataclasses.replace(
          config, legacy_counts=flags.FLAGS.legacy_counts))
