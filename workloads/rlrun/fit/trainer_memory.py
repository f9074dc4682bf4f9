"""Memory of one of the trainer's GPUs during a step: its share of the states, and the needs of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rlrun.config.models.language_models import LoRAConfig
from rlrun.config.models.parallel import ActivationMode
from rlrun.config.models.roles import TrainerConfig
from rlrun.fit.architecture import Architecture, Linear
from rlrun.fit.gpu_kernels import (
    Expected,
    absent_from_images,
    attention_seconds,
    expected_kernel,
    lacks_rate,
)
from rlrun.fit.layout import Held, idle_divisor, idle_share, stages_of
from rlrun.fit.memory_parts import GIB, Needs, Part, layer_activations, outside_layers, show_gib
from rlrun.protocol.messages.buckets import MAX_ROOTS

MASTER_BYTES = 4
"""Bytes of a master weight, of its gradient and of each moment (float32)."""
REFERENCE_BYTES = 2
"""Bytes of a frozen model's parameter on a GPU (bfloat16)."""
HEAD_CHUNK_BYTES = GIB
"""Bytes of float32 logits that exist at once (`trainer.learning.lm_head`)."""
HEAD_CHUNKS = 3
MOMENT_BUCKET_BYTES = 256 * 2**20
"""Bytes of one buffer of moments with `optimizer.offload` (`optim.host_moments`). A parameter is not split, so a buffer may be larger."""
HOST_LINK_BYTES_PER_SECOND = 50e9
"""Bandwidth of a GPU's link to the host in one direction, PCIe 5.0 x16, to estimate the time of copying moments."""
LIBRARIES_BYTES = 1.5 * GIB
"""CUDA's context and the workspaces of its libraries."""
COMMUNICATORS_BYTES = 1.0 * GIB
"""NCCL's buffers with more than one rank."""
SLEEPING_ENGINE_BYTES = 3.0 * GIB
"""Memory of a GPU that a sleeping engine keeps."""
FRAGMENTS = 0.03
"""Share of the GPU that is lost to fragmentation."""
RESERVE = 0.05
"""Additional share of the GPU that `auto` leaves unused, because the sum is an estimate and an out-of-memory error would end the run."""
MODES_BY_WORK: tuple[ActivationMode, ...] = ("none", "selective", "attention", "full", "offload")
"""Modes by the work that they repeat. `offload` repeats no work but waits for copies to the host and back, so it is last."""
_MOMENTS = {"adamw": 2, "muon": 2, "sgd": 1}
_CODED_SHARE = (1 + 4 / 256) / MASTER_BYTES
"""Bytes of a moment in 8-bit codes with a float32 scale per block, relative to a float32 moment (`trainer.learning.optimizers`)."""


@dataclass(frozen=True)
class _Ranks:
    """Division of the work among ranks."""

    shards: int
    """Ranks that share one copy of parameters and states, or of a stage's in a pipeline."""
    tp: int
    cp: int
    ep: int
    pp: int
    world: int

    @classmethod
    def from_config(cls, config: TrainerConfig) -> _Ranks:
        layout, world = config.parallelism, config.world_size
        shards = world // layout.pp // layout.dp_replicate
        return cls(shards, layout.tp, layout.cp, layout.ep, layout.pp, world)


@dataclass(frozen=True)
class _Trained:
    """Numbers of trained parameters."""

    all: int
    matrices: int
    """Number of those in the matrices of decoder layers."""
    layer: float
    """Trained parameters of one gathered decoder layer on one rank."""
    head: bool
    """Whether the head is trained."""


BYTE_EXPERTS = 256
"""Largest number of experts whose routes have one byte."""


@dataclass(frozen=True)
class ChosenMode:
    """Activation mode that `activationCheckpointing: auto` selects, and the reason."""

    mode: ActivationMode
    why: str


