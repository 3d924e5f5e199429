r"""Ledgers: what standard differential privacy says of a training run. Host.

In the room: ledger B, standard DP between data sets that differ in one whole
record, image and label (`standard`); the one-shot functional mechanism, which
does have a proof (`one_shot_moments`); the row of any ledger, a dict made of a
`Guarantee` (`part_row`), what it assumes about the key (`with_key_condition`),
and `ledger_text`, which prints ledgers side by side. Ledger A, what the paper
claims, is in ``claims``. An infinite epsilon stays infinite in a row.

StoBatch on MNIST as published, and with independent noise of that scale:

  >>> published = standard(
  ...     noise_sharing='dataset', dimension=784, scale=32.27, delta=1e-5,
  ...     labels='perturbed_loss')
  >>> published[-1]['part'], published[-1]['epsilon'], published[-1]['status']
  ('total', inf, 'none')
  >>> sound = standard(
  ...     noise_sharing='none', dimension=784, scale=32.27, delta=1e-5,
  ...     labels='randomized_response', label_epsilon=1.)
  >>> sound[-1]['part'], sound[-1]['status'], round(sound[-1]['epsilon'], 2)
  ('total', 'proved', 9.77)

A run whose key comes from a seed keeps its rows, for they speak about the
algorithm; ``seeded=True`` writes `KEY_NOT_SECRET` among the conditions of
every row, and `ledger_text` prints it apart, as a condition that is NOT met.

References: Phan et al. (2020), Scalable differential privacy with certified
robustness in adversarial learning; Zhang et al. (2012), Functional mechanism;
Kasiviswanathan et al. (2011), What can we learn privately?
"""

import dataclasses
import decimal
import itertools
import math
import textwrap
from typing import Any, NamedTuple

from jaxdp.guarantees import accounting
from jaxdp.guarantees import statements

NOISE_SHARINGS = ('none', 'dataset', 'batch', 'channel')
LABELS = ('exact', 'perturbed_loss', 'randomized_response', 'one_shot_sum')
KEY_SECRET = 'the key is secret'
KEY_NOT_SECRET = ('the key is secret; this run\'s key comes from a seed and is '
                  'not')
REPLACE_RECORD = 'two data sets that differ in one record, image and label'
PROOF = (statements.REAL_ARITHMETIC, statements.IDEAL_RANDOM_BITS)

_SHIFT = 2.  # of a pixel in [-1, 1]
_WIDTH, _CELL = 100, 31  # columns of the text, and of one ledger
_positive = accounting.checked_positive


def part_row(ledger, part, guarantee, *, reason='') -> dict[str, Any]:
  """Returns one ledger row, JSON-safe.

  Args:
    ledger: 'claimed', 'standard' or 'certified'.
    part: which part of the release it speaks about.
    guarantee: its Guarantee.
    reason: one sentence; says why where epsilon is infinite or only claimed.

  Raises:
    ValueError: another ledger.
  """
  return {'ledger': ledger, 'part': part} | statements.ledger_row(
      ledger, guarantee) | {
          'relation': guarantee.relation, 'reason': reason,
          'conditions': list(guarantee.conditions)}


def with_key_condition(rows, *, seeded) -> list[dict[str, Any]]:
  """Returns the rows with what they assume about the key, last.

  Status and epsilon stay: they belong to the algorithm. With a seeded key a
  condition of it is not met, and whoever guesses the seed can redo the noise.

  Args:
    rows: from any ledger; not changed.
    seeded: whether the key of this run came from a seed.
  """
  condition = KEY_NOT_SECRET if seeded else KEY_SECRET
  return [row | {'conditions': [
      c for c in row['conditions'] if c not in (KEY_SECRET, KEY_NOT_SECRET)
  ] + [condition]} for row in rows]


def one_shot_moments_sensitivity(patches_per_image,
                                 inputs_per_unit) -> tuple[int, int]:
  r"""Returns the L1 sensitivities of the moments of a data set's patches.

  The reconstruction loss of a linear first layer depends on the data through
  :math:`s = \sum_p x_p` and :math:`M = \sum_p x_p x_p^T` alone. Replacing an
  image moves s by at most :math:`2 P d` and the upper triangle of M, diagonal
  included, by at most :math:`P d (d + 1)`.

  Args:
    patches_per_image: P >= 1.
    inputs_per_unit: d >= 1, entries of a patch, each in [-1, 1].

  Raises:
    ValueError: a count below 1.

  Example:
    >>> one_shot_moments_sensitivity(patches_per_image=196, inputs_per_unit=25)
    (9800, 127400)
  """
  num = statements.checked_count('patches_per_image', patches_per_image, 1)
  d = statements.checked_count('inputs_per_unit', inputs_per_unit, 1)
  return 2 * num * d, num * d * (d + 1)


