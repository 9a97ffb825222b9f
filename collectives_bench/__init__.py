"""Benchmarks of zpp: `python -m collectives_bench train` and `python -m collectives_bench kernels`."""
