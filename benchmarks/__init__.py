"""Microbenchmarks: each checks its answer, then times it beside a baseline."""

import experiments as _experiments  # its import sets the CPU flag jax needs

del _experiments
