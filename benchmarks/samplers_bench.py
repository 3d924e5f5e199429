r"""Samplers and Lambert W: nanoseconds a sample beside JAX, NumPy and SciPy.

  python -m benchmarks.samplers_bench --num_samples=1048576

One pinned core, CPU time, float32 unless a contestant offers none (NumPy's
Laplace and Gumbel and all of SciPy draw float64). Every contestant must first
pass its law: the shares at or below stated quantiles within 6 standard
deviations. Lambert W must first be within 4 units in the last place of 50-digit
values; SciPy's error is reported beside it.

``ratio_to_jax`` is the time of JAX's own draw over ours, above 1 where ours is
faster. Where JAX has no such law, the row says which draw stands for it.

>>> laws = {law.name for law in cases(4096)['laplace'].laws}
>>> laws
{'value'}
"""

import functools
from typing import Any, Callable, NamedTuple

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special as sp_special
from scipy import stats

from benchmarks import harness
from jaxdp import samplers
from jaxdp import special

_LEVELS = np.array([.001, .01, .1, .5, .9, .99, .999])
_SCALE, _BOUND = 2., 6.  # of the truncated Gumbel
_RATE, _HIGH = float(np.log(50_000)), 50_000  # of the truncated Poisson
_OUTCOMES = 64
_MAX_ULP = 4.
_PATIENCE = 120.  # seconds of rounds a row; a slow contestant gets fewer
_PRNGS = {'threefry2x32': 64, 'threefry4x32': 128}


class Law(NamedTuple):
  """What a statistic of the samples must look like."""
  name: str
  statistic: Callable  # samples -> float [n]
  edges: Any  # [q]
  shares: Any  # [q], Pr(statistic <= edge)


class Case(NamedTuple):
  """One sampler and what is timed beside it, by name of the contestant.

  ``jax`` ones take a typed key and are jitted, ``numpy`` and ``scipy`` ones a
  Generator.
  """
  draw: Callable
  size: int  # samples of a call
  laws: tuple
  peers: dict
  other_laws: dict | None = None  # of contestants that draw another law
  note: str = ''


def check_law(contestant, samples, laws):
  """Raises ValueError where a share is 6 deviations off its law.

  Args:
    contestant: name, for the message.
    samples: what it drew.
    laws: tuple of Law.
  """
  samples = np.asarray(samples)
  for law in laws:
    drawn = np.sort(law.statistic(samples).reshape(-1))
    counts = np.searchsorted(drawn, law.edges, side='right')
    expected = len(drawn) * np.asarray(law.shares)
    slack = 6 * np.sqrt(expected * (1 - law.shares)) + 6
    for edge, count, mean, most in zip(law.edges, counts, expected, slack):
      if not abs(count - mean) <= most:
        raise ValueError(
            f'{contestant}: {count} of {len(drawn)} samples have {law.name} at '
            f'most {edge:.6g}, expected {mean:.1f} within {most:.1f}')


def _value(ppf):
  return Law('value', np.asarray, ppf(_LEVELS), _LEVELS)


def _finite(pmf, low=0):
  """Law of an integer: one edge an outcome."""
  shares = np.minimum(np.cumsum(pmf), 1.)
  return Law('value', np.asarray, low + np.arange(len(pmf)), shares)


def vector_laws(dim):
  """Laws of multivariate Laplace vectors at epsilon = 1, samples [N, D].

  The norm is Gamma(D); the direction uniform, so a coordinate of it is a Beta.
  """
  half = stats.beta((dim - 1) / 2, (dim - 1) / 2)
  norm = lambda x: np.linalg.norm(np.float64(x), axis=-1)
  return (Law('norm', norm, stats.gamma(dim).ppf(_LEVELS), _LEVELS),
          Law('first coordinate of the direction',
              lambda x: x[..., 0] / norm(x), 2 * half.ppf(_LEVELS) - 1,
              _LEVELS))


