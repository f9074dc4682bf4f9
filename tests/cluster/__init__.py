"""A Kubernetes cluster for tests and for trying things out: `python -m tests.cluster up`, or `up()` from a test.

It comes from a kubeconfig that we are told to use, from kind, or from this machine's own processes (`native`).
"""

from .api import attach, down, up
from .base import ApiServer, Cluster
from .errors import ClusterError

__all__ = ["ApiServer", "Cluster", "ClusterError", "attach", "down", "up"]
