"""FLOPs of a step: PRIME-RL's formula, so that MFU numbers compare, with each sequence's own length.

FLOPs per token = 6 * active parameters + 12 * layers * hidden * T: forward and backward of the matrix products, and of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlrun.fit.architecture import EXPERTS, EXPERTS_PER_TOKEN

# Dense bf16 FLOP/s by the maker's data sheets; the first name found in the device's name counts.
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
    """Work of one token in a sequence of T: `6 * active_parameters + pair * T` FLOPs."""

    active_parameters: int
    pair: int
    """12 * layers * hidden."""

    def per_token(self, length: int) -> int:
        """FLOPs of one token of a sequence of `length` tokens, forward and backward."""
        return 6 * self.active_parameters + self.pair * length

    def of(self, lengths: Sequence[int]) -> int:
        """FLOPs of whole sequences."""
        return sum(length * self.per_token(length) for length in lengths)

    @property
    def quadratic(self) -> float:
        """Work of a pair of tokens relative to that of one token: what `protocol.packing.plan` balances with."""
        return self.pair / (6 * self.active_parameters)


def model_cost(model: nn.Module) -> Cost:
    """The cost of a Hugging Face causal LM.

    Active parameters are those of matrix products: norms and biases are not counted, a tied embedding once, an untied input
    embedding (a look-up) not at all, and of the experts of a mixture only the share that a token visits. Parts for images are not counted.
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
    """Parameters of decoder and head without those of models inside of it, for images or sound."""
    decoder = model.get_decoder()
    decoder = model if decoder is head else decoder
    inside = [part for part in decoder.modules() if isinstance(part, PreTrainedModel) and part is not decoder]
    others = {id(one) for part in inside if part is not model.base_model for one in part.parameters()}
    for part in (decoder, head):
        if part is not None:
            yield from (one for one in part.parameters() if id(one) not in others)


def _visited_experts(config: Any) -> int:
    """Experts that a token visits."""
    found: int | list[int] = next((count for name in EXPERTS_PER_TOKEN if (count := getattr(config, name, None))), 1)
    return found[0] if isinstance(found, list) else found


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device, None when it is not in the table."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
