"""The guarantee card that lies beside every privatised file. Host.

A card holds no word of the text. What was not measured is written so, never
left out. Reference: Arnold et al. (2023) and the questions that its proxies
leave open.
"""

import json
import math
import re
import sys
import textwrap

from jaxdp.guarantees import statements

NOT_MEASURED = statements.NOT_MEASURED
_real, _count = statements.checked_real, statements.checked_count
_times = statements.times

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


def _pairs(incomparable, num_words):
  """Returns how many pairs of words there are and have no promise."""
  total = num_words * (num_words - 1) // 2
  if incomparable is not None and _count(
      'incomparable_pairs', incomparable) > total:
    raise ValueError(f'incomparable_pairs={incomparable} must be at most '
                     f'{total}, all pairs of num_words={num_words}')
  return {'pairs': total, 'pairs_at_infinite_distance': (
      NOT_MEASURED if incomparable is None else int(incomparable))}


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
      f'operating system, {_count("entropy_bits", entropy_bits, 1)} bits; the '
      'key of one word has at most 64 of them')
  exact = statements.REAL_ARITHMETIC not in guarantee.conditions and (
      statements.INTEGER_GRID in guarantee.conditions)
  return {
      'entropy': 'seed (insecure: reproducible)' if is_seeded else entropy,
      'key_during_the_run': key_storage,
      'generator': (
          f'the condition "{statements.IDEAL_RANDOM_BITS}" does not hold: '
          'whoever guesses '
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
         diameter=None, incomparable_pairs=None, num_tokens=None, num_kept=0,
         num_unknown=0, longest_line=None, unknown_policy='error', releases=1,
         measured=None, public_table='unknown',
         independent_vocabulary='unknown', entropy_bits=None, is_seeded=False,
         key_storage='unknown'):
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
    pair_distance: 95% quantile of the distance of two comparable words.
    diameter: largest distance of two comparable words, or a bound on it.
    incomparable_pairs: pairs of table words at infinite distance.
    num_tokens: tokens of the file.
    num_kept: tokens of table words that the mechanism does not protect.
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
  whole = statements.with_unknown_words(guarantee, unknown_policy, num_unknown)
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
    public.append('the words that the mechanism does not protect')
  if incomparable_pairs:
    public.append('with which words each word is comparable')
  reading = _reading(guarantee, {
      'median_neighbor_distance': neighbor_distance,
      'p95_pair_distance': pair_distance, 'diameter': diameter})
  num_words = _count('num_words', num_words, 1)
  reading |= _pairs(incomparable_pairs, num_words)
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
          'num_words': num_words,
          'dimension': _count('dimension', dimension, 1),
          'trained_on_public_data': public_table,
          'vocabulary_independent_of_the_private_text': independent_vocabulary},
      'tokens': {
          'total': NOT_MEASURED if num_tokens is None else int(num_tokens),
          'protected': NOT_MEASURED if protected is None else protected,
          'not_protected_by_the_mechanism': {
              'count': num_kept, 'protection': 'none'},
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
