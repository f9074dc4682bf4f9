"""`spec.allocation`: AReaL's one-line layout as the fields of trainer, engines and placement that it stands for.

It is resolved before the fields are judged, so that every reader of a specification sees the fields alone. A field that is written beside
it must agree. Free to choose beside it are the division of the trainer's GPUs among pods (`trainer.gpusPerReplica` or `replicas`) and of
the engines' copies among servers (`inference.dataParallel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeGuard

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from rlrun.config.allocation import Allocation, Part, parse_allocation

NODE_GPUS = 8
"""Most GPUs of a pod of the trainer, where nothing else is written."""
Tree = Mapping[str, object]


def apply_allocation(values: Tree) -> dict[str, object]:
    """The fields of a specification with those of its allocation.

    Args:
        values: fields by Python names or as a manifest spells them; blocks may be models.

    Raises:
        ValueError: the allocation is malformed, does not fit the task, or a field says otherwise; names both and the fix.
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
    for path, value in given.layout(allocation):
        given.check(path, value)
        _put_field(result, path.split("."), value)
    return result


def allocation_notes(text: str) -> list[str]:
    """Facts about a valid allocation that its fields do not show."""
    allocation, found = parse_allocation(text), []
    for whose, part in (("engines", allocation.engines), ("trainer", allocation.trainer)):
        if part is None:
            continue
        if part.backend in ("sglang", "megatron", "archon"):
            found.append(f"{part.backend} is read as {'vllm' if whose == 'engines' else 'fsdp'}")
        if part.p > 1 and whose == "engines":
            found.append(f"p{part.p} of the engines: no pipeline there, tensorParallel has them")
    return found


class _Given:
    """Fields that are written beside an allocation."""

    def __init__(self, values: Tree, text: str) -> None:
        self.values, self.text = values, text

    def get(self, path: str) -> object:
        """The value of a field that is written; None: it is not."""
        place: object = self.values
        for part in path.split("."):
            tree = _field_tree(place)
            place = tree.get(part, tree.get(to_camel(part))) if tree is not None else None
        return place

    def check(self, path: str, value: int) -> None:
        """Refuse another value than the allocation's."""
        written = self.get(path)
        if written is not None and written != value:
            field = ".".join(to_camel(part) for part in path.split("."))
            raise ValueError(
                f"{field} ({written}) is {value} by allocation ({self.text}); remove {field}, or change allocation"
            )

    def check_task(self, allocation: Allocation) -> None:
        """Refuse parts that the task does not have."""
        task = self.get("task")
        if task == "SFT" and allocation.engines is not None:
            raise ValueError(
                f"allocation ({self.text}) has engines, and task SFT has none; write the trainer alone, fsdp:d8"
            )
        if task == "Eval" and allocation.trainer is not None:
            raise ValueError(f"allocation ({self.text}) has a trainer, and task Eval has none; write vllm:d4 alone")
        if (host := self.get("trainer.shared_with")) is not None:
            raise ValueError(f"allocation ({self.text}) is the host's ({host}), with trainer.sharedWith; remove it")

    def layout(self, allocation: Allocation) -> Iterator[tuple[str, int]]:
        """Fields by Python names, with their values."""
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
                f"allocation ({self.text}) has a trainer of {total} GPUs, which do not fill {each} pods of {NODE_GPUS}; change it, or "
                "set trainer.gpusPerReplica"
            )
        return total // each

    def _check_same(self, engines: Part, trainer: Part, gpus: int) -> None:
        size = engines.t * engines.p
        if engines.d * size != trainer.gpus or gpus % size:
            raise ValueError(
                f"allocation ({self.text}) puts engines of {engines.d} x {size} GPUs on a trainer's {trainer.gpus}, {gpus} in each pod; "
                "with '|' they are the same GPUs: change the degrees of one of them"
            )


def _field_tree(value: object) -> Tree | None:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return value if isinstance(value, Mapping) else None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _put_field(values: dict[str, object], parts: list[str], value: int) -> None:
    """Set a field in blocks that are copied; one that is written stays, and so does what is no block."""
    name, *rest = parts
    if not rest:
        if to_camel(name) not in values:
            values[name] = value
        return
    block = _field_tree(values.get(name, {}))
    if block is not None:
        values[name] = copied = dict(block)
        _put_field(copied, rest, value)
