r"""Two noisy sums that an auto-encoder can be trained on for ever.

The published functional mechanism perturbs the coefficients of the
reconstruction loss batch by batch and goes on using every image. The loss of a
linear encoder needs only two sums over all patches :math:`x_p \in [-1, 1]^d`,
:math:`s = \sum x_p` and :math:`M = \sum x_p x_p^T`; releasing each ONCE with
Laplace noise is pure DP, and what is trained on them is post-processing:

.. math::
  \Delta_1 s = 2 P d, \qquad \Delta_1 M = P d (d + 1)

for P patches an image when one record is replaced and the upper triangle of M
is released. The sums run on the device, the noise is added on the host.

References: Zhang et al. (2012), functional mechanism; Dwork et al. (2006),
Laplace mechanism.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import guarantees
from jaxdp import samplers


class Moments(NamedTuple):
  """Means over patches, noised.

  Attributes:
    first: ``[d]``.
    second: ``[d, d]``, symmetric; not positive where the noise is large.
  """
  first: jax.Array
  second: jax.Array


def release(key, patches_fn, chunks, *, epsilon):
  """Returns the noised moments of a data set. Host loop over chunks.

  Guarantee: ``epsilon``-DP, replace one record; *proved* under real
  arithmetic and ideal random bits: half of it for each sum.

  Args:
    key: typed key of the run.
    patches_fn: ``images [B, H, W, C] -> patches [B, ..., d]``, entries in
      [-1, 1] for images in [-1, 1], which are clipped here; NaN counts as 0.
    chunks: iterable of image arrays; every record once.
    epsilon: budget > 0 of both sums.

  Returns:
    Moments.

  Raises:
    ValueError: no record, or a budget that is not positive.
  """
  if not epsilon > 0.:
    raise ValueError(f'epsilon={epsilon!r} must be positive; it is the budget '
                     'of both sums')
  first = second = num_patches = per_image = 0
  for images in chunks:
    sums = [np.asarray(a, np.float64) for a in _sums(images, patches_fn)]
    first, second = first + sums[0], second + sums[1]
    per_image = int(sums[2]) // len(images)
    num_patches += int(sums[2])
  if not num_patches:
    raise ValueError('chunks is empty; there is no record to release')
  noisy = _noise(key, first, second, per_image, epsilon)
  return Moments(*(jnp.asarray(a / num_patches, jnp.float32) for a in noisy))


@functools.partial(jax.jit, static_argnums=1)
def _sums(images, patches_fn):
  """Sum, sum of outer products and number of patches."""
  # A NaN would pass the clip and make every sum NaN: who has one would show.
  patches = patches_fn(jnp.clip(jnp.nan_to_num(images), -1., 1.))
  rows = patches.reshape(-1, patches.shape[-1])
  # float32 sums of a chunk: names the algorithm, as accelerators round more.
  second = jnp.einsum('pi,pj->ij', rows, rows, precision='float32')
  return jnp.sum(rows, 0), second, jnp.int32(rows.shape[0])


def _noise(key, first, second, per_image, epsilon):
  """Both sums with Laplace noise; the lower triangle mirrors the upper."""
  dimension = len(first)
  sensitivities = guarantees.one_shot_moments_sensitivity(
      per_image, dimension)
  keys = jax.random.split(jax.random.fold_in(key, samplers.MOMENTS))
  noise = [np.asarray(samplers.laplace(
      k, shape, scale=2. * sensitivity / epsilon), np.float64)
           for k, shape, sensitivity in zip(
               keys, (first.shape, second.shape), sensitivities)]
  upper = np.triu(second + noise[1])
  return first + noise[0], upper + np.triu(upper, 1).T
