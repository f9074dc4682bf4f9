"""The resolved configuration of all roles: `run.json`, the one object that every file, flag, port and path follows from."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from rlrun.config.base import Config
from rlrun.config.roles import InferenceConfig, OrchestratorConfig, TrainerConfig

# Where a role listens may change from attempt to attempt without changing what the run computes.
_NOT_HASHED = {"port", "host", "trainer_url", "inference_urls", "metrics_port", "output_dir", "uid", "replay"}


class RunConfig(Config):
    """All roles of one run, fully resolved."""

    format_version: Literal[1] = 1
    """Version of this file's format."""
    trainer: TrainerConfig
    """The trainer."""
    inference: InferenceConfig
    """Each engine."""
    orchestrator: OrchestratorConfig
    """The orchestrator."""

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 over everything that determines what the run computes."""
        document: dict[str, Any] = self.model_dump(mode="json")
        for role in ("trainer", "inference", "orchestrator"):
            document[role] = {key: value for key, value in document[role].items() if key not in _NOT_HASHED}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
