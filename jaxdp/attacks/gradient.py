r"""Gradient attacks on a randomised network. Device, pure, jittable.

In the room: `fgsm`, `ifgsm`, `mim`, `pgd`, and `ensemble`, which gives each
example of a batch one of them; `cross_entropy_loss` and `predicted_labels`,
which build the loss; `random_starts`, which keys PGD's starting points by
example.

An attack climbs ``loss_fn(key, x) -> [B]``, labels and parameters closed over.
The network is attacked as it is deployed: its noise is drawn from the key
inside `loss_fn`, each step gets a fresh key, and ``num_draws`` keys a step give
the expectation over the noise (EOT). The loss of example i must depend on row i
alone: normalisation by batch statistics leaks between rows. Its noise should be
keyed by example where nothing may depend on the batch split.

Labels: pass the true ones; or ``predicted_labels(key, predict_fn, x)``, fixed
at the start, against label leaking; or 'repredicted', predicted again at each
iterate as in Phan et al.

Size: ``attack_bound`` is in the unit of x, a number or one an example, and may
be traced: a new one does not compile again. Settings that are not arrays are
static. Compile the call around the loss, not the loss into the call:

>>> weights = jnp.array([[1., -1.], [-2., 2.]])
>>> predict_fn = lambda key, x: x @ weights  # [B, 2] logits
>>> @jax.jit
... def attack(key, x, labels, attack_bound):
...   loss_fn = cross_entropy_loss(predict_fn, labels=labels)
...   return pgd(key, loss_fn, x, attack_bound=attack_bound, num_steps=10)
>>> x, labels = jnp.array([[.5, .1]]), jnp.array([0])
>>> (attack(jax.random.key(0), x, labels, .3) - x).round(3).tolist()
[[-0.30000001192092896, 0.30000001192092896]]

References: Goodfellow et al. (2015); Kurakin et al. (2017); Dong et al. (2018)
for the momentum; Madry et al. (2018) for PGD; Athalye et al. (2018) for EOT;
Phan et al. (2020), "Scalable differential privacy with certified robustness in
adversarial learning", equations 7-8, for the ensemble.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import samplers
from jaxdp.attacks import balls
from jaxdp.attacks import losses
from jaxdp.attacks import settings
from jaxdp.attacks.losses import cross_entropy_loss  # noqa: F401
from jaxdp.attacks.losses import predicted_labels  # noqa: F401

ATTACKS = ('fgsm', 'ifgsm', 'mim', 'pgd')
_PGD_STEP = 2.5  # in bounds a run: Madry et al. (2018)

# A gradient inside a loop of XLA costs twice one outside it on a CPU (MNIST
# network, 192 images, jax 0.10.2: 59 and 30 ms); unrolled, ten steps compile in
# 2.8 s instead of 1.9.
_UNROLLED = 16

# Streams beside those of the examples, which fold the high half of an id here;
# restart r takes its steps with the r-th below the first.
_STEPS = np.uint32(2**32 - 1)
_COMPARISON = np.uint32(2**31)


class _Climb(NamedTuple):
  """What the steps of one attack share."""

  loss_fn: object
  shape: tuple[int, ...]
  region: balls.Region
  attack_norm: str
  num_draws: int


def fgsm(key, loss_fn, x, *, attack_bound, attack_norm='linf', low=-1., high=1.,
         num_draws=1):
  """One steepest step of the length of the bound.

  Args:
    key: typed key; consumed.
    loss_fn: ``(key, x) -> [B]``, which the attack raises.
    x: float ``[B, ...]``, the points attacked.
    attack_bound: radius > 0 around x in ``attack_norm``, scalar or ``[B]``;
      may be traced. In l1 and l2 the norm is of the flattened example.
    attack_norm: 'linf', 'l2' or 'l1'.
    low, high: the box of valid inputs, numbers or arrays that broadcast to x;
      None is unbounded, as for inputs that carry noise. Where x lies outside
      it, the box grows to hold x.
    num_draws: static int >= 1, EOT draws of the gradient a step.

  Returns:
    Array like x in the ball (linf: exactly; l2, l1: up to rounding) and in the
    box.

  Raises:
    ValueError: at trace time, for what is known then and out of range, and for
      a loss that is not ``[B]``.

  References: Phan et al. (2020), eq. 7; Goodfellow et al. (2015).
  """
  climb = _pose(loss_fn, x, attack_bound, attack_norm, low, high, num_draws)
  region = climb.region
  return _run(key, climb, region.x, region.bound, 1)


def ifgsm(key, loss_fn, x, *, attack_bound, num_steps, attack_norm='linf',
          step_size=None, low=-1., high=1., num_draws=1):
  """Steepest steps, each projected on ball and box; from x.

  Args:
    key, loss_fn, x, attack_bound, attack_norm, low, high, num_draws: as in
      :func:`fgsm`.
    num_steps: static int >= 1. Memory does not depend on it, nor does compile
      time above 16; up to 16 steps are unrolled.
    step_size: length of a step in ``attack_norm``, > 0, scalar or ``[B]``;
      None is ``attack_bound / num_steps``, the papers' choice.

  Returns:
    Array like x; see :func:`fgsm`.

  References: Phan et al. (2020), eq. 8; Kurakin et al. (2017).
  """
  climb = _pose(loss_fn, x, attack_bound, attack_norm, low, high, num_draws)
  step = _step_size(climb, step_size, num_steps, 1.)
  return _run(key, climb, climb.region.x, step, num_steps)


def mim(key, loss_fn, x, *, attack_bound, num_steps, attack_norm='linf',
        step_size=None, low=-1., high=1., num_draws=1, decay=1.):
  r"""I-FGSM along a momentum of gradients of mean absolute value 1.

  .. math::
    g_{s+1} = \rho g_s + \nabla L / \operatorname{mean} |\nabla L|

  Args:
    key, loss_fn, x, attack_bound, num_steps, attack_norm, step_size, low,
      high, num_draws: as in :func:`ifgsm`.
    decay: :math:`\rho \ge 0`, scalar or ``[B]``; 0 is I-FGSM.

  Returns:
    Array like x; see :func:`fgsm`.

  References: Dong et al. (2018), Algorithm 1.
  """
  climb = _pose(loss_fn, x, attack_bound, attack_norm, low, high, num_draws)
  step = _step_size(climb, step_size, num_steps, 1.)
  decay = settings.per_example('decay', decay, climb.region.x, 'at least 0')
  return _run(key, climb, climb.region.x, step, num_steps, decay=decay)


def pgd(key, loss_fn, x, *, attack_bound, num_steps, attack_norm='linf',
        step_size=None, low=-1., high=1., num_draws=1, num_restarts=1,
        start=None):
  """I-FGSM from random starts; each example keeps its best restart.

  The best restart is the one of the largest loss at its last iterate, averaged
  over ``num_draws`` draws that the restarts share. So give it a loss with fixed
  labels: under 'repredicted' the largest loss is the least sure answer.

  Args:
    key, loss_fn, x, attack_bound, num_steps, attack_norm, low, high,
      num_draws: as in :func:`ifgsm`.
    step_size: length of a step in ``attack_norm``, > 0, scalar or ``[B]``;
      None is ``2.5 * attack_bound / num_steps``.
    num_restarts: static int >= 1; memory does not depend on it.
    start: offsets from x, ``x.shape``, or ``(num_restarts, *x.shape)``; scaled
      into the ball and clipped to the box. None draws them uniformly in the
      ball by ``random_starts(key, arange(B), ...)``; pass that function's
      result for the examples' own ids where the batch split must not show.

  Returns:
    Array like x; see :func:`fgsm`.

  References: Madry et al. (2018); Phan et al. (2020), section 3.
  """
  settings.check_count('num_restarts', num_restarts)
  climb = _pose(loss_fn, x, attack_bound, attack_norm, low, high, num_draws)
  step = _step_size(climb, step_size, num_steps, _PGD_STEP)
  start = settings.check_start(start, climb.shape, num_restarts)

  def attempt(restart):
    begin = _begin(key, climb, start, restart)
    return _run(key, climb, begin, step, num_steps, restart)

  if num_restarts == 1:
    return attempt(0)
  return _best(_stream(key, _COMPARISON), climb, attempt, num_restarts)


def ensemble(key, loss_fn, x, *, attacks=('ifgsm', 'mim', 'pgd'), attack_bound,
             num_steps, attack_norm='linf', step_size=None, low=-1., high=1.,
             num_draws=1, decay=1., start=None, assignment=None):
  """Attacks a batch with several attacks, one an example.

  All of them run in one loop over the whole batch, for they differ only in
  start, step and momentum: `loss_fn` sees every row, in place, and the network
  is compiled once. Example by example this is what the single attack returns
  (PGD: one restart).

  Args:
    key, loss_fn, x, attack_bound, num_steps, attack_norm, low, high,
      num_draws: as in :func:`ifgsm`.
    attacks: names among ATTACKS, static.
    step_size: of every attack but FGSM; None leaves each its default.
    decay: of MIM.
    start: PGD's offsets, ``x.shape``; the other rows are not read. None draws
      them as :func:`pgd` does.
    assignment: int ``[B]``, which of the attacks meets each example, such as
      ``ids % len(attacks)``. None cuts the batch into ``len(attacks)`` parts
      in order; where that does not divide B the first parts get one more.

  Returns:
    Array like x; see :func:`fgsm`.

  References: Phan et al. (2020), Algorithm 1, line 8.
  """
  climb = _pose(loss_fn, x, attack_bound, attack_norm, low, high, num_draws)
  chosen = settings.assign(attacks, assignment, climb.shape[0], known=ATTACKS)

  def is_of(name):
    return jnp.asarray([a == name for a in attacks])[chosen][:, None]

  iterated = _step_size(climb, step_size, num_steps, 1.)
  pgd_step = _step_size(climb, step_size, num_steps, _PGD_STEP)
  step = jnp.where(is_of('pgd'), pgd_step, iterated)
  step = jnp.where(is_of('fgsm'), climb.region.bound, step)
  decay = settings.per_example('decay', decay, climb.region.x, 'at least 0')
  begin = climb.region.x
  if 'pgd' in attacks:
    start = settings.check_start(start, climb.shape, 1)
    begin = jnp.where(is_of('pgd'), _begin(key, climb, start, 0), begin)
  return _run(
      key, climb, begin, step, num_steps,
      decay=jnp.where(is_of('mim'), decay, 0.) if 'mim' in attacks else None,
      until=jnp.where(is_of('fgsm'), 1, num_steps))


def random_starts(key, ids, shape, *, attack_bound, attack_norm='linf',
                  restart=0):
  """Draws starting offsets, uniform in the ball, one stream an example.

  Example ``ids[i]`` starts at the same offset in any batch and on any device.
  Uniform in the ball, not in the ball cut by the box: the attack projects.

  Args:
    key: typed key; the one that :func:`pgd` gets.
    ids: integer ``[B]``, the examples' ids in [0, 2**32).
    shape: shape of one example.
    attack_bound, attack_norm: as in :func:`fgsm`.
    restart: number of the restart, from 0; may be traced. Stack the results of
      0, 1, ... for ``num_restarts`` of them.

  Returns:
    float32 ``[B, *shape]``.
  """
  balls.check_norm(attack_norm)
  ids = jnp.asarray(ids)
  size = int(np.prod(shape))
  point = jnp.zeros((ids.shape[0], size))
  bound = settings.per_example('attack_bound', attack_bound, point)
  keys = samplers.id_keys(key, samplers.ATTACK, ids)

  def draw(example_key):
    return balls.uniform_in_ball(jax.random.fold_in(example_key, restart), size,
                                 point.dtype, attack_norm)

  points = samplers.map_elements(draw, keys) * bound
  return points.reshape(ids.shape[0], *shape)


def _pose(loss_fn, x, attack_bound, attack_norm, low, high, num_draws):
  """Checks what all attacks take and flattens the examples."""
  balls.check_norm(attack_norm)
  settings.check_count('num_draws', num_draws)
  x = jnp.asarray(x)
  if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f'x has shape {x.shape} and dtype {x.dtype}; it must be '
                     'float [B, ...]')
  flat = x.reshape(x.shape[0], -1)
  bound = settings.per_example('attack_bound', attack_bound, flat)
  settings.check_box(low, high)
  low, high = (None if edge is None else jnp.broadcast_to(
      jnp.asarray(edge, x.dtype), x.shape).reshape(flat.shape)
               for edge in (low, high))
  region = balls.make_region(flat, bound, attack_norm, low, high)
  return _Climb(loss_fn, x.shape, region, attack_norm, num_draws)


def _run(key, climb, begin, step, num_steps, restart=0, decay=None, until=None):
  """Takes the steps; ``decay`` None keeps no momentum, ``until`` ends rows."""
  key = _stream(key, _STEPS - jnp.uint32(restart))
  region, norm = climb.region, climb.attack_norm

  def one_step(carry, index):
    y, momentum = carry
    gradient = _gradient(jax.random.fold_in(key, index), climb, y)
    if decay is not None:
      momentum = decay * momentum + _of_mean_one(gradient)
      gradient = momentum
    length = step if until is None else jnp.where(index < until, step, 0.)
    y = y + balls.steepest_step(gradient, y, length, region, norm)
    return (balls.project(y, region, norm), momentum), None

  momentum = None if decay is None else jnp.zeros_like(begin)
  (y, _), _ = jax.lax.scan(one_step, (begin, momentum), jnp.arange(num_steps),
                           unroll=bool(num_steps <= _UNROLLED))
  return y.reshape(climb.shape)


def _of_mean_one(gradient):
  size = jnp.abs(gradient)
  # Scaled first: a sum of squares or sizes may leave float32, a ratio not.
  largest = jnp.max(size, axis=1, keepdims=True)
  largest = jnp.where(largest == 0, 1., largest)
  mean = jnp.mean(size / largest, axis=1, keepdims=True)
  return gradient / largest / jnp.where(mean == 0, 1., mean)


def _gradient(key, climb, y):
  def draw(draw_key):
    return jax.grad(lambda z: _losses(draw_key, climb, z).sum())(y)
  return losses.mean_over_draws(key, draw, climb.num_draws)


def _losses(key, climb, flat):
  value = climb.loss_fn(key, flat.reshape(climb.shape))
  settings.check_shape('loss_fn', value, climb.shape[:1], '[B]')
  return value


def _best(key, climb, attempt, num_restarts):
  """The attempt of the largest loss, example by example; a NaN stays."""
  x = climb.region.x

  def measure(y):
    return losses.mean_over_draws(
        key, lambda draw: _losses(draw, climb, y), climb.num_draws)

  def keep_better(best, restart):
    y = attempt(restart).reshape(x.shape)
    loss = measure(y).astype(best[1].dtype)
    is_better = (loss > best[1]) | jnp.isnan(loss) | (restart == 0)
    return (jnp.where(is_better[:, None], y, best[0]),
            jnp.where(is_better, loss, best[1])), None

  (y, _), _ = jax.lax.scan(keep_better, (x, jnp.zeros(len(x))),
                           jnp.arange(num_restarts))
  return y.reshape(climb.shape)


def _stream(key, name):
  return jax.random.fold_in(jax.random.fold_in(key, samplers.ATTACK), name)


def _begin(key, climb, start, restart):
  """Where one restart begins, [B, n]."""
  x, bound = climb.region.x, climb.region.bound
  if start is None:
    offset = random_starts(
        key, jnp.arange(x.shape[0]), x.shape[1:], attack_bound=bound[:, 0],
        attack_norm=climb.attack_norm, restart=restart)
  else:
    offset = start[restart].reshape(x.shape)
  return balls.inside(offset.astype(x.dtype), climb.region, climb.attack_norm)


def _step_size(climb, step_size, num_steps, share):
  """Step length [B, 1], by default a share of the bound over the run."""
  settings.check_count('num_steps', num_steps)
  if step_size is None:
    return climb.region.bound * (share / num_steps)
  return settings.per_example('step_size', step_size, climb.region.x)
