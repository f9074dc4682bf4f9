"""A run from its folder on this machine: its state, its conditions and the failures of its attempts."""
