"""Contracts between the roles of a run: `files` on its volume, `messages` between roles, `packing` of samples into micro-batches.

Imports neither torch nor kopf.
"""