def trainer_needs(
    config: TrainerConfig,
    model: Architecture,
    reference: Architecture | None,
    *,
    memory: int,
    colocated: bool,
    product: str | None = None,
) -> Needs:
    """Return the memory needs of one GPU of the trainer; in a pipeline, of the stage that needs the most.

    Args:
        config: configuration of the trainer.
        model: shape of the policy.
        reference: shape of a frozen model in the trainer.
        memory: memory of the GPU, in bytes.
        colocated: whether engines use the same GPUs.
        product: product name of the GPU, which determines the attention kernel, if it is known.
    """
    kernel = expected_kernel(config, model, product)
    remarks = _kernel_remarks(config, model, kernel)
    padded = kernel is not None and kernel.padded
    mode = config.activation_checkpointing
    if mode == "auto":
        chosen = chosen_mode(config, model, reference, memory=memory, colocated=colocated, padded=padded)
        remarks.append(f"activationCheckpointing: auto selects {chosen.mode} ({chosen.why})")
        mode = chosen.mode
    needs = _rank_needs(config, mode, model, reference, memory=memory, colocated=colocated, padded=padded)
    if kernel is not None and (times := _attention_times(config, model, mode, kernel, product)):
        tokens, longest = _row_tokens(config), config.seq_len
        parts = "one sequence" if tokens <= longest else f"sequences of {longest:,}"
        remarks.append(f"attention: a row of {tokens:,} tokens in {parts} takes {times}, forward and backward")
    if kernel is not None and lacks_rate(kernel.kernel, model, product):
        remarks.append(
            f"attention: the time with {kernel.kernel} is not estimated, because it was not measured on this GPU"
        )
    if config.router.replay == "Rollout" and model.experts:
        each = model.layers * model.experts_per_token * (1 if model.experts <= BYTE_EXPERTS else 2)
        remarks.append(
            f"trainer.router.replay: Rollout adds at most {each:,} bytes per token to batches, the journal and the answers of engines"
        )
    return replace(needs, remarks=[*needs.remarks, *remarks])


def _kernel_remarks(config: TrainerConfig, model: Architecture, kernel: Expected | None) -> list[str]:
    """Describe the choice of `auto`, also for a refused kernel, or the lack of the images for a requested one."""
    absent = absent_from_images(config, model)
    if kernel is None or kernel.kernel == config.attention:
        return [] if absent is None else [f"attention: {absent}"]
    return [f"attention: auto is {kernel}"]


def _attention_times(
    config: TrainerConfig, model: Architecture, mode: ActivationMode, kernel: Expected, product: str | None
) -> str:
    """Describe the times with the expected kernels; empty if they are unknown."""
    again = mode == "full"
    found = {
        each: attention_seconds(
            each, config, model, product, tokens=_row_tokens(config), longest=config.seq_len, again=again
        )
        for each in dict.fromkeys((kernel.kernel, kernel.without_packages))
    }
    return ", ".join(f"about {seconds:.2f} s with {name}" for name, seconds in found.items() if seconds is not None)


def chosen_mode(
    config: TrainerConfig,
    model: Architecture,
    reference: Architecture | None,
    *,
    memory: int,
    colocated: bool,
    padded: bool = False,
) -> ChosenMode:
    """Return the activation mode with the least work that fits, or the one that needs the least memory if none fits.

    The arguments are as in `trainer_needs`, and `padded` as in `layer_activations`.
    """
    limit = memory * (1 - FRAGMENTS - RESERVE)
    totals: dict[ActivationMode, float] = {}
    for mode in MODES_BY_WORK:
        totals[mode] = _rank_needs(
            config, mode, model, reference, memory=memory, colocated=colocated, padded=padded
        ).total
        if totals[mode] <= limit:
            asked = ", ".join(f"{name} needs {show_gib(total)}" for name, total in totals.items())
            return ChosenMode(mode, f"{asked}, of {show_gib(limit)}")
    least = min(totals, key=lambda mode: totals[mode])
    return ChosenMode(least, f"no mode fits into {show_gib(limit)}; {least} needs the least, {show_gib(totals[least])}")


def _rank_needs(
    config: TrainerConfig,
    mode: ActivationMode,
    model: Architecture,
    reference: Architecture | None,
    *,
    memory: int,
    colocated: bool,
    padded: bool,
) -> Needs:
    found = [
        _needs_of_stage(config, mode, model, reference, held, memory=memory, colocated=colocated, padded=padded)
        for held in stages_of(model, config.parallelism)
    ]
    return max(found, key=lambda needs: needs.total)


