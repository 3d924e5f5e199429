"""Benchmarks of samplers and mechanisms check laws and answers, then time."""

import contextlib
import functools
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from benchmarks import mechanism_baselines
from benchmarks import mechanisms_bench
from benchmarks import mldp_peer
from benchmarks import neighbors_bench
from benchmarks import samplers_bench
from jaxdp import mechanisms
from jaxdp.mechanisms import candidates

_CASES = samplers_bench.cases(2**17, dims=(20,))
_TABLE = mechanisms_bench.random_table(300, 8)


def _numpy_setup(table, epsilon):
  """A peer that is right, in any interpreter with NumPy."""
  import numpy as np  # pylint: disable=redefined-outer-name,reimported
  vectors, rng = np.load(table), np.random.default_rng(0)

  def run(ids=None, noise=False):
    if ids is None:
      return '1.2.3'
    added = rng.standard_normal((len(ids), vectors.shape[1]))
    added /= np.linalg.norm(added, axis=1, keepdims=True)
    added *= rng.gamma(vectors.shape[1], 1 / epsilon, (len(ids), 1))
    gaps = (vectors[ids] + added)[:, None] - vectors
    out = np.argmin(np.sum(gaps**2, axis=2), axis=1).tolist()
    return (out, added.tolist()) if noise else out

  return run


def _ending_setup(table, epsilon):
  raise ImportError(f'no peer here for {table}, {epsilon}')


def _absent_here(package, folder, k, threads):
  """A right scikit-learn that only an interpreter without us can import."""
  import sys  # pylint: disable=redefined-outer-name,reimported
  import numpy as np  # pylint: disable=redefined-outer-name,reimported
  if 'benchmarks' in sys.modules:
    raise ImportError(f'{package} is not here ({threads})')
  table, queries = (np.load(f'{folder}/{n}.npy') for n in ('table', 'queries'))
  gaps = np.linalg.norm(queries[0][:, None] - table, axis=2)
  return lambda turn: np.argsort(gaps, axis=1)[:, :k]


@contextlib.contextmanager
def _numpy_peer(params):
  """A running peer that is right and says it is of version 1.2.3."""
  with mock.patch.object(mldp_peer, 'setup', _numpy_setup), mldp_peer.start(
      sys.executable, _TABLE.vectors, params.guarantee.epsilon) as peer:
    yield peer


class SamplersBenchTest(parameterized.TestCase):

  def test_rows_have_the_times_the_law_and_the_ratios(self):
    rows = list(samplers_bench.rows(2**12, 20, 3, only=('laplace', 'lambertw')))
    self.assertEqual([(r['sampler'], r['prng']) for r in rows], [
        ('laplace', 'threefry2x32'), ('laplace', 'threefry4x32'),
        ('lambertw', None), ('lambertw', None)])
    for row in rows:
      self.assertContainsSubset(
          ['compile_s', 'first_run_s', 'median_cpu_s', 'ns_per_sample_jaxdp',
           'ns_per_sample_scipy', 'ratio_to_scipy', 'machine'], row)
      self.assertGreater(row['ratio_to_scipy'], 0)
    self.assertContainsSubset(['ratio_to_jax', 'ratio_to_numpy'], rows[0])
    self.assertEqual([r['name'][-7:] for r in rows[2:]], ['float64', 'float32'])
    self.assertLessEqual(max(r['max_ulp'] for r in rows[2:]), 4)

  @parameterized.parameters(*_CASES)
  def test_numpy_and_scipy_have_the_law_and_a_wrong_one_is_refused(self, name):
    case = _CASES[name]
    for peer in {'numpy', 'scipy'} & set(case.peers):
      samples = np.asarray(case.peers[peer](np.random.default_rng(1)))
      samplers_bench.check_law(peer, samples, case.laws)
      wrong = samples // 3 if samples.dtype.kind in 'ui' else samples * 1.4
      with self.assertRaisesRegex(ValueError, 'samples have'):
        samplers_bench.check_law(peer, wrong, case.laws)

  def test_vectors_that_lean_or_are_stuck_at_zero_are_refused(self):
    case = _CASES['multivariate_laplace/D=20']
    right = case.peers['numpy'](np.random.default_rng(1))
    for wrong in (right + 3 * np.eye(20)[0], np.full_like(right, 1e-30)):
      with self.assertRaisesRegex(ValueError, 'samples have'):
        samplers_bench.check_law('wrong', wrong, case.laws)

  def test_lambert_w_is_measured_in_last_places_and_refused_when_off(self):
    x = np.float64([-.3, .5, 2.])
    exact = samplers_bench.sp_special.lambertw(x).real
    errors = samplers_bench.ulp_errors(x, exact)
    self.assertLessEqual(max(errors), 4)
    off = samplers_bench.ulp_errors(x, exact + 10 * np.spacing(exact))
    np.testing.assert_array_less(4., off)
    with self.assertRaisesRegex(ValueError, 'ulp off'):
      samplers_bench.check_ulp('lambertw', off)

  def test_an_unknown_sampler_is_refused_by_name(self):
    with self.assertRaisesRegex(ValueError, 'no_such.*laplace'):
      next(samplers_bench.rows(2**12, 20, 3, only=('no_such',)))


