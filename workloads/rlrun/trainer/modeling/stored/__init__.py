"""Weights in a model's files: where each parameter's numbers lie, and reads of the slices that one rank needs."""
