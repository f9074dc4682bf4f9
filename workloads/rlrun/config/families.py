"""Families of models: those that the trainer can divide over ranks, and those that it cannot train. Pure.

One table of the divisible families serves the trainer, `rlrun fit` and the docs pages. An entry assigns a role to each module of a decoder
layer, by the module's name in the layer. A layer with a parameter that its entry does not cover is refused, so a variant of a family is
never divided by guesswork. Tests compare every entry with one rank (`tests/trainer/families.py`).

Models that the trainer cannot train are recognized by their `config.json` or hub name, with an alternative for each. The trainer checks all
other models itself (`trainer.modeling.architecture_check`), but only after loading: for them a model would have to be downloaded first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch, fnmatchcase
from typing import Literal

from rlrun.config.model_heads import TEXT_MODEL, head_refusal
from rlrun.config.quantization import READ_FORMATS, UnreadableFormatError, config_parts, read_quantization

Kind = Literal["tp", "cp", "ep"]
"""Fields of `trainer.parallelism` that divide a layer, a row, and the experts of a mixture."""
Width = Literal["queries", "keys", "half"]
"""Output width of a part of a joined projection: all heads, all key-value heads, or half of the projection."""

_QUERIES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
_DENSE: frozenset[Kind] = frozenset({"tp", "cp"})
_MIXTURE: frozenset[Kind] = frozenset({"tp", "cp", "ep"})


@dataclass(frozen=True)
class Family:
    """Roles of the modules of a layer. Names that a layer does not have are ignored."""

    columns: tuple[str, ...] = (*_QUERIES, *_GATED)
    """Linear modules divided by outputs, with their biases. Every rank has the whole input."""
    rows: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    """Linear modules divided by inputs. Their outputs are summed, and their biases are added once."""
    joined: Mapping[str, tuple[Width, ...]] = field(default_factory=dict)
    """Linear modules whose outputs are several concatenated parts, each divided like a column."""
    norms: tuple[str, ...] = ("self_attn.q_norm", "self_attn.k_norm")
    """Norms of divided values: of each head, or of all heads together, which the ranks then compute together."""
    norm_heads: int = 2
    """Divided dimension of those norms' inputs: the dimension of the heads, or of the elements of all heads."""
    whole: tuple[str, ...] = ("*layernorm", "mlp.gate")
    """Patterns of modules that every rank computes in full: the layer's norms and routers."""
    experts: tuple[str, ...] = ()
    """Modules with the experts of a mixture, which are divided among ranks."""
    counts: tuple[str, ...] = ()
    """Attributes with a number of heads that the layer's code reads."""
    in_place: bool = False
    """Whether the layer changes the outputs of columns in place; they are copied then."""
    last_norm: str = "norm"
    """Norm of the decoder after its layers."""
    biased: bool = False
    """Whether queries, keys and values have biases, but no other module of the layer (`rlrun fit`)."""
    normed: bool = False
    """Whether queries and keys are normalized per head (`rlrun fit`)."""
    counted: bool = False
    """Whether `rlrun fit` counts its parameters exactly from `config.json`. Otherwise it counts those of a Llama of the same size."""
    by: frozenset[Kind] = _DENSE
    """Supported kinds of division."""
    reason: str = ""
    """Reason why other kinds are not supported, for messages."""

    def names(self, parameter: str) -> bool:
        """Return whether the entry covers a parameter of a layer."""
        module = parameter.rpartition(".")[0]
        if module in (*self.columns, *self.rows, *self.joined, *self.norms, *self.experts):
            return True
        depth = module.count(".")
        return any(pattern.count(".") == depth and fnmatchcase(module, pattern) for pattern in self.whole)


_LLAMA = Family()
_HEADS_FIRST = replace(_LLAMA, norm_heads=1)
_JOINED = replace(
    _LLAMA, columns=_QUERIES, rows=("self_attn.o_proj", "mlp.down_proj"), joined={"mlp.gate_up_proj": ("half", "half")}
)
_EXPERTS = replace(_LLAMA, experts=("mlp.experts",), by=_MIXTURE)
_SHARED = replace(
    _EXPERTS,
    columns=(*_LLAMA.columns, *(f"mlp.shared_expert{s}.{name}_proj" for s in ("", "s") for name in ("gate", "up"))),
    rows=(*_LLAMA.rows, "mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"),
    whole=(*_LLAMA.whole, "mlp.shared_expert_gate"),
)
_SHARED_HEADS_FIRST = replace(_SHARED, norm_heads=1)
_ROWS_ALONE = frozenset[Kind]({"cp"})

