r"""What Phan et al. (2020) claim for StoBatch, in the paper's arithmetic. Host.

In the room: the chain from a budget to the noise (`stobatch_sensitivities`,
`stobatch_gammas`, `stobatch_budget`, `noise_scales`) and ledger A, "as
claimed" (`stobatch_claimed`, `federated`). Nothing here is a guarantee in the
standard sense; ``ledgers.standard`` has what remains, and each row says where
its proof fails.

The setting for MNIST, with the largest singular value of a Xavier kernel:

  >>> size, label_epsilon = 2499, .1
  >>> delta_r, delta_l2 = stobatch_sensitivities(
  ...     inputs_per_unit=25, units_per_map=14 * 14, num_last=256)
  >>> gamma, gamma_x = stobatch_gammas(delta_r, size, norm=.4929)
  >>> first = stobatch_budget(.2, label_epsilon, gamma, gamma_x)
  >>> scales = noise_scales(
  ...     sensitivity=delta_r, label_sensitivity=delta_l2, batch_size=size,
  ...     epsilon_1=first, label_epsilon=label_epsilon)
  >>> round(first, 4), round(scales.inputs, 1), round(scales.hidden, 1)
  (0.0614, 32.3, 64.5)
  >>> rows = stobatch_claimed(epsilon=.2, label_epsilon=label_epsilon,
  ...                         gamma=gamma, gamma_x=gamma_x)
  >>> rows[-1]['part'], rows[-1]['epsilon'], rows[-1]['status']
  ('total', 0.2, 'claimed')

References: Phan et al. (2020), Scalable differential privacy with certified
robustness in adversarial learning; Zhang et al. (2012), Functional mechanism.
"""

from typing import Any, NamedTuple

from jaxdp.guarantees import accounting
from jaxdp.guarantees import ledgers
from jaxdp.guarantees import statements

_positive = accounting.checked_positive


class Sensitivities(NamedTuple):
  """The paper's L1 sensitivities, of one feature map."""
  reconstruction: int  # Delta_R
  labels: int  # Delta_L2


class Gammas(NamedTuple):
  """What the paper divides epsilon_1 by."""
  gamma: float  # for the first layer's output
  gamma_x: float  # for the noised images


class NoiseScales(NamedTuple):
  """Laplace scales on one example, each a sum's noise over the batch size."""
  inputs: float  # b_x, on a pixel
  hidden: float  # b_h, on a unit of the first layer
  labels: float  # on a coefficient of the mean of the last layer's loss


class Party(NamedTuple):
  """One party of federated StoBatch."""
  batch_size: int
  epsilon_1: float
  reconstruction: float  # its Delta_R
  labels: float  # its Delta_L2


def stobatch_sensitivities(*, inputs_per_unit, units_per_map,
                           num_last) -> Sensitivities:
  r"""Returns :math:`\Delta_R = d (\beta + 2)`, :math:`\Delta_{L2} = 2 |h|`.

  Guarantee: *claimed*. They cover the sums of x and of h / 2 over one feature
  map, not the products of two pixels that the loss is made of, nor the other
  maps.

  Args:
    inputs_per_unit: d, inputs that one hidden unit sees.
    units_per_map: beta, units of one feature map.
    num_last: units of the last hidden layer, each in [-1, 1].

  Raises:
    ValueError: a count below 1.

  Example:
    >>> stobatch_sensitivities(
    ...     inputs_per_unit=25, units_per_map=14 * 14, num_last=256)
    Sensitivities(reconstruction=4950, labels=512)

  References: Phan et al. (2020), Lemmas 2 and 4.
  """
  d = statements.checked_count('inputs_per_unit', inputs_per_unit, 1)
  units = statements.checked_count('units_per_map', units_per_map, 1)
  return Sensitivities(
      d * (units + 2), 2 * statements.checked_count('num_last', num_last, 1))


