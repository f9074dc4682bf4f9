"""RLRun: one Kubernetes object is one reinforcement-learning run of a language model.

This package contains the manifest (`api`), the roles' configuration (`config`), the file and wire protocol (`protocol`) and the roles. In
Python, `from rlrun import Run` creates, starts and follows a run (`runs`).
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"
_PLACES = {
    "Run": "rlrun.runs.run",
    "ManifestError": "rlrun.runs.blocks",
    "RunError": "rlrun.runs.blocks",
    "RunFailedError": "rlrun.runs.blocks",
    "WaitTimeoutError": "rlrun.runs.blocks",
}
"""Names of the Python API, by their modules; __init__.pyi has their types."""
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> object:
    """Return a name of the Python API. Its module is imported on first use, because every role and command imports this package."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
