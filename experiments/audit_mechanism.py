r"""Audits your own mechanism on two inputs; exits 1 when its claim is violated.

  python -m experiments.audit_mechanism --function=my_module:my_mechanism \
    --x=x.npy --x_prime=x_prime.npy --claim=1.0 --num_trials=1000000

The function is ``(key, x) -> array`` (or any pytree of arrays) written with
``jax.numpy``, found from the current directory. With ``--vectorized`` it is
``(key, x, num)`` and returns ``num`` runs on its first axis. What was found is
``OUT/audit.json``: ``epsilon_lower`` is a valid lower bound at
``--significance``, ``ceiling`` the most that so many runs can show. An old one
is removed at the start, so a failed run leaves none.

Exit status: 0 not violated, or no claim; 1 violated; 2 the audit could not run.
That an audit finds no violation is no proof.
"""

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import sys
import tempfile

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

from experiments import records
from jaxdp import auditing
from jaxdp import samplers
from jaxdp.auditing import black_box
from jaxdp.auditing import scores

_FILE = 'audit.json'


def load_function(name):
  """The function behind ``module:function``.

  Raises:
    ValueError: a name of another form, an unknown module or function.
  """
  module, colon, function = name.partition(':')
  if not (module and colon and function):
    raise ValueError(f'function={name!r} must read module:function')
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    found = importlib.import_module(module)
  except (Exception, SystemExit) as e:  # whatever a module does when imported
    raise ValueError(f'function={name!r}: module {module!r} cannot be imported '
                     f'from {os.getcwd()!r}: {e}') from e
  value = getattr(found, function, None)
  if not callable(value) or isinstance(value, type):
    raise ValueError(f'function={name!r}: {module!r} has no function '
                     f'{function!r}')
  return value


def load_input(name, path):
  """An array of a .npy file, or ValueError by the flag's name."""
  try:
    value = np.load(path, allow_pickle=False)
  except (OSError, ValueError, EOFError) as e:
    raise ValueError(f'{name}={path!r} cannot be read as a .npy array: {e}'
                     ) from e
  if not isinstance(value, np.ndarray) or value.dtype.kind not in 'fiub':
    raise ValueError(f'{name}={path!r} must hold one array of real numbers')
  if value.dtype.kind == 'f' and not np.isfinite(value).all():
    raise ValueError(f'{name}={path!r} holds a NaN or an infinity')
  return value  # in its own dtype: a cast could make two inputs equal


def prepare_out(out):
  """Makes the directory and takes an old audit.json away, before any run.

  Raises:
    ValueError: it is no directory, cannot be made or cannot be written.
  """
  if not out:
    raise ValueError(f'out={out!r} must name a directory')
  try:
    os.makedirs(out, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
      pass
    with contextlib.suppress(FileNotFoundError):
      os.unlink(os.path.join(out, _FILE))  # a failed run must leave none
  except OSError as e:
    raise ValueError(f'out={out!r} must be a directory that can be made and '
                     f'written: {e.strerror}') from e


def audit_function(fun, x, x_prime, *, out, key, claim, described=None,
                   **settings):
  """Runs the audit and writes OUT/audit.json.

  Args:
    fun: as for ``auditing.audit``.
    x: first input.
    x_prime: second input.
    out: directory, made where missing.
    key: typed key; consumed.
    claim: epsilon, or None.
    described: dict that goes into the file too: where function and inputs come
      from, the seed.
    **settings: further arguments of ``auditing.audit``.

  Returns:
    The AuditResult.

  Raises:
    ValueError: as ``auditing.audit``; ``out`` cannot be written. No audit.json
      is left then, be it of an earlier run.
  """
  prepare_out(out)
  result = auditing.audit(fun, x, x_prime, key=key, claim=claim, **settings)
  body = (described or {}) | result._asdict() | {
      'notes': list(result.notes), 'versions': _versions()}
  records.write_atomic(os.path.join(out, _FILE),
                       json.dumps(body, indent=1) + '\n')
  return result


def _versions():
  return {'python': platform.python_version()} | {
      name: importlib.metadata.version(name)
      for name in ('jax', 'jaxlib', 'numpy')}


def define_flags():
  """Defines the flags of this binary."""
  flags.DEFINE_string('function', None, 'module:function of (key, x).')
  flags.DEFINE_string('x', None, '.npy of the first input.')
  flags.DEFINE_string('x_prime', None, '.npy of the neighbouring input.')
  flags.DEFINE_float('claim', None, 'Epsilon that is claimed.')
  flags.DEFINE_float('delta', 0., 'Delta of the claim.')
  flags.DEFINE_integer('num_trials', 1_000_000, 'Runs on each input.',
                       lower_bound=1)
  flags.DEFINE_float('significance', .05, 'Chance that the bound is too high.')
  flags.DEFINE_enum('score', 'identity', scores.NAMES, 'What is looked at.')
  flags.DEFINE_enum('selection', 'split', black_box.SELECTIONS,
                    'How the event is chosen.')
  flags.DEFINE_multi_float('threshold', None, "With 'fixed' or 'bonferroni'.")
  flags.DEFINE_bool('vectorized', False, 'The function takes (key, x, num).')
  flags.DEFINE_integer('seed', None, 'Seed of the runs; fresh entropy where '
                       'not given.', lower_bound=0, upper_bound=2**32 - 1)
  flags.DEFINE_string('out', os.path.join('results', 'audit_mechanism'),
                      'Directory of audit.json.')


def main(argv):
  try:
    if len(argv) > 1:
      raise ValueError(f'unknown arguments: {argv[1:]}')
    values = flags.FLAGS
    if values.claim is not None and not 0 < values.claim < math.inf:
      raise ValueError(f'claim={values.claim} must be a finite epsilon above 0')
    prepare_out(values.out)
    key = (samplers.secure_key(64) if values.seed is None
           else jax.random.key(values.seed))
    result = audit_function(
        load_function(values.function), load_input('x', values.x),
        load_input('x_prime', values.x_prime), out=values.out, key=key,
        claim=values.claim, num_trials=values.num_trials, delta=values.delta,
        significance=values.significance, score=values.score,
        selection=values.selection, thresholds=values.threshold,
        vectorized=values.vectorized, described={
            'function': values.function, 'x': values.x,
            'x_prime': values.x_prime, 'seed': values.seed})
  except Exception as e:  # pylint: disable=broad-except
    # Status 1 says that the claim is violated: no failure may look like it.
    logging.error('audit_mechanism: %s%s',
                  '' if isinstance(e, (ValueError, OSError)) else
                  f'{type(e).__name__}: ', ' '.join(str(e).split()))
    sys.exit(2)
  logging.info(
      '%s: epsilon_lower %.6g (point %.6g, ceiling %.6g, %d runs, significance '
      '%g), claim %s: %s', values.function, result.epsilon_lower,
      result.epsilon_point, result.ceiling, result.num_trials,
      result.significance, result.claim, result.verdict or 'no claim')
  sys.exit(1 if result.verdict == 'violated' else 0)


def parse(argv):
  """The flags of a command line; a bad one ends with status 2."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    sys.stderr.write(f'audit_mechanism: {e}\n')
    sys.exit(2)


if __name__ == '__main__':
  define_flags()
  flags.mark_flags_as_required(['function', 'x', 'x_prime'])
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main, flags_parser=parse)
