"""Resolved configuration of all roles (`run.json`), from which every file, flag, port and path is derived."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from rlrun.config.base import Config
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, RoleConfig, TrainerConfig
from rlrun.config.models.tracking import TrackingConfig

# Addresses, ports, the starting checkpoint and the number of replicas may change without changing the result of the run.
_NOT_HASHED: dict[str, bool | dict[str, bool]] = {
    "port": True,
    "host": True,
    "trainer_url": True,
    "inference_urls": True,
    "inference_service": True,
    "metrics_port": True,
    "output_dir": True,
    "uid": True,
    "replay": True,
    "replicas": True,
    "colocated": True,
    "engine_urls": True,
    "checkpoint": {"resume": True},
}


class RunConfig(Config):
    """Resolved configuration of all roles of one run."""

    format_version: Literal[1] = 1
    """Version of the file format."""
    trainer: TrainerConfig
    """The trainer."""
    inference: InferenceConfig | None
    """Configuration of each engine; null for supervised fine-tuning, which has no engines."""
    orchestrator: OrchestratorConfig
    """The orchestrator."""
    tracking: TrackingConfig | None = None
    """Trackers of the run. They do not change its result."""
    mirror: MirrorConfig | None = None
    """Copies in object storage. They do not change the run's result."""

    def hash(self) -> str:
        """Return the fingerprint of every value that determines the result of the run."""
        return config_fingerprint(
            *(role for role in (self.trainer, self.inference, self.orchestrator) if role is not None)
        )


def config_fingerprint(*roles: RoleConfig) -> str:
    """Return the first 16 hex digits of the SHA-256 over the roles' configuration, without addresses and folders."""
    documents = [role.model_dump(mode="json", exclude=_NOT_HASHED) for role in roles]
    return hashlib.sha256(json.dumps(documents, sort_keys=True).encode()).hexdigest()[:16]
