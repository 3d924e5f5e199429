"""The binary for one's own mechanism: exit status, file, refusals."""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from experiments import audit_mechanism

_SOURCE = '''
import jax

def broken(key, x):
  return x + jax.random.laplace(key, x.shape) / 2

NUMBER = 3

def raising(key, x):
  raise KeyError('lost')
'''


class AuditMechanismTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    pathlib.Path(self.folder, 'audited.py').write_text(_SOURCE)
    for name, value in (('x', 0.), ('x_prime', 1.)):
      np.save(os.path.join(self.folder, f'{name}.npy'), np.float32(value))

  def run_binary(self, *args):
    root = pathlib.Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, '-m', 'experiments.audit_mechanism', *args],
        cwd=self.folder, capture_output=True, text=True, check=False,
        env=os.environ | {'PYTHONPATH': str(root)})

  def test_a_violated_claim_exits_with_1_and_its_audit_lies_beside(self):
    done = self.run_binary(
        '--function=audited:broken', '--x=x.npy', '--x_prime=x_prime.npy',
        '--claim=1', '--num_trials=20000', '--seed=0', '--out=found')
    self.assertEqual(done.returncode, 1, done.stderr)
    found = json.loads(pathlib.Path(
        self.folder, 'found', 'audit.json').read_text())
    self.assertEqual(found['verdict'], 'violated')
    self.assertBetween(found['epsilon_lower'], 1., 2.)
    self.assertIn('ceiling', done.stderr)
    self.assertEqual(
        [found[k] for k in ('function', 'x', 'x_prime', 'claim', 'seed',
                            'num_trials')],
        ['audited:broken', 'x.npy', 'x_prime.npy', 1., 0, 20_000])
    self.assertEqual(found['versions']['jax'], jax.__version__)

  def test_an_audit_that_cannot_run_exits_with_2_and_one_line(self):
    done = self.run_binary(
        '--function=audited:nothing', '--x=x.npy', '--x_prime=x_prime.npy')
    self.assertEqual(done.returncode, 2)
    self.assertIn('nothing', done.stderr)
    self.assertNotIn('Traceback', done.stderr)
    self.assertFalse(os.path.exists(os.path.join(
        self.folder, 'results', 'audit_mechanism', 'audit.json')))

  @parameterized.parameters('--nosuch=1', '--num_trials=0', '--score=xx',
                            '--claim=abc')
  def test_a_bad_flag_is_no_violation(self, flag):
    done = self.run_binary('--function=audited:broken', '--x=x.npy',
                           '--x_prime=x_prime.npy', flag)
    self.assertEqual(done.returncode, 2)

  def test_a_function_that_raises_is_no_violation(self):
    done = self.run_binary('--function=audited:raising', '--x=x.npy',
                           '--x_prime=x_prime.npy', '--claim=1')
    self.assertEqual(done.returncode, 2)
    self.assertIn('KeyError', done.stderr)
    line = _SOURCE.splitlines().index("  raise KeyError('lost')") + 1
    self.assertIn(f'audited.py:{line}', done.stderr)

  def test_a_failed_run_leaves_no_file_of_an_earlier_one(self):
    old = pathlib.Path(self.folder, 'audit.json')
    old.write_text('{}')
    with self.assertRaisesRegex(ValueError, 'equal'):
      audit_mechanism.audit_function(
          lambda key, x: x, np.float32(0.), np.float32(0.), out=self.folder,
          key=jax.random.key(0), claim=1., num_trials=20_000)
    self.assertFalse(old.exists())

  @parameterized.parameters('', 'x.npy', os.path.join('x.npy', 'below'))
  def test_an_out_that_is_no_folder_is_named_before_the_audit(self, out):
    out = os.path.join(self.folder, out) if out else out
    with self.assertRaisesRegex(ValueError, 'out='):
      audit_mechanism.audit_function(
          None, None, None, out=out, key=None, claim=1.)

  def test_doubles_reach_the_audit_as_they_are(self):
    path = os.path.join(self.folder, 'double.npy')
    np.save(path, np.float64(1e8 + 1))
    value = audit_mechanism.load_input('x', path)
    self.assertEqual((value.dtype, float(value)), (np.float64, 1e8 + 1))

  def test_a_true_claim_is_not_violated(self):
    result = audit_mechanism.audit_function(
        lambda key, x: x + jax.random.laplace(key, x.shape), np.float32(0.),
        np.float32(1.), out=self.folder, key=jax.random.key(0), claim=1.,
        num_trials=20_000)
    self.assertEqual(result.verdict, 'not violated')

  @parameterized.parameters('audited', 'audited:', ':broken', 'absent_here:f',
                            'audited:NUMBER')
  def test_functions_that_are_not_there_are_named(self, name):
    sys.path.insert(0, self.folder)
    self.addCleanup(sys.path.remove, self.folder)
    with self.assertRaisesRegex(ValueError, 'function='):
      audit_mechanism.load_function(name)

  def test_inputs_that_are_no_arrays_are_named(self):
    bad = os.path.join(self.folder, 'bad.npy')
    with self.assertRaisesRegex(ValueError, 'x_prime='):
      audit_mechanism.load_input('x_prime', bad)
    pathlib.Path(bad).write_text('no array')
    with self.assertRaisesRegex(ValueError, 'x='):
      audit_mechanism.load_input('x', bad)
    np.save(bad, np.array([np.nan]))
    with self.assertRaisesRegex(ValueError, 'NaN'):
      audit_mechanism.load_input('x', bad)


if __name__ == '__main__':
  absltest.main()