def stobatch_gammas(sensitivity, batch_size, norm) -> Gammas:
  r"""Returns :math:`2 \Delta_R / (m \|\theta_1\|)` and :math:`\Delta_R / m`.

  The second takes images at L1 distance 1 for neighbours.

  Args:
    sensitivity: Delta_R > 0.
    batch_size: m >= 1.
    norm: > 0, of the first layer as an operator on images. The paper takes
      the largest L1 norm of a column, its code the largest singular value.

  Raises:
    ValueError: an argument out of range.

  References: Phan et al. (2020), Lemma 3 and Theorem 1.
  """
  sensitivity = _positive('sensitivity', sensitivity, 'it is Delta_R')
  size = statements.checked_count('batch_size', batch_size, 1)
  norm = _positive('norm', norm, 'it is a norm of the first layer')
  return Gammas(2. * sensitivity / (size * norm), sensitivity / size)


def stobatch_budget(epsilon, label_epsilon, gamma, gamma_x) -> float:
  r"""Returns epsilon_1 of a total budget.

  .. math::
    \epsilon_1 = (\epsilon - \epsilon_2) / (1 + 1 / \gamma + 1 / \gamma_x)

  Args:
    epsilon: total budget > 0.
    label_epsilon: epsilon_2 > 0, below the total.
    gamma: see `stobatch_gammas`.
    gamma_x: see `stobatch_gammas`.

  Raises:
    ValueError: an argument that is not positive, or nothing left for inputs.

  References: Phan et al. (2020), Theorem 4, solved for epsilon_1.
  """
  epsilon = _positive('epsilon', epsilon, 'it is the total budget')
  label_epsilon = _positive('label_epsilon', label_epsilon,
                            'it is the part of the budget for labels')
  gamma = _positive('gamma', gamma, 'see stobatch_gammas')
  gamma_x = _positive('gamma_x', gamma_x, 'see stobatch_gammas')
  if label_epsilon >= epsilon:
    raise ValueError(f'label_epsilon={label_epsilon!r} must be below epsilon='
                     f'{epsilon!r}; nothing is left for the inputs')
  return (epsilon - label_epsilon) / (1. + 1. / gamma + 1. / gamma_x)


def noise_scales(*, sensitivity, label_sensitivity, batch_size, epsilon_1,
                 label_epsilon) -> NoiseScales:
  r"""Returns the Laplace scales of the published algorithm.

  .. math::
    b_x = \frac{\Delta_R}{m \epsilon_1}, \quad b_h = 2 b_x, \quad
    b_y = \frac{\Delta_{L2}}{m \epsilon_2}

  Args:
    sensitivity: Delta_R > 0.
    label_sensitivity: Delta_L2 > 0.
    batch_size: m >= 1.
    epsilon_1: > 0, from `stobatch_budget`.
    label_epsilon: epsilon_2 > 0.

  Raises:
    ValueError: an argument out of range.

  References: Phan et al. (2020), Equations 5 and 6, Lemma 4.
  """
  size = statements.checked_count('batch_size', batch_size, 1)
  inputs = _positive('sensitivity', sensitivity, 'it is Delta_R') / (
      size * _positive('epsilon_1', epsilon_1, 'it is a budget'))
  labels = _positive('label_sensitivity', label_sensitivity,
                     'it is Delta_L2') / (
      size * _positive('label_epsilon', label_epsilon, 'it is a budget'))
  return NoiseScales(inputs, 2. * inputs, labels)


def _claim(epsilon, theorem, *conditions):
  return statements.Guarantee(
      epsilon=epsilon, metric=statements.ADJACENCY,
      relation=ledgers.REPLACE_RECORD, status='claimed',
      source=f'Phan et al. (2020), {theorem}',
      conditions=(*ledgers.PROOF, 'images in [-1, 1]', *conditions))


