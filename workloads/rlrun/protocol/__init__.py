"""Contracts between the roles of a run: `files` on its volume, `messages` between them, `packing` of samples into micro-batches.

Imports neither torch nor kopf.
"""
