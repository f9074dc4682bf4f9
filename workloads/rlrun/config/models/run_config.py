"""Resolved configuration of all roles (`run.json`), from which every file, flag, port and path is derived.

The module also compares runs that share a trainer: `sharing_refusal` is evaluated first by the operator and again by the trainer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from rlrun.config.base import Config
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.models.parallel import RouterConfig
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, RoleConfig, TrainerConfig
from rlrun.config.models.trackers import TrackingConfig

# Values that may change without changing the result of the run: addresses, ports, folder and UID, the starting checkpoint, the number of
# replicas, the GPUs of the engines (`colocated`), and the folder of recorded rollouts that replace new ones (`replay`).
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
# Fields that did not exist when runs of earlier releases stored their fingerprints. At its default such a field does not count, so that an
# upgrade changes no fingerprint.
_ADDED: dict[str, object] = {
    "router": RouterConfig().model_dump(mode="json"),
    "return_routes": False,
    "replay_routes": False,
    "epochs_per_step": 1,
}
# The same for the fields of a role's blocks.
_ADDED_IN_BLOCKS: dict[str, dict[str, object]] = {"model": {"class_": None}}
# Defaults that have changed, with the former one. Neither changes the result of a run, so they count as equal.
_FORMER_DEFAULTS: dict[str, tuple[str, str]] = {"activation_checkpointing": ("auto", "none")}


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

    def config_hash(self) -> str:
        """Return the fingerprint of every value that determines the result of the run."""
        return config_fingerprint(
            *(role for role in (self.trainer, self.inference, self.orchestrator) if role is not None)
        )

    def with_presets_applied(self) -> Self:
        """Return the same run, with the parts of each objective in their own fields instead of below the name of a preset.

        For readers only. A run's own files keep the name of the preset, because the fingerprint of its attempts covers these fields.
        """
        run = self.trainer.algorithm
        parts = {
            name: part.with_preset_applied(run).trainer_part(run)
            for name, part in self.trainer.environment_algorithms.items()
        }
        environments = [
            environment.model_copy(update={"algorithm": environment.algorithm.with_preset_applied(run)})
            for environment in self.orchestrator.environments
        ]
        applied = {"algorithm": run.with_preset_applied()}
        return self.model_copy(
            update={
                "trainer": self.trainer.model_copy(update=applied | {"environment_algorithms": parts}),
                "orchestrator": self.orchestrator.model_copy(update=applied | {"environments": environments}),
            }
        )


def config_fingerprint(*roles: RoleConfig) -> str:
    """Return the first 16 hex digits of the SHA-256 over the roles' configuration.

    Fields in `_NOT_HASHED` do not count, and fields that later releases added do not count at their defaults. A changed
    default counts as the former one.
    """
    documents = [
        {
            name: _former_value(name, _without_added(value, _ADDED_IN_BLOCKS.get(name, {})))
            for name, value in _without_added(role.model_dump(mode="json", exclude=_NOT_HASHED), _ADDED).items()
        }
        for role in roles
    ]
    return hashlib.sha256(json.dumps(documents, sort_keys=True).encode()).hexdigest()[:16]


def _without_added(block: Any, added: Mapping[str, object]) -> Any:
    """Return a block without the fields in `added` that have their defaults."""
    if not added:
        return block
    return {name: value for name, value in block.items() if name not in added or value != added[name]}


def _former_value(name: str, value: object) -> object:
    default, former = _FORMER_DEFAULTS.get(name, (None, None))
    return former if default is not None and value == default else value


def sharing_refusal(host: TrainerConfig, guest: TrainerConfig) -> str | None:
    """Return a message with field, value and fix if a run (the guest) cannot use the trainer of another run (the host), otherwise None.

    The operator checks this first, and the trainer again. Call it only with a host that has `lora.slots` above 1.
    """
    if guest.shared_with != host.name:
        return (
            f"trainer.sharedWith is {guest.shared_with}, but this is the trainer of {host.name}; set it to {host.name}"
        )
    # `TrainerConfig` refuses `shared_with` without `lora`.
    assert guest.lora is not None
    assert host.lora is not None
    if guest.model != host.model:
        return f"model differs from the model of {host.name}, whose trainer holds only one model; make them equal"
    if guest.lora.rank > host.lora.rank:
        return (
            f"trainer.lora.rank ({guest.lora.rank}) is higher than the rank of {host.name} ({host.lora.rank}); "
            f"lower it to at most {host.lora.rank}"
        )
    # With tensor parallelism, each rank would drop different inputs of the adapter.
    if guest.lora.dropout > 0 and host.parallelism.tp > 1:
        return (
            f"trainer.lora.dropout ({guest.lora.dropout}) needs a trainer without tensor parallelism, but {host.name} has "
            f"parallelism.tp {host.parallelism.tp}; set dropout: 0"
        )
    # An empty list of targets means all linear layers.
    mine, theirs = sorted(guest.lora.targets), sorted(host.lora.targets)
    if mine != theirs:
        return f"trainer.lora.targets ({mine or 'all'}) differ from those of {host.name} ({theirs or 'all'}); make them equal"
    if guest.algorithm.critic is not None:
        return "algorithm.critic is a full model, which a shared trainer cannot hold; remove it, or remove trainer.sharedWith"
    wanted, limit = guest.micro_batch_tokens or guest.seq_len, host.micro_batch_tokens or host.seq_len
    if wanted > limit:
        return (
            f"trainer.microBatchTokens ({wanted}) is higher than the limit of {host.name} ({limit}), whose memory it shares; "
            f"lower it to at most {limit}"
        )
    return None
