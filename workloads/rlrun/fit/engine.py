"""Memory of one of an engine's GPUs: weights, what vLLM needs to compute, and the key-value cache that is left."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.config.models.roles import InferenceConfig
from rlrun.fit.architecture import Architecture
from rlrun.fit.gpu_products import GIB, show_gib
from rlrun.fit.parts import Needs, Part
from rlrun.fit.trainer import adapted_layers
from rlrun.inference.command import MAX_LORAS
from rlrun.inference.settings import LORA_RANKS

LIBRARIES_BYTES = 1.5 * GIB
"""CUDA's context, the workspaces of its libraries, and recorded graphs."""
COMMUNICATORS_BYTES = 0.5 * GIB
"""With more than one GPU."""
BATCHED_TOKENS = 8192
"""Tokens of one engine step that vLLM makes room for, where `--max-num-batched-tokens` does not say."""
WAITING_TRAINER_BYTES = 1.0 * GIB
"""Memory that a trainer keeps of the same GPU in the engine's turn."""
FEW = 8
"""Whole sequences in the cache below `maxNumSeqs` divided by this are worth a remark."""
_ONE_BYTE = ("fp8", "fp8_e4m3", "fp8_e5m2")


def engine_needs(config: InferenceConfig, model: Architecture, *, memory: int) -> Needs:
    """Memory of one GPU of an engine.

    Args:
        config: the engine's.
        model: the policy's shape.
        memory: of the GPU, in bytes.
    """
    tp, c = config.tensor_parallel, 4 if config.model.dtype == "float32" else 2
    given = _flag_value(config.extra_args, "--kv-cache-dtype") or "auto"
    token = model.kv_bytes(1 if given in _ONE_BYTE else c, tp)
    longest = config.max_model_len or config.seq_len
    parts = [
        Part(
            "weights",
            _engine_weights(config, model, c),
            f"{config.model.dtype}, over {tp} GPUs" if tp > 1 else config.model.dtype,
        ),
        *_engine_adapters(config, model, c),
        Part("buffers of a step", _step_bytes(config, model, c), "tokens of a step, and their logits"),
        Part("CUDA and its libraries", LIBRARIES_BYTES + (COMMUNICATORS_BYTES if config.world_size > 1 else 0)),
    ]
    share = config.gpu_memory_utilization
    left = share * memory - sum(part.bytes for part in parts)
    least = token * longest
    cache = Part("key-value cache", max(left, least), f"{token / 1024:.0f} KiB a token; at least {longest:,} tokens")
    limit, where = share * memory, f"gpuMemoryUtilization {share:g} of {show_gib(memory)}"
    if config.colocated and limit > memory - WAITING_TRAINER_BYTES:
        limit, where = memory - WAITING_TRAINER_BYTES, f"{show_gib(memory)} less what the waiting trainer keeps"
    remarks = _engine_remarks(config, int(left // token), longest) if left >= least else []
    return Needs("inference", config.replicas * config.gpus_per_replica, [*parts, cache], limit, where, remarks)


def _engine_remarks(config: InferenceConfig, tokens: int, longest: int) -> list[str]:
    sequences = tokens // longest
    found = [f"the cache holds {tokens:,} tokens: {sequences:,} sequences of maxModelLen ({longest:,}) at a time"]
    if sequences < config.max_num_seqs / FEW:
        found.append(
            f"that is far below maxNumSeqs ({config.max_num_seqs}): where sequences get long, some wait or are computed again"
        )
    return found


def _engine_weights(config: InferenceConfig, model: Architecture, c: int) -> float:
    experts = model.layers * model.expert_parameters
    over = config.world_size if "--enable-expert-parallel" in config.extra_args else config.tensor_parallel
    each = 1 if _flag_value(config.extra_args, "--quantization") in _ONE_BYTE else c
    inside = model.layers * model.layer_parameters
    outside = c * model.root_parameters / config.tensor_parallel
    return outside + each * (inside / config.tensor_parallel + experts / over)


def _engine_adapters(config: InferenceConfig, model: Architecture, c: int) -> list[Part]:
    lora = config.lora
    if lora is None or not lora.served_as_adapter:
        return []
    rank = next(known for known in LORA_RANKS if known >= lora.rank)
    slots = MAX_LORAS * lora.slots
    widths = sum(one.inputs + one.outputs for one in adapted_layers(lora, model).values())
    return [
        Part("adapters", slots * rank * widths * model.layers * c / config.tensor_parallel, f"{slots} of rank {rank}")
    ]


def _step_bytes(config: InferenceConfig, model: Architecture, c: int) -> float:
    asked = _flag_value(config.extra_args, "--max-num-batched-tokens")
    tokens = int(asked) if asked and asked.isdigit() else BATCHED_TOKENS
    width = (
        model.experts_per_token * (model.expert_intermediate * 3 + model.hidden)
        if model.experts
        else 3 * model.intermediate
    )
    computing = tokens * c * (4 * model.hidden + (model.queries + 2 * model.keys + width) / config.tensor_parallel)
    logits = config.max_num_seqs * model.vocabulary * (c + 3 * 4)
    return computing + logits


def _flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Value of a flag, written behind `=` or as the next argument."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            return value or (arguments[index + 1] if index + 1 < len(arguments) else None)
    return None
