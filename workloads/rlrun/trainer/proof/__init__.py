"""Checks of a model's architecture before a run starts, on small models with the same structure."""
