"""Packages of the trackers, and the command that installs a missing one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from rlrun.config.models.tracking import TrackingConfig

PACKAGES: Mapping[str, tuple[str, str]] = {
    "wandb": ("wandb", "pip install 'rlrun[wandb]'"),
    "tensorboard": ("tensorboard", "pip install 'rlrun[tensorboard]'"),
    "trackio": ("trackio", "pip install trackio"),
}
"""Package of a tracker, and how to install it. MLflow needs none."""


def missing_package(tracker: str, error: ImportError | None = None) -> str:
    """One line about a tracker's package that cannot be imported."""
    package, command = PACKAGES[tracker]
    why = f" ({error})" if error is not None and error.name != package else ""
    return f"tracking.{tracker} needs the package {package}, which is not installed{why}; install it: {command}"


def problems(config: TrackingConfig, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Trackers that cannot work on this machine, and why: a package or an address is missing. Imports none of them."""
    found = [
        (name, missing_package(name))
        for name in config.trackers
        if name in PACKAGES and find_spec(PACKAGES[name][0]) is None
    ]
    if (
        config.mlflow is not None
        and not config.mlflow.uri
        and not environ.get("MLFLOW_TRACKING_URI", "").startswith("http")
    ):
        found.append(("mlflow", MLFLOW_ADDRESS))
    return found


MLFLOW_ADDRESS = (
    "tracking.mlflow.uri is not set, and MLFLOW_TRACKING_URI is no address of a server; "
    "set one of them, such as http://127.0.0.1:5000 (`mlflow server`)"
)