_AS_LLAMA = (
    *(
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "ernie4_5",
        "gemma",
        "gemma2",
        "granite",
        "helium",
        "jais2",
        "ministral",
        "ministral3",
    ),
    *("olmo2", "olmo3", "seed_oss", "smollm3", "vaultgemma"),
)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_AS_LLAMA, _LLAMA),
    **dict.fromkeys(("llama", "mistral"), replace(_LLAMA, counted=True)),
    "qwen2": replace(_LLAMA, counted=True, biased=True),
    "qwen3": replace(_LLAMA, counted=True, normed=True),
    **dict.fromkeys(("gemma3_text", "exaone4"), replace(_HEADS_FIRST, normed=True)),
    "olmo": replace(_LLAMA, in_place=True),
    "hunyuan_v1_dense": replace(_HEADS_FIRST, norms=("self_attn.query_layernorm", "self_attn.key_layernorm")),
    "hyperclovax": replace(_LLAMA, whole=(*_LLAMA.whole, "post_norm[12]")),
    "glm": _JOINED,
    "glm4": _JOINED,
    "phi3": replace(
        _JOINED,
        columns=(),
        joined={"self_attn.qkv_proj": ("queries", "keys", "keys"), "mlp.gate_up_proj": ("half", "half")},
        counted=True,
        counts=("self_attn.num_key_value_heads", "self_attn.config.num_attention_heads"),
    ),
    "phi": replace(
        _LLAMA,
        columns=(*_QUERIES, "mlp.fc1"),
        rows=("self_attn.dense", "mlp.fc2"),
        norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        norm_heads=1,
        last_norm="final_layernorm",
    ),
    "starcoder2": replace(_LLAMA, columns=(*_QUERIES, "mlp.c_fc"), rows=("self_attn.o_proj", "mlp.c_proj")),
    "bitnet": replace(_LLAMA, norms=("self_attn.attn_sub_norm", "mlp.ffn_sub_norm")),
    "gpt_neox": replace(
        _LLAMA,
        columns=("attention.query_key_value", "mlp.dense_h_to_4h"),
        rows=("attention.dense", "mlp.dense_4h_to_h"),
        last_norm="final_layer_norm",
    ),
    "qwen3_moe": replace(_EXPERTS, counted=True, normed=True),
    "mixtral": replace(_EXPERTS, counted=True),
    **dict.fromkeys(("olmoe", "flex_olmo", "minimax_m2", "mellum", "cohere2_moe"), _EXPERTS),
    **dict.fromkeys(("qwen2_moe", "glm4_moe", "dots1", "solar_open"), _SHARED),
    "ernie4_5_moe": replace(_SHARED, whole=(*_SHARED.whole, "mlp.gate.moe_statics")),
    **dict.fromkeys(("hy_v3", "exaone_moe"), _SHARED_HEADS_FIRST),
    "hunyuan_v1_moe": replace(
        _SHARED_HEADS_FIRST,
        columns=(*_LLAMA.columns, "mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        rows=(*_LLAMA.rows, "mlp.shared_mlp.down_proj"),
        norms=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        whole=(*_LLAMA.whole, "mlp.gate.wg"),
    ),
    "afmoe": replace(
        _SHARED, columns=(*_SHARED.columns, "self_attn.gate_proj"), whole=("*layernorm", "mlp", "mlp.router.gate")
    ),
    "laguna": replace(_SHARED, columns=(*_SHARED.columns, "self_attn.g_proj")),
    "apertus": Family(
        by=_ROWS_ALONE, reason="its activations have their own weights, whose gradient would be incomplete"
    ),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"), Family(by=_ROWS_ALONE, reason="its experts have other module names")
    ),
    "granite_swa": Family(by=_ROWS_ALONE, reason="its heads have sinks, which are not divided"),
    "mimo_v2_flash": Family(by=_ROWS_ALONE, reason="its heads have sinks, which are not divided"),
    "gemma4_text": Family(
        by=_ROWS_ALONE, reason="its layers have heads of several sizes, and some layers share keys and values"
    ),
    "nanochat": Family(by=_ROWS_ALONE, reason="its last norm is also applied before its layers"),
    "gpt_oss": Family(by=_ROWS_ALONE, reason="its experts have biases and its heads have sinks, which are not divided"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
        Family(by=_ROWS_ALONE, reason="its heads are computed from latent vectors, which are not divided"),
    ),
}
"""Families by model type."""


