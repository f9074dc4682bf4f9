"""The one exception that the cluster harness raises on purpose."""


class ClusterError(RuntimeError):
    """A cluster cannot do what was asked; the message says what is missing and how to get it."""
