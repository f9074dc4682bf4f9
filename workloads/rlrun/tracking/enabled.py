"""Trackers that a run feeds here, by its configuration and the environment."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.config.models.tracking import TrackingConfig, WandbConfig


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
