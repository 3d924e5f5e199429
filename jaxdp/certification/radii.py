r"""Certified radii from bounds on the two largest class probabilities.

Host code: NumPy float64, vectorised over images, no keys. Every radius takes
``p_low``, a lower bound of the top class's probability, and ``p_high``, an
upper bound of every other's, both in [0, 1], AT THE CLEAN INPUT and over FRESH
noise; they broadcast. The smoothed classifier keeps its top class on the OPEN
ball of the radius. Where ``p_low <= p_high`` the radius is 0; it is never NaN,
and infinite only for bounds that say so (``p_low=1`` or ``p_high=0``). Every
function raises ValueError for an argument out of its range.

Only noise drawn afresh for each vote certifies. A network trained with one
fixed draw may receive that draw and, on top, fresh noise of a smaller scale,
``scale / noise_divisor``; the fixed draw is a constant and adds nothing. Noise
copied to several channels leaves their differences as they are: with
``channel_copied=True`` an input radius is 0.

Two mechanisms, noise on the input and noise on a hidden layer, come in two
ways. Separate passes that each see one of the noises certify :func:`compose`
of their radii. One pass that sees both certifies :func:`best_single_pass`,
which is always more. ``RADII`` holds norm, status and source of each formula.

>>> print(f'{laplace_l1_radius(.9, .1, scale=.5):.4f}')  # -.5 ln .2
0.8047
>>> print(f'{laplace_linf_radius(.9, .1, scale=.5, dimension=784):.6f}')
0.001026
>>> float(laplace_l1_radius(.4, .5, scale=.5))
0.0

References: Phan et al. (2020), Scalable differential privacy with certified
robustness in adversarial learning; Lecuyer et al. (2019), Certified robustness
to adversarial examples with differential privacy; Teng et al. (2020), l1
adversarial robustness certificates: a randomized smoothing approach; Li et al.
(2019), Certified adversarial robustness with additive noise; Cohen et al.
(2019), Certified adversarial robustness via randomized smoothing.
"""

from typing import Any, Callable, NamedTuple

import numpy as np
from scipy import special

from jaxdp.certification import renyi


class Radius(NamedTuple):
  """A radius formula and how it stands.

  Attributes:
    fun: ``(p_low, p_high, *, ...) -> radius``.
    norm: 'l1', 'l2' or 'linf'; 'p' where the noise layer decides.
    status: 'proved' or 'claimed'.
    source: the theorem.
    conditions: what the status assumes, or why a claim is not proved.
  """
  fun: Callable[..., Any]
  norm: str
  status: str
  source: str
  conditions: tuple[str, ...]


def claimed_radius(p_low, p_high, *, kappa, phi):
  r"""Returns the radius that StoBatch prints.

  .. math::
    r = \frac{\kappa \phi}{\kappa + \phi} \epsilon_r^*, \quad
    \epsilon_r^* = \frac{1}{2} \ln \frac{p_{low}}{p_{high}}

  Norm: linf. Status: *claimed*. The composition is sound when kappa and phi
  are radii per unit of robustness epsilon in one norm, of fresh noise. As
  published they are not: kappa's sensitivity is that of an attack of the tested
  size, phi's that of an attack of size 1; both use the scale of the training
  draw where fresh noise is smaller; the hidden sensitivity, a norm of one
  patch's matrix (the text's row norm, the code's spectral norm) times the units
  of one map, lies far below the true linf -> l1 norm; and noise copied to all
  channels, the code's, protects against grey shifts alone.

  Args:
    p_low, p_high: bounds at the clean input.
    kappa: input mechanism at robustness epsilon 1, >= 0; `noise_to_radius`.
    phi: hidden mechanism, likewise.

  Returns:
    float64 of the broadcast shape.

  Example:
    >>> kappa = noise_to_radius(32.27, sensitivity=.2 * 784)
    >>> phi = noise_to_radius(64.54, sensitivity=96.6)
    >>> print(f'{claimed_radius(.9, .1, kappa=kappa, phi=phi):.4f}')
    0.1729

  References: Phan et al. (2020), Corollary 1 and eq. (13).
  """
  per_epsilon = compose(kappa, phi)
  return _radius(p_low, p_high,
                 lambda p, q: _times(per_epsilon, _log_ratio(p, q) / 2.))


