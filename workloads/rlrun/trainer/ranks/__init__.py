"""The group of processes: how it is launched and meets, what all ranks agree on, and how they stop together."""
