"""Tests of jaxdp.guarantees: composed epsilons are attained, never exceeded."""

import fractions
import inspect
import itertools
import json
import math

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees

_PROOF = (guarantees.REAL_ARITHMETIC, guarantees.IDEAL_RANDOM_BITS)
_DIGEST = 'ab' * 32
# Every law below is a table of fractions: only the final logarithm rounds.
_ROUNDING = 1e-12


def _proved(epsilon, **fields):
  return guarantees.Guarantee(**{
      'epsilon': epsilon, 'status': 'proved', 'source': 'Author (2000)',
      'conditions': _PROOF} | fields)


def _pure(epsilon, **fields):
  return _proved(epsilon, metric=guarantees.ADJACENCY, relation='one bit',
                 **fields)


def _randomized_response(odds):
  """Returns P(y | bit) as law[bit][y]; epsilon = ln odds exactly."""
  keep, flip = fractions.Fraction(odds, odds + 1), fractions.Fraction(
      1, odds + 1)
  return [[keep, flip], [flip, keep]]


def _geometric(ratio, size):
  """Returns the two-sided geometric law on 0..size-1, clamped: |x - x'| ln 1/r.

  P(y | x) = (1 - r) / (1 + r) r^|x - y|, each tail summed into its end point
  (Ghosh, Roughgarden & Sundararajan 2009).
  """
  law = []
  for x in range(size):
    row = [(1 - ratio) / (1 + ratio) * ratio**abs(x - y) for y in range(size)]
    row[0], row[-1] = ratio**x / (1 + ratio), ratio**(size - 1 - x) / (
        1 + ratio)
    law.append(row)
  return law


def _product(*rows):
  """Returns the joint law of independent draws, one row of a law each."""
  return [math.prod(ps) for ps in itertools.product(*rows)]


def _loss(p, q):
  """Returns max_y ln P(y) / Q(y)."""
  return max(math.log(a / b) for a, b in zip(p, q))


def _excess(p, q, growth):
  """Returns max over events of P(S) - growth Q(S)."""
  return sum(max(a - growth * b, 0) for a, b in zip(p, q))


def _card(guarantee=None, **facts):
  return guarantees.card(guarantee or _proved(10.), **{
      'mechanism': 'tem', 'settings': {'beta': 0.001, 'alpha': True},
      'table_name': 'glove', 'table_digest': _DIGEST, 'num_words': 100,
      'dimension': 3} | facts)


