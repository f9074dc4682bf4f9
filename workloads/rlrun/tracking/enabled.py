"""Trackers that are enabled by the configuration and the environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.config.models.trackers import MlflowConfig, TrackingConfig, WandbConfig

WANDB_SERVER = "https://api.wandb.ai"
"""Address of W&B's cloud service."""


def enabled_trackers(config: TrackingConfig | None, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the enabled trackers. `WANDB_MODE=disabled` turns W&B off."""
    if config is None:
        return []
    off = environ.get("WANDB_MODE", "").lower() == "disabled"
    return [name for name in config.trackers if not (name == "wandb" and off)]


def is_offline(config: WandbConfig, environ: Mapping[str, str]) -> bool:
    """Return whether W&B writes files on the volume instead of sending to its server."""
    mode = environ.get("WANDB_MODE", "").lower()
    return config.offline if config.offline is not None else mode in ("offline", "dryrun")


def wandb_address(config: WandbConfig, environ: Mapping[str, str]) -> str | None:
    """Return the address of W&B's server, or None in offline mode."""
    if is_offline(config, environ):
        return None
    return config.base_url or environ.get("WANDB_BASE_URL") or WANDB_SERVER


def mlflow_address(config: MlflowConfig, environ: Mapping[str, str]) -> str | None:
    """Return the address of MLflow's server, or None if no server is configured."""
    given = environ.get("MLFLOW_TRACKING_URI", "")
    return config.uri or (given if given.startswith("http") else None)


def server_addresses(config: TrackingConfig | None, environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of all servers to which a run's trackers send data."""
    if config is None:
        return []
    names = enabled_trackers(config, environ)
    found = [
        wandb_address(config.wandb, environ) if config.wandb is not None and "wandb" in names else None,
        mlflow_address(config.mlflow, environ) if config.mlflow is not None else None,
    ]
    return [address for address in found if address is not None]
