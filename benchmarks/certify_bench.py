r"""Votes a second and memory of ``certification.tally``, beside a loop.

  python -m benchmarks.certify_bench --votes=1000,10000,100000

The network is StoBatch's of the data set's shape, with its first parameters; a
vote is one answer for one image with fresh noise, so n votes of B images are
n B forward passes. In the same process, in turn with ours:

  naive  a Python loop over votes, one jitted call a vote for all images, every
         draw kept, counted at the end; ``naive_votes`` of them a call, as its
         time is proportional to their number

First both count the same votes, from the same key. Two programs round
differently, so a vote may differ where its two best classes are within
rounding, and nowhere else; the votes of some image must not all be one.

``peak_bytes`` is the most memory of the process in a call of ours beyond what
it held before the first of them, the same for all numbers of votes; the last
row has what each further vote adds. Both are null where a device holds the
arrays. ``compile_s`` is lowering and XLA; tracing is in ``first_run_s``.

References: Phan et al. (2020), Algorithm 3; its released code, which calls the
network once a draw.
"""

import functools
import pathlib
import time
from typing import NamedTuple

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks import train_step_bench
from experiments import records
from jaxdp import certification
from jaxdp import samplers
from jaxdp.training import stobatch
from jaxdp.training import stobatch_config

_NEAR = {'cpu': 1e-3}  # logits that rounding may swap
_NEAR_ELSEWHERE = 3e-2  # products of ten bits
_SETTLED = .5  # seconds after which a device has freed a call's arrays
_PATIENCE = 120.  # seconds of rounds a row; many votes get fewer rounds


class Case(NamedTuple):
  """A smoothed network and the images it votes on."""
  dataset: str = 'mnist'
  mode: str = 'sound'
  images: int = 8

  @property
  def config(self):
    """stobatch.Config, with the noise of the paper's budget."""
    return stobatch.published(self.dataset, mode=self.mode, num_examples=60_000)

  def name(self, num_votes, impl):
    return (f'tally/{self.dataset},{self.mode},B={self.images},'
            f'n={num_votes},{impl}')


class Problem(NamedTuple):
  """What is voted on."""
  key: jax.Array
  predict_fn: jax.tree_util.Partial  # (key, x) -> logits [B, C]
  x: np.ndarray  # [B, H, W, C]


def problem(case, seed=0):
  """The `Problem` of a case: first parameters, random images."""
  key, config = jax.random.key(seed), case.config
  state = stobatch.init(key, config)._replace(opt_state=None)
  shape = (case.images, *stobatch.network(config).image_shape)
  x = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
  return Problem(key, jax.tree_util.Partial(_voter(config), state), x)


@functools.cache
def _voter(config):
  """``(state, key, images) -> logits``: one vote."""
  predict = stobatch.make_predict(config)
  return lambda state, key, images: predict(key, state, images)


@jax.jit
def one_vote(predict_fn, key, vote, x):
  """Logits [B, C] of one vote: its key folded with the image's index."""
  vote_key = samplers.element_keys(key, samplers.VOTE, vote, 1)[0]

  def of_image(index, image):
    image_key = jax.random.fold_in(vote_key, index)
    return predict_fn(image_key, image[None])[0]

  return jax.vmap(of_image)(jnp.arange(len(x), dtype=jnp.uint32), x)


def naive(given, num_votes):
  """Counts [B, C] and the logits [n, B, C] they come from, by a loop."""
  x = jnp.asarray(given.x)
  logits = np.stack([
      np.asarray(one_vote(given.predict_fn, given.key, np.uint32(vote), x))
      for vote in range(num_votes)])
  winners = np.argmax(logits, axis=-1)
  counts = np.stack([np.bincount(column, minlength=logits.shape[-1])
                     for column in winners.T])
  return counts, logits


def ours(given, num_votes):
  """Counts [B, C] by ``certification.tally``."""
  return certification.tally(given.key, given.predict_fn, given.x,
                             num_samples=num_votes).counts


def check(name, counts, their_counts, logits):
  """Raises ValueError unless two counts are of the same votes.

  Args:
    name: of the case, for the message.
    counts, their_counts: int ``[B, C]``.
    logits: ``[n, B, C]``, that the second come from.

  Returns:
    How many votes went to another class.
  """
  if counts.shape != their_counts.shape or not (
      np.all(counts.sum(1) == len(logits))):
    raise ValueError(f'{name}: counts of shape {counts.shape} sum to '
                     f'{counts.sum(-1)}; expected {their_counts.shape} and '
                     f'{len(logits)} votes an image')
  best = np.partition(logits, -2, axis=-1)
  rounding = _NEAR.get(jax.default_backend(), _NEAR_ELSEWHERE)
  near = int(np.sum(best[..., -1] - best[..., -2] <= rounding))
  moved = int(np.sum(np.abs(counts - their_counts))) // 2
  if moved > near:
    raise ValueError(f'{name}: {moved} votes of {logits[..., 0].size} went to '
                     f'another class; rounding explains {near} at most')
  if np.all(their_counts.max(1) == len(logits)):
    raise ValueError(f'{name}: all votes of an image agree, so wrong ones '
                     'would not show; count more votes')
  return moved


def checked(case, given, num_votes):
  """Facts of both contestants; raises where they count otherwise."""
  counts, mine = train_step_bench.first_call(
      case.name(num_votes, 'jaxdp'), lambda: ours(given, num_votes))
  (theirs, logits), other = train_step_bench.first_call(
      case.name(num_votes, 'naive'), lambda: naive(given, num_votes))
  moved = check(case.name(num_votes, 'jaxdp'), counts, theirs, logits)
  agreed = {'votes_checked': num_votes * case.images, 'votes_moved': moved,
            'top_share': float(np.mean(theirs.max(1)) / num_votes)}
  return {'jaxdp': mine | agreed, 'naive': other | agreed}


