"""Path from finished groups to packed batches on the volume, or from the batches of another run."""
