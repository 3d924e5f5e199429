"""What the benchmarks share: time, a roof beside it, contestants in turn, rows.

Host. A time is CPU seconds of this process (all threads) and wall seconds; on
shared cores the first is the steadier one. Even so a core's speed drifts, so
every timed call stands between two products of single-precision matrices, and
what is compared is work in units of that product: the median over rounds.

  compile_ahead      compilation apart, temporary memory
  interleave         contestants in turn -> {name: Measured}
  fields, ratio      what rows say of a Measured, and of two
  roof, stream       what this machine does at best: FLOP/s and bytes/s
  Peer               a contestant in another interpreter

A benchmark checks each contestant's answer, then does this:

>>> counts = rotating(sum, [range(9_000), range(9_001)])
>>> measured = interleave({'ours': counts, 'naive': counts}, rounds=3)
>>> row = fields(measured['ours'], units=9_000, unit='words')
>>> row['n'], row['words_per_s'] > 0
(3, True)
>>> ratio(measured['ours'], measured['naive']) > 0  # above 1: ours is faster
True
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import inspect
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import records

_PRODUCT = {'cpu': 1024, 'gpu': 8192, 'tpu': 8192}
_STREAM_BYTES = {'cpu': 2**27, 'gpu': 2**30, 'tpu': 2**30}


class Seconds(NamedTuple):
  """One duration, or a rate per second of either clock."""
  wall: float
  cpu: float


class Compiled(NamedTuple):
  """A program compiled ahead of its first call."""
  call: object
  seconds: Seconds
  temp_bytes: int
  bytes_xla: float | None  # as XLA counts; a loop's body counts once


class Measured(NamedTuple):
  """Calls of one contestant, and the roof beside each of them."""
  first: Seconds
  calls: list[Seconds]
  roofs: list[Seconds]  # FLOP/s, the mean of before and after


def once(fun):
  """(result, Seconds) of one call, the device waited for.

  A function that returns `Seconds` has timed itself; they are taken.
  """
  wall, cpu = time.perf_counter(), time.process_time()
  result = jax.block_until_ready(fun())
  spent = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
  return result, result if isinstance(result, Seconds) else spent


def compile_ahead(fun, *args):
  """`Compiled` of a function, jitted or not, for arguments like ``args``."""
  jitted = fun if hasattr(fun, 'lower') else jax.jit(fun)
  call, seconds = once(lambda: jitted.lower(*args).compile())
  cost = call.cost_analysis() or {}
  return Compiled(call, seconds, call.memory_analysis().temp_size_in_bytes,
                  cost.get('bytes accessed'))


def rotating(fun, batches):
  """A function of no argument: ``fun`` of the next batch, round and round."""
  turns = itertools.cycle(batches)
  return lambda: fun(next(turns))


def interleave(contestants, rounds):
  """Runs all contestants in turn, a roof between any two calls.

  Args:
    contestants: dict from name to a function of no argument, for `once`.
    rounds: timed calls of each; the order rotates from round to round.

  Returns:
    Dict from name to `Measured`, whose first call is not among the timed ones.
  """
  measured = {name: Measured(once(fun)[1], [], [])
              for name, fun in contestants.items()}
  names, before = list(contestants), roof()
  for turn in range(rounds):
    start = turn % len(names)
    for name in names[start:] + names[:start]:
      measured[name].calls.append(once(contestants[name])[1])
      after = roof()
      measured[name].roofs.append(
          Seconds(*((a + b) / 2 for a, b in zip(before, after))))
      before = after
  return measured


def clock(num_devices=1):
  """'cpu' for one CPU device; 'wall' where others do the work as well."""
  return 'cpu' if num_devices == 1 and jax.default_backend() == 'cpu' else (
      'wall')


def work(measured, clock='cpu'):
  """Each call in FLOP of the neighbouring product: seconds times its rate."""
  return np.array([getattr(s, clock) * getattr(r, clock)
                   for s, r in zip(measured.calls, measured.roofs)])


def ratio(ours, other, clock='cpu'):
  """How many times as fast ours is: the median over rounds, roofs divided out.

  Args:
    ours: `Measured`.
    other: `Measured` of the same rounds, doing the same amount of work.
    clock: 'cpu' or 'wall'.
  """
  return float(np.median(work(other, clock) / work(ours, clock)))


def fields(measured, *, clock='cpu', flops=None, units=None, unit='words',
           bytes_min=None, bandwidth=None):
  """What a row says of one contestant.

  Args:
    measured: `Measured`.
    clock: which seconds make rates and shares.
    flops: floating-point operations of one call; gives ``frac_compute``, the
      share of the single-precision product.
    units: what one call gets done, of the kind ``unit``; gives a rate.
    unit: 'words', 'draws', ...
    bytes_min: least traffic of one call, for ``frac_bandwidth``.
    bandwidth: bytes/s, `stream`.

  Returns:
    Dict of JSON values; times in seconds.
  """
  row = {'n': len(measured.calls), 'clock': clock,
         'first_run_s': measured.first.wall}
  for name in Seconds._fields:
    times = [getattr(s, name) for s in measured.calls]
    low, middle, high = np.percentile(times, [10, 50, 90])
    row |= {f'median_{name}_s': float(middle), f'p10_{name}_s': float(low),
            f'p90_{name}_s': float(high)}
  median = row[f'median_{clock}_s']
  row['roof_flops_per_s'] = float(np.median(
      [getattr(r, clock) for r in measured.roofs]))
  if units is not None:
    row[f'{unit}_per_s'] = units / median
  if flops is not None:
    row |= {'flops': flops, 'frac_compute': float(np.median(
        flops / work(measured, clock)))}
  if bytes_min is not None:
    row['bytes_min'] = bytes_min
    if bandwidth is not None:
      row['frac_bandwidth'] = bytes_min / median / bandwidth
  return row


@functools.cache
def _product(dtype):
  """(function, FLOP) of a matrix product; NumPy's for float32 on a CPU."""
  platform, size = jax.default_backend(), _PRODUCT[jax.default_backend()]
  rng = np.random.default_rng(0)
  left, right = (rng.normal(size=(size, size)).astype(np.float32)
                 for _ in range(2))
  if (platform, dtype) == ('cpu', 'float32'):
    run = functools.partial(np.matmul, left, right, out=np.empty_like(left))
  else:
    run = functools.partial(jax.jit(functools.partial(
        jnp.matmul, preferred_element_type=jnp.float32,
        precision='highest' if dtype == 'float32' else 'default')), *(
            jnp.asarray(a, dtype) for a in (left, right)))
  once(run)
  return run, 2 * size**3


