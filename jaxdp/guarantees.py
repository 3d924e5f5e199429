r"""Guarantees: what is promised, how promises add up, and the card beside a file.

In the room: `Guarantee`, which every calibrated mechanism carries; its
composition (`sequential`, `parallel`, `group`, `to_pure`); what a policy for
unknown words does to it (`with_unknown_words`); the guarantee card (`card`,
`card_text`, `card_json`) and a ledger row. Everything runs on the host.

Metric DP: ``P(M(x) in S) <= exp(epsilon * distance(x, x')) P(M(x') in S) +
delta``. Pure and approximate DP are the same sentence with ``distance = 1``
between neighbours; there `metric` is `ADJACENCY`.

  >>> word = Guarantee(
  ...     epsilon=10., status='proved', source='Chatzikokolakis et al. (2013)',
  ...     conditions=(REAL_ARITHMETIC, IDEAL_RANDOM_BITS))
  >>> sequential([word, word]).epsilon
  20.0
  >>> to_pure(word, distance=1.5).epsilon
  15.0
  >>> with_unknown_words(word, 'keep', num_unknown=0).status
  'none'

References: Dwork & Roth (2014), The algorithmic foundations of differential
privacy; Chatzikokolakis et al. (2013), Broadening the scope of differential
privacy using metrics; Vadhan (2017), The complexity of differential privacy.
"""
import collections.abc
import dataclasses
import json
import math
import numbers
import re
import textwrap
from typing import Any

import jax

REAL_ARITHMETIC = 'real arithmetic'
IDEAL_RANDOM_BITS = 'ideal random bits'
INTEGER_GRID = 'integer grid'
ADJACENCY = 'adjacency'
STATUSES = ('none', 'claimed', 'proved')  # weakest first
UNKNOWN_POLICIES = ('error', 'unk', 'uniform', 'keep')
NOT_MEASURED = 'not measured'


def _real(name, value, advice, low=0., below=math.inf):
  """Returns `value` as a float in [low, below], or raises by `name`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise ValueError(f'{name}={value!r} must be a real number; {advice}')
  if not low <= float(value) <= below:  # also refuses NaN
    raise ValueError(f'{name}={value!r} is out of range; {advice}')
  return float(value)


def _count(name, value, minimum=0):
  """Returns `value` as an int that is at least `minimum`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (
      value < minimum):
    raise ValueError(f'{name}={value!r} must be an integer >= {minimum}')
  return int(value)


def _delta(value):
  """Returns `value` as a delta; one that reaches 1 promises nothing."""
  delta = _real('delta', value, 'give a probability in [0, 1)')
  if delta >= 1.:
    raise ValueError(
        f'delta={delta!r} must be below 1; use fewer releases, parts or group '
        'members, or status \'none\'')
  return delta


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantee:
  """What is promised about one release; hashable, static under `jax.jit`.

  Attributes:
    epsilon: budget in `unit`, >= 0; infinite where nothing is promised.
    delta: failure of DP, in [0, 1).
    metric: name of the distance between inputs ('l2', 'angular', ...), or
      `ADJACENCY` for pure and approximate DP.
    unit: unit of epsilon; follows `metric` where not given.
    relation: which two inputs are compared.
    status: 'proved', 'claimed' or 'none'; has no default on purpose.
    source: the theorem or the paper, with its number.
    conditions: what the theorem assumes. `IDEAL_RANDOM_BITS` includes that no
      two releases share a key.

  Raises:
    ValueError: if a field is out of range; if status 'none' comes with a
      finite epsilon; if status 'proved' hides `IDEAL_RANDOM_BITS`, or
      `REAL_ARITHMETIC` where `INTEGER_GRID` is not listed.
  """
  epsilon: float
  delta: float = 0.
  metric: str = 'l2'
  unit: str = ''
  relation: str = 'two words of the table, the rest of the text equal'
  status: str
  source: str
  conditions: tuple[str, ...] = ()

  def __post_init__(self):
    def put(name, value):
      object.__setattr__(self, name, value)
    put('epsilon', _real(
        'epsilon', self.epsilon, 'it is a budget >= 0, or infinite'))
    put('delta', _delta(self.delta))
    put('unit', self.unit or ('between neighbouring inputs' if self.is_pure
                              else 'per unit distance'))
    if isinstance(self.conditions, list):
      put('conditions', tuple(self.conditions))
    for name in ('metric', 'unit', 'relation', 'source'):
      if not isinstance(getattr(self, name), str) or not getattr(self, name):
        raise ValueError(
            f'{name}={getattr(self, name)!r} must be a text that is not empty')
    if not isinstance(self.conditions, tuple) or not all(
        isinstance(c, str) and c for c in self.conditions):
      raise ValueError(
          f'conditions={self.conditions!r} must be a tuple of texts')
    self._check_status()

  def _check_status(self):
    """Refuses a status that says more than the other fields allow."""
    if self.status not in STATUSES:
      raise ValueError(f'status={self.status!r} must be one of {STATUSES}')
    if self.status == 'none' and self.epsilon != math.inf:
      raise ValueError(
          f'epsilon={self.epsilon!r} must be infinite with status \'none\'; '
          'nothing is promised')
    needed = {IDEAL_RANDOM_BITS}
    if INTEGER_GRID not in self.conditions:
      needed.add(REAL_ARITHMETIC)
    missing = sorted(needed.difference(self.conditions))
    if self.status == 'proved' and missing:
      raise ValueError(
          f'conditions={self.conditions!r} must contain {missing}; a proof '
          'lists what it assumes')

  @property
  def is_pure(self) -> bool:
    """Whether epsilon compares neighbours and not inputs at a distance."""
    return self.metric == ADJACENCY

  def to_dict(self) -> dict[str, Any]:
    """Returns JSON-safe fields; `json` writes an infinite epsilon Infinity."""
    return dataclasses.asdict(self) | {'conditions': list(self.conditions)}

  @classmethod
  def from_dict(cls, fields) -> 'Guarantee':
    """Returns the guarantee that `to_dict` wrote; checks it again."""
    names = {f.name for f in dataclasses.fields(cls)}
    if set(fields) != names:
      raise ValueError(f'fields={sorted(fields)} must be {sorted(names)}')
    return cls(**dict(fields) | {'conditions': tuple(fields['conditions'])})


