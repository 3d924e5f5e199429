"""The peer mldp-text: what its interpreter runs, its start, its answers.

Host. Of :func:`setup` the source alone goes over, by ``harness.Peer``: the peer
keeps its own NumPy and needs nothing of this project.

>>> import numpy as np
>>> nearest_share(np.float32([[.9]]), np.float32([[0.], [1.]]), [1])
1.0

References: Meisenbacher et al. (2024), A Comparative Analysis of Word-Level
Metric Differential Privacy.
"""

import contextlib
import os
import shutil
import tempfile

import numpy as np

from benchmarks import harness
from benchmarks import samplers_bench

_RECALL = .5  # the peer looks at half of its lists
_ADVICE = 'give the path of an interpreter with mldp-text installed'


def setup(table, epsilon):
  """Builds the peer's multivariate Laplace mechanism as its README does.

  By default it searches a faiss index and looks at half of its lists.

  Args:
    table: path of float32 ``[V, D]``, an .npy file; its words are w0, w1, ...
    epsilon: budget per unit distance.

  Returns:
    ``run(ids, noise)``: ids that replace ``ids``, one by one, the peer's only
    way; with ``noise`` also the vectors it added. Without ids, its version.
  """
  import importlib.metadata
  import gensim
  import mldp_text
  import numpy as np  # pylint: disable=redefined-outer-name,reimported
  vectors = np.load(table)
  words = gensim.models.KeyedVectors(vectors.shape[1])
  words.add_vectors([f'w{i}' for i in range(len(vectors))], vectors)
  mechanism = mldp_text.get_mechanism(
      'multivariate_calibrated', epsilon=epsilon, use_faiss=True,
      embedding_matrix=words, dim=vectors.shape[1])

  def run(ids=None, noise=False):
    if ids is None:
      return importlib.metadata.version('mldp-text')
    mechanism.return_noise = noise
    out = [mechanism.replace_word(f'w{i}') for i in ids]
    if not noise:
      return [int(word[1:]) for word in out]
    return ([int(word[1:]) for word, _ in out],
            [added.tolist() for _, added in out])

  return run


def check_python(python):
  """Raises ValueError where ``python`` cannot be run."""
  if shutil.which(python) is None:
    raise ValueError(f'--peer_python={python!r} is no interpreter; {_ADVICE}')


@contextlib.contextmanager
def start(python, vectors, epsilon):
  """Runs the peer on a table for the length of a ``with`` block.

  Args:
    python: path of its interpreter.
    vectors: float32 ``[V, D]``.
    epsilon: budget per unit distance.

  Yields:
    `harness.Peer`.

  Raises:
    ValueError: no such interpreter, or one that cannot run the peer.
  """
  check_python(python)
  with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    path = os.path.join(directory, 'table.npy')
    np.save(path, vectors)
    try:
      peer = harness.Peer(python, setup, table=path, epsilon=epsilon)
    except RuntimeError as e:
      raise ValueError(f'--peer_python={python!r} cannot run mldp-text; '
                       f'{_ADVICE} ({e})') from e
    yield stack.enter_context(peer)


def check(vectors, epsilon, ids, out, noise):
  """Checks what the peer answered.

  Args:
    vectors: float32 ``[V, D]``.
    epsilon: its budget.
    ids: int ``[B]``.
    out: int ``[B]``, its answers.
    noise: ``[B, D]``, what it added.

  Returns:
    Share of its answers that are the nearest word: its index is approximate.

  Raises:
    ValueError: noise of another law, or a share below a half.
  """
  samplers_bench.check_law('peer', noise * epsilon,
                           samplers_bench.vector_laws(vectors.shape[1]))
  recall = nearest_share(vectors[ids] + noise, vectors, out)
  if recall < _RECALL:
    raise ValueError(f'peer: {recall:.3g} of its answers are the nearest word; '
                     f'its index should find at least {_RECALL}')
  return recall


def nearest_share(queries, vectors, ids):
  """Share of ids that are a nearest row, by float64 differences."""
  table, hits = np.asarray(vectors, np.float64), 0
  for query, row in zip(np.asarray(queries, np.float64), np.asarray(ids)):
    sq_distance = np.sum((table - query)**2, axis=1)
    hits += bool(sq_distance[row] <= sq_distance.min() * (1 + 1e-12))
  return hits / len(ids)
