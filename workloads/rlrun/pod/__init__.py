"""Code inside a run's pods: `rlrun-pod ROLE` is the first process of each container. Needs neither torch nor an engine.

`preparation` has the preconditions of a role, `role_process` its process and output, `container` one complete start of a container.
"""
