"""The library's own audits: each way of measuring catches a false claim."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from experiments import audit_library
from jaxdp import mechanisms

_CONFIG = audit_library.Config(num_runs=20_000, num_trials=100_000)


def _case(mechanism, how):
  return next(case for case in audit_library.grid(_CONFIG)
              if (case.mechanism, case.how) == (mechanism, how))


class AuditLibraryTest(parameterized.TestCase):

  def test_every_mechanism_has_an_audit(self):
    cases = audit_library.grid(_CONFIG)
    self.assertContainsSubset(mechanisms.names(),
                              {case.mechanism for case in cases})
    keys = [(c.mechanism, str(c.settings), c.table) for c in cases]
    self.assertLen(set(keys), len(keys))

  @parameterized.parameters(
      ('santext', 'law'), ('vmf', 'law'), ('custext', 'law'),
      ('grid_laplace', 'masses'), ('grid_exponential', 'masses'),
      ('randomized_response', 'masses'), ('vmf', 'runs'))
  def test_a_claim_below_what_is_measured_is_violated(self, mechanism, how):
    case = _case(mechanism, how)
    row = audit_library._AUDITS[how](_CONFIG, case)
    self.assertEqual(row['verdict'], 'not violated')
    self.assertGreater(row['measured'], .4 * row['claimed_epsilon'])
    real = audit_library.report.guarantee_fields

    def claimed_less(guarantee):
      return real(dataclasses.replace(
          guarantee, epsilon=.99 * row['measured']))

    with absltest.mock.patch.object(audit_library.report, 'guarantee_fields',
                                    claimed_less):
      again = audit_library._AUDITS[how](_CONFIG, case)
    self.assertEqual(again['verdict'], 'violated')

  def test_the_grid_shows_no_trace_of_rounding(self):
    cases = [c for c in audit_library.grid(_CONFIG)
             if (c.mechanism, c.how) == ('grid_laplace', 'trials')]
    self.assertEqual([c.settings['score'] for c in cases], ['bits', 'support'])
    for case in cases:
      row = audit_library._trials(_CONFIG, case)
      self.assertEqual(row['verdict'], 'not violated')
      self.assertGreater(row['ceiling'], 5.)


if __name__ == '__main__':
  absltest.main()
