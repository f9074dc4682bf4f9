"""Model classes of a user's package, for `model.class`: one that trains, one whose sequences mix in a row, and wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlrun.trainer.modeling.tiny_model import make_tokenizer

MODULE = "tests.support.own_models"
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class GatedConfig(LlamaConfig):
    """Llama's options, and the strength of the gates."""

    model_type = "rlrun_gated"

    gate_strength: float = 2.0


class GatedLayer(LlamaDecoderLayer):
    """A layer whose attention output is multiplied by a gate of its input, which no class of transformers has in this form.

    The attention itself is a module of transformers: vLLM requires that a module's own `forward` calls the attention interface.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.strength = config.gate_strength

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        hidden_states = hidden_states + attended * torch.sigmoid(self.strength * self.gate(normed))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GatedModel(LlamaModel):
    config_class = GatedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(GatedLayer(config, number) for number in range(config.num_hidden_layers))
        self.post_init()


class GatedForCausalLM(LlamaForCausalLM):
    """The model that trains."""

    config_class = GatedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = GatedModel(config)
        self.post_init()


class MixingModel(GatedModel):
    """Adds each token's embedding to the next one's, also over the boundary of two sequences in a row."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        embedded = self.embed_tokens(input_ids) if options.get("inputs_embeds") is None else options["inputs_embeds"]
        before = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, :-1]], 1)
        return super().forward(**options | {"inputs_embeds": embedded + before})


class MixingForCausalLM(GatedForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MixingModel(config)
        self.post_init()


class LosingForCausalLM(GatedForCausalLM):
    """Its saved state lacks the gates."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if ".gate." not in name}


class ScaledForCausalLM(GatedForCausalLM):
    """Changes the logits in a way that engines do not compute."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


class UnservedForCausalLM(GatedForCausalLM):
    """Like a class whose attention modules do not call the attention interface of transformers."""

    _supports_attention_backend = False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


class WithoutConfig(nn.Module):
    """Not a model of transformers."""


LlamaForCausalLM_ = type("LlamaForCausalLM", (GatedForCausalLM,), {"__module__": MODULE})
"""A class with the name of one in transformers."""


def path_of(name: str) -> str:
    """Return the import path of a class of this module."""
    return f"{MODULE}:{name}"


def write_model(folder: Path, kind: type[Any] = GatedForCausalLM, **changes: Any) -> Path:
    """Write the files of a model with random weights, and return its folder."""
    torch.manual_seed(0)
    config = GatedConfig(**SIZES | changes)
    model = kind(config)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    GatedForCausalLM.save_pretrained(model, folder)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    return folder
