"""Tests of the ledgers: golden numbers, sums, reasons, and what is proved."""

import itertools
import json
import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from jaxdp import guarantees
from jaxdp.guarantees import claims
from jaxdp.guarantees import ledgers

# inputs of a unit, units of a map, batch; Delta_R of three published networks.
_NETWORKS = ((25, 14 * 14, 2499, 4950), (48, 14 * 14, 1851, 9504),
             (147, 32 * 32, 4500, 150_822))
_SOUND = dict(noise_sharing='none', dimension=784, scale=32.27, delta=1e-5,
              labels='randomized_response', label_epsilon=1.)
_CLAIM = dict(epsilon=.2, label_epsilon=.1, gamma=8.038, gamma_x=1.98079)
_INFINITE = dict(  # one reason for infinity each
    dataset=dict(noise_sharing='dataset'), batch=dict(noise_sharing='batch'),
    channel=dict(noise_sharing='channel'), exact=dict(labels='exact'),
    perturbed_loss=dict(labels='perturbed_loss'),
    clean=dict(clean_adversarial=True))


def _by_part(rows):
  """Returns the rows by their part; no part twice."""
  out = {row['part']: row for row in rows}
  assert len(out) == len(rows), [row['part'] for row in rows]
  return out


def _standard(**changed):
  return _by_part(guarantees.standard(**_SOUND | changed))


class ArithmeticTest(parameterized.TestCase):

  @parameterized.parameters(*_NETWORKS)
  def test_sensitivities_of_the_published_networks(
      self, inputs, units, batch_size, expected):
    got = guarantees.stobatch_sensitivities(
        inputs_per_unit=inputs, units_per_map=units, num_last=256)
    self.assertEqual(got, (expected, 512))
    gammas = guarantees.stobatch_gammas(got.reconstruction, batch_size, 1.)
    self.assertEqual(gammas.gamma, 2. * gammas.gamma_x)

  def test_golden_chain_of_mnist(self):
    gammas = guarantees.stobatch_gammas(4950, 2499, .493)
    self.assertAlmostEqual(gammas.gamma, 8.038, delta=8.04 * .0005 / .493)
    self.assertAlmostEqual(gammas.gamma_x, 1.98079, delta=5e-6)
    first = guarantees.stobatch_budget(.2, .1, 8.038, 1.98079)
    self.assertAlmostEqual(first, .06138, delta=5e-6)
    self.assertAlmostEqual(first / 1.98079, .0310, delta=5e-5)
    self.assertAlmostEqual(first / 8.038, .0076, delta=5e-5)
    scales = guarantees.noise_scales(
        sensitivity=4950, label_sensitivity=512, batch_size=2499,
        epsilon_1=first, label_epsilon=.1)
    self.assertAlmostEqual(scales.inputs, 32.27, delta=.005)
    self.assertAlmostEqual(scales.hidden, 64.5, delta=.05)
    # The sum over the batch of m coefficients has the noise of one draw.
    self.assertAlmostEqual(2499 * scales.labels, 512 / .1, delta=1e-9)

  @parameterized.parameters(
      (2., 18.8, 5.13, 9504, 1851, .80, 6.41),
      (5., 139., 33.5, 150_822, 4500, 3.86, 8.69))
  def test_scales_of_the_larger_networks(
      self, epsilon, gamma, gamma_x, sensitivity, batch_size, first, scale):
    label_epsilon = 1.
    got = guarantees.stobatch_budget(epsilon, label_epsilon, gamma, gamma_x)
    self.assertAlmostEqual(got, first, delta=.005)
    self.assertAlmostEqual(guarantees.noise_scales(
        sensitivity=sensitivity, label_sensitivity=512, batch_size=batch_size,
        epsilon_1=got, label_epsilon=1.).inputs, scale, delta=.005)
    self.assertAlmostEqual(
        got * (1. + 1. / gamma + 1. / gamma_x) + label_epsilon, epsilon,
        delta=1e-12)

  def test_budgets_are_monotone(self):
    base = dict(epsilon=2., label_epsilon=.5, gamma=3., gamma_x=2.)
    for name, sign in (('epsilon', 1), ('label_epsilon', -1), ('gamma', 1),
                       ('gamma_x', 1)):
      values = np.array([.8, .9, 1.1, 1.3]) * base[name]
      got = [guarantees.stobatch_budget(**base | {name: float(v)})
             for v in values]
      self.assertTrue(np.all(sign * np.diff(got) > 0.), name)

  @parameterized.parameters(
      ('epsilon', 0.), ('epsilon', -.2), ('epsilon', math.nan),
      ('label_epsilon', 0.), ('label_epsilon', .2), ('label_epsilon', .3),
      ('gamma', 0.), ('gamma_x', -1.), ('gamma_x', math.inf))
  def test_budget_refuses_by_name(self, name, value):
    with self.assertRaisesRegex(ValueError, f'{name}={value}'):
      guarantees.stobatch_budget(**_CLAIM | {name: value})
    with self.assertRaisesRegex(ValueError, f'{name}={value}'):
      guarantees.stobatch_claimed(**_CLAIM | {name: value})

  @parameterized.parameters(
      (guarantees.stobatch_sensitivities, dict(
          inputs_per_unit=25, units_per_map=196, num_last=256)),
      (guarantees.stobatch_gammas, dict(
          sensitivity=4950, batch_size=2499, norm=.5)),
      (guarantees.noise_scales, dict(
          sensitivity=4950, label_sensitivity=512, batch_size=2499,
          epsilon_1=.06, label_epsilon=.1)),
      (guarantees.one_shot_moments_sensitivity, dict(
          patches_per_image=4, inputs_per_unit=2)),
      (guarantees.one_shot_moments, dict(first_epsilon=1., second_epsilon=1.)))
  def test_every_argument_is_checked(self, fun, good):
    fun(**good)
    for name, value in itertools.product(good, (0, -1, math.nan, '1', None)):
      with self.assertRaisesRegex(ValueError, f'{name}='):
        fun(**good | {name: value})