def _alike(guarantees):
  """Returns a list of guarantees that compare the same inputs."""
  guarantees = list(guarantees)
  if not guarantees:
    raise ValueError('guarantees=[] must hold at least one guarantee')
  for name in ('metric', 'unit', 'relation'):
    values = sorted({getattr(g, name) for g in guarantees})
    if len(values) > 1:
      raise ValueError(
          f'guarantees mix {name}={values}; convert each with to_pure first')
  return guarantees


def _composed(guarantees, theorem, **fields):
  """Returns the first guarantee with `fields`, weakest status, all conditions."""
  status = min((g.status for g in guarantees), key=STATUSES.index)
  sources = dict.fromkeys(g.source for g in guarantees)
  conditions = dict.fromkeys(c for g in guarantees for c in g.conditions)
  return dataclasses.replace(
      guarantees[0], status=status, conditions=tuple(conditions),
      source=f'{theorem}, of: {"; ".join(sources)}', **fields)


def sequential(guarantees) -> Guarantee:
  """Returns the guarantee of releasing the same input once for each entry.

  Epsilons add, deltas add, the weakest status stands, conditions unite. Holds
  for releases with independent keys; a later one may depend on earlier outputs.

  Args:
    guarantees: iterable of guarantees with one metric, unit and relation.

  Raises:
    ValueError: if it is empty or mixed, or if the deltas reach 1.

  References: Dwork & Roth (2014), Theorems 3.14, 3.16 and B.1, read for each
  pair of inputs; Chatzikokolakis et al. (2013) for a metric.
  """
  guarantees = _alike(guarantees)
  return _composed(
      guarantees, 'Dwork & Roth (2014), Theorem 3.16',
      epsilon=math.fsum(g.epsilon for g in guarantees),
      delta=math.fsum(g.delta for g in guarantees))


def parallel(guarantees) -> Guarantee:
  """Returns the guarantee of one release for each disjoint part of the input.

  The parts of a text are its words. Under a metric the distance of two texts
  of equal length is the SUM over the parts, epsilon is the largest, and deltas
  add because every part may change. Under `ADJACENCY` one part changes, so
  epsilon and delta are the largest; `group` covers several changed parts.

  Args:
    guarantees: iterable, one entry a part, of one metric, unit and relation.

  Raises:
    ValueError: if it is empty or mixed, or if the deltas reach 1.

  References: McSherry (2009), Theorem 4; for the sum of distances the product
  of the per-part bounds, Dwork & Roth (2014), Theorem 3.16.
  """
  guarantees = _alike(guarantees)
  epsilon = max(g.epsilon for g in guarantees)
  metric, relation = guarantees[0].metric, guarantees[0].relation
  if guarantees[0].is_pure:
    return _composed(
        guarantees, 'McSherry (2009), Theorem 4', epsilon=epsilon,
        delta=max(g.delta for g in guarantees),
        relation=f'disjoint parts, one of them changes; a part: {relation}')
  return _composed(
      guarantees, 'product over independent parts', epsilon=epsilon,
      delta=math.fsum(g.delta for g in guarantees), metric=f'sum of {metric}',
      relation='texts of equal length; distance is the sum over words; a word: '
      + relation)


