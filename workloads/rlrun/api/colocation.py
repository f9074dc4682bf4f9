"""Rules of a run whose trainer and engines share GPUs (`placement.colocate`)."""

from __future__ import annotations

from rlrun.api import unread
from rlrun.api.pods import PodFields
from rlrun.api.run_fields import RunFields
from rlrun.config.rule import Rule

COLOCATION_RULES = (
    Rule(
        "!self.placement.colocate || self.algorithm.maxAsyncLevel == 0",
        "algorithm.maxAsyncLevel ({self.algorithm.maxAsyncLevel}) must be 0 with placement.colocate, because engines sleep while a step "
        "trains; set maxAsyncLevel: 0",
        ".algorithm.maxAsyncLevel",
    ),
    Rule(
        "!self.placement.colocate || !has(self.trainer.elastic)",
        "trainer.elastic (min {self.trainer.elastic.min}) cannot be used with placement.colocate, which puts engines into the trainer's "
        "pods; remove one of them",
        ".trainer.elastic",
    ),
)
"""Admission rules of the whole specification."""


def check_colocation(spec: RunFields) -> None:
    """Check that trainer and engines can use the same GPUs in turn.

    Raises:
        ValueError: The message has field, value and fix.
    """
    if not spec.placement.colocate:
        return
    trainer, engine = spec.trainer, spec.inference
    if spec.task != "RL":
        raise ValueError(f"placement.colocate (true) needs task RL, but task is {spec.task}; remove it")
    if trainer.shared_with is not None:
        raise ValueError(
            f"placement.colocate (true) is set by the host ({trainer.shared_with}) of trainer.sharedWith; remove it"
        )
    if trainer.lora is not None and trainer.lora.slots > 1:
        raise ValueError(
            f"trainer.lora.slots ({trainer.lora.slots}) lets other runs use engines that sleep while this run trains, with "
            "placement.colocate; remove one of them"
        )
    level = spec.algorithm.max_async_level
    if level != 0:
        raise ValueError(
            f"algorithm.maxAsyncLevel ({level}) must be 0 with placement.colocate, because engines sleep while a step trains; "
            "set maxAsyncLevel: 0"
        )
    if trainer.elastic is not None:
        raise ValueError(
            f"trainer.elastic (min {trainer.elastic.min}) cannot be used with placement.colocate, which puts engines into the trainer's "
            "pods; remove one of them"
        )
    if spec.weight_sync.transport != "Filesystem":
        raise ValueError(
            f"weightSync.transport ({spec.weight_sync.transport}) needs two GPUs, but placement.colocate uses one GPU for both; "
            "set transport: Filesystem"
        )
    if engine.replicas not in (1, trainer.replicas):
        raise ValueError(
            f"inference.replicas ({engine.replicas}) must be trainer.replicas ({trainer.replicas}) with placement.colocate: each trainer "
            "pod has one engine; remove it"
        )
    if engine.gpus_per_replica != trainer.gpus_per_replica:
        raise ValueError(
            f"inference.gpusPerReplica ({engine.gpus_per_replica}) must be trainer.gpusPerReplica ({trainer.gpus_per_replica}) with "
            "placement.colocate, because they are the same GPUs; change one of them"
        )
    of_pods: unread.Parts = (
        ("inference", engine, [*PodFields.model_fields, "min_available", "autoscale", "spot"]),
        ("placement", spec.placement, ("inference", "spread_inference")),
    )
    unread.refuse_set_field(of_pods, "engines with their own pods")
