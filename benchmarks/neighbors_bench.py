r"""Nearest words: ours beside naive JAX, NumPy, faiss and scikit-learn.

  python -m benchmarks.neighbors_bench --V=50k,200k --D=100,300 --B=2048
  python -m benchmarks.neighbors_bench --k=64 --V=50k --D=100 --B=1024
  python -m benchmarks.neighbors_bench --linear

Every contestant's answers are checked in float64 before it is timed: ours must
be the nearest rows themselves, the others may be as wrong as their arithmetic.
Then all of them take turns, over four batches of queries, each call between two
matrix products. One CPU device is timed in CPU seconds on one core; two
devices, and a GPU, in wall seconds.

  naive    jitted `argmin` of the whole ``[B, V]`` matrix, norms precomputed
  numpy    the same by sgemm and `argmin`
  faiss    IndexFlatL2. Below B D = 128,000 (`distance_compute_blas_threshold`)
           it goes query by query, ten times as slow: left out below B = 2048
  sklearn  NearestNeighbors, brute force

With ``--k`` queries are rows of the table, as for a table of neighbours, and
ours is float32. A peer that is not installed here runs in the interpreter
``--peer_python``. With ``--linear`` ours alone: seconds a (word x V x D), and
the largest deviation.
"""

import contextlib
import functools
import itertools
import os
import tempfile
from typing import NamedTuple

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import exactness
from benchmarks import harness
from experiments import records
from jaxdp import neighbors
from jaxdp.neighbors import groups
from jaxdp.neighbors import scan
from jaxdp.neighbors import search

OURS = ('float32', 'certified', 'auto')
OTHERS = ('naive', 'numpy', 'faiss', 'sklearn')
_BATCHES = 4
_BASELINE = {'role': 'baseline', 'dtype': 'float32'}
# A cross: all V at one B, all B at one V, and the far corner.
_LINEAR = dict.fromkeys(
    [(1000 * V, 1024) for V in (12, 25, 50, 100, 200, 400)]
    + [(50_000, B) for B in (256, 1024, 4096, 16_384)] + [(400_000, 4096)])


class Case(NamedTuple):
  """One size of problem and how it is run."""
  V: int
  D: int
  B: int
  k: int = 1
  devices: int = 1

  def name(self, impl):
    """``nearest/V=50000,D=300,B=2048,float32``."""
    size = f'V={self.V},D={self.D},B={self.B}'
    size += f',k={self.k}' if self.k > 1 else ''
    size += f',devices={self.devices}' if self.devices > 1 else ''
    return f'{"k_" if self.k > 1 else ""}nearest/{size},{impl}'


class Contestant(NamedTuple):
  """Who answers batch i, and what a row says of it."""
  answer: object  # i -> ids
  timed: object  # i -> what `harness.once` takes
  facts: dict
  later: object = dict  # () -> facts that take calls, so after the first


def placed(case, table, batches):
  """Mesh, table and batches; with two devices the queries are split."""
  if case.devices == 1:
    return None, *jax.device_put((table, batches))
  mesh = jax.make_mesh((case.devices,), ('queries',),
                       axis_types=(jax.sharding.AxisType.Auto,),
                       devices=jax.devices()[:case.devices])
  put = lambda a, *axes: jax.device_put(a, jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(*axes)))
  return mesh, put(table), [put(batch, 'queries') for batch in batches]


def ours(case, mesh, table, batches, precisions):
  """Yields (name, `Contestant`) of the library; one program a format."""
  # As the public functions spell it: else it would be another program.
  more = () if case.k == 1 else (case.k,)
  run, programs = search.compiled(mesh, *more), {}
  find = neighbors.nearest if case.k == 1 else neighbors.k_nearest
  for precision in precisions if case.k == 1 else ['float32']:
    ready = neighbors.prepare(table, precision=precision)
    if ready.format not in programs:
      programs[ready.format] = _compile_facts(
          harness.compile_ahead(run, batches[0], ready))
    answer = functools.partial(lambda i, ready: find(
        batches[i], ready, *more, mesh=mesh)[0], ready=ready)
    facts = {'role': 'ours', 'precision': precision, 'dtype': ready.format,
             'tiling': _tiling(case, ready)}
    yield precision, Contestant(
        answer, answer, facts | programs[ready.format],
        functools.partial(_certified, case, run, batches, ready))


