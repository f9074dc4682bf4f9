"""Attention over packed rows: `compute.attend` is the entry point; `rlrun.fit` defines the features of each kernel and their selection.

`layout` divides a row into sequences, `scores` defines the result, the other modules contain the kernels.
"""
