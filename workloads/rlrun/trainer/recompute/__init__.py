"""Recomputation of a run's steps from the files on its volume, for `rlrun replay`; only the result is written."""
