"""Code inside a run's pods: `rlrun-pod ROLE` is the first process of each container.

It waits for what the role needs, starts the role, passes signals on, keeps its output, tells why it failed, and leaves nothing running.
Needs no torch and no engine.
"""
