"""Attention over packed rows: `compute.attend` is the one call; `rlrun.fit` has what each kernel can do, and which of them computes.

`layout` divides a row into sequences, `scores` defines the numbers, the other modules have the kernels.
"""
