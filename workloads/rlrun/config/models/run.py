"""The resolved configuration of all roles: `run.json`, the one object that every file, flag, port and path follows from."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from rlrun.config.base import Config
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, RoleConfig, TrainerConfig
from rlrun.config.models.tracking import TrackingConfig

# Where a role listens, where an attempt starts, and how many replicas share the work may change without changing what the run computes.
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
    """All roles of one run, fully resolved."""

    format_version: Literal[1] = 1
    """Version of this file's format."""
    trainer: TrainerConfig
    """The trainer."""
    inference: InferenceConfig | None
    """Each engine; null in supervised fine-tuning, which has none."""
    orchestrator: OrchestratorConfig
    """The orchestrator."""
    tracking: TrackingConfig | None = None
    """Trackers of the run; they change nothing of what it computes."""
    mirror: MirrorConfig | None = None
    """Copies in object storage; they change nothing of what it computes."""

    def hash(self) -> str:
        """Fingerprint of everything that determines what the run computes."""
        return config_fingerprint(
            *(role for role in (self.trainer, self.inference, self.orchestrator) if role is not None)
        )


def config_fingerprint(*roles: RoleConfig) -> str:
    """First 16 hex digits of the SHA-256 over what the roles compute; where they listen and write does not count."""
    documents = [role.model_dump(mode="json", exclude=_NOT_HASHED) for role in roles]
    return hashlib.sha256(json.dumps(documents, sort_keys=True).encode()).hexdigest()[:16]
