"""Every word mechanism: the law it draws, the law it states, its epsilon."""

import functools
import inspect
import math
import re

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp import embeddings
from jaxdp import guarantees
from jaxdp import mechanisms
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.auditing import exact
from jaxdp.mechanisms import candidates
from jaxdp.mechanisms import santext

_FALSE_ALARM = 1e-3


@functools.lru_cache
def _table(num_words=12, dim=3, seed=0):
  vectors = np.random.default_rng(seed).normal(size=(num_words, dim))
  return embeddings.EmbeddingTable(
      tuple(f'w{i}' for i in range(num_words)), vectors.astype(np.float32))


def _paper_bound(table):
  minimum, _ = neighbors.distance_range(table.vectors)
  return (5 + 2 * math.log(len(table.words))) / minimum


def _sound_bound(table):
  minimum, _ = neighbors.distance_range(table.vectors)
  return 2 * math.log(len(table.words)) / minimum


def _cases(table):
  """(name, settings, epsilon whose law spreads over the toy table)."""
  paper, sound = _paper_bound(table), _sound_bound(table)
  # With alpha Delta_0 = e^7 the paper's b is about 0.3 of the diameter.
  tight = paper + 3 * math.exp(7.) / neighbors.distance_range(
      table.vectors)[0]
  yield from (('truncated_gumbel', {'noise': noise}, tight)
              for noise in ('truncated', 'clipped', 'untruncated'))
  yield 'gumbel_exponential', {}, sound + 2.
  yield 'gumbel_exponential', {'num_candidates': 'all'}, 4.
  yield 'santext', {}, 4.
  yield 'tem', {'beta': 0.2}, 4.


def _line():
  return embeddings.EmbeddingTable(
      ('a', 'b', 'c', 'd', 'e'),
      np.float32([[0.], [1.], [1.7], [3.], [7.]]))


_LINE_CASE = ('multivariate_laplace', {}, 1.)
_NAMED = [(f'{name}_{"_".join(map(str, settings.values()))}', name, settings,
           epsilon) for name, settings, epsilon in _cases(_table())]