def noise_to_radius(scale, *, sensitivity, noise_divisor=1.,
                    channel_copied=False):
  r"""Returns the radius per unit of robustness epsilon of a Laplace layer.

  .. math:: \kappa = \frac{b}{\psi \Delta_r}

  A shift of size r, in the norm of the sensitivity, is then
  :math:`r / \kappa`-indistinguishable. *Proved* where :math:`\Delta_r` is the
  l1 change per unit of that norm (D for linf at the input, the linf -> l1
  operator norm at a hidden layer) and psi the divisor in use; *claimed* with
  the published sensitivities and psi left out.

  Args:
    scale: Laplace scale b > 0 of the noise as trained.
    sensitivity: :math:`\Delta_r > 0`.
    noise_divisor: psi >= 1.
    channel_copied: True where several channels receive one draw; then 0.

  Returns:
    float64 of the broadcast shape.

  References: Phan et al. (2020), Section 4.
  """
  fresh = _fresh(scale, noise_divisor, channel_copied)
  return fresh / _positive(sensitivity, 'sensitivity', 'it is an l1 change')


def laplace_l1_radius(p_low, p_high, *, scale, noise_divisor=1.,
                      channel_copied=False):
  r"""Returns the radius of independent Laplace noise on every input entry.

  .. math::
    r = \max\left\{\frac{\lambda}{2} \ln \frac{p_{low}}{p_{high}},
      -\lambda \ln(1 - p_{low} + p_{high})\right\}

  Norm: l1. Status: *proved*: a shift of l1 size r is
  :math:`r / \lambda`-indistinguishable, so the top class keeps at least
  :math:`\max\{e^{-\epsilon} p_{low}, 1 - e^\epsilon (1 - p_{low})\}` and no
  other gets more than :math:`e^\epsilon p_{high}`. With two classes the second
  form is attained by a threshold on one entry.

  Args:
    p_low, p_high: bounds at the clean input.
    scale: Laplace scale > 0, in the input's unit.
    noise_divisor: psi >= 1; lambda is ``scale / noise_divisor``.
    channel_copied: True where several channels receive one draw; then 0.

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Teng et al. (2020), Theorem 1; Lecuyer et al. (2019), Proposition
  1 at delta 0, for the first form.
  """
  fresh = _fresh(scale, noise_divisor, channel_copied)
  return _radius(p_low, p_high, lambda p, q: _times(
      fresh, np.maximum(_log_ratio(p, q) / 2., -np.log1p(q - p))))


def laplace_linf_radius(p_low, p_high, *, scale, dimension, noise_divisor=1.,
                        channel_copied=False):
  """Returns `laplace_l1_radius` over D: an l1 norm is at most D linf norms.

  Norm: linf. Status: *proved*.

  Args:
    p_low, p_high, scale, noise_divisor, channel_copied: as for
      `laplace_l1_radius`.
    dimension: D, entries of the input, ALL channels counted.

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Teng et al. (2020), Theorem 1.
  """
  dimension = _dimension(dimension)
  return laplace_l1_radius(
      p_low, p_high, scale=scale, noise_divisor=noise_divisor,
      channel_copied=channel_copied) / dimension


def hidden_linf_radius(p_low, p_high, *, scale, operator_norm,
                       noise_divisor=1.):
  r"""Returns the radius of Laplace noise on an affine layer :math:`W x + c`.

  A shift of linf size r moves the layer by at most
  :math:`r \|W\|_{\infty \to 1}` in l1, and what follows is post-processing.

  Norm: linf, of the input. Status: *proved*, if the noise is independent over
  ALL units of ALL maps and the norm is that of the deployed weights: the sum of
  all absolute entries bounds it; a spectral norm does not.

  Args:
    p_low, p_high: bounds at the clean input.
    scale: Laplace scale > 0, in the layer's unit.
    operator_norm: :math:`\|W\|_{\infty \to 1} > 0`, or an upper bound of it.
    noise_divisor: psi >= 1.

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Lecuyer et al. (2019), Section III-B; Teng et al. (2020).
  """
  norm = _positive(operator_norm, 'operator_norm',
                   'it is the l1 change of the layer per unit of linf')
  return laplace_l1_radius(p_low, p_high, scale=scale,
                           noise_divisor=noise_divisor) / norm