_UNIT_IMAGES = 'the two images are at most 1 apart in l1'
_CLAIMS = {
    'epsilon_1': (
        'the loss is made of products of two pixels, for every feature map; '
        'the noise is that of the sums of pixels, for one map'),
    'epsilon_1/gamma_x': (
        'images and adversarial examples. One draw is added to all images, so '
        'their differences are exact; and a replaced image moves by more than '
        '1 in l1'),
    'epsilon_1/gamma': (
        'rests on the noised images, and on a norm of the first layer that '
        'training does not keep'),
    'epsilon_2': (
        'the noise is one constant of the last layer; hidden layers learn '
        'from exact labels, and two steps differ without noise'),
    'total': 'a sum whose terms do not hold'}


def stobatch_claimed(*, epsilon, label_epsilon, gamma, gamma_x,
                     norm='not stated') -> list[dict[str, Any]]:
  """Returns ledger A: the parts and the total that Phan et al. (2020) claim.

  Guarantee: *claimed*, every row. ``ledgers.standard`` has what remains;
  the reason in each row says where its proof fails.

  Args:
    epsilon: total budget > 0.
    label_epsilon: epsilon_2 > 0, below the total.
    gamma: see `stobatch_gammas`.
    gamma_x: see `stobatch_gammas`.
    norm: which norm of the first layer gamma rests on, in words.

  Returns:
    Rows 'epsilon_1', 'epsilon_1/gamma_x' (inputs and adversarial examples),
    'epsilon_1/gamma', 'epsilon_2' and 'total'.

  Raises:
    ValueError: see `stobatch_budget`.

  References: Phan et al. (2020), Theorems 1 to 4.
  """
  first = stobatch_budget(epsilon, label_epsilon, gamma, gamma_x)
  norm = f'norm of the first layer: {norm}'
  parts = {
      'epsilon_1': _claim(first, 'Theorem 1'),
      'epsilon_1/gamma_x': _claim(first / gamma_x, 'Theorem 2', _UNIT_IMAGES),
      'epsilon_1/gamma': _claim(first / gamma, 'Theorem 3', norm),
      'epsilon_2': _claim(float(label_epsilon), 'Theorem 3'),
      'total': _claim(float(epsilon), 'Theorem 4', _UNIT_IMAGES, norm)}
  return [ledgers.part_row('claimed', part, guarantee, reason=_CLAIMS[part])
          for part, guarantee in parts.items()]


def federated(parties) -> list[dict[str, Any]]:
  r"""Returns the claimed rows of parties with batches of different sizes.

  Party i counts :math:`\epsilon_1 m_i / \Delta_R` for its images. A record
  belongs to one party, nobody knows to which, so the guarantee is the LARGEST
  of them: the biggest batch, whose noise is smallest.

  Guarantee: *claimed*, as `stobatch_claimed`.

  Args:
    parties: iterable of `Party`.

  Returns:
    A row a party, and last 'epsilon_1/gamma_x', their maximum.

  Raises:
    ValueError: no party, an entry out of range, or sensitivities that differ;
      with the same first and last layer on images in [-1, 1] they are equal.

  References: Phan et al. (2020), StoBatch, federated training.
  """
  parties = [Party(*p) for p in parties]
  for name in ('reconstruction', 'labels'):
    values = sorted({getattr(p, name) for p in parties})
    if len(values) > 1:
      raise ValueError(f'parties have {name}={values}; the sensitivities must '
                       'be equal: scale all images to [-1, 1] and use one '
                       'network')
  claims = [_claim(
      _positive('epsilon_1', p.epsilon_1, 'it is a budget')
      / stobatch_gammas(p.reconstruction, p.batch_size, 1.).gamma_x,
      'Theorem 2', _UNIT_IMAGES) for p in parties]
  whole = statements.parallel(claims)
  part = 'epsilon_1/gamma_x'
  named = [(f'{part}, party {i}', c) for i, c in enumerate(claims)]
  return [ledgers.part_row('claimed', name, guarantee, reason=_CLAIMS[part])
          for name, guarantee in named + [(part, whole)]]
