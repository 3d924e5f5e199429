"""Movie reviews privatised by each core mechanism, lines side by side.

  python -m experiments.privatize_reviews --out=results/privatize_reviews

The first sentences of the embedded reviews go through
``experiments.privatize_text`` once a mechanism, as a user's file would: each
output has its guarantee card beside it. The seed is fixed so that the run can
be repeated, and the card says that such a file protects nobody who knows it.
Budgets are chosen to keep part of the words; they are no recommendation, and
epsilons of two mechanisms are not comparable.
"""

import dataclasses
import os
import pathlib
import sys

from experiments import command_line
from experiments import privatize_text
from experiments import records
from experiments.datasets import embedded

KEY = ('mechanism', 'epsilon')
FIGURES = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What determines the rows and the files.

  Attributes:
    seed: of every file's key, insecure on purpose.
    num_lines: sentences, from the first.
    num_shown: sentences kept in the rows.
    budgets: pairs (mechanism, epsilon).
    table: as ``privatize_text --table``.
  """
  seed: int = 0
  num_lines: int = 10_605
  num_shown: int = 6
  budgets: tuple[tuple[str, float], ...] = (
      ('multivariate_laplace', 10.), ('truncated_gumbel', 2e4),
      ('gumbel_exponential', 59.), ('tem', 3.), ('santext', 3.))
  table: str = 'embedded'


QUICK = Config(num_lines=300)


def grid(config):
  """Returns the (mechanism, epsilon) of every row."""
  return list(config.budgets)


def run(config, done=frozenset(), *, out):
  """Yields one row a mechanism; writes its file and card into ``out``."""
  source = os.path.join(out, 'reviews.txt')
  lines = [review.text for review in embedded.reviews()[:config.num_lines]]
  records.write_atomic(source, ''.join(f'{line}\n' for line in lines))
  for mechanism, epsilon in grid(config):
    if (mechanism, epsilon) in done:
      continue
    name = f'{mechanism}_{epsilon:g}.txt'
    # The row is missing, so a file that is there was made by a killed run.
    card = privatize_text.privatize_file(privatize_text.Config(
        input=source, output=os.path.join(out, name), mechanism=mechanism,
        epsilon=epsilon, table=config.table, oov='uniform',
        insecure_seed=config.seed, overwrite=True))
    text = pathlib.Path(out, name).read_text(encoding='utf-8').split('\n')
    yield _row(config, name, card, lines, text)


def _row(config, name, card, before, after):
  guarantee = card['table_words']
  return {
      'mechanism': card['mechanism'], 'epsilon': guarantee['epsilon'],
      'claimed_epsilon': guarantee['epsilon'], 'status': guarantee['status'],
      'source': guarantee['source'], 'file_status': card['guarantee']['status'],
      'num_lines': len(before), 'num_tokens': card['tokens']['total'],
      'num_unknown': card['tokens']['unknown']['count'],
      'unknown_policy': card['tokens']['unknown']['policy'],
      'entropy': card['randomness']['entropy'],
      'file': name, 'card': f'{name}.guarantee.json',
      'before': before[:config.num_shown], 'after': after[:config.num_shown]}


def findings(rows):
  """Sentences about the rows, every number read from them."""
  return [f'{row["mechanism"]}: {row["num_tokens"]:,} words of '
          f'{row["num_lines"]:,} lines, {row["num_unknown"]:,} of them outside '
          f'the table ({row["unknown_policy"]}); key from '
          f'{row["entropy"]}.' for row in rows]


def draw(rows, out):
  """No figure."""
  del rows, out


class _InFolder:
  """This module with the folder its files go to."""

  KEY, grid = KEY, staticmethod(grid)

  def __init__(self, out):
    self._out = out

  def run(self, config, done):
    return run(config, done, out=self._out)


def execute(config, out):
  """Files, cards and rows, into a directory; returns the rows."""
  os.makedirs(out, exist_ok=True)
  return command_line.collect(_InFolder(out), config, out)


if __name__ == '__main__':
  command_line.main(sys.modules[__name__], 'privatize_reviews')
