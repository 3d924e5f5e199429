"""Which event an audit tests: thresholds on a score, chosen on other trials.

Host, NumPy. A bad choice costs power and never validity: the trials that choose
an event are not the ones that test it.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> threshold, direction = choose(
...     rng.normal(size=2000), rng.normal(size=2000) + 2., 10_000, 0., .05)
>>> direction  # scores at or above the threshold are likelier under x_prime
'x_prime'
"""

import numpy as np
from scipy import special

_LUCK = 2.5  # deviations
_LOOKED_AT = 200  # thresholds tried


def choose(mine, theirs, num, delta, significance):
  """(threshold, direction) that promise the highest bound from num trials."""
  looked = candidates(np.concatenate([mine, theirs]))
  counts = [_reaching(s, looked) for s in (mine, theirs)]
  i, direction = choose_counts(*counts, mine.size, num, delta, significance)
  return looked[i], direction


def choose_counts(hits, hits_prime, num_chosen, num, delta, significance):
  """Index and direction of the most promising of many events.

  The frequencies are first moved against the event, by as many deviations as
  chance reaches in one of some hundred tails: the one that it favoured most
  must not win. Wilson limits serve here, for speed: a choice needs no coverage.
  """
  z = -float(special.ndtri(significance / 2))  # 1 - s would lose digits
  best = (-1., 0, 'x')
  for direction in ('x', 'x_prime'):
    first, second = (hits, hits_prime) if direction == 'x' else (
        hits_prime, hits)
    low = _wilson(_wilson(first / num_chosen, num_chosen, -_LUCK), num, -z)
    high = _wilson(_wilson(second / num_chosen, num_chosen, _LUCK), num, z)
    with np.errstate(divide='ignore', invalid='ignore'):
      promised = np.log(np.fmax((low - delta) / high,
                                (1 - high - delta) / (1 - low)))
    promised = np.where(np.isnan(promised), -np.inf, promised)
    i = int(np.argmax(promised))
    best = max(best, (float(promised[i]), i, direction))
  return best[1:]


def _wilson(rate, num, z):
  """A frequency of num trials moved by z deviations (Wilson), in [0, 1]."""
  middle = rate + z * z / (2 * num)
  spread = z * np.sqrt(rate * (1 - rate) / num + z * z / (4 * num**2))
  return np.clip((middle + spread) / (1 + z * z / num), 0., 1.)


def candidates(pooled):
  """About 200 thresholds, dense in both tails, float32 ascending."""
  finite = np.sort(pooled[~np.isnan(pooled)])
  if not finite.size:
    return np.zeros(_LOOKED_AT, np.float32)
  tail = np.geomspace(1, max(1., finite.size / 2), _LOOKED_AT // 2)
  ranks = np.concatenate([tail - 1, finite.size - tail])
  looked = np.sort(finite[np.clip(ranks.astype(np.int64), 0, finite.size - 1)])
  return looked.astype(np.float32)


def _reaching(scores_, looked):
  """How many scores reach each threshold; NaN reaches none."""
  ordered = np.sort(scores_[~np.isnan(scores_)])
  return ordered.size - np.searchsorted(ordered, looked, side='left')
