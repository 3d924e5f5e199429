r"""What StoBatch minimises: reconstruction and classification. Device.

Classification. The published loss is a second-order Taylor expansion of the
sigmoid cross-entropy, and for one-hot labels exactly a squared error
(:func:`taylor_loss`):

.. math::  \ell(z, y) = \log 2 + (\tfrac12 - y) z + z^2/8
                      = \tfrac18 (z - (4y - 2))^2 - \tfrac12 + \log 2

It is linear in the label ``y``, so unbiased labels give an unbiased loss.

Reconstruction. The published one is a first-order expansion, linear in the
reconstruction and so *unbounded below*; :func:`reconstruction` has it as
printed, one that clips, and the elementwise loss of the released code. A
conventional reader finds the sensitivities of the paper's Lemmas 2 and 4 in
``guarantees``; :func:`moment_reconstruction` is the form whose data enter only
through two sums, so that one noisy release of them is enough.

>>> import jax.numpy as jnp
>>> loss = taylor_loss(jnp.array([[2., -2.]]), jnp.array([[1., 0.]]))
>>> round(float(loss[0] - 2 * (jnp.log(2.) - .5)), 6)  # both targets are met
0.0

References: Phan et al. (2020), Section 3 and Lemmas 2-4; Phan et al. (2017) for
the expansion.
"""

import math

import chex
import jax
import jax.numpy as jnp

RECONSTRUCTIONS = ('published', 'clipped', 'official')


def taylor_loss(logits, targets):
  r"""Returns the expanded cross-entropy of each example, summed over classes.

  Args:
    logits: ``[B, C]``.
    targets: ``[B, C]``; one-hot, or unbiased estimates of one-hot labels,
      which may leave [0, 1].

  Returns:
    ``[B]``; at least ``C (log 2 - 1/2)`` where the targets are one-hot.

  References: Phan et al. (2020), Section 3, the approximation before Lemma 4;
  Zhang et al. (2012), functional mechanism, which Appendix B recalls.
  """
  chex.assert_equal_shape([logits, targets])
  chex.assert_rank(logits, 2)
  # Linear in the targets, so unbiased ones give an unbiased loss; the square
  # would add a constant that depends on them.
  return jnp.sum(math.log(2.) + logits * (.5 - targets + logits / 8.), axis=-1)


def label_noise_term(kernel, noise):
  r"""Returns :math:`-\langle \chi_3 / m, W\rangle`, the perturbation of labels.

  Its gradient is the constant ``-noise``: at every step the same vector, while
  the features move. That is why no standard guarantee follows from it.

  Args:
    kernel: last layer, ``[P, C]``.
    noise: :math:`\chi_3 / m`, ``[P, C]``, one draw a run.

  References: Phan et al. (2020), Section 3, the perturbed functions after
  Lemma 4, as the mean over a batch.
  """
  chex.assert_equal_shape([kernel, noise])
  return -jnp.sum(kernel * noise)


def reconstruction(decode, hidden, images, *, form='published'):
  r"""Returns the reconstruction loss of each example.

  'published' is :math:`\sum_j (\tfrac12 - \bar x_j) \tilde x_j` with
  :math:`\tilde x = \theta_1 \bar h`, the noisy hidden layer held fixed as in
  the paper's gradient; it has no lower bound. 'clipped' clips
  :math:`\tilde x` to [-1, 1] first. 'official' has the released code's decoder
  and elementwise loss,
  :math:`|\log 2 + \max(\tilde x, 0) (\tfrac12 - \bar x)|`, whose gradient
  runs through the hidden layer too. It is not all of that code: there ReLU,
  batch normalisation and a clip to [-1, 1] stand between the affine layer and
  the noise, here none of them; and it sums over pixels, as the code does on
  MNIST and CIFAR-10, where on Tiny ImageNet the code takes their mean.

  Args:
    decode: function of hidden units, ``[B, ...] -> [B, H, W, C]``; its
      parameters are the tied weights.
    hidden: :math:`\bar h`, ``[B, ...]``.
    images: :math:`\bar x`, ``[B, H, W, C]``.
    form: one of ``RECONSTRUCTIONS``.

  Returns:
    ``[B]``, sums over pixels.

  References: Phan et al. (2020), Equations 5 and 6.
  """
  axes = tuple(range(1, images.ndim))
  if form == 'official':
    decoded = jax.nn.relu(decode(hidden))
    return jnp.sum(jnp.abs(math.log(2.) + decoded * (.5 - images)), axes)
  decoded = decode(jax.lax.stop_gradient(hidden))
  if form == 'clipped':
    decoded = jnp.clip(decoded, -1., 1.)
  return jnp.sum((.5 - images) * decoded, axes)


def moment_reconstruction(kernel, first, second, *, ridge):
  r"""Returns the reconstruction loss of a data set known by two moments.

  With :math:`G = \theta_1 \theta_1^T`, mean patch :math:`s` and mean outer
  product :math:`M` of patches, the published loss of a linear encoder is
  :math:`\tfrac12 1^T G s - \mathrm{tr}(G M)` a patch, for every
  :math:`\theta_1`: nothing else of the data is needed. The ridge
  :math:`\tfrac\rho2 \|G\|_F^2` bounds it below.

  Args:
    kernel: ``[d, F]``.
    first: ``[d]``.
    second: ``[d, d]``, symmetric; a noisy one need not be positive.
    ridge: :math:`\rho > 0`.
  """
  chex.assert_rank([kernel, first, second], [2, 1, 2])
  gram = kernel @ kernel.T
  return (.5 * jnp.sum(gram @ first) - jnp.sum(gram * second)
          + .5 * ridge * jnp.sum(gram * gram))