def _compile_facts(program):
  return {'compile_s': program.seconds.wall, 'temp_bytes': program.temp_bytes,
          'compile_cpu_s': program.seconds.cpu, 'bytes_xla': program.bytes_xla}


def _tiling(case, ready):
  if case.k > 1:
    return {'queries': groups.block_size(ready)}
  itemsize = 4 if ready.reduced is None else ready.reduced.dtype.itemsize
  return scan.tiling(case.D, itemsize).fit(case.V)._asdict()


def _certified(case, run, batches, ready):
  """``certified_share``, of the queries that took no slower step."""
  slow = sum(int(sum(run(batch, ready)[2])) for batch in batches)
  return {'certified_share': 1 - slow / (case.B * len(batches))}


@functools.partial(jax.jit, static_argnums=3)
def naive(queries, vectors, sq_norms, k):
  """Nearest rows as a JAX user writes it."""
  scores = sq_norms[None] - 2 * queries @ vectors.T
  return (jnp.argmin(scores, axis=1) if k == 1
          else jax.lax.top_k(-scores, k)[1])


def in_jax(case, table, batches):
  """The `Contestant` of `naive`."""
  sq_norms = jnp.sum(table * table, axis=1)
  program = harness.compile_ahead(naive, batches[0], table, sq_norms, case.k)
  answer = lambda i: program.call(batches[i], table, sq_norms)
  return Contestant(answer, answer, _BASELINE | _compile_facts(program))


def in_numpy(case, table, batches):
  """The `Contestant` of NumPy: whole matrix, in place."""
  half = np.einsum('ij,ij->i', table, table) / 2

  def answer(i):
    scores = batches[i] @ table.T
    np.subtract(half, scores, out=scores)
    if case.k == 1:
      return np.argmin(scores, axis=1)
    near = np.argpartition(scores, case.k, axis=1)[:, :case.k]
    order = np.argsort(np.take_along_axis(scores, near, axis=1), axis=1)
    return np.take_along_axis(near, order, axis=1)

  return Contestant(answer, answer, _BASELINE)


def peer_setup(package, folder, k, threads):
  """faiss or scikit-learn, here or in another interpreter."""
  import numpy as np  # pylint: disable=redefined-outer-name,reimported
  table, queries = (np.load(f'{folder}/{n}.npy') for n in ('table', 'queries'))
  if package == 'faiss':
    import faiss
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatL2(table.shape[1])
    index.add(table)
    return lambda turn: index.search(queries[turn], k)[1]
  import sklearn.neighbors
  found = sklearn.neighbors.NearestNeighbors(
      n_neighbors=k, algorithm='brute', n_jobs=threads).fit(table)
  return lambda turn: found.kneighbors(queries[turn], return_distance=False)


def in_peer(case, package, folder, python, stack):
  """The `Contestant` of a package: here, or in the interpreter ``python``."""
  settings = {'package': package, 'folder': folder, 'k': case.k,
              'threads': case.devices}
  try:
    return Contestant(*[peer_setup(**settings)] * 2, _BASELINE)
  except ImportError:
    if python is None:
      raise
  peer = stack.enter_context(harness.Peer(python, peer_setup, **settings))
  return Contestant(lambda i: np.array(peer.ask(turn=i)[0]),
                    lambda i: peer.seconds(turn=i), _BASELINE | {'peer': True})


def contestants(case, table, batches, impls, python, stack):
  """Contestants by name, and why some are missing."""
  mesh, *on_device = placed(case, table, batches)
  made = dict(ours(case, mesh, *on_device, [i for i in impls if i in OURS]))
  folder = stack.enter_context(tempfile.TemporaryDirectory())
  if {'faiss', 'sklearn'} & set(impls):
    np.save(f'{folder}/table.npy', table)
    np.save(f'{folder}/queries.npy', np.stack(batches))
  skipped = {}
  for impl in (i for i in OTHERS if i in impls):
    skipped[impl] = unfit(case, impl)
    if skipped[impl] is None:
      try:
        made[impl] = (in_jax(case, *on_device) if impl == 'naive' else
                      in_numpy(case, table, batches) if impl == 'numpy' else
                      in_peer(case, impl, folder, python, stack))
      except (ImportError, RuntimeError) as e:
        skipped[impl] = f'{e}; install it or name a --peer_python that has it'
  return made, {name: why for name, why in skipped.items() if why}


