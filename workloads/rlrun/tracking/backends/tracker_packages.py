"""Checks for missing packages, addresses and keys of trackers."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rlrun.config.models.trackers import TrackingConfig
from rlrun.runtime.extras import install_extras
from rlrun.tracking.enabled import enabled_trackers, mlflow_address, wandb_address

PACKAGES: Mapping[str, str] = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
"""Package of each tracker. The extra that installs it has the tracker's name. MLflow needs no package."""


def missing_package(tracker: str, error: ImportError | None = None, *, in_image: bool = False) -> str:
    """Return a message about a tracker's package that cannot be imported.

    Args:
        tracker: name of the tracker.
        error: error of the import.
        in_image: whether packages cannot be installed here, as in a pod.
    """
    package = PACKAGES[tracker]
    why = f" ({error})" if error is not None and error.name != package else ""
    if in_image:
        fix = f"set orchestrator.image to one that has it, such as the trainer's image of a release, or remove tracking.{tracker}"
        return f"needs the package {package}, which this image does not have; {fix}"
    return f"needs the package {package}, which is not installed{why}; install it: {install_extras(tracker)}"


def missing_trackers(
    config: TrackingConfig, environ: Mapping[str, str], *, in_image: bool = False
) -> list[tuple[str, str]]:
    """Return the trackers that cannot work on this machine, with the reason: a missing package, address or key. Imports no library.

    Args:
        config: trackers of the run.
        environ: environment variables of the trackers.
        in_image: whether this is a pod, where packages cannot be installed.
    """
    names = enabled_trackers(config, environ)
    found = [
        (name, missing_package(name, in_image=in_image))
        for name in names
        if name in PACKAGES and find_spec(PACKAGES[name]) is None
    ]
    if config.mlflow is not None and mlflow_address(config.mlflow, environ) is None:
        found.append(("mlflow", MLFLOW_ADDRESS))
    if config.wandb is not None and "wandb" in names:
        address = wandb_address(config.wandb, environ)
        if address is not None and not environ.get("WANDB_API_KEY") and not _logged_in(address, environ):
            found.append(("wandb", WANDB_KEY.format(urlsplit(address).hostname)))
    return found


def problems_in_cluster(
    config: TrackingConfig, variables: Mapping[str, str | None], *, opaque: bool
) -> list[tuple[str, str]]:
    """Return the trackers that cannot work in a cluster, and keys that would be public there, as far as the manifest shows it.

    Args:
        config: trackers of the run.
        variables: variables of `orchestrator.env`; None for a value from a Secret or another source.
        opaque: whether other variables come from unreadable sources, such as `envFrom`.
    """
    known = {name: value or "" for name, value in variables.items()}
    keyed = {key for secret in config.secrets for key in secret.keys}
    found: list[tuple[str, str]] = []
    if config.mlflow is not None and not opaque and "MLFLOW_TRACKING_URI" not in known and config.mlflow.uri is None:
        found.append(("mlflow", "needs an address in a cluster: set uri"))
    if config.wandb is not None and "wandb" in enabled_trackers(config, known):
        address = wandb_address(config.wandb, known)
        if address is not None and not opaque and "WANDB_API_KEY" not in {*known, *keyed}:
            found.append(
                (
                    "wandb",
                    "has no key in a cluster: set secretRef to a Secret with WANDB_API_KEY, or set offline: true",
                )
            )
    for name, key in (
        ("wandb", "WANDB_API_KEY"),
        *(("mlflow", f"MLFLOW_TRACKING_{part}") for part in ("TOKEN", "PASSWORD")),
    ):
        if name in config.trackers and variables.get(key):
            message = f"has {key} in orchestrator.env, which every reader of the run can see; remove it there and set secretRef to a Secret"
            found.append((name, message))
    return found


def _logged_in(address: str, environ: Mapping[str, str]) -> bool:
    """Return whether `wandb login` has stored a key for the server."""
    path = environ.get("NETRC") or str(Path("~/.netrc").expanduser())
    try:
        return netrc.netrc(path).authenticators(urlsplit(address).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


MLFLOW_ADDRESS = (
    "needs an address: uri is not set, and MLFLOW_TRACKING_URI is not an address of a server; "
    "set one of them, such as http://127.0.0.1:5000 (`mlflow server`)"
)
WANDB_KEY = "has no key for {}: set WANDB_API_KEY (in a cluster: secretRef), run `wandb login`, or set offline: true"
