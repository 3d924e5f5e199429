"""Guarantees and how they compose. Host.

See the package docstring for the rules and an example.
"""

import dataclasses
import math
import numbers
import sys
from typing import Any

import jax

REAL_ARITHMETIC = 'real arithmetic'
IDEAL_RANDOM_BITS = 'ideal random bits'
INTEGER_GRID = 'integer grid'
ADJACENCY = 'adjacency'
STATUSES = ('none', 'claimed', 'proved')  # weakest first
UNKNOWN_POLICIES = ('error', 'unk', 'uniform', 'keep')
LEDGERS = ('claimed', 'standard', 'certified')
NOT_MEASURED = 'not measured'


def checked_real(name, value, advice, high=math.inf):
  """Returns `value` as a float in [0, high], or raises by `name`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real) or (
      not 0. <= float(value) <= high):  # NaN too; a float32 would round high
    raise ValueError(f'{name}={value!r} must be a number in range; {advice}')
  return float(value)


def checked_count(name, value, minimum=0):
  """Returns `value` as an int that is at least `minimum`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (
      value < minimum):
    raise ValueError(f'{name}={value!r} must be an integer >= {minimum}')
  return int(value)


def times(epsilon, distance):
  """Returns the product; infinite stays infinite at distance 0."""
  return math.inf if math.isinf(epsilon) else epsilon * distance


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
    unit = self.unit or ('between neighbouring inputs' if self.is_pure
                         else 'per unit distance')
    epsilon = checked_real('epsilon', self.epsilon,
                           'it is a budget >= 0, or infinite')
    delta = checked_real('delta', self.delta,
                         'it is a probability below 1; use fewer releases, '
                         'parts or group members', math.nextafter(1., 0.))
    for name, value in (('epsilon', epsilon), ('delta', delta), ('unit', unit)):
      object.__setattr__(self, name, value)
    for name in ('metric', 'unit', 'relation', 'source'):
      if not (isinstance(getattr(self, name), str) and getattr(self, name)):
        raise ValueError(f'{name}={getattr(self, name)!r} must be a text')
    if not isinstance(self.conditions, tuple) or not all(
        isinstance(c, str) for c in self.conditions):
      raise ValueError(
          f'conditions={self.conditions!r} must be a tuple of texts')
    if self.status not in STATUSES:
      raise ValueError(f'status={self.status!r} must be one of {STATUSES}')
    if self.status == 'none' and self.epsilon != math.inf:
      raise ValueError(f'epsilon={self.epsilon!r} must be infinite with status '
                       '\'none\'; nothing is promised')
    needed = {IDEAL_RANDOM_BITS} if INTEGER_GRID in self.conditions else {
        IDEAL_RANDOM_BITS, REAL_ARITHMETIC}
    if self.status == 'proved' and not needed.issubset(self.conditions):
      raise ValueError(
          f'conditions={self.conditions!r} must contain {sorted(needed)}; a '
          'proof lists what it assumes')

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
          f'guarantees mix {name}={values}; bring them to one {name} first, '
          'to_pure leaves the metrics behind')
  return guarantees


def _composed(guarantees, theorem, **fields):
  """Returns `fields` with the weakest status and every condition."""
  sources = dict.fromkeys(g.source for g in guarantees)
  return dataclasses.replace(
      guarantees[0],
      status=min((g.status for g in guarantees), key=STATUSES.index),
      conditions=tuple(dict.fromkeys(c for g in guarantees
                                     for c in g.conditions)),
      source=f'{theorem}, of: {"; ".join(sources)}', **fields)


def sequential(guarantees) -> Guarantee:
  """Returns the guarantee of releasing the same input once for each entry.

  Epsilons add, deltas add, the weakest status stands, conditions unite. Keys
  must be independent; a later release may depend on earlier outputs.

  Args:
    guarantees: iterable of guarantees of one metric, unit and relation.

  Raises:
    ValueError: if it is empty or mixed, or if the deltas reach 1.

  References: Dwork & Roth (2014), Theorems 3.14 and 3.16, read for each pair
  of inputs; Chatzikokolakis et al. (2013) for a metric.
  """
  guarantees = _alike(guarantees)
  return _composed(
      guarantees, 'Dwork & Roth (2014), Theorem 3.16',
      epsilon=math.fsum(g.epsilon for g in guarantees),
      delta=math.fsum(g.delta for g in guarantees))


def parallel(guarantees) -> Guarantee:
  """Returns the guarantee of one release for each disjoint part of the input.

  The parts of a text are its words. Under a metric, texts of equal length are
  compared at the SUM of their words' distances: epsilon is the largest one,
  and deltas add because every part may change. Under `ADJACENCY` one part
  changes: epsilon and delta are the largest, and `group` covers several.

  Args:
    guarantees: iterable, one entry a part, of one metric, unit and relation.

  Raises:
    ValueError: if it is empty or mixed, or if the deltas reach 1.

  References: McSherry (2009), Theorem 4; Dwork & Roth (2014), Theorem 3.16,
  for the product over parts that all change.
  """
  guarantees = _alike(guarantees)
  pure, relation = guarantees[0].is_pure, guarantees[0].relation
  deltas = [g.delta for g in guarantees]
  if pure:
    relation = f'disjoint parts, one of them changes; a part: {relation}'
  elif not relation.startswith('texts of equal length'):  # sums of sums agree
    relation = ('texts of equal length; distance is the sum over words; a '
                f'word: {relation}')
  return _composed(
      guarantees, 'McSherry (2009), Theorem 4' if pure
      else 'product over independent parts', relation=relation,
      epsilon=max(g.epsilon for g in guarantees),
      delta=max(deltas) if pure else math.fsum(deltas))