def unfit(case, impl):
  """Why a contestant is left out of a case, or None."""
  if impl == 'faiss' and (case.B < 2048 or case.B * case.D < 128_000):
    return 'B < 2048 or B D < 128000: faiss would go query by query'
  if jax.default_backend() == 'cpu':
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  else:
    memory = (jax.devices()[0].memory_stats() or {}).get('bytes_limit', 2**33)
  need = 4 * case.B * case.V
  if impl in ('naive', 'numpy') and need > memory / 4:
    return f'a matrix of {need / 2**30:.0f} GiB in {memory / 2**30:.0f} GiB'
  return None


def checked(case, check, made):
  """Facts of the contestants by name; raises where an answer is wrong."""
  facts = {}
  for name, who in made.items():
    call = functools.partial(who.answer, 0)
    first, exact = harness.once(call)[1].wall, who.facts['role'] == 'ours'
    same = check.agreement(case.name(name), who.answer, exact)
    peak = None if 'peer' in who.facts else harness.peak_bytes(call)
    facts[name] = who.facts | who.later() | {
        'agreement_with_float64': same, 'first_run_s': first,
        'num_checked': _BATCHES * len(check.index),
        'peak_bytes': peak and max(peak, who.facts.get('temp_bytes', 0))}
  return facts


def entered(case, impls, python, stack):
  """Checked contestants, their facts, and why others are missing."""
  problem = exactness.problem(
      'gaussian', case.V, case.D, case.B, case.k, num_batches=_BATCHES)
  made, skipped = contestants(case, *problem, impls, python, stack)
  return made, checked(case, exactness.Check(*problem, case.k), made), skipped


def turns(made):
  """Functions of no argument by name: a batch after the other."""
  return {name: harness.rotating(who.timed, range(_BATCHES))
          for name, who in made.items()}


def run_case(case, impls, repeats, python=None):
  """Checks and times a case; yields one row a contestant.

  Args:
    case: `Case`.
    impls: names among `OURS` and `OTHERS`.
    repeats: timed calls of each.
    python: interpreter of peers that are not installed here.

  Raises:
    ValueError: a contestant's answer is wrong.
  """
  with contextlib.ExitStack() as stack:
    made, facts, skipped = entered(case, impls, python, stack)
    before, bandwidth = harness.roof(), harness.stream()
    measured = harness.interleave(turns(made), repeats)
  around = {'roof_before': before._asdict(),
            'roof_after': harness.roof()._asdict(),
            'roof_bfloat16': harness.roof(dtype='bfloat16')._asdict(),
            'bandwidth_bytes_per_s': bandwidth, 'skipped': skipped}
  for name in made:
    itemsize = 2 if facts[name]['dtype'] == 'bfloat16' else 4
    row = row_of(case, name, measured, bandwidth, itemsize)
    yield row | facts[name] | around | harness.machine()


def row_of(case, impl, measured, bandwidth, itemsize=4):
  """Sizes, times, shares and ratios of one contestant."""
  clock, mine = harness.clock(case.devices), measured[impl]
  flops = 2 * case.V * case.D * case.B
  traffic = itemsize * case.D * (case.V + case.B) + 8 * case.B * case.k
  row = {'benchmark': 'neighbors', 'name': case.name(impl), 'impl': impl,
         'V': case.V, 'D': case.D, 'B': case.B, 'k': case.k,
         'n_devices': case.devices} | harness.fields(
             mine, clock=clock, flops=flops, units=case.B, unit='words',
             bytes_min=traffic, bandwidth=bandwidth)
  if jax.default_backend() != 'cpu':  # scores are written, then read
    row['frac_bandwidth_scores'] = row['frac_bandwidth'] * (
        1 + 8 * case.V * case.B / traffic)
  row['bound'] = max(('compute', 'bandwidth'), key=lambda b: row[f'frac_{b}'])
  for other, theirs in measured.items():
    if other in OTHERS and other != impl:
      row[f'ratio_to_{other}'] = harness.ratio(mine, theirs, clock)
  return row


