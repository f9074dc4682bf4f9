"""Placement of pods, and AReaL's one-line layout (`spec.allocation`), which sets fields of trainer, engines and placement.

The layout is applied before the fields are validated, so every reader of a specification sees only the fields. A field that is set in
addition must agree with it. The user may still choose how the trainer's GPUs are divided among pods (`trainer.gpusPerReplica` or
`replicas`) and how the engines' copies are divided among servers (`inference.dataParallel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self, TypeGuard

from pydantic import BaseModel, model_validator
from pydantic.alias_generators import to_camel

from rlrun.api.kubernetes_types import ExtendedResource, LabelKey, LabelValue
from rlrun.config.base import Config, Rule
from rlrun.config.layout_rules import Allocation, Part, parse_allocation


class RolePlacement(Config):
    """Replaces the run's placement for one role."""

    gpu_product: LabelValue | None = None
    """GPU model: node label `nvidia.com/gpu.product`."""
    pool: LabelValue | None = None
    """Node pool: node label `rlrun.io/pool`."""


class TopologySpec(Config):
    """Keep pods near each other. At most one of `required` and `preferred`."""

    required: LabelKey | None = None
    """Node label, such as `nvidia.com/gpu.clique`, whose value all pods of the scope must share. Otherwise they wait."""
    preferred: LabelKey | None = None
    """Node label whose value the pods of the scope should share."""
    scope: Literal["Role", "Run"] = "Role"
    """Role: the trainer's pods. Run: the pods of trainer and inference."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.required) != has(self.preferred)",
            "set exactly one of required ({has(self.required) ? self.required : 'not set'}) and preferred "
            "({has(self.preferred) ? self.preferred : 'not set'})",
        ),
    )

    @model_validator(mode="after")
    def _check_single_mode(self) -> Self:
        if (self.required is None) == (self.preferred is None):
            required, preferred = self.required or "not set", self.preferred or "not set"
            raise ValueError(f"set exactly one of required ({required}) and preferred ({preferred})")
        return self


class PlacementSpec(Config):
    """Placement of the run's pods on the nodes of a GPU cluster."""

    gpu_product: LabelValue | None = None
    """GPU model of trainer and inference: node label `nvidia.com/gpu.product`."""
    pool: LabelValue | None = None
    """Node pool of all roles: node label `rlrun.io/pool`."""
    trainer: RolePlacement = RolePlacement()
    """Replaces the two fields above for the trainer."""
    inference: RolePlacement = RolePlacement()
    """Replaces the two fields above for inference."""
    orchestrator: RolePlacement = RolePlacement()
    """Replaces the pool for the orchestrator, which needs no GPU."""
    topology: TopologySpec | None = None
    """Keep pods near each other. Default: no constraint."""
    spread_inference: Literal["None", "Preferred", "Required"] = "Preferred"
    """Put engines on different nodes, so that the loss of one node does not stop all of them."""
    colocate: bool = False
    """Run an engine in each trainer pod, on the same GPUs, in turn with the trainer."""
    gpu_resource: ExtendedResource = "nvidia.com/gpu"
    """Extended resource that counts GPUs."""


NODE_GPUS = 8
"""Most GPUs of a trainer pod, unless the specification sets another number."""
Tree = Mapping[str, object]


def apply_allocation(values: Tree) -> dict[str, object]:
    """Return the fields of a specification, with the fields of its allocation filled in.

    Args:
        values: fields by their Python names or by their manifest names; blocks may be models.

    Raises:
        ValueError: The allocation is malformed, does not fit the task, or contradicts a field; the message names both and the fix.
    """
    text = values.get("allocation")
    result = dict(values)
    if not isinstance(text, str):
        return result
    try:
        allocation = parse_allocation(text)
    except ValueError as error:
        raise ValueError(f"allocation: {error}") from None
    given = _Given(values, text)
    given.check_task(allocation)
    for path, value in given.list_fields(allocation):
        given.check_equal(path, value)
        _put_field(result, path.split("."), value)
    return result


def allocation_notes(text: str) -> list[str]:
    """Return notes about a valid allocation that its fields do not show."""
    allocation, found = parse_allocation(text), []
    for role, part in (("engines", allocation.engines), ("trainer", allocation.trainer)):
        if part is None:
            continue
        if part.backend in ("sglang", "megatron", "archon"):
            found.append(f"{part.backend} is replaced by {'vllm' if role == 'engines' else 'fsdp'}")
        if part.p > 1 and role == "engines":
            found.append(
                f"p{part.p} of the engines is added to tensorParallel, because engines have no pipeline parallelism"
            )
    return found


