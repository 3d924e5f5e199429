"""One trainer's step, run for N trainers of M shards on any devices.

Device; layouts are checked on the host. A step is written once, for one shard
of one trainer, against axis names: its gradient is local, and the means come
after it,

  >>> import jax
  >>> import jax.numpy as jnp
  >>> def step(key, state, batch):
  ...   grad = jax.grad(lambda w: jnp.mean((batch - w) ** 2))(state)
  ...   grad = mean_over_shards(grad)
  ...   grad = jnp.clip(grad, -1., 1.)  # each trainer's own
  ...   grad = mean_over_trainers(grad)
  ...   return state - .5 * grad, {'grad': grad}

and runs unchanged on one device, on many, or on many hosts:

  >>> run = map_trainers(step, num_trainers=4, num_shards=2, backend='vmap')
  >>> batch = jnp.arange(24.).reshape(4, 2, 3)  # [N, M, ...]
  >>> state, info = run(jax.random.key(0), jnp.zeros(()), batch)
  >>> float(state)
  0.5

Nothing random may depend on the layout: fold keys with step, trainer and
example ids that the batch carries, never with a shard or device. What is made
of a batch is a shard's, even where all shards make the same of it: average it
over the shards too. Noise that is to be added once is added after the means,
from a key that every trainer has.

Shape letters: ``N`` trainers, ``M`` shards of a trainer, ``K`` trainers on one
device. References: Phan et al. (2020), Algorithm 4 (N trainers of M devices).
"""

import jax
import jax.numpy as jnp
from jax import lax
import numpy as np

from jaxdp.training import layouts

TRAINER, SHARD = layouts.TRAINER, layouts.SHARD
initialize = layouts.initialize
local_trainers = layouts.local_trainers
global_batch = layouts.global_batch

_SPEC = jax.sharding.PartitionSpec
_IN_AXES = (None, None, 0)  # key, state, batch


def mean_over_shards(tree):
  """Averages a tree over the shards of a trainer; only inside a step.

  Take gradients before, never through it: the gradient of a mean over devices
  is ``num_shards`` times too large on each of them.
  """
  return lax.pmean(tree, SHARD)


def mean_over_trainers(tree):
  """Averages a tree over all trainers; only inside a step, after the clip."""
  return lax.pmean(tree, TRAINER)


