r"""Images a second of one StoBatch step, beside a Python loop over its parts.

  python -m benchmarks.train_step_bench --dataset=mnist --trainers=4

A step is whole: adversarial examples, each trainer's gradient, means, update.
Images are random, of the data set's shape. In the same process, in turn with
ours:

  loop        as the released code is organised, each part jitted
              (``stobatch_loop``), over this library's network
  stock_loop  that loop over the network as Flax gives it: the gradients of
              convolutions are XLA's own
  unjitted    the first loop with nothing jitted, in few repeats

First all of them take one step from one state with one key: parameters must
agree within 1e-5, and each part of the network must have moved a hundred times
as far, or the check could not fail. Hence plain SGD (Adam divides a rounding
error by itself) and a large budget (the noise of a small one would drown the
gradients of one part in the rounding of the other).

FLOP are those of the loop's parts as XLA counts them before it optimises, so
that no contestant is paid for work the step does not need. ``frac_compute`` is
their share of the matrix product, ``frac_conv`` of a plain convolution that
takes turns with the step. ``compile_s`` is lowering and XLA; tracing is in
``first_run_s``.

References: Phan et al. (2020), Algorithm 4; its released code.
"""

import contextlib
import functools
from typing import NamedTuple

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks import stobatch_loop
from jaxdp.training import layouts
from jaxdp.training import parallel
from jaxdp.training import releases
from jaxdp.training import stobatch
from jaxdp.training import stobatch_config

DATASETS = ('digits', 'mnist', 'cifar10')
BASELINES = ('loop', 'stock_loop', 'unjitted')

_TOLERANCE = 1e-5  # of a parameter after one step
_VISIBLE = 100.  # tolerances that each part of the network must move by
_FEW = 3  # repeats of what is not jitted
_SETTINGS = dict(
    epsilon=1e4, label_epsilon=10., optimizer='sgd', learning_rate=.05,
    reconstruction_optimizer='sgd', reconstruction_rate=.01)
_QUICK = dict(dataset='digits', batch_size=12, attack_steps=2)


class Case(NamedTuple):
  """One step: what is trained, and how it is laid out."""
  dataset: str = 'mnist'
  mode: str = 'sound'
  batch_size: int = 48  # of one trainer; each half of its step
  trainers: int = 4
  shards: int = 1
  attack_steps: int = 10
  backend: str = 'vmap'
  devices: int = 1

  @property
  def images(self):
    """Images of a step, benign and adversarial."""
    return 2 * self.trainers * self.batch_size

  @property
  def config(self):
    """stobatch.Config of the step."""
    return stobatch.published(
        self.dataset, mode=self.mode, num_examples=self.images,
        batch_size=self.batch_size, attack_steps=self.attack_steps,
        **_SETTINGS)

  def name(self, impl):
    return (f'step/{self.dataset},{self.mode},N={self.trainers},'
            f'M={self.shards},B={self.batch_size},T={self.attack_steps},'
            f'{self.backend},devices={self.devices},{impl}')


