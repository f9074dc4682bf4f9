"""Benchmarks: each prints a table of ratios within one run; `results/` holds the last full figures."""
