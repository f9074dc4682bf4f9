"""Activations that a decoder layer keeps for its backward pass, in bytes per token: eager transformers code, gated MLPs, RMSNorm.

The formulas count each tensor that autograd saves; `tests/tensors/trainer/test_fit.py` compares them with real layers. c is the number of
bytes of an element in forward and backward, H the hidden size, Q and K the elements of a token's queries and keys, I the MLP's width:

    norms       2H (4 + 2c)          float32 input, normalized value, and the product with the weight
    q and k     (Q + K)(4 + c)       the same if the model normalizes heads; the product is the input of the rotation
    attention   c (2Q + 2K)          q, k, v, the result; 4 bytes per head for its sums
    MLP         4 c I                gate, its activation, up, their product
"""

from __future__ import annotations

from dataclasses import dataclass

from rlrun.config.models.parallel import ActivationMode
from rlrun.fit.architecture import Architecture

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
