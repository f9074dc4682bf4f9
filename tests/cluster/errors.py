"""The exception of the cluster harness."""


class ClusterError(RuntimeError):
    """A cluster cannot fulfill a request; the message names the missing part and the fix."""