def _chi_square(counts, law):
  """P-value of counts against a law; cells expecting under 10 are pooled."""
  expected = law * counts.sum()
  rare = expected < 10
  observed = np.append(counts[~rare], counts[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  if expected[-1] < 1e-6:
    if observed[-1]:
      return 0.
    observed, expected = observed[:-1], expected[:-1]
  return scipy.stats.chisquare(observed, expected).pvalue


def _counts(mech, params, word, num, seed=0):
  out = mech.privatize(jax.random.key(seed), np.full(num, word, np.int32),
                       params)
  return np.bincount(np.asarray(out), minlength=params.vectors.shape[0])


def _rescaled(name, params, factor):
  """Params whose noise is `factor` times wider."""
  if name == 'truncated_gumbel':
    return params._replace(scale=np.float32(params.scale * factor))
  if name == 'multivariate_laplace':
    return params._replace(epsilon=np.float32(params.epsilon / factor))
  return params._replace(rate=np.float32(params.rate / factor))


class LawTest(parameterized.TestCase):

  @parameterized.named_parameters(*_NAMED)
  def test_a_million_draws_match_log_prob_and_reject_another_scale(
      self, name, settings, epsilon):
    self._matches(name, settings, epsilon, _table())

  def test_laplace_on_a_line_matches_its_intervals(self):
    self._matches(*_LINE_CASE, _line())

  def _matches(self, name, settings, epsilon, table):
    mech = mechanisms.get(name)
    params = mech.calibrate(table, epsilon=epsilon, **settings)
    if name == 'truncated_gumbel':
      _, diameter = neighbors.distance_range(table.vectors)
      self.assertLessEqual(float(params.scale), 0.3 * diameter)
    wrong = _rescaled(name, params, 1.05)
    for word in (0, 4):
      counts = _counts(mech, params, word, 500_000, seed=word)
      law = np.exp(mech.log_prob(np.array([word]), params))[0]
      np.testing.assert_allclose(law.sum(), 1, atol=1e-10)
      self.assertLess(law.max(), 0.999)  # else any noise would pass
      self.assertGreater(_chi_square(counts, law), _FALSE_ALARM)
      other = np.exp(mech.log_prob(np.array([word]), wrong))[0]
      self.assertLess(_chi_square(counts, other), _FALSE_ALARM)

  def test_a_large_table_uses_its_rare_branch_and_matches(self):
    # Three columns for 60 words: most of K's law is the whole vocabulary.
    table = _table(60)
    for name, settings in (
        ('truncated_gumbel', {'noise': 'truncated'}),
        ('truncated_gumbel', {'noise': 'clipped'}),
        ('gumbel_exponential', {})):
      mech = mechanisms.get(name)
      epsilon = (_paper_bound(table) * 1.5 if name == 'truncated_gumbel'
                 else _sound_bound(table) + 2.)
      params = mech.calibrate(table, epsilon=epsilon, max_candidates=3,
                              **settings)
      self.assertEqual(params.neighbor_ids.shape, (60, 3))
      counts = _counts(mech, params, 7, 20_000)
      law = np.exp(mech.log_prob(np.array([7]), params))[0]
      self.assertGreater(_chi_square(counts, law), _FALSE_ALARM)
      near = np.asarray(params.neighbor_ids[7])
      self.assertGreater(np.delete(counts, near).sum(), 500)

  def test_blocks_of_rare_words_are_those_of_any_batch(self):
    # Most words want more than the first columns, one in 60 the whole table.
    table = _table(60)
    mech = mechanisms.get('truncated_gumbel')
    params = mech.calibrate(table, epsilon=_paper_bound(table) * 1.5,
                            max_candidates=6)
    ids = np.random.default_rng(0).integers(0, 60, 9000).astype(np.int32)
    key, start = jax.random.key(2), 2**32 - 4000
    whole = np.asarray(mech.privatize(key, ids, params, start=start))
    parts = [mech.privatize(key, ids[i:i + 3000], params, start=start + i)
             for i in range(0, 9000, 3000)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    far = ~np.any(params.neighbor_ids[ids] == whole[:, None], axis=1)
    self.assertGreater(far[4000:].sum(), 100)  # beyond 2**32, in late blocks

  def test_draws_from_all_words_one_by_one_are_those_of_a_batch(self):
    table = _table(60)
    mech = mechanisms.get('gumbel_exponential')
    params = mech.calibrate(table, epsilon=_sound_bound(table) + 2.,
                            max_candidates=6)
    ids = np.random.default_rng(0).integers(0, 60, 400).astype(np.int32)
    key, start = jax.random.key(2), 2**32 - 40
    whole = np.asarray(mech.privatize(key, ids, params, start=start))
    far = ~np.any(params.neighbor_ids[ids] == whole[:, None], axis=1)
    self.assertGreater(far.sum(), 17)  # more than are drawn one by one
    parts = [mech.privatize(key, ids[i:i + 8], params, start=start + i)
             for i in range(0, 400, 8)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)

  def test_two_words_in_many_dimensions_cross_the_bisector(self):
    dim, gap, epsilon, num = 5, 1.5, 2., 200_000
    vectors = np.zeros((2, dim), np.float32)
    vectors[1, 2] = gap
    mech = mechanisms.get('multivariate_laplace')
    params = mech.calibrate(embeddings.EmbeddingTable(('a', 'b'), vectors),
                            epsilon=epsilon)
    # Projection of r u on an axis: u_1^2 ~ Beta(1/2, (D - 1)/2).
    radius = scipy.stats.gamma(dim, scale=1 / epsilon)
    axis = scipy.stats.beta(0.5, (dim - 1) / 2)
    crossing = scipy.integrate.quad(
        lambda r: radius.pdf(r) * axis.sf((gap / 2 / r)**2) / 2, gap / 2, 40)[0]
    crossed = int(_counts(mech, params, 0, num)[1])
    self.assertGreater(scipy.stats.binomtest(crossed, num, crossing).pvalue,
                       _FALSE_ALARM)
    wrong = scipy.stats.gamma(dim, scale=1.05 / epsilon)
    other = scipy.integrate.quad(
        lambda r: wrong.pdf(r) * axis.sf((gap / 2 / r)**2) / 2, gap / 2, 40)[0]
    self.assertLess(scipy.stats.binomtest(crossed, num, other).pvalue,
                    _FALSE_ALARM)

  def test_infinite_epsilon_returns_the_input_and_promises_nothing(self):
    mech = mechanisms.get('multivariate_laplace')
    params = mech.calibrate(_table(), epsilon=math.inf)
    ids = np.arange(12, dtype=np.int32)
    np.testing.assert_array_equal(
        mech.privatize(jax.random.key(0), ids, params), ids)
    self.assertEqual(params.guarantee.status, 'none')

  def test_noise_smaller_than_half_the_nearest_distance_keeps_the_word(self):
    table = _table(50, 3)
    mech = mechanisms.get('multivariate_laplace')
    params = mech.calibrate(table, epsilon=6.)
    ids = np.arange(50, dtype=np.int32)
    keys = samplers.element_keys(
        jax.random.key(1), samplers.VECTOR_NOISE, 0, 50)
    noise = jax.vmap(lambda k: samplers.multivariate_laplace(
        k, (3,), epsilon=6.))(keys)
    out = np.asarray(mech.privatize(jax.random.key(1), ids, params))
    gaps = mech.distances(ids, params) + 1e9 * np.eye(50)
    inside = np.linalg.norm(np.asarray(noise), axis=1) < gaps.min(1) / 2
    np.testing.assert_array_equal(out[inside], ids[inside])
    self.assertTrue(np.any(inside))
    self.assertTrue(np.any(out != ids))

  def test_a_word_of_probability_one_in_a_billion_keeps_it(self):
    # A thousand far words share what an integer threshold must not lose.
    vectors = np.zeros((1001, 1), np.float32)
    vectors[1:, 0] = 20. + np.arange(1000) * 1e-3
    table = embeddings.EmbeddingTable(
        tuple(map(str, range(1001))), vectors)
    for name, settings in (('santext', {}),
                           ('gumbel_exponential', {'num_candidates': 'all'})):
      mech = mechanisms.get(name)
      params = mech.calibrate(table, epsilon=1.15, **settings)
      law = np.exp(mech.log_prob(np.array([0]), params))[0]
      self.assertBetween(law[500], 1e-6, 2e-5)
      counts = _counts(mech, params, 0, 200_000)
      self.assertGreater(scipy.stats.binomtest(
          int(counts[1:].sum()), 200_000, law[1:].sum()).pvalue, _FALSE_ALARM)

  def test_tem_is_its_list_and_bottom_form(self):
    """The paper's two-stage draw has the law that log_prob states."""
    table, epsilon, beta = _table(30), 1.5, 0.1
    mech = mechanisms.get('tem')
    params = mech.calibrate(table, epsilon=epsilon, beta=beta)
    gamma = 2 / epsilon * math.log((1 - beta) * 29 / beta)
    np.testing.assert_allclose(float(params.cap), gamma, rtol=1e-6)
    small = 2.0  # a gamma that some words pass, to exercise the bottom
    params = params._replace(cap=np.float32(small))
    distance = mech.distances(np.array([3]), params)[0]
    near = distance <= small
    scores = np.append(-distance[near],
                       -small + 2 / epsilon * math.log((~near).sum()))
    stage = np.exp(epsilon * scores / 2)
    stage /= stage.sum()
    law = np.where(near, 0., stage[-1] / (~near).sum())
    law[near] = stage[:-1]
    self.assertGreater((~near).sum(), 1)
    np.testing.assert_allclose(np.exp(mech.log_prob(np.array([3]), params))[0],
                               law, rtol=1e-6)

  def test_no_log_prob_where_none_is_known(self):
    mech = mechanisms.get('multivariate_laplace')
    params = mech.calibrate(_table(), epsilon=1.)
    with self.assertRaisesRegex(ValueError, 'deniability.measure'):
      mech.log_prob(np.array([0]), params)
    table = _table(2001)
    mech = mechanisms.get('truncated_gumbel')
    params = mech.calibrate(table, epsilon=_paper_bound(table) * 2)
    with self.assertRaisesRegex(ValueError, 'deniability.measure'):
      mech.log_prob(np.array([0]), params)


class GuaranteeTest(parameterized.TestCase):

  @parameterized.product(
      case=(('santext', {}), ('tem', {}),
            ('gumbel_exponential', {'num_candidates': 'all'}),
            ('gumbel_exponential', {})),
      table=((12, 3, 0), (30, 2, 1), (60, 20, 2)),
      over=(1e-3, 0.5, 5., 200.))
  def test_no_proved_epsilon_is_exceeded(self, case, table, over):
    name, settings = case
    table = _table(*table)
    floor = _sound_bound(table) if (name, settings) == (
        'gumbel_exponential', {}) else 0.
    mech = mechanisms.get(name)
    params = mech.calibrate(table, epsilon=floor + over, **settings)
    self.assertEqual(params.guarantee.status, 'proved')
    self._holds(mech, params)

  def test_laplace_on_a_line_keeps_its_epsilon(self):
    mech = mechanisms.get('multivariate_laplace')
    for epsilon in (0.1, 1., 10.):
      self._holds(mech, mech.calibrate(_line(), epsilon=epsilon))

  def _holds(self, mech, params):
    ids = np.arange(params.vectors.shape[0])
    measured, _ = exact.exact_metric_epsilon(
        mech.log_prob(ids, params), mech.distances(ids, params))
    self.assertLessEqual(measured, params.guarantee.epsilon * (1 + 1e-9))
    self.assertGreater(measured, 0.)

  def test_halved_noise_is_caught_by_the_exact_audit(self):
    table = _table(30, 2, 1)
    mech = mechanisms.get('gumbel_exponential')
    params = mech.calibrate(table, epsilon=3., num_candidates='all')
    halved = _rescaled('gumbel_exponential', params, 1 / 2.5)
    ids = np.arange(30)
    measured, _ = exact.exact_metric_epsilon(
        mech.log_prob(ids, halved), mech.distances(ids, halved))
    self.assertGreater(measured, params.guarantee.epsilon)

  def test_the_clipped_reading_exceeds_its_claim(self):
    vectors = np.random.default_rng(1).normal(size=(100, 50))
    table = embeddings.EmbeddingTable(
        tuple(map(str, range(100))), vectors.astype(np.float32))
    mech = mechanisms.get('truncated_gumbel')
    params = mech.calibrate(table, epsilon=1.01 * _paper_bound(table),
                            noise='clipped')
    self.assertEqual(params.guarantee.status, 'claimed')
    ids = np.arange(100)
    measured, _ = exact.exact_metric_epsilon(
        mech.log_prob(ids, params), mech.distances(ids, params))
    self.assertBetween(measured / params.guarantee.epsilon, 2.5, 2.9)

  def test_golden_law_of_four_words_on_a_line(self):
    table = embeddings.EmbeddingTable(
        ('a', 'b', 'c', 'd'), np.float32([[0.], [1.], [3.], [7.]]))
    mech = mechanisms.get('gumbel_exponential')
    # Scale 2: epsilon = 1 / 2 + 2 ln 4 / minimum distance.
    params = mech.calibrate(table, epsilon=.5 + 2 * math.log(4))
    np.testing.assert_allclose(
        np.exp(mech.log_prob([0], params))[0],
        [.719257, .226044, .049792, .004907], atol=6e-7)

  def test_the_closed_bound_of_the_mixture_holds(self):
    vectors = np.random.default_rng(1).normal(size=(100, 50))
    table = embeddings.EmbeddingTable(
        tuple(map(str, range(100))), vectors.astype(np.float32))
    minimum, diameter = neighbors.distance_range(table.vectors)
    mech = mechanisms.get('gumbel_exponential')
    ids = np.arange(100)
    for ratio in (.03, .1, .5, 5.):
      bound = 1 / (ratio * diameter) + 2 * math.log(100) / minimum
      params = mech.calibrate(table, epsilon=bound)
      measured, _ = exact.exact_metric_epsilon(
          mech.log_prob(ids, params), mech.distances(ids, params))
      self.assertLessEqual(measured, bound * (1 + 1e-9))


class InterfaceTest(parameterized.TestCase):

  def test_every_mechanism_has_every_half_with_the_agreed_arguments(self):
    for name in mechanisms.names():
      mech = mechanisms.get(name)
      parameters = lambda f: list(inspect.signature(f).parameters)
      self.assertEqual(parameters(mech.privatize),
                       ['key', 'ids', 'params', 'start'], name)
      self.assertEqual(parameters(mech.log_prob), ['ids', 'params'], name)
      self.assertEqual(parameters(mech.distances), ['ids', 'params'], name)
      self.assertEqual(parameters(mech.calibrate)[:2], ['table', 'epsilon'])

  def _all(self, table):
    """One of each kernel: readings and TEM share theirs with another."""
    kernels = {name: (name, settings, epsilon)
               for name, settings, epsilon in _cases(table)
               if name != 'tem' and settings != {'num_candidates': 'all'}}
    for name, settings, epsilon in [*kernels.values(),
                                    ('multivariate_laplace', {}, 3.)]:
      mech = mechanisms.get(name)
      yield name, mech, mech.calibrate(table, epsilon=epsilon, **settings)

  def test_params_are_arrays_and_one_hashable_guarantee(self):
    for name, _, params in self._all(_table()):
      self.assertIsInstance(params.guarantee, guarantees.Guarantee, name)
      hash(params.guarantee)
      for leaf in jax.tree.leaves(params):
        self.assertNotEqual(np.asarray(leaf).dtype.kind, 'U', name)

  @pytest.mark.slow
  def test_output_does_not_depend_on_batch_or_jit(self):
    table = _table(60)
    ids = np.random.default_rng(3).integers(0, 60, 1001).astype(np.int32)
    key = jax.random.key(4)
    for name, mech, params in self._all(table):
      whole = np.asarray(mech.privatize(key, ids, params))
      self.assertTrue(np.any(whole != ids), name)
      for size, last in ((1, 20), (1000, 1001)):
        parts = [mech.privatize(key, ids[i:min(i + size, last)], params,
                                start=i)
                 for i in range(0, last, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole[:last], name)
      jitted = jax.jit(mech.privatize)(key, ids.reshape(7, 143), params)
      np.testing.assert_array_equal(np.ravel(jitted), whole, name)

  @pytest.mark.slow
  def test_output_does_not_depend_on_the_number_of_devices(self):
    table = _table(60)
    ids = np.random.default_rng(3).integers(0, 60, 800).astype(np.int32)
    key = jax.random.key(4)
    devices = jax.devices()
    self.assertGreaterEqual(len(devices), 8)
    mesh = jax.make_mesh((8,), ('data',), devices=devices[:8],
                         axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec('data')
    for name, mech, params in self._all(table):
      whole = np.asarray(mech.privatize(key, ids, params))

      def shard(key, ids, params, mech=mech):
        start = jax.lax.axis_index('data') * ids.shape[0]
        return mech.privatize(key, ids, params, start=start)

      sharded = jax.jit(jax.shard_map(
          shard, mesh=mesh, check_vma=False, out_specs=spec,
          in_specs=(jax.sharding.PartitionSpec(), spec,
                    jax.sharding.PartitionSpec())))(key, ids, params)
      np.testing.assert_array_equal(sharded, whole, name)

  @pytest.mark.slow
  def test_elements_past_two_to_the_thirty_two_have_their_own_noise(self):
    for name, mech, params in self._all(_table()):
      ids = np.zeros(4000, np.int32)
      key = jax.random.key(5)
      first = np.asarray(mech.privatize(key, ids, params))
      later = np.asarray(mech.privatize(key, ids, params, start=2**32))
      self.assertTrue(np.any(first != later), name)

  def test_another_epsilon_of_the_same_shape_does_not_compile_again(self):
    # The guarantee is static, and does not reach the compiled function.
    mech = mechanisms.get('santext')
    ids = np.zeros(8, np.int32)
    mech.privatize(jax.random.key(0), ids, mech.calibrate(_table(), epsilon=2.))
    compiled = santext._privatize  # pylint: disable=protected-access
    before = compiled._cache_size()  # pylint: disable=protected-access
    for epsilon in (3., 4.):
      params = mech.calibrate(_table(), epsilon=epsilon)
      mech.privatize(jax.random.key(1), ids, params, start=5)
    after = compiled._cache_size()  # pylint: disable=protected-access
    self.assertEqual(before, after)

  def test_wide_secure_keys_are_accepted(self):
    key = samplers.secure_key()
    for name, mech, params in self._all(_table()):
      out = mech.privatize(key, np.zeros(100, np.int32), params)
      self.assertEqual(out.dtype, jnp.int32, name)

  def test_an_empty_batch_gives_an_empty_batch(self):
    for name, mech, params in self._all(_table()):
      out = mech.privatize(jax.random.key(0), np.zeros((0,), np.int32), params)
      self.assertEqual(out.shape, (0,), name)


class BadInputTest(parameterized.TestCase):

  @parameterized.product(name=mechanisms.names(),
                         epsilon=(0., -1., math.nan, -math.inf, 'ten', None))
  def test_an_epsilon_that_is_no_budget_is_refused(self, name, epsilon):
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      mechanisms.get(name).calibrate(_table(), epsilon=epsilon)

  @parameterized.parameters('truncated_gumbel', 'gumbel_exponential', 'tem',
                            'santext')
  def test_infinite_epsilon_is_refused_where_it_has_no_meaning(self, name):
    with self.assertRaisesRegex(ValueError, 'epsilon=inf'):
      mechanisms.get(name).calibrate(_table(), epsilon=math.inf)

  def test_epsilon_below_the_papers_bound_names_the_bound(self):
    bound = _paper_bound(_table())
    mech = mechanisms.get('truncated_gumbel')
    for epsilon in (0.99 * bound, bound * (1 - 1e-9)):
      with self.assertRaisesRegex(ValueError, f'{bound:.4g}'[:4]):
        mech.calibrate(_table(), epsilon=epsilon)
    self.assertGreater(float(mech.calibrate(
        _table(), epsilon=1.001 * bound).scale), 0)

  def test_epsilon_below_the_mixtures_bound_names_the_bound(self):
    bound = _sound_bound(_table())
    mech = mechanisms.get('gumbel_exponential')
    with self.assertRaisesRegex(ValueError, f'{bound:.6g}'):
      mech.calibrate(_table(), epsilon=bound)

  # The other two need another table or a setting; their own files ask them.
  @parameterized.product(name=[n for n in mechanisms.names()
                               if n not in ('hyperbolic', 'syntax')],
                         ids=([-1, 0], [0, 12]))
  def test_ids_out_of_range_are_refused(self, name, ids):
    mech = mechanisms.get(name)
    # Inside the unit ball, as one of the mechanisms wants.
    table = _table()._replace(vectors=_table().vectors / np.float32(9))
    settings = {'classes': np.zeros(12, int)} if name == 'syntax' else {}
    params = mech.calibrate(table, epsilon=1e4, **settings)
    ids = np.array(ids)
    for call in (lambda: mech.privatize(jax.random.key(0), ids, params),
                 lambda: mech.log_prob(ids, params)):
      with self.assertRaisesRegex(ValueError, 'ids'):
        call()

  @parameterized.parameters(*mechanisms.names())
  def test_tables_that_cannot_be_privatised_are_refused(self, name):
    calibrate = functools.partial(mechanisms.get(name).calibrate, epsilon=1e4)
    table = embeddings.EmbeddingTable
    with self.assertRaisesRegex(ValueError, 'word'):
      calibrate(table=table(('a',), np.float32([[0.]])))
    with self.assertRaisesRegex(ValueError, 'duplicate|same'):
      calibrate(table=table(('a', 'a'), np.float32([[0.], [1.]])))
    with self.assertRaisesRegex(ValueError, 'duplicate|same'):
      calibrate(table=table(('a', 'b'), np.float32([[1.], [1.]])))
    with self.assertRaisesRegex(ValueError, 'NaN|nan|finite'):
      calibrate(table=table(('a', 'b'), np.float32([[1.], [np.nan]])))

  def test_float_ids_and_unknown_names_are_refused(self):
    mech = mechanisms.get('santext')
    params = mech.calibrate(_table(), epsilon=1.)
    with self.assertRaisesRegex(ValueError, 'ids'):
      mech.privatize(jax.random.key(0), np.zeros(3), params)
    with self.assertRaisesRegex(ValueError, 'santext'):
      mechanisms.get('santxt')

  @parameterized.parameters(0., 1., -0.5, 0.97)
  def test_a_beta_that_leaves_no_gamma_is_refused(self, beta):
    with self.assertRaisesRegex(ValueError, 'beta'):
      mechanisms.get('tem').calibrate(_table(), epsilon=1., beta=beta)

  def test_settings_out_of_their_choices_are_refused(self):
    big = 1e4
    with self.assertRaisesRegex(ValueError, 'noise'):
      mechanisms.get('truncated_gumbel').calibrate(
          _table(), epsilon=big, noise='capped')
    sound = mechanisms.get('gumbel_exponential').calibrate
    with self.assertRaisesRegex(ValueError, 'num_candidates'):
      sound(_table(), epsilon=big, num_candidates='some')
    with self.assertRaisesRegex(ValueError, 'max_candidates'):
      sound(_table(), epsilon=big, num_candidates='all', max_candidates=3)
    with self.assertRaisesRegex(ValueError, 'max_candidates'):
      sound(_table(), epsilon=big, max_candidates=0)
    with self.assertRaisesRegex(ValueError, 'geometry'):
      sound(_table(), epsilon=big, geometry=candidates.geometry(_table(30)))

  @parameterized.product(
      name=mechanisms.names(),
      epsilon=(True, np.bool_(True), '3', b'3', 1e39, 10**400, -10**400))
  def test_an_epsilon_that_is_no_float32_number_is_refused(self, name, epsilon):
    with self.assertRaisesRegex(ValueError, 'epsilon'):
      mechanisms.get(name).calibrate(_table(), epsilon=epsilon)

  @parameterized.parameters('multivariate_laplace', 'vickrey', 'mahalanobis',
                            'syntax')
  def test_noise_that_overflows_is_refused_and_names_the_least_epsilon(
      self, name):
    calibrate = functools.partial(
        mechanisms.get(name).calibrate,
        **({'classes': np.zeros(12, int)} if name == 'syntax' else {}))
    for epsilon in (1e-38, 1e-35, 1e-17):
      with self.assertRaises(ValueError) as caught:
        calibrate(_table(), epsilon=epsilon)
      found = re.search(r'^epsilon=(\S+) is too small.* at least (\S+)$',
                        str(caught.exception))
      self.assertEqual(float(found[1]), epsilon)
    least = float(found[2])
    # Noise of e^-100 chance, squared and times four, is still a float32.
    reach = (3 + math.sqrt(2 * 3 * 100) + 100) / least
    self.assertLess(4 * reach**2, float(np.finfo(np.float32).max))
    self.assertEqual(calibrate(_table(), epsilon=least).guarantee.epsilon,
                     least)
    long = _table()._replace(vectors=_table().vectors * np.float32(1e18))
    with self.assertRaisesRegex(ValueError, 'table holds a vector of length'):
      calibrate(long, epsilon=1.)

  def test_the_least_epsilon_still_draws_words(self):
    mech = mechanisms.get('multivariate_laplace')
    params = mech.calibrate(_table(), epsilon=2e-16)
    # The batch and table of other tests, so that nothing compiles again.
    out = np.asarray(mech.privatize(
        jax.random.key(0), np.zeros(300, np.int32), params))
    self.assertBetween(out.min(), 0, 11)
    self.assertBetween(out.max(), 0, 11)
    self.assertGreater(len(set(out.tolist())), 3)

  def test_an_infinite_epsilon_names_no_theorem(self):
    calibrate = mechanisms.get('multivariate_laplace').calibrate
    self.assertNotIn('Theorem', calibrate(
        _table(), epsilon=math.inf).guarantee.source)
    self.assertIn('Theorem', calibrate(_table(), epsilon=1.).guarantee.source)

  @parameterized.parameters('x', None, True, math.nan, '0.1')
  def test_a_beta_that_is_no_number_is_refused(self, beta):
    with self.assertRaisesRegex(ValueError, 'beta='):
      mechanisms.get('tem').calibrate(_table(), epsilon=1., beta=beta)

  @parameterized.parameters(3, None, 'words')
  def test_tem_names_a_table_that_is_none(self, table):
    with self.assertRaisesRegex(ValueError, 'table'):
      mechanisms.get('tem').calibrate(table, epsilon=1.)

  def test_tem_refuses_a_cap_that_underflows_and_keeps_one_that_overflows(self):
    calibrate = mechanisms.get('tem').calibrate
    with self.assertRaisesRegex(ValueError, 'epsilon=3e.38.*underflows'):
      calibrate(_table(), epsilon=3e38, beta=.9)
    self.assertEqual(float(calibrate(_table(), epsilon=1e-39).cap), math.inf)

  @parameterized.parameters('truncated_gumbel', 'gumbel_exponential', 'santext',
                            'tem', 'custext', 'multivariate_laplace', 'vickrey')
  def test_ids_of_distances_and_laws_are_checked_and_may_be_none(self, name):
    mech = mechanisms.get(name)
    params = mech.calibrate(_line(), epsilon=100.)
    for call in (mech.distances, mech.log_prob):
      for bad in ([-1], [5], [1.5], [True], np.uint64([2**63])):
        with self.assertRaisesRegex(ValueError, 'ids'):
          call(bad, params)
      self.assertEqual(np.shape(call([], params)), (0, 5))

  @parameterized.parameters('truncated_gumbel', 'gumbel_exponential')
  def test_a_geometry_of_other_vectors_is_refused(self, name):
    calibrate = functools.partial(mechanisms.get(name).calibrate, epsilon=1e4)
    geometry = candidates.geometry(_table())
    scaled = _table()._replace(vectors=_table().vectors * np.float32(100))
    with self.assertRaisesRegex(ValueError, 'geometry.*other vectors'):
      calibrate(scaled, geometry=geometry)
    with self.assertRaisesRegex(ValueError, 'geometry=3'):
      calibrate(scaled, geometry=3)
    # Other words on the same vectors are the same geometry.
    renamed = _table()._replace(words=tuple('abcdefghijkl'))
    calibrate(renamed, geometry=geometry)

  def test_max_candidates_is_no_boolean(self):
    with self.assertRaisesRegex(ValueError, 'max_candidates=True'):
      candidates.geometry(_table(), max_candidates=True)


class CandidatesTest(parameterized.TestCase):

  def test_few_columns_hold_all_but_a_billionth_of_the_law(self):
    for num_words in (100, 27_958, 400_000):
      k_max = candidates.max_candidates(num_words)
      tail = scipy.stats.poisson(math.log(num_words)).sf(k_max)
      self.assertLess(tail, 1e-9)
      self.assertLess(k_max, 64)

  def test_a_geometry_measured_once_gives_the_same_params(self):
    table = _table(60)
    geometry = candidates.geometry(table)
    for name in ('truncated_gumbel', 'gumbel_exponential'):
      mech = mechanisms.get(name)
      chex.assert_trees_all_equal(
          mech.calibrate(table, epsilon=100.),
          mech.calibrate(table, epsilon=100., geometry=geometry))

  def test_neighbours_come_in_order_and_start_with_the_word(self):
    table = _table(60)
    geometry = candidates.geometry(table)
    vectors = np.asarray(table.vectors, np.float64)
    full = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1)
    order = np.argsort(full, axis=1, kind='stable')
    k = geometry.neighbor_ids.shape[1]
    np.testing.assert_array_equal(geometry.neighbor_ids, order[:, :k])
    np.testing.assert_allclose(geometry.neighbor_distances,
                               np.sort(full, 1)[:, :k], rtol=1e-12)