def roof(repeats=3, dtype='float32'):
  """FLOP/s of a matrix product by wall and by CPU seconds, as `Seconds`.

  On a CPU float32 is NumPy's 1024^3 with the threads this process has; else
  the device's own, its precision named. One product goes untimed: after a JAX
  call the first loses 15 to 40% to its waiting threads and to cold caches.

  Args:
    repeats: the median of so many timed ones.
    dtype: of the operands; sums are float32.
  """
  run, flops = _product(dtype)
  once(run)
  times = [once(run)[1] for _ in range(repeats)]
  return Seconds(*(flops / float(np.median(t)) for t in zip(*times)))


def stream(repeats=5):
  """Bytes/s, read and written, of adding 1 to a long array; wall."""
  source = np.ones(_STREAM_BYTES[jax.default_backend()] // 4, np.float32)
  run = functools.partial(np.add, source, 1, out=np.empty_like(source))
  if jax.default_backend() != 'cpu':
    run = functools.partial(jax.jit(lambda a: a + 1), jnp.asarray(source))
  times = [once(run)[1].wall for _ in range(repeats + 1)]
  return 2 * source.nbytes / float(np.median(times[1:]))


def peak_bytes(fun):
  """Most memory of this process in a call beyond what it held before.

  Returns:
    Bytes, or None where the system does not tell or a device holds the arrays.
  """
  if jax.default_backend() != 'cpu':
    return None
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).malloc_trim(0)  # what is free must not hide a new array
  try:
    # The high-water mark begins anew.
    pathlib.Path('/proc/self/clear_refs').write_text('5')
    status = pathlib.Path('/proc/self/status').read_text
    memory = lambda name: 1024 * int(status().split(f'{name}:')[1].split()[0])
    before = memory('VmRSS')
    once(fun)
    return max(0, memory('VmHWM') - before)
  except OSError:
    return None


