"""Packed batches on the volume, from finished groups or from the batches of another run."""
