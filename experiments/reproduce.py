r"""The main job: runs the core set of experiments and writes one report.

  python -m experiments.reproduce --quick --out=results/quick

Results: ``DIR/report.html``, and below DIR one directory an experiment with its
``rows.jsonl``, ``rows.csv`` and figures. Every experiment goes on where a
killed run stopped; one that fails is reported, leaves the others alone and
makes the exit status 1.

``--quick`` takes six to nine minutes on two cores; ``--all`` adds the
experiments beyond the core set, among them those that train networks. Without
``--quick`` the samples are those of the paper and the job takes hours on a CPU;
run it on an accelerator.
``--only=xu20_fig1,xu20_theorem1`` runs some; the report shows all that have
rows.
"""

import os
import sys
import time

from absl import app
from absl import flags
from absl import logging
import jax

from experiments import audit_library
from experiments import command_line
from experiments import habernal22_adept
from experiments import habernal22_fig1
from experiments import peers_audit
from experiments import phan20_fig2
from experiments import phan20_fig5
from experiments import phan20_fig7
from experiments import phan20_fig8
from experiments import privatize_reviews
from experiments import records
from experiments import report
from experiments import xu20_fig1
from experiments import xu20_fig2
from experiments import xu20_theorem1

# Cheapest first. Figure 2 shares the directory, and so the rows, of Figure 1.
EXPERIMENTS = {
    'xu20_theorem1': (xu20_theorem1, 'xu20_theorem1',
                      'Xu et al. (2020), Theorem 1'),
    'privatize_reviews': (privatize_reviews, 'privatize_reviews',
                          'Movie reviews, privatised'),
    'peers_audit': (peers_audit, 'peers_audit',
                    'Published implementations, audited'),
    'habernal22_fig1': (habernal22_fig1, 'habernal22_fig1',
                        'Habernal (2022), Figure 1'),
    'habernal22_adept': (habernal22_adept, 'habernal22_adept',
                         'ADePT, as printed and repaired'),
    'audit_library': (audit_library, 'audit_library',
                      'Every mechanism of the library, audited'),
    'xu20_fig1': (xu20_fig1, 'xu20_fig1', 'Xu et al. (2020), Figure 1'),
    'xu20_fig2': (xu20_fig2, 'xu20_fig1', 'Xu et al. (2020), Figure 2'),
    'phan20_fig2': (phan20_fig2, 'phan20_fig2', 'Phan et al. (2020), Figure 2'),
    'phan20_fig5': (phan20_fig5, 'phan20_fig5', 'Phan et al. (2020), Figure 5'),
    'phan20_fig7': (phan20_fig7, 'phan20_fig7', 'Phan et al. (2020), Figure 7'),
    'phan20_fig8': (phan20_fig8, 'phan20_fig8', 'Phan et al. (2020), Figure 8'),
}
_TRAINED = ('phan20_fig2', 'phan20_fig5', 'phan20_fig7', 'phan20_fig8')
_BEYOND_CORE = ('habernal22_adept', *_TRAINED)  # of --all only


def sections(experiments=None):
  """The report's sections, in the order of the experiments."""
  return [report.Section(name, directory, title, module.FIGURES,
                         module.findings)
          for name, (module, directory, title) in (
              experiments or EXPERIMENTS).items()]


def reproduce(out, configs, *, experiments=None):
  """Runs experiments one after the other and writes the report.

  Args:
    out: directory of the report.
    configs: dict from an experiment's name to its Config; those to run.
    experiments: dict as `EXPERIMENTS`, which is the default.

  Returns:
    Dict from the names of the experiments that failed to what they raised.
  """
  experiments = experiments or EXPERIMENTS
  errors = {}
  with records.Records(os.path.join(out, 'rows.jsonl'), {}) as file:
    for name in [name for name in experiments if name in configs]:
      module, directory, _ = experiments[name]
      places = ({'runs_dir': os.path.join(out, 'phan20_runs')}
                if name in _TRAINED else {})  # each network is trained once
      error, seconds = _timed(module, configs[name],
                              os.path.join(out, directory), **places)
      if error is not None:
        errors[name] = error
      file.append({'experiment': name, 'seconds': seconds,
                   'error': error and f'{type(error).__name__}: {error}'})
      logging.info('%s: %s in %.1f s', name,
                   'failed' if error else 'done', seconds)
    path = report.write(out, sections(experiments), file.rows,
                        title='jaxdp: claims, measurements, audits')
  logging.info('report: %s', path)
  return errors


def _timed(module, config, out, **places):
  """(error or None, seconds) of one experiment."""
  started = time.monotonic()
  try:
    module.execute(config, out, **places)
  except Exception as e:  # pylint: disable=broad-except
    logging.exception('%s failed', module.__name__)
    return e, time.monotonic() - started
  return None, time.monotonic() - started


def _chosen(only, everything=False):
  """The names that ``--only`` asks for; the core set where it is empty."""
  names = only or [name for name in EXPERIMENTS
                   if everything or name not in _BEYOND_CORE]
  unknown = [name for name in names if name not in EXPERIMENTS]
  if unknown:
    raise app.UsageError(
        f'--only={",".join(unknown)} is unknown; use {", ".join(EXPERIMENTS)}')
  return names


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  names = _chosen(flags.FLAGS.only, flags.FLAGS.all)
  out = flags.FLAGS.out or os.path.join(
      'results', 'quick' if flags.FLAGS.quick else 'full')
  if os.path.exists(out) and not os.path.isdir(out):
    sys.exit(f'reproduce: --out={out} is a file; name a directory')
  configs = {name: command_line.config(EXPERIMENTS[name][0],
                                       flags.FLAGS.quick, flags.FLAGS.seed)
             for name in names}
  if flags.FLAGS.plot_only:
    _draw_again(out, names)
    return
  errors = reproduce(out, configs)
  if errors:
    sys.exit('reproduce: failed: ' + '; '.join(
        f'{name} ({error})' for name, error in errors.items()))


def _draw_again(out, names):
  """Figures and report from the rows that are there."""
  runs = command_line.rows_of('reproduce', out)
  for name in names:
    module, directory, _ = EXPERIMENTS[name]
    rows = os.path.join(out, directory, 'rows.jsonl')
    if os.path.exists(rows):
      module.draw(records.read(rows)[1], os.path.join(out, directory))
  report.write(out, sections(), runs,
               title='jaxdp: claims, measurements, audits')


if __name__ == '__main__':
  command_line.define_flags('quick')
  flags.FLAGS.set_default('out', None)
  flags.DEFINE_list('only', [], 'Experiments to run; the core set where empty.')
  flags.DEFINE_bool('all', False, 'Every experiment, also those that a job of '
                    'ten minutes has no time for.')
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main)
