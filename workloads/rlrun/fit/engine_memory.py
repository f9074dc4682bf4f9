"""Memory of one GPU of an engine: weights, vLLM's working memory, and the remaining key-value cache."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.config.models.roles import InferenceConfig
from rlrun.fit.architecture import Architecture
from rlrun.fit.memory_parts import GIB, Needs, Part, capability_of, show_gib
from rlrun.fit.trainer_memory import adapted_layers
from rlrun.inference.engine_settings import LORA_RANKS, MAX_LORAS

LIBRARIES_BYTES = 1.5 * GIB
"""CUDA's context, the workspaces of its libraries, and recorded CUDA graphs."""
COMMUNICATORS_BYTES = 0.5 * GIB
"""Communication buffers of an engine with several GPUs."""
BATCHED_TOKENS = 8192
"""vLLM's default number of tokens per engine step, without `--max-num-batched-tokens`."""
WAITING_TRAINER_BYTES = 1.0 * GIB
"""Memory that a trainer keeps on a shared GPU while the engine works."""
FEW = 8
"""Divisor of `maxNumSeqs`. A cache with fewer full sequences than the quotient gets a remark."""
_ONE_BYTE = ("fp8", "fp8_e4m3", "fp8_e5m2")
FP8_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with a key-value cache in fp8 without FlashInfer: vLLM 0.32's Triton backend refuses it below, and its
FlashAttention needs 9.0. FlashInfer compiles its kernels, for which only the images with nvcc have the compiler."""


def engine_needs(config: InferenceConfig, model: Architecture, *, memory: int, product: str | None = None) -> Needs:
    """Return the memory needs of one GPU of an engine.

    Args:
        config: configuration of the engine.
        model: shape of the policy.
        memory: memory of the GPU, in bytes.
        product: product name of the GPU, if it is known.
    """
    tp, c = config.tensor_parallel, 4 if config.model.dtype == "float32" else 2
    given = _flag_value(config.extra_args, "--kv-cache-dtype") or "auto"
    token = model.kv_bytes(1 if given in _ONE_BYTE else c, tp)
    longest = config.max_model_len or config.seq_len
    parts = [
        Part("weights", _engine_weights(config, model, c), _weight_formats(config)),
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
    if given in _ONE_BYTE and product is not None and not has_fp8_cache(product):
        remarks.append(
            f"--kv-cache-dtype={given}: on {product}, only vLLM's FlashInfer backend supports it, which needs an image with nvcc "
            "(make images DEVEL=1); remove it from extraArgs, or set inference.image to such an image"
        )
    return Needs("inference", config.replicas * config.gpus_per_replica, [*parts, cache], limit, where, remarks)


def has_fp8_cache(product: str | None) -> bool:
    """Return whether vLLM can keep the cache in fp8 on a GPU without a compiler; an unknown GPU counts as able."""
    capability = capability_of(product) if product else None
    return capability is None or capability >= FP8_CAPABILITY


def _engine_remarks(config: InferenceConfig, tokens: int, longest: int) -> list[str]:
    sequences = tokens // longest
    found = [f"the cache holds {tokens:,} tokens: {sequences:,} sequences of maxModelLen ({longest:,}) at a time"]
    if sequences < config.max_num_seqs / FEW:
        found.append(
            f"that is far below maxNumSeqs ({config.max_num_seqs}); with long sequences, some wait or are computed again"
        )
    return found


def _weight_formats(config: InferenceConfig) -> str:
    """Return the number formats of the weights on one GPU. Quantization leaves out the embedding and the head."""
    dtype, quantized = config.model.dtype, _flag_value(config.extra_args, "--quantization")
    formats = f"{quantized}, embedding and head {dtype}" if quantized in _ONE_BYTE else dtype
    return f"{formats}, over {config.tensor_parallel} GPUs" if config.tensor_parallel > 1 else formats


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
    widths = sum(linear.inputs + linear.outputs for linear in adapted_layers(lora, model).values())
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
    """Return the value of a flag, after `=` or as the next argument."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            return value or (arguments[index + 1] if index + 1 < len(arguments) else None)
    return None