def one_shot_moments(*, first_epsilon, second_epsilon) -> statements.Guarantee:
  """Returns the guarantee of the noised moments, released ONCE.

  Guarantee: *proved*: each moment gets Laplace noise of its
  `one_shot_moments_sensitivity` over its budget, once for the whole data set;
  the noised quadratic may then be minimised for any number of steps.

  Args:
    first_epsilon: budget > 0 of s.
    second_epsilon: budget > 0 of the upper triangle of M.

  Raises:
    ValueError: a budget that is not positive.

  References: Zhang et al. (2012), Theorem 1; Dwork & Roth (2014), Theorems
  3.6 and 3.16.
  """
  return _proved(
      _positive('first_epsilon', first_epsilon, 'it is a budget')
      + _positive('second_epsilon', second_epsilon, 'it is a budget'),
      'Zhang et al. (2012), Theorem 1',
      'the noised moments are drawn once for the whole data set',
      'pixels are clipped to [-1, 1] before the sums')


def _proved(epsilon, source, *conditions):
  return statements.Guarantee(
      epsilon=epsilon, metric=statements.ADJACENCY,
      relation=REPLACE_RECORD, status='proved', source=source,
      conditions=PROOF + conditions)


def _nothing(source):
  return statements.Guarantee(
      epsilon=math.inf, metric=statements.ADJACENCY, relation=REPLACE_RECORD,
      status='none', source=source)


class _Part(NamedTuple):
  """One part of the standard ledger."""
  name: str
  pure: statements.Guarantee
  reason: str
  rdp: Any = None  # orders -> divergences; None where nothing is promised


_DIFFERENCE = 'the difference of two noised values is that of the originals'
_SHARED = {
    'dataset': ('one draw is added to every image of the data set: '
                'whoever knows one image reads off all others'),
    'batch': ('one draw is added to every image of a batch: '
              'whoever knows one image reads off the rest of its batch'),
    'channel': ('one draw is copied to all channels of a pixel: '
                'the differences of the channels leave without noise')}
_BATCH_STATISTICS = (
    'batch normalisation subtracts what all examples share, so training may '
    'not depend on the noise at all')
_INDEPENDENT = (
    'every pixel of every image has its own draw, kept for all steps: training '
    'and attacks on the noised images are post-processing')
_LABEL_REASONS = {
    'exact': 'labels are used as they are',
    'perturbed_loss': ('the noise on the loss is one constant of the last '
                       'layer: hidden layers learn from exact labels, and the '
                       'difference of two steps has no noise'),
    'randomized_response': 'each label is randomised once, before training',
    'one_shot_sum': ('the sum of features times labels is noised once; no '
                     'other use of the labels')}
_CLEAN = ('adversarial examples are made from the images without noise and '
          'used without noise')


def _inputs(sharing, number, scale, batch_statistics):
  """Returns the part of the noised images; `number` values of a record."""
  if sharing != 'none':
    reason = f'{_SHARED[sharing]}; {_DIFFERENCE}'
    if batch_statistics and sharing != 'channel':
      reason += f'; {_BATCH_STATISTICS}'
    return _Part('inputs', _nothing('an event of probability 1 against 0'),
                 reason)
  pure = _proved(
      accounting.laplace_vector_epsilon(
          dimension=number, shift=_SHIFT, scale=scale, delta=0.),
      'Dwork & Roth (2014), Theorem 3.6, Laplace mechanism',
      'pixels are clipped to [-1, 1] before the noise',
      'preprocessing and settings do not depend on the records')
  return _Part('inputs', pure, _INDEPENDENT,
               lambda a: number * accounting.laplace_rdp(a, _SHIFT / scale))


def _labels(labels, label_epsilon, copies):
  """Returns the part of the labels."""
  reason = _LABEL_REASONS[labels]
  if labels in ('exact', 'perturbed_loss'):
    return _Part('labels', _nothing('no mechanism covers the labels'), reason)
  epsilon = _positive('label_epsilon', label_epsilon,
                      f'labels={labels!r} needs its budget')
  if labels == 'randomized_response':
    return _Part(
        'labels', _proved(copies * epsilon, 'Warner (1965); Kairouz et al. '
                          '(2016), randomised response'), reason,
        lambda a: copies * accounting.pure_rdp(a, epsilon))
  return _Part(
      'labels', _proved(
          copies * epsilon, 'Dwork & Roth (2014), Theorem 3.6, with the '
          'sensitivity of Phan et al. (2020), Lemma 4',
          'the features are in [-1, 1], fixed before the sum, and learnt '
          'without labels'), reason,
      lambda a: accounting.pure_rdp(a, copies * epsilon))


