"""Norms of a first layer against the dense matrix of what it computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxdp import guarantees
from jaxdp import models
from jaxdp.models import norms


def _dense_matrix(kernel, image_shape, strides, padding):
  """The matrix [units, inputs] of a convolution, from basis images."""
  num = int(np.prod(image_shape))
  basis = np.eye(num, dtype=np.float32).reshape(num, *image_shape)
  out = jax.lax.conv_general_dilated(
      basis, jnp.asarray(kernel, jnp.float32), (strides, strides), padding,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  return np.asarray(out, np.float64).reshape(num, -1).T


def _xavier(shape, seed):
  bound = np.sqrt(6. / (np.prod(shape[:3]) + shape[0] * shape[1] * shape[3]))
  return np.random.default_rng(seed).uniform(-bound, bound, shape)


class MatrixNormsTest(parameterized.TestCase):

  def test_columns_are_the_inputs_and_rows_the_maps(self):
    # theta is 2 inputs by 3 maps; theta^T acts on x.
    theta = np.array([[1., -2., 4.], [0., 5., 0.]])
    self.assertEqual(norms.column_norm(theta), 7.)  # input 0: 1 + 2 + 4
    self.assertEqual(norms.row_norm(theta), 7.)  # map 1: 2 + 5
    theta[0, 2] = 40.
    self.assertEqual(norms.column_norm(theta), 43.)
    self.assertEqual(norms.row_norm(theta), 40.)

  def test_they_bound_what_the_layer_does_and_are_reached(self):
    theta = np.random.default_rng(0).normal(size=(3, 3, 2, 5))
    matrix = theta.reshape(-1, 5).T
    unit = np.eye(18)
    self.assertAlmostEqual(
        max(np.abs(matrix @ e).sum() for e in unit), norms.column_norm(theta))
    signs = np.sign(matrix)
    self.assertAlmostEqual(
        max(np.abs(matrix @ s).max() for s in signs), norms.row_norm(theta))

  def test_the_spectral_norm_is_that_of_the_reshaped_kernel(self):
    theta = np.random.default_rng(1).normal(size=(5, 5, 1, 32))
    matrix = theta.reshape(25, 32)
    largest = np.sqrt(np.linalg.eigvalsh(matrix @ matrix.T)[-1])
    self.assertAlmostEqual(norms.spectral_norm(theta), largest, places=10)
    # Not that of another reshaping of the same numbers.
    other = theta.reshape(5, -1)
    self.assertGreater(abs(np.linalg.norm(other, 2) - largest), .1)


class ConvolutionNormsTest(parameterized.TestCase):

  @parameterized.parameters(
      ((5, 5, 1, 3), (9, 7, 1), 2, 'SAME'),
      ((4, 4, 2, 3), (8, 9, 2), 2, 'SAME'),
      ((7, 7, 1, 2), (10, 8, 1), 2, ((3, 3), (3, 3))),
      ((3, 2, 2, 2), (7, 6, 2), 1, 'VALID'),
      ((2, 2, 1, 2), (7, 7, 1), 3, 'SAME'),
      ((3, 3, 1, 2), (5, 5, 1), 2, ((0, 2), (1, 0))),
  )
  def test_they_are_those_of_the_dense_matrix(
      self, shape, image_shape, strides, padding):
    kernel = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    matrix = np.abs(_dense_matrix(kernel, image_shape, strides, padding))
    got = norms.convolution_norms(kernel, image_shape, strides=strides,
                                  padding=padding)
    # The matrix holds the float32 weights themselves: only sums round.
    np.testing.assert_allclose(got.l1_l1, matrix.sum(0).max(), rtol=1e-12)
    np.testing.assert_allclose(got.linf_linf, matrix.sum(1).max(), rtol=1e-12)
    np.testing.assert_allclose(got.linf_l1, matrix.sum(), rtol=1e-12)

  def test_no_attack_exceeds_the_bound_and_one_of_like_signs_reaches_it(self):
    kernel = np.random.default_rng(3).normal(size=(3, 3, 1, 2))
    matrix = _dense_matrix(kernel, (5, 5, 1), 2, 'SAME')
    signs = np.random.default_rng(4).choice([-1., 1.], size=(4096, 25))
    bound = norms.convolution_norms(kernel, (5, 5, 1), strides=2).linf_l1
    self.assertLess(np.abs(signs @ matrix.T).sum(1).max(), bound)
    positive = np.abs(kernel)
    bound = norms.convolution_norms(positive, (5, 5, 1), strides=2).linf_l1
    matrix = _dense_matrix(positive, (5, 5, 1), 2, 'SAME')
    np.testing.assert_allclose((matrix @ np.ones(25)).sum(), bound, rtol=1e-6)

  @parameterized.parameters(
      # kernel, H, positions, sum of all units' norms without borders
      ((5, 5, 1, 32), 28, 14, 'SAME', 6_690),
      ((4, 4, 3, 128), 28, 14, 'SAME', 32_200),
      ((7, 7, 3, 64), 64, 32, ((3, 3), (3, 3)), 206_000),
  )
  def test_published_layers_at_their_start(
      self, shape, size, positions, padding, without_borders):
    kernel = _xavier(shape, seed=5)
    got = norms.convolution_norms(kernel, (size, size, shape[2]), strides=2,
                                  padding=padding)
    everywhere = positions**2 * np.abs(kernel).sum()
    # A sum of n uniform |weights| has relative spread 1 / sqrt(3 n): 2%, .8%.
    self.assertLess(abs(everywhere / without_borders - 1.),
                    3.3 / np.sqrt(3 * np.prod(shape)))
    self.assertLess(got.linf_l1, everywhere)
    self.assertGreater(got.linf_l1, .9 * everywhere)
    # What the published code takes in its place is far below.
    self.assertLess(
        20 * norms.spectral_norm(kernel) * positions**2, got.linf_l1)
    # A pixel lies in about (k / 2)^2 patches.
    ratio = got.l1_l1 / norms.column_norm(kernel)
    self.assertBetween(ratio, shape[0]**2 / 4 * .8, (shape[0] + 1)**2 / 4)

  @parameterized.parameters(
      # kernel, H, H', padding, m, Delta_R; the code's hidden sensitivity; gamma
      # by the norm of a patch, and by that of the convolution
      ((5, 5, 1, 32), 28, 14, 'SAME', 2_499, 4_950, 97, 2.4, .32),
      ((4, 4, 3, 128), 28, 14, 'SAME', 1_851, 9_504, 107, 2.7, .72),
      ((7, 7, 3, 64), 64, 32, ((3, 3), (3, 3)), 4_500, 150_822, 495, 41., 3.))
  def test_published_layers_have_the_quoted_sensitivities_and_gammas(
      self, shape, size, side, padding, batch, sensitivity, hidden, *quoted):
    spectral, patch, whole = [], [], []
    for seed in range(8):
      kernel = _xavier(shape, seed)
      spectral.append(side**2 * norms.spectral_norm(kernel))
      patch.append(norms.column_norm(kernel))
      whole.append(norms.convolution_norms(
          kernel, (size, size, shape[2]), strides=2, padding=padding).l1_l1)
    # Draws differ by 5%: the quoted number is of one.
    self.assertLess(abs(np.mean(spectral) / hidden - 1.), .05)
    for values, gamma in zip((patch, whole), quoted):
      got = [guarantees.stobatch_gammas(sensitivity, batch, norm).gamma
             for norm in values]
      self.assertLess(abs(np.mean(got) / gamma - 1.), .05)

  def test_the_spectral_norm_of_the_mnist_layer_at_its_start(self):
    values = [norms.spectral_norm(_xavier((5, 5, 1, 32), seed))
              for seed in range(20)]
    # Entries of spread .0492: largest singular value .0492 (5 + sqrt(32)) at
    # most, a little less at this size; the paper's example has .493.
    self.assertBetween(np.mean(values), .46, .0493 * (5 + np.sqrt(32)))
    self.assertBetween(.493, min(values), max(values))

  @parameterized.product(name=('digits', 'mnist'),
                         first_layer=('conv', 'dense'))
  def test_of_a_model(self, name, first_layer):
    model = models.images.get(name, first_layer=first_layer)
    params = models.images.init(jax.random.key(0), model)['encoder']
    got = models.images.operator_norms(model, params)
    self.assertEqual(got.column, norms.column_norm(params['kernel']))
    self.assertEqual(got.row, norms.row_norm(params['kernel']))
    self.assertEqual(got.spectral, norms.spectral_norm(params['kernel']))
    if name == 'mnist':
      return
    num = int(np.prod(model.image_shape))
    basis = np.eye(num, dtype=np.float32).reshape(num, *model.image_shape)
    h = models.images.encode(model, params, basis)
    h -= models.images.encode(model, params, 0. * basis)
    matrix = np.abs(np.asarray(h, np.float64).reshape(num, -1))
    np.testing.assert_allclose(got.l1_l1, matrix.sum(1).max(), rtol=1e-5)
    np.testing.assert_allclose(got.linf_l1, matrix.sum(), rtol=1e-5)


class PaddingTest(parameterized.TestCase):

  def test_it_is_that_of_the_convolution(self):
    for size, window, strides in itertools.product(
        (1, 4, 7, 28), (1, 2, 5), (1, 2, 3)):
      got = norms.padding_pairs((size,), (window,), strides, 'SAME')
      want = jax.lax.padtype_to_pads((size,), (window,), (strides,), 'SAME')
      self.assertEqual(got, tuple(map(tuple, want)))


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(kernel=np.ones((3, 3, 1))), 'kernel has shape'),
      (dict(kernel=np.ones((3, 3))), 'kernel has shape'),
      (dict(kernel=np.full((3, 3, 1, 1), np.nan)), 'not finite'),
      (dict(kernel=np.ones((3, 3, 1, 0))), 'kernel has shape'),
      (dict(image_shape=(8, 8, 3)), 'image_shape'),
      (dict(image_shape=(8, 8)), 'image_shape'),
      (dict(image_shape=(2, 8, 1), padding='VALID'), 'image_shape'),
      (dict(image_shape=(0, 8, 1)), 'image_shape'),
      (dict(strides=0), 'strides=0'),
      (dict(strides=(2, 2)), 'strides='),
      (dict(padding='same'), "padding='same'"),
      (dict(padding=((1, 1),)), 'padding='),
      (dict(padding=((1, -1), (0, 0))), 'padding='),
  )
  def test_of_a_convolution(self, settings, message):
    settings = {'kernel': np.ones((3, 3, 1, 2)), 'image_shape': (8, 8, 1),
                'strides': 2, **settings}
    kernel, shape = settings.pop('kernel'), settings.pop('image_shape')
    with self.assertRaisesRegex(ValueError, message):
      norms.convolution_norms(kernel, shape, **settings)

  def test_of_a_matrix(self):
    for fun in (norms.column_norm, norms.row_norm, norms.spectral_norm):
      for bad in (np.ones(3), np.ones((2, 2, 2)), [[np.inf, 0.]]):
        with self.assertRaisesRegex(ValueError, 'kernel'):
          fun(bad)

  def test_a_convolution_without_an_image_and_a_matrix_with_one(self):
    with self.assertRaisesRegex(ValueError, 'image_shape=None'):
      norms.operator_norms(np.ones((3, 3, 1, 2)))
    with self.assertRaisesRegex(ValueError, 'image_shape='):
      norms.operator_norms(np.ones((9, 2)), image_shape=(3, 3, 1))
