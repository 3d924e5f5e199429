"""One dialect for every test: 8 CPU devices, no silent rank promotion."""

import importlib.metadata
import os
import warnings

_FLAG = '--xla_cpu_experimental_ynn_fusion_type=-reduce'
# jaxlib 0.10.2 on CPU miscompiles one pattern; others abort on the flag.
if (importlib.metadata.version('jaxlib') == '0.10.2'
    and _FLAG not in os.environ.get('XLA_FLAGS', '')):
  os.environ['XLA_FLAGS'] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402
from absl import flags  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
flags.FLAGS.mark_as_parsed()


def pytest_configure(config):
  del config
  for package in ('jaxdp', 'experiments', 'benchmarks'):
    warnings.filterwarnings('error', module=rf'{package}\.')
