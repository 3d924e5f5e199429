"""What the benchmarks share: timing of compile, first call and steady state.

Host. A time is CPU seconds of this process (all threads) and wall seconds; on
shared cores the first is the steadier one. Rows are JSON lines on standard
output or in ``--out``.

>>> timing = measure(lambda: sum(range(1000)), repeats=2)
>>> timing.steady.wall > 0 and timing.first.wall > 0
True
"""

import json
import sys
import time
from typing import NamedTuple

import jax

from experiments import records


class Seconds(NamedTuple):
  """One duration."""
  wall: float
  cpu: float


class Timing(NamedTuple):
  """First call, compilation included, and the best of the later ones."""
  first: Seconds
  steady: Seconds


def once(fun):
  """(result, Seconds) of one call, the device waited for."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = jax.block_until_ready(fun())
  return result, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def measure(fun, *, repeats=3):
  """Times a function of no argument.

  Args:
    fun: what is timed; it returns arrays or anything else.
    repeats: calls after the first; the fastest counts.
  """
  _, first = once(fun)
  later = [once(fun)[1] for _ in range(repeats)]
  return Timing(first, min(later, key=lambda s: s.cpu))


def machine():
  """What a row must say of where it was measured."""
  facts = records.provenance({})
  return {name: facts[name] for name in (
      'cpu', 'num_cores', 'device_kind', 'num_devices', 'versions')}


def emit(rows, out=None):
  """Writes rows as JSON lines: to a file, or to standard output.

  Args:
    rows: iterable of dicts; each is written as it is made.
    out: path, replaced; None for standard output.

  Returns:
    List of the rows.
  """
  made, file = [], sys.stdout if out is None else open(
      out, 'w', encoding='utf-8')
  try:
    for row in rows:
      file.write(json.dumps(row) + '\n')
      file.flush()
      made.append(row)
  finally:
    if out is not None:
      file.close()
  return made
