"""Trackers that a run feeds here, by its configuration and the environment."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.config.models.tracking import MlflowConfig, TrackingConfig, WandbConfig

WANDB_SERVER = "https://api.wandb.ai"
"""Address of W&B's own service."""


def enabled_trackers(config: TrackingConfig | None, environ: Mapping[str, str]) -> list[str]:
    """Names of the trackers; `WANDB_MODE=disabled` turns W&B off."""
    if config is None:
        return []
    off = environ.get("WANDB_MODE", "").lower() == "disabled"
    return [name for name in config.trackers if not (name == "wandb" and off)]


def is_offline(config: WandbConfig, environ: Mapping[str, str]) -> bool:
    """True if files on the volume take the place of W&B's server."""
    mode = environ.get("WANDB_MODE", "").lower()
    return config.offline if config.offline is not None else mode in ("offline", "dryrun")


def wandb_address(config: WandbConfig, environ: Mapping[str, str]) -> str | None:
    """Address of W&B's server; None: files on the volume take its place."""
    if is_offline(config, environ):
        return None
    return config.base_url or environ.get("WANDB_BASE_URL") or WANDB_SERVER


def mlflow_address(config: MlflowConfig, environ: Mapping[str, str]) -> str | None:
    """Address of MLflow's server; None: no address of a server is given."""
    given = environ.get("MLFLOW_TRACKING_URI", "")
    return config.uri or (given if given.startswith("http") else None)


def server_addresses(config: TrackingConfig | None, environ: Mapping[str, str]) -> list[str]:
    """Addresses of the servers that a run's trackers talk to."""
    if config is None:
        return []
    names = enabled_trackers(config, environ)
    found = [
        wandb_address(config.wandb, environ) if config.wandb is not None and "wandb" in names else None,
        mlflow_address(config.mlflow, environ) if config.mlflow is not None else None,
    ]
    return [address for address in found if address is not None]
