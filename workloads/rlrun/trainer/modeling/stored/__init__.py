"""Weights in a model's files: location of each parameter, and reads of the slices for one rank."""
