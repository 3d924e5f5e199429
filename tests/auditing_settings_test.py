"""Numbers that audits refuse, each by its name."""

from absl.testing import parameterized
import jax
import numpy as np

from jaxdp import auditing
from jaxdp.auditing import betting
from jaxdp.auditing import bounds
from jaxdp.auditing import settings


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