def cases(num, dims=(100, 300)):
  """All samplers at about ``num`` samples a call, by name."""
  made = {'laplace': _laplace(num), 'gumbel': _gumbel(num),
          'truncated_gumbel': _truncated_gumbel(num),
          'truncated_poisson': _truncated_poisson(num),
          'categorical': _categorical(num),
          'element_keys': _element_keys(num // 8)}
  for dim in dims:
    made[f'multivariate_laplace/D={dim}'] = _vectors(num // dim, dim)
    made[f'multivariate_laplace_by_element/D={dim}'] = _vectors(
        num // dim, dim, by_element=True)
  return made


def _laplace(num):
  return Case(
      lambda key: samplers.laplace(key, (num,), scale=1.), num,
      (_value(stats.laplace.ppf),),
      {'jax': lambda key: jax.random.laplace(key, (num,)),
       'numpy': lambda rng: rng.laplace(size=num),
       'scipy': lambda rng: stats.laplace.rvs(size=num, random_state=rng)})


def _gumbel(num):
  draw = lambda mode: lambda key: jax.random.gumbel(key, (num,), mode=mode)
  return Case(
      lambda key: samplers.gumbel(key, (num,)), num,
      (_value(stats.gumbel_r.ppf),),
      {'jax': draw('low'), 'jax_highest': draw('highest'),
       'numpy': lambda rng: rng.gumbel(size=num),
       'scipy': lambda rng: stats.gumbel_r.rvs(size=num, random_state=rng)},
      note='jax_highest is mode="highest", the one with full tails')


def _truncated_gumbel(num):
  low, high = np.exp(-np.exp([_BOUND / _SCALE, -_BOUND / _SCALE]))
  ppf = lambda u: -_SCALE * np.log(-np.log(low + u * (high - low)))

  def jax_inverse(key):
    u = jax.random.uniform(key, (num,), minval=low, maxval=high)
    return jnp.clip(-_SCALE * jnp.log(-jnp.log(u)), -_BOUND, _BOUND)

  def numpy_inverse(rng):
    return -_SCALE * np.log(-np.log(rng.uniform(low, high, num)))

  return Case(
      lambda key: samplers.truncated_gumbel(key, (num,), scale=_SCALE,
                                            bound=_BOUND), num,
      (_value(ppf),),
      {'jax': jax_inverse, 'numpy': numpy_inverse,
       'scipy': lambda rng: stats.gumbel_r.ppf(
           rng.uniform(low, high, num), scale=_SCALE)},
      note='jax, numpy: inverse CDF of a uniform, float32 and float64; scipy: '
      'gumbel_r.ppf of a uniform')


def _truncated_poisson(num):
  pmf = samplers.truncated_poisson_probabilities(
      rate=_RATE, low=1, high=_HIGH, max_value=80)
  move = lambda xp, x: xp.where((x < 1) | (x >= _HIGH), _HIGH, x)
  return Case(
      lambda key: samplers.truncated_poisson(key, (num,), rate=_RATE, low=1,
                                             high=_HIGH), num,
      (_finite(pmf[:80], 1),),
      {'jax': lambda key: move(jnp, jax.random.poisson(key, _RATE, (num,))),
       'numpy': lambda rng: move(np, rng.poisson(_RATE, num)),
       'scipy': lambda rng: move(np, stats.poisson.rvs(
           _RATE, size=num, random_state=rng))},
      note='the others draw a Poisson and move what lies outside')


def _categorical(num):
  weights = np.exp(-np.arange(_OUTCOMES) / 8.)
  pmf = weights / weights.sum()
  thresholds = samplers.thresholds(pmf)
  law = stats.rv_discrete(values=(np.arange(_OUTCOMES), pmf))
  return Case(
      lambda key: samplers.categorical(key, (num,), thresholds=thresholds), num,
      (_finite(pmf),),
      {'jax': lambda key: jax.random.choice(
          key, _OUTCOMES, (num,), p=jnp.float32(pmf)),
       'numpy': lambda rng: rng.choice(_OUTCOMES, num, p=pmf),
       'scipy': lambda rng: law.rvs(size=num, random_state=rng)},
      note=f'{_OUTCOMES} outcomes; jax: random.choice, an inverse CDF')


def _element_keys(num):
  words = jax.random.key_data
  bits = Law('first key word / 2**32', lambda x: x[..., 0] / 2.**32, _LEVELS,
             _LEVELS)
  children = max(1, num // 64)

  def numpy_spawn(rng):
    return np.stack([s.generate_state(2) for s in np.random.SeedSequence(
        int(rng.integers(2**63))).spawn(children)])

  return Case(
      lambda key: words(samplers.element_keys(key, samplers.OUTCOME, 0, num)),
      num, (bits,),
      {'jax': lambda key: words(jax.random.split(jax.random.wrap_key_data(
          jax.random.key_data(key)[:2], impl='threefry2x32'), num)),
       'numpy': numpy_spawn},
      note='samples are keys; jax: split of a 64-bit key, without an index; '
      f'numpy: SeedSequence.spawn of {children} keys')


def _vectors(rows, dim, by_element=False):
  def whole(key):
    return samplers.multivariate_laplace(key, (rows, dim), epsilon=1.)

  def one_key_each(key):
    keys = samplers.element_keys(key, samplers.VECTOR_NOISE, 0, rows)
    return samplers.map_elements(
        lambda k: samplers.multivariate_laplace(k, (dim,), epsilon=1.), keys)

  def numpy_vectors(rng):
    x = rng.standard_normal((rows, dim), np.float32)
    radius = rng.standard_gamma(dim, (rows, 1), np.float32)
    return x * (radius / np.linalg.norm(x, axis=1, keepdims=True))

  def scipy_vectors(rng):
    radius = stats.gamma.rvs(dim, size=(rows, 1), random_state=rng)
    return radius * stats.uniform_direction(dim, seed=rng).rvs(rows)

  return Case(
      one_key_each if by_element else whole, rows * dim, vector_laws(dim),
      {'jax': lambda key: jax.random.normal(key, (rows, dim)),
       'numpy': numpy_vectors, 'scipy': scipy_vectors},
      {'jax': (_value(stats.norm.ppf),)},
      note='jax: random.normal alone, a part of the work')


def contestants(case, key):
  """Functions of no argument, ours compiled, reasons of who is left out."""
  keys = [jax.random.fold_in(key, i) for i in range(4)]
  ours = harness.compile_ahead(case.draw, key)
  calls, skipped = {'jaxdp': harness.rotating(ours.call, keys)}, {}
  for peer, draw in case.peers.items():
    if not peer.startswith('jax'):
      calls[peer] = functools.partial(draw, np.random.default_rng(0))
      continue
    try:
      call = harness.compile_ahead(draw, key).call
      calls[peer] = harness.rotating(call, keys)
    except NotImplementedError as e:  # of this generator
      skipped[peer] = str(e)
  return calls, ours, skipped


def checked(name, case, calls):
  """Checks every law; returns samples a call and dtypes, by contestant."""
  drawn = {who: np.asarray(call()) for who, call in calls.items()}
  for who, x in drawn.items():
    laws = (case.other_laws or {}).get(who, case.laws)
    check_law(f'{name}, {who}', x, laws)
  whole = drawn['jaxdp'].size
  return ({who: case.size * x.size / whole for who, x in drawn.items()},
          {who: x.dtype.name for who, x in drawn.items()})


def sampler_row(name, prng, case, rounds):
  """Checks and times one sampler under one generator's key."""
  words = jnp.arange(1, 1 + _PRNGS[prng] // 32, dtype=jnp.uint32)
  calls, ours, skipped = contestants(
      case, jax.random.wrap_key_data(words, impl=prng))
  _, first = harness.once(calls['jaxdp'])
  (sizes, dtypes), spent = harness.once(lambda: checked(name, case, calls))
  rounds = max(3, min(rounds, int(_PATIENCE / spent.wall)))
  return {'benchmark': 'samplers', 'sampler': name, 'prng': prng,
          'name': f'{name}/n={case.size},{dtypes["jaxdp"]},{prng}',
          'note': case.note, 'dtypes': dtypes, 'skipped': skipped,
          'compile_s': ours.seconds.wall, 'temp_bytes': ours.temp_bytes,
          } | _times(harness.interleave(calls, rounds), sizes, first)


def _times(measured, sizes, first):
  """Nanoseconds a sample of each, and the ratios to ours."""
  ours = measured['jaxdp']
  out = harness.fields(ours, units=sizes['jaxdp'], unit='samples')
  for who, theirs in measured.items():
    out[f'ns_per_sample_{who}'] = 1e9 * float(np.median(
        [s.cpu for s in theirs.calls])) / sizes[who]
    if who != 'jaxdp':
      out[f'ratio_to_{who}'] = (harness.ratio(ours, theirs)
                                * sizes['jaxdp'] / sizes[who])
  return out | {'first_run_s': first.wall, 'machine': harness.machine()}


def lambertw_points(num, dtype, seed=0):
  """Arguments on branch 0: near -1/e, around 0, and log-spaced to 1e5."""
  rng = np.random.default_rng(seed)
  near = -np.exp(-1.) + 10**rng.uniform(-5, -2, num // 3)
  middle = rng.uniform(-.36, 3., num // 3)
  far = 10**rng.uniform(np.log10(3.), 5, num - 2 * (num // 3))
  return np.concatenate([near, middle, far]).astype(dtype)


def ulp_errors(x, values):
  """Errors in units in the last place of ``x.dtype``, from 50 digits."""
  try:
    import mpmath
  except ImportError as e:
    raise ValueError("Lambert W is checked with mpmath: pip install "
                     "'jaxdp[test]'") from e
  with mpmath.workdps(50):
    exact = [mpmath.lambertw(mpmath.mpf(float(v))).real for v in x]
    errors = [abs(float(mpmath.mpf(float(w)) - e))
              for w, e in zip(values, exact)]
  spacing = np.spacing(np.abs([float(e) for e in exact]).astype(x.dtype))
  return np.array(errors) / spacing


def check_ulp(name, errors):
  """Raises ValueError where an error is above the documented 4 ulp."""
  if not max(errors) <= _MAX_ULP:
    raise ValueError(f'{name} is {max(errors):.3g} ulp off; at most {_MAX_ULP}')


def lambertw_row(dtype, num, num_checked, rounds):
  """Checks Lambert W in one format and times it beside SciPy's."""
  points, few = (lambertw_points(n, dtype) for n in (num, num_checked))
  scipy = lambda x: sp_special.lambertw(x).real
  with jax.enable_x64(True):
    x = jnp.asarray(points)
    ours = harness.compile_ahead(special.lambertw, x)
    errors = ulp_errors(few, np.asarray(special.lambertw(jnp.asarray(few))))
    check_ulp(f'lambertw, {few.dtype}', errors)
    _, first = harness.once(lambda: ours.call(x))
    measured = harness.interleave(
        {'jaxdp': lambda: ours.call(x), 'scipy': lambda: scipy(points)}, rounds)
  sizes = dict.fromkeys(measured, num)
  return {'benchmark': 'samplers', 'sampler': 'lambertw', 'prng': None,
          'name': f'lambertw/n={num},{points.dtype}',
          'note': 'scipy computes complex float64 in both formats',
          'compile_s': ours.seconds.wall, 'temp_bytes': ours.temp_bytes,
          'max_ulp': float(max(errors)),
          'max_ulp_scipy': float(max(ulp_errors(
              few, scipy(few).astype(dtype)))),
          } | _times(measured, sizes, first)


def rows(num, num_checked, rounds, dims=(100, 300), only=None):
  """Yields the rows: every sampler by generator, then Lambert W.

  Args:
    num: samples a call.
    num_checked: values of Lambert W compared with 50 digits.
    rounds: timed calls of each contestant.
    dims: of the multivariate Laplace.
    only: names of samplers; None for all.
  """
  made = cases(num, dims)
  if unknown := set(only or ()) - {*made, 'lambertw'}:
    raise ValueError(f'--only={sorted(unknown)} must be among '
                     f'{[*made, "lambertw"]}')
  for name, case in made.items():
    for prng in _PRNGS if only is None or name in only else ():
      yield sampler_row(name, prng, case, rounds)
  for dtype in (np.float64, np.float32):
    if only is None or 'lambertw' in only:
      yield lambertw_row(dtype, num, num_checked, rounds)


def define_flags():
  """Defines the flags of this binary."""
  flags.DEFINE_integer('num_samples', 2**20, 'Samples a call.',
                       lower_bound=2**12)
  flags.DEFINE_integer('rounds', 20, 'Timed calls of each.', lower_bound=1)
  flags.DEFINE_list('only', None, 'Samplers; all without it.')
  flags.DEFINE_bool('quick', False, 'Few samples and rounds.')
  flags.DEFINE_bool('one_core', True, 'Tie the process to one core.')
  flags.DEFINE_string('out', None, 'File of the rows; standard output else.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  if values.one_core:
    harness.pin()
  sizes = ((2**14, 60, 3, (100,)) if values.quick else
           (values.num_samples, 600, values.rounds))
  harness.emit(rows(*sizes, only=values.only), values.out)


if __name__ == '__main__':
  define_flags()
  jax.config.config_with_absl()
  app.run(main)