def _functional(release, copies):
  """Returns the part of a one-shot release given by its Guarantee."""
  if not (isinstance(release, statements.Guarantee) and release.is_pure
          and release.status == 'proved' and release.delta == 0.
          and release.relation == REPLACE_RECORD):
    raise ValueError(f'functional_release={release!r} must be a proved pure '
                     'guarantee between data sets; use one_shot_moments')
  epsilon = copies * release.epsilon
  return _Part('first layer', dataclasses.replace(release, epsilon=epsilon),
               'sums over the data set, noised once',
               lambda a: accounting.pure_rdp(a, epsilon))


def _converted(part, delta):
  """Returns the better of the part's pure guarantee and its conversion."""
  epsilon = accounting.best_epsilon(part.rdp, delta)
  if epsilon >= part.pure.epsilon:
    return part.pure
  return dataclasses.replace(
      part.pure, epsilon=epsilon, delta=delta,
      source='Mironov (2017), Propositions 1 and 6; Canonne, Kamath & Steinke '
      '(2020), Proposition 12')


def _totals(parts, delta):
  """Returns the pure total and the best one at `delta`."""
  pure = statements.sequential([p.pure for p in parts])
  if any(p.rdp is None for p in parts) or not delta:
    return pure, pure
  best = statements.sequential(
      [_converted(parts[0], delta)] + [p.pure for p in parts[1:]])
  together = _converted(_Part(
      'total', pure, '', lambda a: sum(p.rdp(a) for p in parts)), delta)
  return pure, min((pure, best, together), key=lambda g: g.epsilon)


def standard(*, noise_sharing, dimension, scale, delta, copies=1,
             labels='exact', label_epsilon=None,
             clean_adversarial=False, batch_statistics=False,
             functional_release=None, seeded=False) -> list[dict[str, Any]]:
  """Returns ledger B: DP between data sets that differ in one whole record.

  Guarantee: *proved* where epsilon is finite: Laplace noise of its own on
  every pixel of every image in [-1, 1], labels randomised once, everything
  else post-processing, for any number of steps. *none* where it is infinite;
  the row's reason says why. Not covered: floating point, the choice of
  settings on the same data.

  Args:
    noise_sharing: who shares a draw: 'none', 'dataset', 'batch', or 'channel'
      for the channels of a pixel (images of one channel share nothing).
    dimension: D, values of one image, channels included.
    scale: Laplace scale > 0 on a value in [-1, 1].
    delta: in [0, 1), of the inputs; 0 leaves pure DP alone.
    copies: c >= 1, noised copies of a record, each with noise of its own;
      multiplies every pure budget.
    labels: 'exact'; 'perturbed_loss', constant noise in the loss;
      'randomized_response' on each label; 'one_shot_sum' of features times
      labels, noised once.
    label_epsilon: budget of the last two for one copy; not read otherwise.
    clean_adversarial: whether adversarial examples leave without noise.
    batch_statistics: whether training normalises by batch statistics; one
      more reason where images share a draw, post-processing where not.
    functional_release: Guarantee of a one-shot release for one copy, from
      `one_shot_moments`, or None.
    seeded: whether the key of this run came from a seed.

  Returns:
    Rows 'inputs', 'labels' and, where they exist, 'first layer' and
    'adversarial examples', then 'total'. With a positive delta, finite parts
    have 'inputs (pure)' and 'total (pure)' before the smaller epsilon at delta.
    The total is the least of the sum of pure budgets, the sum at delta, and
    the conversion of the summed divergences.

  Raises:
    ValueError: an argument out of range, or a label budget that is missing.

  References: Dwork & Roth (2014), Theorems 3.6 and 3.16; Mironov (2017);
  Canonne, Kamath & Steinke (2020), Proposition 12.
  """
  for name, value, values in (('noise_sharing', noise_sharing, NOISE_SHARINGS),
                              ('labels', labels, LABELS)):
    if value not in values:
      raise ValueError(f'{name}={value!r} must be one of {values}')
  copies = statements.checked_count('copies', copies, 1)
  number = copies * statements.checked_count('dimension', dimension, 1)
  scale = _positive('scale', scale, 'it is the Laplace scale on a pixel')
  delta = accounting.checked_delta(delta)
  parts = [_inputs(noise_sharing, number, scale, batch_statistics),
           _labels(labels, label_epsilon, copies)]
  if functional_release is not None:
    parts.append(_functional(functional_release, copies))
  if clean_adversarial:
    parts.append(_Part('adversarial examples',
                       _nothing('no mechanism covers them'), _CLEAN))
  return with_key_condition(_standard_rows(parts, delta), seeded=seeded)


