"""A Kubernetes cluster as process trees on this machine.

A *rack* is one process in its own network, mount and PID namespace that owns a bridge. The machines (`cp`, `n0`, `n1`,
...) are process trees nested in it, each with its own namespaces. One kill of the rack's first process ends everything.
"""