def fit(rows):
  """The row of ``--linear``: seconds a (word x V x D) of ours over cases.

  The fit is the geometric mean of the shares of the product, which take the
  machine's drift out; ``max_deviation`` is the largest factor off it, less 1.
  """
  logs = np.log([row['frac_compute'] for row in rows])
  off = np.abs(logs - np.mean(logs))
  roof = np.median([row['roof_flops_per_s'] for row in rows])
  impl = rows[0]['impl']
  return {'benchmark': 'neighbors', 'name': f'nearest/linear,{impl}',
          'role': 'fit', 'impl': impl, 'cases': len(rows),
          'seconds_per_word_row_dim': float(2 / roof / np.exp(np.mean(logs))),
          'max_deviation': float(np.expm1(np.max(off))),
          'worst': rows[int(np.argmax(off))]['name']} | harness.machine()


def sizes(values):
  """Integers of a list flag; ``50k`` is 50,000."""
  return [int(float(v[:-1]) * 1000) if v.endswith('k') else int(v)
          for v in values]


def cases_of(values):
  """The `Case` list that the flags ask for."""
  make = functools.partial(Case, k=values.k, devices=int(values.devices))
  rows, dims, batches = map(sizes, (values.V, values.D, values.B))
  if values.quick:
    rows, dims, batches = [12_000], [50], [256]
  if values.linear and not values.quick:
    return [make(V=num, D=dims[0], B=count) for num, count in _LINEAR]
  return [make(*size) for size in itertools.product(rows, dims, batches)]


def rows_of(values):
  """Yields the rows that the flags ask for, with progress."""
  cases, made = cases_of(values), []
  impls = [*values.precision, *([] if values.linear else values.against)]
  repeats = 3 if values.quick else values.repeats
  with records.Progress(len(cases)) as progress:
    for case in cases:
      new = list(run_case(case, impls, repeats, values.peer_python))
      made += new
      yield from new
      progress.update(1, ' '.join(
          f'{row["impl"]}={row["frac_compute"]:.2f}' for row in new))
  for impl in impls if values.linear else ():
    yield fit([row for row in made if row['impl'] == impl])


def under_google_benchmark(values):
  """Registers the same checked contestants with google-benchmark; runs it."""
  functions = {}
  with contextlib.ExitStack() as stack:
    for case in cases_of(values):
      made = entered(case, [*values.precision, *values.against],
                     values.peer_python, stack)[0]
      functions |= {case.name(n): f for n, f in turns(made).items()}
    harness.google_benchmark(functions)


def define_flags():
  """Defines the flags of this binary."""
  flags.DEFINE_list('V', ['50k'], 'Rows of the tables; 50k is 50,000.')
  flags.DEFINE_list('D', ['300'], 'Dimensions.')
  flags.DEFINE_list('B', ['2048'], 'Queries of a call.')
  flags.DEFINE_integer('k', 1, 'Neighbours.', lower_bound=1)
  for name, choices in (('precision', OURS), ('against', OTHERS)):
    flags.DEFINE_list(name, list(choices), f'Among {", ".join(choices)}.')
    flags.register_validator(
        name, lambda v, choices=choices: set(v) <= set(choices),
        f'unknown name; use some of {choices}')
  flags.DEFINE_integer('repeats', 20, 'Timed calls of each.', lower_bound=1)
  flags.DEFINE_enum('devices', '1', ['1', '2'], 'Two split the queries.')
  flags.DEFINE_bool('one_core', True, 'Pin to one core, where devices=1.')
  flags.DEFINE_bool('quick', False, 'One small case, three calls.')
  flags.DEFINE_bool('linear', False, 'Whether time is linear in V and B.')
  flags.DEFINE_bool('google_benchmark', False, 'Run under that package.')
  flags.DEFINE_string('peer_python', None, 'Interpreter of missing peers.')
  flags.DEFINE_string('out', None, 'File of the rows; standard output else.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  if values.one_core and values.devices == '1':
    harness.pin()
  jax.config.update('jax_num_cpu_devices', int(values.devices))
  if values.google_benchmark:
    under_google_benchmark(values)
  else:
    harness.emit(rows_of(values), values.out)


if __name__ == '__main__':
  define_flags()
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main)
