"""GPU time of a run: the sum, its split by use, and the budget that suspends the run."""
