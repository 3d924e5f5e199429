"""The three ledgers of a StoBatch run, and the radii of its predictions. Host.

Ledger A is what Phan et al. (2020) claim, ledger B standard DP for a whole
record, ledger C how far an image may move before the smoothed network changes
its mind. A and B come from ``guarantees``; C is assembled here from
``certification``, for the noise that a prediction really gets: fresh, with
1 / noise_divisor of the scale, independent on every entry.

A product of two passes (Algorithm 3) has the composed radius; one pass with
both noises has the larger of the two and the Renyi radius besides.

>>> from jaxdp.training import stobatch
>>> config = stobatch.published('digits', mode='sound', num_examples=1_440)
>>> sorted(radii(config, stobatch.calibrate(config, None), None))
['laplace_l1', 'laplace_linf', 'laplace_renyi_linf']

References: Phan et al. (2020), Theorems 1-5 and Corollary 1.
"""

import functools
import math

import numpy as np

from jaxdp import certification
from jaxdp import guarantees
from jaxdp import models
from jaxdp.training import releases
from jaxdp.training import stobatch

_COMPOSED = (
    'two passes, one with fresh noise on the input and one on the first layer: '
    'their radii per unit of robustness epsilon add harmonically')


def radii(config, calibration, kernel, *, attack_bound=None):
  """Returns the radius functions of a run's predictions.

  Args:
    config: stobatch.Config.
    calibration: of the run.
    kernel: of the DEPLOYED first layer; not read where hidden noise is 0.
    attack_bound: size that the published radius is computed for, in L-inf;
      None leaves that radius out.

  Returns:
    Dict of names to ``(p_low, p_high) -> radius`` in L-inf, L1 for
    'laplace_l1'. 'claimed' is *claimed*, all others *proved* under the
    conditions of ``certification.RADII``. Only 'claimed' with batch
    statistics, where an output depends on the batch.
  """
  out = {}
  if config.mode == 'paper' and attack_bound is not None:
    out['claimed'] = functools.partial(
        certification.claimed_radius,
        **_published_divisors(config, calibration, kernel, attack_bound))
  if config.official_batch_statistics:
    return out
  fresh = dict(scale=calibration.input_scale,
               noise_divisor=config.noise_divisor)
  dimension = math.prod(calibration.image_shape)
  if config.inference == 'product':
    out['composed_linf'] = _composed(config, calibration, kernel)
    return out
  out['laplace_l1'] = functools.partial(
      certification.laplace_l1_radius, **fresh)
  out['laplace_linf'] = functools.partial(
      certification.laplace_linf_radius, dimension=dimension, **fresh)
  out['laplace_renyi_linf'] = functools.partial(
      certification.laplace_renyi_linf_radius, dimension=dimension, **fresh)
  if calibration.hidden_scale:
    out['hidden_linf'] = functools.partial(
        certification.hidden_linf_radius, scale=calibration.hidden_scale,
        operator_norm=_operator_norm(config, kernel),
        noise_divisor=config.noise_divisor)
  return out


def _published_divisors(config, calibration, kernel, attack_bound):
  """kappa and phi at robustness epsilon 1, as published."""
  model = stobatch.network(config)
  height, width, _ = calibration.image_shape
  norm = calibration.norm if config.official_initial_norm else (
      models.norms.row_norm(np.asarray(kernel)))
  return dict(
      kappa=certification.noise_to_radius(
          calibration.input_scale, sensitivity=attack_bound * height * width),
      phi=certification.noise_to_radius(
          calibration.hidden_scale, sensitivity=model.units_per_map * norm))


def _composed(config, calibration, kernel):
  """Theorem 5 for two passes, with true norms and the fresh noise."""
  kappa = certification.noise_to_radius(
      calibration.input_scale, sensitivity=math.prod(calibration.image_shape),
      noise_divisor=config.noise_divisor)
  phi = certification.noise_to_radius(
      calibration.hidden_scale, sensitivity=_operator_norm(config, kernel),
      noise_divisor=config.noise_divisor)
  return functools.partial(
      certification.claimed_radius, kappa=kappa, phi=phi)


