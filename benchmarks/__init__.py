"""Benchmarks: each prints a table of ratios within one run; `results/` contains the last full figures."""
