"""Limits of an environment's processes: which files and processes they can reach, and that none outlives its keeper."""
