"""Small models of an architecture, which run in milliseconds: narrow, with the same layers, options and ratios.

Sizes are reduced without a list of families. They are recognized by names that families share, and by values: sizes equal to the hidden
size stay equal to it. All head sizes are divided by the same number, so that their sums and products stay consistent.

A small model has a layer of every kind, and random weights that activate all parts.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from rlrun.trainer.modeling.noise import config_parts, remove_noise
from rlrun.trainer.modeling.shard import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LONGEST = 24
"""Tokens of the longest sequence in the checks of small models."""
_VOCABULARY = 96
_HEADS = 4
_HEAD_DIM = 16
_EXPERTS = 8
_LENGTH = re.compile(
    r"position_embeddings$|^n_positions$|^n_ctx$|max_seq_len|max_sequence_length|model_max_length|^max_(source|target)_positions$"
    r"|sliding_window(_size)?$|attention_chunk_size|attention_window_size|^window_size$|^local_attention$|^index_topk$|context_length"
    r"|^floor_scale$"  # Llama 4 scales queries after this position
)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def shrink_config(config: PreTrainedConfig, *, seq_len: int) -> PreTrainedConfig:
    """Return a copy with small sizes and the same depth, because the kind of a layer may depend on its number.

    Args:
        config: configuration of the model.
        seq_len: longest sequence of the run, in tokens. A length of the model below it (such as a window) is reduced below `LONGEST`, so
            that it has an effect; other lengths have none.
    """
    small = copy.deepcopy(config)
    for part in config_parts(small):
        _shrink_part(part, seq_len)
    if isinstance(vision := getattr(small, "vision_config", None), PreTrainedConfig):
        _shrink_vision(vision, small.get_text_config().hidden_size)
    return small


@dataclass(frozen=True)
class _Sizes:
    """Original and reduced sizes of a configuration."""

    hidden: int
    small_hidden: int
    heads: int
    small_heads: int
    factor: int
    """Divisor of all head sizes."""
    seq_len: int

    def head_size(self, size: int) -> int:
        return max(size // self.factor, 1)

    def key_value_heads(self, count: int) -> int:
        if count >= self.heads:
            return self.small_heads
        return 1 if count == 1 else max(self.small_heads // 2, 1)

    def limit_length(self, size: int) -> int:
        return size if size <= 0 else min(size, LONGEST if self.seq_len <= size else LONGEST // 2)

    def limit_width(self, size: int) -> int:
        return min(size, 2 * self.small_hidden)

    def state_heads(self, part: Any) -> int:
        """Return the number of heads of a Mamba 2 layer, whose total size is its inner width."""
        inner = getattr(part, "mamba_d_ssm", None) or int(part.mamba_expand * self.hidden)
        return max(inner // self.hidden * self.small_hidden // self.head_size(part.mamba_d_head), 1)


_Rule = Callable[[_Sizes, int], int]
_RULES: tuple[tuple[str, _Rule], ...] = (
    (r"vocab_size", lambda sizes, v: min(v, _VOCABULARY)),
    (r"^(num_key_value_heads|num_kv_heads|.*_num_key_value_heads|num_query_groups)$", lambda sizes, v: sizes.key_value_heads(v)),
    (r"linear_num_(key|value)_heads", lambda sizes, v: min(v, 4)),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|num_selected_experts|moe_k)$", lambda sizes, v: min(v, 2)),
    (r"^topk_group$", lambda sizes, v: 1),
    (r"^(n_group|num_expert_group)$", lambda sizes, v: min(v, 2)),
    (r"shared_experts|zero_expert", lambda sizes, v: v),
    (r"(num|n)_.*experts$", lambda sizes, v: min(v, _EXPERTS)),
    (r"head_dim$|d_head$|headdim$|kv_channels|rotary_dim|lora_rank|(dim_head|head_size)$", lambda sizes, v: sizes.head_size(v)),
    (r"(intermediate|ffn|feed_forward|inner|shared).*(size|dim)$|^(ffn_dim|d_ff|dff|dim_ff)$", lambda sizes, v: sizes.limit_width(v)),
    (r"^(d_inner|n_inner)$", lambda sizes, v: sizes.limit_width(v)),
    (r"state_size|d_state|dt_rank|time_step_rank|_per_layer_input$|laurel_rank|chunk_size$|_rank$", lambda sizes, v: min(v, 16)),
    (r"n_groups$|ngroups$", lambda sizes, v: 1),
)  # fmt: skip


_VISION_DEPTH = 2
_VISION_SIZES: Mapping[str, int] = {
    "depth": _VISION_DEPTH,
    "num_hidden_layers": _VISION_DEPTH,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "num_position_embeddings": 64,
}
"""Sizes of an encoder of images. No row of text reaches it, and with its default sizes it has up to 0.6 billion parameters."""
_PATCH = 4
"""Edge of a patch, in pixels."""


def _shrink_vision(part: PreTrainedConfig, text_hidden: int) -> None:
    """Reduce an encoder of images in place; the number of patches per image stays, because other code depends on it."""
    own = vars(part)
    patch = own.get("patch_size")
    if _is_size(own.get("image_size")) and _is_size(patch):
        part.image_size = own["image_size"] // patch * _PATCH
    if _is_size(patch):
        part.patch_size = _PATCH
    for name, size in _VISION_SIZES.items():
        stored = part.attribute_map.get(name, name)
        if _is_size(own.get(stored)):
            setattr(part, stored, size)
    if _is_size(own.get("out_hidden_size")):
        part.out_hidden_size = text_hidden
    for name, value in list(own.items()):
        if name.endswith("_indexes") and isinstance(value, list):
            setattr(part, name, list(range(_VISION_DEPTH))[-len(value) :] if value else [])


_RULE = re.compile("|".join(f"({pattern})" for pattern, _ in _RULES))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shrink_part(part: Any, seq_len: int) -> None:
    sizes = _read_sizes(part, seq_len)
    if sizes is None:
        return
    state_heads = sizes.state_heads(part) if hasattr(part, "mamba_d_head") and hasattr(part, "mamba_expand") else None
    for name, value in list(vars(part).items()):
        if name in _TOKENS and value is not None:
            setattr(part, name, _TOKENS[name])
        elif isinstance(value, dict):
            setattr(part, name, _shrink_rotary(value, sizes))
        elif _is_size(value):
            setattr(part, name, _small_size(name, value, sizes))
        elif isinstance(value, list) and value and all(_is_size(entry) for entry in value) and _RULE.search(name):
            setattr(part, name, [_small_size(name, entry, sizes) for entry in value])
    if state_heads is not None:
        part.mamba_n_heads = state_heads
        if getattr(part, "mamba_d_ssm", None) is not None:
            part.mamba_d_ssm = state_heads * part.mamba_d_head
    _set_axis_sections(part)


def _small_size(name: str, value: int, sizes: _Sizes) -> int:
    if name.endswith("token_id") or name.endswith("layers"):
        return value
    if _LENGTH.search(name):
        return sizes.limit_length(value)
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            return rule(sizes, value)
    if value == sizes.hidden:
        return sizes.small_hidden
    if value == sizes.heads and name.endswith(("heads", "head")):
        return sizes.small_heads
    return value


def _read_sizes(part: object, seq_len: int) -> _Sizes | None:
    hidden, heads = (
        _first_value(part, names)
        for names in (("hidden_size", "d_model", "n_embd"), ("num_attention_heads", "num_heads", "n_heads"))
    )
    if hidden is None:
        return None
    heads = heads or max(hidden // 64, 1)
    per_head = max(hidden // heads, 1)
    head_dim = _first_value(part, ("head_dim",)) or per_head
    factor = max(head_dim // _HEAD_DIM, 1)
    small_heads = min(heads, _HEADS)
    width = max(per_head // factor, 1)
    width += width % 2
    return _Sizes(hidden, small_heads * width, heads, small_heads, factor, seq_len)


def _first_value(part: Any, names: tuple[str, ...]) -> int | None:
    stored = vars(part)
    for name in names:
        value = stored.get(part.attribute_map.get(name, name))
        if isinstance(value, int) and value > 0:
            return value
    return None


def _shrink_rotary(options: dict[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Reduce options of rotary positions: factors and sections of frequencies, and lengths; also for one set per layer type."""
    small: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            small[name] = _shrink_rotary(value, sizes)
        elif name in ("long_factor", "short_factor"):
            small[name] = value[: max(len(value) // sizes.factor, 1)]
        elif name == "mrope_section":
            small[name] = _axis_sections(sum(value) // sizes.factor)
        elif name == "original_max_position_embeddings" and value:
            small[name] = sizes.limit_length(value)
        else:
            small[name] = value
    return small


def _axis_sections(frequencies: int) -> list[int]:
    """Divide the frequencies of a head among three axes of positions; code of transformers splits frequencies by exactly these counts."""
    third = frequencies // 3
    return [frequencies - 2 * third, third, third]


def _set_axis_sections(part: Any) -> None:
    """Set the sections of a small configuration without them, because the default in the code fits only the full size of a head."""
    options = getattr(part, "rope_parameters", None)
    if "mrope_section" not in getattr(part, "ignore_keys_at_rope_validation", ()) or not isinstance(options, dict):
        return
    head = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
    share = options.get("partial_rotary_factor", 1.0)
    options.setdefault("mrope_section", _axis_sections(int(head * share) // 2))


_GAIN = 1.5
_LEAST_LAYERS = 2
_NUMBER = ("idx", "index", "layer_id", "layer_number", "num_layers", "num_hidden_layers")
"""Substrings of attribute names that number or count layers and do not describe their kind."""


def small_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, *, attention: str, seq_len: int, seed: int
) -> PreTrainedModel:
    """Create a model of class `kind` in float32 on the CPU, in training mode. torch's global random state is not changed.

    Args:
        kind: class of a causal LM, of transformers or of the model's own code.
        config: configuration of the model at its full size.
        attention: name of the attention implementation.
        seq_len: see `shrink_config`.
        seed: seed of the weights.

    Raises:
        Exception: any error of the architecture's code.
    """
    small = shrink_config(config, seq_len=seq_len)
    remove_noise(small)
    small.use_cache = False
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        with torch.device("meta"):
            whole = _build_model(kind, small, attention)
        model = _build_model(kind, _cut_layers(small, whole), attention)
        if any(
            _layer_kind(cut) != _layer_kind(layer)
            for cut, layer in zip(decoder_layers(model), decoder_layers(whole), strict=False)
        ):
            # The kind of a layer depends on the number of layers.
            model = _build_model(kind, small, attention)
        _randomize_weights(model)
    return model.train()


def _build_model(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    return kind._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention)


def _cut_layers(config: PreTrainedConfig, whole: object) -> PreTrainedConfig:
    """Reduce the configuration to the smallest number of first layers that contains every kind of layer."""
    kinds = _layer_kinds(whole)
    depth = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    depth = min(max(depth, _LEAST_LAYERS), len(kinds))
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(kinds):
            setattr(text, name, value[:depth])
    if text.num_hidden_layers != depth:
        text.num_hidden_layers = depth
    return cut


def _layer_kinds(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Describe each decoder layer: classes, shapes and settings of its modules, and its entries in the configuration's lists."""
    layers = decoder_layers(model)
    lists = [value for value in vars(model.config.get_text_config()).values() if _describes_layers(value, len(layers))]
    return [(_layer_kind(layer), tuple(str(values[i]) for values in lists)) for i, layer in enumerate(layers)]


def _describes_layers(value: object, layers: int) -> bool:
    """Return whether a value is a list with one entry per layer, and not a list of layer numbers."""
    if not isinstance(value, list | tuple) or len(value) != layers:
        return False
    return not all(isinstance(entry, int) for entry in value) or len({*value}) < layers


def _layer_kind(layer: nn.Module) -> tuple[object, ...]:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(sorted((key, value) for key, value in vars(module).items() if _tells_kind(key, value))),
            tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _tells_kind(name: str, value: object) -> bool:
    return isinstance(value, bool | int | str) and name[0] != "_" and not any(part in name for part in _NUMBER)


_DECAYS = {"A_log": -3.0, "recurrent_param": -4.0}
"""Means of the parameters whose exponential (`A_log`) or softplus (`recurrent_param`, RecurrentGemma) is a decay rate per token."""


@torch.no_grad()
def _randomize_weights(model: nn.Module) -> None:
    """Initialize matrices so that activations stay near 1, and add noise to vectors (norms, biases, sinks), so that no parameter is
    neutral.

    Logarithms of decay rates are drawn so low that the state of a recurrent mixer lives as long as a sequence: with transformers'
    initial values a state decays within a few tokens, and a state that crosses sequences would be nearly invisible.
    """
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in _DECAYS:
            parameter.normal_(_DECAYS[name.rpartition(".")[2]], 0.2)
        elif parameter.ndim > 1:
            parameter.normal_(0, _GAIN / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers."""
    before, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shows:
            logging.enable_progress_bar()