def find_family(kind: str, by: Kind) -> Family | None:
    """Return the entry of a model type, or None if this kind of division is not supported."""
    row = FAMILIES.get(kind)
    return row if row is not None and by in row.by else None


def explain_undivided(kind: str, by: Kind, size: int) -> str | None:
    """Return why `size` ranks cannot divide a model of that type, as text after the field's value with a fix, or None if they can."""
    if size == 1 or find_family(kind, by) is not None:
        return None
    if by == "ep":
        fix = "set ep: 1 and share it by dpShard"
    else:
        other: Kind = "cp" if by == "tp" else "tp"
        fix = f"set {by}: 1 and share it by dpShard" + (f", or {other}" if find_family(kind, other) is not None else "")
    row = FAMILIES.get(kind)
    reason = "its layers carry state along a sequence" if kind in _STATES else row.reason if row is not None else ""
    why = f": {reason}" if reason else ""
    return f"is supported for the model types {', '.join(divisible_types(by))}, but the model is of type {kind}{why}; {fix}"


def explain_state(shown: str, field: str) -> str:
    """Return why a field of `parallelism` cannot divide a model with recurrent layers, as text after the field's value with a fix."""
    return f"is not supported for {shown}, whose layers carry state along a sequence; set {field}: 1 and share it by dpShard"


def explain_stages(kind: str, size: int) -> str | None:
    """Return why a model type cannot be divided into `size` pipeline stages, as text after the field's value, or None if it can."""
    return explain_state(f"models of type {kind}", "pp") if size > 1 and kind in _STATES else None


def divisible_types(by: Kind) -> Iterable[str]:
    """Return the model types that support a kind of division, sorted."""
    return sorted(kind for kind, row in FAMILIES.items() if by in row.by)


_STATES = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax",
        "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv",
        "xlstm", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip
"""Model types with recurrent layers, which carry state along a sequence."""
_STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "recurrent", "lightning"})
"""Entries of `layer_types` for such layers."""
_STATE_FIELDS = (
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "ssm_cfg",
    "mamba_d_state",
    "conv_L_cache",
)
_STATE_DTYPES = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
"""Fields of the configuration for the number format of the state, which vLLM reads."""
_ENCODERS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "vision_encoder", "speech_config")
"""Fields of the configuration for encoders of images and sound."""
_TEXT_OF = frozenset({"gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "phi4_multimodal"})
"""Types with encoders of which only the text part is loaded, as a causal language model."""
_TEXT_TRAINED = frozenset({"mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl"})
"""Types with an encoder of images whose language model is trained on text; the encoder is frozen."""
_AS_PUBLISHED: tuple[tuple[str, str], ...] = (("moonshotai/kimi-k2-thinking", "compressed-tensors"),)
"""Repositories that their authors publish only in a format that the trainer does not read, in lower case, with the format."""
_SUFFIXES = (
    "-fp8",
    "-fp8-dynamic",
    "-awq",
    "-gptq",
    "-gptq-int4",
    "-gptq-int8",
    "-bnb-4bit",
    "-unsloth-bnb-4bit",
    "-mxfp4",
    "-nvfp4",
    "-gguf",
    "-int4",
    "-int8",
)
"""Name endings of quantized repositories. The name without the ending is that of the original repository."""
_READ_SUFFIXES = ("-fp8", "-mxfp4")
"""Name endings of formats that the trainer reads."""
DEQUANTIZE = "docs/models.md#quantized-repositories"


def training_refusal(config: Mapping[str, object], shown: str, *, own_class: bool = False) -> str | None:
    """Return why the trainer cannot train a model, with a fix, or None if no reason is known.

    Args:
        config: content of the model's `config.json`.
        shown: folder or name of the model for messages.
        own_class: whether the run has its own class for the model (`model.class`), so that `architectures` does not matter.
    """
    kind = str(config.get("model_type") or "")
    try:
        read_quantization(config)
    except UnreadableFormatError as error:
        return _is_unreadable(shown, str(error))
    encoder = next((name for name in _ENCODERS if config.get(name)), None)
    if encoder is not None and kind not in _TEXT_OF | _TEXT_TRAINED:
        return (
            f"{shown} is a model for images or sound ({kind}, {encoder} in config.json), and the trainer supports such models of the types "
            f"{', '.join(sorted(_TEXT_TRAINED | {'gemma3'}))}; use one of these, such as Qwen/Qwen3-VL-8B-Instruct, or a text model, such "
            f"as {TEXT_MODEL}"
        )
    if own_class or _has_own_causal_class(config):
        return None
    return head_refusal(config, shown, is_language=kind in FAMILIES.keys() | _STATES | _TEXT_TRAINED)


def _has_own_causal_class(config: Mapping[str, object]) -> bool:
    own = config.get("auto_map")
    return isinstance(own, Mapping) and "AutoModelForCausalLM" in own


def has_vision(config: Mapping[str, object]) -> bool:
    """Return whether a model has an encoder of images, by the content of its `config.json`."""
    return bool(config.get("vision_config"))


def refusal_by_name(name: str) -> str | None:
    """Return the reason of `training_refusal` for a repository that is published in a format that is not read, by its name only."""
    method = next((method for pattern, method in _AS_PUBLISHED if fnmatch(name.lower(), pattern)), None)
    return None if method is None else _is_unreadable(name, f"the format {method} is not read")


def quantization_note(name: str) -> str | None:
    """Return a note if a repository's name indicates a format that the trainer does not read, or None."""
    base = unquantized_name(name)
    if base is None or name.lower().endswith(_READ_SUFFIXES):
        return None
    return (
        f"{name} appears to be quantized by its name, in a format that the trainer does not read (it reads {READ_FORMATS}); "
        f"use {base}"
    )


def choose_state_dtype(config: Mapping[str, object]) -> str | None:
    """Return the number format for the recurrent state of a hybrid model in engines, or None if the format is given or not needed.

    In bfloat16 a state loses precision with every token, so that log-probabilities differ from the trainer's more and more.
    """
    given = any(part.get(name) for part in config_parts(config) for name in _STATE_DTYPES)
    return "float32" if has_state(config) and not given else None


def explain_engine_dtype(config: Mapping[str, object], dtype: str, *, gpus: int) -> str | None:
    """Return why engines cannot serve a model in a number format, with a fix, or None.

    Args:
        config: `config.json` of the model.
        dtype: value of `model.dtype`.
        gpus: GPUs of an engine.
    """
    # A gated delta rule (Qwen3-Next, Qwen 3.5): vLLM 0.32 asserts this in the first request, after the engine is ready.
    has_delta_rule = any(part.get("linear_num_value_heads") for part in config_parts(config))
    if gpus > 0 or dtype == "bfloat16" or not has_delta_rule:
        return None
    return f"{dtype!r} does not work with the linear attention of this model on engines without a GPU; use 'bfloat16'"


def has_state(config: Mapping[str, object]) -> bool:
    """Return whether a model has recurrent layers, by its `config.json`."""
    for part in config_parts(config):
        layers = part.get("layer_types")
        kinds = {str(layer) for layer in layers} if isinstance(layers, list) else set()
        if part.get("model_type") in _STATES or kinds & _STATE_LAYERS or any(part.get(name) for name in _STATE_FIELDS):
            return True
    return False


def unquantized_name(name: str) -> str | None:
    """Return the probable name of the repository that a quantized repository was made from, or None if the name has no such ending."""
    found = [end for end in _SUFFIXES if name.lower().endswith(end)]
    return name[: -len(max(found, key=len))] if found else None


def _is_unreadable(shown: str, reason: str) -> str:
    base = unquantized_name(shown)
    other = base if base is not None else "a repository with its weights in bfloat16"
    return (
        f"{shown} is quantized, and {reason} (quantization_config in config.json); the trainer reads {READ_FORMATS}; "
        f"use {other}, or convert it to bfloat16 first ({DEQUANTIZE})"
    )