def _operator_norm(config, kernel):
  """The true L-inf to L1 norm of the first layer, all maps together."""
  return models.images.operator_norms(stobatch.network(config),
                                      {'kernel': kernel}).linf_l1


def ledger(config, calibration, kernel=None, *, num_samples=2_000,
           significance=.05, attack_bound=.2, seeded=False):
  """Returns the rows of the three ledgers of a run.

  Args:
    config: stobatch.Config.
    calibration: of the run.
    kernel: of the deployed first layer; None leaves out the radii that need
      its norm.
    num_samples: votes that the radii of ledger C are for.
    significance: of those radii, for each image.
    attack_bound: L-inf size that the published radius is computed for.
    seeded: whether the run's key came from a seed.

  Returns:
    List of dicts: 'ledger' ('claimed', 'standard', 'certified'), 'part',
    'status', 'source', and 'epsilon' and 'delta', or 'radius' and 'norm'.
    A radius is the LARGEST any image can get: all votes agree.
  """
  standard = _standard(config, calibration)
  return (guarantees.with_key_condition(
      _claimed(config, calibration, standard) + standard, seeded=seeded)
          + _ceilings(config, calibration, kernel, num_samples, significance,
                      attack_bound))


def _claimed(config, calibration, standard):
  """Ledger A: the paper's claim, or in 'sound' mode what B proves."""
  if config.mode == 'paper':
    return guarantees.stobatch_claimed(
        epsilon=config.epsilon, label_epsilon=config.label_epsilon,
        gamma=calibration.gamma, gamma_x=calibration.gamma_x,
        norm='spectral norm of the initial kernel'
        if config.official_initial_norm
        else 'column norm of the initial kernel')
  total = standard[-1]
  return [total | {'ledger': 'claimed', 'reason': (
      'nothing is claimed beyond the standard ledger')}]


def _standard(config, calibration):
  """Ledger B, by what the run shares between records."""
  paper = config.mode == 'paper'
  sharing = 'dataset' if paper else 'none'
  moments = None
  if config.moments_epsilon:
    moments = guarantees.one_shot_moments(
        first_epsilon=config.moments_epsilon / 2,
        second_epsilon=config.moments_epsilon / 2)
  return guarantees.standard(
      noise_sharing=sharing, dimension=math.prod(calibration.image_shape),
      scale=calibration.input_scale, delta=0. if paper else config.delta,
      copies=config.copies, label_copies=1,  # one answer a record
      labels='perturbed_loss' if paper else 'randomized_response',
      label_epsilon=None if paper else releases.label_guarantee(
          calibration).epsilon,
      clean_adversarial=config.official_clean_adversarial,
      batch_statistics=config.norm == 'batch', functional_release=moments)


def _ceilings(config, calibration, kernel, num_samples, significance,
              attack_bound):
  """Ledger C: the radius of an image on which all votes agree."""
  if kernel is None and (calibration.hidden_scale or config.mode == 'paper'):
    return []
  counts = np.zeros((1, calibration.num_classes), np.int64)
  counts[0, 0] = num_samples
  _, low, high = certification.probability_bounds(
      certification.Votes(counts, num_samples), significance=significance)
  rows = []
  for name, radius_fn in radii(config, calibration, kernel,
                               attack_bound=attack_bound).items():
    known = certification.RADII.get(name)
    composed = name == 'composed_linf'
    rows.append({
        'ledger': 'certified', 'part': f'{name}, all {num_samples} votes',
        'radius': float(radius_fn(low[0], high[0])),
        'norm': 'linf' if composed else known.norm,
        'status': 'proved' if composed else known.status,
        'source': 'Phan et al. (2020), Theorem 5' if composed else known.source,
        'reason': _COMPOSED if composed else '; '.join(known.conditions),
        'significance': significance})
  return rows
