"""FLOPs of a step by PRIME-RL's formula, so that MFU values are comparable, with the length of each sequence.

FLOPs per token = 6 * active parameters + 12 * layers * hidden * T: forward and backward of the matrix products, and of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlrun.fit.architecture import EXPERTS, EXPERTS_PER_TOKEN

# Dense bf16 FLOP/s from the vendors' data sheets; the first key contained in the device's name applies.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "4090": 165e12,
}


@dataclass(frozen=True)
class Cost:
    """Cost of one token in a sequence of T tokens: `6 * active_parameters + pair * T` FLOPs."""

    active_parameters: int
    pair: int
    """Attention FLOPs per pair of tokens: 12 * layers * hidden."""

    def per_token(self, length: int) -> int:
        """Return the FLOPs of one token of a sequence of `length` tokens, forward and backward."""
        return 6 * self.active_parameters + self.pair * length

    def total_flops(self, lengths: Sequence[int]) -> int:
        """Return the FLOPs of sequences with the given lengths."""
        return sum(length * self.per_token(length) for length in lengths)

    @property
    def quadratic(self) -> float:
        """Cost of a pair of tokens relative to the cost of one token, used by `protocol.packing.micro_batches`."""
        return self.pair / (6 * self.active_parameters)


def model_cost(model: nn.Module) -> Cost:
    """Compute the cost of a Hugging Face causal LM.

    Active parameters are parameters of matrix products. Norms, biases, untied input embeddings (a look-up) and image modules are not
    counted; tied embeddings are counted once, and experts by the fraction that a token uses.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    tied = head is not None and head.weight is embedding
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), None)
    of_text = {id(one) for one in _of_text(model, head)}
    active = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or (parameter is embedding and not tied) or id(parameter) not in of_text:
            continue
        of_experts = ".experts." in name or (parameter.ndim > 2 and parameter.shape[0] == experts)
        active += parameter.numel() * (_visited_experts(config) / experts if experts and of_experts else 1.0)
    return Cost(round(active), 12 * config.num_hidden_layers * config.hidden_size)


def _of_text(model: Any, head: nn.Module | None) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of decoder and head, except for nested models of images or audio."""
    decoder = model.get_decoder()
    decoder = model if decoder is head else decoder
    inside = [part for part in decoder.modules() if isinstance(part, PreTrainedModel) and part is not decoder]
    others = {id(one) for part in inside if part is not model.base_model for one in part.parameters()}
    for part in (decoder, head):
        if part is not None:
            yield from (one for one in part.parameters() if id(one) not in others)


def _visited_experts(config: Any) -> int:
    """Return the number of experts per token."""
    found: int | list[int] = next((count for name in EXPERTS_PER_TOKEN if (count := getattr(config, name, None))), 1)
    return found[0] if isinstance(found, list) else found


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device, or None if it is not in the table."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
