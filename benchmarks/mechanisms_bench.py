r"""Words a second of the mechanisms beside NumPy and a peer.

  python -m benchmarks.mechanisms_bench --peer_python=ENV/bin/python

Words are drawn evenly from the table; ``num_distinct`` says how many of a batch
differ, for TEM and SanText work once for each distinct word, where NumPy's
smaller batches hardly repeat one: text, whose words repeat more, is faster.
``--table`` reads word vectors from a file; without it the tables are random
normal, 50,000 x 100 and 33,860 x 300 (the size of the peer's own GloVe). Each
mechanism gets an epsilon at which it changes a part of the words.

The first call is timed, then its answer checked before any other is: the
nearest words of some queries are the float64 ones, the noise has its law, and
each mechanism leaves as many words unchanged, and moves the others as far, as
each NumPy baseline does, within 6 standard deviations. ``numpy`` is
what the papers' authors would write: batches of 512, one float32 matrix
product, an arg-min. ``numpy_table``, for the two mechanisms that have one, is
NumPy with our table of nearest words: a look-up, noise, an arg-min. The peer is
mldp-text in an interpreter of its own (``--peer_python``), on the same table by
its default path, one word at a time; scikit-learn runs there too where it is
not installed here.

``--threads=2`` gives each of two Python threads half a batch, by ``start``
offsets; the result must equal that of one call.

References: Feyisetan et al. (2020); Xu et al. (2020); Yue et al. (2021);
Carvalho et al. (2021); Meisenbacher et al. (2024).
"""

import concurrent.futures
import contextlib
import functools
import math
import tempfile

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import exactness
from benchmarks import harness
from benchmarks import mechanism_baselines
from benchmarks import mldp_peer
from benchmarks import neighbors_bench
from benchmarks import samplers_bench
from jaxdp import embeddings
from jaxdp import mechanisms
from jaxdp import neighbors
from jaxdp import samplers
from jaxdp.mechanisms import candidates
from jaxdp.mechanisms import multivariate_laplace

_NEAR = 64  # columns of a neighbour table
_CHECKED = 64  # rows whose nearest word is searched again in float64
_ROWS = 2048  # of the neighbour table in one call
_PATIENCE = 120.  # seconds of rounds a row; a slow contestant gets fewer
_SIZES = ((50_000, 100), (33_860, 300))
_MECHANISMS = ('multivariate_laplace', *mechanism_baselines.GEOMETRIC, 'tem',
               'santext')


def random_table(num_words, dim, seed=0):
  """A table of random normal vectors."""
  vectors = np.random.default_rng(seed).standard_normal(
      (num_words, dim), np.float32)
  return embeddings.make_table([f'w{i}' for i in range(num_words)], vectors)


def choose_epsilon(name, vectors, geometry):
  """A budget at which the mechanism changes a good part of the words."""
  num, dim = vectors.shape
  few = vectors[np.random.default_rng(0).integers(0, num, (2, 1000))]
  apart = float(np.mean(np.linalg.norm(few[0] - few[1], axis=1)))
  log_num = math.log(num)
  if name == 'multivariate_laplace':
    return 2 * math.sqrt(2 * log_num * dim) / apart
  if name == 'truncated_gumbel':
    return 2 * (5 + 2 * log_num) / geometry.minimum
  if name == 'gumbel_exponential':
    nearest = float(np.median(geometry.neighbor_distances[:, 1]))
    return 2 * log_num / geometry.minimum + math.log(log_num) / nearest
  return 2 * log_num / apart


def calibrate(name, table, geometry):
  """Params of a mechanism, its arrays on the device; its epsilon."""
  epsilon = choose_epsilon(name, table.vectors, geometry)
  has_table = name in mechanism_baselines.GEOMETRIC
  settings = {'geometry': geometry} if has_table else {}
  params = mechanisms.get(name).calibrate(table, epsilon=epsilon, **settings)
  return jax.tree.map(jnp.asarray, params)


def baselines(name, params, rng):
  """ids -> ids of NumPy, by name of the form."""
  made = {'numpy': mechanism_baselines.from_vectors(name, params, rng)}
  if name in mechanism_baselines.GEOMETRIC:
    made['numpy_table'] = mechanism_baselines.from_table(name, params, rng)
  return made