class ClaimedTest(parameterized.TestCase):

  def test_parts_and_total(self):
    rows = _by_part(guarantees.stobatch_claimed(**_CLAIM))
    first = guarantees.stobatch_budget(**_CLAIM)
    self.assertEqual(
        {part: row['epsilon'] for part, row in rows.items()},
        {'epsilon_1': first, 'epsilon_1/gamma_x': first / 1.98079,
         'epsilon_1/gamma': first / 8.038, 'epsilon_2': .1, 'total': .2})
    parts = sum(row['epsilon'] for part, row in rows.items() if part != 'total')
    self.assertAlmostEqual(parts, rows['total']['epsilon'], delta=1e-12)

  def test_every_row_is_a_claim_with_its_theorem_and_its_fault(self):
    rows = guarantees.stobatch_claimed(**_CLAIM, norm='column sums')
    self.assertEqual({(r['ledger'], r['status'], r['delta']) for r in rows},
                     {('claimed', 'claimed', 0.)})
    for row, theorem in zip(rows, (1, 2, 3, 3, 4)):
      self.assertEndsWith(row['source'], f'Theorem {theorem}')
      self.assertNotEmpty(row['reason'])
    named = [r['part'] for r in rows if 'norm of the first layer: column sums'
             in r['conditions']]
    self.assertEqual(named, ['epsilon_1/gamma', 'total'])
    metric = [r['part'] for r in rows if any(
        'at most 1 apart' in c for c in r['conditions'])]
    self.assertEqual(metric, ['epsilon_1/gamma_x', 'total'])

  def test_federated_is_the_largest_batch(self):
    parties = [guarantees.Party(m, .06138, 4950, 512)
               for m in (600, 2499, 1200)]
    rows = guarantees.federated(parties)
    self.assertLen(rows, 4)
    self.assertAlmostEqual(rows[-1]['epsilon'], .06138 * 2499 / 4950,
                           delta=1e-12)
    self.assertEqual(rows[-1]['epsilon'], max(r['epsilon'] for r in rows[:-1]))
    self.assertEqual(rows[-1]['status'], 'claimed')
    self.assertIn('one of them changes', rows[-1]['relation'])

  @parameterized.parameters(
      ((600, .06, 9504, 512), 'reconstruction'),
      ((600, .06, 4950, 256), 'labels'), ((0, .06, 4950, 512), 'batch_size'),
      ((600, -1., 4950, 512), 'epsilon_1'))
  def test_federated_refuses(self, other, name):
    with self.assertRaisesRegex(ValueError, name):
      guarantees.federated([guarantees.Party(2499, .06, 4950, 512),
                            guarantees.Party(*other)])

  def test_federated_needs_a_party(self):
    with self.assertRaisesRegex(ValueError, 'at least one'):
      guarantees.federated([])