class GuaranteeTest(parameterized.TestCase):

  def test_defaults_are_those_of_a_word_mechanism(self):
    guarantee = _proved(np.float64(2))
    self.assertEqual(
        (guarantee.epsilon, guarantee.delta, guarantee.metric, guarantee.unit),
        (2., 0., 'l2', 'per unit distance'))
    self.assertIs(type(guarantee.epsilon), float)
    self.assertNotIn('distance', _pure(1.).unit)

  def test_status_has_no_default(self):
    with self.assertRaises(TypeError):
      guarantees.Guarantee(epsilon=1., source='x')

  def test_is_frozen(self):
    with self.assertRaises(AttributeError):
      _proved(1.).epsilon = 2.

  @parameterized.parameters(
      ({'epsilon': -1.}, 'epsilon=-1.0'),
      ({'epsilon': math.nan}, 'epsilon=nan'),
      ({'epsilon': True}, 'epsilon=True'), ({'epsilon': '1'}, 'epsilon=\'1\''),
      ({'delta': 1.}, 'delta=1.0'),
      ({'delta': np.float32(1)}, 'delta=np.float32'),
      ({'delta': -1e-9}, 'delta=-1e-09'),
      ({'delta': math.nan}, 'delta=nan'), ({'status': 'proven'}, 'proven'),
      ({'metric': ''}, 'metric'), ({'source': ''}, 'source'),
      ({'source': None}, 'source=None'), ({'relation': ''}, 'relation'),
      ({'conditions': 'real arithmetic'}, 'conditions'),
      ({'conditions': (1,)}, 'conditions'),
      ({'status': 'none'}, 'must be infinite'))
  def test_refuses_a_bad_field_by_name(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      _proved(fields.pop('epsilon', 1.), **fields)

  @parameterized.parameters(
      ((), False), ((guarantees.REAL_ARITHMETIC,), False),
      ((guarantees.IDEAL_RANDOM_BITS,), False), (_PROOF, True),
      ((guarantees.IDEAL_RANDOM_BITS, guarantees.INTEGER_GRID), True),
      ((guarantees.REAL_ARITHMETIC, guarantees.INTEGER_GRID), False))
  def test_a_proof_must_list_what_it_assumes(self, conditions, accepted):
    if accepted:
      _proved(1., conditions=conditions)
    else:
      with self.assertRaisesRegex(ValueError, 'must contain'):
        _proved(1., conditions=conditions)
    self.assertEqual(_proved(
        1., status='claimed', conditions=conditions).conditions, conditions)

  @parameterized.parameters(
      _proved(0.), _proved(math.inf), _pure(1., delta=1e-6),
      _proved(math.inf, status='none', conditions=()))
  def test_survives_json(self, guarantee):
    text = json.dumps(guarantee.to_dict())
    self.assertEqual('Infinity' in text, math.isinf(guarantee.epsilon))
    self.assertEqual(
        guarantees.Guarantee.from_dict(json.loads(text)), guarantee)

  def test_reading_json_checks_again(self):
    fields = _proved(1.).to_dict()
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      guarantees.Guarantee.from_dict(fields | {'status': 'none'})
    with self.assertRaisesRegex(ValueError, 'fields'):
      guarantees.Guarantee.from_dict(fields | {'verdict': 'x'})
    del fields['status']
    with self.assertRaisesRegex(ValueError, 'fields'):
      guarantees.Guarantee.from_dict(fields)

  def test_is_static_under_jit_and_retraces_only_when_it_changes(self):
    traces = []

    @jax.jit
    def scaled(x, guarantee):
      traces.append(guarantee)
      return x * guarantee.epsilon

    self.assertEqual(jax.tree.leaves(_proved(1.)), [])
    self.assertEqual(float(scaled(jnp.float32(3), _proved(2.))), 6.)
    scaled(jnp.float32(4), _proved(2.))
    self.assertLen(traces, 1)
    self.assertEqual(float(scaled(jnp.float32(3), _proved(5.))), 15.)
    self.assertLen(traces, 2)
    self.assertLen({_proved(1.), _proved(1.), _proved(2.)}, 2)


class CompositionTest(parameterized.TestCase):

  @parameterized.parameters(([3],), ([3, 3],), ([2, 5, 9],))
  def test_sequential_is_attained_and_never_exceeded(self, odds):
    laws = [_randomized_response(o) for o in odds]
    whole = guarantees.sequential([_pure(math.log(o)) for o in odds])
    losses = [_loss(_product(*(law[x] for law in laws)),
                    _product(*(law[1 - x] for law in laws))) for x in (0, 1)]
    self.assertAlmostEqual(max(losses), whole.epsilon, delta=_ROUNDING)

  def test_sequential_holds_at_every_distance(self):
    ratios = [fractions.Fraction(1, 2), fractions.Fraction(2, 3)]
    laws = [_geometric(r, 5) for r in ratios]
    for row in itertools.chain(*laws):
      self.assertEqual(sum(row), 1)
    whole = guarantees.sequential(
        [_proved(-math.log(r), metric='l1') for r in ratios])
    for x, z in itertools.permutations(range(5), 2):
      loss = _loss(_product(*(law[x] for law in laws)),
                   _product(*(law[z] for law in laws)))
      self.assertAlmostEqual(
          loss, whole.epsilon * abs(x - z), delta=_ROUNDING)

  def test_sequential_with_delta_is_attained(self):
    # Says the input with probability delta, otherwise a biased bit (odds 3).
    def row(bit, delta):
      return [*((1 - delta) * p for p in _randomized_response(3)[bit]),
              *(delta if bit == b else 0 for b in (0, 1))]
    delta = fractions.Fraction(1, 10)
    one = _pure(math.log(3), delta=float(delta))
    two = guarantees.sequential([one, one])
    self.assertAlmostEqual(two.delta, .2)
    self.assertEqual(_excess(row(0, delta), row(1, delta), 3), delta)
    excess = _excess(_product(row(0, delta), row(0, delta)),
                     _product(row(1, delta), row(1, delta)), 9)
    self.assertEqual(excess, 1 - (1 - delta)**2)  # exact; below 2 delta
    self.assertLessEqual(excess, two.delta)
    self.assertGreater(excess, one.delta)

  def test_sequential_keeps_the_weakest_status_and_every_condition(self):
    claimed = _proved(1., status='claimed', source='B', conditions=('public',))
    whole = guarantees.sequential([_proved(1.), claimed, _proved(1.)])
    self.assertEqual((whole.epsilon, whole.status), (3., 'claimed'))
    self.assertEqual(whole.conditions, (*_PROOF, 'public'))
    self.assertIn('Author (2000); B', whole.source)
    none = _proved(math.inf, status='none', conditions=())
    for order in itertools.permutations([_proved(1.), claimed, none]):
      self.assertEqual(guarantees.sequential(order).status, 'none')
      self.assertEqual(guarantees.sequential(order).epsilon, math.inf)

  @parameterized.product(
      compose=(guarantees.sequential, guarantees.parallel),
      other=({'metric': 'l1'}, {'unit': 'per mile'}, {'relation': 'lines'}))
  def test_refuses_a_mixture(self, compose, other):
    with self.assertRaisesRegex(ValueError, f'mix {next(iter(other))}'):
      compose([_proved(1.), _proved(1., **other)])

  @parameterized.parameters(guarantees.sequential, guarantees.parallel)
  def test_refuses_nothing_and_too_much_delta(self, compose):
    with self.assertRaisesRegex(ValueError, 'at least one'):
      compose([])
    with self.assertRaisesRegex(ValueError, 'delta'):
      compose([_proved(1., delta=.5)] * 2)

  def test_parallel_over_words_is_attained_at_the_sum_of_distances(self):
    ratios = [fractions.Fraction(1, 3), fractions.Fraction(1, 2)]
    laws = [_geometric(r, 3) for r in ratios]
    whole = guarantees.parallel(
        [_proved(-math.log(r), metric='l1') for r in ratios])
    self.assertIn('texts of equal length; distance is the sum over words',
                  whole.relation)
    rates = []
    texts = list(itertools.product(range(3), repeat=2))
    for x, z in itertools.permutations(texts, 2):
      loss = _loss(_product(*(law[w] for law, w in zip(laws, x))),
                   _product(*(law[w] for law, w in zip(laws, z))))
      rates.append(loss / sum(abs(a - b) for a, b in zip(x, z)))
    self.assertAlmostEqual(max(rates), whole.epsilon, delta=_ROUNDING)
    self.assertEqual(whole.epsilon, math.log(3))

  def test_parallel_over_lines_of_words_keeps_the_relation(self):
    text = guarantees.parallel([_proved(2.)])
    self.assertEqual(guarantees.parallel([text, text]).relation, text.relation)

  def test_parallel_deltas_add_only_where_every_part_may_change(self):
    self.assertAlmostEqual(
        guarantees.parallel([_proved(1., delta=.1)] * 3).delta, .3)
    self.assertEqual(
        guarantees.parallel([_pure(1., delta=.1), _pure(2., delta=.05)]).delta,
        .1)

  def test_pure_parallel_is_attained_when_one_part_changes(self):
    laws = [_randomized_response(o) for o in (2, 7)]
    whole = guarantees.parallel([_pure(math.log(2)), _pure(math.log(7))])
    losses, both = [], 0.
    for x, z in itertools.permutations(itertools.product((0, 1), repeat=2), 2):
      loss = _loss(_product(*(law[b] for law, b in zip(laws, x))),
                   _product(*(law[b] for law, b in zip(laws, z))))
      if sum(a != b for a, b in zip(x, z)) == 1:
        losses.append(loss)
      both = max(both, loss)
    self.assertAlmostEqual(max(losses), whole.epsilon, delta=_ROUNDING)
    self.assertGreater(both, whole.epsilon + .5)  # why `relation` says one
    self.assertLessEqual(both, guarantees.group(whole, 2).epsilon)

  @parameterized.parameters(1, 2, 4)
  def test_group_is_attained_and_never_exceeded(self, size):
    ratio = fractions.Fraction(1, 2)
    law = _geometric(ratio, size + 1)
    whole = guarantees.group(_pure(math.log(2)), size)
    losses = [_loss(law[x], law[z])
              for x, z in itertools.permutations(range(size + 1), 2)]
    self.assertAlmostEqual(max(losses), whole.epsilon, delta=_ROUNDING)

  @parameterized.parameters(1, 2, 3)
  def test_group_delta_is_attained(self, size):
    # The chain that meets each step with equality: P_{i+1}(S) = e P_i(S) + d.
    growth, delta = 2, fractions.Fraction(1, 100)
    chain = [fractions.Fraction(1, 50)]
    for _ in range(size):
      chain.append(growth * chain[-1] + delta)
    rows = [[1 - p, p] for p in chain]
    for p, q in itertools.pairwise(rows):  # each step is (ln 2, delta)-DP
      self.assertLessEqual(_excess(p, q, growth), delta)
      self.assertLessEqual(_excess(q, p, growth), delta)
    whole = guarantees.group(_pure(math.log(2), delta=float(delta)), size)
    excess = _excess(rows[-1], rows[0], growth**size)
    self.assertAlmostEqual(float(excess), whole.delta, delta=_ROUNDING)
    self.assertAlmostEqual(
        whole.delta, float(delta * sum(growth**i for i in range(size))),
        delta=_ROUNDING)

  def test_group_edges(self):
    self.assertAlmostEqual(
        guarantees.group(_pure(0., delta=.1), 3).delta, .3)
    self.assertEqual(guarantees.group(_pure(500.), 3).epsilon, 1500.)
    for guarantee, size in ((_pure(1., delta=.3), 2),
                            (_pure(500., delta=.1), 3)):
      with self.assertRaisesRegex(ValueError, 'delta'):
        guarantees.group(guarantee, size)
    with self.assertRaisesRegex(ValueError, 'to_pure'):
      guarantees.group(_proved(1.), 2)
    for size in (0, 1.5, True):
      with self.assertRaisesRegex(ValueError, 'size'):
        guarantees.group(_pure(1.), size)

  def test_pure_form_of_a_metric_guarantee_is_attained_at_its_distance(self):
    law = _geometric(fractions.Fraction(1, 2), 6)
    pure = guarantees.to_pure(_proved(math.log(2), metric='l1'), 3)
    near = [(x, z) for x, z in itertools.permutations(range(6), 2)
            if abs(x - z) <= 3]
    losses = [_loss(law[x], law[z]) for x, z in near]
    self.assertAlmostEqual(max(losses), pure.epsilon, delta=_ROUNDING)
    self.assertTrue(pure.is_pure)
    self.assertIn('at most 3.0 apart in l1', pure.relation)
    self.assertEqual(guarantees.group(pure, 2).epsilon, 2 * pure.epsilon)

  def test_pure_form_of_k_words_is_k_epsilon_diameter(self):
    text = guarantees.parallel([_proved(2., delta=.01)] * 4)
    pure = guarantees.to_pure(text, 4 * 1.5)
    self.assertEqual(pure.epsilon, 4 * 2. * 1.5)
    self.assertAlmostEqual(pure.delta, .04)

  def test_pure_form_edges(self):
    none = _proved(math.inf, status='none')
    self.assertEqual(guarantees.to_pure(none, 0.).epsilon, math.inf)
    self.assertEqual(guarantees.to_pure(_proved(1.), 0.).epsilon, 0.)
    for distance in (-1., math.inf, math.nan):
      with self.assertRaisesRegex(ValueError, 'distance'):
        guarantees.to_pure(_proved(1.), distance)
    with self.assertRaisesRegex(ValueError, 'pure already'):
      guarantees.to_pure(_pure(1.), 1.)


class UnknownWordsTest(parameterized.TestCase):

  def test_error_leaves_the_guarantee_and_refuses_unknown_words(self):
    self.assertEqual(guarantees.with_unknown_words(_proved(1.), 'error', 0),
                     _proved(1.))
    with self.assertRaisesRegex(ValueError, 'num_unknown=1'):
      guarantees.with_unknown_words(_proved(1.), 'error', 1)

  @parameterized.product(policy=('unk', 'uniform'), num_unknown=(0, 3))
  def test_a_replaced_word_is_equal_to_every_other_unknown_word(
      self, policy, num_unknown):
    got = guarantees.with_unknown_words(_proved(1.), policy, num_unknown)
    self.assertEqual((got.epsilon, got.status), (1., 'proved'))
    self.assertEndsWith(
        got.relation, '; unknown words are equal to each other (distance 0) '
        'and incomparable (infinite distance) with table words')

  @parameterized.parameters((0, 'none occurred'), (1, '1 unknown word was'),
                            (7, '7 unknown words were released as they are'))
  def test_a_kept_word_ends_the_guarantee_of_every_text(self, num, condition):
    got = guarantees.with_unknown_words(_proved(1., delta=.1), 'keep', num)
    self.assertEqual((got.epsilon, got.status), (math.inf, 'none'))
    self.assertIn(condition, got.conditions[-1])
    self.assertEqual(got.conditions[:-1], _PROOF)

  @parameterized.parameters(('drop', 0, 'policy'), ('unk', -1, 'num_unknown'),
                            ('keep', .5, 'num_unknown'))
  def test_refuses_bad_arguments(self, policy, num_unknown, name):
    with self.assertRaisesRegex(ValueError, name):
      guarantees.with_unknown_words(_proved(1.), policy, num_unknown)


class LedgerTest(parameterized.TestCase):

  @parameterized.parameters('claimed', 'standard', 'certified')
  def test_a_row_holds_the_ledger_and_the_guarantee(self, name):
    self.assertEqual(
        guarantees.ledger_row(name, _pure(2., delta=1e-5)),
        {'ledger': name, 'epsilon': 2., 'delta': 1e-5, 'status': 'proved',
         'source': 'Author (2000)'})

  def test_refuses_another_ledger(self):
    with self.assertRaisesRegex(ValueError, 'name=\'A\''):
      guarantees.ledger_row('A', _pure(2.))


class CardTest(parameterized.TestCase):

  def test_reads_epsilon_at_the_distances_of_the_table(self):
    card = _card(neighbor_distance=4.29, pair_distance=9., diameter=12.,
                 num_tokens=50, longest_line=7)
    words = card['table_words']
    self.assertEqual(words['epsilon_times_median_neighbor_distance'], 10 * 4.29)
    self.assertEqual(words['epsilon_times_p95_pair_distance'], 90.)
    self.assertEqual(card['text_bound']['longest_line'],
                     {'words': 7, 'epsilon': 7 * 10 * 12., 'delta': 0.})
    self.assertEqual(card['text_bound']['file']['epsilon'], 50 * 10 * 12.)
    self.assertEqual(card['guarantee'], _proved(10.).to_dict())

  def test_the_text_bound_is_the_composed_guarantee(self):
    guarantee = _proved(2., delta=.01)
    card = _card(guarantee, diameter=1.5, num_tokens=6, num_kept=1,
                 num_unknown=1, unknown_policy='unk')
    pure = guarantees.to_pure(guarantees.parallel([guarantee] * 4), 4 * 1.5)
    self.assertEqual(card['text_bound']['file']['words'], 4)
    self.assertAlmostEqual(card['text_bound']['file']['epsilon'], pure.epsilon)
    self.assertAlmostEqual(card['text_bound']['file']['delta'], pure.delta)

  def test_pure_guarantees_need_no_distance(self):
    card = _card(_pure(2., delta=.3), num_tokens=5)
    self.assertEqual(card['text_bound']['file'],
                     {'words': 5, 'epsilon': 10., 'delta': 1.})
    self.assertIn('does not apply',
                  card['table_words']['epsilon_times_diameter'])

  def test_what_was_not_given_is_written_as_not_measured(self):
    bare = _card()
    full = _card(
        neighbor_distance=1., pair_distance=2., diameter=3.,
        incomparable_pairs=0, num_tokens=9, longest_line=4, entropy_bits=128,
        key_storage='memory of the process', public_table='declared',
        independent_vocabulary='declared',
        measured=dict.fromkeys(
            ('unchanged_q50', 'unchanged_q90', 'support_q10', 'support_q50',
             'support_q90'), .5) | dict.fromkeys(
                 ('unchanged_q90_interval', 'support_q10_interval'), (.4, .6))
        | {'num_runs': 100, 'num_sampled': 100})

    def keys(card, prefix=''):
      for name, value in card.items():
        yield prefix + name
        if isinstance(value, dict) and name not in ('longest_line', 'file'):
          yield from keys(value, f'{prefix}{name}.')
    self.assertEqual(list(keys(bare)), list(keys(full)))
    text = guarantees.card_text(bare)
    # 3 distances and 3 products, the pairs, 2 bounds, 2 token counts, 9
    # measurements.
    self.assertEqual(text.count(guarantees.NOT_MEASURED), 20)
    self.assertEqual(text.count(': unknown\n'), 4)
    self.assertNotIn(guarantees.NOT_MEASURED, guarantees.card_text(full))
    self.assertIn('empirical, not a guarantee', text)

  @parameterized.parameters((0, 'none occurred'), (2, '2 unknown words were'))
  def test_kept_words_end_the_guarantee_but_not_that_of_table_words(
      self, num_unknown, condition):
    card = _card(num_tokens=9, num_unknown=num_unknown, unknown_policy='keep',
                 neighbor_distance=2., diameter=3., longest_line=5)
    self.assertEqual((card['guarantee']['status'],
                      card['guarantee']['epsilon']), ('none', math.inf))
    self.assertIn(condition, card['guarantee']['conditions'][-1])
    self.assertEqual(card['table_words']['status'], 'proved')
    self.assertEqual(
        card['table_words']['epsilon_times_median_neighbor_distance'], 20.)
    self.assertEqual(card['text_bound']['file']['epsilon'], math.inf)
    self.assertEqual(card['tokens']['unknown']['protection'], 'none')
    self.assertEqual(card['tokens']['protected'], 9 - num_unknown)
    self.assertContainsSubset(
        ['which tokens were unknown', 'the unknown words'], card['public'])
    self.assertIn('nothing is promised', guarantees.card_text(card))
    unmeasured = _card(num_tokens=9, unknown_policy='keep')  # no diameter
    self.assertEqual(unmeasured['text_bound']['file']['epsilon'], math.inf)

  @parameterized.parameters(
      ({'entropy_bits': 128}, 'operating system, 128 bits; the key of one '
       'word has at most 64 of them', False),
      ({'is_seeded': True}, 'seed (insecure: reproducible)', True),
      ({}, 'unknown', False))
  def test_entropy_says_when_a_condition_fails(self, facts, entropy, fails):
    randomness = _card(**facts)['randomness']
    self.assertEqual(randomness['entropy'], entropy)
    self.assertEqual('does not hold' in randomness['generator'], fails)

  def test_floating_point_is_excused_on_the_integer_grid_only(self):
    grid = _proved(1., conditions=(
        guarantees.IDEAL_RANDOM_BITS, guarantees.INTEGER_GRID))
    mixed = _proved(1., conditions=(*_PROOF, guarantees.INTEGER_GRID))
    notes = [_card(g)['randomness']['floating_point']
             for g in (grid, mixed, _proved(1.))]
    self.assertEqual([n.startswith('drawn on') for n in notes],
                     [True, False, False])

  @parameterized.parameters(
      ({'table_digest': 'ab'}, 'table_digest'), ({'num_words': 0}, 'num_words'),
      ({'dimension': 1.5}, 'dimension'), ({'releases': 0}, 'releases'),
      ({'diameter': -1.}, 'diameter'),
      ({'incomparable_pairs': 4951}, 'incomparable_pairs=4951'),
      ({'incomparable_pairs': -1}, 'incomparable_pairs'),
      ({'pair_distance': math.nan}, 'p95'),
      ({'num_tokens': 3, 'longest_line': 4}, 'num_tokens'),
      ({'num_tokens': 3, 'num_kept': 4}, 'num_tokens'),
      ({'num_kept': -1}, 'num_kept'), ({'num_unknown': 1}, 'num_unknown'),
      ({'public_table': 'yes'}, 'public_table'),
      ({'independent_vocabulary': True}, 'independent_vocabulary'),
      ({'settings': {'x': ['a', 'word']}}, 'settings'),
      ({'settings': {'x': 'word ' * 20}}, 'settings'),
      ({'settings': {'x': math.nan}}, 'settings'),
      ({'measured': {'recall': 1.}}, 'recall'),
      ({'measured': {'unchanged_q50': 1.1}}, 'unchanged_q50'),
      ({'is_seeded': True, 'entropy_bits': 64}, 'entropy_bits'))
  def test_refuses_a_bad_fact_by_name(self, facts, name):
    with self.assertRaisesRegex(ValueError, name):
      _card(**facts)

  def test_no_argument_takes_the_text(self):
    names = set(inspect.signature(guarantees.card).parameters)
    self.assertEmpty(names & {'text', 'tokens', 'words', 'lines', 'table'})

  def test_json_is_stable_and_round_trips(self):
    card = _card(num_tokens=np.int64(9), num_unknown=np.int64(1),
                 unknown_policy='keep', diameter=np.float32(2))
    text = guarantees.card_json(card)
    other = _card(num_tokens=9, num_unknown=1, unknown_policy='keep',
                  diameter=2., settings={'alpha': True, 'beta': 0.001})
    self.assertEqual(text, guarantees.card_json(other))
    self.assertEqual(json.loads(text), card)
    self.assertEqual(guarantees.card_json(json.loads(text)), text)
    self.assertIn('Infinity', text)

  def test_text_fits_80_columns_and_says_the_numbers(self):
    text = guarantees.card_text(_card(
        _proved(10., source='a long theorem ' * 20), table_name='t' * 200,
        num_tokens=12345, diameter=2.5, releases=3))
    self.assertLessEqual(max(map(len, text.splitlines())), 80)
    for part in ('status: proved', 'epsilon: 10.0', _DIGEST, 'total: 12345',
                 'releases: 3', 'white space; line breaks', 'beta: 0.001',
                 'real arithmetic; ideal random bits'):
      self.assertIn(part, text)
