r"""Operator norms of a first layer, from its kernel. Host, NumPy float64.

A kernel reshaped to :math:`\theta \in R^{d \times F}` maps one patch x of d
inputs to :math:`\theta^\top x`, one number a feature map. Norms of a matrix
below are those of the matrix that acts on x, :math:`\theta^\top`: its columns
are the d inputs, its rows the F maps.

A convolution applies that matrix at every position, and positions overlap: how
far one pixel or one attack moves ALL hidden units is a norm of the convolution,
larger than that of the matrix by the number of positions a pixel is part of,
or of all positions.

>>> import numpy as np
>>> from jaxdp.models import norms
>>> kernel = np.ones((3, 3, 1, 2))
>>> norms.column_norm(kernel), norms.row_norm(kernel)
(2.0, 9.0)
>>> norms.convolution_norms(kernel, (4, 4, 1), strides=1)
ConvolutionNorms(l1_l1=18.0, linf_l1=200.0, linf_linf=9.0)

References: Phan et al. (2020), Sections 4 and 5, which bound both effects by
norms of the matrix alone; Lecuyer et al. (2019), Section 3, for the sensitivity
of a layer below the noise.
"""

from typing import NamedTuple

import numpy as np


class ConvolutionNorms(NamedTuple):
  """Norms of a strided convolution between whole images and whole layers.

  Attributes:
    l1_l1: exact; how much one unit of change in one pixel and channel moves
      the hidden layer in L1: the largest sum of \\|weights\\| that touch it.
    linf_l1: how much a change of 1 in every pixel can move it in L1, at most:
      the sum of the 1-norms of all units. No larger value is possible; it is
      reached where one change suits the signs of all units.
    linf_linf: exact; how much that change can move one unit.
  """
  l1_l1: float
  linf_l1: float
  linf_linf: float


class OperatorNorms(NamedTuple):
  """All norms of one first layer; see the functions of these names.

  Attributes:
    column: ``column_norm``; Phan et al. (2020) write ``||theta||_{1,1}``.
    row: ``row_norm``; they write ``||theta||_inf``.
    spectral: ``spectral_norm``; the published code takes it for both.
    l1_l1: of the layer, as in ``ConvolutionNorms``.
    linf_l1: of the layer, as in ``ConvolutionNorms``.
  """
  column: float
  row: float
  spectral: float
  l1_l1: float
  linf_l1: float


def column_norm(kernel):
  r"""Largest column 1-norm of the matrix acting on x: L1 to L1, one patch.

  Args:
    kernel: ``[kh, kw, Cin, F]`` or ``[d, F]``.

  Returns:
    float, :math:`\max_j \sum_f |\theta_{jf}|`.

  Raises:
    ValueError: another rank, an empty axis, entries that are not finite.

  References: Phan et al. (2020), Lemma 3.
  """
  return float(np.abs(_matrix(kernel)).sum(axis=1).max())


def row_norm(kernel):
  r"""Largest row 1-norm of the matrix acting on x: L-inf to L-inf, one patch.

  Args:
    kernel: ``[kh, kw, Cin, F]`` or ``[d, F]``.

  Returns:
    float, :math:`\max_f \sum_j |\theta_{jf}|`.

  Raises:
    ValueError: as :func:`column_norm`.

  References: Phan et al. (2020), Section 5.
  """
  return float(np.abs(_matrix(kernel)).sum(axis=0).max())


def spectral_norm(kernel):
  """Largest singular value of the kernel as a matrix: L2 to L2, one patch.

  Args:
    kernel: ``[kh, kw, Cin, F]`` or ``[d, F]``.

  Returns:
    float. Not a bound for L1 or L-inf changes.

  Raises:
    ValueError: as :func:`column_norm`.
  """
  return float(np.linalg.norm(_matrix(kernel), 2))


