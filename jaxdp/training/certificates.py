"""The three ledgers of a StoBatch run, and the radii of its predictions. Host.

Ledger A is what Phan et al. (2020) claim, ledger B standard DP for a whole
record, ledger C how far an image may move before the smoothed network changes
its mind. A and B come from ``guarantees``; C is assembled here from
``certification``, for the noise that a prediction really gets: fresh, with
1 / noise_divisor of the scale, independent on every entry.

A product of two passes (Algorithm 3) has the composed radius. One pass has the
L1, L-inf and Renyi radii of its input noise, with hidden noise that noise's
radius too, and then the largest of those in L-inf.

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

_NORM = 'operator_norm bounds the linf -> l1 norm of the deployed weights'
_FRESH = certification.RADII['laplace_linf'].conditions
# Norm, status, source and conditions of each radius of :func:`radii`.
RADII = {name: certification.RADII[name] for name in (
    'claimed', 'laplace_l1', 'laplace_linf', 'laplace_renyi_linf',
    'hidden_linf')} | {
        'composed_linf': certification.RADII['claimed']._replace(
            status='proved', source='Phan et al. (2020), Theorem 5',
            conditions=('each of two passes has one of the noises', _NORM,
                        *_FRESH)),
        'best_linf': certification.RADII['laplace_linf']._replace(
            fun=certification.best_single_pass,
            source='post-processing, of the radii named laplace and hidden',
            conditions=('one pass has both noises', _NORM, *_FRESH))}


def correction(name):
  """Returns the correction of the bounds that a radius is computed from.

  See ``certification.probability_bounds``: a claim has the paper's own.
  """
  return 'published' if name == 'claimed' else 'bonferroni'


def radii(config, calibration, kernel, *, attack_bound=None):
  """Returns the radius functions of a run's predictions.

  Args:
    config: stobatch.Config.
    calibration: of the run.
    kernel: of the DEPLOYED first layer; not read where hidden noise is 0.
    attack_bound: size that the published radius is computed for, in L-inf;
      None leaves that radius out.

  Returns:
    Dict of names, keys of ``RADII``, to ``(p_low, p_high) -> radius`` in
    L-inf, L1 for 'laplace_l1'. 'claimed' is *claimed*, all others *proved*
    under the conditions of ``RADII``. Only 'claimed' with batch statistics,
    where an output depends on the batch.
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
    out['best_linf'] = _best(*(out[name] for name in (
        'laplace_linf', 'laplace_renyi_linf', 'hidden_linf')))
  return out


def _best(*radius_fns):
  """The largest radius of one pass with several noises."""
  return lambda p_low, p_high: certification.best_single_pass(
      *(fun(p_low, p_high) for fun in radius_fns))


def _published_divisors(config, calibration, kernel, attack_bound):
  """kappa and phi at robustness epsilon 1, as published."""
  dimension, norm = _published_sensitivities(config, calibration, kernel)
  return dict(
      kappa=certification.noise_to_radius(
          calibration.input_scale, sensitivity=attack_bound * dimension),
      phi=certification.noise_to_radius(
          calibration.hidden_scale, sensitivity=norm))


def _published_sensitivities(config, calibration, kernel):
  """What an L-inf shift of 1 moves in L1 as published: input and layer."""
  dimension = math.prod(calibration.image_shape[
      :2 if config.official_input_sensitivity else 3])
  norm = calibration.norm if config.official_initial_norm else (
      models.norms.row_norm(np.asarray(kernel)))
  return dimension, stobatch.network(config).units_per_map * norm


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
    'status', 'source', 'relation', 'conditions', and 'epsilon' and 'delta', or
    'radius', 'norm', 'noise_divisor' (psi) and, where it counts, 'dimension'
    and 'operator_norm'. A radius is the LARGEST any image can get: all votes
    agree.
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
  votes, rows = certification.Votes(counts, num_samples), []
  for name, radius_fn in radii(config, calibration, kernel,
                               attack_bound=attack_bound).items():
    _, low, high = certification.probability_bounds(
        votes, significance=significance, correction=correction(name))
    rows.append(_ceiling(
        name, _entering(name, config, calibration, kernel)) | {
            'part': f'{name}, all {num_samples} votes',
            'radius': float(radius_fn(low[0], high[0])),
            'significance': significance})
  return rows


def _entering(name, config, calibration, kernel):
  """The numbers that a radius rests on, by their names."""
  dimension, norm = math.prod(calibration.image_shape), None
  if name == 'claimed':
    dimension, norm = _published_sensitivities(config, calibration, kernel)
  elif name in ('composed_linf', 'hidden_linf', 'best_linf'):
    norm = _operator_norm(config, kernel)
  out = {'noise_divisor': config.noise_divisor}
  if name not in ('laplace_l1', 'hidden_linf'):
    out['dimension'] = dimension
  return out if norm is None else out | {'operator_norm': float(norm)}


def _ceiling(name, numbers):
  """One row of ledger C, its part and radius apart."""
  stands = RADII[name]
  claimed = stands.status == 'claimed'
  reason = ['certified at the clean input'] + [
      f'{key} {value:g}' for key, value in numbers.items()]
  if claimed:  # its conditions say why the claim is no proof
    reason += stands.conditions
  return {
      'ledger': 'certified', 'norm': stands.norm, 'status': stands.status,
      'source': stands.source, 'reason': '; '.join(reason),
      'relation': 'the clean input and every input within the radius',
      'conditions': list(_FRESH if claimed else stands.conditions)} | numbers
