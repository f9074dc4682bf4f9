"""Past of a run: the configurations of its attempts, and the changes between them."""
