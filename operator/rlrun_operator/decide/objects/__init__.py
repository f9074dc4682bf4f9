"""Objects of a run beside its workloads: the growth of its claim, its API key, its volume, and the repair of the rest. Pure."""