def laplace_renyi_linf_radius(p_low, p_high, *, scale, dimension,
                              noise_divisor=1., channel_copied=False):
  r"""Returns the Rényi radius of Laplace noise, which grows as 1 / sqrt(D).

  The top class cannot change while, for SOME order :math:`\alpha > 1`,

  .. math::
    D \cdot D_\alpha(r / \lambda) < -\ln\left(1 - p - q + 2 \left(
      \tfrac12 p^{1 - \alpha} + \tfrac12 q^{1 - \alpha}\right)^{1/(1 - \alpha)}
      \right), \quad p = p_{low}, q = p_{high},

  with :math:`D_\alpha` the divergence of a Laplace law from itself shifted. The
  left side grows with the shift of every entry, the right side with p and -q.

  Norm: linf. Status: *proved*; the search over orders may lose 1e-4 of the
  radius and cannot overstate it.

  Args:
    p_low, p_high, scale, noise_divisor, channel_copied: as for
      `laplace_l1_radius`.
    dimension: D, entries of the input, ALL channels counted.

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Li et al. (2019), Lemma 1; Mironov (2017), Rényi differential
  privacy, Proposition 6.
  """
  fresh = _fresh(scale, noise_divisor, channel_copied)
  dimension = _one(_dimension(dimension), 'dimension')
  shift = _renyi_radius(p_low, p_high, lambda order, divergence: (
      renyi.laplace_shift(order, divergence / dimension)))
  return _times(fresh, shift)[()]


def gaussian_renyi_l2_radius(p_low, p_high, *, stddev):
  r"""Returns the Rényi radius of Gaussian noise, below `gaussian_l2_radius`.

  As `laplace_renyi_linf_radius` with :math:`\alpha r^2 / 2 \sigma^2` on the
  left. Norm: l2. Status: *proved*.

  Args:
    p_low, p_high: bounds at the clean input.
    stddev: of the noise on every entry, > 0, in the input's unit.

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Li et al. (2019), Lemma 1 and Theorem 2.
  """
  stddev = _positive(stddev, 'stddev', 'no noise certifies nothing')
  return stddev * _renyi_radius(
      p_low, p_high, lambda order, gap: np.sqrt(2. * gap / order))


def gaussian_l2_radius(p_low, p_high, *, stddev):
  r"""Returns the radius of Gaussian noise, by Neyman and Pearson.

  .. math::
    r = \frac{\sigma}{2} \left(\Phi^{-1}(p_{low}) - \Phi^{-1}(p_{high})\right)

  Norm: l2. Status: *proved*, and no larger radius follows from the bounds.

  Args:
    p_low, p_high: bounds at the clean input.
    stddev: of the noise on every entry, > 0, in the input's unit.

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Cohen et al. (2019), Theorem 1.
  """
  stddev = _positive(stddev, 'stddev', 'no noise certifies nothing')
  return _radius(
      p_low, p_high,
      lambda p, q: stddev / 2. * (special.ndtri(p) - special.ndtri(q)))


def pixeldp_laplace_radius(p_low, p_high, *, attack_bound, epsilon):
  r"""Returns the radius of a PixelDP layer with Laplace noise.

  .. math:: r = \frac{L}{2 \epsilon} \ln \frac{p_{low}}{p_{high}}

  for noise of scale :math:`\Delta L / \epsilon`. Norm: that of the layer's
  sensitivity :math:`\Delta` (p -> l1). Status: *proved*, if :math:`\Delta` is
  true of the deployed weights. It protects predictions and gives no privacy to
  training data.

  Args:
    p_low, p_high: bounds at the clean input.
    attack_bound: construction bound L > 0, in the input's unit.
    epsilon: robustness epsilon > 0 at L.

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Lecuyer et al. (2019), Proposition 1 with delta 0.
  """
  bound = _positive(attack_bound, 'attack_bound', 'it is the size of an attack')
  epsilon = _positive(epsilon, 'epsilon', 'it is a robustness budget')
  return _radius(
      p_low, p_high, lambda p, q: bound / epsilon * _log_ratio(p, q) / 2.)