def convolution_norms(kernel, image_shape, *, strides, padding='SAME'):
  """Norms of the whole strided convolution, zero padding counted exactly.

  Args:
    kernel: ``[kh, kw, Cin, F]``.
    image_shape: ``(H, W, Cin)``.
    strides: int >= 1, for both axes.
    padding: 'SAME', 'VALID' or ``((top, bottom), (left, right))``.

  Returns:
    ConvolutionNorms.

  Raises:
    ValueError: a kernel of another rank or not finite, an ``image_shape`` of
      other channels or smaller than the kernel, bad strides or padding.

  References: Phan et al. (2020), Section 5 and Appendix P, count one map.
  """
  weights = np.abs(_checked(kernel, (4,)))
  if len(image_shape) != 3 or image_shape[2] != weights.shape[2]:
    raise ValueError(f'image_shape={image_shape} must be (H, W, '
                     f'{weights.shape[2]}), as the kernel has that many inputs')
  pads = padding_pairs(image_shape[:2], weights.shape[:2], strides, padding)
  rows, cols = (
      _touches(size, window, strides, pad) for size, window, pad in
      zip(image_shape[:2], weights.shape[:2], pads))
  pixels = np.einsum('ai,bj,abc->ijc', rows.sum(0), cols.sum(0),
                     weights.sum(-1))
  units = np.einsum('oa,pb,abcf->opf', rows.sum(2), cols.sum(2), weights)
  return ConvolutionNorms(l1_l1=float(pixels.max()),
                          linf_l1=float(units.sum()),
                          linf_linf=float(units.max()))


def operator_norms(kernel, *, image_shape=None, strides=1, padding='SAME'):
  """Returns every norm of a first layer.

  Args:
    kernel: ``[kh, kw, Cin, F]``, or ``[d, F]`` of a dense layer.
    image_shape: ``(H, W, Cin)`` of a convolution; None for a dense layer.
    strides: as :func:`convolution_norms`.
    padding: as :func:`convolution_norms`.

  Returns:
    OperatorNorms.

  Raises:
    ValueError: as :func:`convolution_norms`, or a kernel whose rank does not
      fit ``image_shape``.
  """
  ndim = np.ndim(kernel)
  if (ndim == 4) != (image_shape is not None):
    raise ValueError(f'image_shape={image_shape} does not fit a kernel of '
                     f'shape {np.shape(kernel)}; a convolution needs it, a '
                     'dense layer has none')
  column, row = column_norm(kernel), row_norm(kernel)
  if ndim == 2:
    whole = column, float(np.abs(_matrix(kernel)).sum())
  else:
    whole = convolution_norms(kernel, image_shape, strides=strides,
                              padding=padding)[:2]
  return OperatorNorms(column, row, spectral_norm(kernel), *whole)


def padding_pairs(sizes, windows, strides, padding):
  """Returns ``((before, after), ...)`` of each axis, and checks them.

  'SAME' gives ``ceil(size / strides)`` positions, the odd zero behind.

  Raises:
    ValueError: strides below 1, an unknown padding, or no position left.
  """
  if not isinstance(strides, (int, np.integer)) or strides < 1:
    raise ValueError(f'strides={strides!r} must be an int of at least 1')
  if padding == 'SAME':
    totals = [max((-(-size // strides) - 1) * strides + window - size, 0)
              for size, window in zip(sizes, windows)]
    pairs = tuple((total // 2, total - total // 2) for total in totals)
  elif padding == 'VALID':
    pairs = tuple((0, 0) for _ in sizes)
  else:
    pairs = _explicit(padding, len(sizes))
  for size, window, pair in zip(sizes, windows, pairs):
    if size < 1 or size + sum(pair) < window:
      raise ValueError(f'image_shape: size {size} with padding {pair} is '
                       f'smaller than the kernel, {window}')
  return pairs


def _explicit(padding, num_axes):
  """Checks an explicit padding; a tuple of pairs of ints."""
  try:
    pairs = tuple((int(before), int(after)) for before, after in padding)
  except (TypeError, ValueError):
    pairs = ()
  if len(pairs) != num_axes or any(min(pair) < 0 for pair in pairs):
    raise ValueError(f"padding={padding!r} must be 'SAME', 'VALID' or one "
                     'pair of non-negative ints an axis')
  return pairs


def _touches(size, window, strides, pad):
  """Whether position o sees input i through weight a; float [O, A, I]."""
  num = (size + sum(pad) - window) // strides + 1
  seen = (strides * np.arange(num)[:, None] + np.arange(window)) - pad[0]
  return (seen[:, :, None] == np.arange(size)).astype(np.float64)


def _matrix(kernel):
  """The d x F matrix of a kernel, float64."""
  kernel = _checked(kernel, (2, 4))
  return kernel.reshape(-1, kernel.shape[-1])


def _checked(kernel, ranks):
  kernel = np.asarray(kernel, np.float64)
  if kernel.ndim not in ranks or not kernel.size:
    raise ValueError(f'kernel has shape {kernel.shape}; it must have '
                     f'{" or ".join(map(str, ranks))} axes, none empty')
  if not np.all(np.isfinite(kernel)):
    raise ValueError('kernel holds entries that are not finite; its norms '
                     'would bound nothing')
  return kernel
