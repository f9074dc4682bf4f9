"""Memory of one GPU: its parts with their purposes, the memory of GPU products, and the activations of a decoder layer.

Products are values of the node label `nvidia.com/gpu.product`. `parse_size` reads sizes in common notations.

Activations are bytes per token that a layer keeps for its backward pass: eager transformers code, gated MLPs, RMSNorm. The formulas count
each tensor that autograd saves; `tests/tensors/fit/test_fit_counts.py` compares them with real layers. c is the number of bytes of an
element in forward and backward, H the hidden size, Q and K the elements of a token's queries and keys, I the MLP's width:

    norms       2H (4 + 2c)          float32 input, normalized value, and the product with the weight
    q and k     (Q + K)(4 + c)       the same if the model normalizes heads; the product is the input of the rotation
    attention   c (2Q + 2K)          q, k, v, the result; 4 bytes per head for its sums
    MLP         4 c I                gate, its activation, up, their product
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlrun.config.models.parallel import ActivationMode
from rlrun.fit.architecture import Architecture


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    name: str
    bytes: float
    why: str = ""
    """Explanation of the size, for messages."""


@dataclass(frozen=True)
class Needs:
    """Memory needs of one role on each of its GPUs."""

    role: str
    """`trainer` or `inference`."""
    gpus: int
    """Number of GPUs of the role."""
    parts: Sequence[Part]
    limit: float
    """Bytes that all parts together may use."""
    limit_is: str
    """Origin of the limit, for messages."""
    remarks: Sequence[str] = ()
    """Additional facts, which do not stop the run."""

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the parts fit into the limit."""
        return self.total <= self.limit


MIB, GIB = 2**20, 2**30
MEMORY_MIB: Mapping[str, int] = {
    "B300": 275_040,
    "GB200": 189_471,
    "B200": 183_359,
    "H200": 143_771,
    "GH200": 97_871,
    "H100-NVL": 95_830,
    "H100": 81_559,
    "H800": 81_559,
    "H20": 97_871,
    "A100-40GB": 40_960,
    "A100-80GB": 81_920,
    "L40S": 46_068,
    "L4": 23_034,
    "A10G": 23_028,
    "A10": 23_028,
    "RTX-6000-Ada": 49_140,
    "RTX-PRO-6000": 97_887,
    "RTX-5090": 32_607,
    "RTX-4090": 24_564,
    "RTX-3090": 24_576,
    "V100-16GB": 16_160,
    "V100-32GB": 32_510,
    "T4": 15_360,
}
"""Memory as the driver reports it, in MiB. A label matches a name if it contains all parts of the name (`NVIDIA-A100-SXM4-80GB`)."""
CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "B300": (10, 3),
    "GB200": (10, 0),
    "B200": (10, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "H100": (9, 0),
    "H800": (9, 0),
    "H20": (9, 0),
    "A100": (8, 0),
    "L40S": (8, 9),
    "L4": (8, 9),
    "A10G": (8, 6),
    "A10": (8, 6),
    "RTX-6000-Ada": (8, 9),
    "RTX-PRO-6000": (12, 0),
    "RTX-5090": (12, 0),
    "RTX-4090": (8, 9),
    "RTX-3090": (8, 6),
    "V100": (7, 0),
    "T4": (7, 5),
}
"""CUDA compute capabilities by product, matched like the memory."""
_UNITS = {"Mi": MIB, "Gi": GIB, "M": 10**6, "G": 10**9, "MiB": MIB, "GiB": GIB, "MB": 10**6, "GB": 10**9}


def memory_of(product: str) -> int | None:
    """Return the bytes of a GPU's memory by its label, or None for unknown labels and labels of shared or partitioned GPUs."""
    if any(part in ("SHARED", "MIG") for part in product.upper().split("-")):
        return None
    name = _match_product(product, MEMORY_MIB)
    return None if name is None else MEMORY_MIB[name] * MIB