def pixeldp_gaussian_radius(p_low, p_high, *, attack_bound, epsilon, delta):
  r"""Returns the radius of a PixelDP layer with Gaussian noise.

  .. math::
    r = \max_{\delta'} L \frac{\epsilon'}{\epsilon}
      \sqrt{\frac{\ln(1.25 / \delta)}{\ln(1.25 / \delta')}}, \quad
    p_{low} > e^{2 \epsilon'} p_{high} + (1 + e^{\epsilon'}) \delta',

  over :math:`\delta' = .001, ..., .299` and :math:`\epsilon' \le 1`, for noise
  of standard deviation :math:`\Delta L \sqrt{2 \ln(1.25 / \delta)} / \epsilon`.
  The largest :math:`e^{\epsilon'}` solves a quadratic.

  Norm: that of the layer's sensitivity :math:`\Delta` (p -> l2). Status:
  *proved*, on the condition of `pixeldp_laplace_radius`.

  Args:
    p_low, p_high: bounds at the clean input.
    attack_bound: construction bound L > 0, in the input's unit.
    epsilon: robustness epsilon at L, in (0, 1].
    delta: robustness delta at L, in (0, 1).

  Returns:
    float64 of the broadcast shape, in the input's unit.

  References: Lecuyer et al. (2019), Proposition 1 and Section III-D; Dwork and
  Roth (2014), Theorem A.1.
  """
  bound = _positive(attack_bound, 'attack_bound', 'it is the size of an attack')
  epsilon = _positive(epsilon, 'epsilon', 'it is a robustness budget')
  delta = _positive(delta, 'delta', 'it is a probability')
  if np.any(epsilon > 1.):
    raise ValueError(f'epsilon={epsilon} must be at most 1; Gaussian noise '
                     'of this scale promises nothing above')
  if np.any(delta >= 1.):
    raise ValueError(f'delta={delta} must be below 1; it is a probability')
  unit = bound / epsilon * np.sqrt(2. * np.log(1.25 / delta))
  grid = np.arange(1, 300) / 1000.

  def formula(p, q):
    budget = _pixeldp_epsilon(p[..., None], q[..., None], grid)
    return unit * np.max(budget / np.sqrt(2. * np.log(1.25 / grid)), axis=-1)
  return _radius(p_low, p_high, formula)


def compose(*radii):
  r"""Returns the radius of separate mechanisms, :math:`1 / \sum_s 1 / r_s`.

  *Proved* where each mechanism sees the whole shift with noise of its own and
  the vote is a function of all their outputs: robustness epsilons add, so
  radii add harmonically. The result is below each radius; where one pass has
  all the noises, `best_single_pass` holds and is larger.

  Args:
    *radii: radii >= 0 in one norm, or radii per unit of epsilon; broadcast.

  Returns:
    float64 of the broadcast shape.

  References: Phan et al. (2020), Theorem 5.
  """
  with np.errstate(divide='ignore'):
    return (1. / sum(1. / r for r in _checked_radii(radii)))[()]


def best_single_pass(*radii):
  """Returns the radius of one pass with several noises, the largest of theirs.

  *Proved* where ONE forward pass carries all the noises: later noise that does
  not depend on the input is post-processing of the noisy input, and for the
  hidden layer's noise the input's noise can be conditioned on. So the vote is
  certified to each radius, all from the same bounds. Separate passes (a product
  of two softmaxes, each of a pass with one noise) have only `compose`.

  Args:
    *radii: radii >= 0 in one norm, from the same bounds; broadcast.

  Returns:
    float64 of the broadcast shape.
  """
  return np.max(np.broadcast_arrays(*_checked_radii(radii)), axis=0)


_FRESH = ('fresh independent noise on every entry at every vote',
          'real arithmetic', 'ideal random bits')
_LAYER = ('the noise has the stated scale for the deployed weights', *_FRESH)
_TENG = 'Teng et al. (2020), Theorem 1'
_LECUYER = 'Lecuyer et al. (2019), Proposition 1'

RADII = {
    'claimed': Radius(
        claimed_radius, 'linf', 'claimed',
        'Phan et al. (2020), Corollary 1 and eq. (13)',
        ('published kappa and phi differ in unit',
         'published scales are those of the training draw',
         'published hidden sensitivity is below the linf -> l1 norm')),
    'laplace_l1': Radius(laplace_l1_radius, 'l1', 'proved', _TENG, _FRESH),
    'laplace_linf': Radius(
        laplace_linf_radius, 'linf', 'proved', _TENG, _FRESH),
    'laplace_renyi_linf': Radius(
        laplace_renyi_linf_radius, 'linf', 'proved',
        'Li et al. (2019), Lemma 1', _FRESH),
    'hidden_linf': Radius(
        hidden_linf_radius, 'linf', 'proved', _TENG,
        ('operator_norm bounds the linf -> l1 norm of the deployed weights',
         *_FRESH)),
    'gaussian_l2': Radius(
        gaussian_l2_radius, 'l2', 'proved', 'Cohen et al. (2019), Theorem 1',
        _FRESH),
    'gaussian_renyi_l2': Radius(
        gaussian_renyi_l2_radius, 'l2', 'proved', 'Li et al. (2019), Theorem 2',
        _FRESH),
    'pixeldp_laplace': Radius(
        pixeldp_laplace_radius, 'p', 'proved', _LECUYER, _LAYER),
    'pixeldp_gaussian': Radius(
        pixeldp_gaussian_radius, 'p', 'proved', _LECUYER, _LAYER),
}