class Peer:
  """A contestant in another interpreter, started once, called in turn."""

  def __init__(self, python, setup, **arguments):
    """Starts the process and waits until it is set up.

    Args:
      python: path of the interpreter; it needs neither jax nor this package.
      setup: a module-level function that imports what it needs itself, since
        only its source goes over; it returns ``run``.
      **arguments: JSON values; arrays go by the path of an .npy file.

    Raises:
      RuntimeError: the peer ended; its own words are on standard error.
    """
    source = f'{inspect.getsource(_serve)}\n_serve()\n'
    environ = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    self._process = subprocess.Popen(
        [python, '-u', '-c', source], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=environ)
    self._exchange({'source': inspect.getsource(setup),
                    'name': setup.__name__, 'arguments': arguments})

  def _exchange(self, message):
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(json.dumps(message) + '\n')
      self._process.stdin.flush()
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f'peer {self._process.args[0]} ended with status '
                         f'{self._process.wait()}; see standard error')
    return json.loads(line)

  def ask(self, **request):
    """(answer, Seconds) of ``run(**request)``, measured over there."""
    answer, *seconds = self._exchange(request)
    return answer, Seconds(*seconds)

  def seconds(self, **request):
    """The `Seconds` of ``run(**request)``: what `interleave` takes."""
    return self.ask(**request)[1]

  def close(self):
    """Ends the process."""
    self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()

  def __enter__(self):
    return self

  def __exit__(self, *unused_error):
    self.close()


def _serve():
  """The other side of a `Peer`; its source alone is sent there."""
  import json  # pylint: disable=redefined-outer-name,reimported
  import sys
  import time
  replies, sys.stdout = sys.stdout, sys.stderr
  send = lambda reply: print(json.dumps(reply), file=replies, flush=True)
  first, space = json.loads(sys.stdin.readline()), {}
  exec(first['source'], space)  # pylint: disable=exec-used
  run = space[first['name']](**first['arguments'])
  send('ready')
  for line in sys.stdin:
    request = json.loads(line)
    wall, cpu = time.perf_counter(), time.process_time()
    answer = run(**request)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    answer = answer.tolist() if hasattr(answer, 'tolist') else answer
    send([answer, wall, cpu])


def machine():
  """What a row must say of where it was measured."""
  facts = records.provenance({})
  versions = facts['versions']
  for package in ('faiss-cpu', 'scikit-learn'):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return {name: facts[name] for name in (
      'cpu', 'num_cores', 'device_kind', 'num_devices')} | {
          'versions': versions, 'platform': jax.default_backend(),
          'git': facts['git_commit'], 'load_avg': list(os.getloadavg()),
          'xla_flags': os.environ.get('XLA_FLAGS', '')}


def emit(rows, out=None):
  """Writes rows as JSON lines: to a file, or to standard output.

  Args:
    rows: iterable of dicts; each is written, whole, as it is made.
    out: path, replaced once all are there; a run that was stopped leaves its
      rows in ``out + '.part'``. None for standard output.

  Returns:
    List of the rows.
  """
  made, part = [], f'{out}.part'
  if out is not None:
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
  with (contextlib.nullcontext(sys.stdout) if out is None
        else open(part, 'w', encoding='utf-8')) as file:
    for row in rows:
      file.write(json.dumps(records.plain(row, 'row')) + '\n')
      file.flush()
      made.append(row)
  if out is not None:
    os.replace(part, out)
  return made


def pin():
  """Ties this process to one core; call it first thing in ``main``.

  Thread pools have their size by then, so the program is started over, tied.
  """
  cores = getattr(os, 'sched_getaffinity', lambda pid: {0})(0)
  if len(cores) == 1:
    return
  os.sched_setaffinity(0, {max(cores)})
  for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
    os.environ[name] = '1'
  sys.stdout.flush()
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def google_benchmark(cases, arguments=()):
  """Runs cases under google-benchmark.

  Args:
    cases: dict from name to a function of no argument.
    arguments: its flags, such as ``--benchmark_format=json``.

  Raises:
    ValueError: the package is not installed.
  """
  try:
    import google_benchmark as benchmark
  except ImportError as e:
    raise ValueError('--google_benchmark needs the package google-benchmark: '
                     "pip install 'jaxdp[bench]'") from e

  def run(state, fun):
    while state:
      jax.block_until_ready(fun())

  for name, fun in cases.items():
    benchmark.register(benchmark.option.measure_process_cpu_time()(
        functools.partial(run, fun=fun)), name=name)
  benchmark.initialize([sys.argv[0], *arguments])
  benchmark.run_benchmarks()
