r"""Privatises a text file, word by word, and writes a guarantee card beside it.

  python -m experiments.privatize_text --input=letters.txt \
    --output=letters.private.txt --mechanism=tem --epsilon=3 --oov=uniform

Every word is replaced by a word of a public table through one mechanism of
``jaxdp.mechanisms``. Words are lower-cased; white space and line breaks are
kept and declared public on ``OUTPUT.guarantee.json`` (and ``.txt``), which says
what is promised, under which conditions, and what is not. Two output words
that would touch get one space between them, so the output reads as words again.

``--oov`` says what becomes of a word that the table lacks: ``error`` refuses
the text and names such words, ``unk`` writes ``<unk>``, ``uniform`` draws any
table word, ``keep`` leaves it exactly as written, capitals included, and then
nothing is promised.

A text may be of any size: it is read in batches. The same command continues a
killed run (see ``text_checkpoint``) as if it had never been killed. The key
comes from the operating system's entropy; a run with ``--insecure_seed`` can be
repeated, and so undone, by anyone who knows the seed.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import shutil
import signal
import sys
import time
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

import jaxdp
from experiments import records
from experiments import text_checkpoint
from experiments import text_stream
from jaxdp import embeddings
from jaxdp import guarantees
from jaxdp import mechanisms
from jaxdp import samplers
from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import candidates
from jaxdp.mechanisms import comparable
from jaxdp.mechanisms import custext

# These compute one row of probabilities for each distinct word of a batch.
_ROW_A_WORD = ('tem', 'santext', 'gumbel_exponential')
_DEFAULT_BATCH = 2**16
_SMALLEST_BATCH = 2**10
_LARGEST_BATCH = 2**22
_KEY_BITS = 128
_SAMPLE = 256  # words behind the distances on the card
# Settings without a default that no command line can hold.
_ARRAY_SETTINGS = {'syntax': 'classes'}
# What a mechanism may take from Python alone.
_NO_SETTINGS = {'table', 'epsilon', 'geometry', 'classes'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines a privatised text.

  Attributes:
    input: path of a UTF-8 text.
    output: path of the result; the card and the files of an unfinished run
      stand beside it.
    mechanism: a name of `mechanisms.names()`.
    epsilon: budget per unit distance, > 0.
    table: 'embedded' or a path that `embeddings.load` reads.
    oov: 'error', 'unk', 'uniform' or 'keep'; see the module docstring.
    insecure_seed: None, or a seed in [0, 2**32) for a run to be repeated.
    overwrite: whether an existing output is replaced, at the very end.
    declare_public_table: the caller's word that the table was made without
      this text or anything else that is private.
    releases: how often this text is released in all, this one included.
    settings: further (name, value) pairs of the mechanism's `calibrate`.
  """
  input: str
  output: str
  mechanism: str
  epsilon: float
  table: str = 'embedded'
  oov: str = 'error'
  insecure_seed: int | None = None
  overwrite: bool = False
  declare_public_table: bool = False
  releases: int = 1
  settings: tuple[tuple[str, Any], ...] = ()


