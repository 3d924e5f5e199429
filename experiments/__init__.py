"""Binaries that reproduce the papers and serve people's own data.

jaxlib 0.10.2 miscompiles one reduction on CPU; the flag that avoids it must be
set before jax is imported, for that version only (others abort on it).
"""

import importlib.metadata
import os

_FLAG = '--xla_cpu_experimental_ynn_fusion_type=-reduce'

if (importlib.metadata.version('jaxlib') == '0.10.2'
    and _FLAG not in os.environ.get('XLA_FLAGS', '')):
  os.environ['XLA_FLAGS'] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
