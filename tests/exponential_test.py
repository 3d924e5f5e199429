"""Distances of the exponential law on the device: those of its log_prob."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from jaxdp.mechanisms import calibration
from jaxdp.mechanisms import exponential


class DistancesTest(parameterized.TestCase):

  @parameterized.parameters(0., 1e3, 1e6)
  def test_words_close_together_far_from_the_origin(self, offset):
    rng = np.random.default_rng(0)
    vectors = (offset + rng.normal(size=(50, 3)) * 10**rng.uniform(
        -4, 1, (50, 1))).astype(np.float32)
    vectors[7] = vectors[3]  # a duplicate is at distance 0
    ids = np.arange(0, 50, 7, dtype=np.int32)
    with jax.enable_x64(True):
      got = jax.jit(functools.partial(
          exponential._distances, columns=None, tile=16))(ids, vectors)
    want = calibration.l2_distances(ids, vectors)
    np.testing.assert_allclose(got[:, :50], want, rtol=1e-11)


if __name__ == '__main__':
  absltest.main()
