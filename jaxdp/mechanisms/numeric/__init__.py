r"""Mechanisms on numbers: calibrate on the host, draw on the device.

In the room: Laplace noise on a grid, the exponential mechanism over a public
list, k-ary randomised response, and the three sound repairs of ADePT. The
first three draw laws whose probabilities are integers over :math:`2^{64}`:
their epsilon is the exact logarithm of the largest ratio, rounded up, and no
float rounding stands between the theorem and the release. ADePT's repairs add
float noise and say 'real arithmetic'.

They are not in ``mechanisms.get``: they take numbers, not words.

>>> import jax
>>> params = calibrate_grid_laplace(scale=1., grid=2.**-8, low=-10., high=10.)
>>> y = grid_laplace(jax.random.key(0), jax.numpy.array([0., 2.5]), params)
>>> bool(((y >= -10) & (y <= 10) & (y * 256 % 1 == 0)).all())
True
>>> params.guarantee.epsilon <= 1., params.guarantee.status
(True, 'proved')

References: Mironov (2012), On significance of the least significant bits for
differential privacy; Ghosh et al. (2009), Universally utility-maximizing
privacy mechanisms; Habernal (2021), When differential privacy meets NLP.
"""

# pylint: disable=unused-import
from jaxdp.mechanisms.numeric.adept_repairs import (  # noqa: F401
    AdeptParams, adept, calibrate_adept)
from jaxdp.mechanisms.numeric.exponential import (  # noqa: F401
    GridExponentialParams, calibrate_grid_exponential, grid_exponential)
from jaxdp.mechanisms.numeric.grid import (  # noqa: F401
    GridLaplaceParams, calibrate_grid_laplace, grid_laplace)
from jaxdp.mechanisms.numeric.response import (  # noqa: F401
    RandomizedResponseParams, calibrate_randomized_response,
    estimate_frequencies, randomized_response)
