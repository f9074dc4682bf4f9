"""Fields that several keys decide together, by trainer: batches, objective, GPUs, environments."""
