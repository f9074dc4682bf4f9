"""Changes of a manifest that make it fit. Each change is checked with the manifest's validation and the same memory estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from rlrun.api.resource import RLRunSpec
from rlrun.config.families import find_family
from rlrun.fit.architecture import Architecture
from rlrun.fit.engine_memory import has_fp8_cache
from rlrun.fit.memory_parts import Needs
from rlrun.fit.report import Change, Surroundings, needs_of, refusals_of

Fields = dict[str, object]
"""Values by path; None removes the field."""
MAX_CHANGES = 4
"""Most changes to suggest for a role."""
_GPUS_MAX, _REPLICAS_MAX = 8, 16
_RECOMPUTE = ("selective", "attention", "full")


@dataclass(frozen=True)
class _Try:
    kind: str
    """Kind of change. Only the first change of a kind that fits is suggested."""
    fields: Fields


def advise_roles(spec: RLRunSpec, around: Surroundings, needs: list[Needs]) -> list[Change]:
    """Return changes that make each role that does not fit fit, the least intrusive first.

    Args:
        spec: specification of the run.
        around: models and GPUs, as in `needs_of`.
        needs: memory needs for this specification.
    """
    found: list[Change] = []
    for role_needs in needs:
        if role_needs.fits:
            continue
        tries = _trainer_tries(spec, around.model) if role_needs.role == "trainer" else _engine_tries(spec, around)
        found += _fitting_changes(spec, around, needs, role_needs.role, tries)
    return found


def change_spec(spec: RLRunSpec, fields: Mapping[str, object]) -> RLRunSpec:
    """Return the specification with some fields changed, as if the manifest had set them.

    Raises:
        ValidationError: The changed specification is invalid.
    """
    document = spec.model_dump(by_alias=True, exclude_unset=True, mode="json")
    document.pop("allocation", None)  # its fields are already set
    for path, value in fields.items():
        block, parts = document, path.removeprefix("spec.").split(".")
        for part in parts[:-1]:
            block = block.setdefault(part, {})
        if value is None:
            block.pop(parts[-1], None)
        else:
            block[parts[-1]] = value
    return RLRunSpec.model_validate(document)


def _fitting_changes(
    spec: RLRunSpec, around: Surroundings, before: list[Needs], role: str, tries: Iterator[_Try]
) -> list[Change]:
    found: list[Change] = []
    fit_already = {need.role for need in before if need.fits}
    kinds: set[str] = set()
    refused = set(refusals_of(spec, around))
    for candidate in tries:
        if candidate.kind in kinds or len(found) == MAX_CHANGES:
            continue
        try:
            tried = change_spec(spec, candidate.fields)
            needs = needs_of(tried, around)
        except ValidationError:
            continue
        # A change may not trade memory for a new refusal, nor make a role fit at the cost of another one.
        if not set(refusals_of(tried, around)) <= refused:
            continue
        own = next(need for need in needs if need.role == role)
        if own.fits and fit_already <= {need.role for need in needs if need.fits}:
            kinds.add(candidate.kind)
            shown = {path: "removed" if value is None else value for path, value in candidate.fields.items()}
            found.append(Change(shown, role, own.total, own.limit, own.gpus))
    return found


def _trainer_tries(spec: RLRunSpec, model: Architecture) -> Iterator[_Try]:
    thrifty = [{}, *_thrifty_changes(spec)]
    for fields in thrifty[1:]:
        yield _Try("thrift", fields)
    layouts = [*_more_gpus(spec)]
    if find_family(model.trained_type, "cp") is not None:
        yield from (
            _Try("context", divided | fields) for divided in _divide_rows(spec, "cp", model) for fields in thrifty
        )
    for layout in layouts:
        yield from (_Try("gpus", layout | fields) for fields in thrifty)
    offloads = spec.trainer.cpu_offload or spec.trainer.optimizer.offload
    if not offloads:
        yield from (_Try("moments", {"spec.trainer.optimizer.offload": True} | fields) for fields in thrifty)
    if not spec.trainer.cpu_offload:
        moved: Fields = {"spec.trainer.optimizer.offload": None} if spec.trainer.optimizer.offload else {}
        thrifty = [moved | fields for fields in thrifty]
        yield from (_Try("offload", {"spec.trainer.cpuOffload": True} | fields) for fields in thrifty)
    if spec.trainer.activation_checkpointing not in ("offload", "auto"):
        yield _Try("activations offload", {"spec.trainer.activationCheckpointing": "offload"})


def _thrifty_changes(spec: RLRunSpec) -> Iterator[Fields]:
    """Yield changes that reduce what a rank keeps, from the cheapest to the most expensive, and at the end all together."""
    trainer, path = spec.trainer, "spec.trainer"
    base: Fields = {}
    if trainer.gradient_accumulation == "local":
        base = {f"{path}.gradientAccumulation": "reduce"}
        yield base
    row: Fields = {}
    if trainer.micro_batch_tokens is None or trainer.micro_batch_tokens > spec.seq_len:
        row = {f"{path}.microBatchTokens": spec.seq_len}
    now = trainer.activation_checkpointing
    modes = () if now == "auto" else _RECOMPUTE  # auto has tried them
    for mode in modes[modes.index(now) + 1 :] if now in modes else modes:
        yield base | {f"{path}.activationCheckpointing": mode}
    if row:
        yield base | row
        if now not in ("full", "auto"):
            yield base | row | {f"{path}.activationCheckpointing": "full"}


def _more_gpus(spec: RLRunSpec) -> Iterator[Fields]:
    """Yield layouts with more ranks per copy: first more GPUs per replica, then more replicas."""
    trainer, layout = spec.trainer, spec.trainer.parallelism
    shared: Fields = {"spec.trainer.parallelism.dpShard": None} if layout.dp_shard is not None else {}
    if layout.dp_replicate > 1:
        yield shared | {"spec.trainer.parallelism.dpReplicate": 1}
    gpus = trainer.gpus_per_replica
    while gpus < _GPUS_MAX:
        gpus *= 2
        yield shared | _gpu_fields(spec, gpus)
    replicas = trainer.replicas
    while replicas < _REPLICAS_MAX:
        replicas *= 2
        more = _gpu_fields(spec, gpus) if gpus != trainer.gpus_per_replica else {}
        yield shared | more | {"spec.trainer.replicas": replicas}


def _gpu_fields(spec: RLRunSpec, gpus: int) -> Fields:
    fields: Fields = {"spec.trainer.gpusPerReplica": gpus}
    if spec.placement.colocate:
        fields |= {
            "spec.inference.gpusPerReplica": gpus,
            "spec.inference.dataParallel": gpus // spec.inference.tensor_parallel,
        }
    return fields


def _divide_rows(spec: RLRunSpec, field: str, model: Architecture) -> Iterator[Fields]:
    """Yield layouts in which existing ranks share rows."""
    now = getattr(spec.trainer.parallelism, field)
    size = 2 * now
    while size <= min(spec.trainer.world_size, _GPUS_MAX):
        if model.kv_heads % size == 0:
            yield {f"spec.trainer.parallelism.{field}": size}
        size *= 2


def _engine_tries(spec: RLRunSpec, around: Surroundings) -> Iterator[_Try]:
    engine, path = spec.inference, "spec.inference"
    if spec.placement.colocate:
        for share in (0.95, 0.9, 0.85, 0.8, 0.7):
            yield _Try("share", {f"{path}.gpuMemoryUtilization": share})
    elif engine.gpu_memory_utilization < 0.95:
        yield _Try("share", {f"{path}.gpuMemoryUtilization": 0.95})
    shorter: Fields = {}
    if engine.max_model_len is not None and engine.max_model_len > spec.seq_len:
        shorter = {f"{path}.maxModelLen": None}
        yield _Try("length", shorter)
    for sequences in (128, 64, 32):
        if sequences < engine.max_num_seqs:
            yield _Try("sequences", {f"{path}.maxNumSeqs": sequences})
    tp = 2 * engine.tensor_parallel
    while tp <= _GPUS_MAX and around.model.heads % tp == 0:
        yield _Try("tensor", _divide_layers(spec, tp))
        tp *= 2
    if has_fp8_cache(around.engine_product) and not any(
        argument.startswith("--kv-cache-dtype") for argument in engine.extra_args
    ):
        yield _Try("fp8 cache", {f"{path}.extraArgs": [*engine.extra_args, "--kv-cache-dtype=fp8"]})


def _divide_layers(spec: RLRunSpec, tp: int) -> Fields:
    """Return the fields that spread layers over `tp` GPUs: GPUs of other copies if there are any, otherwise more GPUs."""
    engine, path = spec.inference, "spec.inference"
    copies = max(engine.world_size // tp, 1)
    fields: Fields = {f"{path}.tensorParallel": tp, f"{path}.dataParallel": copies}
    if copies == engine.data_parallel:
        del fields[f"{path}.dataParallel"]
    if tp * copies != engine.gpus_per_replica:
        fields[f"{path}.gpusPerReplica"] = tp * copies
        if spec.placement.colocate:
            fields["spec.trainer.gpusPerReplica"] = tp * copies
    return fields
