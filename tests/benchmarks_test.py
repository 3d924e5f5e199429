"""Benchmarks run, check their answers and refuse wrong ones."""

import json
import os

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from benchmarks import audit_bench
from benchmarks import harness


class AuditBenchTest(parameterized.TestCase):

  def test_rows_name_the_machine_and_both_rates(self):
    out = os.path.join(self.create_tempdir().full_path, 'rows.jsonl')
    harness.emit(audit_bench.panel('adept', 2_000, 2_000, (2,)), out)
    with open(out, encoding='utf-8') as file:
      row, total = map(json.loads, file)
    self.assertEqual((row['n'], total['n']), (2, 'all'))
    self.assertAlmostEqual(
        row['ratio_to_numpy'], row['numpy_cpu_seconds_per_million']
        / row['cpu_seconds_per_million'])
    self.assertIn('cpu', total['machine'])

  @parameterized.parameters('laplace', 'adept', 'dptext')
  def test_the_baseline_has_the_law_and_a_wrong_one_is_refused(self, mechanism):
    counts = audit_bench.numpy_counts(mechanism, 1., 8, 50_000,
                                      np.random.default_rng(0))
    audit_bench.check(mechanism, 1., 8, 50_000, counts)
    with self.assertRaisesRegex(ValueError, 'expected'):
      audit_bench.check(mechanism, 2., 8, 50_000, counts)


if __name__ == '__main__':
  absltest.main()