class StandardTest(parameterized.TestCase):

  def test_independent_noise_is_finite_and_proved(self):
    rows = _standard()
    self.assertEqual(list(rows), ['inputs (pure)', 'inputs', 'labels',
                                  'total (pure)', 'total'])
    for row in rows.values():
      self.assertEqual((row['ledger'], row['status']), ('standard', 'proved'))
      self.assertEqual(row['relation'], guarantees.REPLACE_RECORD)
      self.assertContainsSubset([guarantees.REAL_ARITHMETIC,
                                 guarantees.IDEAL_RANDOM_BITS,
                                 guarantees.KEY_SECRET], row['conditions'])
    for part, epsilon, delta in (
        ('inputs (pure)', 48.59, 0.), ('inputs', 8.89, 1e-5),
        ('labels', 1., 0.), ('total (pure)', 49.59, 0.)):
      self.assertAlmostEqual(rows[part]['epsilon'], epsilon, delta=.006)
      self.assertEqual(rows[part]['delta'], delta)
    # Divergences add up to less than epsilons do.
    self.assertBetween(rows['total']['epsilon'], rows['inputs']['epsilon'] + .1,
                       rows['inputs']['epsilon'] + .99)

  @parameterized.product(scale=(.5, 32.27, 5e3), label_epsilon=(1e-3, 8.),
                         delta=(0., 1e-9, .3))
  def test_the_total_is_never_above_a_plain_sum(self, scale, label_epsilon,
                                                delta):
    rows = _standard(scale=scale, label_epsilon=label_epsilon, delta=delta)
    sums = [rows[part]['epsilon'] + label_epsilon for part in (
        'inputs', 'inputs (pure)') if part in rows]
    self.assertLessEqual(rows['total']['epsilon'], min(sums) * (1. + 1e-12))
    self.assertLessEqual(rows['total']['delta'], delta)
    self.assertEqual('total (pure)' in rows, delta > 0.)

  @parameterized.parameters(*_INFINITE)
  def test_one_fault_is_enough_for_infinity(self, name):
    rows = _standard(**_INFINITE[name])
    total = rows['total']
    self.assertEqual((total['epsilon'], total['delta'], total['status']),
                     (math.inf, 0., 'none'))
    self.assertNotIn('total (pure)', rows)
    part = 'labels' if name in guarantees.ledgers.LABELS else (
        'adversarial examples' if name == 'clean' else 'inputs')
    self.assertEqual((rows[part]['epsilon'], rows[part]['status']),
                     (math.inf, 'none'))
    self.assertEqual(total['reason'], f'nothing is promised for: {part}')
    others = [row for name, row in rows.items() if name not in (part, 'total')]
    self.assertTrue(all(math.isfinite(row['epsilon']) for row in others))

  def test_reasons_differ_and_no_fault_is_silent(self):
    reasons = {_standard(**fault)[part]['reason']
               for name, fault in _INFINITE.items()
               for part in ('inputs', 'labels', 'adversarial examples')
               if part in _standard(**fault)
               and _standard(**fault)[part]['status'] == 'none'}
    self.assertLen(reasons, len(_INFINITE))
    self.assertNotIn('', reasons)

  def test_paper_mode_names_every_fault(self):
    rows = _standard(noise_sharing='dataset', labels='perturbed_loss',
                     clean_adversarial=True, batch_statistics=True)
    self.assertEqual(list(rows), ['inputs', 'labels', 'adversarial examples',
                                  'total'])
    self.assertTrue(all(r['status'] == 'none' for r in rows.values()))
    self.assertEqual(rows['total']['reason'], 'nothing is promised for: '
                     'inputs, labels, adversarial examples')

  def test_batch_statistics_matter_where_images_share_a_draw(self):
    for sharing, matters in (('dataset', True), ('batch', True),
                             ('channel', False), ('none', False)):
      reasons = [_standard(noise_sharing=sharing, batch_statistics=on)[
          'inputs']['reason'] for on in (False, True)]
      self.assertEqual(reasons[0] != reasons[1], matters)
    self.assertEqual(_standard(batch_statistics=True), _standard())

  @parameterized.parameters('randomized_response', 'one_shot_sum')
  def test_labels_that_have_a_mechanism(self, labels):
    row = _standard(labels=labels, label_epsilon=.7)['labels']
    self.assertEqual((row['epsilon'], row['delta'], row['status']),
                     (.7, 0., 'proved'))
    for value in (None, 0., -1., math.nan, math.inf):
      with self.assertRaisesRegex(ValueError, f'label_epsilon={value}'):
        _standard(labels=labels, label_epsilon=value)

  def test_the_features_of_a_one_shot_sum_learn_without_labels(self):
    conditions = _standard(labels='one_shot_sum')['total']['conditions']
    self.assertTrue(any('without labels' in c for c in conditions))

  def test_copies_multiply_pure_budgets_and_add_divergences(self):
    once, thrice = _standard(), _standard(copies=3)
    for part in ('inputs (pure)', 'labels', 'total (pure)'):
      self.assertAlmostEqual(thrice[part]['epsilon'] / once[part]['epsilon'],
                             3., delta=1e-12)
    wide = _standard(dimension=3 * 784)
    self.assertEqual(thrice['inputs']['epsilon'], wide['inputs']['epsilon'])
    self.assertLess(thrice['inputs']['epsilon'], 3 * once['inputs']['epsilon'])

  def test_the_total_is_monotone(self):
    grids = dict(dimension=(1, 100, 784), scale=(1., 32.27, 400.),
                 delta=(1e-9, 1e-5, .1), copies=(1, 2, 5),
                 label_epsilon=(.1, 1., 4.))
    for name, values in grids.items():
      totals = [_standard(**{name: v})['total']['epsilon'] for v in values]
      if name in ('scale', 'delta'):
        totals.reverse()
      self.assertTrue(np.all(np.diff(totals) > 0.), name)

  def test_a_functional_release_adds_its_budget(self):
    release = guarantees.one_shot_moments(first_epsilon=.2, second_epsilon=.3)
    rows = _standard(functional_release=release)
    self.assertEqual((rows['first layer']['epsilon'],
                      rows['first layer']['status']), (.5, 'proved'))
    self.assertAlmostEqual(rows['total (pure)']['epsilon'],
                           _standard()['total (pure)']['epsilon'] + .5,
                           delta=1e-9)
    self.assertBetween(
        rows['total']['epsilon'], _standard()['total']['epsilon'],
        _standard()['total']['epsilon'] + .5)
    twice = _standard(functional_release=release, copies=2)
    self.assertEqual(twice['first layer']['epsilon'], 1.)

  @parameterized.parameters(
      (dict(noise_sharing='example'), 'noise_sharing'),
      (dict(labels='noisy'), 'labels'), (dict(dimension=0), 'dimension'),
      (dict(copies=1.5), 'copies'),
      (dict(scale=0.), 'scale'), (dict(delta=1.), 'delta'),
      (dict(functional_release=.5), 'functional_release'),
      (dict(functional_release=guarantees.Guarantee(
          epsilon=1., status='claimed', source='Author (2000)',
          metric=guarantees.ADJACENCY, relation=guarantees.REPLACE_RECORD)),
       'functional_release'))
  def test_refuses_by_name(self, changed, name):
    with self.assertRaisesRegex(ValueError, name):
      _standard(**changed)