def problem(case, seed=0):
  """A run's first step on random records: ``(key, state, batch)``.

  Args:
    case: `Case`.
    seed: of the records and of the run's key.

  Returns:
    Typed key, stobatch.State, and stobatch.Batch of host arrays [N, M, ...].

  Raises:
    ValueError: shards do not divide a batch.
  """
  config, key = case.config, jax.random.key(seed)
  if case.batch_size % case.shards:
    raise ValueError(f'shards={case.shards} must divide batch_size='
                     f'{case.batch_size}; each takes an equal part')
  state = stobatch.init(key, config)
  scales = stobatch.calibrate(config, state.params['encoder']['kernel'])
  layout = (case.trainers, case.shards, case.batch_size // case.shards)
  halves = jax.tree.map(
      lambda x: np.asarray(x).reshape(2, *layout, *x.shape[1:]),
      _released(key, scales, case.images, np.random.default_rng(seed)))
  met = np.arange(layout[2], dtype=np.int32) * len(config.attacks) // layout[2]
  trainers = np.arange(case.trainers, dtype=np.int32)[:, None]
  return key, state, stobatch.Batch(
      *(jax.tree.map(lambda x, half=half: x[half], halves)
        for half in range(2)),
      np.broadcast_to(met, layout), np.broadcast_to(trainers, layout[:2]))


def _released(key, scales, num, rng):
  """Released of random records."""
  release = jax.jit(functools.partial(releases.release, calibration=scales))
  shape = (num, *scales.image_shape)
  return release(key, images=rng.uniform(-1, 1, shape).astype(np.float32),
                 labels=rng.integers(scales.num_classes, size=num,
                                     dtype=np.int32),
                 ids=np.arange(num, dtype=np.int32))


@contextlib.contextmanager
def compilation():
  """Yields a list that gets seconds of lowering and of compiling inside."""
  seconds = []

  def listen(event, duration, **unused_facts):
    if event.endswith(('/jaxpr_to_mlir_module_duration',
                       '/backend_compile_duration')):
      seconds.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seconds
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def first_call(name, fun):
  """``(result, facts)`` of a contestant's first call, which compiles."""
  with compilation() as seconds:
    result, first = harness.once(fun)
  logging.info('%s: first call %.1f s', name, first.wall)
  return result, {'first_run_s': first.wall, 'compile_s': sum(seconds)}


def convolution():
  """(function of no argument, FLOP): 3 x 3 over 64 maps, forward alone."""
  num, side, maps = 32 if jax.default_backend() == 'cpu' else 1024, 28, 64
  rng = np.random.default_rng(0)
  x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (
      (num, side, side, maps), (3, 3, maps, maps)))
  run = jax.jit(lambda x, kernel: jax.lax.conv_general_dilated(
      x, kernel, (1, 1), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')))
  return functools.partial(run, x, kernel), (
      2 * num * (side - 2)**2 * 9 * maps**2)


def check(name, before, ours, theirs):
  """Raises ValueError unless two steps from one state end alike.

  Args:
    name: of the case, for the message.
    before: State that both started from.
    ours, theirs: State after the step.

  Returns:
    The largest difference of a parameter.
  """
  most = 0.
  for part in before.params:
    apart, moved = (_distance(ours.params[part], other.params[part])
                    for other in (theirs, before))
    if not apart <= _TOLERANCE:
      raise ValueError(f'{name}: parameters of the {part} differ by {apart:.3g}'
                       f' after one step; at most {_TOLERANCE} is rounding')
    if not moved >= _VISIBLE * _TOLERANCE:
      raise ValueError(f'{name}: the {part} moved by {moved:.3g} alone, and a '
                       'wrong step would not show')
    most = max(most, apart)
  return most


def _distance(first, second):
  return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
             for a, b in zip(*map(jax.tree.leaves, (first, second))))


def runs(case, key, batch, against):
  """Functions State -> State by name, and the jitted loop's own parts."""
  config = case.config
  run = parallel.map_trainers(
      stobatch.make_train_step(config), num_trainers=case.trainers,
      num_shards=case.shards, backend=case.backend, donate_state=False,
      devices=jax.devices()[:case.devices])
  placed = jax.block_until_ready(run.place(batch))
  held = stobatch_loop.shares(config, batch)
  jitted = stobatch_loop.parts(config)
  loop = lambda do: lambda state: stobatch_loop.step(
      do, config, key, state, held)
  made = {'jaxdp': lambda state: run(key, state, placed)[0],
          'loop': loop(jitted)}
  if 'stock_loop' in against:
    made['stock_loop'] = loop(stobatch_loop.parts(config, stobatch_loop.stock))
  if 'unjitted' in against:
    made['unjitted'] = loop(stobatch_loop.parts(config, lambda fun: fun))
  return made, lambda state: stobatch_loop.operations(
      jitted, lambda do: loop(do)(state))


def contestants(case, against):
  """Checked contestants: ``(calls, facts, flops)``.

  Args:
    case: `Case`.
    against: names among `BASELINES`; the loop is checked in any case.

  Returns:
    Functions of no argument by name; what is known of each; FLOP or None.

  Raises:
    ValueError: a baseline's step ends elsewhere.
  """
  key, state, batch = problem(case)
  made, count = runs(case, key, batch, against)
  ends, facts = {}, {}
  for name, run in made.items():
    ends[name], facts[name] = first_call(
        case.name(name), functools.partial(run, state))
    if name != 'jaxdp':
      facts[name]['max_difference'] = check(
          case.name(name), state, ends['jaxdp'], ends[name])
  # After a step the state of ours lies where its step reads it.
  starts = dict.fromkeys(made, state) | {'jaxdp': ends['jaxdp']}
  return ({name: functools.partial(made[name], starts[name])
           for name in made if name in ('jaxdp', *against)},
          facts, count(state))


def run_case(case, repeats, against=BASELINES):
  """Checks and times a case; yields one row a contestant.

  Args:
    case: `Case`.
    repeats: timed calls of each; what is not jitted has three at most.
    against: names among `BASELINES`.

  Raises:
    ValueError: a contestant's answer is wrong.
  """
  calls, facts, flops = contestants(case, against)
  conv, conv_flops = convolution()
  fast = {name: call for name, call in calls.items() if name != 'unjitted'}
  measured = harness.interleave(fast | {'convolution': conv}, repeats)
  slow = {}
  if 'unjitted' in calls:
    slow = harness.interleave(
        {name: calls[name] for name in ('jaxdp', 'unjitted')},
        min(_FEW, repeats))
  clock = harness.clock(case.devices)
  for name in calls:
    mine = measured.get(name) or slow[name]
    row = _described(case, name) | harness.fields(
        mine, clock=clock, units=case.images, unit='images', flops=flops)
    if flops is not None and name in measured:
      row['frac_conv'] = float(np.median(
          flops * harness.work(measured['convolution'], clock)
          / (conv_flops * harness.work(mine, clock))))
    yield row | facts[name] | _ratios(name, measured, slow, clock) | {
        'machine': harness.machine()}


def _described(case, impl):
  """What a row says before it says how fast."""
  return {'benchmark': 'train_step', 'name': case.name(impl), 'impl': impl,
          'role': 'ours' if impl == 'jaxdp' else 'baseline',
          **case._asdict(), 'images': case.images, 'n_devices': case.devices,
          'tolerance': _TOLERANCE}


def _ratios(name, measured, slow, clock):
  """How many times as fast as each baseline this contestant is."""
  return {f'ratio_to_{other}': harness.ratio(times[name], times[other], clock)
          for other, times in (('loop', measured), ('stock_loop', measured),
                               ('unjitted', slow))
          if other != name and {other, name} <= set(times)}


def case_of(values):
  """The `Case` that the flags ask for."""
  asked = {name: getattr(values, name) for name in Case._fields}
  return Case(**(asked | (_QUICK if values.quick else {})))


def define_flags():
  """Defines the flags of this binary."""
  usual = Case()
  flags.DEFINE_enum('dataset', usual.dataset, DATASETS, 'Shape of the images.')
  flags.DEFINE_enum('mode', usual.mode, stobatch_config.MODES,
                    'As published, or what standard accounting proves.')
  for name, doc in (
      ('batch_size', 'Records of a batch; a step of a trainer takes two.'),
      ('trainers', 'N, trainers of a step.'),
      ('shards', 'M, parts of the batch of a trainer.'),
      ('attack_steps', 'T, steps of each attack.'),
      ('devices', 'Devices, virtual on a CPU; above 1, wall time.')):
    flags.DEFINE_integer(name, getattr(usual, name), doc, lower_bound=1)
  flags.DEFINE_enum('backend', usual.backend, layouts.BACKENDS,
                    'How the trainers run.')
  flags.DEFINE_list('against', list(BASELINES),
                    f'Among {", ".join(BASELINES)}.')
  flags.register_validator('against', lambda v: set(v) <= set(BASELINES),
                           f'unknown name; use some of {BASELINES}')
  flags.DEFINE_integer('repeats', 20, 'Timed steps of each.', lower_bound=1)
  flags.DEFINE_bool('quick', False, 'Digits, small batches, three repeats.')
  flags.DEFINE_bool('one_core', True, 'Pin to one core, where devices=1.')
  flags.DEFINE_string('out', None, 'File of the rows; standard output else.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  if values.one_core and values.devices == 1:
    harness.pin()
  jax.config.update('jax_num_cpu_devices', values.devices)
  repeats = 3 if values.quick else values.repeats
  harness.emit(run_case(case_of(values), repeats, values.against), values.out)


if __name__ == '__main__':
  define_flags()
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main)
