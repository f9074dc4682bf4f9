"""Families of models whose layers and rows the trainer divides over ranks: one table, which trainer, `rlrun fit` and the pages read.

A row says what each module of a decoder layer is, by its name in the layer. A layer with a parameter that its row does not name is refused,
so that a variant of a family is never divided by guesswork. Every row is proven against one rank (`tests/trainer/families.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["tp", "cp", "ep"]
"""Fields of `trainer.parallelism` that divide a layer, a row and a mixture's experts."""
Width = Literal["queries", "keys", "half"]
"""Outputs of a part of a joined projection: of all heads, of all key-value heads, or half of the projection's."""

_QUERIES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
_DENSE: frozenset[Kind] = frozenset({"tp", "cp"})
_MIXTURE: frozenset[Kind] = frozenset({"tp", "cp", "ep"})


@dataclass(frozen=True)
class Family:
    """Roles of the modules of a layer. A name that a layer lacks says nothing."""

    columns: tuple[str, ...] = (*_QUERIES, *_GATED)
    """Linear modules divided by outputs, their biases too; every rank has the whole input."""
    rows: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    """Linear modules divided by inputs; their outputs are added up, and their biases once."""
    joined: Mapping[str, tuple[Width, ...]] = field(default_factory=dict)
    """Linear modules whose outputs are several parts end to end, each divided as a column is."""
    norms: tuple[str, ...] = ("self_attn.q_norm", "self_attn.k_norm")
    """Norms of what is divided: of every head, or of all heads together, which the ranks then compute together."""
    norm_heads: int = 2
    """Dimension of those norms' inputs that is divided: the heads', or that of the elements of all heads."""
    whole: tuple[str, ...] = ("*layernorm", "mlp.gate")
    """Patterns of modules that every rank has and computes whole: the layer's norms and routers."""
    experts: tuple[str, ...] = ()
    """Modules that hold a mixture's experts, which are dealt out."""
    counts: tuple[str, ...] = ()
    """Attributes of a layer that hold a number of heads, which the layer's code reads."""
    in_place: bool = False
    """True if the layer changes the results of columns in place; they are copied then."""
    last_norm: str = "norm"
    """Norm of the decoder after its layers."""
    biased: bool = False
    """True if queries, keys and values have biases, and no other module of the layer does (`rlrun fit`)."""
    normed: bool = False
    """True if queries and keys are normed head by head (`rlrun fit`)."""
    counted: bool = False
    """True if `rlrun fit` counts its parameters exactly from `config.json`; of others it counts a Llama's of the same sizes."""
    by: frozenset[Kind] = _DENSE
    """Ways to divide it."""
    reason: str = ""
    """Why it is not divided by the others, for a person."""

    def names(self, parameter: str) -> bool:
        """True if the row says what a layer's parameter is."""
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
        by=_ROWS_ALONE, reason="its activations have weights of their own, whose gradient would be a part"
    ),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"), Family(by=_ROWS_ALONE, reason="its experts are not where others have them")
    ),
    "granite_swa": Family(by=_ROWS_ALONE, reason="its heads have sinks, which are not divided"),
    "mimo_v2_flash": Family(by=_ROWS_ALONE, reason="its heads have sinks, which are not divided"),
    "gemma4_text": Family(
        by=_ROWS_ALONE, reason="its layers have heads of several sizes, and some share keys and values"
    ),
    "nanochat": Family(by=_ROWS_ALONE, reason="its last norm is also before its layers"),
    "gpt_oss": Family(by=_ROWS_ALONE, reason="its experts have biases and its heads sinks, which are not divided"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
        Family(by=_ROWS_ALONE, reason="its heads are made of latent vectors, which are not divided"),
    ),
}
"""By model type."""


def find_family(kind: str, by: Kind) -> Family | None:
    """The row of a model type; None if it is not divided so."""
    row = FAMILIES.get(kind)
    return row if row is not None and by in row.by else None


def explain_undivided(kind: str, by: Kind, size: int) -> str | None:
    """Reason why a model of that type is not divided so by `size` ranks, with what is and the fix; None where it is. Follows the value."""
    if size == 1 or find_family(kind, by) is not None:
        return None
    if by == "ep":
        fix = "set ep: 1 and share it by dpShard"
    else:
        other: Kind = "cp" if by == "tp" else "tp"
        fix = f"set {by}: 1 and share it by dpShard" + (f", or {other}" if find_family(kind, other) is not None else "")
    row = FAMILIES.get(kind)
    why = f": {row.reason}" if row is not None and row.reason else ""
    return f"is for the model types {', '.join(divisible_types(by))}, the model is of type {kind}{why}; {fix}"


def divisible_types(by: Kind) -> Iterable[str]:
    """Model types that are divided so, in order."""
    return sorted(kind for kind, row in FAMILIES.items() if by in row.by)
