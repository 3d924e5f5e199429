r"""Metric privacy of discrete laws of which only samples are known.

Host. Samples come from anywhere: the ids that a word mechanism gives for one
input, many times, and for another. Half of each sample chooses what to test,
the other half tests it.

  >>> generator = np.random.default_rng(0)
  >>> outputs = generator.choice(2, 20_000, p=[.75, .25])
  >>> outputs_prime = generator.choice(2, 20_000, p=[.5, .5])
  >>> found = sampled_epsilon_lower_bound(
  ...     outputs, outputs_prime, 2., num_outcomes=2, significance=.05)
  >>> bool(.3 < found.epsilon_lower < np.log(2) / 2), found.direction
  (True, 'x_prime')

Shape letters: ``N`` samples.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxdp import confidence
from jaxdp.auditing import settings


_MOST_OUTCOMES = 2**27  # four counts of each are held


class SampledEpsilon(NamedTuple):
  """What samples of two discrete laws show. Python numbers and a tuple."""
  epsilon_lower: float  # per unit distance, never infinite
  outcomes: tuple  # the event: ids of outcomes, ascending
  direction: str  # 'x' or 'x_prime', the input that makes the event likelier
  ceiling: float  # the largest epsilon_lower so many samples can show


def sampled_epsilon_lower_bound(
    outputs, outputs_prime, distance=1., *, num_outcomes, significance,
    num_selected=16):
  r"""Bounds from below an epsilon of which only samples are known.

  For sampled discrete laws, such as a word mechanism without a ``log_prob``.
  The first half of each sample chooses events: single outcomes, and unions of
  those with the largest estimated log-ratios, in either direction. The second
  half, which no choice has seen, gives each of the ``m`` chosen events two
  Clopper-Pearson bounds at ``significance / (2 m)``, and

  .. math::
    \epsilon \ge \max_E \log\frac{P_{low}(E)}{P'_{high}(E)} / d .

  Guarantee: exceeds the true epsilon of the pair with probability at most
  ``significance``. The outputs must be independent draws, in an order that does
  not depend on them.

  Args:
    outputs: int ``[N]``, N >= 2, outcomes drawn from the first input.
    outputs_prime: int ``[N']``, the same from the second.
    distance: distance of the two inputs, positive and finite.
    num_outcomes: outcomes are ids in [0, num_outcomes), at most 2**27:
      every outcome is counted.
    significance: probability that the bound is wrong, in [1e-12, 0.5).
    num_selected: at most how many events to test.

  Returns:
    :class:`SampledEpsilon`; 0. where nothing is shown. ``ceiling`` is for the
    number of events that were tested.

  Raises:
    ValueError: outputs are not integers in range, or fewer than two;
      ``distance``, ``significance`` or a count is out of range.

  References: Bonferroni's inequality with Clopper and Pearson (1934).
  """
  _check_sampled(distance, num_outcomes, significance, num_selected)
  samples = {'x': _check_outputs(outputs, 'outputs', num_outcomes),
             'x_prime': _check_outputs(outputs_prime, 'outputs_prime',
                                       num_outcomes)}
  chosen, tested = {}, {}
  for name, sample in samples.items():
    half = len(sample) // 2
    chosen[name] = np.bincount(sample[:half], minlength=num_outcomes)
    tested[name] = np.bincount(sample[half:], minlength=num_outcomes)
  events = _choose_events(chosen, significance, num_selected)
  tail = significance / (2 * len(events))
  best = (-math.inf, (), 'x')
  for outcomes, direction in events:
    likely, unlikely = _ordered(tested, direction)
    bound = _log_ratio_bound(
        likely[outcomes].sum(), likely.sum(), unlikely[outcomes].sum(),
        unlikely.sum(), tail)
    best = max(best, (float(bound), outcomes, direction), key=lambda e: e[0])
  ceiling = max(
      _log_ratio_bound(likely.sum(), likely.sum(), 0, unlikely.sum(), tail)
      for likely, unlikely in (_ordered(tested, d) for d in ('x', 'x_prime')))
  bound, outcomes, direction = best
  return SampledEpsilon(
      max(0., bound) / float(distance),
      tuple(int(i) for i in np.sort(outcomes)), direction,
      max(0., float(ceiling)) / float(distance))


def _ordered(counts, direction):
  """Counts of the input that makes an event likelier, then of the other."""
  other = 'x_prime' if direction == 'x' else 'x'
  return counts[direction], counts[other]


def _log_ratio_bound(hits, trials, hits_other, trials_other, tail):
  """log(p / p') from below, each side at significance ``tail``."""
  low, _ = confidence.clopper_pearson(
      hits, trials, significance=tail, side='lower')
  _, high = confidence.clopper_pearson(
      hits_other, trials_other, significance=tail, side='upper')
  with np.errstate(divide='ignore'):
    return np.log(low) - np.log(high)


def _choose_events(counts, significance, num_selected):
  """The events that promise most: a list of (outcomes, direction)."""
  tail = significance / (2 * num_selected)
  events, scores = [], []
  for direction in ('x', 'x_prime'):
    likely, unlikely = _ordered(counts, direction)
    # An outcome that was not drawn can only weaken an event.
    seen = np.flatnonzero(likely)
    ratio = (likely[seen] + .5) / (unlikely[seen] + .5)
    order = seen[np.argsort(-ratio, kind='stable')]
    sizes = _union_sizes(len(order))
    hits = [np.concatenate([c[order], np.cumsum(c[order])[sizes - 1]])
            for c in (likely, unlikely)]
    scores.append(_log_ratio_bound(
        hits[0], likely.sum(), hits[1], unlikely.sum(), tail))
    events += [(order[i:i + 1], direction) for i in range(len(order))]
    events += [(order[:size], direction) for size in sizes]
  best = np.argsort(-np.concatenate(scores), kind='stable')[:num_selected]
  return [events[i] for i in best]


def _union_sizes(most):
  """2, 3, 4, 6, 8, 11, ...: near-equal unions would waste the selection."""
  sizes = np.unique(np.round(2 ** np.arange(1, 64, .5)))
  return sizes[sizes <= most].astype(np.int64)


def _check_outputs(outputs, name, num_outcomes):
  outputs = settings.check_array(name, outputs)
  if outputs.ndim != 1 or outputs.dtype.kind not in 'iu' or len(outputs) < 2:
    raise ValueError(f'{name} of shape {outputs.shape} and dtype '
                     f'{outputs.dtype} must be int [N] with N >= 2: one half '
                     'chooses and the other tests')
  if outputs.min() < 0 or outputs.max() >= num_outcomes:
    raise ValueError(f'{name} reach from {outputs.min()} to {outputs.max()}; '
                     f'outcomes lie in [0, num_outcomes={num_outcomes})')
  return outputs


def _check_sampled(distance, num_outcomes, significance, num_selected):
  settings.check_number(
      'distance', distance, lambda x: 0 < x < math.inf, 'positive and finite; '
      'nothing is promised of inputs that are not comparable')
  settings.check_significance(significance)
  settings.check_whole('num_outcomes', num_outcomes, 1, _MOST_OUTCOMES)
  settings.check_whole('num_selected', num_selected, 1, 2**20)
