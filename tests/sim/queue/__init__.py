"""Simulation of admission: random clusters and queues with their invariants, and planted bugs that must be found.

`python -m tests.sim.queue --clusters 10000 --jobs 2`
"""