def _standard_rows(parts, delta):
  """Returns the rows of all parts and their total."""
  unprotected = [p.name for p in parts if p.rdp is None]
  reason = ('one record goes through all parts' if not unprotected else
            f'nothing is promised for: {", ".join(unprotected)}')
  inputs, totals = [parts[0].pure], list(_totals(parts, delta))
  if parts[0].rdp is not None and delta:
    inputs.append(_converted(parts[0], delta))
  if unprotected or not delta:
    totals = totals[-1:]
  groups = [('inputs', inputs, parts[0].reason)] + [
      (p.name, [p.pure], p.reason) for p in parts[1:]] + [
          ('total', totals, reason)]
  return [
      part_row('standard', f'{name} (pure)' if left else name, g, reason=why)
      for name, versions, why in groups
      for left, g in zip(reversed(range(len(versions))), versions)]


def ledger_text(rows) -> str:
  """Returns ledgers to read, side by side, at most 100 columns wide.

  Epsilons are rounded up and radii down, to four digits. Below the table: the
  reasons, what each ledger compares and assumes, and which condition this run
  does NOT meet.

  Args:
    rows: iterable of rows of any ledgers; a row may have a `radius` and its
      `norm` besides, or in place of, an epsilon.

  Raises:
    ValueError: a row of no ledger.
  """
  rows = list(rows)
  strangers = {row['ledger'] for row in rows}.difference(statements.LEDGERS)
  if strangers:
    raise ValueError(f'rows have ledger={sorted(strangers)}; must be among '
                     f'{statements.LEDGERS}')
  notes, columns = {}, []
  for name in statements.LEDGERS:
    cells = [line for row in rows if row['ledger'] == name
             for line in _cell(row, notes)]
    columns.append([name, '-' * _CELL] + (cells or ['(no rows)']))
  table = [' | '.join(f'{c:<{_CELL}}' for c in cells).rstrip()
           for cells in itertools.zip_longest(*columns, fillvalue='')]
  below = [f'[{number}] {reason}' for reason, number in notes.items()]
  below += _assumptions(rows)
  return '\n'.join(table + [''] + [
      line for text in below
      for line in textwrap.wrap(text, _WIDTH, subsequent_indent='    ')]) + '\n'


def _cell(row, notes):
  """Returns the lines of one row; numbers its reason among the notes."""
  values = []
  if 'epsilon' in row:
    values.append(_digits(row['epsilon'], decimal.ROUND_CEILING))
    if row.get('delta'):
      values = [f'({values[0]}, {row["delta"]:.4g})']
  if 'radius' in row:
    values.append(f'radius {_digits(row["radius"], decimal.ROUND_FLOOR)} '
                  f'{row.get("norm", "")}'.rstrip())
  values.append(row['status'])
  if row.get('reason'):
    values.append(f'[{notes.setdefault(row["reason"], len(notes) + 1)}]')
  wrap = textwrap.wrap
  return wrap(row['part'], _CELL) + wrap(
      ' '.join(values), _CELL, initial_indent='  ', subsequent_indent='  ')


def _digits(value, rounding):
  """Returns four digits of a number, rounded to the honest side."""
  if math.isinf(value):
    return 'infinite'
  # The last bits of a float are not the number's: 0.1 + 0.2 prints 0.3.
  context = decimal.Context(prec=4, rounding=rounding)
  return f'{float(context.create_decimal(f"{value:.12g}")):.4g}'


def _assumptions(rows):
  """Yields what each ledger compares and assumes, and what is not met."""
  for name in statements.LEDGERS:
    mine = [row for row in rows if row['ledger'] == name]
    compared = dict.fromkeys(r['relation'] for r in mine if r.get('relation'))
    assumed = dict.fromkeys(
        c for row in mine for c in row.get('conditions', ())
        if row['status'] != 'none' and c != KEY_NOT_SECRET)
    for verb, texts in (('compares', compared), ('assumes', assumed)):
      if texts:
        yield f'{name} {verb}: {"; ".join(texts)}'
  if any(KEY_NOT_SECRET in row.get('conditions', ()) for row in rows):
    yield f'NOT met: {KEY_NOT_SECRET}'
