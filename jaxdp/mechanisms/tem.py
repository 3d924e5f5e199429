r"""TEM: the truncated exponential mechanism.

.. math::
  P(y \mid w) \propto e^{-\epsilon \min(d(w, y), \gamma) / 2}, \quad
  \gamma = \frac{2}{\epsilon} \ln \frac{(1 - \beta)(V - 1)}{\beta}

The paper draws a near list plus one entry for "anything outside", whose score
is :math:`-\gamma + (2 / \epsilon) \ln |outside|`, with Gumbel noise: the same
law, drawn here directly. Words beyond gamma share probability evenly, and a
word without neighbours within gamma leaves with probability at most beta.

*proved*: capping a metric at gamma leaves it 1-Lipschitz, so the argument of
SanText holds word for word.

References: Carvalho et al. (2021), Algorithm 1.
"""

import math
import numbers

import numpy as np

from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import santext

Params = santext.Params
privatize = santext.privatize
log_prob = santext.log_prob
distances = santext.distances


def calibrate(table, *, epsilon, beta=0.001):
  """Calibrates TEM.

  Args:
    table: EmbeddingTable of at least two distinct words and vectors.
    epsilon: budget > 0 per unit Euclidean distance.
    beta: in (0, 1); bounds the probability that a word with no neighbour
      within gamma is replaced. Smaller beta, larger gamma.

  Returns:
    Params; its guarantee is *proved* for real arithmetic.

  Raises:
    ValueError: a bad table, epsilon or beta, or a beta so large for the table
      that gamma is not positive.
  """
  _check_beta(beta)
  epsilon = calibration.check_epsilon(epsilon)
  num_words = len(calibration.check_table(table))
  odds = (1 - beta) * (num_words - 1) / beta
  if odds <= 1:
    raise ValueError(f'beta={beta!r} leaves gamma <= 0 for a table of '
                     f'{num_words} words; use a smaller beta')
  cap = 2 / epsilon * math.log(odds)
  limits = np.finfo(np.float32)
  if cap < float(limits.tiny):
    raise ValueError(f'epsilon={epsilon!r} gives gamma={cap:.3g}, which '
                     'underflows float32; use a smaller epsilon')
  # Beyond float32 it is beyond every distance too.
  cap = cap if cap <= float(limits.max) else math.inf
  return santext.calibrate_capped(table, epsilon=epsilon, cap=cap,
                                  source='Carvalho et al. (2021), Theorem 1')


def _check_beta(beta):
  if isinstance(beta, bool) or not isinstance(beta, numbers.Real) or (
      not 0 < beta < 1):
    raise ValueError(f'beta={beta!r} must be a number in (0, 1)')
