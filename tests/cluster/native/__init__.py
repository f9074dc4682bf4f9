"""A Kubernetes cluster as process trees on this machine.

A *rack* is one process in its own network, mount and PID namespace that owns a bridge; the machines (`cp`, `n0`, `n1`, ...)
are process trees nested in it, each with namespaces of its own. One kill of the rack's first process ends everything.
"""
