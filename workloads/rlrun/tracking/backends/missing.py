"""Packages of the trackers, and the command that installs a missing one."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rlrun.config.models.tracking import TrackingConfig
from rlrun.runtime.extras import install_extras
from rlrun.tracking.enabled import enabled_trackers, mlflow_address, wandb_address

PACKAGES: Mapping[str, str] = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
"""Package of a tracker, of the extra with the tracker's name. MLflow needs none."""


def missing_package(tracker: str, error: ImportError | None = None, *, in_image: bool = False) -> str:
    """One line about a tracker's package that cannot be imported.

    Args:
        tracker: its name.
        error: of the import.
        in_image: nothing can be installed here, as in a pod.
    """
    package = PACKAGES[tracker]
    why = f" ({error})" if error is not None and error.name != package else ""
    if in_image:
        fix = f"set orchestrator.image to one that has it, as the trainer's image of a release has, or remove tracking.{tracker}"
        return f"needs the package {package}, which this image lacks; {fix}"
    return f"needs the package {package}, which is not installed{why}; install it: {install_extras(tracker)}"


def missing_trackers(
    config: TrackingConfig, environ: Mapping[str, str], *, in_image: bool = False
) -> list[tuple[str, str]]:
    """Trackers that cannot work on this machine, and why: a package, an address or a key is missing. Imports none of them.

    Args:
        config: the trackers.
        environ: where their variables are.
        in_image: this is a pod, where nothing can be installed.
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
    """Trackers that cannot work in a cluster, and keys that everybody reads there, as far as the manifest says it.

    Args:
        config: the trackers.
        variables: those of `orchestrator.env`; None: from a Secret or another source.
        opaque: other variables come from where this cannot look, such as `envFrom`.
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
                    "has no key in a cluster: name a Secret with WANDB_API_KEY in secretRef, or set offline: true",
                )
            )
    for name, key in (
        ("wandb", "WANDB_API_KEY"),
        *(("mlflow", f"MLFLOW_TRACKING_{part}") for part in ("TOKEN", "PASSWORD")),
    ):
        if name in config.trackers and variables.get(key):
            said = f"has {key} in orchestrator.env, where whoever may see the run reads it; remove it there, and name a Secret in secretRef"
            found.append((name, said))
    return found


def _logged_in(address: str, environ: Mapping[str, str]) -> bool:
    """True if `wandb login` has left a key for the server."""
    path = environ.get("NETRC") or str(Path("~/.netrc").expanduser())
    try:
        return netrc.netrc(path).authenticators(urlsplit(address).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


MLFLOW_ADDRESS = (
    "needs an address: uri is not set, and MLFLOW_TRACKING_URI is no address of a server; "
    "set one of them, such as http://127.0.0.1:5000 (`mlflow server`)"
)
WANDB_KEY = "has no key for {}: set WANDB_API_KEY (in a cluster: secretRef), say `wandb login`, or set offline: true"