class _Given:
    """Fields that are set in addition to an allocation."""

    def __init__(self, values: Tree, text: str) -> None:
        self.values, self.text = values, text

    def get(self, path: str) -> object:
        """Return the value of a field, or None if it is not set."""
        value: object = self.values
        for part in path.split("."):
            tree = _field_tree(value)
            value = tree.get(part, tree.get(to_camel(part))) if tree is not None else None
        return value

    def check_equal(self, path: str, value: int) -> None:
        """Refuse a field whose value differs from the allocation's."""
        written = self.get(path)
        if written is not None and written != value:
            field = ".".join(to_camel(part) for part in path.split("."))
            raise ValueError(
                f"{field} ({written}) differs from {value}, its value in allocation ({self.text}); remove {field}, or change allocation"
            )

    def check_task(self, allocation: Allocation) -> None:
        """Refuse roles that the task does not have."""
        task = self.get("task")
        if task == "SFT" and allocation.engines is not None:
            raise ValueError(
                f"allocation ({self.text}) has engines, but task SFT has no engines; write only the trainer, such as fsdp:d8"
            )
        if task == "Eval" and allocation.trainer is not None:
            raise ValueError(
                f"allocation ({self.text}) has a trainer, but task Eval has no trainer; write only vllm:d4"
            )
        if (host := self.get("trainer.shared_with")) is not None:
            raise ValueError(
                f"allocation ({self.text}) is set by the host ({host}) of trainer.sharedWith; remove allocation"
            )

    def list_fields(self, allocation: Allocation) -> Iterator[tuple[str, int]]:
        """Yield each field's path, with Python names, and its value."""
        gpus = None
        if (trainer := allocation.trainer) is not None:
            gpus = self._gpus_per_pod(trainer)
            yield "trainer.replicas", trainer.gpus // gpus
            yield "trainer.gpus_per_replica", gpus
            for name, degree in (("tp", trainer.t), ("cp", trainer.c), ("ep", trainer.e), ("pp", trainer.p)):
                if degree > 1 or self.get(f"trainer.parallelism.{name}") is not None:
                    yield f"trainer.parallelism.{name}", degree
        if allocation.engines is None:
            return
        size = allocation.engines.t * allocation.engines.p
        yield "inference.tensor_parallel", size
        if gpus is not None and trainer is not None and allocation.colocated:
            self._check_same(allocation.engines, trainer, gpus)
            yield "placement.colocate", True
            yield "inference.data_parallel", gpus // size
            yield "inference.gpus_per_replica", gpus
            return
        copies = self.get("inference.data_parallel")
        each = copies if _is_count(copies) and allocation.engines.d % copies == 0 else 1
        yield "inference.data_parallel", each
        yield "inference.replicas", allocation.engines.d // each
        yield "inference.gpus_per_replica", size * each

    def _gpus_per_pod(self, trainer: Part) -> int:
        total, written, pods = trainer.gpus, self.get("trainer.gpus_per_replica"), self.get("trainer.replicas")
        if _is_count(written):
            if total % written:
                raise ValueError(
                    f"trainer.gpusPerReplica ({written}) does not divide the {total} GPUs of the trainer in allocation ({self.text}); "
                    "change one of them"
                )
            return written
        if _is_count(pods) and total % pods == 0:
            return total // pods
        each = -(-total // NODE_GPUS)
        if total % each:
            raise ValueError(
                f"allocation ({self.text}) has a trainer of {total} GPUs, which do not fill {each} pods of up to {NODE_GPUS}; change it or "
                "set trainer.gpusPerReplica"
            )
        return total // each

    def _check_same(self, engines: Part, trainer: Part, gpus: int) -> None:
        size = engines.t * engines.p
        if engines.d * size != trainer.gpus or gpus % size:
            raise ValueError(
                f"allocation ({self.text}) puts engines of {engines.d} x {size} GPUs on the trainer's {trainer.gpus}, {gpus} per pod; "
                "with '|' they must be the same GPUs: change the degrees of one of them"
            )


def _field_tree(value: object) -> Tree | None:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return value if isinstance(value, Mapping) else None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _put_field(values: dict[str, object], parts: list[str], value: int) -> None:
    """Set a field in copies of its blocks. A field that is already set does not change, and values that are not blocks are skipped."""
    name, *rest = parts
    if not rest:
        if to_camel(name) not in values:
            values[name] = value
        return
    block = _field_tree(values.get(name, {}))
    if block is not None:
        values[name] = copied = dict(block)
        _put_field(copied, rest, value)
