r"""Counts the answers of `nearest` that are not the nearest row. None is right.

  python -m benchmarks.exactness --V=400000 --D=300 --num_queries=100000

Host and device. The oracle is NumPy and Python integers and shares no code and
no bound with the search: products in single precision (double, where the range
asks for it) leave every row that an a-priori bound on their rounding does not
exclude, four times Higham's :math:`\gamma_D |q| |x|` with norms in double; the
rows left are compared by differences in double; and where the two least of
these are within 1e-9 of each other, by exact integers, ties to the lowest
index. So the product only ever saves work: it decides nothing.

Queries are words plus radial Laplace noise, drawn batch by batch. The exit
status is 1 when an answer is wrong. Kinds of table:

  gaussian    independent normal entries; noise that moves about half the words
  clustered   a hundred rows around each centre, a thousandth apart
  ulp         one row, but for the last bit of two entries: exact ties abound
  scaled      norms over twelve decades

>>> table, queries = np.eye(3, dtype=np.float32), np.float32([[0, 2, 0]])
>>> Oracle(table).nearest(queries).tolist()
[1]
"""

import functools
import sys

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

from benchmarks import harness
from experiments import records
from jaxdp import neighbors
from jaxdp.neighbors import search

KINDS = ('gaussian', 'clustered', 'ulp', 'scaled')
_CLOSE = 1e-9  # relative gap of two sums below which integers decide
_MANY = 64  # rows so close beyond which the proved gap of double is taken
_BLOCK_BYTES = 2**27
_PAIRS = 2**22  # entries of differences held at once
_CHECKED, _CHECKED_K = 256, 16  # queries of a batch that a `Check` looks at


