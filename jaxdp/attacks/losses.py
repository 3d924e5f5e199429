"""The loss an attack climbs, and the labels in it. Device, pure, jittable.

Three label modes: the caller's labels; `predicted_labels`, predicted once at
the clean point, against label leaking; 'repredicted', predicted again at every
iterate. ``num_draws`` averages over fresh draws of the network's noise, with
memory that does not depend on it.

>>> import jax
>>> import jax.numpy as jnp
>>> predict_fn = lambda key, x: x * jnp.array([[1., -1.]])
>>> x = jnp.array([[3.], [-3.]])
>>> predicted_labels(jax.random.key(0), predict_fn, x).tolist()
[0, 1]
>>> loss_fn = cross_entropy_loss(predict_fn, labels=jnp.array([0, 0]))
>>> loss_fn(jax.random.key(0), x).round(2).tolist()
[0.0, 6.0]

References: Phan et al. (2020), equations 7-8; Kurakin et al. (2017), section 3,
on label leaking; Athalye et al. (2018) on the expectation over the noise.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.attacks import settings


def cross_entropy_loss(predict_fn, *, labels):
  """Builds the cross-entropy that the attacks raise.

  Args:
    predict_fn: ``(key, x) -> logits [B, C]``, noise drawn from the key.
    labels: int32 ``[B]`` in [0, C), the true ones or `predicted_labels`; or
      'repredicted': the arg-max of the same logits at every iterate. A traced
      label out of range makes the loss and the attack NaN.

  Returns:
    ``loss_fn(key, x) -> [B]``.

  Raises:
    ValueError: when the loss is traced, for labels or logits of a wrong shape
      and for concrete labels out of range.

  References: Phan et al. (2020), eq. 7-8 ('repredicted').
  """
  if isinstance(labels, str) and labels != 'repredicted':
    raise ValueError(f"labels={labels!r} must be int [B] or 'repredicted'; for "
                     'labels predicted once pass predicted_labels(...)')

  def loss_fn(key, x):
    logits = predict_fn(key, x)
    settings.check_shape('predict_fn', logits, (x.shape[0], None), '[B, C]')
    now = jnp.argmax(logits, axis=1) if isinstance(labels, str) else labels
    return _cross_entropy(logits, _check_labels(now, *logits.shape))

  return loss_fn


def predicted_labels(key, predict_fn, x, *, num_draws=1):
  """Returns the classes the network gives x, int32 ``[B]``.

  Args:
    key: typed key; consumed.
    predict_fn: ``(key, x) -> logits [B, C]``.
    x: float ``[B, ...]``.
    num_draws: static int >= 1; the arg-max is of the mean probability over
      as many draws of the network's noise.
  """
  settings.check_count('num_draws', num_draws)
  def draw(draw_key):
    logits = predict_fn(draw_key, x)
    settings.check_shape('predict_fn', logits, (x.shape[0], None), '[B, C]')
    return jax.nn.softmax(logits, axis=1)

  mean = mean_over_draws(key, draw, num_draws)
  return jnp.argmax(mean, axis=1).astype(jnp.int32)


def mean_over_draws(key, fun, num_draws):
  """Averages ``fun(key)`` over fresh keys; memory of one draw."""
  if num_draws == 1:
    return fun(key)
  add = lambda total, i: (total + fun(jax.random.fold_in(key, i)), None)
  like = jax.eval_shape(fun, key)
  total, _ = jax.lax.scan(add, jnp.zeros(like.shape, like.dtype),
                          jnp.arange(num_draws))
  return total / num_draws


def _cross_entropy(logits, labels):
  labels = labels[:, None]
  is_valid = (labels >= 0) & (labels < logits.shape[1])
  row = jnp.where(is_valid, labels, 0)
  picked = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), row, axis=1)
  return (picked * jnp.where(is_valid, -1., jnp.nan))[:, 0]


def _check_labels(labels, num_examples, num_classes):
  labels = labels if settings.is_traced(labels) else np.asarray(labels)
  if labels.shape != (num_examples,):
    raise ValueError(f'labels has shape {labels.shape}, expected [B] = '
                     f'{(num_examples,)}')
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    raise ValueError(f'labels has dtype {labels.dtype}; they are class indices')
  if not settings.is_traced(labels):
    settings.check_indices('labels', labels, num_classes)
  return jnp.asarray(labels)