class KeyTest(parameterized.TestCase):

  def test_every_row_says_what_it_assumes_about_the_key(self):
    for seeded, condition in ((False, guarantees.KEY_SECRET),
                              (True, guarantees.KEY_NOT_SECRET)):
      for row in _standard(seeded=seeded, labels='exact').values():
        self.assertEqual(row['conditions'][-1], condition)
    self.assertIn('comes from a seed and is not', guarantees.KEY_NOT_SECRET)

  def test_a_seed_changes_the_condition_and_nothing_else(self):
    for secret, seeded in zip(_standard().values(),
                              _standard(seeded=True).values()):
      self.assertEqual(secret['conditions'][:-1], seeded['conditions'][:-1])
      self.assertEqual(secret | {'conditions': ()}, seeded | {'conditions': ()})

  def test_rows_of_any_ledger_can_be_marked_and_marked_again(self):
    rows = guarantees.stobatch_claimed(**_CLAIM)
    before = json.dumps(rows)
    marked = guarantees.with_key_condition(rows, seeded=True)
    again = guarantees.with_key_condition(marked, seeded=False)
    self.assertEqual(json.dumps(rows), before)
    for row in again:
      self.assertEqual(row['conditions'][-1], guarantees.KEY_SECRET)
      self.assertNotIn(guarantees.KEY_NOT_SECRET, row['conditions'])