def table_of(kind, num, dim, rng):
  """A table of a kind, float32 ``[num, dim]``."""
  rows = rng.standard_normal((num, dim), dtype=np.float32)
  if kind == 'clustered':
    rows *= np.float32(1e-3)
    rows += rng.standard_normal((-(-num // 100), dim), dtype=np.float32)[
        np.arange(num) // 100]
  elif kind == 'ulp':
    rows[:] = rows[0].copy()
    row, column = np.arange(num)[:, None], rng.integers(dim, size=(num, 2))
    away = rng.choice(np.float32([-9, 9]), (num, 2))
    rows[row, column] = np.nextafter(rows[row, column], away)
  elif kind == 'scaled':
    rows *= (10**rng.uniform(-6, 6, (num, 1))).astype(np.float32)
  return rows


def queries_of(kind, table, count, rng):
  """Rows of the table plus noise, float32 ``[count, dim]``."""
  dim = table.shape[1]
  rows = table[rng.integers(len(table), size=count)]
  noise = rng.standard_normal((count, dim))
  noise *= (rng.gamma(dim, 1 / dim, count)
            / np.linalg.norm(noise, axis=1) * dim**.5)[:, None]
  # Of the order of what moves half the words.
  size = {'gaussian': dim**.5 / 4.5, 'clustered': 1e-3 * dim**.5 / 2.5,
          'ulp': 1e-7,
          'scaled': np.linalg.norm(rows, axis=1, keepdims=True) / 2}
  return (rows + size[kind] * noise).astype(np.float32)


def problem(kind, num, dim, count, k=1, *, num_batches, seed=0):
  """A table and batches of ``count`` queries; for k > 1 these are its rows."""
  rng = np.random.default_rng(seed)
  table = table_of(kind, num, dim, rng)
  if k == 1:
    return table, [queries_of(kind, table, count, rng)
                   for _ in range(num_batches)]
  starts = (np.arange(num_batches) * num // num_batches)[:, None]
  return table, list(table[(starts + np.arange(count)) % num])


def integers(row):
  """Entries of a float32 row times 2^149, exact Python integers."""
  return [int(v) for v in (row.astype(np.float64) * 2.**149).tolist()]


def exact_nearest(query, table, ids):
  """The row among ``ids`` of least distance by exact integers, lowest first."""
  query = integers(query)
  sums = {}
  for row in ids.tolist():
    key = table[row].tobytes()
    if key not in sums:  # equal rows have equal sums
      sums[key] = sum((a - b)**2 for a, b in zip(query, integers(table[row])))
  return min(ids.tolist(), key=lambda row: (sums[table[row].tobytes()], row))


class Oracle:
  """The nearest rows of a table, independent of what is tested.

  Attributes:
    close: queries so far whose answer integers gave.
  """

  def __init__(self, table):
    self._table = table
    self._norm = np.sqrt(_sq_norms(table))
    self._unit = 2 * (table.shape[1] + 8)  # times the spacing of numbers at 1
    self._bounds = functools.cache(self._bounds)
    self.close = 0

  def nearest(self, queries):
    """Ids int64 ``[B]`` of the nearest rows of float32 ``[B, D]``."""
    size = max(1, _BLOCK_BYTES // (8 * len(self._table)))
    return np.concatenate([
        self._block(queries[start:start + size])
        for start in range(0, len(queries), size)])

  def _block(self, queries):
    query, row = self._candidates(queries)
    sums = self._sq_distances(queries, query, row)
    starts = np.searchsorted(query, np.arange(len(queries) + 1))
    ids = np.empty(len(queries), np.int64)
    for i, (start, end) in enumerate(zip(starts[:-1], starts[1:])):
      near = row[start:end][_near(sums[start:end], queries.shape[1])]
      ids[i] = (near[0] if len(near) == 1 else
                exact_nearest(queries[i], self._table, near))
      self.close += len(near) > 1
    return ids

  def _candidates(self, queries):
    """Query and row of all pairs that a rounded product cannot exclude.

    One product gives lower bounds of ``|x|^2 / 2 - q x``: two columns more hold
    the first term and what rounding may do.
    """
    norm = np.sqrt(_sq_norms(queries))
    dtype = self._dtype(norm)
    unit = self._unit * np.finfo(dtype).eps
    low = np.concatenate(
        [-queries, np.ones((len(queries), 1)), (-unit * norm)[:, None]],
        axis=1, dtype=dtype) @ self._bounds(dtype).T
    best = np.argmin(low, axis=1)
    error = unit * (norm * self._norm[best] + self._norm[best]**2 / 2)
    cut = low[np.arange(len(queries)), best] + 2 * error
    cut = np.nextafter(cut.astype(dtype), dtype(np.inf))
    # Flat: NumPy is ten times as fast on one axis.
    return np.divmod(np.flatnonzero(low <= cut[:, None]), len(self._table))

  def _bounds(self, dtype):
    """The table, ``|x|^2 / 2`` less its error, and ``|x|``: ``[V, D + 2]``."""
    half = self._norm**2 / 2 * (1 - self._unit * np.finfo(dtype).eps)
    return np.concatenate([self._table, half[:, None], self._norm[:, None]],
                          axis=1, dtype=dtype)

  def _dtype(self, norm):
    """Single precision where no square or product leaves its range."""
    norms = np.concatenate([self._norm, norm])
    norms = norms[norms > 0]
    fits = not norms.size or norms.min() > 1e-9 and norms.max() < 1e15
    return np.float32 if fits else np.float64

  def _sq_distances(self, queries, query, row):
    size = max(1, _PAIRS // queries.shape[1])
    return np.concatenate([
        _sq_norms(queries[query[i:i + size]].astype(np.float64)
                  - self._table[row[i:i + size]])
        for i in range(0, len(row), size)])


def _near(sums, dim):
  """Which rows rounding in double could have kept from being the least."""
  near = sums <= np.min(sums) * (1 + _CLOSE)
  if np.sum(near) > _MANY:
    near = sums <= np.min(sums) * (1 + (dim + 8) * 2.**-51)
  return near


def _sq_norms(rows):
  """Squares of norms in double, ``[N]``."""
  return np.einsum('ij,ij->i', rows, rows, dtype=np.float64)


def sq_distances(queries, table, ids):
  """Float64 squared distances ``[N, k]`` of float32 queries to rows."""
  ids = ids.reshape(len(queries), -1)
  return np.stack([np.sum((row.astype(np.float64) - table[i])**2, axis=1)
                   for row, i in zip(queries, ids)])


class Check:
  """What answers to batches of queries must be, before anything is timed.

  For some queries of each batch, spread evenly: by the `Oracle` for one
  neighbour, by float64 differences to all rows for several.

  Attributes:
    index: which queries of a batch.
  """

  def __init__(self, table, batches, k=1):
    self._table, self._k, self._num = table, k, len(batches[0])
    num = min(self._num, _CHECKED if k == 1 else _CHECKED_K)
    self.index = np.arange(num) * self._num // num
    self._queries = [batch[self.index] for batch in batches]
    oracle = Oracle(table)
    self._want = [oracle.nearest(q) if k == 1 else self._least(q)
                  for q in self._queries]

  def _least(self, queries):
    rows = self._table.astype(np.float64)
    sums = np.stack([np.sum((rows - q)**2, axis=1) for q in queries])
    return np.argsort(sums, axis=1, kind='stable')[:, :self._k]

  def agreement(self, name, answer, exact):
    """Share of the queries answered as float64 does.

    Args:
      name: what an error calls the contestant.
      answer: function of the batch's number, ids ``[B]`` or ``[B, k]``.
      exact: whether every id must be right; else distances may be beyond the
        least by what float32 rounding of norms and products explains (the
        default products of a GPU: TF32).

    Raises:
      ValueError: a wrong answer, by name.
    """
    same = []
    for turn, (queries, want) in enumerate(zip(self._queries, self._want)):
      got = np.asarray(answer(turn)).reshape(self._num, -1)[self.index]
      want = want.reshape(got.shape)
      same.append(np.all(got == want, axis=1))
      excess = (sq_distances(queries, self._table, got)
                - sq_distances(queries, self._table, want))
      slack = 0. if exact else self._slack(queries)
      bad = np.any(got != want if exact else excess > slack, axis=1)
      if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f'{name}: batch {turn}, query {self.index[row]}: rows '
            f'{got[row][:4]}, expected {want[row][:4]}; squared distances '
            f'exceed the least by {excess[row].max():.3g}')
    return float(np.mean(same))

  def _slack(self, queries):
    unit = (queries.shape[1] + 8) * 2.**-22
    if jax.default_backend() != 'cpu':
      unit += 2.**-9
    most = np.max(np.linalg.norm(self._table, axis=1))
    return unit * (np.linalg.norm(queries, axis=1)[:, None] + most)**2


def precisions_of(choice):
  """What ``--precision`` names."""
  return ('float32', 'certified') if choice == 'both' else (choice,)


def count(kind, num, dim, num_queries, *, precisions, batch=1024, seed=0,
          nearest=neighbors.nearest):
  """Counts wrong answers, a batch at a time, with progress.

  Args:
    kind: one of `KINDS`.
    num: V.
    dim: D.
    num_queries: how many in all; rounded up to whole batches.
    precisions: of `nearest`, each asked all queries.
    batch: queries of one call.
    seed: of table and queries; batch i draws from ``(seed, 1 + i)``.
    nearest: what is tested; a test passes a wrong one.

  Returns:
    The row: ``mismatches`` by precision, ``examples`` of them, ``close``.
  """
  table = table_of(kind, num, dim, np.random.default_rng((seed, 0)))
  prepared = {p: neighbors.prepare(table, precision=p) for p in precisions}
  oracle, wrong, examples = Oracle(table), dict.fromkeys(precisions, 0), []
  num_batches = -(-num_queries // batch)
  steps = {}
  with records.Progress(num_batches) as progress:
    for turn in range(num_batches):
      queries = queries_of(kind, table, batch,
                           np.random.default_rng((seed, 1 + turn)))
      want = oracle.nearest(queries)
      for precision, ready in prepared.items():
        got = np.asarray(nearest(queries, ready)[0])
        wrong[precision] += int(np.sum(got != want))
        examples += _examples(precision, turn, got, want)
        if not turn:
          steps[precision] = _steps(queries, ready)
      progress.update(1, f'mismatches={wrong}')
  name = f'exactness/kind={kind},V={num},D={dim}'
  return {'benchmark': 'exactness', 'name': name, 'role': 'check',
          'kind': kind, 'V': num, 'D': dim, 'num_queries': num_batches * batch,
          'mismatches': wrong, 'examples': examples[:10],
          'close': int(oracle.close), 'steps_of_first_batch': steps,
          'formats': {p: t.format for p, t in prepared.items()},
          'batch': batch, 'seed': seed, 'machine': harness.machine()}


def _examples(precision, turn, got, want):
  return [{'precision': precision, 'batch': turn, 'query': int(i),
           'got': int(got[i]), 'want': int(want[i])}
          for i in np.flatnonzero(got != want)[:3]]


def _steps(queries, prepared):
  """How many queries of a batch the slower steps of the search took."""
  counts = search.compiled(None)(jax.device_put(queries), prepared)[2]
  return {name: int(value) for name, value in counts._asdict().items()}


def define_flags():
  """Defines the flags of this binary."""
  flags.DEFINE_integer('V', 50_000, 'Rows of the table.', lower_bound=1)
  flags.DEFINE_integer('D', 300, 'Dimensions.', lower_bound=1)
  flags.DEFINE_integer('num_queries', 16_384, 'Queries in all.', lower_bound=1)
  flags.DEFINE_enum('kind', 'gaussian', KINDS, 'Kind of table and queries.')
  flags.DEFINE_enum('precision', 'both', ['float32', 'certified', 'auto',
                                          'both'], 'Of `nearest`.')
  flags.DEFINE_integer('batch', 1024, 'Queries of one call.', lower_bound=1)
  flags.DEFINE_integer('seed', 0, 'Of table and queries.', lower_bound=0)
  flags.DEFINE_string('out', None, 'File of the row; standard output else.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  values = flags.FLAGS
  row = count(values.kind, values.V, values.D, values.num_queries,
              precisions=precisions_of(values.precision),
              batch=min(values.batch, values.num_queries), seed=values.seed)
  harness.emit([row], values.out)
  sys.exit(1 if any(row['mismatches'].values()) else 0)


if __name__ == '__main__':
  define_flags()
  flags.FLAGS.set_default('verbosity', logging.INFO)
  jax.config.config_with_absl()
  app.run(main)
