"""GPU time of a run: what it has cost, what it was spent on, and the budget that ends it."""