def privatize_file(config, *, batch_size=None, checkpoint_seconds=1.,
                   block_bytes=2**18, cache_dir=None):
  """Privatises one text, or goes on where a killed run stopped.

  Args:
    config: the Config.
    batch_size: words a device call, 1 to 2**22; None chooses by mechanism and
      text. A run that goes on keeps its own.
    checkpoint_seconds: least time between two records of the state.
    block_bytes: bytes read at once.
    cache_dir: folder for neighbour tables; see ``candidates.geometry``. The
      output does not depend on it.

  Returns:
    The guarantee card, a dict.

  Raises:
    ValueError: a setting or a file is refused, the text is not UTF-8, or words
      are unknown under 'error'; no output appears.
    OSError: the disk is full, for one; the same command goes on.
  """
  mechanism = _check_config(config)
  _check_batch_size(batch_size)
  files = text_checkpoint.Files.of(config.output)
  text_checkpoint.check_paths(config.input, config.table, files)
  table = _load_table(config.table)
  if config.oov == 'unk' and text_stream.UNKNOWN_WORD in table.words:
    raise ValueError(
        f'table={config.table!r} holds the word {text_stream.UNKNOWN_WORD!r}, '
        "which oov='unk' writes for a word that the table lacks; choose "
        'another oov, or leave that word out with embeddings.subset')
  with open(config.input, 'rb') as file:
    identity = {
        'input': text_checkpoint.input_identity(file),
        'table': embeddings.digest(table),
        **{name: getattr(config, name) for name in (
            'mechanism', 'epsilon', 'settings', 'oov', 'insecure_seed',
            'declare_public_table', 'releases')}}
    record = text_checkpoint.load_record(files, identity)
    if not (record and record['finished']):
      vocabulary = text_stream.Vocabulary(table.words)
      resumed = record is not None
      if resumed and os.path.exists(files.params):
        params = text_checkpoint.load_params(files.params)
      elif resumed:
        params = _calibrate(config, mechanism, table, files, cache_dir)
      else:
        _refuse_existing(config)
        scan = _scan(config, file, table, vocabulary, block_bytes)
        params = _calibrate(config, mechanism, table, files, cache_dir)
        scan, num_kept = _without_kept(scan, file, table, params, block_bytes)
        record = text_checkpoint.new_record(
            identity, _key(config),
            batch_size=batch_size or _batch_size(config, scan.num_words),
            card=_card(config, table, mechanism, params, scan, num_kept))
      replacer = text_stream.Replacer(
          mechanism, text_checkpoint.key_from_json(record['key']),
          _on_device(params), vocabulary, config.oov, record['batch_size'])
      with text_checkpoint.Job(files, record, resumed=resumed) as job:
        if not resumed:
          _refuse_existing(config)  # another run may have ended meanwhile
        _run(job, replacer, file, checkpoint_seconds, block_bytes)
  text_checkpoint.finish(files, record)
  return record['card']


def _check_config(config):
  """Returns the mechanism, or raises ValueError by the field's name."""
  for name in ('input', 'output', 'table'):
    text_checkpoint.check_path(name, getattr(config, name))
  for name in ('overwrite', 'declare_public_table'):
    if not isinstance(getattr(config, name), bool):
      raise ValueError(f'{name}={getattr(config, name)!r} must be True or '
                       'False')
  if not isinstance(config.mechanism, str):
    raise ValueError(f'mechanism={config.mechanism!r} must be one of '
                     f'{mechanisms.names()}')
  mechanism = mechanisms.get(config.mechanism)
  calibration.check_epsilon(config.epsilon, allow_infinite=True)
  if config.mechanism in _ARRAY_SETTINGS:
    name = _ARRAY_SETTINGS[config.mechanism]
    raise ValueError(
        f'mechanism={config.mechanism!r} needs {name!r}, an array with an '
        'entry for each table word, which no flag can hold; call '
        f'jaxdp.mechanisms.get({config.mechanism!r}) from Python, or choose '
        'another mechanism')
  if config.oov not in guarantees.UNKNOWN_POLICIES:
    raise ValueError(f'oov={config.oov!r} must be one of '
                     f'{guarantees.UNKNOWN_POLICIES}')
  seed = config.insecure_seed
  if seed is not None and not (type(seed) is int and 0 <= seed < 2**32):
    raise ValueError(f'insecure_seed={seed!r} must lie in [0, 2**32); a larger '
                     'one would be cut to 32 bits')
  if not (type(config.releases) is int and config.releases >= 1):
    raise ValueError(f'releases={config.releases!r} must be an integer >= 1; '
                     'it counts this release')
  _check_settings(config, mechanism)
  return mechanism


def _check_settings(config, mechanism):
  """Refuses settings that `calibrate` lacks or no command line can hold."""
  settings = config.settings
  if not isinstance(settings, (tuple, list)) or not all(
      isinstance(pair, (tuple, list)) and len(pair) == 2
      and isinstance(pair[0], str) for pair in settings):
    raise ValueError(f'settings={settings!r} must be a tuple of (name, value) '
                     'pairs')
  known = set(inspect.signature(mechanism.calibrate).parameters)
  known -= _NO_SETTINGS
  seen = set()
  for name, value in settings:
    if name in seen:
      raise ValueError(f'setting {name!r} is given twice; give it once')
    seen.add(name)
    if not isinstance(value, (str, bool, int, float)):
      raise ValueError(f'setting {name}={value!r} must be a number, a boolean '
                       'or a word')
    if name not in known:
      raise ValueError(f'setting {name!r} is unknown to {config.mechanism}; it '
                       f'takes {sorted(known) or "none"}')


