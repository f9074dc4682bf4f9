"""Failures of pods and nodes: what ended, why, whether it counts as a restart, and which nodes to avoid. Pure."""