def group(guarantee, size) -> Guarantee:
  """Returns the guarantee when `size` neighbouring steps separate the inputs.

  Args:
    guarantee: a guarantee under `ADJACENCY`. A metric already counts distance:
      use ``to_pure(parallel([guarantee] * size), size * diameter)``.
    size: number of neighbouring steps, k >= 1.

  Returns:
    ``k * epsilon`` and ``delta * sum_{i<k} exp(i * epsilon)``.

  Raises:
    ValueError: under a metric, for a bad size, or if delta reaches 1.

  References: Dwork & Roth (2014), Theorem 2.2; Vadhan (2017), Lemma 2.2.
  """
  size = _count('size', size, 1)
  if not guarantee.is_pure:
    raise ValueError(
        f'metric={guarantee.metric!r} already counts distance; use to_pure '
        'with the largest distance inside the group')
  delta = guarantee.delta
  if delta and size > 1:
    exponents = (i * guarantee.epsilon for i in range(size))
    # exp overflows near 709, far beyond any delta that could stay below 1.
    delta *= math.fsum(math.exp(e) if e < 700. else math.inf for e in exponents)
  return _composed(
      [guarantee], 'Vadhan (2017), Lemma 2.2', epsilon=size * guarantee.epsilon,
      delta=delta,
      relation=f'{size} steps, each: {guarantee.relation}')


def to_pure(guarantee, distance) -> Guarantee:
  """Returns the pure (or approximate) DP of inputs at most `distance` apart.

  Args:
    guarantee: a guarantee under a metric.
    distance: finite, >= 0, in that metric and unsquared; the diameter of the
      table gives a bound for any two words.

  Raises:
    ValueError: under `ADJACENCY`, or for a distance that is not finite.

  References: Chatzikokolakis et al. (2013), Definition 1.
  """
  distance = _real('distance', distance, 'give a finite distance >= 0',
                   below=math.nextafter(math.inf, 0.))
  if guarantee.is_pure:
    raise ValueError(f'metric={guarantee.metric!r} is pure already')
  infinite = math.isinf(guarantee.epsilon)  # inf * 0. would be NaN
  return _composed(
      [guarantee], 'Chatzikokolakis et al. (2013), Definition 1',
      epsilon=math.inf if infinite else guarantee.epsilon * distance,
      metric=ADJACENCY, unit='',
      relation=f'inputs at most {distance!r} apart in {guarantee.metric}; '
      + guarantee.relation)


def with_unknown_words(guarantee, policy, num_unknown) -> Guarantee:
  """Returns the guarantee when the text may hold words outside the table.

  Under 'keep' the status is 'none' for EVERY text, also for one in which no
  unknown word occurred: a text with one is a possible input, its words would
  leave as they are, and a guarantee that held only for some texts would itself
  tell which text was given. The condition then says that none occurred.

  Args:
    guarantee: the mechanism's guarantee for table words.
    policy: 'error' refuses the text; 'unk' writes one fixed token; 'uniform'
      draws a table word; 'keep' releases the unknown word.
    num_unknown: how many unknown tokens this text holds.

  Raises:
    ValueError: for another policy or count, or unknown words under 'error'.
  """
  num_unknown = _count('num_unknown', num_unknown)
  if policy not in UNKNOWN_POLICIES:
    raise ValueError(f'policy={policy!r} must be one of {UNKNOWN_POLICIES}')
  if policy == 'error':
    if num_unknown:
      raise ValueError(
          f'num_unknown={num_unknown} must be 0 under policy \'error\'; refuse '
          'the text, or choose \'unk\' or \'uniform\'')
    return guarantee
  if policy == 'keep':
    released = {
        0: 'unknown words are released as they are; none occurred',
        1: '1 unknown word was released as it is'}.get(
            num_unknown, f'{num_unknown} unknown words were released as they '
            'are')
    return dataclasses.replace(
        guarantee, epsilon=math.inf, delta=0., status='none',
        conditions=guarantee.conditions + (released,))
  return dataclasses.replace(guarantee, relation=(
      f'{guarantee.relation}; unknown words are equal to each other (distance '
      '0) and incomparable (infinite distance) with table words'))


def ledger_row(name, guarantee) -> dict[str, Any]:
  """Returns one ledger row.

  Args:
    name: 'claimed' (what the paper says), 'standard' (what the usual theorem
      gives) or 'certified'.
    guarantee: the guarantee of that ledger.

  Raises:
    ValueError: for another name.
  """
  names = ('claimed', 'standard', 'certified')
  if name not in names:
    raise ValueError(f'name={name!r} must be one of {names}')
  fields = ('epsilon', 'delta', 'status', 'source')
  return {'ledger': name} | {f: getattr(guarantee, f) for f in fields}
