"""Image classifiers against networks written out again, number by number."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from absl.testing import parameterized
from jax import lax

from jaxdp import models
from jaxdp.models import encoders
from jaxdp.models import images
from jaxdp.models import tails

_TINY = 'tiny_imagenet'
_ULP = 2.**-23
_DIMENSIONS = ('NHWC', 'HWIO', 'NHWC')


@functools.cache
def _digits(norm):
  model = images.get('digits', norm=norm)
  return model, images.init(jax.random.key(0), model)


@functools.cache
def _small_resnet(norm):
  model = images.get(_TINY, norm=norm, image_shape=(16, 16, 3))
  return model, images.init(jax.random.key(1), model)


def _normal(seed, shape):
  # Made on the host: each shape would take a second to compile.
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape),
                     jnp.float32)


def _hidden(model, num, seed=2):
  return _normal(seed, (num, *model.hidden_shape))


# One compiled function for each network, settings and shape of the batch.
@functools.partial(jax.jit, static_argnums=0, static_argnames=(
    'train', 'statistics', 'axis_name'))
def _classify(model, variables, h, key=None, example_ids=None, **settings):
  return images.classify(model, variables['tail'], variables['batch_stats'], h,
                         key=key, example_ids=example_ids, **settings)


def _count(tree):
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _shapes(name, **settings):
  """The model and the shapes of its variables; nothing is computed."""
  model = images.get(name, **settings)
  return model, jax.eval_shape(
      lambda key: images.init(key, model), jax.random.key(0))


class NumbersTest(parameterized.TestCase):

  @parameterized.parameters(
      ('mnist', 25, 196, 32, 256, 4_950, (14, 14, 32)),
      ('cifar10', 48, 196, 128, 256, 9_504, (14, 14, 128)),
      (_TINY, 147, 1024, 64, 256, 150_822, (32, 32, 64)),
      ('digits', 9, 16, 16, 64, 162, (4, 4, 16)),
  )
  def test_the_paper_counts_of_a_convolution(
      self, name, d, beta, num_maps, num_last, sensitivity, hidden_shape):
    model = images.get(name)
    self.assertEqual(
        (model.inputs_per_unit, model.units_per_map, model.num_maps,
         model.num_last, model.hidden_shape),
        (d, beta, num_maps, num_last, hidden_shape))
    self.assertEqual(
        model.inputs_per_unit * (model.units_per_map + 2), sensitivity)

  def test_the_paper_counts_of_a_dense_layer(self):
    model = images.get('mnist', first_layer='dense', num_units=300)
    self.assertEqual(
        (model.inputs_per_unit, model.units_per_map, model.num_maps,
         model.num_last, model.hidden_shape), (784, 300, 1, 256, (300,)))

  @parameterized.product(
      norm=('batch', 'group'),
      case=(
          # k k Cin F + F; then each layer of the tail, in order.
          ('mnist', {}, 25 * 32 + 32,
           25 * 32 * 64 + 64 + 1024 * 256 + 256 + 256 * 10 + 10),
          ('cifar10', {}, 48 * 128 + 128,
           25 * 128 * 128 + 128 + 25 * 256 * 256 + 256 + 12544 * 256 + 256
           + 256 * 10 + 10),
          (_TINY, {}, 147 * 64 + 64,
           64 * 64 + 9 * 64 * 64 * 4
           + 64 * 128 + 9 * 64 * 128 + 9 * 128 * 128 * 3
           + 128 * 256 + 9 * 128 * 256 + 9 * 256 * 256 * 3
           + 256 * 512 + 9 * 256 * 512 + 9 * 512 * 512 * 3
           + 512 * 256 + 256 + 256 * 30 + 30),
          ('digits', {}, 9 * 16 + 16,
           9 * 16 * 32 + 32 + 512 * 64 + 64 + 64 * 10 + 10),
          ('mnist', {'first_layer': 'dense', 'num_units': 300}, 784 * 300,
           300 * 256 + 256 + 256 * 10 + 10),
      ))
  def test_parameters_by_hand(self, norm, case):
    name, settings, in_encoder, in_tail = case
    _, variables = _shapes(name, norm=norm, **settings)
    self.assertEqual(_count(variables['encoder']), in_encoder)
    self.assertEqual(_count(variables['tail']), in_tail)
    self.assertEqual(norm == 'batch', bool(variables['batch_stats']))

  @parameterized.product(name=('mnist', 'cifar10', _TINY, 'digits'),
                         first_layer=('conv', 'dense'))
  def test_shapes_at_full_size(self, name, first_layer):
    model, variables = _shapes(name, first_layer=first_layer, num_classes=7)
    x = jax.ShapeDtypeStruct((3, *model.image_shape), jnp.float32)
    h = jax.eval_shape(functools.partial(images.encode, model),
                       variables['encoder'], x)
    self.assertEqual(h.shape, (3, *model.hidden_shape))
    back = jax.eval_shape(functools.partial(images.decode, model),
                          variables['encoder'], h)
    self.assertEqual(back.shape, x.shape)
    seen = jax.eval_shape(functools.partial(images.patches, model),
                          variables['encoder'], x)
    self.assertEqual(seen.shape, (
        *h.shape[:-1], model.inputs_per_unit))
    own = jax.eval_shape(functools.partial(images.decode_patches, model),
                         variables['encoder'], h)
    self.assertEqual(own.shape, seen.shape)
    hidden, logits = jax.eval_shape(_classify, model, variables, h)[0]
    self.assertEqual((hidden.shape, logits.shape),
                     ((3, model.num_last), (3, 7)))
    self.assertEqual(variables['tail']['last']['kernel'].shape,
                     (model.num_last, 7))

  def test_a_model_is_a_static_argument(self):
    self.assertEqual(images.get('mnist'), images.get('mnist'))
    self.assertEqual(hash(images.get('mnist')), hash(images.get('mnist')))
    for other in (images.get('digits'), images.get('mnist', norm='group'),
                  images.get('mnist', num_classes=11),
                  images.get('mnist', image_shape=(32, 32, 1))):
      self.assertNotEqual(images.get('mnist'), other)
    traced = chex.assert_max_traces(lambda model, x: x + model.num_last, n=1)
    fun = jax.jit(traced, static_argnums=0)
    fun(images.get('mnist'), 1.)
    fun(images.get('mnist'), 2.)


@pytest.mark.slow
class InitTest(parameterized.TestCase):

  def test_kernels_are_xavier_uniform_and_of_no_other_width(self):
    _, variables = _digits('batch')
    # fc: 512 inputs, 64 outputs; conv2: 9 weights a pair of maps.
    for kernel, bound in (
        (variables['tail']['fc']['kernel'], np.sqrt(6 / (512 + 64))),
        (variables['tail']['conv2']['kernel'], np.sqrt(6 / (9 * (16 + 32))))):
      law = lambda width: scipy.stats.uniform(-width, 2 * width).cdf
      sample = np.asarray(kernel).ravel()
      self.assertLessEqual(np.abs(sample).max(), bound)
      self.assertGreater(scipy.stats.kstest(sample, law(bound)).pvalue, 1e-3)
      for wrong in (.9, 1.1):
        self.assertLess(
            scipy.stats.kstest(sample, law(wrong * bound)).pvalue, 1e-3)

  @parameterized.parameters(('mnist', 1e-4, 1e-4), ('cifar10', 0., .1),
                            ('digits', 0., 0.))
  def test_biases_start_as_published(self, name, first, rest):
    channels = images.get(name).image_shape[2]
    model = images.get(name, image_shape=(8, 8, channels))
    variables = images.init(jax.random.key(3), model)
    np.testing.assert_array_equal(variables['encoder']['bias'],
                                  np.float32(first))
    for layer_name, layer in variables['tail'].items():
      np.testing.assert_array_equal(layer['bias'], np.float32(rest),
                                    layer_name)

  def test_a_key_fixes_all_and_another_changes_every_kernel(self):
    model, variables = _digits('batch')
    again = images.init(jax.random.key(0), model)
    chex.assert_trees_all_equal(variables, again)
    other = images.init(jax.random.key(4), model)
    for piece in ('encoder', 'tail'):
      for path, leaf in jax.tree_util.tree_leaves_with_path(variables[piece]):
        if path[-1].key == 'kernel':
          there = dict(jax.tree_util.tree_leaves_with_path(other[piece]))[path]
          self.assertFalse(np.any(np.asarray(leaf) == np.asarray(there)))

  def test_the_two_pieces_and_two_layers_share_no_draw(self):
    _, variables = _digits('batch')
    kernels = [leaf.ravel()[:144] for leaf in jax.tree.leaves(variables)
               if leaf.size > 144]
    self.assertLen(kernels, 3)
    kernels.append(variables['encoder']['kernel'].ravel())
    # 1e-3 of false alarm over 6 pairs: 3.8 standard errors of 1 / sqrt(144).
    correlations = np.corrcoef(np.stack(kernels)) - np.eye(4)
    self.assertLess(np.abs(correlations).max(), 3.8 / 12)


_ENCODERS = {
    'mnist': ((9, 8, 1), dict(num_maps=3, kernel_size=5)),
    'cifar10': ((8, 7, 3), dict(num_maps=4, kernel_size=4)),
    _TINY: ((10, 8, 2), dict(num_maps=3, kernel_size=7,
                             padding=((3, 3), (3, 3)))),
}


def _naive_patches(x, size, strides, pads, num_out):
  """What each unit sees, by loops."""
  padded = np.pad(np.asarray(x, np.float64), ((0, 0), *pads, (0, 0)))
  out = [[padded[:, strides * o:strides * o + size,
                 strides * p:strides * p + size].reshape(len(x), -1)
          for p in range(num_out[1])] for o in range(num_out[0])]
  return np.moveaxis(np.array(out), 2, 0)


class ConvEncoderTest(parameterized.TestCase):

  def _make(self, name):
    shape, settings = _ENCODERS[name]
    encoder = encoders.ConvEncoder(shape, **settings)
    size = encoder.kernel_size
    x = _normal(5, (2, *shape))
    params = {'params': {
        'kernel': .1 * _normal(6, (size, size, shape[2], encoder.num_maps)),
        'bias': _normal(7, (encoder.num_maps,))}}
    h = _normal(8, (2, *encoder.hidden_shape))
    run = lambda method, *args: jax.jit(lambda array: encoder.apply(
        params, array, *args[1:], method=method))(args[0])
    theta = np.asarray(params['params']['kernel'], np.float64)
    return encoder, run, x, h, theta, np.asarray(params['params']['bias'])

  # The paddings of the published code: TensorFlow's SAME, and 3 all round.
  @parameterized.parameters(
      ('mnist', ((2, 2), (1, 2))), ('cifar10', ((1, 1), (1, 2))),
      (_TINY, ((3, 3), (3, 3))))
  def test_every_method_against_loops(self, name, pads):
    encoder, run, x, h, theta, bias = self._make(name)
    size, num_maps = encoder.kernel_size, encoder.num_maps
    matrix = theta.reshape(-1, num_maps)
    seen = _naive_patches(x, size, 2, pads, h.shape[1:3])
    np.testing.assert_array_equal(run('patches', x), seen.astype(np.float32))
    # Sums of d products of size one: d ulp of the largest partial sum.
    close = functools.partial(np.testing.assert_allclose, rtol=0,
                              atol=len(matrix) * 8 * _ULP)
    close(run('encode', x), seen @ matrix + bias)
    close(run('__call__', x), seen @ matrix + bias)
    own = np.asarray(h, np.float64) @ matrix.T
    close(run('decode_patches', h), own)
    # The adjoint puts each unit's patch where the unit looked.
    image = np.zeros((2, *[n + sum(p) for n, p in zip(x.shape[1:], pads)],
                      x.shape[3]))
    for o in range(h.shape[1]):
      for p in range(h.shape[2]):
        image[:, 2 * o:2 * o + size, 2 * p:2 * p + size] += own[
            :, o, p].reshape(2, size, size, -1)
    inside = [slice(p[0], p[0] + n) for n, p in zip(x.shape[1:3], pads)]
    close(run('decode', h), image[:, inside[0], inside[1]])

  @parameterized.parameters(*_ENCODERS)
  def test_transpose_is_the_adjoint_and_official_is_not(self, name):
    _, run, x, h, _, bias = self._make(name)
    terms = (np.asarray(run('encode', x), np.float64) - bias) * h
    image = lambda form: np.sum(
        np.asarray(x, np.float64) * run('decode', h, form))
    # The two sums hold the same terms; each rounds by some ulp of its size.
    size = np.abs(terms).sum()
    self.assertAlmostEqual(terms.sum(), image('transpose'), delta=1e-5 * size)
    self.assertGreater(abs(terms.sum() - image('official')), 1e-2 * size)

  @parameterized.parameters(*_ENCODERS)
  def test_official_resizes_and_swaps_the_axes(self, name):
    encoder, run, x, h, theta, _ = self._make(name)
    size = encoder.kernel_size
    height, width = x.shape[1:3]
    rows = [int(np.floor(i * h.shape[1] / height)) for i in range(height)]
    cols = [int(np.floor(j * h.shape[2] / width)) for j in range(width)]
    large = np.asarray(h)[:, rows][:, :, cols]
    pad = ((size - 1) // 2, size // 2)
    seen = _naive_patches(large, size, 1, (pad, pad), (height, width))
    # Row a, column b, map f of the new kernel is column a, row b of the old.
    swapped = np.einsum('bacf->abfc', theta).reshape(-1, x.shape[3])
    np.testing.assert_allclose(run('decode', h, 'official'), seen @ swapped,
                               rtol=0, atol=len(swapped) * 8 * _ULP)

  def test_the_model_passes_its_parameters_on(self):
    model, variables = _digits('batch')
    params = variables['encoder']
    x = _normal(6, (2, 8, 8, 1))
    h = images.encode(model, params, x)
    theta = params['kernel'].reshape(9, 16)
    seen = images.patches(model, params, x)
    np.testing.assert_allclose(h, seen @ theta + params['bias'][None, None,
                                                                None],
                               rtol=0, atol=1e-5)
    np.testing.assert_array_equal(
        images.decode(model, params, h),
        model.encoder.apply({'params': params}, h, method='decode'))
    np.testing.assert_array_equal(
        images.decode(model, params, h, form='official'),
        model.encoder.apply({'params': params}, h, 'official',
                            method='decode'))
    np.testing.assert_allclose(images.decode_patches(model, params, h),
                               h @ theta.T, rtol=0, atol=1e-5)


@pytest.mark.slow
class DenseEncoderTest(parameterized.TestCase):

  def test_it_is_the_paper_first_layer(self):
    model = images.get('digits', first_layer='dense', num_units=5)
    params = {'kernel': _normal(7, (64, 5))}
    x = _normal(8, (3, 8, 8, 1))
    theta = np.asarray(params['kernel'], np.float64)
    flat = np.asarray(x, np.float64).reshape(3, 64)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-3)
    h = images.encode(model, params, x)
    close(h, flat @ theta)
    close(images.decode(model, params, h), (flat @ theta @ theta.T).reshape(
        3, 8, 8, 1))
    close(images.decode_patches(model, params, h), flat @ theta @ theta.T)
    np.testing.assert_array_equal(images.patches(model, params, x),
                                  x.reshape(3, 64))
    with self.assertRaisesRegex(ValueError, 'transpose'):
      images.decode(model, params, h, form='official')


def _norm(x):
  """Batch normalisation at its start: mean 0, variance 1, eps 1e-3."""
  return x / jnp.sqrt(1. + 1e-3)


def _conv(x, layer, strides=1, padding='SAME'):
  x = lax.conv_general_dilated(x, layer['kernel'], (strides, strides), padding,
                               dimension_numbers=_DIMENSIONS)
  return x + layer['bias'][None, None, None] if 'bias' in layer else x


def _dense(x, layer):
  return x.reshape(len(x), -1) @ layer['kernel'] + layer['bias'][None]


def _pool(x):
  height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
  x = x[:, :height, :width]
  return (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2]
          + x[:, 1::2, 1::2]) / 4


def _mnist(p, h):
  x = _pool(_norm(jax.nn.relu(h)))
  x = jax.nn.relu(_conv(x, p['conv2'], 2))
  return _norm(_dense(x, p['fc']))


def _cifar10(p, h):
  first = _norm(jax.nn.relu(h))
  x = jax.nn.relu(_conv(first, p['conv2']))
  x = _norm(jnp.concatenate([x, first], -1))
  x = _norm(jax.nn.relu(_conv(x, p['conv3'])))
  return _norm(_dense(_pool(x), p['fc']))


def _digits_tail(p, h):
  x = jax.nn.relu(_conv(_norm(jax.nn.relu(h)), p['conv2']))
  return _norm(_dense(x, p['fc']))


def _dense_tail(p, h):
  return _norm(_dense(_norm(jax.nn.relu(h)), p['fc']))


def _resnet(p, x):
  pads = ((1, 1), (1, 1))
  for stage, strides in ((1, 1), (2, 1), (3, 2), (4, 2)):
    for block in (1, 2):
      layer = lambda name: p[f'stage{stage}_block{block}_{name}']  # noqa: B023
      strides = strides if block == 1 else 1
      y = jax.nn.relu(_norm(x))
      shortcut = (_conv(y, layer('shortcut'), strides, 'VALID')
                  if block == 1 else x)
      y = jax.nn.relu(_norm(_conv(y, layer('conv1'), strides, pads)))
      x = shortcut + _conv(y, layer('conv2'), 1, pads)
  return _dense(jax.nn.relu(_norm(x)).mean((1, 2)), p['fc'])


@pytest.mark.slow
class TailTest(parameterized.TestCase):

  @parameterized.parameters(
      ('mnist', {'image_shape': (12, 14, 1)}, _mnist),
      ('cifar10', {'image_shape': (8, 10, 3)}, _cifar10),
      ('digits', {}, _digits_tail),
      ('digits', {'first_layer': 'dense'}, _dense_tail),
      (_TINY, {'image_shape': (16, 16, 3)}, _resnet),
  )
  def test_it_is_the_published_network(self, name, settings, reference):
    model = images.get(name, num_classes=6, **settings)
    variables = images.init(jax.random.key(1), model)
    h = 3. * _hidden(model, 4)
    (hidden, logits), stats = _classify(model, variables, h)
    chex.assert_trees_all_equal(stats, variables['batch_stats'])
    before = jax.jit(reference)(variables['tail'], h)
    scale = max(1., float(jnp.abs(before).max()))
    np.testing.assert_allclose(hidden, jnp.clip(before, -1, 1), rtol=0,
                               atol=1e-4 * scale)
    np.testing.assert_allclose(logits, _dense(hidden,
                                              variables['tail']['last']),
                               rtol=0, atol=1e-5 * 256)
    # The clip is at work, and not on everything.
    clipped = float(jnp.mean(jnp.abs(before) > 1.))
    self.assertBetween(clipped, .01, .99)
    self.assertEqual(float(jnp.abs(hidden).max()), 1.)


@pytest.mark.slow
class NormTest(parameterized.TestCase):

  def _alone_and_among_others(self, norm, **settings):
    model, variables = _digits(norm)
    h = _hidden(model, 6)
    mates = h.at[3:].multiply(-7.)
    run = lambda x: _classify(model, variables, x, **settings)[0][1][:3]
    return run(h), run(mates)

  @parameterized.parameters(
      ('batch', {}), ('group', {}), ('group', {'train': True}),
      ('group', {'statistics': 'batch'}))
  def test_an_output_does_not_depend_on_batch_mates(self, norm, settings):
    np.testing.assert_array_equal(
        *self._alone_and_among_others(norm, **settings))

  @parameterized.parameters({'train': True}, {'statistics': 'batch'})
  def test_with_batch_statistics_it_does(self, **settings):
    one, other = self._alone_and_among_others('batch', **settings)
    self.assertGreater(float(jnp.abs(one - other).min(axis=1).min()), 1e-3)

  def test_batch_statistics_and_their_running_means(self):
    model, variables = _digits('batch')
    h = 2. * _hidden(model, 6) + 5.
    (hidden, _), stats = _classify(model, variables, h, train=True)
    active = np.maximum(np.asarray(h, np.float64), 0)
    mean, variance = active.mean((0, 1, 2)), active.var((0, 1, 2))
    got = stats['norm1']['BatchNorm_0']
    np.testing.assert_allclose(got['mean'], .1 * mean, rtol=1e-5)
    np.testing.assert_allclose(got['var'], .9 + .1 * variance, rtol=1e-5)
    # The last norm makes units of mean 0 and variance 1, then clips.
    p = variables['tail']
    x = jax.nn.relu(_conv(jnp.float32((active - mean) / np.sqrt(
        variance + 1e-3)), p['conv2']))
    x = np.asarray(_dense(x, p['fc']), np.float64)
    x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
    np.testing.assert_allclose(hidden, np.clip(x, -1, 1), rtol=0, atol=1e-4)
    # Testing by the batch gives the same and keeps the running means.
    (tested, _), kept = _classify(model, variables, h, statistics='batch')
    np.testing.assert_allclose(tested, hidden, rtol=0, atol=1e-5)
    chex.assert_trees_all_equal(kept, variables['batch_stats'])

  def test_statistics_are_of_the_examples_that_count(self):
    model, variables = _digits('batch')
    h = 2. * _hidden(model, 6) + 5.
    far = jnp.concatenate([h, 9. * h[:2] - 7.])
    (alone, _), stats = _classify(model, variables, h, train=True)
    (both, _), counted = _classify(
        model, variables, far, train=True,
        counted=jnp.arange(len(far)) < len(h))
    np.testing.assert_allclose(both[:len(h)], alone, rtol=0, atol=1e-5)
    chex.assert_trees_all_close(counted, stats, rtol=1e-5, atol=1e-6)
    (mixed, _), _ = _classify(model, variables, far, train=True)
    self.assertGreater(np.abs(mixed[:len(h)] - alone).max(), .1)

  def test_noise_that_all_share_does_not_blur_the_statistics(self):
    norm = tails.Normalize('batch')
    x = _normal(9, (64, 8))
    init = norm.init(jax.random.key(0), x, False)
    run = lambda y: norm.apply(init, y, False, mutable=['batch_stats'])[0]
    # At 2^12 an input keeps 11 bits behind the point; E[x^2] would keep none.
    np.testing.assert_allclose(run(x + 4096.), run(x), rtol=0, atol=5e-3)

  @parameterized.parameters(32, 48, 20)
  def test_groups_of_sixteen_or_all(self, num):
    norm = tails.Normalize('group')
    x = 3. * _normal(10, (5, 3, 2, num)) + 1.
    y = norm.apply({}, x, False)
    size = 16 if num % 16 == 0 else num
    parts = np.asarray(x, np.float64).reshape(5, 6, num // size, size)
    want = (parts - parts.mean((1, 3), keepdims=True)) / np.sqrt(
        parts.var((1, 3), keepdims=True) + 1e-3)
    np.testing.assert_allclose(y, want.reshape(x.shape), rtol=0, atol=1e-5)

  def test_shards_share_the_statistics_of_their_trainer(self):
    model, variables = _digits('batch')
    h = _hidden(model, 8)
    (_, whole), stats = _classify(model, variables, h, train=True)
    split = lambda **settings: jax.jit(jax.vmap(
        lambda part: images.classify(
            model, variables['tail'], variables['batch_stats'], part,
            train=True, **settings), axis_name='shard'))(
                h.reshape(2, 4, *model.hidden_shape))
    (_, logits), shared = split(axis_name='shard')
    np.testing.assert_allclose(logits.reshape(8, 10), whole, rtol=0, atol=1e-4)
    chex.assert_trees_all_close(
        jax.tree.map(lambda leaf: leaf[0], shared), stats, rtol=1e-5,
        atol=1e-6)
    (_, logits), _ = split(axis_name=None)
    self.assertGreater(float(jnp.abs(logits.reshape(8, 10) - whole).max()),
                       1e-2)

  def test_an_axis_that_no_map_binds_is_refused(self):
    model, variables = _digits('batch')
    h = jax.ShapeDtypeStruct((2, *model.hidden_shape), jnp.float32)
    with self.assertRaisesRegex(ValueError, "axis_name='shard' is bound"):
      jax.eval_shape(functools.partial(
          _classify, model, train=True, axis_name='shard'), variables, h)
    # Nothing is taken over it with running statistics or groups.
    jax.eval_shape(functools.partial(_classify, model, axis_name='shard'),
                   variables, h)
    model, variables = _digits('group')
    jax.eval_shape(functools.partial(
        _classify, model, train=True, axis_name='shard'), variables, h)


@pytest.mark.slow
class DropoutTest(parameterized.TestCase):

  def test_masks_go_by_key_and_example_and_not_by_place(self):
    x = jnp.ones((6, 256))
    ids = jnp.int32([5, 0, 9, 2, 70_000, 3])
    run = lambda key, x, ids: np.asarray(jax.jit(tails.Dropout().apply)(
        {}, x, ids, rngs={'dropout': jax.random.key(key)}))
    whole = run(0, x, ids)
    np.testing.assert_array_equal(run(0, x[2:4], ids[2:4]), whole[2:4])
    np.testing.assert_array_equal(run(0, x, ids[::-1]), whole[::-1])
    self.assertEqual(set(np.unique(whole)), {0., 2.})
    # No two rows and no two keys alike: 256 fair coins agree 128 +- 8 times;
    # 5 standard deviations over 21 comparisons alarm at 1e-5.
    rows = [*whole, run(1, x, ids)[0]]
    for i, one in enumerate(rows):
      for other in rows[:i]:
        self.assertLess(abs(int(np.sum(one == other)) - 128), 40)

  def test_half_of_the_units(self):
    kept = np.asarray(jax.jit(tails.Dropout().apply)(
        {}, jnp.ones((64, 256)), jnp.arange(64),
        rngs={'dropout': jax.random.key(11)})) > 0
    law = lambda p: scipy.stats.binomtest(
        int(kept.sum()), kept.size, p).pvalue
    self.assertGreater(law(.5), 1e-3)
    self.assertLess(law(.52), 1e-3)

  def test_training_needs_a_key_and_ids_where_units_are_dropped(self):
    model, variables = _shapes(_TINY, image_shape=(16, 16, 3))
    h = jax.ShapeDtypeStruct((2, *model.hidden_shape), jnp.float32)
    train = functools.partial(_classify, model, train=True)
    with self.assertRaisesRegex(ValueError, 'example_ids=None'):
      jax.eval_shape(train, variables, h, jax.random.key(0))
    with self.assertRaisesRegex(ValueError, 'key=None'):
      jax.eval_shape(train, variables, h, None, jnp.arange(2))
    jax.eval_shape(train, variables, h, jax.random.key(0), jnp.arange(2))
    model, variables = _shapes('digits')
    h = jax.ShapeDtypeStruct((2, *model.hidden_shape), jnp.float32)
    jax.eval_shape(functools.partial(_classify, model, train=True), variables,
                   h)

  @pytest.mark.slow
  def test_the_residual_network_drops_twice_and_only_in_training(self):
    model, variables = _small_resnet('group')
    h = _hidden(model, 4)
    ids = jnp.arange(4)
    run = lambda key, **settings: _classify(
        model, variables, h, jax.random.key(key), ids, **settings)[0][0]
    trained = run(0, train=True)
    # The second drop is seen as zeros, the first as other numbers elsewhere.
    zeros = int(jnp.sum(trained == 0.))
    self.assertLess(abs(zeros - 512), 5 * 16)
    both = (trained != 0.) & (run(1, train=True) != 0.)
    self.assertGreater(
        float(jnp.mean(jnp.abs(trained - run(1, train=True))[both] > 1e-4)),
        .5)
    np.testing.assert_array_equal(run(0), run(1))


def _loss(params, batch_stats, model, x, noise):
  """A loss in which every parameter takes part."""
  h = images.encode(model, params['encoder'], x) + noise
  back = images.decode(model, params['encoder'], h)
  own = images.decode_patches(model, params['encoder'], h)
  (hidden, logits), stats = images.classify(
      model, params['tail'], batch_stats, h, train=True)
  loss = jnp.mean(back**2) + jnp.mean(own) + jnp.mean(
      logits[:, :3]) + jnp.mean(hidden**3)
  return loss, stats


@pytest.mark.slow
class GradientTest(parameterized.TestCase):

  @parameterized.parameters('batch', 'group')
  def test_jitted_gradients_are_finite_and_match_a_difference(self, norm):
    model, variables = _digits(norm)
    params = {k: variables[k] for k in ('encoder', 'tail')}
    x = jnp.tanh(_normal(12, (8, 8, 8, 1)))
    noise = _hidden(model, 1, 13)
    value = jax.jit(lambda p: jax.value_and_grad(_loss, has_aux=True)(
        p, variables['batch_stats'], model, x, noise))
    (_, stats), grads = value(params)
    chex.assert_tree_all_finite((grads, stats))
    # Batch statistics cancel the shift by fc's bias; all else moves the loss.
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
      if not (norm == 'batch' and 'fc' in str(path) and 'bias' in str(path)):
        self.assertGreater(float(jnp.abs(grad).max()), 1e-6, path)
    direction = grads['encoder']['kernel']
    size = float(jnp.linalg.norm(direction))
    moved = lambda t: value({**params, 'encoder': {
        **params['encoder'],
        'kernel': params['encoder']['kernel'] + t * direction / size}})[0][0]
    slope = float(moved(2e-3) - moved(-2e-3)) / 4e-3
    self.assertAlmostEqual(slope, size, delta=.05 * size)

  @parameterized.product(name=('mnist', 'cifar10', _TINY),
                         norm=('batch', 'group'))
  @pytest.mark.slow
  def test_full_size_networks_run_and_train(self, name, norm):
    model = images.get(name, norm=norm)
    variables = images.init(jax.random.key(14), model)
    x = jax.random.uniform(jax.random.key(15), (2, *model.image_shape),
                           minval=-1.)

    @jax.jit
    def step(params, x):
      def loss(params):
        h = images.encode(model, params['encoder'], x)
        (hidden, logits), _ = images.classify(
            model, params['tail'], variables['batch_stats'], h, train=True,
            key=jax.random.key(0), example_ids=jnp.arange(2))
        back = images.decode(model, params['encoder'], h)
        return (jnp.mean((logits - 2.)**2) + jnp.mean((back - x)**2),
                (hidden, logits))
      return jax.value_and_grad(loss, has_aux=True)(params)

    params = {k: variables[k] for k in ('encoder', 'tail')}
    (_, (hidden, logits)), grads = step(params, x)
    chex.assert_tree_all_finite(grads)
    self.assertEqual(logits.shape, (2, model.num_classes))
    self.assertLessEqual(float(jnp.abs(hidden).max()), 1.)


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(name='imagenet'), "name='imagenet'"),
      (dict(name=None), 'name=None'),
      (dict(name=['mnist']), 'name='),
      (dict(first_layer='linear'), "first_layer='linear'"),
      (dict(norm='layer'), "norm='layer'"),
      (dict(norm=None), 'norm=None'),
      (dict(num_classes=1), 'num_classes=1'),
      (dict(num_classes=2.5), 'num_classes=2.5'),
      (dict(num_classes=True), 'num_classes=True'),
      (dict(image_shape=(28, 28, 3)), 'image_shape='),
      (dict(image_shape=(28, 28)), 'image_shape='),
      (dict(image_shape=(7, 28, 1)), 'image_shape='),
      (dict(image_shape=(28., 28, 1)), 'image_shape='),
      (dict(image_shape=28), 'image_shape='),
      (dict(num_units=64), 'num_units=64'),
      (dict(first_layer='dense', num_units=1), 'num_units=1'),
  )
  def test_of_get(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      images.get(**{'name': 'mnist', **settings})

  def test_of_arrays(self):
    model, variables = _digits('batch')
    params = variables['encoder']
    tail = functools.partial(images.classify, model, variables['tail'],
                             variables['batch_stats'])
    with self.assertRaisesRegex(ValueError, r'\[B, 8, 8, 1\]'):
      images.encode(model, params, jnp.zeros((2, 8, 8)))
    with self.assertRaisesRegex(ValueError, r'\[B, 8, 8, 1\]'):
      images.patches(model, params, jnp.zeros((2, 28, 28, 1)))
    with self.assertRaisesRegex(ValueError, 'dtype uint8'):
      images.encode(model, params, jnp.zeros((2, 8, 8, 1), jnp.uint8))
    with self.assertRaisesRegex(ValueError, r'\[B, 4, 4, 16\]'):
      images.decode(model, params, jnp.zeros((2, 8, 8, 1)))
    with self.assertRaisesRegex(ValueError, r'\[B, 4, 4, 16\]'):
      tail(jnp.zeros((4, 4, 16)))
    with self.assertRaisesRegex(ValueError, "form='tied'"):
      images.decode(model, params, jnp.zeros((2, 4, 4, 16)), form='tied')
    with self.assertRaisesRegex(ValueError, "statistics='test'"):
      tail(jnp.zeros((2, 4, 4, 16)), statistics='test')

  def test_the_room_names_its_modules(self):
    self.assertIs(models.images, images)
    self.assertContainsSubset(['images', 'norms'], dir(models))
    with self.assertRaises(AttributeError):
      models.no_such_module  # pylint: disable=pointless-statement