def capability_of(product: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its label, or None for unknown labels."""
    name = _match_product(product, CAPABILITIES)
    return None if name is None else CAPABILITIES[name]


def _match_product(product: str, names: Iterable[str]) -> str | None:
    """Return the name with the most parts among the names that match a label."""
    parts = product.upper().split("-")
    fitting = [name for name in names if all(part in parts for part in name.upper().split("-"))]
    return max(fitting, key=lambda name: (name.count("-"), len(name)), default=None)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `80Gi`, `81559Mi` or `80GB`.

    Raises:
        ValueError: The text is not a size; the message has the expected form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a size of memory; write a number and a unit, such as 80Gi or 24564Mi")
    return int(float(found[1]) * _UNITS[found[2]])


def show_gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / GIB:.1f} GiB"


FUSED = 4 / 3
"""Activations kept by compiled code, relative to the outputs of matrix products and attention; it recomputes all others."""


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one token's activations in one layer, on one of `tp` ranks."""

    kept: float
    """Bytes kept from the forward pass until the layer's backward pass."""
    working: float
    """Additional bytes during the backward pass of this layer."""


def layer_activations(
    model: Architecture, mode: ActivationMode, *, number_bytes: int, tp: int, compiled: bool, padded: bool = False
) -> LayerActivations:
    """Return the bytes of one token in one layer.

    Args:
        model: shape of the model.
        mode: activation mode, which determines what is kept.
        number_bytes: bytes of an element in forward and backward.
        tp: ranks that share the layer's matrices; each has the full hidden state.
        compiled: whether the layer is compiled.
        padded: whether attention copies the row into padded blocks.
    """
    c, everything = number_bytes, _keep_everything(model, number_bytes, tp)
    products = _product_bytes(model, c, tp)
    if compiled:
        everything = min(everything, FUSED * products)
    if padded:  # copies of queries, keys and values of all heads, and of the result
        everything += 4 * c * model.queries / tp
    moving = 4 * model.queries / tp + _mlp_width(model, tp) * 2 * c
    """Gradients within a layer: float32 gradients of attention's queries, and of two tensors of the MLP."""
    kept = {
        "none": everything,
        "selective": products,
        "attention": c * model.hidden + _attention_result(model, c, tp),
        "full": c * model.hidden,
        "offload": 0.0,
    }[mode]
    again = {"none": 0.0, "offload": 2 * everything}.get(mode, everything - kept)
    return LayerActivations(kept, again + moving)


def outside_layers(model: Architecture, number_bytes: int) -> float:
    """Return the bytes of one token outside the layers: the embedding's output and the last norm."""
    return model.hidden * (4 + 3 * number_bytes)


def _keep_everything(model: Architecture, c: int, tp: int) -> float:
    norms = 2 * model.hidden * (4 + 2 * c)
    of_heads = (model.queries + model.keys) * (4 + c) / tp if model.qk_norm else 0.0
    attention = c * (model.queries + 2 * model.keys) / tp + _attention_result(model, c, tp)
    return norms + of_heads + attention + _mlp_bytes(model, c, tp)


def _mlp_bytes(model: Architecture, c: int, tp: int) -> float:
    if not model.experts:
        return 4 * c * model.intermediate / tp
    each = c * (3 * model.hidden + 4 * model.expert_intermediate / tp)  # tokens sorted by expert, input and output
    return model.experts_per_token * each + 8 * model.experts


def _product_bytes(model: Architecture, c: int, tp: int) -> float:
    attention = c * (model.queries + 2 * model.keys) / tp + _attention_result(model, c, tp)
    if not model.experts:
        return attention + c * (3 * model.hidden + 2 * model.intermediate / tp)
    each = c * (model.hidden + 2 * model.expert_intermediate / tp)
    return attention + 2 * c * model.hidden + model.experts_per_token * each + 8 * model.experts


def _attention_result(model: Architecture, c: int, tp: int) -> float:
    return (c * model.queries + 4 * model.heads) / tp


def _mlp_width(model: Architecture, tp: int) -> float:
    if model.experts:
        return model.experts_per_token * model.expert_intermediate / tp
    return model.intermediate / tp
