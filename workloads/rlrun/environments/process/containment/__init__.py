"""Limits of an environment's processes: what they may reach, and that none outlives its keeper."""
