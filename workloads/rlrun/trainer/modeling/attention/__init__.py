"""Attention over packed rows: `compute.attend` is the entry point; `rlrun.fit` defines the features of each kernel and their selection.

`packed_layout` divides a row into sequences and defines the result, `select` chooses a kernel, the other modules contain the kernels.
"""
