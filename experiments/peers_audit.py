r"""Published implementations of word mechanisms, each with one fault, audited.

  python -m experiments.peers_audit --out=results/peers_audit --quick

Each row is a small mechanism with one fault that was seen in a published
implementation, written here anew from a description of the fault and right in
all else. It is audited on a toy table against the epsilon that its authors
claim; ``sound_measured`` is what the counterpart in this library has on the
same table, at the same epsilon, by the same audit. Nearly all rows are exact:
the whole law is known, by closed form or quadrature. A ``santext`` row says
'lower bound': it runs the fault, as a check of the law. Ten seconds on two
cores, quick or not.

=============================  ================================================
mldp: squared distances        noise cut at the diameter is added to squared
                               distances, which exceed it
mldp: one random word          least and greatest distance from one word, not
                               over all pairs: the noise is too small
mldp: Poisson by rejection     K < V always, so a farthest word is impossible
mldp: Lambert W, real part     epsilon below the theorem's bound is accepted
mldp: Vickrey, no input word   the input word is dropped after the noise
mldp: TEM, outside score       counts the words of another vocabulary
mldp: unknown words            a word without a vector leaves unchanged
pypantera: Mahalanobis         direction scaled to length 1 after Sigma^(1/2)
pypantera: TEM, exception      an error outside the near list returns the input
santext: forked workers        workers share one generator state
santext+: kept words           words that are not sensitive are mostly kept
custext: scaled scores         min-max scores: no epsilon per unit distance
custext: aggressive lists      each word draws from its own nearest words
custext: stop words            leave unchanged, as do unknown words
jax: categorical               float32 Gumbel noise of ``mode='low'`` ends
=============================  ================================================

Left out, for what they cost is utility: approximate search for the word nearest
to a noisy vector (post-processing), a vocabulary index off by one, errors that
stop a program. Left out because it needs an index of the other
system: approximate search on the true word, which alters candidate lists.

What the authors of SanText+ and CusText prove holds in a weaker sense, which
leaves kept words and, in CusText, other groups out; the claim of those rows is
epsilon between any two words, as a user who reads only epsilon takes it.
The sound counterpart of ``jax: categorical`` is a law in real arithmetic; what
is drawn keeps words down to about 2**-53.
"""

import dataclasses
import math
import sys

import numpy as np

from experiments import command_line
from experiments import peers_faults
from experiments import report
from jaxdp import auditing
from jaxdp import guarantees
from jaxdp import mechanisms
from jaxdp.mechanisms import calibration

