"""Shape of a decoder-only model, and the numbers of parameters that follow from it.

`KNOWN` has the shapes of well-known models from their published configurations, for machines without access to the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlrun.config.families import FAMILIES, Family
from rlrun.fit.attention_kernels import Feature

_UNKNOWN = Family()
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in a model's configuration."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
"""Names of the number of experts per token."""
_OF_VALUES = "v_head_dim"
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_VARYING = ("attention_bias", "mlp_bias", "mlp_only_layers")
"""Options that add biases to layers or remove experts; parameter counts are exact only without them."""
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner", "ffn_dim", "moe_intermediate_size"),
    "max_position_embeddings": ("n_positions",),
}
"""Names of sizes in the files of older families. A mixture without dense layers has only the width of its experts."""


class ShapeError(ValueError):
    """Error for a configuration that does not describe a decoder. The message has the field."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of a decoder layer, outside its experts."""

    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        """Number of elements of its matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer with gated MLPs, possibly a mixture of experts."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    """Experts per layer; 0: dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    positions: int | None = None
    """Longest sequence that the positions allow; None: unknown, or extended by scaling."""
    whole_type: str = ""
    """Type of the multimodal model that this is the text part of; empty: not multimodal."""
    dense_widths: tuple[int, ...] = ()
    """Widths of a mixture's feed-forward parts outside its experts: shared experts and dense layers."""
    attention: frozenset[Feature] = frozenset()
    """Features that its attention requires of the kernel, as far as the configuration shows them."""
    varied: bool = False
    """Whether it has options that change the number of parameters independently of the sizes."""
    counted: int | None = None
    """Total number of parameters, counted in the model itself. Default: computed from the sizes."""
    encoder: int = 0
    """Number of these in encoders of images or sound, which are frozen; 0 if the model is not counted."""

    @property
    def is_exact(self) -> bool:
        """Whether the number of parameters is exact. For other families it is the number of a Llama of this shape."""
        return (self._model_family.counted and not self.varied and not self.whole_type) or self.counted is not None

    @property
    def trained_type(self) -> str:
        """Model type that the trainer uses. Layouts for a text model are not verified for multimodal models of the same text type."""
        return self.whole_type or self.model_type

    @property
    def divided(self) -> list[tuple[str, int]]:
        """Sizes that ranks with `parallelism.tp` share, with their names."""
        widths = self.dense_widths if self.experts else (self.intermediate,)
        heads = [("key-value heads", self.kv_heads), ("attention heads", self.heads)]
        return [*heads, *(("intermediate size", width) for width in widths)]

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self._model_family.normed

    @property
    def _model_family(self) -> Family:
        return FAMILIES.get(self.model_type, _UNKNOWN)

    @property
    def queries(self) -> int:
        """Number of elements of a token's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Number of elements of a token's keys, equal to that of its values."""
        return self.kv_heads * self.head_dim

    @cached_property
    def linear_layers(self) -> Mapping[str, Linear]:
        """Linear layers of a decoder layer, without experts, by the last part of their names."""
        h, q, k, i = self.hidden, self.queries, self.keys, self.intermediate
        attention = {"q_proj": Linear(h, q), "k_proj": Linear(h, k), "v_proj": Linear(h, k), "o_proj": Linear(q, h)}
        if self.experts:
            return attention
        return attention | {"gate_proj": Linear(h, i), "up_proj": Linear(h, i), "down_proj": Linear(i, h)}

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer without its experts."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.queries + 2 * self.keys if self._model_family.biased else 0
        router = self.experts * self.hidden
        return sum(linear.weights for linear in self.linear_layers.values()) + norms + biases + router

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a decoder layer."""
        return 3 * self.experts * self.hidden * self.expert_intermediate

    @property
    def table(self) -> int:
        """Elements of the embedding, and also of the head."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the decoder layers: embedding, last norm and head."""
        return self.table * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        if self.counted is not None:
            return self.counted
        return self.root_parameters + self.layers * (self.layer_parameters + self.expert_parameters)

    @property
    def decoder_parameters(self) -> int:
        """Number of parameters of the language model, without encoders."""
        return self.parameters - self.encoder

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter. The trainer stores a layer's experts in two parameters."""
        return max(self.table, 2 * self.expert_parameters // 3, self.hidden * self.intermediate)

    def kv_bytes(self, element_bytes: int, tensor_parallel: int) -> int:
        """Return the bytes of one token's keys and values on one of `tensor_parallel` GPUs, which repeat heads if there are fewer heads."""
        heads = max(self.kv_heads // tensor_parallel, 1)
        return 2 * self.layers * heads * self.head_dim * element_bytes


def from_config(config: Mapping[str, object]) -> Architecture:
    """Return the shape that a Hugging Face `config.json` describes; for a multimodal model, the shape of its text part.

    Raises:
        ShapeError: A field is missing or is not a positive number.
    """
    text, whole = config.get("text_config"), ""
    if isinstance(text, Mapping):
        config, whole = text, str(config.get("model_type", ""))
    sizes = {name: _read_size(config, name) for name in _NEEDED}
    heads = sizes["num_attention_heads"]
    positions = _size_value(config, "max_position_embeddings")
    experts = next((_read_size(config, name) for name in EXPERTS if config.get(name)), 0)
    visited = next((name for name in EXPERTS_PER_TOKEN if config.get(name)), EXPERTS_PER_TOKEN[0])
    kind = str(config.get("model_type", ""))
    own = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    return Architecture(
        model_type=kind,
        hidden=sizes["hidden_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=_read_size(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=_read_size(config, "head_dim") if config.get("head_dim") else sizes["hidden_size"] // heads,
        intermediate=_intermediate_size(config),
        vocabulary=sizes["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=_read_size(config, visited) if experts else 0,
        expert_intermediate=_read_size(config, own) if experts else 0,
        positions=None if _is_stretched(config) or not isinstance(positions, int) else positions,
        whole_type=whole,
        dense_widths=_dense_widths(config, own) if experts else (),
        attention=_attention_features(config, kind),
        varied=any(config.get(name) for name in _VARYING) or config.get("decoder_sparse_step", 1) != 1,
    )


def _intermediate_size(config: Mapping[str, object]) -> int:
    """Return the width of the feed-forward part. GPT-2's files may omit it."""
    if "n_embd" in config and _size_value(config, "intermediate_size") is None:
        return 4 * _read_size(config, "hidden_size")
    return _read_size(config, "intermediate_size")


def _dense_widths(config: Mapping[str, object], own: str) -> tuple[int, ...]:
    """Return the widths of a mixture's shared experts and dense layers."""
    found = []
    if config.get("shared_expert_intermediate_size"):
        found.append(_read_size(config, "shared_expert_intermediate_size"))
    if config.get("n_shared_experts"):
        found.append(_read_size(config, "n_shared_experts") * _read_size(config, own))
    if config.get("first_k_dense_replace") or config.get("mlp_only_layers"):
        found.append(_read_size(config, "intermediate_size"))
    return tuple(found)


def _attention_features(config: Mapping[str, object], kind: str) -> frozenset[Feature]:
    """Return the features that the model requires of the attention kernel."""
    layers = config.get("layer_types")
    slides = any("sliding" in str(layer) for layer in layers) if isinstance(layers, list) else True
    acts: dict[Feature, bool] = {
        "window": bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False and slides,
        "softcap": bool(config.get("attn_logit_softcapping")),
        "sinks": kind == "gpt_oss",
        "value heads": _OF_VALUES in config and config[_OF_VALUES] != _of_keys(config),
    }
    return frozenset(name for name, required in acts.items() if required)


def _of_keys(config: Mapping[str, object]) -> object:
    """Return the size of a key head for models whose value heads have another size."""
    parts = [config.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    sizes = [part for part in parts if isinstance(part, int)]
    return sum(sizes) if sizes else config.get("head_dim")


def _is_stretched(config: Mapping[str, object]) -> bool:
    """Return whether rotary positions are scaled beyond the configured maximum."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
    return kind != "default"


def _size_value(config: Mapping[str, object], name: str) -> object:
    """Return the entry of the first of a size's names that is set. For sizes per layer, return the largest."""
    names = (name, *_OTHER_NAMES.get(name, ()))
    found = next((value for alias in names if (value := config.get(alias)) is not None), None)
    if isinstance(found, list) and found and all(isinstance(size, int) for size in found):
        return max(found)
    return found


def _read_size(config: Mapping[str, object], name: str) -> int:
    value = _size_value(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShapeError(f"{name} ({value}) must be a positive number in the config.json of a language model")
    return value


_SUFFIXES = ("-Base", "-Instruct", "-Instruct-2507", "-Thinking-2507")
"""Name endings of models with the same shape as the model without the ending."""


def _qwen3_shape(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = False) -> Architecture:
    return Architecture("qwen3", hidden, layers, heads, 8, 128, intermediate, 151_936, tied)


def _qwen2_shape(
    hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, *, tied: bool = False
) -> Architecture:
    return Architecture("qwen2", hidden, layers, heads, kv, hidden // heads, intermediate, vocabulary, tied)


def _llama_shape(
    hidden: int, layers: int, heads: int, dim: int, intermediate: int, *, tied: bool = False
) -> Architecture:
    return Architecture("llama", hidden, layers, heads, 8, dim, intermediate, 128_256, tied)


def _qwen3_moe(hidden: int, layers: int, heads: int, intermediate: int, of_expert: int) -> Architecture:
    return Architecture(
        "qwen3_moe",
        hidden,
        layers,
        heads,
        4,
        128,
        intermediate,
        151_936,
        experts=128,
        experts_per_token=8,
        expert_intermediate=of_expert,
    )


KNOWN: Mapping[str, Architecture] = {
    "Qwen/Qwen3-0.6B": _qwen3_shape(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3_shape(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3_shape(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3_shape(4096, 36, 32, 12_288),
    "Qwen/Qwen3-14B": _qwen3_shape(5120, 40, 40, 17_408),
    "Qwen/Qwen3-32B": _qwen3_shape(5120, 64, 64, 25_600),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 12_288, 1536),
    "Qwen/Qwen2.5-0.5B": _qwen2_shape(896, 24, 14, 2, 4864, 151_936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2_shape(1536, 28, 12, 2, 8960, 151_936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2_shape(2048, 36, 16, 2, 11_008, 151_936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2_shape(3584, 28, 28, 4, 18_944, 152_064),
    "Qwen/Qwen2.5-14B": _qwen2_shape(5120, 48, 40, 8, 13_824, 152_064),
    "Qwen/Qwen2.5-32B": _qwen2_shape(5120, 64, 40, 8, 27_648, 152_064),
    "Qwen/Qwen2.5-Math-7B": _qwen2_shape(3584, 28, 28, 4, 18_944, 152_064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2_shape(1536, 28, 12, 2, 8960, 151_936),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2_shape(3584, 28, 28, 4, 18_944, 152_064),
    "meta-llama/Llama-3.2-1B": _llama_shape(2048, 16, 32, 64, 8192, tied=True),
    "meta-llama/Llama-3.2-3B": _llama_shape(3072, 28, 24, 128, 8192, tied=True),
    "meta-llama/Llama-3.1-8B": _llama_shape(4096, 32, 32, 128, 14_336),
    "meta-llama/Llama-3.1-70B": _llama_shape(8192, 80, 64, 128, 28_672),
}


def known_model(name: str) -> Architecture | None:
    """Return the shape of a hub model, or None if it is not in the table."""
    plain = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
    return KNOWN.get(name) or KNOWN.get(plain)
