"""The training binary as two processes: the same run, to its end and after."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import types

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from experiments import image_training
from experiments import records
from experiments import train
from experiments.datasets import images as image_data

pytestmark = pytest.mark.slow  # compiles one small network in two processes

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_FLAGS = dict(
    mode='sound', dataset='digits', trainers=4, batch_size=60, epochs=.5,
    seed=1, votes=4, test_images=6, attack_steps=1, checkpoint_every=2,
    settings=json.dumps({  # adam would hide a wrong sum over trainers
        'first_layer': 'dense', 'attacks': ['ifgsm'], 'attack_steps': 1,
        'optimizer': 'sgd', 'reconstruction_rate': .05, 'clip_norm': 1.}),
    learning_rate=.05, epsilon=2_000., label_epsilon=4.)  # or noise moves all
_NOT_GIVEN = dict(shards=1, limit=None, flip=False, shift=0, quick=False)


def in_two_processes(out, **changes):
  """Runs the binary as 2 processes of 2 devices; list of (status, output)."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  env = {**os.environ, 'JAX_NUM_CPU_DEVICES': '2', 'JAX_PLATFORMS': 'cpu',
         'JAX_DISABLE_MOST_OPTIMIZATIONS': '1', 'PYTHONPATH': str(_ROOT)}
  command = [sys.executable, '-m', 'experiments.train', f'--out={out}',
             '--backend=shard_map', f'--coordinator_address={address}',
             '--num_processes=2'] + [
                 f'--{name}={value}' for name, value in (
                     _FLAGS | changes).items()]
  processes = [subprocess.Popen(
      [*command, f'--process_id={i}'], env=env, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, text=True) for i in range(2)]
  try:
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    return [(p.returncode, output) for p, output in zip(processes, outputs)]
  finally:
    for process in processes:
      process.kill()
      process.stdout.close()


class ProcessesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.out = self.create_tempdir().full_path
    self.path = os.path.join(self.out, 'rows.jsonl')
    jax.config.update('jax_disable_most_optimizations', True)
    self.addCleanup(jax.config.update, 'jax_disable_most_optimizations', False)

  def assert_ended(self, results):
    for status, output in results:
      self.assertEqual(status, 0, output)

  def test_two_processes_end_where_one_does_and_again_when_started_again(self):
    self.assert_ended(in_two_processes(self.out))
    provenance, rows = records.read(self.path)
    self.assertEqual(provenance['num_devices'], 4)
    self.assertEqual(rows[-1]['kind'], 'run')
    data = image_data.load('digits')
    run = train.run_of_flags(
        types.SimpleNamespace(**_FLAGS | _NOT_GIVEN), len(data.train_images))
    key = jax.random.key(1)
    one = image_training.train(key, run, data, None, backend='vmap')
    start, _ = image_training.start(key, run, data)
    two = image_training._Keeper(run, self.out).resume(start)
    self.assertEqual(int(two.step), run.num_steps)
    for name in ('encoder', 'tail'):
      moved = [np.abs(a - b).max() for a, b in zip(*(
          jax.tree.leaves(s.params[name]) for s in (two, start)))]
      self.assertGreater(max(moved), 1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
                 one.state.params, two.params)
    # Started again, both end and make nothing.
    self.assert_ended(in_two_processes(self.out))
    self.assertEqual(records.read(self.path)[1], rows)

  def test_what_process_0_refuses_ends_all(self):
    with records.Records(self.path, {'another': 'config'}):
      pass
    (first, output), (second, other) = in_two_processes(self.out)
    self.assertEqual((first, second), (1, 1), output + other)
    self.assertIn('another config', output)
    self.assertIn('process 0 has refused', other)