class Runner:
  """A mapped step: ``run(key, state, batch) -> (state, info)``.

  Made by :func:`map_trainers`. ``mesh`` is the mesh of the devices, or None
  with ``backend='vmap'``.
  """

  def __init__(self, mapped, layout, donate_state):
    self._mapped = mapped
    self._layout = layout
    self._donate_state = donate_state
    self.mesh = getattr(layout.split, 'mesh', None)

  def __call__(self, key, state, batch):
    """Takes one step.

    Args:
      key: typed key, the same for every trainer.
      state: tree of arrays, the same for every trainer. Its buffers are given
        up unless ``donate_state=False``; a state that does not lie on the
        devices of this runner yet is copied.
      batch: tree of arrays [N, M, ...] as for :meth:`place`.

    Returns:
      ``(state, info)`` of the step, a copy on every device.
    """
    there = self._layout.replicated
    if self._donate_state:
      state = _distinct(state)
    state = jax.tree.map(
        lambda x: layouts.replicate(x, there, self._donate_state), state)
    return self._mapped(
        layouts.replicate(key, there), state, self.place(batch))

  def place(self, batch):
    """Puts a batch where the step reads it; what lies there stays.

    Call it ahead of time to overlap the transfer with a step.

    Args:
      batch: tree of arrays [N, M, ...]: trainer, shard of the trainer, and
        what one shard of one step sees. With several processes, host arrays
        hold the rows of :func:`local_trainers` only.

    Returns:
      The same tree of device arrays of the global shape [N, M, ...].

    Raises:
      ValueError: a leaf does not begin with (N, M), or there is no leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
    if not leaves:
      raise ValueError('batch has no arrays; a step needs at least one leaf '
                       f'of shape {self._layout[:2]} or longer')
    return treedef.unflatten(
        layouts.place(jax.tree_util.keystr(path), leaf, self._layout)
        for path, leaf in leaves)


def map_trainers(step, *, num_trainers, num_shards=1, backend='pmap',
                 devices=None, donate_state=True):
  """Runs one trainer's step for all trainers.

  ``vmap`` simulates all trainers and shards on one device. ``pmap`` puts
  ``num_trainers / num_devices`` trainers on each device of this process; it
  has one device axis, so the shards of a trainer share its device: to spread
  them, or for several hosts, use ``shard_map``, on a mesh of trainers by
  shards. The three agree to rounding of the means.

  ``shard_map`` always runs with ``check_vma=False``. With its default,
  gradients with respect to the replicated state come out summed over devices:
  N times too large, and what a step clips is the sum over trainers instead of
  each trainer's gradient, so noise made for one trainer's clip hides no
  trainer. The price: a state that a step forgot to average over shards is not
  noticed there; ``vmap`` and ``pmap`` refuse it, and all three refuse one
  that was not averaged over trainers.

  Args:
    step: ``(key, state, batch_of_one_shard) -> (state, info)``; both results
      averaged by the step over shards and trainers.
    num_trainers: N >= 1.
    num_shards: M >= 1, shards of one trainer.
    backend: 'vmap', 'pmap' or 'shard_map'.
    devices: devices to use, trainer by trainer; default: the first local one
      ('vmap'), all local ones ('pmap'), all ('shard_map').
    donate_state: reuse the buffers of the state that is passed in.

  Returns:
    :class:`Runner`, called as ``run(key, state, batch)``.

  Raises:
    ValueError: unknown backend, or a layout that does not divide evenly.

  References: Phan et al. (2020), Algorithm 4.
  """
  layouts.check_counts(num_trainers=num_trainers, num_shards=num_shards)
  if backend not in layouts.BACKENDS:
    raise ValueError(f'backend={backend!r} must be one of {layouts.BACKENDS}')
  if backend == 'pmap' and jax.process_count() > 1:
    raise ValueError(
        "backend='pmap' sees the devices of one process, and there are "
        f"{jax.process_count()}; use backend='shard_map'")
  devices = layouts.devices_of(backend, devices)
  num_local = layouts.num_local(backend, num_trainers, num_shards, len(devices))
  build = {'vmap': _vmap, 'pmap': _pmap, 'shard_map': _shard_map}[backend]
  donate = (1,) if donate_state else ()
  mapped, replicated, split = build(
      step, devices, num_shards, num_local, donate)
  return Runner(
      mapped, layouts.Layout(num_trainers, num_shards, replicated, split),
      donate_state)


def _vmap(step, devices, num_shards, num_local, donate):
  del num_shards, num_local
  fun = jax.vmap(_on_one_device(step, True), _IN_AXES, None,
                 axis_name=TRAINER[0])
  there = jax.sharding.SingleDeviceSharding(devices[0])

  def mapped(key, state, batch):
    return fun(key, state, jax.tree.map(lambda x: x[None], batch))

  # Named, or arrays that no one has placed would compile it a second time.
  mapped = jax.jit(mapped, in_shardings=there, out_shardings=there,
                   donate_argnums=donate)
  return mapped, there, there


def _pmap(step, devices, num_shards, num_local, donate):
  del num_shards
  mesh = jax.sharding.Mesh(np.asarray(devices), TRAINER[:1])
  replicated = jax.sharding.NamedSharding(mesh, _SPEC())
  split = jax.sharding.NamedSharding(mesh, _SPEC(TRAINER[0]))
  fun = _on_one_device(step, True)
  many = num_local > 1

  def of_device(key, state, batch):
    if not many:
      batch = jax.tree.map(lambda x: x[None], batch)
    return fun(key, state, batch)

  # Outermost, and never under jit: jit(pmap) gathers its inputs first.
  mapped = jax.pmap(of_device, TRAINER[0], in_axes=_IN_AXES, out_axes=None,
                    devices=devices, donate_argnums=donate)
  if not many:
    return mapped, replicated, split
  group = jax.jit(  # [N, ...] to [N / K, K, ...]; no row leaves its device
      lambda batch: jax.tree.map(
          lambda x: x.reshape(-1, num_local, *x.shape[1:]), batch),
      out_shardings=split)
  return (lambda key, state, batch: mapped(key, state, group(batch)),
          replicated, split)


def _shard_map(step, devices, num_shards, num_local, donate):
  del num_local
  mesh = jax.sharding.Mesh(
      np.asarray(devices).reshape(-1, num_shards), (TRAINER[0], SHARD))
  split = _SPEC(TRAINER[0], SHARD)
  fun = _on_one_device(step, False)

  def of_device(key, state, batch):  # [K, 1, ...]
    return fun(key, state, jax.tree.map(lambda x: x.squeeze(1), batch))

  mapped = jax.shard_map(
      of_device, mesh=mesh, in_specs=(_SPEC(), _SPEC(), split),
      out_specs=_SPEC(), check_vma=False)
  return (jax.jit(mapped, donate_argnums=donate),
          jax.sharding.NamedSharding(mesh, _SPEC()),
          jax.sharding.NamedSharding(mesh, split))


def _on_one_device(step, map_shards):
  """The step of the K trainers of one device, on a batch [K, (M,) ...]."""
  # An axis of one trainer is mapped too: `out_axes=None` is what refuses a
  # state that was not averaged.
  if map_shards:
    step = jax.vmap(step, _IN_AXES, None, axis_name=SHARD)
  return jax.vmap(step, _IN_AXES, None, axis_name=TRAINER[1])


def accumulate(grad_fn, num_microbatches):
  """Splits a shard's batch into microbatches and averages over them.

  The result is the float sum of ``grad_fn``'s results, microbatch after
  microbatch in the order of the batch, divided once by ``num_microbatches``.
  Sums are kept in float32 or wider and cast back. So it equals ``grad_fn`` of
  the whole batch, to rounding, where that is a mean over examples; it does not
  where examples meet (batch statistics) or where the batch's mean is bent (a
  clip: clip after accumulating). Memory is that of one microbatch.

  Args:
    grad_fn: ``(*args, batch) -> tree`` of float arrays, such as gradients and
      metrics of one microbatch. Any key among ``args`` is the same for all
      microbatches: fold it with example ids.
    num_microbatches: >= 1; divides the leading dimension of the batch. Its
      leaves without one, such as a trainer's id, go to every microbatch.

  Returns:
    A function like ``grad_fn``.

  Raises:
    ValueError: when called, if the batch does not divide or a result is not
      a float.
  """
  layouts.check_counts(num_microbatches=num_microbatches)
  if num_microbatches == 1:
    return grad_fn

  def averaged(*args):
    *args, batch = args
    batch = _microbatches(batch, num_microbatches)
    result = jax.eval_shape(
        grad_fn, *args, jax.tree.map(lambda x: x[0], batch))
    zeros = jax.tree_util.tree_map_with_path(_zeros, result)
    total, _ = lax.scan(
        lambda total, part: (
            jax.tree.map(jnp.add, total, grad_fn(*args, part)), None),
        zeros, batch)
    return jax.tree.map(
        lambda x, like: (x / num_microbatches).astype(like.dtype),
        total, result)

  return averaged


def _microbatches(batch, num):
  def split(path, x):
    if not jnp.ndim(x):
      return jnp.broadcast_to(x, (num,))
    if x.shape[0] % num:
      raise ValueError(
          f'batch leaf {jax.tree_util.keystr(path)} of shape {jnp.shape(x)} '
          f'cannot be split into num_microbatches={num} equal parts; choose a '
          f'divisor of {x.shape[0]}')
    return x.reshape(num, x.shape[0] // num, *x.shape[1:])
  return jax.tree_util.tree_map_with_path(split, batch)


def _zeros(path, leaf):
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    raise ValueError(
        f'result leaf {jax.tree_util.keystr(path)} is {leaf.dtype}: a mean '
        'over microbatches needs floats; convert it in grad_fn')
  return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def _distinct(tree):
  """Copies what appears twice, as in ``average=params``.

  A buffer can be donated once only.
  """
  seen = set()

  def once(leaf):
    if id(leaf) in seen and isinstance(leaf, jax.Array):
      return jnp.copy(leaf)
    seen.add(id(leaf))
    return leaf

  return jax.tree.map(once, tree)
