"""Commands for existing runs in a folder or in a cluster: `rlrun get`, `status`, `why`, `logs` and others.

`kubectl rlrun` (the program `kubectl-rlrun`) offers the same commands, only for clusters.
"""
