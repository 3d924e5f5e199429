"""Experiments on real data: figures, tables and the binaries people run."""
