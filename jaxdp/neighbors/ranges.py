"""The least and the greatest distance between distinct rows. Host, NumPy."""

import math

import numpy as np

_BLOCK_BYTES = 2**26  # differences held at once


def distance_range(vectors):
  r"""Computes the least and the greatest distance between distinct rows.

  Float64 products with a rigorous rounding bound find the pairs in question;
  the result comes from float64 differences of those pairs. Rows that are equal
  count once, so the minimum is always positive.

  Args:
    vectors: the table, float32 ``[V, D]``, finite, with two distinct rows.

  Returns:
    ``(minimum, diameter)``, Python floats, unsquared.

  Raises:
    ValueError: not of rank 2, not finite, or fewer than two distinct rows.

  Example:
    >>> distance_range([[0.], [1.], [1.], [4.]])
    (1.0, 4.0)
  """
  vectors = np.asarray(vectors, np.float32)
  if vectors.ndim != 2:
    raise ValueError(f'vectors of shape {vectors.shape} must be [V, D]')
  if not np.isfinite(vectors).all():
    raise ValueError('vectors has entries that are not finite; remove them')
  rows = _distinct(vectors) if vectors.size else vectors[:0]
  if len(rows) < 2:
    raise ValueError(
        f'vectors of shape {vectors.shape} has {len(rows)} distinct row(s); a '
        'distance range takes two')
  low, high = _sq_range(rows.astype(np.float64))
  return math.sqrt(low), math.sqrt(high)


def _distinct(vectors):
  vectors = np.ascontiguousarray(vectors + np.float32(0))  # -0 becomes 0
  rows = vectors.view(np.dtype((np.void, vectors.shape[1] * 4))).ravel()
  return vectors[np.unique(rows, return_index=True)[1]]


def _sq_range(rows, size=1024):
  """Least and greatest squared distance between distinct float64 rows."""
  num, dim = rows.shape
  sq_norms = np.einsum('vd,vd->v', rows, rows)
  # One product gives |a|^2 + |b|^2 - 2 a . b, with D + 2 terms whose absolute
  # values add up to at most 2 (|a|^2 + |b|^2).
  left = np.column_stack([rows, sq_norms, np.ones(num)])
  right = np.column_stack([-2 * rows, np.ones(num), sq_norms])
  starts = range(0, num, size)
  bounds = {i: (dim + 8) * 2.**-51 * sq_norms[i:i + size].max()
            for i in starts}
  low, high = np.inf, 0.
  for i in starts:
    for j in starts[i // size:]:
      product = left[i:i + size] @ right[j:j + size].T
      if i == j:
        product[np.tril_indices(len(product))] = np.nan
      error = bounds[i] + bounds[j]
      least, most = np.fmin.reduce(product, None), np.fmax.reduce(product, None)
      if least <= low + error:
        close = product <= min(low, least + error) + error
        low = min(low, _recomputed(rows[i:], rows[j:], close, np.min))
      if most >= high - error:
        far = product >= max(high, most - error) - error
        high = max(high, _recomputed(rows[i:], rows[j:], far, np.max))
  return low, high


def _recomputed(left, right, mask, reduce_fn):
  """Reduces the squared distances of the masked pairs, from differences."""
  first, second = np.nonzero(mask)
  step = max(1, _BLOCK_BYTES // (8 * left.shape[1]))
  parts = []
  for i in range(0, len(first), step):
    diff = left[first[i:i + step]] - right[second[i:i + step]]
    parts.append(reduce_fn(np.einsum('nd,nd->n', diff, diff)))
  return float(reduce_fn(parts))
