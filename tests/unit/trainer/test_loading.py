"""A model loaded slice by slice is the one that `transformers` loads whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlrun.config.model import ModelConfig
from rlrun.protocol.failures import RoleError
from rlrun.trainer import loading
from rlrun.trainer.group import Group
from rlrun.trainer.tensor_names import file_names, file_tensors

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **options))


def mixture() -> Any:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, head_dim=4, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    )


def load(folder: Path, group: Group) -> Any:
    return loading.load_sharded(ModelConfig(path=str(folder)), str(folder), group)


@pytest.mark.parametrize(
    ("make", "shard_size"),
    [
        (lambda: llama(rope_parameters=LLAMA3), "50GB"),
        (lambda: llama(tie_word_embeddings=True), "10KB"),
        (mixture, "10KB"),
    ],
    ids=["llama3-rope", "tied-several-files", "mixture"],
)
def test_slices_give_the_whole(
    make: Callable[[], Any], shard_size: str, tmp_path: Path, solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make()
    original.generation_config.update(do_sample=True, top_k=7)
    original.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard_size)
    monkeypatch.setattr(loading, "load_model", None)  # nothing is loaded whole
    model = load(tmp_path, solo)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.generation_config.top_k == 7
    for (name, tensor), (other, value) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(tensor.full_tensor(), value), name
    for (name, tensor), (other, value) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(tensor, value), name
    tied = expected.lm_head.weight is expected.get_input_embeddings().weight
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_a_model_whose_files_have_other_names_is_loaded_whole(tmp_path: Path, solo: Group) -> None:
    original = llama()
    original.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    model = load(tmp_path, solo)
    for name, value in original.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, solo: Group) -> None:
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(17)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RoleError, match=r"model\.norm\.weight has shape \[17\] in model\.safetensors, but \[16\]"):
        load(tmp_path, solo)


def test_experts_are_called_in_files_as_transformers_calls_them(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        parts = dict(file_tensors(name, tensor.detach()))
        assert list(parts) == file_names(name, tuple(tensor.shape))
        found |= parts
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert isinstance(model, nn.Module)
