"""Files on the run's volume: paths, durable writes, attempts, batches, manifests of checkpoints, failures."""
