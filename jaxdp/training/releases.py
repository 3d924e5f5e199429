r"""What StoBatch does to its records before it trains: the mechanism. Device.

:func:`release` is the only place where a RECORD, image and label, gets its
noise before training; training, the audit and the figures all call it. (Sums
over records get theirs in ``moments.release``, fresh votes of a prediction in
``stobatch.make_predict``.) Two modes:

``paper``: one draw :math:`\chi_1 / m` is added to EVERY image, and labels
leave as they are. The difference of two released images is the difference of
the images, so knowing one record gives all others: *claimed* (as metric DP at
L1 distance 1 by Phan et al. (2020), Lemma 3), and under standard accounting
nothing.

``sound``: each image is clipped to [-1, 1] and gets independent Laplace noise
on every pixel and channel, keyed by the example's id and so the same in every
epoch and every batch; labels pass k-ary randomised response. *proved*:
``guarantees.standard`` has the epsilon. Everything that is computed
from the result is post-processing.

Noise inside the network (:math:`\chi_2` on hidden units, :math:`\chi_3` on
the coefficients of the loss) is drawn here too, by :func:`draw_noise`.

References: Phan et al. (2020), Equations 5-8 and Algorithm 4, lines 1-2;
Kasiviswanathan et al. (2011) for local noise.
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp.mechanisms import numeric


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
  """The scales of a run, from its budget; host numbers, hashable.

  Attributes:
    mode: 'paper' or 'sound'.
    image_shape: (H, W, C).
    hidden_shape: shape of one example's first layer.
    num_classes: K.
    num_last: P, units of the last hidden layer.
    input_scale: Laplace scale on a pixel of [-1, 1].
    hidden_scale: Laplace scale on a unit of the first layer.
    label_scale: Laplace scale on a coefficient of the mean loss; 0 in
      'sound' mode, where the labels themselves are randomised.
    label_epsilon: budget of the labels.
    input_epsilon: budget of the images as the mode counts it: ``epsilon_1``
      in 'paper', the standard one in 'sound'.
    gamma, gamma_x: the paper's divisors of ``epsilon_1``; NaN in 'sound'.
    norm: the norm of the first layer that gamma rests on; NaN in 'sound'.
    channel_copies: whether one draw a pixel is copied to all channels, as in
      the released code.
  """
  mode: str
  image_shape: tuple[int, ...]
  hidden_shape: tuple[int, ...]
  num_classes: int
  num_last: int
  input_scale: float
  hidden_scale: float
  label_scale: float
  label_epsilon: float
  input_epsilon: float
  gamma: float = float('nan')
  gamma_x: float = float('nan')
  norm: float = float('nan')
  channel_copies: bool = False


class Noise(NamedTuple):
  """The draws of one run that the network lives with.

  Attributes:
    inputs: what every image got, ``[H, W, C]``; zeros in 'sound' mode, where
      every image has its own.
    hidden: what every first layer gets, ``hidden_shape``.
    label: what the coefficients of the mean loss get, ``[P, K]``.
    input_scale: scale of fresh noise on pixels at ``noise_divisor`` 1, ``[]``.
    hidden_scale: the same on hidden units, ``[]``.
  """
  inputs: jax.Array
  hidden: jax.Array
  label: jax.Array
  input_scale: jax.Array
  hidden_scale: jax.Array


class Released(NamedTuple):
  """Records as the training sees them; nothing else of the data reaches it.

  Attributes:
    images: ``[B, H, W, C]``, not inside [-1, 1].
    targets: ``[B, K]``; one-hot, or unbiased estimates of it.
    ids: int32 ``[B]``, index of the record in the data set.
  """
  images: jax.Array
  targets: jax.Array
  ids: jax.Array


def draw_noise(key, calibration):
  """Draws what one run shares among its records.

  In 'sound' mode inputs and labels are zero here: their noise is the record's
  own (:func:`release`). Hidden noise is shared in both modes; in 'sound' it
  protects nothing, and its fresh draws serve certificates alone.

  Args:
    key: typed key of the run.
    calibration: from ``stobatch.calibrate``.

  Returns:
    Noise.
  """
  shared = calibration.mode == 'paper'
  label_shape = (calibration.num_last, calibration.num_classes)
  hidden_key = jax.random.fold_in(key, samplers.HIDDEN_NOISE)
  label_key = jax.random.fold_in(key, samplers.LABEL_NOISE)
  return Noise(
      inputs=_shared_input_noise(key, calibration) if shared
      else jnp.zeros(calibration.image_shape),
      hidden=samplers.laplace(hidden_key, calibration.hidden_shape,
                              scale=calibration.hidden_scale),
      label=samplers.laplace(label_key, label_shape,
                             scale=calibration.label_scale),
      input_scale=jnp.float32(calibration.input_scale),
      hidden_scale=jnp.float32(calibration.hidden_scale))


def release(key, calibration, images, labels, ids):
  """Returns the records as training may see them: THE mechanism of StoBatch.

  Guarantee: see the module; ``guarantees.standard`` and
  ``stobatch_claimed`` have the numbers.

  Args:
    key: typed key of the run, the same in every call of the run.
    calibration: from ``stobatch.calibrate``; static under ``jax.jit``.
    images: ``[B, H, W, C]`` in [-1, 1]; see :func:`check_records`.
    labels: int32 ``[B]`` in [0, K).
    ids: int32 ``[B]``, index of the record in the data set.

  Returns:
    Released; a record's own depends on (key, id) and not on the batch.
  """
  chex.assert_rank([images, labels, ids], [4, 1, 1])
  if calibration.mode == 'paper':
    noisy = images + _shared_input_noise(key, calibration)[None]
    targets = jax.nn.one_hot(labels, calibration.num_classes)
    return Released(noisy, targets, ids)
  # A NaN would pass the clip and leave as it is: who has one would show.
  images = jnp.clip(jnp.nan_to_num(images), -1., 1.)
  return Released(
      _independent_noise(key, calibration, images, ids),
      _randomized_targets(key, calibration, labels, ids), ids)


def _shared_input_noise(key, calibration):
  """One draw for the whole data set, float32 [H, W, C]."""
  height, width, channels = calibration.image_shape
  drawn = 1 if calibration.channel_copies else channels
  noise = samplers.laplace(jax.random.fold_in(key, samplers.INPUT_NOISE),
                           (height, width, drawn),
                           scale=calibration.input_scale)
  return jnp.broadcast_to(noise, calibration.image_shape)


def _independent_noise(key, calibration, images, ids):
  """The images with a draw of its own on every pixel of every record."""
  keys = samplers.id_keys(key, samplers.INPUT_NOISE, ids)
  return images + jax.vmap(lambda k: samplers.laplace(
      k, calibration.image_shape, scale=calibration.input_scale))(keys)


def _randomized_targets(key, calibration, labels, ids):
  """Randomised response, corrected so that its mean is the one-hot label."""
  params, truth, lie = _response(calibration.num_classes,
                                 calibration.label_epsilon)
  keys = samplers.id_keys(key, samplers.LABEL_NOISE, ids)
  answers = jax.vmap(
      lambda k, label: numeric.randomized_response(k, label, params))(
          keys, labels)
  one_hot = jax.nn.one_hot(answers, calibration.num_classes)
  return (one_hot - lie) / (truth - lie)


@functools.cache
def _response(num_classes, epsilon):
  """Parameters of randomised response and its two probabilities."""
  params = numeric.calibrate_randomized_response(
      num_categories=num_classes, epsilon=epsilon)
  truth, lie = (int(mass) / 2**64 for mass in params.masses(0)[:2])
  return params, truth, lie


def label_guarantee(calibration):
  """Returns the Guarantee of one released label in 'sound' mode. Host."""
  return _response(calibration.num_classes,
                   calibration.label_epsilon)[0].guarantee


def check_records(images, labels, num_classes):
  """Refuses records that the mechanism does not cover. Host.

  Args:
    images: float ``[N, H, W, C]``; uint8 images are scaled first.
    labels: integer ``[N]``.
    num_classes: K.

  Raises:
    ValueError: pixels outside [-1, 1] or not finite, labels out of range, or
      lengths that differ.
  """
  images, labels = np.asarray(images), np.asarray(labels)
  if images.ndim != 4 or len(images) != len(labels):
    raise ValueError(f'images has shape {images.shape} and labels '
                     f'{labels.shape}; pass [N, H, W, C] and [N]')
  low, high = (images.min(), images.max()) if images.size else (0., 0.)
  if not (low >= -1. and high <= 1.):  # NaN too
    raise ValueError(f'images has values in [{low}, {high}] and must lie in '
                     '[-1, 1]; the sensitivity rests on it: scale bytes by '
                     'x / 127.5 - 1')
  if labels.size and not 0 <= labels.min() <= labels.max() < num_classes:
    raise ValueError(f'labels has values in [{labels.min()}, {labels.max()}] '
                     f'and must lie in [0, {num_classes})')
