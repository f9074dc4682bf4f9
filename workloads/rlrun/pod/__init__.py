"""Code inside a run's pods: `rlrun-pod ROLE` is the first process of each container. Needs no torch and no engine.

`start` is what a role waits for, `role` its process and output, `container` one start of a container from beginning to end.
"""
