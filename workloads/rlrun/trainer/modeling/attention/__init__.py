"""Attention over packed rows: `compute.attend` is the one call, `table` what each kernel can do, `choose` which of them computes.

`layout` divides a row into sequences, `scores` defines the numbers, the other modules have the kernels.
"""
