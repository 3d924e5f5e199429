r"""What is promised, how promises add up, and the card beside a file.

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
import dataclasses
import json
import math
import numbers
import re
import sys
import textwrap
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


def _real(name, value, advice, high=math.inf):
  """Returns `value` as a float in [0, high], or raises by `name`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real) or (
      not 0. <= float(value) <= high):  # NaN too; a float32 would round high
    raise ValueError(f'{name}={value!r} must be a number in range; {advice}')
  return float(value)


def _count(name, value, minimum=0):
  """Returns `value` as an int that is at least `minimum`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (
      value < minimum):
    raise ValueError(f'{name}={value!r} must be an integer >= {minimum}')
  return int(value)


def _times(epsilon, distance):
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
    for name, value in (
        ('epsilon', _real('epsilon', self.epsilon,
                          'it is a budget >= 0, or infinite')),
        ('delta', _real('delta', self.delta, 'it is a probability below 1; '
                        'use fewer releases, parts or group members',
                        math.nextafter(1., 0.))), ('unit', unit)):
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
  size = _count('size', size, 1)
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
  distance = _real('distance', distance, 'give a finite distance >= 0',
                   high=sys.float_info.max)
  if guarantee.is_pure:
    raise ValueError(f'metric={guarantee.metric!r} is pure already')
  return _composed(
      [guarantee], 'Chatzikokolakis et al. (2013), Definition 1',
      epsilon=_times(guarantee.epsilon, distance), metric=ADJACENCY, unit='',
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
  num_unknown = _count('num_unknown', num_unknown)
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


# --- The card

_MEASURED = (
    'unchanged_q50', 'unchanged_q90', 'unchanged_q90_interval', 'support_q10',
    'support_q10_interval', 'support_q50', 'support_q90')
_FATES = {  # what happened to an unknown word
    'error': 'the text would have been refused',
    'unk': 'replaced by one fixed token',
    'uniform': 'replaced by a table word drawn uniformly',
    'keep': 'released as it is'}
_PROTECTIONS = {
    'error': 'not released',
    'unk': 'hidden among unknown words; that it was unknown is public',
    'uniform': 'hidden among unknown words; that it was unknown may leak',
    'keep': 'none'}


def _reading(guarantee, distances):
  """Returns each distance, or that it is not measured, and epsilon times it."""
  out = {}
  for name, value in distances.items():
    if value is not None:
      value = _real(name, value, 'give a distance >= 0', sys.float_info.max)
    out[name] = NOT_MEASURED if value is None else value
    out[f'epsilon_times_{name}'] = (
        'does not apply to pure DP' if guarantee.is_pure else
        NOT_MEASURED if value is None else _times(guarantee.epsilon, value))
  return out


def _text_bound(guarantee, num_words, diameter):
  """Returns the DP, no longer metric, of a text whose words all change."""
  distance = 1. if guarantee.is_pure else diameter
  if num_words is None:
    return NOT_MEASURED
  epsilon = NOT_MEASURED if distance is None else _times(
      guarantee.epsilon, num_words * distance)
  if guarantee.status == 'none':
    epsilon = math.inf
  return {'words': num_words, 'epsilon': epsilon,
          'delta': min(1., num_words * guarantee.delta)}


def _measured(measured):
  """Returns N_w and S_w with nothing left out."""
  measured = dict(measured or {})
  counts = ('num_runs', 'num_sampled')
  unknown = sorted(set(measured).difference(_MEASURED, counts))
  if unknown:
    raise ValueError(f'measured={unknown} must be among {_MEASURED + counts}')
  out = {'note': 'empirical, not a guarantee'}
  for name in _MEASURED + counts:
    value = measured.get(name)
    if value is None:
      out[name] = NOT_MEASURED
    elif name in counts:
      out[name] = _count(name, value, 1)
    elif name.endswith('interval'):
      out[name] = [_real(name, v, 'give two fractions', 1.) for v in value]
    else:
      out[name] = _real(name, value, 'give a fraction of the runs', 1.)
  return out


def _randomness(guarantee, entropy_bits, is_seeded, key_storage):
  """Returns where the noise came from and which condition that breaks."""
  if is_seeded and entropy_bits is not None:
    raise ValueError(
        f'entropy_bits={entropy_bits!r} must be None for a seeded run')
  entropy = 'unknown' if entropy_bits is None else (
      f'operating system, {_count("entropy_bits", entropy_bits, 1)} bits')
  exact = REAL_ARITHMETIC not in guarantee.conditions and (
      INTEGER_GRID in guarantee.conditions)
  return {
      'entropy': 'seed (insecure: reproducible)' if is_seeded else entropy,
      'key_during_the_run': key_storage,
      'generator': (
          f'the condition "{IDEAL_RANDOM_BITS}" does not hold: whoever guesses '
          'the seed can redo the noise' if is_seeded else
          'pseudo-random, and not offered as a cryptographic generator'),
      'floating_point': (
          'drawn on an integer grid, without rounding' if exact else
          'computed in floating point: the law that was drawn differs from '
          'the law of the theorem by rounding, which epsilon does not cover')}


def _check_facts(settings, table_digest, *declared):
  """Raises if the card would hold more, or other, than facts."""
  if not re.fullmatch('[0-9a-f]{64}', str(table_digest)):
    raise ValueError(f'table_digest={table_digest!r} must be a SHA-256, 64 '
                     'lower-case hexadecimal digits')
  for name, value in settings.items():
    if not isinstance(value, (str, int, float, type(None))) or (
        str(value) == 'nan' or len(str(value)) > 80):
      raise ValueError(f'settings[{name!r}]={value!r} must be a Python number, '
                       'boolean or short text; a card holds no words')
  for name, value in zip(('public_table', 'independent_vocabulary'), declared):
    if value not in ('declared', 'unknown'):
      raise ValueError(f'{name}={value!r} must be \'declared\' or \'unknown\'')


def card(guarantee, *, mechanism, settings, table_name, table_digest,
         num_words, dimension, neighbor_distance=None, pair_distance=None,
         diameter=None, num_tokens=None, num_kept=0, num_unknown=0,
         longest_line=None, unknown_policy='error', releases=1, measured=None,
         public_table='unknown', independent_vocabulary='unknown',
         entropy_bits=None, is_seeded=False, key_storage='unknown'):
  """Returns the guarantee card of one privatized file; holds no word of it.

  Args:
    guarantee: for table words; `unknown_policy` is applied to it here.
    mechanism: its name.
    settings: dict of numbers, booleans and short texts; never word lists.
    table_name: name of the embedding table.
    table_digest: its SHA-256, 64 hexadecimal digits.
    num_words: V, words of the table.
    dimension: D of its vectors.
    neighbor_distance: median distance to the nearest neighbour, in the metric.
    pair_distance: 95% quantile of the distance of two words.
    diameter: largest distance of two words, or a bound on it.
    num_tokens: tokens of the file.
    num_kept: table words that the mechanism does not protect.
    num_unknown: tokens outside the table.
    longest_line: protected words of the longest line.
    unknown_policy: see `with_unknown_words`.
    releases: of this text so far, this one counted.
    measured: dict of N_w (`unchanged_q50`, ...) and S_w (`support_q10`, ...)
      quantiles over words, `num_runs` and `num_sampled`.
    public_table: 'declared' if it was trained on public data.
    independent_vocabulary: 'declared' if it was chosen without this text.
    entropy_bits: bits the operating system gave to the key.
    is_seeded: whether the key came from a seed.
    key_storage: where the key was kept during the run.

  Returns:
    JSON-safe dict; what was not given says so, nothing is left out.

  Raises:
    ValueError: if a fact is out of range or contradicts another.
  """
  _check_facts(settings, table_digest, public_table, independent_vocabulary)
  whole = with_unknown_words(guarantee, unknown_policy, num_unknown)
  num_unknown, num_kept = int(num_unknown), _count('num_kept', num_kept)
  protected = None
  if longest_line is not None:
    longest_line = _count('longest_line', longest_line)
  if num_tokens is not None:
    protected = _count('num_tokens', num_tokens) - num_unknown - num_kept
    if protected < (longest_line or 0):
      raise ValueError(f'num_tokens={num_tokens} must cover num_kept, '
                       'num_unknown and longest_line')
  public = ['white space', 'line breaks', 'number and order of tokens']
  if unknown_policy != 'error':
    public.append('which tokens were unknown')
  if unknown_policy == 'keep':
    public.append('the unknown words')
  if num_kept:
    public.append('the words that the mechanism kept')
  reading = _reading(guarantee, {
      'median_neighbor_distance': neighbor_distance,
      'p95_pair_distance': pair_distance, 'diameter': diameter})
  if diameter is not None:
    diameter = reading['diameter']
  return {
      'guarantee': whole.to_dict(),
      'mechanism': mechanism, 'settings': dict(sorted(settings.items())),
      'table_words': guarantee.to_dict() | reading,
      'text_bound': {
          'compares': 'any two texts with the same public part',
          'longest_line': _text_bound(whole, longest_line, diameter),
          'file': _text_bound(whole, protected, diameter)},
      'table': {
          'name': table_name, 'sha256': table_digest,
          'num_words': _count('num_words', num_words, 1),
          'dimension': _count('dimension', dimension, 1),
          'trained_on_public_data': public_table,
          'vocabulary_independent_of_the_private_text': independent_vocabulary},
      'tokens': {
          'total': NOT_MEASURED if num_tokens is None else int(num_tokens),
          'protected': NOT_MEASURED if protected is None else protected,
          'kept_by_the_mechanism': {'count': num_kept, 'protection': 'none'},
          'unknown': {
              'count': num_unknown, 'policy': unknown_policy,
              'what_happened': _FATES[unknown_policy],
              'protection': _PROTECTIONS[unknown_policy]}},
      'public': public,
      'releases': _count('releases', releases, 1),
      'each_release': 'adds its epsilon to that of this text',
      'measured': _measured(measured),
      'randomness': _randomness(
          guarantee, entropy_bits, is_seeded, key_storage)}


def card_json(fields) -> str:
  """Returns the card as JSON, keys in the order of the card."""
  return json.dumps(fields, indent=2) + '\n'


def card_text(fields) -> str:
  """Returns the card to read, at most 80 columns wide."""
  return 'GUARANTEE CARD\n' + ''.join(
      '\n' + '\n'.join(_lines(name, value, '')) + '\n'
      for name, value in fields.items())


def _lines(name, value, indent):
  """Yields the lines of one entry, what it holds indented under it."""
  label = f'{indent}{name.replace("_", " ")}:'
  if isinstance(value, dict):
    yield label
    for key, item in value.items():
      yield from _lines(key, item, indent + '  ')
    return
  if isinstance(value, (list, tuple)):
    value = '; '.join(str(v) for v in value) or 'not stated'
  elif value == math.inf:
    value = 'infinite (nothing is promised)'
  yield from textwrap.wrap(
      f'{label} {value}', 80, subsequent_indent=indent + '    ')
