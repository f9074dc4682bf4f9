"""A Kubernetes cluster for tests and for trials: `python -m tests.cluster up`, or `up()` from a test.

It comes from a given kubeconfig, from kind, or from processes of this machine (`native`).
"""

from .api import attach, down, up
from .base import ApiServer, Cluster
from .errors import ClusterError

__all__ = ["ApiServer", "Cluster", "ClusterError", "attach", "down", "up"]