def _check_batch_size(size):
  if size is not None and not (
      type(size) is int and 1 <= size <= _LARGEST_BATCH):
    raise ValueError(f'batch_size={size!r} must be an int in [1, '
                     f'{_LARGEST_BATCH}], or None')


def _refuse_existing(config):
  if os.path.lexists(config.output) and not config.overwrite:
    raise ValueError(f'output={config.output!r} exists; give --overwrite to '
                     'replace it')


def _load_table(name):
  if name == 'embedded':
    from experiments.datasets import embedded
    return embedded.table()
  try:
    return embeddings.load(name)
  except OSError as e:
    raise ValueError(f'table={name!r} cannot be read: {e.strerror or e}'
                     ) from None


def _scan(config, file, table, vocabulary, block_bytes):
  """Reads the text once, so that a refusal comes before anything is written."""
  size = os.fstat(file.fileno()).st_size
  with records.Progress(size, unit='B') as progress:
    scan = text_stream.scan(file, vocabulary, block_bytes=block_bytes,
                            on_batch=lambda n: progress.update(n, 'checked'))
  if config.oov == 'error' and scan.num_unknown:
    shown = ', '.join(f'{word[:40]!r} (line {line})'
                      for word, line in scan.examples)
    raise ValueError(
        f'input={config.input!r} has {scan.num_unknown} words that the table '
        f'lacks, the first: {shown}; choose --oov=unk, uniform or keep'
        + _capitals(table.words, [word for word, _ in scan.examples]))
  return scan


def _capitals(words, unknown):
  """What to add where the table has an unknown word, but not in lower case."""
  lowered = {word.lower(): word for word in words if word != word.lower()}
  for word in unknown:
    if word in lowered:
      return (f'. Words of a text are lower-cased, and the table holds '
              f'{lowered[word][:40]!r}: lower-case the words of the table')
  return ''


def _without_kept(scan, file, table, params, block_bytes):
  """Returns (scan, tokens promised nothing); its longest line lacks them."""
  if not hasattr(params, 'classes'):
    return scan, 0
  alone = comparable.alone(params.classes)
  if not alone.any():
    return scan, 0
  words = [word for word, is_alone in zip(table.words, alone) if not is_alone]
  rest = text_stream.scan(file, text_stream.Vocabulary(words),
                          block_bytes=block_bytes)
  return (scan._replace(longest_line=rest.longest_line),
          rest.num_unknown - scan.num_unknown)


def _key(config):
  if config.insecure_seed is None:
    return samplers.secure_key(_KEY_BITS)
  return jax.random.key(config.insecure_seed, impl='threefry2x32')