def flops_of_vote(given):
  """FLOP of one vote for all images, as XLA counts them, or None."""
  lowered = one_vote.lower(given.predict_fn, given.key, np.uint32(0),
                           jnp.asarray(given.x))
  return (lowered.cost_analysis() or {}).get('flops')


def run_case(case, votes, naive_votes, repeats):
  """Checks and times a case; yields two rows a number of votes, and memory.

  Args:
    case: `Case`.
    votes: numbers of votes an image, of ours.
    naive_votes: votes of the loop in a call, and of the check.
    repeats: timed calls of each, fewer where they take minutes.

  Raises:
    ValueError: the counts differ.
  """
  given = problem(case)
  facts = checked(case, given, naive_votes)
  flops, peaks = flops_of_vote(given), peak_bytes(given, sorted(votes))
  with records.Progress(len(votes)) as progress:
    for num_votes in peaks:
      rows = _rows(case, given, num_votes, naive_votes, repeats, flops)
      rows['jaxdp']['peak_bytes'] = peaks[num_votes]
      for name, row in rows.items():
        yield row | facts[name] | {'machine': harness.machine()}
      progress.update(1, f'n={num_votes}')
  yield memory_row(case, peaks)


def peak_bytes(given, votes):
  """Dict of numbers of votes to most memory of ours beyond a common start.

  In common, because XLA keeps what a call has used: beyond what the process
  holds just before it, a second call needs next to nothing.
  """
  base = _high_water(lambda: None)
  found = {num: _high_water(lambda num=num: ours(given, num)) for num in votes}
  return {num: None if base is None else most - base
          for num, most in found.items()}


def _high_water(call):
  """Most memory of this process in a call, in bytes, or None."""
  time.sleep(_SETTLED)
  if harness.peak_bytes(call) is None:
    return None
  # `peak_bytes` set the mark back, so it is this call's.
  status = pathlib.Path('/proc/self/status').read_text(encoding='utf-8')
  return 1024 * int(status.split('VmHWM:')[1].split()[0])


def _rows(case, given, num_votes, naive_votes, repeats, flops):
  """Rows of both contestants at one number of votes, by name."""
  sizes = {'jaxdp': num_votes, 'naive': min(naive_votes, num_votes)}
  calls = {'jaxdp': lambda: ours(given, sizes['jaxdp']),
           'naive': lambda: naive(given, sizes['naive'])}
  spent = harness.once(calls['jaxdp'])[1].wall
  measured = harness.interleave(
      calls, max(1, min(repeats, int(_PATIENCE / spent))))
  rows = {name: _described(case, size, name) | harness.fields(
      measured[name], clock=harness.clock(), units=size * case.images,
      unit='votes', flops=flops and flops * size)
          for name, size in sizes.items()}
  rows['jaxdp']['naive_votes'] = sizes['naive']
  rows['jaxdp']['ratio_to_naive'] = harness.ratio(
      measured['jaxdp'], measured['naive'], harness.clock()) * (
          sizes['jaxdp'] / sizes['naive'])
  return rows


def _described(case, num_votes, impl):
  """What a row says before it says how fast."""
  return {'benchmark': 'certify', 'name': case.name(num_votes, impl),
          'impl': impl, 'role': 'ours' if impl == 'jaxdp' else 'baseline',
          **case._asdict(), 'votes': num_votes}


def memory_row(case, peaks):
  """The row that sets the most votes beside the fewest.

  Args:
    case: `Case`.
    peaks: dict of number of votes to bytes or None.
  """
  few, many = min(peaks), max(peaks)
  known = None not in (peaks[few], peaks[many])
  return {'benchmark': 'certify', 'name': case.name(f'{few}..{many}', 'memory'),
          'role': 'fit', 'peak_bytes_by_votes': {
              str(num): peak for num, peak in peaks.items()},
          'votes_ratio': many / few,
          'extra_bytes_a_vote': (peaks[many] - peaks[few]) / (
              max(many - few, 1) * case.images) if known else None}


def define_flags():
  """Defines the flags of this binary."""
  usual = Case()
  flags.DEFINE_enum('dataset', usual.dataset, train_step_bench.DATASETS,
                    'Shape of the images.')
  flags.DEFINE_enum('mode', usual.mode, stobatch_config.MODES,
                    'As published, or what standard accounting proves.')
  flags.DEFINE_integer('images', usual.images, 'B, images.', lower_bound=1)
  flags.DEFINE_list('votes', ['1000', '10000', '100000'], 'n, of each row.')
  flags.register_validator(
      'votes', lambda v: v and all(n.isdigit() and int(n) for n in v),
      'give whole numbers >= 1')
  flags.DEFINE_integer('naive_votes', 1000, 'Votes of the loop in a call.',
                       lower_bound=1)
  flags.DEFINE_integer('repeats', 20, 'Timed calls of each.', lower_bound=1)
  flags.DEFINE_bool('quick', False, 'Digits, few votes, three repeats.')
  flags.DEFINE_bool('one_core', True, 'Pin to one core.')
  flags.DEFINE_string('out', None, 'File of the rows; standard output else.')


def rows_of(values):
  """Yields the rows that the flags ask for."""
  case = Case(values.dataset, values.mode, values.images)
  if values.quick:
    return run_case(case._replace(dataset='digits'), [500, 5000], 100, 3)
  return run_case(case, list(map(int, values.votes)), values.naive_votes,
                  values.repeats)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  if values.one_core:
    harness.pin()
  harness.emit(rows_of(values), values.out)


if __name__ == '__main__':
  define_flags()
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main)
