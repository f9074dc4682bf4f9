"""The operator's own code against a cluster in memory, with a clock in memory: random histories, and what must hold in each of them.

python -m tests.sim --histories 2000 --seed 1 --jobs 2
"""