def _needs_of_stage(
    config: TrainerConfig,
    mode: ActivationMode,
    model: Architecture,
    reference: Architecture | None,
    held: Held,
    *,
    memory: int,
    colocated: bool,
    padded: bool,
) -> Needs:
    ranks = _Ranks.from_config(config)
    # States and gathered parameters exist during the whole step; activations, logits and one layer's gradients only during a micro-batch.
    c = 4 if config.compute_dtype == "float32" else 2
    trained = _trained_count(config, model, held, ranks)
    parts = [
        *_state_bytes(config, held, trained, ranks),
        *_encoder_bytes(config, model, held, ranks),
        *_companion_bytes(config, model, reference, held, ranks),
        _gathered_bytes(model, held, ranks, c, memory),
        *_micro_batch(config, mode, model, held, c, padded=padded),
        *([_logit_bytes(config, model, trained, ranks, c)] if held.last else []),
        Part("gradients of one layer", trained.layer * (c + 4), "whole, before they are summed over the ranks"),
        Part("CUDA and its libraries", LIBRARIES_BYTES + (COMMUNICATORS_BYTES if ranks.world > 1 else 0)),
    ]
    if colocated:
        parts.append(Part("the sleeping engine", SLEEPING_ENGINE_BYTES, "memory that it keeps while the trainer works"))
    limit = memory * (1 - FRAGMENTS)
    return Needs(
        "trainer",
        config.replicas * config.gpus_per_replica,
        [*parts, _hand_over(config, model, parts)],
        limit,
        f"{1 - FRAGMENTS:.0%} of {show_gib(memory)}",
        _trainer_remarks(config, mode, model, held, trained),
    )


def _state_bytes(config: TrainerConfig, held: Held, trained: _Trained, ranks: _Ranks) -> list[Part]:
    """Return the parts of the policy's master weights, gradients and moments."""
    on_gpu = not config.cpu_offload
    slots = config.lora.slots if config.lora is not None else 1
    of_adapters = trained.all if config.lora is not None else 0
    masters = MASTER_BYTES * (held.parameters + slots * of_adapters) / ranks.shards
    shared = f"float32, over {ranks.shards} ranks" if ranks.shards > 1 else "float32"
    if config.gradient_accumulation == "local":
        gradients, summed = (
            MASTER_BYTES * trained.all / ranks.tp,
            "float32, in full on every rank (gradientAccumulation: local)",
        )
    else:
        gradients, summed = on_gpu * MASTER_BYTES * trained.all / ranks.shards, shared
    moments = _moment_bytes(config, trained, ranks)
    kept = Part("optimizer state", on_gpu * moments, f"{config.optimizer.name}, {shared}")
    if config.optimizer.offload:
        kept = _host_buffers(config, held, trained, ranks, moments)
    return [Part("parameters", on_gpu * masters, shared), Part("gradients", gradients, summed), kept]


def _encoder_bytes(config: TrainerConfig, model: Architecture, held: Held, ranks: _Ranks) -> list[Part]:
    """Return the part of frozen encoders, which have no gradients and no moments."""
    if not model.encoder or not held.first:
        return []
    size = MASTER_BYTES * model.encoder / ranks.shards
    return [Part("encoder", size * (not config.cpu_offload), "frozen, float32, without gradients and optimizer state")]


def _moment_bytes(config: TrainerConfig, trained: _Trained, ranks: _Ranks) -> float:
    """Return the bytes of the optimizer's moments on one rank, on the GPU or on the host."""
    slots = config.lora.slots if config.lora is not None else 1
    numbers = _moment_count(config) * trained.all
    if config.optimizer.name == "muon":
        numbers -= trained.matrices
    return MASTER_BYTES * slots * numbers / ranks.shards


def _host_buffers(config: TrainerConfig, held: Held, trained: _Trained, ranks: _Ranks, moments: float) -> Part:
    """Return the GPU buffers for moments in host memory. They exist while the optimizer steps, when there is no micro-batch."""
    table = held.root if trained.head or config.lora is None else 0
    buffer = max(MOMENT_BUCKET_BYTES, MASTER_BYTES * _moment_count(config) * table / ranks.shards)
    return Part("optimizer state", min(2 * buffer, moments), "two buckets of moments, which stay in host memory")


def _moment_count(config: TrainerConfig) -> float:
    """Return the optimizer's numbers per trained parameter, in units of float32."""
    return _MOMENTS[config.optimizer.name] * (_CODED_SHARE if config.optimizer.moments == "int8" else 1)