KEY = ('mechanism', 'settings', 'table', 'epsilon')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows.

  Attributes:
    seed: of the sampled row; all others are exact.
    num_trials: of the sampled row, for each of its two inputs.
    significance: probability that its bound is too high.
  """
  seed: int = 0
  num_trials: int = 1_000_000
  significance: float = .05


QUICK = Config(num_trials=200_000)
_RUN = 'numpy'  # setting of the row that runs the forked workers
FIGURES = (report.Figure(
    title='Published implementations: measured over claimed epsilon',
    image='peers.png',
    mechanisms=tuple(fault.mechanism for fault in peers_faults.FAULTS),
    paper='Each implementation cites the mechanism that it means to be; the '
          'claim is that of its theorem, as the source says.'),)


def grid(config):
  """Returns (mechanism, settings, table, epsilon) of every row, in order."""
  del config
  return [(fault.mechanism, settings, fault.table, fault.epsilon)
          for fault, settings in _points()]


def _points():
  """A fault and the settings of its row; the workers are also run."""
  [workers] = [fault for fault in peers_faults.FAULTS
               if fault.law is peers_faults.forked_workers]
  return [(fault, fault.settings) for fault in peers_faults.FAULTS] + [
      (workers, {'run': _RUN})]


def run(config, done=frozenset()):
  """Yields one row a fault; those whose `KEY` is in ``done`` are skipped."""
  for fault, settings in _points():
    if (fault.mechanism, tuple(settings.items()), fault.table,
        fault.epsilon) not in done:
      yield (sampled_row(fault, config) if 'run' in settings
             else exact_row(fault))


def exact_row(fault, claim=None):
  """Audits the laws of a fault and of its counterpart.

  Args:
    fault: one of ``peers_faults.FAULTS``.
    claim: epsilon to audit against; None for the one it runs with.

  Returns:
    A dict of row fields.
  """
  table = peers_faults.make_table(fault.table)
  law = fault.law(table, fault.epsilon, **fault.settings)
  sound, promise = sound_law(fault)
  found = measure(law, fault.epsilon if claim is None else claim)
  w = found.pop('triple')
  words = _words(table, len(law.log_probs))
  return _row(fault, fault.settings, claim) | found | {
      'measured_kind': 'exact', 'witness': [words[i] for i in w],
      **_sound_fields(fault, promise, measure(sound, promise.epsilon), 'exact')}


def sound_law(fault):
  """The counterpart's Law on the fault's table, and its Guarantee."""
  table = peers_faults.make_table(fault.table)
  name, settings = fault.sound
  mechanism = mechanisms.get(name)
  params = mechanism.calibrate(table, epsilon=fault.epsilon, **settings)
  if fault.sound_law is not None:
    return fault.sound_law(table, fault.epsilon, **settings), params.guarantee
  ids = np.arange(len(table.words), dtype=np.int32)
  return peers_faults.Law(mechanism.log_prob(ids, params),
             mechanism.distances(ids, params)), params.guarantee


def measure(law, claim):
  """The exact epsilon of a Law, less its error, against a claim."""
  measured, triple = auditing.exact_metric_epsilon(law.log_probs, law.distances)
  w, w_prime, u = triple
  logs = np.abs(law.log_probs[[w, w_prime], u])
  low = measured
  if math.isfinite(measured):
    low -= (law.error * np.maximum(logs, 1.).sum()
            / law.distances[w, w_prime])
  return {'measured': measured, 'measured_low': float(low),
          'ratio': measured / claim, 'triple': triple,
          'verdict': 'violated' if low > claim else 'not violated'}


def _words(table, num):
  """Names of the V words, or of the V^2 texts of two."""
  if num == len(table.words):
    return table.words
  return [f'{a} {b}' for a in table.words for b in table.words]


def _row(fault, settings, claim=None):
  table = peers_faults.make_table(fault.table)
  guarantee = guarantees.Guarantee(
      epsilon=fault.epsilon if claim is None else claim, delta=0.,
      metric=fault.metric, relation='texts of equal length; distances add up',
      status='claimed', source=fault.source,
      conditions=calibration.REAL_CONDITIONS)
  return {'mechanism': fault.mechanism, 'settings': settings,
          'table': fault.table, 'epsilon': fault.epsilon,
          **report.guarantee_fields(guarantee),
          'vocabulary': len(table.words), 'dimension': table.vectors.shape[1]}


def _sound_fields(fault, promise, found, kind):
  name, settings = fault.sound
  return {'sound': label({'mechanism': name, 'settings': settings}),
          'sound_status': promise.status, 'sound_metric': promise.metric,
          'sound_measured': found['measured'], 'sound_measured_kind': kind,
          'sound_ratio': found['ratio'], 'sound_verdict': found['verdict']}


def sampled_row(fault, config):
  """Runs two workers on 'w0 w0' and on 'w0 w1' and bounds epsilon by trials.

  Two generators of one state are what two forked processes have; the sound
  counterpart gives each its own.
  """
  table = peers_faults.make_table(fault.table)
  distance = float(peers_faults.l2(table)[0, 1])
  shared, own = (
      _bound(table, fault.epsilon, distance, config, is_shared)
      for is_shared in (True, False))
  outcome = shared.pop('outcome')
  promise = mechanisms.get(fault.sound[0]).calibrate(
      table, epsilon=fault.epsilon, **fault.sound[1]).guarantee
  return _row(fault, {'run': _RUN}) | shared | {
      'measured_kind': 'lower bound', 'num_trials': config.num_trials,
      'significance': config.significance,
      'witness': ['w0 w1', 'w0 w0', _words(table, None)[outcome]],
      **_sound_fields(fault, promise, own, 'lower bound')}


def _bound(table, epsilon, distance, config, is_shared):
  law = peers_faults.normalized(-epsilon / 2 * peers_faults.l2(table))
  cdf = np.cumsum(np.exp(law), axis=1)
  cdf[:, -1] = 1.
  outputs = []
  for text in ((0, 1), (0, 0)):
    words = []
    for worker, word in enumerate(text):
      seed = (config.seed, text[1], 0 if is_shared else worker)
      u = np.random.default_rng(seed).random(config.num_trials)
      words.append(np.searchsorted(cdf[word], u, side='right'))
    outputs.append(words[0] * len(cdf) + words[1])
  found = auditing.sampled_epsilon_lower_bound(
      *outputs, distance, num_outcomes=len(cdf)**2,
      significance=config.significance)
  low = found.epsilon_lower
  return {'measured': low, 'measured_low': low, 'ratio': low / epsilon,
          'outcome': (found.outcomes or (0,))[0],
          'verdict': 'violated' if low > epsilon else 'not violated'}


# --- What is said about the rows


def findings(rows):
  """Sentences about the rows, every number read from them."""
  caught = [row for row in rows if row['verdict'] == 'violated']
  infinite = [row for row in caught if math.isinf(row['measured'])]
  worst = max(rows, key=lambda row: row['sound_ratio'])
  first = (f'{len(caught)} of {len(rows)} audits of faulty mechanisms find the '
           f'claim violated; in {len(infinite)} no finite epsilon holds.')
  last = (f'The largest ratio of a sound counterpart is '
          f'{worst["sound_ratio"]:.4g}, {worst["sound"]} on {worst["table"]}.')
  return [first, *map(_finding, rows), last]


def _finding(row):
  return (f'{label(row)} on {row["table"]}: claimed {row["claimed_epsilon"]:g},'
          f' measured {_number(row["measured"])} ({row["measured_kind"]}, '
          f'{", ".join(row["witness"])}); {row["sound"]}: '
          f'{_number(row["sound_measured"])}, {row["sound_verdict"]}.')


def _number(value):
  return 'infinite' if math.isinf(value) else f'{value:.4g}'


def label(row):
  """'mldp: TEM, outside score, package_words=400000' of a row."""
  return ', '.join([row['mechanism']] + [
      f'{k}={v}' for k, v in row['settings'].items()])


def plot(rows, path):
  """Draws one PNG: measured over claimed; infinite ones at the right edge."""
  from matplotlib.figure import Figure
  canvas = Figure(figsize=(8, 1.4 + .38 * len(rows)), layout='constrained')
  axis = canvas.subplots()
  finite = [row[name] for row in rows for name in ('ratio', 'sound_ratio')
            if math.isfinite(row[name])]
  edge = 30 * max(finite)
  for y, row in enumerate(rows):
    ratio = min(row['ratio'], edge)
    axis.plot([1., ratio], [y, y], color='tab:red', lw=7, alpha=.7,
              solid_capstyle='butt', label='with the fault' if not y else None)
    side = -1 if math.isinf(row['ratio']) else 1
    axis.annotate(_number(row['ratio']), (ratio, y), xytext=(4 * side, 0),
                  textcoords='offset points', va='center', fontsize=7,
                  ha='right' if side < 0 else 'left')
  at = range(len(rows))
  axis.scatter([row['sound_ratio'] for row in rows], at, s=26, color='k',
               marker='D', zorder=3, label='sound counterpart')
  axis.axvline(1., color='k', lw=.8, ls='--')
  axis.set(xscale='log', xlim=(min(finite) / 3, edge),
           ylim=(len(rows) - .5, -.5), xlabel='measured epsilon / claimed '
           'epsilon (a bar to the right edge is infinite)')
  axis.set_yticks(at, [f'{label(row)}\n{row["sound"]}' for row in rows],
                  fontsize=7)
  axis.grid(alpha=.3, axis='x')
  canvas.legend(fontsize='small', loc='outside upper center', ncols=2)
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
  command_line.main(sys.modules[__name__], 'peers_audit')
