"""Which device and which process holds which trainer. Host.

The pieces that :mod:`jaxdp.training.parallel` lays a run out with; its
docstring has the picture and an example.

>>> num_local('pmap', num_trainers=8, num_shards=2, num_devices=4)
2

Shape letters: ``N`` trainers, ``M`` shards of a trainer, ``K`` trainers on one
device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A trainer is one of `TRAINER[0]` devices and one of the `TRAINER[1]` on it.
TRAINER = ('trainer', 'local_trainer')
SHARD = 'shard'
BACKENDS = ('vmap', 'pmap', 'shard_map')

_SPEC = jax.sharding.PartitionSpec


class Layout(NamedTuple):
  """Where trainers and shards lie."""
  num_trainers: int
  num_shards: int
  replicated: jax.sharding.Sharding  # of keys, state and info
  split: jax.sharding.Sharding  # of batch leaves [N, M, ...]


def initialize(coordinator_address=None, num_processes=None, process_id=None):
  """Joins the processes of a run; call it before anything touches a device.

  Args:
    coordinator_address: 'host:port' of process 0, the same everywhere.
    num_processes: processes of the run; with None or 1 nothing is done.
    process_id: which of them this is, from 0.

  Raises:
    ValueError: arguments that contradict each other.
  """
  if num_processes in (None, 1):
    if process_id not in (None, 0):
      raise ValueError(
          f'process_id={process_id} of num_processes={num_processes}: this '
          'process would train alone; give num_processes')
    return
  check_counts(num_processes=num_processes)
  if coordinator_address is None or process_id is None:
    raise ValueError(
        f'num_processes={num_processes} needs coordinator_address='
        f"{coordinator_address} (the 'host:port' of process 0) and "
        f'process_id={process_id}')
  if not 0 <= process_id < num_processes:
    raise ValueError(f'process_id={process_id} must lie in [0, '
                     f'num_processes={num_processes})')
  jax.distributed.initialize(coordinator_address, num_processes, process_id)


def local_trainers(num_trainers, num_shards=1, devices=None):
  """The trainers whose data this process feeds, as a range.

  Args:
    num_trainers: N of the whole run.
    num_shards: M.
    devices: as given to :func:`map_trainers`; default all.

  Returns:
    ``range`` into the N trainers.

  Raises:
    ValueError: the layout does not divide evenly, or the shards of one trainer
      would lie in several processes.
  """
  check_counts(num_trainers=num_trainers, num_shards=num_shards)
  if jax.process_count() == 1:
    return range(num_trainers)
  devices = devices_of('shard_map', devices)
  each = num_local('shard_map', num_trainers, num_shards, len(devices))
  owners = [{d.process_index for d in devices[i:i + num_shards]}
            for i in range(0, len(devices), num_shards)]
  if any(len(owner) > 1 for owner in owners):
    raise ValueError(
        f'num_shards={num_shards} puts the shards of one trainer in several '
        'processes; choose a divisor of the devices of a process')
  mine = [i for i, owner in enumerate(owners) if jax.process_index() in owner]
  if not mine or mine[-1] - mine[0] >= len(mine):
    raise ValueError(
        'devices must list those of each process one after the other, and some '
        f'of process {jax.process_index()}')
  return range(mine[0] * each, (mine[-1] + 1) * each)


def global_batch(local_batch, mesh):
  """Joins what each process holds into arrays over all devices.

  Args:
    local_batch: tree of host arrays [n, M, ...], the rows of
      :func:`local_trainers` in order.
    mesh: :attr:`Runner.mesh` of ``backend='shard_map'``.

  Returns:
    Tree of arrays [N, M, ...], each device holding its part.
  """
  split = jax.sharding.NamedSharding(mesh, _SPEC(TRAINER[0], SHARD))
  return jax.tree.map(
      lambda leaf: _through_data(
          lambda x: jax.make_array_from_process_local_data(
              split, np.asarray(x)), leaf), local_batch)


def place(name, leaf, layout):
  """A batch leaf on its devices."""
  if not isinstance(leaf, jax.Array):
    leaf = np.asarray(leaf)
  spread = jax.process_count() > 1 and not isinstance(
      layout.split, jax.sharding.SingleDeviceSharding)
  is_local = spread and (
      not isinstance(leaf, jax.Array) or leaf.is_fully_addressable)
  rows = layout.num_trainers
  if is_local:
    rows = len(local_trainers(rows, layout.num_shards,
                              list(layout.split.mesh.devices.flat)))
  if leaf.shape[:2] != (rows, layout.num_shards):
    raise ValueError(
        f'batch leaf {name or "itself"} has shape {leaf.shape}, which must '
        f'begin with ({rows}, {layout.num_shards}): trainers'
        f'{" of this process" if is_local else ""}, shards of a trainer')
  if is_local:
    return global_batch(leaf, layout.split.mesh)
  if getattr(leaf, 'sharding', None) == layout.split:
    return leaf
  return jax.device_put(leaf, layout.split)


def replicate(leaf, sharding, own=False):
  """A leaf on every device; what lies there stays.

  With ``own``, what does not lie there yet shares no buffer with the result:
  donating an alias would take the caller's own array from it.
  """
  if not isinstance(leaf, jax.Array):
    leaf = np.asarray(leaf)  # a Python number would be a weak type, and retrace
  elif leaf.sharding == sharding:
    return leaf
  if not sharding.is_fully_addressable:
    return _through_data(lambda x: _from_host(np.asarray(x), sharding), leaf)
  if own:  # device_put aliases a device's own part, whatever `may_alias` says
    leaf = leaf.copy()
  return jax.device_put(leaf, sharding)


def _from_host(x, sharding):
  return jax.make_array_from_callback(
      x.shape, sharding, lambda index: x[index])


def _through_data(fun, leaf):
  """Applies a function of plain arrays to a leaf that may be typed keys."""
  if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return fun(leaf)
  return jax.random.wrap_key_data(fun(jax.random.key_data(leaf)),
                                  impl=jax.random.key_impl(leaf))


def devices_of(backend, devices):
  if devices is not None:
    devices = list(devices)
    if not devices:
      raise ValueError('devices=[] must hold at least one device, or be None')
    return devices
  if backend == 'vmap':
    return jax.local_devices()[:1]
  return jax.local_devices() if backend == 'pmap' else jax.devices()


def num_local(backend, num_trainers, num_shards, num_devices):
  """How many trainers each device holds, or a ValueError that advises."""
  if backend == 'vmap':
    if num_devices > 1:
      raise ValueError(f"backend='vmap' runs on one device, not {num_devices}; "
                       'pass one, or choose another backend')
    return num_trainers
  rows, what = num_devices, f'{num_devices} devices'
  each = 1
  if backend == 'shard_map':
    each = num_shards
    rows, what = num_devices // each, f'{what} / num_shards={num_shards}'
    if num_devices % each:
      raise ValueError(
          f"backend='shard_map' gives each of num_shards={num_shards} shards "
          f'a device, and {num_devices} devices cannot be shared out so; '
          'choose a divisor of them, or pass fewer devices, or use '
          "backend='vmap'")
  if num_trainers % rows:
    good = max(n for n in range(1, min(rows, num_trainers) + 1)
               if num_trainers % n == 0)
    raise ValueError(
        f'num_trainers={num_trainers} cannot be shared evenly among {what}; '
        f'choose a multiple of {rows} trainers, or pass '
        f'devices=jax.devices()[:{good * each}]')
  return num_trainers // rows


def check_counts(**counts):
  for name, value in counts.items():
    if value < 1:
      raise ValueError(f'{name}={value} must be at least 1')
