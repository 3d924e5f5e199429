"""Numbers that audits refuse, each by its name."""

from absl.testing import parameterized
import jax
import numpy as np

from jaxdp import auditing
from jaxdp import mechanisms
from jaxdp.auditing import betting
from jaxdp.auditing import bounds
from jaxdp.auditing import events
from jaxdp.auditing import settings


def _audit(x=np.float32(0.), x_prime=np.float32(1.), *, num_trials=20_000,
           **arguments):
  return auditing.audit(
      lambda key, x: x + jax.random.laplace(key), x, x_prime,
      key=jax.random.key(0), num_trials=num_trials, **arguments)


class SettingsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('1',), (b'1',), (None,), (True,), ([.1],), (np.nan,), ('nan',), ({},))
  def test_what_is_no_number_is_refused(self, value):
    with self.assertRaisesRegex(ValueError, 'significance='):
      settings.check_significance(value)
    with self.assertRaisesRegex(ValueError, 'delta='):
      settings.check_delta(value)
    with self.assertRaisesRegex(ValueError, 'delta='):
      bounds.epsilon_ceiling(100, delta=value)
    with self.assertRaisesRegex(ValueError, 'epsilon='):
      betting.Bettor(epsilon=value)

  @parameterized.parameters((.05,), (np.float32(.05),), (np.array(.05),))
  def test_every_single_number_is_taken(self, value):
    self.assertAlmostEqual(settings.check_significance(value), .05, places=7)
    self.assertGreater(bounds.epsilon_ceiling(100, significance=value), 0)

  @parameterized.parameters(('claimed_sensitivity', '1'), ('num_keys', '8'),
                            ('order', 'two'))
  def test_replay_names_what_it_refuses(self, name, value):
    arguments = {'claimed_sensitivity': 1., name: value}
    with self.assertRaisesRegex(ValueError, f'{name}='):
      auditing.replay(lambda key, x: x, 0., 1., key=jax.random.key(0),
                      **arguments)

  @parameterized.parameters(1e-300, 1e-17, 9e-13)
  def test_a_significance_beyond_the_digits_is_refused(self, value):
    for call in (
        lambda: bounds.epsilon_lower_bound(14_997, 14_998, 15_000, 15_000,
                                           significance=value),
        lambda: _audit(significance=value, claim=.01),
        lambda: betting.Bettor(epsilon=1., significance=value)):
      with self.assertRaisesRegex(ValueError, 'significance='):
        call()

  def test_the_least_significance_chooses_and_bounds_without_nan(self):
    rng = np.random.default_rng(0)
    _, direction = events.choose(
        rng.normal(size=2_000), rng.normal(size=2_000) + 2., 10_000, 0., 1e-12)
    self.assertEqual(direction, 'x_prime')
    bound = bounds.epsilon_lower_bound(10, 9_990, 10_000, 10_000,
                                       significance=1e-12, num_events=2**40)
    self.assertBetween(bound.epsilon_lower, 1., 7.)

  @parameterized.parameters(
      ('hits', {'a': 1}), ('hits', 1j), ('hits', '5'), ('hits', [[1], [2, 3]]),
      ('hits', None), ('hits', 10**400), ('trials', '10'),
      ('direction', ['x']))
  def test_counts_of_another_type_are_named(self, name, value):
    arguments = dict(hits=5, hits_prime=0, trials=10, trials_prime=10)
    with self.assertRaisesRegex(ValueError, f'{name}='):
      bounds.epsilon_lower_bound(**arguments | {name: value})

  @parameterized.parameters(
      ('counts', (0, 0, 0)), ('counts', (1, 0, 0, 0)), ('counts', 'abcd'),
      ('pairs_used', -1), ('pairs_used', None), ('log_wealth', np.nan),
      ('log_wealth', 'a'), ('rejected', 'no'), ('log_wealth', 1e9),
      ('rejected', True))
  def test_a_state_that_no_pairs_lead_to_is_named(self, name, value):
    with self.assertRaisesRegex(ValueError, f'{name}='):
      betting.Bettor(epsilon=1., **{name: value})

  @parameterized.parameters(
      ('common_noise', 'no'), ('common_noise', 1), ('vectorized', 'yes'),
      ('claim', True), ('x', 'a'), ('x', 2**70),
      ('x', np.array([1, 'a'], object)), ('x', 1j))
  def test_the_audit_names_what_it_refuses(self, name, value):
    arguments = {name: value}
    if name == 'x':
      arguments['x_prime'] = value
    with self.assertRaisesRegex(ValueError, f'{name}='):
      _audit(**arguments)

  def test_messages_say_what_to_give(self):
    with self.assertRaisesRegex(ValueError, 'dtype int64 .* np.float32'):
      _audit(x=0, x_prime=1.)
    with self.assertRaisesRegex(ValueError, 'num_trials=1 is too few'):
      _audit(num_trials=1)
    with self.assertRaisesRegex(ValueError, r'parameters\[0\]='):
      auditing.audit_sweep(
          lambda key, x, p: x, 0., 1., np.array([1, 'a'], object),
          key=jax.random.key(0), num_trials=20_000)
    for lost in (np.arange(2**33, 2**33 + 3), np.array([1e-300, 1.]),
                 np.array([1., 1e300])):
      with self.assertRaisesRegex(ValueError, 'parameters .* 32 bits'):
        auditing.audit_sweep(
            lambda key, x, p: x, 0., 1., lost, key=jax.random.key(0),
            num_trials=20_000)

  @parameterized.parameters(
      (lambda: auditing.exact_epsilon(None, None), 'law is'),
      (lambda: auditing.exact_delta(None, None, 'a'), "epsilon='a'"),
      (lambda: auditing.exact_metric_epsilon('a', np.zeros((2, 2))),
       'log_probs='),
      (lambda: auditing.exact_metric_epsilon(
          np.log(np.full((2, 2), .5)), 1 - np.eye(2), tolerance='a'),
       'tolerance='),
      (lambda: auditing.exact_metric_epsilon(
          np.zeros((2, 2), complex), 1 - np.eye(2)), 'complex'),
      (lambda: auditing.metric_epsilon_lower_bound(None, np.eye(2)),
       'log_prob_fn='),
      (lambda: auditing.metric_epsilon_lower_bound(
          lambda ids: 0, np.eye(2), seed='a'), 'seed='),
      (lambda: auditing.metric_epsilon_lower_bound(
          lambda ids: {}['q'], np.eye(2)), 'log_prob_fn raises KeyError at'),
      (lambda: auditing.exponential_metric_epsilon(np.eye(2), 'a'), 'rate='),
      (lambda: auditing.exponential_metric_epsilon(np.eye(2), 1., None),
       'cap='),
      (lambda: auditing.sampled_epsilon_lower_bound(
          [0, 1], [0, 1], num_outcomes=2**28, significance=.05),
       'num_outcomes='),
      (lambda: auditing.sampled_epsilon_lower_bound(
          [0, 1], [0, 1], 'a', num_outcomes=2, significance=.05), 'distance='),
      (lambda: auditing.one_run_epsilon_lower_bound(
          2**30, 2**30, 2**30, delta=1e-5), 'num_correct='),
      (lambda: mechanisms.get(['a']), 'mechanism='))
  def test_arguments_of_another_type_are_named(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  def test_scalar_results_are_python_floats(self):
    for value in (bounds.epsilon_ceiling(100), bounds.multi_split_bound([1.]),
                  bounds.epsilon_point(5, 1, 10, 10),
                  bounds.delta_lower_bound(90, 0, 100, 100, 1.)):
      self.assertIs(type(value), float)
