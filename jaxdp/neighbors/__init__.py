r"""Exact nearest neighbours on plain arrays: the hot kernel.

``nearest`` and ``k_nearest`` run on the device and may be called under
``jax.jit``; ``distance_range`` runs on the host. Tiling and sharding are hidden
inside, and no array of shape ``[B, V]`` is ever formed.

*Exact* means: the answer is the arg-min of the real-arithmetic Euclidean
distance between the float32 inputs, ties going to the lowest index. A fast scan
in float32, or in fewer bits where that pays, finds the few rows that a rigorous
rounding bound cannot exclude; float64 decides among them, and integers where
float64 cannot; whatever a step leaves open is searched again in the next better
arithmetic, and the last one is exact. So near-duplicates, huge norms and badly
scaled tables cost time, not a wrong answer.

===============  =============================================================
``tables``       what may be asked: arguments, a table prepared once
``search``       blocks of queries, the steps in their order, devices
``scan``         the pass over the table, lower bounds by lanes
``rounding``     the bound, its proof, and formats of fewer bits
``resolve``      from lanes to the nearest row
``groups``       the same for k nearest rows
``exact``        float64, and integers that hold a distance exactly
``gate``         whether fewer bits pay on this machine
``ranges``       least and greatest distance of a table
===============  =============================================================

Range: entries are finite; subnormal ones (below 2^-126) count as zero where the
device flushes them; a distance beyond 3.4e38 is returned as infinity, with the
right id. The bound is
proved for float32 sums (CPU, NVIDIA); the bfloat16 passes with which a TPU
forms float32 products have not been checked.

Shape letters: ``B`` queries, ``V`` rows of the table, ``D`` dimensions, ``K``
neighbours.

  >>> import jax.numpy as jnp
  >>> table = jnp.array([[0., 0.], [3., 4.], [0., 1.]])
  >>> ids, distances = nearest(jnp.array([[3., 3.]]), table)
  >>> int(ids[0]), float(distances[0])
  (1, 1.0)
  >>> distance_range(table)
  (1.0, 5.0)
"""

from jaxdp.neighbors.gate import timing
from jaxdp.neighbors.ranges import distance_range
from jaxdp.neighbors.rounding import PreparedTable
from jaxdp.neighbors.tables import distances
from jaxdp.neighbors.tables import k_nearest
from jaxdp.neighbors.tables import nearest
from jaxdp.neighbors.tables import prepare

__all__ = ['PreparedTable', 'distance_range', 'distances', 'k_nearest',
           'nearest', 'prepare', 'timing']
