"""The convolution against XLA's own, mapped and not."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models import convolution
from jaxdp.models import images


def plain(x, kernel, strides, padding):
  return jax.lax.conv_general_dilated(
      x, kernel, strides, padding, dimension_numbers=convolution.NHWC)


class ConvolutionTest(parameterized.TestCase):

  def arrays(self, num=3):
    rng = np.random.default_rng(0)
    return (jnp.float32(rng.normal(size=(num, 4, 6, 6, 2))),
            jnp.float32(rng.normal(size=(3, 3, 2, 5))))

  @parameterized.parameters(
      ((2, 2), 'SAME'), ((1, 1), 'VALID'), ((2, 1), ((0, 1), (2, 0))))
  def test_values_and_gradients_are_those_of_xla(self, strides, padding):
    x, kernel = self.arrays()
    loss = lambda fun: lambda x, kernel: jnp.sum(
        jnp.sin(fun(x, kernel, strides, padding)))
    both = lambda fun: jax.jit(jax.grad(loss(fun), (0, 1)))(x[0], kernel)
    for ours, theirs in zip(both(convolution.convolve), both(plain)):
      np.testing.assert_allclose(ours, theirs, atol=2e-5)

  def test_mapped_gradients_are_those_of_each_part(self):
    x, kernel = self.arrays()
    loss = lambda kernel, x: jnp.sum(jnp.sin(convolution.convolve(
        x, kernel, (2, 2), 'SAME')))
    mapped = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(kernel, x)
    twice = jax.jit(jax.vmap(jax.vmap(jax.grad(loss), (None, 0)),
                             (None, 0)))(kernel, x[None])
    for i in range(3):
      alone = jax.grad(loss)(kernel, x[i])
      np.testing.assert_allclose(mapped[i], alone, atol=2e-5)
      np.testing.assert_allclose(twice[0, i], alone, atol=2e-5)

  @parameterized.product(
      form=(convolution.input_gradient, convolution.spread_gradient),
      size=((7, 7), (9, 12)), kernel=((5, 5), (3, 2), (1, 1)),
      strides=((2, 2), (3, 1)), padding=('SAME', 'VALID', ((3, 2), (1, 0))))
  def test_the_input_gradient_without_zeros_is_xlas(
      self, form, size, kernel, strides, padding):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, kernel = draw(2, *size, 9), draw(*kernel, 9, 3)
    out, pull = jax.vjp(lambda x: plain(x, kernel, strides, padding), x)
    cotangent = draw(*out.shape)
    np.testing.assert_allclose(
        form(cotangent, kernel, x.shape, strides, padding),
        pull(cotangent)[0], rtol=0, atol=1e-5)

  @parameterized.parameters((2, (2, 2)), (9, (2, 2)), (2, (1, 1)))
  def test_the_transpose_and_its_gradients_are_xlas(self, channels, strides):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.float32(rng.normal(size=shape))
    x, kernel = draw(3, 4, 7, 6, channels), draw(3, 3, channels, 5)
    h = jax.vmap(lambda x: plain(x, kernel, strides, 'SAME'))(x)

    def theirs(h, kernel):
      return jax.vjp(lambda x: plain(x, kernel, strides, 'SAME'), x[0])[1](h)[0]

    def ours(h, kernel):
      return convolution.transpose(h, kernel, x.shape[2:], strides, 'SAME')

    gradients = lambda fun: jax.jit(jax.vmap(jax.grad(
        lambda h, k: jnp.sum(jnp.sin(fun(h, k))), (0, 1)), (0, None)))(
            h, kernel)
    np.testing.assert_allclose(ours(h[0], kernel), theirs(h[0], kernel),
                               atol=5e-5)
    for got, want in zip(gradients(ours), gradients(theirs)):
      np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)

  @parameterized.parameters(((2, 5, 5, 3), (3, 3, 2, 3), 'h has shape'),
                            ((2, 4, 4, 2), (3, 3, 2, 3), 'h has shape'),
                            ((2, 4, 4, 3), (3, 3, 1, 3), 'kernel'))
  def test_a_transpose_of_no_such_convolution_is_refused(self, h, kernel, name):
    with self.assertRaisesRegex(ValueError, name):
      convolution.transpose(np.ones(h, np.float32), np.ones(kernel, np.float32),
                            (8, 8, 2), (2, 2), 'SAME')

  @parameterized.parameters(2, 9)
  def test_a_strided_gradient_convolves_no_zeros(self, channels):
    x, kernel = np.ones((2, 8, 8, channels), np.float32), np.ones(
        (5, 5, channels, 3), np.float32)
    text = lambda fun: str(jax.make_jaxpr(jax.grad(
        lambda x: jnp.sum(fun(x, kernel, (2, 2), 'SAME'))))(x))
    self.assertIn('lhs_dilation=(2, 2)', text(plain))
    self.assertNotIn('lhs_dilation=(2, 2)', text(convolution.convolve))

  def test_a_mapped_gradient_holds_no_grouped_convolution(self):
    x, kernel = self.arrays()
    loss = lambda kernel, x: jnp.sum(jnp.sin(convolution.convolve(
        x, kernel, (2, 2), 'SAME')))
    text = str(jax.make_jaxpr(jax.vmap(jax.grad(loss), (None, 0)))(kernel, x))
    self.assertIn('batch_group_count=1', text)
    self.assertNotIn('batch_group_count=3', text)
    self.assertNotIn('feature_group_count=3', text)

  def test_pairing_is_the_adjoint(self):
    for first_layer in ('conv', 'dense'):
      model = images.get('digits', norm='group', first_layer=first_layer)
      params = images.init(jax.random.key(0), model)['encoder']
      rng = np.random.default_rng(1)
      x = jnp.float32(rng.normal(size=(4, *model.image_shape)))
      h = jnp.float32(rng.normal(size=(4, *model.hidden_shape)))
      want = jnp.sum(x * images.decode(model, params, h), (1, 2, 3))
      np.testing.assert_allclose(
          images.pair_with_decoded(model, params, x, h), want, rtol=1e-4,
          atol=1e-4)
