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


def config(module, quick, seed):
  """The Config of a module that two flags ask for; no seed keeps its own."""
  chosen = module.QUICK if quick else module.Config()
  return chosen if seed is None else dataclasses.replace(chosen, seed=seed)


def main(module, name):
  """Runs an experiment module as a binary; `name` is its results directory."""
  define_flags(name)
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()

  def run(argv):
    if len(argv) > 1:
      raise app.UsageError(f'unknown arguments: {argv[1:]}')
    out = flags.FLAGS.out
    if flags.FLAGS.plot_only:
      module.draw(records.read(os.path.join(out, 'rows.jsonl'))[1], out)
      return
    module.execute(config(module, flags.FLAGS.quick, flags.FLAGS.seed), out)

  app.run(run)


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
