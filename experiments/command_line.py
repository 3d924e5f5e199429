"""The command line that the figure and table experiments share. Host.

An experiment module has ``Config``, ``QUICK`` (a Config), ``execute(config,
out)``, ``draw(rows, out)`` and, for the report, ``FIGURES`` and
``findings(rows)``; its last lines are::

  if __name__ == '__main__':
    command_line.main(sys.modules[__name__], 'xu20_fig1')

Flags are defined when a binary starts and never at import, so that one program
may import many experiments.
"""

import dataclasses
import os
import sys

from absl import app
from absl import flags
from absl import logging
import jax

from experiments import records


def define_flags(name):
  """Defines ``--out``, ``--seed``, ``--quick`` and ``--plot_only``."""
  flags.DEFINE_string('out', os.path.join('results', name),
                      'Directory of rows.jsonl, rows.csv and the figures.')
  flags.DEFINE_integer('seed', None, "Seed of samples and draws; the Config's "
                       'own where not given.', lower_bound=0,
                       upper_bound=2**32 - 1)
  flags.DEFINE_bool('quick', False, 'A few minutes on two cores.')
  flags.DEFINE_bool('plot_only', False, 'Draw from the rows that are there.')
  for flag in ('out', 'seed', 'quick', 'plot_only'):
    # They are the binary's own, so that --helpshort lists them.
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag])


def config(module, quick, seed):
  """The Config of a module that two flags ask for; no seed keeps its own."""
  chosen = module.QUICK if quick else module.Config()
  return chosen if seed is None else dataclasses.replace(chosen, seed=seed)


def main(module, name, adapt=lambda config: config):
  """Runs an experiment module as a binary.

  Args:
    module: the experiment.
    name: of its results directory.
    adapt: what flags of the module's own make of its Config.
  """
  define_flags(name)
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()

  def run(argv):
    if len(argv) > 1:
      raise app.UsageError(f'unknown arguments: {argv[1:]}')
    out = flags.FLAGS.out
    if os.path.exists(out) and not os.path.isdir(out):
      sys.exit(f'{name}: --out={out} is a file; name a directory')
    if flags.FLAGS.plot_only:
      module.draw(rows_of(name, out), out)
      return
    chosen = config(module, flags.FLAGS.quick, flags.FLAGS.seed)
    module.execute(adapt(chosen), out)

  app.run(run)


def rows_of(name, out):
  """The rows of a directory, or an end with one line that says what to do."""
  path = os.path.join(out, 'rows.jsonl')
  try:
    rows = records.read(path)[1]
  except (OSError, ValueError) as e:
    sys.exit(f'{name}: --plot_only: {path} cannot be read: {e}')
  if not rows:
    sys.exit(f'{name}: --plot_only: {path} holds no rows; run without it first')
  return rows


def collect(module, settings, out):
  """Makes the rows that OUT/rows.jsonl lacks, and the CSV; returns all rows.

  Args:
    module: has ``KEY`` (names of the fields that tell grid points apart),
      ``grid`` of a Config and ``run`` of one
      and of what is done.
    settings: the module's Config.
    out: directory, made where missing.
  """
  with records.Records(os.path.join(out, 'rows.jsonl'), settings) as file:
    done = file.done(*module.KEY)
    with records.Progress(len(module.grid(settings)),
                          initial=len(done)) as progress:
      for row in module.run(settings, done):
        file.append(row)
        progress.update(1, ' '.join(f'{k}={row[k]}' for k in module.KEY))
    rows = file.rows
  records.to_csv(rows, os.path.join(out, 'rows.csv'))
  return rows
