r"""The Habernal panel: our auditor beside the NumPy formulation of its authors.

  python -m benchmarks.audit_bench --mechanism=laplace

For each dimension n, seven epsilons: ours draws the noise once for all of them,
in float32 and in chunks that stay in cache; the baseline is vectorised NumPy in
float64, one epsilon after the other, counting cells of a tiled vote, as the
authors' code does. Both are checked against the closed form before they count.

A row has CPU seconds a million pairs and what 10 M pairs would take at that
rate, the paper's size (the scaling is linear: printed, not measured, unless
``--num_trials=10000000``). The last row sums the panel.
"""

import math
import os

from absl import app
from absl import flags
import jax
import numpy as np

from benchmarks import harness
from experiments import habernal22_fig1

_PAPER_TRIALS = 10_000_000


def numpy_counts(mechanism, epsilon, n, num_trials, rng):
  """Votes of 1 under both inputs, as a NumPy user writes the experiment."""
  counts = []
  for x in (np.zeros((num_trials, n)), np.ones((num_trials, n))):
    uniform = rng.random((num_trials, n))
    scale = (1. if mechanism == 'adept' else n) / epsilon
    if mechanism == 'dptext':
      with np.errstate(invalid='ignore', divide='ignore'):
        noise = -np.sign(uniform) * np.log(1 - 2 * np.abs(uniform))
      y = x + np.nan_to_num(noise) * scale
    else:
      centred = uniform - .5
      with np.errstate(divide='ignore'):
        noise = -np.sign(centred) * np.log(1 - 2 * np.abs(centred))
      y = x + noise * scale
    bits = np.where(y < .5, 0, 1)
    vote = np.round(np.mean(bits, axis=1))
    tiled = np.tile(vote[:, None], (1, n))
    counts.append(int(np.count_nonzero(tiled == 1)) // n)
  return counts


def check(mechanism, epsilon, n, num_trials, counts):
  """Raises where counts are not those of the closed form (6 deviations)."""
  votes = habernal22_fig1.vote_probabilities(mechanism, epsilon, n)
  for count, (log_p, _) in zip(counts, votes):
    p = math.exp(log_p)
    slack = 6 * math.sqrt(num_trials * p * (1 - p)) + 6
    if abs(count - num_trials * p) > slack:
      raise ValueError(f'{mechanism}, epsilon {epsilon}, n {n}: {count} votes '
                       f'of {num_trials}, expected {num_trials * p:.1f}')


def panel(mechanism, num_trials, numpy_trials, dimensions=None):
  """Yields one row a dimension, then the sum.

  Args:
    mechanism: 'laplace', 'adept' or 'dptext'.
    num_trials: pairs of ours a cell.
    numpy_trials: pairs of the baseline a cell.
    dimensions: n of the rows; None for the paper's.
  """
  config = habernal22_fig1.Config(num_trials=num_trials)
  total = np.zeros(2)
  for n in dimensions or config.dimensions:
    # The block size, and so the program, depends on the number of trials.
    _, first = harness.once(
        lambda: habernal22_fig1.sweep(config, mechanism, n))
    rows, ours = harness.once(
        lambda: habernal22_fig1.sweep(config, mechanism, n))
    for row in rows:
      check(mechanism, row['epsilon'], n, num_trials,
            (row['hits'], row['hits_prime']))
    rng = np.random.default_rng(1234)
    theirs = 0.
    for epsilon in config.epsilons:
      counts, spent = harness.once(lambda: numpy_counts(
          mechanism, epsilon, n, numpy_trials, rng))
      check(mechanism, epsilon, n, numpy_trials, counts)
      theirs += spent.cpu
    rates = np.array([ours.cpu / num_trials, theirs / numpy_trials])
    total += rates * _PAPER_TRIALS
    yield _row(mechanism, n, num_trials, numpy_trials, rates) | {
        'first_call_wall': first.wall, 'steady_wall': ours.wall}
  yield _row(mechanism, 'all', num_trials, numpy_trials,
             total / _PAPER_TRIALS) | {'machine': harness.machine()}


def _row(mechanism, n, num_trials, numpy_trials, rates):
  ours, theirs = map(float, rates)
  return {'benchmark': 'audit', 'mechanism': mechanism, 'n': n,
          'pairs': num_trials, 'numpy_pairs': numpy_trials,
          'cpu_seconds_per_million': ours * 1e6,
          'numpy_cpu_seconds_per_million': theirs * 1e6,
          'cpu_seconds_at_10_million': ours * _PAPER_TRIALS,
          'numpy_cpu_seconds_at_10_million': theirs * _PAPER_TRIALS,
          'ratio_to_numpy': theirs / ours}


def define_flags():
  """Defines the flags of this binary."""
  flags.DEFINE_enum('mechanism', 'laplace', ['laplace', 'adept', 'dptext'],
                    'Which panel.')
  flags.DEFINE_integer('num_trials', 1_000_000, 'Pairs of ours a cell.',
                       lower_bound=1_000)
  flags.DEFINE_integer('numpy_trials', 100_000, 'Pairs of the baseline a cell.',
                       lower_bound=1_000)
  flags.DEFINE_bool('quick', False, 'Two dimensions and fewer pairs.')
  flags.DEFINE_bool('one_core', True, 'Pin to one core, where a CPU second is '
                    'not shared with a hyper-thread.')
  flags.DEFINE_string('out', None, 'File of the rows; standard output else.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  if values.one_core and hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  sizes = ((20_000, 20_000, (1, 8)) if values.quick else
           (values.num_trials, values.numpy_trials, None))
  harness.emit(panel(values.mechanism, *sizes), values.out)


if __name__ == '__main__':
  define_flags()
  jax.config.config_with_absl()
  app.run(main)