class MechanismsBenchTest(parameterized.TestCase):

  @mock.patch.object(mechanisms_bench.candidates, 'geometry')
  def test_rows_have_the_rates_of_ours_of_numpy_and_of_the_table(self, _):
    table, row = mechanisms_bench.rows(
        [_TABLE], (64,), numpy_words=32, rounds=3, only=('tem',))
    self.assertEqual(table['mechanism'], 'neighbor_table')
    self.assertTrue('ratio_to_sklearn' in table or table['skipped'])
    self.assertGreater(table['whole_table_cpu_s_jaxdp'], 0)
    self.assertEqual((row['batch'], row['numpy_words']), (64, 32))
    self.assertContainsSubset(
        ['compile_s', 'first_run_s', 'words_per_s', 'machine'], row)
    self.assertGreater(row['ratio_to_numpy'], 0)
    self.assertBetween(row['unchanged'], 0, .99)

  @pytest.mark.slow
  def test_a_row_of_vectors_has_a_peer_and_passes_its_checks(self):
    params = mechanisms_bench.calibrate('multivariate_laplace', _TABLE, None)
    with _numpy_peer(params) as peer:
      row = mechanisms_bench.mechanism_row(
          'multivariate_laplace', params, 64, numpy_words=32, rounds=3,
          threads=2, peer=peer, peer_words=16)
    self.assertEqual((row['clock'], row['peer_words']), ('wall', 16))
    self.assertGreater(min(row['ratio_to_numpy'], row['ratio_to_peer']), 0)

  def test_two_threads_return_what_one_call_does(self):
    params = mechanisms_bench.calibrate('tem', _TABLE, None)
    ids, key = np.arange(128, dtype=np.int32), jax.random.key(0)
    call, _ = mechanisms_bench.compiled('tem', key, ids, params, 2)
    whole = mechanisms.get('tem').privatize(key, ids, params)
    np.testing.assert_array_equal(call(ids), whole)
    self.assertFalse(np.array_equal(whole, ids))
    with self.assertRaisesRegex(ValueError, '1 of 128 words differ'):
      mechanisms_bench.check_parts('x', np.append(call(ids)[:-1], -1), whole)

  @parameterized.parameters('truncated_gumbel', 'gumbel_exponential', 'tem')
  def test_the_baseline_has_the_law_and_another_budget_is_refused(self, name):
    table = mechanisms_bench.random_table(70, 8)
    params = mechanisms_bench.calibrate(
        name, table, candidates.geometry(table))
    ids = np.random.default_rng(0).integers(0, 70, 4_000, np.int32)
    law, vectors = mechanisms.get(name).log_prob, table.vectors
    cdf = np.cumsum(np.exp(law(np.arange(70), params)), axis=1)
    u = np.random.default_rng(1).random((len(ids), 1))
    drawn = np.minimum(np.sum(cdf[ids] <= u, axis=1), 69)
    made = functools.partial(mechanisms_bench.baselines, name)
    for theirs in made(params, np.random.default_rng(2)).values():
      mechanisms_bench.check_same_law(name, vectors, ids, drawn, theirs(ids))
    other = {key: getattr(params, key) * factor for key, factor in (
        ('scale', .25), ('rate', .4)) if hasattr(params, key)}
    wrong = made(params._replace(**other), np.random.default_rng(2))
    for out in (*(theirs(ids) for theirs in wrong.values()), ids):
      with self.assertRaisesRegex(ValueError, 'by NumPy'):
        mechanisms_bench.check_same_law(name, vectors, ids, drawn, out)

  def test_a_word_that_is_not_the_nearest_is_refused(self):
    params = mechanisms_bench.calibrate('multivariate_laplace', _TABLE, None)
    ids, key = np.arange(64, dtype=np.int32), jax.random.key(0)
    rng = np.random.default_rng(0)
    theirs = mechanism_baselines.from_vectors(
        'multivariate_laplace', params, rng)
    noisy = _TABLE.vectors[ids] + mechanism_baselines.numpy_noise(
        rng, 64, 8, params.epsilon)
    gaps = noisy[:, None] - _TABLE.vectors
    right = np.argmin(np.sum(gaps**2, axis=2), axis=1)
    check = lambda out: mechanisms_bench.check(
        'multivariate_laplace', key, ids, params, out,
        {'numpy': theirs(ids)}, rng)
    with mock.patch.object(mechanisms_bench.multivariate_laplace,
                           'noisy_vectors', return_value=noisy):
      check(right)
      with self.assertRaisesRegex(ValueError, 'not the nearest'):
        check(np.append(right[:-1], right[-1] - 1))

  def test_neighbor_lists_that_are_wrong_are_refused(self):
    x = _TABLE.vectors[:50]
    gaps = np.linalg.norm(np.float64(x[:, None]) - x, axis=2)
    order = np.argsort(gaps, axis=1)
    right = order[:, :5], np.take_along_axis(gaps, order[:, :5], axis=1)
    second = order[:, 1:6], np.take_along_axis(gaps, order[:, 1:6], axis=1)
    mechanisms_bench.check_neighbors(x, x, right, right[0])
    for ours, theirs in (((right[0][:, ::-1], right[1]), right[0]),
                         (right, order[:, 1:6]), (second, None)):
      with self.assertRaisesRegex(ValueError, 'neighbor table'):
        mechanisms_bench.check_neighbors(x, x, ours, theirs)

  def test_a_missing_scikit_learn_runs_in_the_other_interpreter(self):
    x = _TABLE.vectors[:50]
    with mock.patch.object(neighbors_bench, 'peer_setup', _absent_here):
      row = mechanisms_bench.neighbor_row(x, 20, 1, sys.executable)
      left_out = mechanisms_bench.neighbor_row(x, 20, 1)
    self.assertEqual(row['skipped'], {})
    self.assertGreater(row['ratio_to_sklearn'], 0)
    self.assertIn('not here', left_out['skipped']['sklearn'])