def check_same_law(name, vectors, ids, ours, theirs):
  """Raises ValueError where outputs for ids and ids[:M] are of two laws."""
  moved = lambda i, out: np.linalg.norm(vectors[i] - vectors[out], axis=1)
  few = ids[:len(theirs)]
  for label, of in (('unchanged', lambda i, out: np.float64(i == out)),
                    ('distance', moved)):
    a, b = of(ids, ours), of(few, theirs)
    slack = 6 * math.sqrt(a.var() / len(a) + b.var() / len(b)) + (
        6 * max(a.max(), b.max()) / len(b))
    if not abs(a.mean() - b.mean()) <= slack:
      raise ValueError(f'{name}: mean {label} is {a.mean():.4g}, by NumPy '
                       f'{b.mean():.4g}; they may differ by {slack:.2g}')


def check(name, key, ids, params, out, theirs, rng):
  """Raises ValueError where ours, or others' of the first ids, are wrong."""
  vectors = np.asarray(params.vectors)
  for who, their_out in theirs.items():
    check_same_law(f'{name}, {who}', vectors, ids, out, their_out)
  if name != 'multivariate_laplace':
    return
  noisy = np.asarray(multivariate_laplace.noisy_vectors(
      key, jnp.asarray(ids), params.vectors, params.epsilon,
      samplers.split_index(0)))
  noises = {'jaxdp': noisy - vectors[ids],
            'numpy': mechanism_baselines.numpy_noise(
                rng, len(ids), vectors.shape[1], params.epsilon)}
  for who, noise in noises.items():
    samplers_bench.check_law(who, noise * float(params.epsilon),
                             samplers_bench.vector_laws(vectors.shape[1]))
  few = slice(None, _CHECKED)
  right = mldp_peer.nearest_share(noisy[few], vectors, out[few])
  if right < 1:
    raise ValueError(f'{name}: {1 - right:.3g} of the answers are not the '
                     'nearest word')


def in_threads(call, key, ids, params, threads):
  """``call(key, ids, params, start)`` of equal parts, each in its thread."""
  size = len(ids) // threads
  starts = [samplers.split_index(i * size) for i in range(threads)]
  parts = [jnp.asarray(ids[i * size:(i + 1) * size]) for i in range(threads)]
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    out = pool.map(lambda part, start: jax.block_until_ready(
        call(key, part, params, start)), parts, starts)
    return np.concatenate(list(out))