def _companion_bytes(
    config: TrainerConfig, model: Architecture, reference: Architecture | None, held: Held, ranks: _Ranks
) -> list[Part]:
    """Return the parts of models other than the policy."""
    found = []
    if reference is not None:
        its = stages_of(reference, config.parallelism)
        encoder = reference.encoder if held.first else 0
        size = REFERENCE_BYTES * (its[min(held.index, len(its) - 1)].parameters + encoder) / ranks.shards
        found.append(Part("reference", size, "frozen, bfloat16"))
    if config.algorithm.critic is not None:
        body = model.decoder_parameters - (0 if model.tied else model.table) + model.hidden
        numbers = 2 + _moment_count(config)
        on_gpu = not config.cpu_offload
        if config.optimizer.offload:
            numbers = 2
        found.append(Part("critic", on_gpu * MASTER_BYTES * numbers * body / ranks.shards, "with its states, float32"))
    return found


GATHERED_SHARE = 32
"""Divisor of a GPU's memory. Copies in the compute dtype up to the quotient stay on a single GPU until the backward pass."""


def _gathered_bytes(model: Architecture, held: Held, ranks: _Ranks, c: int, memory: int) -> Part:
    layer = model.layer_parameters / ranks.tp + model.expert_parameters / (ranks.ep * ranks.tp)
    whole = c * (held.root + held.layers * layer)
    if ranks.world == 1 and c == 2 and whole * GATHERED_SHARE <= memory:
        return Part("gathered parameters", whole, "all layers, which are small enough to stay until the backward pass")
    return Part("gathered parameters", c * (held.root + 2 * layer), "two layers, embedding and head")


def _micro_batch(
    config: TrainerConfig, mode: ActivationMode, model: Architecture, held: Held, c: int, *, padded: bool
) -> list[Part]:
    layout = config.parallelism
    tokens = _row_tokens(config) / layout.cp
    each = layer_activations(model, mode, number_bytes=c, tp=layout.tp, compiled=config.compiles, padded=padded)
    kept = held.rows * tokens * (held.layers * each.kept + outside_layers(model, c))
    of = f"activationCheckpointing: {mode}, {tokens:,.0f} tokens" + (f" x {held.rows:g} rows" if held.rows > 1 else "")
    parts = [
        Part("activations", kept, of),
        Part("one layer's backward pass", tokens * each.working),
    ]
    if config.router.replay != "Off" and model.experts:
        # The routes of all layers are on the device as int32 until the row's backward pass.
        chosen = held.rows * tokens * model.layers * model.experts_per_token
        parts.append(Part("routes", 4 * chosen, f"trainer.router.replay: {config.router.replay}"))
    if held.count > 1:
        link = held.links * tokens * model.hidden * c
        why = f"received of {held.count} rows; each further row of a step {show_gib(link)}"
        parts.append(Part("between stages", held.count * link, why))
    return parts


def _logit_bytes(config: TrainerConfig, model: Architecture, trained: _Trained, ranks: _Ranks, c: int) -> Part:
    tokens = _row_tokens(config) / ranks.cp / ranks.tp
    chunk = min(HEAD_CHUNK_BYTES, 4 * tokens * model.vocabulary)
    gradient = (4 + c) * model.table if trained.head else 0
    return Part("logits", HEAD_CHUNKS * chunk + gradient, "in chunks, and the head's gradient")


def _hand_over(config: TrainerConfig, model: Architecture, step: list[Part]) -> Part:
    """Return the part for the gathered largest tensor, as master weight and in the published format.

    It exists between steps, so it can use the memory of the micro-batch.
    """
    needed = (MASTER_BYTES + (4 if config.model.dtype == "float32" else 2)) * model.largest_tensor
    names = ("activations", "one layer's backward pass", "logits", "gathered parameters", "gradients of one layer")
    free = sum(part.bytes for part in step if part.name in names)
    return Part(
        "hand-over of weights",
        max(needed - free, 0),
        f"{show_gib(needed)} between steps, mostly in memory of the micro-batch",
    )


def _trained_count(config: TrainerConfig, model: Architecture, held: Held, ranks: _Ranks) -> _Trained:
    if config.lora is None:
        inside = model.layer_parameters + model.expert_parameters
        gathered = model.layer_parameters / ranks.tp + model.expert_parameters / (ranks.ep * ranks.tp)
        return _Trained(held.parameters, held.layers * inside, gathered, head=True)
    linears = adapted_layers(config.lora, model).values()
    adapters = sum(config.lora.rank * (linear.inputs + linear.outputs) for linear in linears)
    whole = {
        name: linear.weights
        for name, linear in model.linear_layers.items()
        if _named_bytes(name, config.lora.modules_to_save)
    }
    layer = adapters + sum(whole.values())
    there = {"lm_head": held.last or model.tied, "embed_tokens": held.first or (model.tied and held.last)}
    tables = [name for name, has in there.items() if has and _named_bytes(name, config.lora.modules_to_save)]
    outside = model.table * (1 if model.tied and tables else len(tables))
    return _Trained(held.layers * layer + outside, held.layers * layer, layer, head=bool(tables))