class PeerTest(absltest.TestCase):

  def test_a_peer_in_its_process_is_checked_named_and_timed(self):
    params = mechanisms_bench.calibrate('multivariate_laplace', _TABLE, None)
    with _numpy_peer(params) as peer:
      row = mechanisms_bench.peer_fields(
          peer, lambda: sum(range(1000)), params, np.arange(16), 64, 'cpu')
    self.assertEqual((row['peer_words'], row['peer_n']), (16, 3))
    self.assertEqual((row['peer_version'], row['peer_recall']), ('1.2.3', 1.))
    self.assertGreater(row['ratio_to_peer'], 0)

  def test_noise_of_another_budget_or_wrong_words_are_refused(self):
    vectors, ids = _TABLE.vectors, np.arange(100)
    noise = mechanism_baselines.numpy_noise(
        np.random.default_rng(0), 100, 8, 2.)
    gaps = (vectors[ids] + noise)[:, None] - vectors
    out = np.argmin(np.sum(gaps**2, axis=2), axis=1)
    self.assertEqual(mldp_peer.check(vectors, 2., ids, out, noise), 1.)
    with self.assertRaisesRegex(ValueError, 'peer: .* samples have norm'):
      mldp_peer.check(vectors, 6., ids, out, noise)
    with self.assertRaisesRegex(ValueError, 'peer: .* nearest word'):
      mldp_peer.check(vectors, 2., ids, np.roll(out, 1), noise)

  def test_no_interpreter_and_no_peer_in_it_are_said_plainly(self):
    rows = mechanisms_bench.rows([_TABLE], (64,), peer_python='/no/such/python')
    with self.assertRaisesRegex(ValueError, '/no/such/python.*no interpreter'):
      next(rows)
    with (mock.patch.object(mldp_peer, 'setup', _ending_setup),
          self.assertRaisesRegex(ValueError, 'cannot run mldp-text; give'),
          mldp_peer.start(sys.executable, _TABLE.vectors, 1.)):
      pass


if __name__ == '__main__':
  absltest.main()
