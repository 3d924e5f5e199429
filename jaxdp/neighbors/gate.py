"""Which operands a scan should have here: one micro-timing a process.

Host. A scan in fewer bits pays where the machine multiplies them faster than
float32 (AVX512_BF16 or AMX on a CPU, tensor cores); elsewhere it costs two to
ten times as much. Nothing but speed depends on the answer.
"""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.neighbors import rounding

# Rows, dimensions and queries of the product. An accelerator needs one that
# takes far longer than a launch.
_SHAPE, _WIDE_SHAPE = (4096, 128, 256), (16_384, 256, 2048)
_REPEATS = 5
_PAYS = 1.25  # how much faster a product must be to pay for what it leaves open


class Timing(NamedTuple):
  """What the machine was found to do.

  Attributes:
    choice: name of the format `precision='auto'` takes.
    seconds: seconds of one product, by format, of ``[4096, 128]`` by ``[128,
      256]`` on a CPU, of ``[16384, 256]`` by ``[256, 2048]`` elsewhere; a
      format that the backend refuses is absent.
  """
  choice: str
  seconds: dict[str, float]


@functools.cache
def timing():
  """The `Timing` of the default backend; measured once a process."""
  names = ['float32', 'bfloat16']
  if jax.default_backend() == 'gpu':
    names.append('tensorfloat32')
  seconds = {}
  for name in names:
    try:
      seconds[name] = _seconds(rounding.FORMATS[name])
    except (jax.errors.JaxRuntimeError, NotImplementedError):
      if name == 'float32':
        raise
  best = min(seconds, key=seconds.get)
  pays = seconds['float32'] >= _PAYS * seconds[best]
  return Timing(best if pays else 'float32', seconds)


def _seconds(form):
  """Seconds of one product, the best of a few. Callable while tracing."""
  rng = np.random.default_rng(0)
  rows, dim, queries = (
      _SHAPE if jax.default_backend() == 'cpu' else _WIDE_SHAPE)
  arrays = [rng.normal(size=shape).astype(form.dtype)
            for shape in ((rows, dim), (dim, queries))]
  # Compiled ahead of time: a jitted call would join a trace that is going on.
  run = jax.jit(lambda a, b: jnp.min(form.product(a, b), axis=0)).lower(
      *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)).compile()
  with jax.ensure_compile_time_eval():
    arrays = jax.device_put(arrays)
  times = []
  for _ in range(_REPEATS + 1):
    begin = time.perf_counter()
    run(*arrays).block_until_ready()
    times.append(time.perf_counter() - begin)
  return min(times[1:])
