"""Commands on runs that are there, in a folder or in a cluster: `rlrun get`, `status`, `why`, `logs` and their like.

`kubectl rlrun` (the program `kubectl-rlrun`) is the same commands for clusters alone.
"""
