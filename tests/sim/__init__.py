"""Simulation of the operator's code with a cluster and a clock in memory: random histories and their invariants.

python -m tests.sim --histories 2000 --seed 1 --jobs 2
"""
