"""Gradient attacks against closed forms, NumPy oracles and loops by hand."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from jaxdp import attacks
from jaxdp import samplers
from jaxdp.attacks import balls
from jaxdp.attacks import gradient
from jaxdp.attacks import settings

_NORMS = ('linf', 'l2', 'l1')
_ORDERS = {'linf': np.inf, 'l2': 2, 'l1': 1}
_SHAPE = (6, 3, 2)  # [B, ...], flattened to [6, 6]
_KEY = jax.random.key(7)
_LOW, _HIGH = -1., 1.
_NUM_STEPS = 200
_FOUR = ('ifgsm', 'mim', 'pgd', 'fgsm')
# Each takes a second to compile: the norms differ in projection and step, which
# every attack shares.
_PAIRS = (('ifgsm', 'linf'), ('ifgsm', 'l2'), ('ifgsm', 'l1'), ('mim', 'l2'),
          ('pgd', 'linf'), ('pgd', 'l2'), ('pgd', 'l1'))
_FALSE_ALARM = 1e-3


def _x(scale=1., seed=0):
  draw = np.random.default_rng(seed).uniform(-scale, scale, _SHAPE)
  return draw.astype(np.float32)


def _flat(x):
  return np.asarray(x, np.float64).reshape(len(x), -1)


def _norms(offset, attack_norm):
  return np.linalg.norm(_flat(offset), _ORDERS[attack_norm], axis=1)


def _bisect_projection(v, bound, attack_norm, lower, upper):
  """Projection of one v on ball and box around 0, by the KKT multiplier."""
  def at(t):
    if attack_norm == 'l2':
      return np.clip(v / (1 + t), lower, upper)
    return np.clip(np.sign(v) * np.maximum(np.abs(v) - t, 0), lower, upper)
  if attack_norm == 'linf':
    return np.clip(v, np.maximum(lower, -bound), np.minimum(upper, bound))
  norm = lambda t: np.linalg.norm(at(t), _ORDERS[attack_norm])
  if norm(0.) <= bound:
    return at(0.)
  far = 1.
  while norm(far) > bound:
    far *= 2
  return at(scipy.optimize.brentq(lambda t: norm(t) - bound, 0., far,
                                  xtol=1e-14, rtol=1e-14))


def _duchi(v, bound):
  """Projection on the l1 ball as in Duchi et al. (2008), figure 1."""
  if np.abs(v).sum() <= bound:
    return v
  u = np.sort(np.abs(v))[::-1]
  sums = np.cumsum(u)
  rho = max(j for j in range(len(u)) if u[j] - (sums[j] - bound) / (j + 1) > 0)
  theta = (sums[rho] - bound) / (rho + 1)
  return np.sign(v) * np.maximum(np.abs(v) - theta, 0)


def _linear_optimum(g, x, bound, attack_norm, low, high):
  """argmax of g @ d over one ball and box: by hand, or a convex programme."""
  lower, upper = low - x, high - x
  if attack_norm == 'linf':
    return np.clip(np.sign(g) * bound, lower, upper)
  if attack_norm == 'l1':  # the best coordinate first, as far as it goes
    out, left = np.zeros_like(g), bound
    for i in np.argsort(-np.abs(g)):
      room = upper[i] if g[i] > 0 else -lower[i]
      out[i] = np.sign(g[i]) * min(room, left)
      left -= abs(out[i])
    return out
  at = lambda t: np.clip(t * g, lower, upper)
  far = 1.
  while np.linalg.norm(at(far)) < bound and far < 1e9:
    far *= 2
  norm = lambda t: np.linalg.norm(at(t))
  if norm(far) <= bound:
    return at(far)
  return at(scipy.optimize.brentq(lambda t: norm(t) - bound, 0., far))


def _marginal(attack_norm, size):
  """CDF of one coordinate of a uniform point of a unit ball, by slices."""
  if attack_norm == 'l2':
    return scipy.stats.beta((size + 1) / 2, (size + 1) / 2, -1, 2).cdf
  return lambda t: np.where(t < 0, (1 + t)**size, 2 - (1 - t)**size) / 2


@functools.cache
def _compiled(name, attack_norm, num_steps=_NUM_STEPS, low=_LOW, high=_HIGH,
              **kwargs):
  """One compiled attack on the loss <weights, x> - curvature |x|^2 / 2."""
  def attack(key, x, weights, curvature, attack_bound, step_size):
    def loss_fn(key, x):
      del key
      per_entry = weights * x - curvature * x**2 / 2
      return per_entry.reshape(len(x), -1).sum(1)
    extra = {} if name == 'fgsm' else {
        'num_steps': num_steps, 'step_size': step_size}
    return getattr(attacks, name)(
        key, loss_fn, x, attack_bound=attack_bound, attack_norm=attack_norm,
        low=low, high=high, **extra, **kwargs)
  return jax.jit(attack)


def _run(name, attack_norm, x, weights, bound, curvature=0., step=None,
         key=_KEY, **kwargs):
  """Runs it, by default with the step of bound / num_steps."""
  bound = np.broadcast_to(np.float32(bound), (len(x),))
  if step is None:
    step = bound / kwargs.get('num_steps', _NUM_STEPS)
  return _compiled(name, attack_norm, **kwargs)(
      key, x, weights, np.float32(curvature), bound,
      np.broadcast_to(np.float32(step), (len(x),)))


class ProjectionTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    def projected(y, x, bound, low, high, attack_norm, has_box):
      box = (low, high) if has_box else (None, None)
      region = balls.make_region(x, bound, attack_norm, *box)
      return balls.project(y, region, attack_norm)
    cls.project = staticmethod(jax.jit(
        projected, static_argnames=('attack_norm', 'has_box')))

  def _cases(self):
    """[64, 9]: inside, outside, far, ties, zeros, pinned to the box."""
    generator = np.random.default_rng(3)
    x = generator.uniform(-1, 1, (64, 9))
    x[40:44] = np.sign(x[40:44])
    scale = 10. ** generator.uniform(-2, 2, (64, 1))
    y = x + scale * generator.standard_normal((64, 9))
    y[44:48] = x[44:48]
    y[48:52] = x[48:52] + np.sign(y[48:52] - x[48:52]) * .7
    y[52:56, 3:] = x[52:56, 3:]
    bound = 10. ** generator.uniform(-2, 1, (64, 1))
    return [a.astype(np.float32) for a in (y, x, bound)]

  @parameterized.parameters(('linf', True), ('l2', True), ('l2', False),
                            ('l1', True), ('l1', False))
  def test_is_the_nearest_point_of_ball_and_box(self, attack_norm, has_box):
    y, x, bound = self._cases()
    got = self.project(y, x, bound, -1., 1., attack_norm, has_box)
    for i in range(len(x)):
      y_i, x_i, bound_i = (np.float64(a[i]) for a in (y, x, bound))
      edge = 1. if has_box else np.inf
      want = x_i + _bisect_projection(y_i - x_i, bound_i[0], attack_norm,
                                      -edge - x_i, edge - x_i)
      # A threshold is a sum of 18 terms of the size of y.
      atol = 20 * 2.**-24 * max(1., np.abs(y_i - x_i).max())
      np.testing.assert_allclose(got[i], want, rtol=0, atol=atol)

  def test_l1_without_a_box_is_the_projection_of_duchi(self):
    y, x, bound = self._cases()
    got = self.project(y, 0 * x, bound, -1., 1., 'l1', False)
    for y_i, bound_i, got_i in zip(np.float64(y), bound, got):
      atol = 20 * 2.**-24 * max(1., np.abs(y_i).max())
      np.testing.assert_allclose(got_i, _duchi(y_i, bound_i[0]), rtol=0,
                                 atol=atol)

  @parameterized.parameters(*_NORMS)
  def test_stays_in_the_ball_of_a_tiny_bound_from_a_far_point(self, norm):
    y, x, _ = self._cases()
    for bound in (1e-6, 3e-3):
      column = np.full((64, 1), bound, np.float32)
      got = self.project(1e4 * y, 0 * x, column, -1., 1., norm, True)
      norms = _norms(got, norm)
      # Nine roundings in the norm, a few more on the way there.
      self.assertLess(norms.max(), np.float64(column[0, 0]) * (1 + 2.**-20))
      self.assertGreater(norms[:40].min(), bound * .99)

  def test_linf_never_leaves_by_an_ulp(self):
    generator = np.random.default_rng(5)
    x = (generator.standard_normal((64, 9))
         * 10. ** generator.uniform(-6, 3, (64, 9))).astype(np.float32)
    bound = (10. ** generator.uniform(-4, 1, (64, 1))).astype(np.float32)
    y = x + np.sign(generator.standard_normal(x.shape)).astype('f4') * 2 * bound
    got = np.asarray(self.project(y, x, bound, -1., 1., 'linf', False))
    moved = np.abs(np.float64(got) - np.float64(x))  # exact: 53 bits suffice
    self.assertTrue(np.all(moved <= np.float64(bound)))
    self.assertTrue(np.all(np.abs(got - x) <= bound))
    # And no further in than one float: the naive sum would leave.
    ulp = np.spacing(np.maximum(np.abs(x), bound)) * 2
    self.assertTrue(np.all(moved >= np.float64(bound) - ulp))
    naive = np.abs(np.float64(np.clip(y, x - bound, x + bound)) - np.float64(x))
    self.assertTrue(np.any(naive > np.float64(bound)))

  def test_points_of_a_ball_are_uniform(self):
    size, num = 5, 4_000
    keys = jax.random.split(jax.random.key(2), num)
    for norm in ('l2', 'l1'):
      draw = functools.partial(balls.uniform_in_ball, size=size,
                               dtype=jnp.float32, attack_norm=norm)
      points = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
      norms = np.linalg.norm(points, _ORDERS[norm], axis=1)
      self.assertLessEqual(norms.max(), 1 + 1e-6)
      # The radius of a uniform point has the CDF r^n in every norm.
      right = scipy.stats.kstest(norms, lambda r: np.clip(r, 0, 1)**size)
      self.assertGreater(right.pvalue, _FALSE_ALARM)
      wrong = scipy.stats.kstest(norms, lambda r: np.clip(r, 0, 1)**(size + 1))
      self.assertLess(wrong.pvalue, _FALSE_ALARM)
      # One coordinate of a uniform point of the ball, by the slice's volume.
      law = _marginal(norm, size)
      for axis in (0, size - 1):
        pvalue = scipy.stats.kstest(points[:, axis], law).pvalue
        self.assertGreater(pvalue, _FALSE_ALARM)


class ClosedFormTest(parameterized.TestCase):

  @parameterized.parameters(*_PAIRS)
  def test_a_linear_loss_is_solved_in_ball_and_box(self, name, attack_norm):
    x, weights = _x(), _x(2., seed=1)
    bound = {'linf': .3, 'l2': .8, 'l1': 1.7}[attack_norm]
    got = _run(name, attack_norm, x, weights, bound, step=bound / 50)
    want = [_linear_optimum(g, x_i, bound, attack_norm, _LOW, _HIGH)
            for g, x_i in zip(_flat(weights), _flat(x))]
    best = (_flat(weights) * want).sum(1)
    gain = (_flat(weights) * (_flat(got) - _flat(x))).sum(1)
    self.assertTrue(any(np.any(np.abs(x_i + d) > 1 - 1e-6)
                        for x_i, d in zip(_flat(x), want)))  # the box matters
    # In l2 each step shrinks the angle by 1.02: under a tenth of it is left of
    # the last 150, and the gap is half its square.
    rtol = 5e-3 if attack_norm == 'l2' else 1e-5
    np.testing.assert_allclose(gain, best, rtol=rtol)
    self.assertTrue(np.all(gain <= best * (1 + 1e-5)))

  @parameterized.parameters(*_NORMS)
  def test_one_step_is_the_steepest(self, attack_norm):
    x, weights = 0 * _x(), _x(2., seed=1)
    got = _flat(_run('fgsm', attack_norm, x, weights, .3))
    for g, moved in zip(_flat(weights), got):
      dual = {'linf': 1, 'l2': 2, 'l1': np.inf}[attack_norm]
      gain = .3 * np.linalg.norm(g, dual)
      self.assertAlmostEqual(g @ moved, gain, delta=1e-5)

  @parameterized.parameters(*_NORMS)
  def test_a_concave_loss_is_solved_where_its_top_is_out_of_reach(self, norm):
    # -|x - top|^2 / 2: the optimum is the projection of the top.
    x = _x(.9)
    top = x + _x(2., seed=2)
    bound = {'linf': .2, 'l2': .5, 'l1': 1.}[norm]
    got = _run('pgd', norm, x, top, bound, curvature=1., step=.02)
    for x_i, top_i, got_i in zip(_flat(x), _flat(top), _flat(got)):
      d = _bisect_projection(top_i - x_i, bound, norm, -1. - x_i, 1. - x_i)
      loss = lambda y: -np.sum((y - top_i)**2) / 2  # noqa: B023
      # A step of fixed length circles the optimum at that length.
      self.assertGreater(loss(got_i), loss(x_i + d) - .04)
      self.assertLess(loss(x_i), loss(x_i + d) - .05)

  def test_a_hundredth_of_an_image_shares_an_l1_step(self):
    g = np.linspace(1., 2., 250, dtype=np.float32)[None]
    x = jnp.zeros_like(g)
    region = balls.make_region(x, jnp.ones((1, 1)), 'l1', None, .25)
    step = np.asarray(jax.jit(balls.steepest_step, static_argnums=4)(
        g, x, jnp.ones((1, 1)), region, 'l1'))
    # q = 3 of 250 by a third each; the box leaves a quarter, a fourth is next.
    np.testing.assert_allclose(step[0, -5:], [0., .25, 1/3, 1/3, 1/3],
                               rtol=1e-6)
    self.assertEqual(np.count_nonzero(step), 4)
    # What the box cuts off is what the fourth one gets.
    self.assertAlmostEqual(np.minimum(step, .25).sum(), 1., delta=1e-6)


@pytest.mark.slow
class MembershipTest(parameterized.TestCase):

  @parameterized.parameters(
      *_PAIRS, ('fgsm', 'linf'), ('fgsm', 'l2'), ('fgsm', 'l1'))
  def test_every_attack_ends_in_ball_and_box(self, name, attack_norm):
    x = _x()
    x[1] = np.sign(x[1])  # corners of the box
    x[2] = 0.
    bound = np.array([1e-6, .3, 2.5, .1, 1e-3, 40.], np.float32)
    got = np.asarray(_run(name, attack_norm, x, _x(2., seed=1), bound))
    self.assertEqual(got.shape, _SHAPE)
    self.assertEqual(got.dtype, np.float32)
    self.assertTrue(np.all((got >= _LOW) & (got <= _HIGH)))
    norms = _norms(np.float64(got) - np.float64(x), attack_norm)
    if attack_norm == 'linf':
      self.assertTrue(np.all(norms <= np.float64(bound)))
      self.assertTrue(np.all(np.abs(got - x) <= bound[:, None, None]))
    # Six coordinates near 1 are rounded to 2**-24 each.
    self.assertTrue(np.all(norms <= bound * (1 + 2.**-20) + 6 * 2.**-24))
    self.assertTrue(np.all(norms[1:5] >= .2 * np.minimum(bound[1:5], 1.)))

  def test_without_a_box_noised_inputs_move_by_their_bound(self):
    x = 30 * _x()
    got = _run('ifgsm', 'linf', x, np.sign(_x(seed=1)), .5, low=None, high=None,
               num_steps=12)
    # Twelve steps of a twelfth, rounded to the ulp of 30 each.
    np.testing.assert_allclose(got - x, .5 * np.sign(_x(seed=1)), atol=3e-5)

  def test_an_x_outside_the_box_is_not_pulled_into_it(self):
    x = 3 * np.sign(_x())
    got = np.asarray(_run('ifgsm', 'linf', x, -x, .5))
    self.assertTrue(np.all(np.abs(got - x) <= .5))
    np.testing.assert_allclose(np.abs(got), 2.5, atol=3e-5)  # may go back
    out = np.asarray(_run('ifgsm', 'linf', x, x, .5))
    np.testing.assert_array_equal(out, x)  # but no further out

  @parameterized.parameters(*_PAIRS[:4])
  def test_a_zero_gradient_moves_nothing_and_a_tiny_one_does(
      self, name, attack_norm):
    x, weights = _x(.5), np.zeros(_SHAPE, np.float32)
    weights[3:] = 1e-30 * _x(seed=1)[3:]  # its squares are 0 in float32
    got = np.asarray(_run(name, attack_norm, x, weights, .3))
    np.testing.assert_array_equal(got[:3], x[:3])
    self.assertTrue(np.all(_norms(got - x, attack_norm)[3:] > .25))

  @parameterized.parameters(*_NORMS)
  def test_a_gradient_that_is_not_a_number_shows(self, attack_norm):
    weights = _x(seed=1)
    weights[2] = np.nan
    got = np.asarray(_run('ifgsm', attack_norm, _x(), weights, .3))
    self.assertTrue(np.isnan(got[2]).all())
    self.assertFalse(np.isnan(got[[0, 1, 3, 4, 5]]).any())


@pytest.mark.slow
class StepsTest(parameterized.TestCase):

  def test_momentum_by_hand_for_three_steps(self):
    x, top = _x(.5), _x(.5, seed=4)
    bound, decay = .3, .7
    y, g = np.float64(x), np.zeros(_SHAPE)
    for _ in range(3):
      slope = top - y
      g = decay * g + slope / np.abs(slope).mean(axis=(1, 2), keepdims=True)
      y = np.clip(y + bound / 3 * np.sign(g), x - bound, x + bound)
    got = _run('mim', 'linf', x, top, bound, curvature=1., num_steps=3,
               decay=decay)
    np.testing.assert_allclose(got, y, atol=1e-6)
    plain = _run('ifgsm', 'linf', x, top, bound, curvature=1., num_steps=3)
    self.assertGreater(np.abs(plain - y).max(), bound / 3)

  def test_default_steps_are_those_of_the_papers(self):
    # The slope of an entry ends at `edge`: every row takes one step only.
    edge = np.repeat(np.float32([1e-3, -.3, 1e-3]), 2)[:, None, None]
    start = np.full(_SHAPE, -.4, np.float32)

    def run(name, **kwargs):
      loss_fn = lambda key, x: jnp.minimum(x, edge).reshape(len(x), -1).sum(1)
      attack = functools.partial(getattr(gradient, name), attack_bound=.4,
                                 loss_fn=loss_fn, **kwargs)
      return np.asarray(jax.jit(lambda x: attack(_KEY, x=x))(0 * _x()))[:, 0, 0]

    together = run('ensemble', num_steps=5, start=start,
                   attacks=('ifgsm', 'pgd', 'fgsm'))
    # A bound over five, two and a half bounds over five, a bound.
    np.testing.assert_allclose(together, [.08, .08, -.2, -.2, .4, .4],
                               rtol=1e-6)
    ifgsm, pgd = run('ifgsm', num_steps=5), run('pgd', num_steps=5, start=start)
    np.testing.assert_array_equal(ifgsm[:2], together[:2])
    np.testing.assert_array_equal(pgd[2:4], together[2:4])

  @parameterized.parameters(5, 40)
  def test_a_number_of_steps_of_numpy_unrolls_as_one_of_python(self, steps):
    loss_fn = lambda key, x: (x**2).reshape(len(x), -1).sum(1)
    text = lambda num_steps: str(jax.make_jaxpr(lambda x: gradient.ifgsm(
        _KEY, loss_fn, x, attack_bound=.5, num_steps=num_steps))(_x()))
    self.assertEqual(text(steps), text(np.int64(steps)))

  def test_pgd_starts_in_the_ball_and_example_by_example(self):
    x = _x(.5)
    ids = jnp.array([5, 2, 3, 4, 1, 0])
    draw = jax.jit(functools.partial(
        gradient.random_starts, _KEY, shape=(3, 2), attack_bound=.3,
        attack_norm='l1'))
    starts = draw(jnp.arange(6), restart=0)
    got = _run('pgd', 'l1', x, 0 * x, .3)  # a flat loss: it stays there
    np.testing.assert_allclose(got - x, starts, atol=1e-6)
    self.assertGreater(_norms(starts, 'l1').min(), .01)
    self.assertLess(_norms(starts, 'l1').max(), .3 * (1 + 1e-6))
    np.testing.assert_array_equal(draw(ids, restart=0), starts[ids])
    self.assertGreater(np.abs(draw(ids, restart=1) - starts[ids]).max(), .01)

  def test_no_two_streams_meet(self):
    # Starts of examples, noise of steps and of the comparison of restarts.
    def keys():
      ids = jnp.arange(100)
      yield samplers.id_keys(_KEY, samplers.ATTACK, ids)
      for name in (gradient._STEPS, gradient._STEPS - 1, gradient._COMPARISON):
        stream = gradient._stream(_KEY, name)
        yield jax.vmap(functools.partial(jax.random.fold_in, stream))(ids)
    words = np.concatenate(jax.jit(
        lambda: [jax.random.key_data(k) for k in keys()])())
    self.assertLen(np.unique(words, axis=0), 400)


@pytest.mark.slow
class NoiseTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    def attack(key, x, num_draws):
      def loss_fn(key, x):  # slope 1 on average, of random sign in one draw
        slope = 1. + jax.random.uniform(key, x.shape, minval=-3., maxval=3.)
        return (slope * x).reshape(len(x), -1).sum(1)
      return gradient.fgsm(key, loss_fn, x, attack_bound=.5,
                           num_draws=num_draws)
    cls.attack = staticmethod(jax.jit(attack, static_argnames='num_draws'))

  def test_many_draws_find_a_direction_that_one_draw_misses(self):
    x = jnp.zeros((10, 30))
    share = lambda n: float((self.attack(_KEY, x, n) > 0).mean())
    # A uniform is above -1 in 2 of 3; the mean of 400 is so by 11 deviations.
    self.assertEqual(share(400), 1.)
    low, high = scipy.stats.binom.ppf((5e-4, 1 - 5e-4), 300, 2 / 3) / 300
    self.assertBetween(share(1), low, high)

  def test_the_gradient_is_the_mean_of_the_draws(self):
    seen = []
    def loss_fn(key, x):
      jax.debug.callback(lambda data: seen.append(tuple(data.tolist())),
                         jax.random.key_data(key), ordered=True)
      slope = jax.random.uniform(key, x.shape, minval=-1.)
      return (slope * x).sum(1)
    got = jax.jit(lambda x: gradient.ifgsm(
        _KEY, loss_fn, x, attack_bound=1., attack_norm='l2', num_steps=2,
        num_draws=3, low=None, high=None))(jnp.zeros((2, 3)))
    jax.effects_barrier()
    self.assertLen(set(seen), 6)  # a fresh key a draw and a step
    keys = [jax.random.wrap_key_data(jnp.array(s, jnp.uint32)) for s in
            dict.fromkeys(seen)]
    y = np.zeros((2, 3))
    for step in (keys[:3], keys[3:]):
      slopes = [jax.random.uniform(k, (2, 3), minval=-1.) for k in step]
      mean = np.mean(slopes, axis=0)
      y += .5 * mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(got, y, atol=1e-6)

  def test_one_draw_takes_a_fresh_key_each_step(self):
    def loss_fn(key, x):
      return jnp.sum(x * jax.random.uniform(key, x.shape, minval=-1.), axis=1)
    got = jax.jit(lambda x: gradient.ifgsm(
        _KEY, loss_fn, x, attack_bound=.5, num_steps=8))(jnp.zeros((40, 10)))
    # The same key each step would go straight to the bound everywhere.
    self.assertLess(float((jnp.abs(got) > .49).mean()), .05)


@pytest.mark.slow
class RestartsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    def attack(key, x, num_restarts, start):
      return gradient.pgd(key, cls.loss_fn, x, attack_bound=.8, num_steps=4,
                          step_size=.02, num_restarts=num_restarts, start=start)
    cls.attack = staticmethod(jax.jit(attack, static_argnames='num_restarts'))

  @staticmethod
  def loss_fn(key, x):  # many local optima
    del key
    return jnp.sum(jnp.sin(9 * x) + .3 * x, axis=(1, 2))

  def test_restarts_never_lower_the_loss_and_each_example_keeps_its_own(self):
    x = _x(.2)
    loss = lambda y: np.asarray(self.loss_fn(None, y))
    five = self.attack(_KEY, x, 5, None)
    draw = jax.jit(lambda restart: gradient.random_starts(
        _KEY, jnp.arange(6), (3, 2), attack_bound=.8, restart=restart))
    runs = np.stack([self.attack(_KEY, x, 1, draw(r)) for r in range(5)])
    best = np.argmax([loss(run) for run in runs], axis=0)
    self.assertGreater(len(set(best)), 1)
    np.testing.assert_allclose(five, runs[best, np.arange(6)], atol=1e-6)
    # Two programs: equal attempts may differ by an ulp.
    self.assertTrue(np.all(loss(five) >= loss(runs[0]) - 1e-5))
    self.assertTrue(np.any(loss(five) > loss(runs[0]) + .1))

  def test_restarts_are_compared_on_common_draws(self):
    # Noise far above the signal: only a common one ranks the restarts.
    def loss_fn(key, x):
      noise = 1e3 * jax.random.uniform(key, (4,))
      return jnp.sum(x, axis=1) + noise
    x, starts = jnp.zeros((4, 2)), np.zeros((3, 4, 2), np.float32)
    starts[0], starts[1], starts[2] = -.4, .4, .1
    got = jax.jit(lambda x: gradient.pgd(
        _KEY, loss_fn, x, attack_bound=.5, num_steps=1, step_size=1e-3,
        num_restarts=3, start=starts))(x)
    np.testing.assert_allclose(got, .401, atol=1e-5)

  def test_a_loss_that_is_not_a_number_shows(self):
    loss_fn = lambda key, x: jnp.where(x[:, 0] > 0, jnp.nan, 0.) + x.sum(1)
    x = jnp.zeros((1, 2))
    starts = jnp.array([[[-.4, 0.]], [[.4, 0.]], [[-.2, 0.]]])
    got = jax.jit(lambda x: gradient.pgd(
        _KEY, loss_fn, x, attack_bound=.5, num_steps=1, step_size=1e-3,
        num_restarts=3, start=starts))(x)
    self.assertGreater(float(got[0, 0]), .3)


@pytest.mark.slow
class EnsembleTest(parameterized.TestCase):

  def test_parts_match_the_single_attacks(self):
    attack_norm = 'linf'
    x, top = _x(.8), _x(1.5, seed=4)
    bound = np.linspace(.1, .6, 6).astype(np.float32)
    names = _FOUR  # parts of 2, 2, 1, 1
    ours = _run('ensemble', attack_norm, x, top, bound, curvature=1.,
                attacks=names)
    parts = dict(zip(names, (slice(0, 2), slice(2, 4), slice(4, 5),
                             slice(5, 6))))
    singles = {name: _run(name, attack_norm, x, top, bound, curvature=1.)
               for name in names}
    for name, part in parts.items():
      np.testing.assert_allclose(ours[part], singles[name][part], atol=1e-5)
    for i, name in enumerate(names):  # and no two attacks are the same one
      for other in names[:i]:
        gap = np.abs(singles[name] - singles[other]).max(axis=(1, 2))
        self.assertGreater(gap.max(), 1e-3)

  def test_the_first_parts_get_one_more(self):
    sizes = lambda b, a: np.bincount(settings.assign(
        gradient.ATTACKS[:a], None, b, known=gradient.ATTACKS),
                                     minlength=a).tolist()
    self.assertEqual(sizes(8, 3), [3, 3, 2])
    self.assertEqual(sizes(9, 3), [3, 3, 3])
    self.assertEqual(sizes(10, 3), [4, 3, 3])
    self.assertEqual(sizes(2, 3), [1, 1, 0])

  def test_starts_and_assignment_by_id_do_not_show_the_batch_split(self):
    x, top, ids = _x(.8), _x(1.5, seed=4), jnp.arange(100, 106)
    @jax.jit
    def attack(x, top, ids):
      loss_fn = lambda key, x: -jnp.sum((x - top)**2, axis=(1, 2))
      starts = gradient.random_starts(_KEY, ids, (3, 2), attack_bound=.4)
      return gradient.ensemble(_KEY, loss_fn, x, attack_bound=.4, num_steps=5,
                               start=starts, assignment=ids % 3)
    whole = attack(x, top, ids)
    order = np.array([3, 0, 5, 1, 4, 2])
    np.testing.assert_allclose(attack(x[order], top[order], ids[order]),
                               whole[order], atol=1e-6)


@pytest.mark.slow
class LabelsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    def attack(x, labels):
      loss_fn = gradient.cross_entropy_loss(cls.predict_fn, labels=labels)
      return gradient.ifgsm(_KEY, loss_fn, x, attack_bound=.5, num_steps=9,
                            low=None, high=None)
    cls.attack = staticmethod(jax.jit(attack))
    cls.predict = staticmethod(jax.jit(lambda x: gradient.predicted_labels(
        _KEY, cls.predict_fn, x)))

  @staticmethod
  def predict_fn(key, x):
    """Three classes on a line, at -1, 0 and 1."""
    del key
    return -8. * (x - jnp.array([[-1., 0., 1.]]))**2

  def test_true_labels_are_left_and_predicted_labels_are_another_matter(self):
    x, true = jnp.array([[.1], [.9], [-.8]]), jnp.array([1, 1, 0])
    predicted = self.predict(x)
    self.assertEqual(predicted.tolist(), [1, 2, 0])
    self.assertEqual(predicted.dtype, jnp.int32)
    run = lambda labels: np.asarray(self.attack(x, labels) - x)[:, 0]
    # Example 1, truly of class 1, is taken for 2: up from 1, but down from 2.
    np.testing.assert_allclose(run(true)[1], .5, atol=1e-6)
    np.testing.assert_allclose(run(predicted)[1], -.5, atol=1e-6)
    np.testing.assert_allclose(run(true)[[0, 2]], run(predicted)[[0, 2]])

  def test_repredicted_labels_turn_back_at_the_border(self):
    x = jnp.full((3, 1), .35)
    np.testing.assert_allclose(self.attack(x, self.predict(x)), .85, atol=1e-5)
    loss_fn = gradient.cross_entropy_loss(self.predict_fn, labels='repredicted')
    got = jax.jit(lambda x: gradient.ifgsm(
        _KEY, loss_fn, x, attack_bound=.5, num_steps=9))(x)
    self.assertTrue(np.all((got > .4) & (got < .6)))  # the border is at .5

  def test_a_prediction_averages_the_draws_of_the_network(self):
    def predict_fn(key, x):  # two classes; the noise hides the second one
      noise = jax.random.uniform(key, x.shape, minval=-2., maxval=2.)
      return 9. * jnp.concatenate([0 * x, x + noise], axis=1)
    predict = jax.jit(lambda x, num_draws: gradient.predicted_labels(
        _KEY, predict_fn, x, num_draws=num_draws), static_argnums=1)
    x = jnp.full((60, 1), .8)
    # One draw is right with probability .7; 500 are off by 8 deviations.
    self.assertEqual(float(predict(x, 500).mean()), 1.)
    self.assertBetween(float(predict(x, 1).mean()), .5, .9)

  def test_the_loss_is_the_cross_entropy(self):
    logits = np.array([[1., 2., 4.], [-80., 0., 80.]], np.float32)
    for labels in (np.array([0, 0]), jnp.array([2, 1])):
      loss_fn = gradient.cross_entropy_loss(lambda key, x: x, labels=labels)
      wide = np.float64(logits)
      want = (np.log(np.exp(wide).sum(1)) - wide[np.arange(2), labels])
      np.testing.assert_allclose(loss_fn(_KEY, logits), want, rtol=2e-6)

  def test_traced_labels_out_of_range_show(self):
    got = self.attack(jnp.zeros((3, 1)), jnp.array([0, 3, -1]))
    self.assertEqual(np.isnan(got)[:, 0].tolist(),
                     [False, True, True])


@pytest.mark.slow
class TransformTest(parameterized.TestCase):

  def test_a_new_bound_a_key_and_new_points_do_not_compile_again(self):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def attack(key, x, attack_bound):
      loss_fn = lambda key, x: jnp.sum(x, axis=(1, 2))
      return gradient.pgd(key, loss_fn, x, attack_bound=attack_bound,
                          num_steps=3)
    for i, bound in enumerate((.1, .25, .5)):
      x = 0 * _x() + np.float32(.01 * i)
      got = attack(jax.random.key(i), x, bound)
      np.testing.assert_allclose(got - x, bound, atol=1e-6)

  def test_a_bound_drawn_inside_the_step_is_kept_exactly(self):
    @jax.jit
    def attack(key, x):  # the product could be fused into the sum
      bound = .7 * jax.random.uniform(key, (6,))
      loss_fn = lambda key, x: jnp.sum(jnp.sin(40 * x), axis=(1, 2))
      return bound, gradient.ifgsm(key, loss_fn, x, attack_bound=bound,
                                   num_steps=2, low=None, high=None)
    for i in range(20):
      x = _x(seed=i)
      bound, got = attack(jax.random.key(i), x)
      moved = np.abs(np.float64(got) - np.float64(x))
      self.assertTrue(np.all(moved <= np.float64(bound)[:, None, None]))

  def test_vmap_equals_the_loop(self):
    attack = _compiled('ifgsm', 'l1')
    xs = np.stack([_x(seed=s) for s in (1, 2)])
    keys = jax.random.split(_KEY, 2)
    bounds = jnp.array([[.3] * 6, [.1] * 6])
    run = jax.vmap(attack, in_axes=(0, 0, None, None, 0, 0))
    got = run(keys, xs, _x(seed=9), np.float32(.5), bounds, bounds / 20)
    for i in range(2):
      want = attack(keys[i], xs[i], _x(seed=9), np.float32(.5), bounds[i],
                    bounds[i] / 20)
      np.testing.assert_allclose(got[i], want, atol=1e-5)

  def test_the_loop_is_not_unrolled(self):
    loss_fn = lambda key, x: jnp.sum(jnp.sin(x), axis=(1, 2))
    size = lambda steps: len(str(jax.make_jaxpr(lambda x: gradient.mim(
        _KEY, loss_fn, x, attack_bound=.1, num_steps=steps, num_draws=steps))(
            _x())))
    self.assertLess(size(2_000) - size(20), 200)

  def test_every_function_that_draws_has_key_first(self):
    import inspect
    for name in attacks.__all__:
      first = next(iter(inspect.signature(getattr(attacks, name)).parameters))
      wanted = 'predict_fn' if name == 'cross_entropy_loss' else 'key'
      self.assertEqual(first, wanted)


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(attack_bound=0.), 'attack_bound=0.0 must be positive'),
      (dict(attack_bound=np.array([.1, -.1])), 'attack_bound'),
      (dict(attack_bound=np.inf), 'finite'),
      (dict(attack_bound=np.nan), 'positive'),
      (dict(attack_bound=jnp.ones(3)), r'\(3,\).*\(2,\)'),
      (dict(num_steps=0), 'num_steps=0'),
      (dict(num_steps=2.), 'num_steps=2.0'),
      (dict(num_steps=True), 'num_steps=True'),
      (dict(num_draws=0), 'num_draws=0'),
      (dict(num_restarts=0), 'num_restarts=0'),
      (dict(attack_norm='l3'), "attack_norm='l3'.*linf"),
      (dict(step_size=-1.), 'step_size=-1.0'),
      (dict(low=1., high=-1.), 'low=1.0'),
      (dict(x=jnp.zeros((2, 3), jnp.int32)), 'int32'),
      (dict(x=jnp.float32(0.)), r'\[B, ...\]'),
      (dict(start=jnp.zeros((2, 2))), r'start.*\(2, 2\).*\(1, 2, 3\)'),
      (dict(start=jnp.zeros((2, 3)), num_restarts=2), r'\(2, 2, 3\)'),
      (dict(loss_fn=lambda key, x: x.sum()), r'shape \(\).*\[B\] with B=2'),
      (dict(loss_fn=lambda key, x: x), r'shape \(2, 3\).*\[B\] with B=2'),
  )
  def test_is_named_and_shown(self, change, message):
    good = dict(loss_fn=lambda key, x: x.sum(1), x=jnp.zeros((2, 3)),
                attack_bound=.1, num_steps=1)
    with self.assertRaisesRegex(ValueError, message):
      gradient.pgd(_KEY, **{**good, **change})
    with self.assertRaisesRegex(ValueError, message):
      jax.jit(lambda key: gradient.pgd(key, **{**good, **change}))(_KEY)

  @parameterized.parameters(
      (dict(attacks=()), 'attacks'), (dict(attacks='pgd'), 'attacks'),
      (dict(attacks=('pgd', 'cw')), 'cw'),
      (dict(assignment=jnp.zeros(3, int)), r'\(3,\)'),
      (dict(assignment=np.array([0, 3])), 'assignment holds 3'),
      (dict(decay=-1.), 'decay=-1.0'))
  def test_of_the_ensemble_is_named_and_shown(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      gradient.ensemble(_KEY, lambda key, x: x.sum(1), jnp.zeros((2, 3)),
                        attack_bound=.1, num_steps=1, **change)

  @parameterized.parameters(
      ('predicted', 'predicted_labels'), (np.array([0, 3]), r'3.*\[0, 3\)'),
      (np.array([0, -1]), '-1'), (np.array([0]), r'\(1,\)'),
      (np.array([0., 1.]), 'float64'))
  def test_labels_are_named_and_shown(self, labels, message):
    with self.assertRaisesRegex(ValueError, message):
      gradient.cross_entropy_loss(lambda key, x: x, labels=labels)(
          _KEY, jnp.zeros((2, 3)))

  def test_a_bad_num_draws_of_the_prediction_is_named(self):
    with self.assertRaisesRegex(ValueError, 'num_draws=0'):
      gradient.predicted_labels(_KEY, lambda key, x: x, jnp.zeros((2, 3)),
                                num_draws=0)
    with self.assertRaisesRegex(ValueError, r'predict_fn.*\[B, C\]'):
      gradient.predicted_labels(_KEY, lambda key, x: x[0], jnp.zeros((2, 3)))


if __name__ == '__main__':
  absltest.main()
