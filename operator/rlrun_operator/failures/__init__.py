"""Failures of pods and nodes: cause, whether the restart counts, and nodes to avoid. Pure."""