def _batch_size(config, num_words):
  """Words a device call: enough to pay, few enough to lose little to a kill."""
  if config.mechanism in _ROW_A_WORD:
    eighth = -(-num_words // 2**17) * 2**14
    largest = min(max(eighth, _DEFAULT_BATCH), 2**18 if num_words < 2**22
                  else 2**19)
  else:
    largest = _DEFAULT_BATCH
  needed = 1 << max(0, num_words - 1).bit_length()
  return min(largest, max(_SMALLEST_BATCH, needed))


def _calibrate(config, mechanism, table, files, cache_dir):
  """Returns params, stored for a run that goes on: they may take minutes."""
  started = time.monotonic()
  settings = dict(config.settings)
  known = inspect.signature(mechanism.calibrate).parameters
  if (cache_dir is not None and 'geometry' in known
      and settings.get('num_candidates', 'poisson') == 'poisson'):
    settings['geometry'] = candidates.geometry(
        table, max_candidates=settings.pop('max_candidates', None),
        cache_dir=cache_dir)
  params = mechanism.calibrate(table, epsilon=config.epsilon, **settings)
  text_checkpoint.save_params(files.params, params)
  logging.info('calibrated %s in %.1f s', config.mechanism,
               time.monotonic() - started)
  return params


def _on_device(params):
  """Params moved once; 64-bit arrays stay, since moving would round them."""
  return jax.tree.map(
      lambda x: x if np.asarray(x).dtype.itemsize > 4 else jax.device_put(x),
      params)


def _card(config, table, mechanism, params, scan, num_kept):
  """The guarantee card; made before the text, so that it cannot fail late."""
  public = config.table == 'embedded' or config.declare_public_table
  declared = 'declared' if public else 'unknown'
  seeded = config.insecure_seed is not None
  resume = text_checkpoint.Files.of(os.path.basename(config.output)).resume
  card = guarantees.card(
      params.guarantee, mechanism=config.mechanism,
      settings=dict(config.settings),
      table_name=os.path.basename(config.table),
      table_digest=embeddings.digest(table), num_words=len(table.words),
      dimension=table.vectors.shape[1], num_tokens=scan.num_words,
      num_kept=num_kept, num_unknown=scan.num_unknown,
      longest_line=scan.longest_line, unknown_policy=config.oov,
      releases=config.releases, public_table=declared,
      independent_vocabulary=declared,
      entropy_bits=None if seeded else _KEY_BITS, is_seeded=seeded,
      key_storage=f'in {resume}, mode 0600, beside the output; deleted once '
      'the output was complete (what a disk keeps of deleted files stays)',
      **_distances(mechanism, params, len(table.words)))
  return card | {
      'distances_from': f'{_SAMPLE} words of the table at most, drawn with a '
                        'fixed seed, and those comparable with them; the '
                        'diameter is an upper bound',
      'after_the_mechanism': 'one space between output words that would touch',
      'made_with': f'jaxdp {jaxdp.__version__}, jax {jax.__version__}'}


def _distances(mechanism, params, num_words):
  """Distances that give epsilon a meaning, from a fixed sample of the table."""
  classes = np.asarray(getattr(params, 'classes', np.zeros(num_words, int)))
  paired = np.flatnonzero(~comparable.alone(classes))
  size = max(1, min(len(paired), _SAMPLE, 2**24 // num_words))
  ids = paired[np.random.default_rng(0).choice(len(paired), size,
                                               replace=False)]
  distance = np.array(mechanism.distances(ids.astype(np.int32), params))
  distance[np.arange(size), ids] = np.nan
  distance[np.isinf(distance)] = np.nan
  return {'neighbor_distance': float(np.median(np.nanmin(distance, axis=1))),
          'pair_distance': float(np.nanquantile(distance, 0.95)),
          'diameter': _diameter(params.guarantee, classes, ids, distance),
          'incomparable_pairs': comparable.incomparable_pairs(classes)}


def _diameter(guarantee, classes, ids, distance):
  """A bound on the distance of comparable words; None if a class is missing."""
  if guarantee.metric == custext.METRIC:
    return 1.
  own = classes[ids]
  if set(own) != set(classes[~comparable.alone(classes)]):
    return None
  # Any two words are at most twice as far apart as either is from a third.
  radius = 2 * np.nanmax(distance, axis=1)
  return float(max(radius[own == c].min() for c in set(own)))


def _run(job, replacer, file, checkpoint_seconds, block_bytes):
  """Privatises what is left of the text; after any stop the record is current.

  At the end the record says so, and what remains is `text_checkpoint.finish`.
  """
  job.save()
  first, started = job.state, time.monotonic()
  stream = text_stream.batches(
      file, replacer.size, offset=first.input_offset, block_bytes=block_bytes)
  size = job.record['identity']['input']['size']
  try:
    with records.Progress(size, initial=first.input_offset,
                          unit='B') as progress:
      for pending in _one_ahead(replacer, stream, first.num_words):
        progress.update(_append(job, replacer, pending), 'written')
        job.save_if_due(checkpoint_seconds)
    _check_unchanged(job, file)
    job.record['finished'] = True
    job.save()
  except text_stream.TextError:
    job.discard()
    raise
  except BaseException:
    with contextlib.suppress(OSError):
      job.save()
    raise
  words = job.state.num_words - first.num_words
  logging.info('%d words, %.0f words/s', words,
               words / max(time.monotonic() - started, 1e-9))


def _check_unchanged(job, file):
  """Refuses a text that another program wrote to while it was read."""
  if (text_checkpoint.input_identity(file) != job.record['identity']['input']
      or job.state.num_words != job.record['card']['tokens']['total']):
    raise text_stream.TextError('input: changed while it was read; start again')


def _one_ahead(replacer, stream, start):
  """Yields batches in order, each while the device works on the next."""
  previous = None
  for batch in stream:
    pending = replacer.send(batch, start)
    start += len(batch.tokens)
    if previous is not None:
      yield previous
    previous = pending
  if previous is not None:
    yield previous


def _append(job, replacer, pending):
  """Writes a batch, takes its end as the state reached, returns its bytes."""
  state, batch = job.state, pending.batch
  text, glue = replacer.vocabulary.render(batch, replacer.fetch(pending),
                                          state.glue)
  num_bytes = batch.num_bytes
  job.append(text, state._replace(
      input_offset=state.input_offset + num_bytes,
      num_words=state.num_words + len(batch.tokens), glue=glue))
  return num_bytes


def _interrupt(*unused):
  raise KeyboardInterrupt


def define_flags():
  """Defines the flags; the binary's own, so that a program may import many."""
  flags.DEFINE_string('input', None, 'UTF-8 text to privatise.')
  flags.DEFINE_string('output', None, 'Where the result goes; its card and the '
                      'files of an unfinished run stand beside it.')
  flags.DEFINE_enum('mechanism', 'truncated_gumbel', mechanisms.names(),
                    'Word mechanism.')
  flags.DEFINE_float('epsilon', None, 'Budget per unit distance.')
  flags.DEFINE_string('table', 'embedded', "'embedded' or a file of vectors.")
  flags.DEFINE_enum('oov', 'error', guarantees.UNKNOWN_POLICIES,
                    'What becomes of words that the table lacks.')
  flags.DEFINE_integer('insecure_seed', None, 'Seed of a run to be repeated; '
                       'gives no privacy against those who know it.')
  flags.DEFINE_bool('overwrite', False, 'Replace an existing output.')
  flags.DEFINE_bool('declare_public_table', False, 'You state that the table '
                    'was made without private data; it is put on the card.')
  flags.DEFINE_integer('releases', 1, 'Releases of this text in all, this one '
                       'included.')
  flags.DEFINE_multi_string('setting', [], 'name=value of the mechanism, as in '
                            '--setting=noise=clipped; may be repeated.')
  flags.DEFINE_string('cache_dir', None, 'Folder, writable by you alone, where '
                      "a table's nearest words are kept for the next text.")
  flags.DEFINE_integer('batch_size', None, 'Words a device call.',
                       lower_bound=1, upper_bound=_LARGEST_BATCH)


def parse_setting(text):
  """Returns the (name, value) of ``name=value``; the value may be JSON."""
  name, equals, value = text.partition('=')
  if not (name and equals):
    raise ValueError(f'setting={text!r} must read name=value')
  try:
    return name, json.loads(value)
  except ValueError:
    return name, value


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  signal.signal(signal.SIGTERM, _interrupt)
  values = {f.name: flags.FLAGS[f.name].value
            for f in dataclasses.fields(Config) if f.name != 'settings'}
  files = text_checkpoint.Files.of(values['output'])
  if not jax.config.jax_compilation_cache_dir:
    # Compiling may take longer than what a killed run had left to do.
    jax.config.update('jax_compilation_cache_dir', files.programs)
  try:
    settings = tuple(map(parse_setting, flags.FLAGS.setting))
    privatize_file(Config(settings=settings, **values),
                   batch_size=flags.FLAGS.batch_size,
                   cache_dir=flags.FLAGS.cache_dir)
  except KeyboardInterrupt:
    sys.exit('privatize_text: stopped; the same command goes on from here')
  except (ValueError, OSError) as e:
    if isinstance(e, ValueError) and not os.path.exists(files.resume):
      shutil.rmtree(files.programs, ignore_errors=True)
    sys.exit('privatize_text: ' + ' '.join(str(e).split()))


if __name__ == '__main__':
  define_flags()
  flags.mark_flags_as_required(['input', 'output', 'epsilon'])
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main)