def compiled(name, key, ids, params, threads):
  """ids -> ids on so many threads, and its `harness.Compiled`.

  Raises:
    ValueError: the parts put together are not what one call returns.
  """
  start, privatize = samplers.split_index(0), mechanisms.get(name).privatize
  part = jnp.asarray(ids[:len(ids) // threads])
  ahead = harness.compile_ahead(privatize, key, part, params, start)
  if threads == 1:
    return lambda ids: ahead.call(key, jnp.asarray(ids), params, start), ahead
  call = lambda ids: in_threads(ahead.call, key, ids, params, threads)
  check_parts(name, call(ids), privatize(key, ids, params))
  return call, ahead


def check_parts(name, parts, whole):
  """Raises ValueError unless a batch in parts is the batch in one call."""
  wrong = int(np.sum(np.asarray(parts) != np.asarray(whole)))
  if wrong:
    raise ValueError(f'{name}: {wrong} of {len(whole)} words differ between '
                     'threads and a single call')


def mechanism_row(name, params, batch, *, numpy_words, rounds, threads=1,
                  peer=None, peer_words=30):
  """Checks and times one mechanism on batches of one size.

  Args:
    name: of the mechanism.
    params: of `calibrate`.
    batch, numpy_words, peer_words: words each does in a call.
    rounds: timed calls of each contestant; the peer has three.
    threads: Python threads that share a batch of ours.
    peer: `harness.Peer` of ``mldp_peer.setup``, or None.
  """
  rng, key = np.random.default_rng(1), jax.random.key(0)
  batches = rng.integers(0, len(params.vectors), (4, batch), np.int32)
  few = batches[:, :numpy_words]
  ours, ahead = compiled(name, key, batches[0], params, threads)
  out, first = harness.once(lambda: ours(batches[0]))
  others = baselines(name, params, rng)
  check(name, key, batches[0], params, np.asarray(out),
        {who: theirs(few[0]) for who, theirs in others.items()}, rng)
  measured = harness.interleave(
      {'jaxdp': harness.rotating(ours, batches)} | {
          who: harness.rotating(theirs, few) for who, theirs in others.items()},
      max(3, min(rounds, int(_PATIENCE / first.wall))))
  clock = 'cpu' if threads == 1 else 'wall'
  row = _described(name, params, batch, threads, ahead) | harness.fields(
      measured['jaxdp'], clock=clock, units=batch) | {
          'first_run_s': first.wall,
          'num_distinct': len(np.unique(batches[0])),
          'unchanged': float(np.mean(out == batches[0]))}
  for who in others:
    row |= _beside(who, measured, clock, batch, few.shape[1])
  if peer is not None:
    row |= peer_fields(peer, lambda: ours(batches[1]), params,
                       batches[0, :peer_words], batch, clock)
  return row | {'machine': harness.machine()}


def _described(name, params, batch, threads, ahead):
  num, dim = params.vectors.shape
  return {'benchmark': 'mechanisms', 'mechanism': name,
          'name': f'{name}/V={num},D={dim},B={batch},f32,threads={threads}',
          'num_words': num, 'dim': dim, 'batch': batch, 'threads': threads,
          'epsilon': params.guarantee.epsilon, 'ids': 'uniform',
          'compile_s': ahead.seconds.wall, 'temp_bytes': ahead.temp_bytes}


def _beside(who, measured, clock, units, their_units):
  """Fields of another contestant: its words, their rate, the ratio to it."""
  theirs = harness.fields(measured[who], clock=clock, units=their_units)
  return {f'{who}_words': their_units, f'{who}_n': theirs['n'],
          f'{who}_words_per_s': theirs['words_per_s'],
          f'ratio_to_{who}': harness.ratio(measured['jaxdp'], measured[who],
                                           clock) * units / their_units}


def peer_fields(peer, ours, params, ids, batch, clock):
  """Checks the peer's answers, then times it in turn with ours, three times."""
  ids = [int(i) for i in ids]
  (out, noise), _ = peer.ask(ids=ids, noise=True)
  recall = mldp_peer.check(np.asarray(params.vectors), float(params.epsilon),
                           ids, np.asarray(out), np.asarray(noise))
  measured = harness.interleave(
      {'jaxdp': ours, 'peer': lambda: peer.seconds(ids=ids)}, 3)
  return _beside('peer', measured, clock, batch, len(ids)) | {
      'peer': 'mldp-text', 'peer_version': peer.ask()[0],
      'peer_recall': recall}


def check_neighbors(vectors, queries, ours, their_ids=None):
  """Raises ValueError unless our (ids, distances) are right and as theirs."""
  ids, distances = (np.asarray(part) for part in ours)
  exactness.Check(vectors, [queries], ids.shape[1]).agreement(
      'neighbor table', lambda _: ids, exact=True)
  few = slice(None, _CHECKED)
  for label, wanted in (('float64', ids), ('the other', their_ids)):
    if wanted is None:
      continue
    gaps = np.float64(queries[few, None]) - vectors[np.asarray(wanted[few])]
    wanted = np.linalg.norm(gaps, axis=-1)
    off = np.abs(distances[:len(wanted)] - wanted)
    if not np.all(off <= 1e-5 * np.abs(wanted) + 1e-4):
      raise ValueError(f'neighbor table: distances are {off.max():.3g} off '
                       f'those of {label}')


def neighbor_calls(vectors, queries, k, python, stack):
  """Contestants, checked; ours compiled and its first call; who is out.

  scikit-learn runs here, or in the interpreter ``python`` until ``stack`` is
  closed.
  """
  arrays = jax.device_put((queries, vectors))
  ahead = harness.compile_ahead(
      lambda q, v: neighbors.k_nearest(q, v, k), *arrays)
  calls = {'jaxdp': functools.partial(ahead.call, *arrays)}
  mine, first = harness.once(calls['jaxdp'])
  check_neighbors(vectors, queries, mine)
  case = neighbors_bench.Case(*vectors.shape, len(queries), k)
  folder = stack.enter_context(tempfile.TemporaryDirectory())
  np.save(f'{folder}/table.npy', vectors)
  np.save(f'{folder}/queries.npy', queries[None])
  try:
    peer = neighbors_bench.in_peer(case, 'sklearn', folder, python, stack)
  except (ImportError, RuntimeError) as e:
    return calls, ahead, first, {
        'sklearn': f'{e}; install it or name a --peer_python that has it'}
  check_neighbors(vectors, queries, mine, peer.answer(0))
  return calls | {'sklearn': lambda: peer.timed(0)}, ahead, first, {}


def neighbor_row(vectors, num_rows, rounds, python=None):
  """Times the neighbour table of some rows; the whole is scaled from them."""
  num, k = len(vectors), min(_NEAR, len(vectors))
  queries = vectors[:num_rows]
  with contextlib.ExitStack() as stack:
    calls, ahead, first, skipped = neighbor_calls(
        vectors, queries, k, python, stack)
    measured = harness.interleave(calls, rounds)
  row = {'benchmark': 'mechanisms', 'mechanism': 'neighbor_table',
         'name': f'neighbor_table/V={num},D={vectors.shape[1]},K={k},f32',
         'note': f'measured on {len(queries)} rows; whole_table_* is scaled',
         'skipped': skipped, 'compile_s': ahead.seconds.wall,
         'temp_bytes': ahead.temp_bytes, 'machine': harness.machine()}
  for who, theirs in measured.items():
    seconds = float(np.median([s.cpu for s in theirs.calls]))
    row[f'whole_table_cpu_s_{who}'] = seconds * num / len(queries)
  if 'sklearn' in measured:
    row['ratio_to_sklearn'] = harness.ratio(*measured.values())
  return row | harness.fields(measured['jaxdp'], units=len(queries),
                              unit='rows') | {'first_run_s': first.wall}


def rows(tables, batches, *, peer_python=None, only=None, **settings):
  """Yields, for each table, the neighbour table's row and the mechanisms'.

  Args:
    tables: iterable of EmbeddingTable.
    batches: words of a call, of each row.
    peer_python: interpreter of the peer, or None.
    only: names of mechanisms; None for all.
    **settings: of `mechanism_row`.
  """
  if peer_python is not None:
    mldp_peer.check_python(peer_python)
  for table in tables:
    yield neighbor_row(table.vectors, _ROWS, settings['rounds'], peer_python)
    geometry = candidates.geometry(table)
    for name in only or _MECHANISMS:
      params = calibrate(name, table, geometry)
      has_peer = peer_python is not None and name == 'multivariate_laplace'
      with (mldp_peer.start(peer_python, table.vectors,
                            params.guarantee.epsilon)
            if has_peer else contextlib.nullcontext()) as peer:
        for batch in batches:
          yield mechanism_row(name, params, batch, peer=peer, **settings)


def define_flags():
  """Defines the flags of this binary."""
  flags.DEFINE_string('table', None, 'Word vectors; random normal without it.')
  flags.DEFINE_multi_enum('only', None, _MECHANISMS, 'Which mechanisms.')
  flags.DEFINE_string('peer_python', None, 'Interpreter with mldp-text, '
                      'and scikit-learn if it is missing here.')
  for name, value, doc in (
      ('peer_words', 30, 'Words the peer does in a call.'),
      ('numpy_words', 1024, 'Words NumPy does in a call.'),
      ('rounds', 20, 'Timed calls of each.'),
      ('threads', 1, 'Python threads that share a batch; above 1, wall time.')):
    flags.DEFINE_integer(name, value, doc, lower_bound=1)
  flags.DEFINE_bool('quick', False, 'A table of 2,000 words, 512 in a call.')
  flags.DEFINE_bool('one_core', True, 'Tie the process to one core; not with '
                    'several threads.')
  flags.DEFINE_string('out', None, 'File of the rows; standard output else.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  if values.one_core and values.threads == 1:
    harness.pin()
  tables = ([embeddings.load(values.table)] if values.table else
            (random_table(*size) for size in (
                ((2_000, 100),) if values.quick else _SIZES)))
  harness.emit(rows(
      tables, (512,) if values.quick else (2048, 65_536),
      rounds=3 if values.quick else values.rounds,
      **{name: values[name].value for name in (
          'peer_python', 'peer_words', 'numpy_words', 'threads', 'only')}),
      values.out)


if __name__ == '__main__':
  define_flags()
  jax.config.config_with_absl()
  app.run(main)
