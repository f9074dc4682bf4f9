"""The files on the run's volume: paths, durable writes, attempts, batches, checkpoints' manifests, failures."""