class MomentsTest(parameterized.TestCase):

  @parameterized.parameters((1, 1), (2, 2), (3, 2), (1, 4))
  def test_no_replacement_moves_the_moments_further(self, patches, size):
    first, second = guarantees.one_shot_moments_sensitivity(patches, size)
    # Corners and zero: s is linear; M's entries are extreme at -1, 0 and 1.
    images = np.array(list(itertools.product((-1, 0, 1),
                                             repeat=patches * size)))
    if len(images) > 300:
      images = images[np.random.default_rng(0).permutation(len(images))[:300]]
      images = np.vstack([images, np.ones_like(images[:1]),
                          -np.ones_like(images[:1])])
    rows = images.reshape(len(images), patches, size)
    sums = rows.sum(1)
    products = np.einsum('npi,npj->nij', rows, rows)[
        :, *np.triu_indices(size)]
    moves = [np.abs(a[:, None] - a).sum(-1).max() for a in (sums, products)]
    self.assertEqual(moves[0], first)  # attained
    self.assertLessEqual(moves[1], second)
    self.assertGreater(moves[1], second / 4)  # not wildly loose either

  def test_golden_noise_of_mnist(self):
    _, second = guarantees.one_shot_moments_sensitivity(196, 25)
    self.assertAlmostEqual(second / (196 * 55_000), 650 / 55_000, delta=1e-12)

  def test_guarantee(self):
    release = guarantees.one_shot_moments(first_epsilon=.25,
                                          second_epsilon=.5)
    self.assertEqual((release.epsilon, release.delta, release.status),
                     (.75, 0., 'proved'))
    self.assertTrue(release.is_pure)
    self.assertTrue(any('once' in c for c in release.conditions))


class TextTest(parameterized.TestCase):

  def _rows(self, **changed):
    certified = guarantees.part_row(
        'certified', 'clean images', guarantees.Guarantee(
            epsilon=math.inf, status='none', relation='one image',
            source='Lecuyer et al. (2019)'), reason='a note of its own')
    certified |= {'radius': .12349, 'norm': 'linf'}
    del certified['epsilon']
    return (guarantees.stobatch_claimed(**_CLAIM)
            + list(_standard(**changed).values()) + [certified])

  def test_fits_the_page_and_shows_the_ledgers_side_by_side(self):
    text = guarantees.ledger_text(self._rows())
    lines = text.splitlines()
    self.assertLessEqual(max(map(len, lines)), 100)
    self.assertEqual([c.strip() for c in lines[0].split('|')],
                     list(guarantees.LEDGERS))
    self.assertEqual([c.strip() for c in lines[2].split('|')],
                     ['epsilon_1', 'inputs (pure)', 'clean images'])
    for part in ('0.06138 claimed', '48.6 proved', 'radius 0.1234 linf',
                 'real arithmetic', 'one record, image and label',
                 'a note of its own', '(8.888, 1e-05)'):
      self.assertIn(part, text)
    self.assertNotIn('NOT met', text)

  def test_every_reason_is_printed_once(self):
    rows = self._rows(noise_sharing='dataset', labels='exact')
    flat = ' '.join(guarantees.ledger_text(rows).split())
    for row in rows:
      self.assertEqual(flat.count(' '.join(row['reason'].split())), 1)
    self.assertIn('infinite none', flat)

  def test_a_seed_is_printed_as_a_condition_that_is_not_met(self):
    text = guarantees.ledger_text(self._rows(seeded=True))
    self.assertIn(f'NOT met: {guarantees.KEY_NOT_SECRET}',
                  ' '.join(text.split()))
    self.assertNotIn('assumes: the key', text)

  def test_epsilons_are_rounded_up_and_radii_down(self):
    digits = guarantees.ledgers._digits  # pylint: disable=protected-access
    self.assertEqual(digits(8.88601, 'ROUND_CEILING'), '8.887')
    self.assertEqual(digits(.1 + .2, 'ROUND_CEILING'), '0.3')
    self.assertEqual(digits(.12349, 'ROUND_FLOOR'), '0.1234')
    self.assertEqual(digits(math.inf, 'ROUND_CEILING'), 'infinite')
    self.assertEqual(digits(0., 'ROUND_CEILING'), '0')

  def test_a_missing_ledger_is_said_and_a_strange_one_refused(self):
    self.assertIn('(no rows)', guarantees.ledger_text(
        guarantees.stobatch_claimed(**_CLAIM)))
    row = guarantees.stobatch_claimed(**_CLAIM)[0] | {'ledger': 'A'}
    with self.assertRaisesRegex(ValueError, 'ledger'):
      guarantees.ledger_text([row])

  def test_rows_are_json_with_infinity(self):
    rows = self._rows(noise_sharing='dataset')
    text = json.dumps(rows)
    self.assertIn('Infinity', text)
    self.assertEqual(json.loads(text), rows)


class NamesTest(parameterized.TestCase):

  def test_the_package_exports_the_ledgers(self):
    self.assertIs(guarantees.standard, ledgers.standard)
    self.assertIs(guarantees.stobatch_claimed, claims.stobatch_claimed)


if __name__ == '__main__':
  absltest.main()
