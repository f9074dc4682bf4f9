"""Rules of a run whose engines have the trainer's GPUs (`placement.colocate`)."""

from __future__ import annotations

from rlrun.api import unread
from rlrun.api.pods import PodFields
from rlrun.api.run_fields import RunFields
from rlrun.config.rule import Rule

RULES = (
    Rule(
        "!self.placement.colocate || self.algorithm.maxAsyncLevel == 0",
        "algorithm.maxAsyncLevel ({self.algorithm.maxAsyncLevel}) must be 0 with placement.colocate: engines sleep while a step is "
        "trained; set maxAsyncLevel: 0",
        ".algorithm.maxAsyncLevel",
    ),
    Rule(
        "!self.placement.colocate || !has(self.trainer.elastic)",
        "trainer.elastic (min {self.trainer.elastic.min}) leaves engines alone, and with placement.colocate they are in the trainer's "
        "pods; remove one of them",
        ".trainer.elastic",
    ),
)
"""Rules of the whole specification, for the API server."""


def check_colocation(spec: RunFields) -> None:
    """See that trainer and engines can have the same GPUs in turn.

    Raises:
        ValueError: names the field, its value, and the fix.
    """
    if not spec.placement.colocate:
        return
    trainer, engine = spec.trainer, spec.inference
    if spec.task != "RL":
        raise ValueError(f"placement.colocate (true) is for task RL, and task is {spec.task}; remove it")
    if trainer.shared_with is not None:
        raise ValueError(
            f"placement.colocate (true) is the host's ({trainer.shared_with}), with trainer.sharedWith; remove it"
        )
    if trainer.lora is not None and trainer.lora.slots > 1:
        raise ValueError(
            f"trainer.lora.slots ({trainer.lora.slots}) lets other runs use engines that sleep while this one trains, with "
            "placement.colocate; remove one of them"
        )
    level = spec.algorithm.max_async_level
    if level != 0:
        raise ValueError(
            f"algorithm.maxAsyncLevel ({level}) must be 0 with placement.colocate: engines sleep while a step is trained; "
            "set maxAsyncLevel: 0"
        )
    if trainer.elastic is not None:
        raise ValueError(
            f"trainer.elastic (min {trainer.elastic.min}) leaves engines alone, and with placement.colocate they are in the trainer's "
            "pods; remove one of them"
        )
    if spec.weight_sync.transport != "Filesystem":
        raise ValueError(
            f"weightSync.transport ({spec.weight_sync.transport}) needs two GPUs, and placement.colocate has one for both; "
            "set transport: Filesystem"
        )
    if engine.replicas not in (1, trainer.replicas):
        raise ValueError(
            f"inference.replicas ({engine.replicas}) must be trainer.replicas ({trainer.replicas}) with placement.colocate: each pod "
            "of the trainer has an engine; remove it"
        )
    if engine.gpus_per_replica != trainer.gpus_per_replica:
        raise ValueError(
            f"inference.gpusPerReplica ({engine.gpus_per_replica}) must be trainer.gpusPerReplica ({trainer.gpus_per_replica}) with "
            "placement.colocate: they are the same GPUs; change one of them"
        )
    of_pods: unread.Parts = (
        ("inference", engine, [*PodFields.model_fields, "min_available", "autoscale", "spot"]),
        ("placement", spec.placement, ("inference", "spread_inference")),
    )
    unread.refuse_set_field(of_pods, "engines that have pods of their own")