def _radius(p_low, p_high, formula):
  """Returns formula(p_low, p_high) where the bounds separate, else 0."""
  p_low, p_high = np.broadcast_arrays(
      _probability(p_low, 'p_low'), _probability(p_high, 'p_high'))
  certified = p_low > p_high
  # Stand-ins where nothing is certified: no formula meets a NaN.
  p, q = np.where(certified, p_low, 1.), np.where(certified, p_high, .5)
  with np.errstate(divide='ignore'):  # the logarithm of 0 is meant
    return np.where(certified, np.maximum(formula(p, q), 0.), 0.)[()]


def _renyi_radius(p_low, p_high, shift_fn):
  """Returns the largest shift_fn(order, divergence) over orders."""
  def formula(p, q):
    # Images with the same votes have the same radius.
    pairs, where = np.unique(np.stack([p.reshape(-1), q.reshape(-1)]), axis=1,
                             return_inverse=True)
    best = renyi.best_order(*pairs, shift_fn)
    return best[where.reshape(-1)].reshape(p.shape)
  return _radius(p_low, p_high, formula)


def _pixeldp_epsilon(p, q, delta):
  """Largest e' <= 1 with p > e^{2e'} q + (1 + e^{e'}) delta, 0 for none."""
  rest = np.maximum(p - delta, 0.)
  ratio = 2. * rest / (delta + np.sqrt(delta**2 + 4. * q * rest))
  return np.minimum(np.log(np.maximum(ratio, 1.)), 1.)


def _log_ratio(p, q):
  """Returns ln(p / q); the quotient itself may overflow."""
  return np.log(p) - np.log(q)


def _times(factor, value):
  """Returns factor * value, 0 where factor is 0, were value infinite."""
  factor, value = np.broadcast_arrays(factor, value)
  return np.where(factor > 0., np.where(factor > 0., factor, 1.) * value, 0.)


def _fresh(scale, noise_divisor, channel_copied):
  """Returns the scale of noise that counts: fresh, of each entry its own."""
  scale = _positive(scale, 'scale', 'no noise certifies nothing')
  divisor = _positive(noise_divisor, 'noise_divisor',
                      'fresh noise has scale / noise_divisor')
  if np.any(divisor < 1.):
    raise ValueError(f'noise_divisor={noise_divisor} must be at least 1; fresh '
                     'noise has scale / noise_divisor')
  return scale / divisor * (0. if channel_copied else 1.)


def _probability(value, name):
  """Returns `value` as float64 in [0, 1]."""
  value = np.asarray(value, np.float64)
  bad = ~((value >= 0.) & (value <= 1.))
  if np.any(bad):
    raise ValueError(f'{name}={value[bad].flat[0]} must lie in [0, 1]; it is a '
                     'bound on a probability')
  return value


def _positive(value, name, advice):
  """Returns `value` as float64, positive and finite."""
  value = np.asarray(value, np.float64)
  bad = ~((value > 0.) & np.isfinite(value))
  if np.any(bad):
    raise ValueError(
        f'{name}={value[bad].flat[0]} must be positive and finite; {advice}')
  return value


def _dimension(value):
  """Returns `value`, a whole number >= 1."""
  value = _positive(value, 'dimension', 'it counts the entries of an input')
  if np.any((value < 1.) | (value != np.floor(value))):
    raise ValueError(f'dimension={value} must be a whole number >= 1; it '
                     'counts the entries of an input')
  return value


def _one(value, name):
  """Returns `value`, which must be one number."""
  if value.ndim:
    raise ValueError(f'{name} has shape {value.shape}; pass one number')
  return value


def _checked_radii(radii):
  """Returns radii as float64 arrays, each at least 0."""
  if not radii:
    raise ValueError('radii=() must hold at least one radius')
  radii = [np.asarray(r, np.float64) for r in radii]
  for radius in radii:
    if not np.all(radius >= 0.):
      raise ValueError(f'radii: {radius} must be at least 0; it is a size')
  return radii