def group(guarantee, size) -> Guarantee:
  r"""Returns the guarantee when `size` neighbouring steps separate the inputs.

  .. math::
    (k \epsilon, \; \delta \sum_{i<k} e^{i \epsilon})

  Args:
    guarantee: under `ADJACENCY`. A metric already counts distance: use
      ``to_pure(guarantee, size * diameter)`` with the guarantee of the text.
    size: number of neighbouring steps, k >= 1.

  Raises:
    ValueError: under a metric, for a bad size, or if delta reaches 1.

  References: Dwork & Roth (2014), Theorem 2.2; Vadhan (2017), Lemma 2.2.
  """
  size = checked_count('size', size, 1)
  if not guarantee.is_pure:
    raise ValueError(
        f'metric={guarantee.metric!r} already counts distance; use to_pure '
        'with the largest distance inside the group')
  epsilon = guarantee.epsilon
  if size == 1 or guarantee.delta == 0.:
    growth = 1.
  elif size * epsilon > 700.:  # exp overflows; no delta stays below 1
    growth = math.inf
  else:
    growth = math.expm1(size * epsilon) / math.expm1(epsilon) if (
        epsilon) else size
  return _composed(
      [guarantee], 'Vadhan (2017), Lemma 2.2', epsilon=size * epsilon,
      delta=guarantee.delta * growth,
      relation=f'groups of {size}, each step: {guarantee.relation}')


def to_pure(guarantee, distance) -> Guarantee:
  """Returns the DP, no longer metric, of inputs at most `distance` apart.

  Args:
    guarantee: a guarantee under a metric; its delta stays.
    distance: finite, >= 0, in that metric and unsquared; k words that each
      move at most a diameter are ``k * diameter`` apart.

  Raises:
    ValueError: under `ADJACENCY`, or for a distance that is not finite.

  References: Chatzikokolakis et al. (2013), Definition 1.
  """
  distance = checked_real('distance', distance, 'give a finite distance >= 0',
                   high=sys.float_info.max)
  if guarantee.is_pure:
    raise ValueError(f'metric={guarantee.metric!r} is pure already')
  return _composed(
      [guarantee], 'Chatzikokolakis et al. (2013), Definition 1',
      epsilon=times(guarantee.epsilon, distance), metric=ADJACENCY, unit='',
      relation=f'inputs at most {distance!r} apart in {guarantee.metric}; '
      + guarantee.relation)


def with_unknown_words(guarantee, policy, num_unknown) -> Guarantee:
  """Returns the guarantee when the text may hold words outside the table.

  Under 'keep' the status is 'none' for EVERY text, also for one in which no
  unknown word occurred: a text with one is a possible input whose words leave
  as they are, and a promise made only to some texts tells which text it was.

  Args:
    guarantee: the mechanism's guarantee for table words.
    policy: 'error' refuses the text; 'unk' writes one fixed token; 'uniform'
      draws a table word; 'keep' releases the unknown word.
    num_unknown: how many unknown tokens this text holds.

  Raises:
    ValueError: for another policy or count, or unknown words under 'error'.
  """
  num_unknown = checked_count('num_unknown', num_unknown)
  if policy not in UNKNOWN_POLICIES:
    raise ValueError(f'policy={policy!r} must be one of {UNKNOWN_POLICIES}')
  if policy == 'error' and num_unknown:
    raise ValueError(
        f'num_unknown={num_unknown} must be 0 under policy \'error\'; refuse '
        'the text, or choose \'unk\' or \'uniform\'')
  if policy == 'error':
    return guarantee
  if policy != 'keep':
    return dataclasses.replace(guarantee, relation=(
        f'{guarantee.relation}; unknown words are equal to each other '
        '(distance 0) and incomparable (infinite distance) with table words'))
  words = '1 unknown word was released as it is' if num_unknown == 1 else (
      f'{num_unknown} unknown words were released as they are')
  if not num_unknown:
    words = 'unknown words are released as they are; none occurred'
  return dataclasses.replace(
      guarantee, epsilon=math.inf, delta=0., status='none',
      conditions=guarantee.conditions + (words,))


def ledger_row(name, guarantee) -> dict[str, Any]:
  """Returns the row of ledger `name`: 'claimed', 'standard' or 'certified'."""
  if name not in LEDGERS:
    raise ValueError(f'name={name!r} must be one of {LEDGERS}')
  fields = ('epsilon', 'delta', 'status', 'source')
  return {'ledger': name} | {f: getattr(guarantee, f) for f in fields}
