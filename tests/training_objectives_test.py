"""The losses against the sigmoid cross-entropy and against NumPy."""

import math

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.training import objectives


def sigmoid_cross_entropy(z, y):
  """max(z, 0) - z y + log(1 + e^-|z|), by its definition."""
  return np.maximum(z, 0) - z * y + np.log1p(np.exp(-np.abs(z)))


class TaylorTest(parameterized.TestCase):

  def test_is_the_second_order_expansion_of_the_cross_entropy(self):
    # With log(1 + e^-|z|) ~ log 2 - |z| / 2 + z^2 / 8, as the paper expands.
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(50, 10)) * 3, np.eye(10)[rng.integers(10, size=50)]
    expanded = (np.maximum(z, 0) - z * y + math.log(2) - np.abs(z) / 2
                + z**2 / 8).sum(1)
    got = objectives.taylor_loss(jnp.float32(z), jnp.float32(y))
    np.testing.assert_allclose(got, expanded, rtol=2e-6)

  def test_is_a_squared_error_with_targets_of_plus_and_minus_two(self):
    logits, targets = jnp.array([[2., -2., -2.]]), jnp.array([[1., 0., 0.]])
    floor = 3 * (math.log(2) - .5)
    np.testing.assert_allclose(objectives.taylor_loss(logits, targets), floor,
                               rtol=1e-6)
    for shift in (-.1, .1):
      self.assertGreater(
          float(objectives.taylor_loss(logits + shift, targets)[0]), floor)

  def test_nears_the_cross_entropy_as_logits_shrink(self):
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(20, 4)), np.eye(4)[rng.integers(4, size=20)]
    errors = []
    for size in (1., .5, .25):
      exact = sigmoid_cross_entropy(size * z, y).sum(1)
      got = np.asarray(objectives.taylor_loss(jnp.float32(size * z),
                                              jnp.float32(y)), np.float64)
      errors.append(np.abs(got - exact).max())
    # The next term of log(1 + e^-z) is z^4 / 192: halving z divides by 16.
    self.assertLess(errors[1], errors[0] / 10)
    self.assertLess(errors[2], errors[1] / 4)  # float32 noise joins here

  def test_is_unbiased_under_unbiased_labels(self):
    logits = jnp.float32(np.random.default_rng(2).normal(size=(1, 5)))
    truth, lie = .6, .1
    one_hot = jnp.eye(5)
    corrected = (one_hot - lie) / (truth - lie)
    chance = jnp.where(jnp.arange(5) == 3, truth, lie)
    losses = objectives.taylor_loss(jnp.broadcast_to(logits, (5, 5)), corrected)
    np.testing.assert_allclose(
        jnp.sum(chance * losses),
        objectives.taylor_loss(logits, one_hot[3:4])[0], rtol=1e-5)

  def test_label_noise_moves_the_last_layer_by_a_constant(self):
    noise = jnp.float32(np.random.default_rng(3).laplace(size=(6, 4)))
    for kernel in (jnp.zeros((6, 4)), jnp.ones((6, 4))):
      np.testing.assert_array_equal(
          jax.grad(objectives.label_noise_term)(kernel, noise), -noise)


class ReconstructionTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(4)
    self.kernel = jnp.float32(rng.normal(size=(12, 5)))
    self.images = jnp.float32(rng.uniform(-3, 3, size=(7, 12)))
    self.hidden = self.images @ self.kernel

  def loss(self, kernel, form='published'):
    decode = lambda h: h @ kernel.T
    return jnp.sum(objectives.reconstruction(
        decode, self.images @ kernel, self.images, form=form))

  def test_published_gradient_holds_the_hidden_layer_fixed(self):
    want = (.5 - np.asarray(self.images)).T @ np.asarray(self.hidden)  # E9
    np.testing.assert_allclose(jax.grad(self.loss)(self.kernel), want,
                               rtol=1e-4, atol=1e-3)

  def test_published_loss_has_no_lower_bound_and_the_clipped_one_has(self):
    small, large = (float(self.loss(c * self.kernel)) for c in (1., 100.))
    self.assertLess(large, 100. * min(small, -1.))
    floor = -float(jnp.sum(jnp.abs(.5 - self.images)))
    self.assertGreaterEqual(float(self.loss(100. * self.kernel, 'clipped')),
                            floor)

  def test_official_loss_is_never_negative_and_differs(self):
    official = self.loss(self.kernel, 'official')
    self.assertGreaterEqual(float(official), 0.)
    x, z = np.asarray(self.images), np.asarray(
        self.hidden @ self.kernel.T)
    want = np.abs(math.log(2) + np.maximum(z, 0) * (.5 - x)).sum()
    np.testing.assert_allclose(official, want, rtol=1e-5)

  def test_moments_give_the_loss_of_the_patches(self):
    x, kernel = np.asarray(self.images), np.asarray(self.kernel)
    rebuilt = x @ kernel @ kernel.T
    want = ((.5 - x) * rebuilt).sum(1).mean()
    got = objectives.moment_reconstruction(
        self.kernel, jnp.mean(self.images, 0),
        self.images.T @ self.images / len(x), ridge=1e-30)
    np.testing.assert_allclose(got, want, rtol=1e-5)

  def test_the_ridge_bounds_the_moment_loss_below(self):
    second = jnp.eye(12)
    loss = lambda c: float(objectives.moment_reconstruction(
        c * self.kernel, jnp.zeros(12), second, ridge=.5))
    self.assertGreater(loss(100.), loss(1.))