def adapted_layers(lora: LoRAConfig, model: Architecture) -> Mapping[str, Linear]:
    """Return the linear layers of a decoder layer that get an adapter, by name."""
    return {
        name: linear
        for name, linear in model.linear_layers.items()
        if not lora.targets or _named_bytes(name, lora.targets)
    }


def _named_bytes(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern.rpartition(".")[2]) for pattern in patterns)


def _row_tokens(config: TrainerConfig) -> int:
    return config.micro_batch_tokens or config.seq_len


def _pipeline_remark(config: TrainerConfig, held: Held) -> str:
    """Describe the stage that needs the most memory, and the cost of the schedule: kept rows and idle time."""
    layout, divisor = config.parallelism, idle_divisor(config.parallelism)
    kind, several = "stages", ""
    if len(held.numbers) > 1:
        kind, several = "ranks", f" in {len(held.numbers)} stages"
    rows = 4 * held.count
    total = "M + pp - 1" if divisor == 1 else f"{divisor} M + pp - 1"
    return (
        f"parallelism.pp: of {held.count} {kind} number {held.index + 1} needs the most memory, with {held.layers} layers{several}; "
        f"schedule {layout.schedule} keeps activations of {held.rows:g} rows there, and in a step of M rows a rank is idle for "
        f"(pp - 1) / ({total}) of the time, {idle_share(layout, rows):.1%} of {rows} rows"
    )


def _trainer_remarks(
    config: TrainerConfig, mode: ActivationMode, model: Architecture, held: Held, trained: _Trained
) -> list[str]:
    found, ranks = [], _Ranks.from_config(config)
    if held.count > 1:
        found.append(_pipeline_remark(config, held))
    if config.cpu_offload:
        numbers = 2 + _moment_count(config)
        encoder = model.encoder if held.first else 0
        size = MASTER_BYTES * (held.parameters + encoder + (numbers - 1) * trained.all) / ranks.shards
        found.append(f"cpuOffload: {show_gib(size * config.ranks_per_replica)} of host memory for each replica")
    if config.optimizer.offload:
        each_way = _moment_bytes(config, trained, ranks)
        seconds = 2 * each_way / HOST_LINK_BYTES_PER_SECOND
        found.append(
            f"optimizer.offload: {show_gib(each_way * config.ranks_per_replica)} of host memory for each replica; "
            f"a step copies {show_gib(each_way)} "
            f"each way, about {seconds:.1f} s at {HOST_LINK_BYTES_PER_SECOND / 1e9:.0f} GB/s"
        )
    if mode == "offload":
        each = layer_activations(model, "none", number_bytes=2, tp=ranks.tp, compiled=config.compiles)
        size = held.rows * _row_tokens(config) / ranks.cp * held.layers * each.kept
        found.append(
            f"activationCheckpointing: offload keeps {show_gib(size * config.ranks_per_replica)} of activations in host memory"
        )
    return found + _kept_versions(config, (4 if config.model.dtype == "float32" else 2) * model.parameters)


def _kept_versions(config: TrainerConfig, size: int) -> list[str]:
    """Describe the host memory for versions of `size` bytes between trainer and engines."""
    sync, found = config.weight_sync, []
    if sync.transport == "NCCL":
        found.append(
            f"weightSync.transport: NCCL keeps two versions, {show_gib(2 * size)}, in host memory of up to {MAX_ROOTS} ranks, "
            "a part each, and "
            f"one, {show_gib(size)}, in shared memory of each engine while the engine loads it"
        )
    if sync.deltas == "Auto" and not (config.lora is not None and config.lora.served_as_adapter):
        trainer = (
            f"host memory of up to {MAX_ROOTS} ranks, a part each, and in " if sync.transport == "Filesystem" else ""
        )
        found.append(
            f"weightSync.deltas: Auto keeps one version, {show_gib(size)}, in {trainer}shared memory of each engine permanently"
        )
    return found
