"""`RLRun`: one object is one run of a language model: reinforcement learning, supervised fine-tuning, or evaluation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlrun.api import API_VERSION as API_VERSION
from rlrun.api import field_rules
from rlrun.api.pod_fields import InferenceBlock, PodFields
from rlrun.api.router_rules import SPEC_RULES
from rlrun.api.run_fields import RunFields
from rlrun.config.base import Config, Rule

KIND = "RLRun"
NAME_MAX = 40
CLAIM_SIZE = "storage.claimTemplate.size"
LIVE_FIELDS = (
    "suspend",
    "priority",
    "queueName",
    "maxSteps",
    "failurePolicy",
    "nodeLoss",
    "progress",
    "inference.replicas",
    "inference.minAvailable",
    "inference.autoscale",
    "inference.spot",
    "trainer.guests",
    "trainer.elastic",
    CLAIM_SIZE,
    "activeDeadlineSeconds",
    "budget",
    "ttlSecondsAfterFinished",
    "cleanupPolicy",
)
"""Fields of the spec that may change at any time (`maxSteps` and the claim's size only grow). Others change only while suspended."""
NEXT_ATTEMPT_FIELDS = ("maxSteps",)
"""Live fields that the roles read only at the start of an attempt."""
IDENTITY_FIELDS = ("task", "model", "storage", "trainer.sharedWith", "managedBy")
"""Fields of the spec, except `LIVE_FIELDS`, that never change after the first attempt starts: checkpoints would not fit."""
_RFC1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

_LABEL = "(has({0}.name) ? {0}.name : {0}.id)"
_FIRST_UNEVEN = "self.environments.map(e, self.orchestrator.batchSize % e.groupSize != 0, e.groupSize)[0]"


class RLRunSpec(RunFields):
    """Specification of the run. The smallest specification has a model and an environment (RL) or data (SFT)."""

    EXAMPLES: ClassVar[Mapping[str, object]] = {"model": {"name": "Qwen/Qwen3-8B"}}
    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        *field_rules.COLOCATION_RULES,
        Rule(
            "self.weightSync.transport == 'Filesystem' || !has(self.trainer.lora)",
            "weightSync.transport (NCCL) does not transfer adapters; set transport: Filesystem or remove trainer.lora",
            ".weightSync",
        ),
        Rule(
            "self.weightSync.transport == 'Filesystem' || (self.trainer.gpusPerReplica == 0) == (self.inference.gpusPerReplica == 0)",
            "weightSync.transport (NCCL) connects GPUs with GPUs, or CPUs with CPUs; trainer.gpusPerReplica is "
            "{self.trainer.gpusPerReplica} and inference.gpusPerReplica is {self.inference.gpusPerReplica}; "
            "set transport: Filesystem or change one of them",
            ".weightSync",
        ),
        *field_rules.TASK_RULES,
        Rule(
            "!has(self.trainer.elastic) || self.checkpoint.enabled",
            "trainer.elastic continues from checkpoints, but checkpoint.enabled is false; remove one of them",
            ".trainer.elastic",
        ),
        Rule(
            "!has(self.inference.autoscale) || !has(self.trainer.lora) || self.trainer.lora.slots == 1",
            "inference.autoscale measures only this run's load, but trainer.lora.slots ({self.trainer.lora.slots}) lets other runs use the "
            "engines; remove one of them",
            ".inference",
        ),
        Rule(
            "!has(self.inference.spot) || !has(self.storage.claimTemplate) || 'ReadWriteMany' in self.storage.claimTemplate.accessModes",
            "inference.spot needs a volume for several nodes, but storage.claimTemplate.accessModes has no ReadWriteMany; add it, "
            "or remove inference.spot",
            ".inference.spot",
        ),
        Rule(
            "!has(self.budget) || !has(self.trainer.sharedWith)",
            "budget needs a run with own GPUs, but trainer.sharedWith ({self.trainer.sharedWith}) names a run whose GPUs this run "
            "uses; remove budget here, and set it in that run",
            ".budget",
        ),
        Rule(
            "self.task != 'RL' || self.environments.all(e, self.orchestrator.batchSize % e.groupSize == 0)",
            "orchestrator.batchSize ({self.orchestrator.batchSize}) must be divisible by "
            "environments[{self.environments.map(e, self.orchestrator.batchSize % e.groupSize != 0).indexOf(true)}].groupSize "
            f"({{{_FIRST_UNEVEN}}}); set batchSize to {{(self.orchestrator.batchSize / {_FIRST_UNEVEN} + 1) * {_FIRST_UNEVEN}}}",
            ".orchestrator.batchSize",
        ),
        Rule(
            f"self.environments.all(e, self.environments.exists_one(f, {_LABEL.format('f')} == {_LABEL.format('e')}))",
            f"several environments have the name '{{self.environments.map(e, {_LABEL.format('e')})"
            f".filter(l, !self.environments.exists_one(f, {_LABEL.format('f')} == l))[0]}}'; "
            "give each environment its own environments[].name",
            ".environments",
        ),
        *field_rules.LENGTH_RULES,
        *SPEC_RULES,
    )

    @model_validator(mode="after")
    def _parts_of_a_guest(self) -> Self:
        """A guest has only the pod of its orchestrator."""
        if self.trainer.shared_with is None:
            return self
        blocks: tuple[tuple[str, Config, Iterable[str]], ...] = (
            ("inference", self.inference, InferenceBlock.model_fields),
            ("trainer", self.trainer, (*PodFields.model_fields, "elastic")),
        )
        for block, given, names in blocks:
            for name in names:
                info = type(given).model_fields[name]
                value = getattr(given, name)
                if value != info.get_default(call_default_factory=True):
                    raise ValueError(
                        f"{block}.{info.alias} ({value}) is set by the host of trainer.sharedWith; remove it"
                    )
        return self

    @model_validator(mode="after")
    def _budget_of_own_gpus(self) -> Self:
        if self.budget is not None and self.trainer.shared_with is not None:
            raise ValueError(
                f"budget needs a run with own GPUs, but trainer.sharedWith ({self.trainer.shared_with}) names a run whose GPUs this run "
                "uses; remove budget here, and set it in that run"
            )
        return self

    @model_validator(mode="after")
    def _direct_hand_over(self) -> Self:
        if self.weight_sync.transport == "Filesystem":
            return self
        trainer, engine = self.trainer.gpus_per_replica, self.inference.gpus_per_replica
        if self.trainer.lora is not None:
            raise ValueError(
                "weightSync.transport (NCCL) does not transfer adapters; set transport: Filesystem or remove trainer.lora"
            )
        if (trainer == 0) != (engine == 0):
            raise ValueError(
                f"weightSync.transport (NCCL) connects GPUs with GPUs, or CPUs with CPUs; trainer.gpusPerReplica is {trainer} and "
                f"inference.gpusPerReplica is {engine}; set transport: Filesystem or change one of them"
            )
        return self

    @model_validator(mode="after")
    def _replayed_experts(self) -> Self:
        replay, proximal = self.trainer.router.replay, self.algorithm.effective_proximal
        if replay == "Rollout" and self.task != "RL":
            raise ValueError(
                f"trainer.router.replay (Rollout) needs tokens that an engine sampled for training, but task is {self.task}; "
                "set trainer.router.replay: Off"
            )
        if replay == "Rollout" and self.inference.gpus_per_replica == 0:
            raise ValueError(
                "trainer.router.replay (Rollout) needs engines on GPUs, because vLLM's build for CPUs does not return experts, but "
                "inference.gpusPerReplica is 0; set trainer.router.replay: Off or inference.gpusPerReplica"
            )
        if replay == "Step" and proximal != "recompute":
            raise ValueError(
                f"trainer.router.replay (Step) needs the pass of algorithm.proximal: recompute, but proximal is {proximal}; "
                "set algorithm.proximal: recompute or trainer.router.replay: Off"
            )
        return self

    @model_validator(mode="after")
    def _engines_of_one_run(self) -> Self:
        lora = self.trainer.lora
        if self.inference.autoscale is not None and lora is not None and lora.slots > 1:
            raise ValueError(
                f"inference.autoscale measures only this run's load, but trainer.lora.slots ({lora.slots}) lets other runs use the "
                "engines; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _several_nodes(self) -> Self:
        template = self.storage.template
        if self.inference.spot is not None and template is not None and "ReadWriteMany" not in template.access_modes:
            raise ValueError(
                "inference.spot needs a volume for several nodes, but storage.claimTemplate.accessModes has no ReadWriteMany; add it, "
                "or remove inference.spot"
            )
        return self

    @model_validator(mode="after")
    def _check_elastic_checkpoint(self) -> Self:
        if self.trainer.elastic is not None and not self.checkpoint.enabled:
            raise ValueError(
                "trainer.elastic continues from checkpoints, but checkpoint.enabled is false; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _same_gpus(self) -> Self:
        field_rules.check_colocation(self)
        return self

    @model_validator(mode="after")
    def _parts_of_the_task(self) -> Self:
        field_rules.check_task_parts(self)
        return self

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        batch = self.orchestrator.batch_size
        for i, environment in enumerate(self.environments if self.task == "RL" else ()):
            if batch % environment.group_size:
                size = environment.group_size
                lower, upper = batch // size * size, (batch // size + 1) * size
                near = f"{lower} or {upper}" if lower else str(upper)
                raise ValueError(
                    f"orchestrator.batchSize ({batch}) must be divisible by environments[{i}].groupSize ({size}); "
                    f"set batchSize to {near}"
                )
        for label, count in Counter(environment.label for environment in self.environments).items():
            if count > 1:
                raise ValueError(
                    f"several environments have the name {label!r}; give each environment its own environments[].name"
                )
        field_rules.check_samples(self)
        return self

    @model_validator(mode="after")
    def _own_objectives(self) -> Self:
        for i, environment in enumerate(self.environments):
            try:
                environment.algorithm.merged_over(self.algorithm)
            except ValueError as error:
                raise ValueError(f"environments[{i}].algorithm: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        field_rules.check_replies(self)
        return self


def check_name(name: str) -> str:
    """Return a run's name if it is valid.

    Raises:
        ValueError: The name is not an RFC 1035 label of at most 40 characters.
    """
    if len(name) > NAME_MAX:
        raise ValueError(
            f"{name!r} has {len(name)} characters, but the names of its pods allow at most {NAME_MAX}; choose a shorter name"
        )
    if not _RFC1035.fullmatch(name):
        raise ValueError(
            f"{name!r} is not an RFC 1035 label: lower-case letters, digits and '-', starting with a letter"
        )
    return name


class ObjectMeta(Config):
    """The part of Kubernetes' metadata that a run reads; other fields are ignored."""

    model_config = Config.model_config | {"extra": "ignore"}

    EXAMPLES: ClassVar[Mapping[str, object]] = {"name": "my-run"}

    name: str
    """Name of the run: RFC 1035, at most 40 characters."""
    namespace: str | None = None
    """Namespace; ignored on one machine."""
    uid: str | None = None
    """Identifier that the API server sets."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations."""

    @field_validator("name")
    @classmethod
    def _check_dns_label(cls, name: str) -> str:
        return check_name(name)


_NAME = "self.metadata.name"
_OWN_FOLDER = "self.spec.?storage.?mountPath.orValue('/data') + '/' + self.metadata.name"


def _another_run(path: str) -> Rule:
    """Build the rule of a field that must name another run than its own."""
    value, parts = f"self.spec.{path}", path.split(".")
    there = " && ".join(f"has(self.spec.{'.'.join(parts[: i + 1])})" for i in range(len(parts)))
    same = " || ".join(f"{value} == {own}" for own in (_NAME, f"{_NAME} + '/'", _OWN_FOLDER, f"{_OWN_FOLDER} + '/'"))
    return Rule(
        f"!({there} && ({same}))",
        f"spec.{path} ({{{value}}}) is this run itself; name another one, or remove it",
        f".spec.{path}",
    )


class RLRun(Config):
    """One reinforcement-learning run of a language model."""

    api_version: Literal["rlrun.io/v1alpha1"]
    """Always `rlrun.io/v1alpha1`."""
    kind: Literal["RLRun"]
    """Always `RLRun`."""
    metadata: ObjectMeta
    """Name, namespace, labels and annotations."""
    spec: RLRunSpec
    """Specification of the run."""
    status: Any = None
    """Observed state, written by the operator; ignored in a manifest."""

    EXAMPLES: ClassVar[Mapping[str, object]] = {"metadata": {"name": "my-run"}}
    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.metadata.name.size() <= {NAME_MAX} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name '{self.metadata.name}' has {self.metadata.name.size()} characters; it must be an RFC 1035 label of at most "
            f"{NAME_MAX}, so that the names of its pods fit: lower-case letters, digits and '-', starting with a letter",
        ),
        *(_another_run(path) for path in ("trainer.sharedWith", "checkpoint.resume.fromRun", "policies.fromRun")),
    )
    """`check_name` has the first rule in Python: CEL sees the name only in the whole resource."""

    @model_validator(mode="after")
    def _another_run(self) -> Self:
        name, mount = self.metadata.name, self.spec.storage.mount_path
        policies = self.spec.policies.from_run if self.spec.policies is not None else None
        others = {
            "spec.trainer.sharedWith": self.spec.trainer.shared_with,
            "spec.checkpoint.resume.fromRun": self.spec.checkpoint.resume.from_run,
            "spec.policies.fromRun": policies,
        }
        for path, other in others.items():
            if other is not None and other.rstrip("/") in (name, f"{mount}/{name}"):
                raise ValueError(f"{path} ({other}) is this run itself; name another one, or remove it")
        return self
