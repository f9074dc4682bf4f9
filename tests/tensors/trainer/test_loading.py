"""Models loaded slice by slice, compared with models loaded whole by `transformers`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel

from rlrun.config.models.language_models import ModelConfig
from rlrun.hub.refused_models import convert_command
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import load_weights
from rlrun.trainer.modeling.load_weights import LoadOptions, Support
from rlrun.trainer.modeling.shard import check_source, load_model, local_part
from rlrun.trainer.proof import start_check
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from tests.trainer.family_models import make_model

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


def mixtral() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))


def gpt_neox() -> Any:
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))


def gemma3() -> Any:
    torch.manual_seed(0)
    config = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 4}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **config))


def gpt_bigcode() -> Any:
    torch.manual_seed(0)
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=40, n_positions=128, n_embd=16, n_layer=2, n_head=4))


def load(folder: Path, group: Group) -> Any:
    return load_checked(ModelConfig(path=str(folder)), str(folder), group, seq_len=128)


@pytest.mark.parametrize(
    ("make", "shard_size"),
    [
        (lambda: llama(rope_parameters=LLAMA3), "50GB"),
        (lambda: llama(tie_word_embeddings=True), "10KB"),
        (mixture, "10KB"),
        (mixtral, "10KB"),
        (gpt_neox, "50GB"),
        (gemma3, "50GB"),
        (gpt_bigcode, "50GB"),
    ],
    ids=["llama3-rope", "tied-several-files", "qwen-experts", "mixtral-experts", "renamed-head", "scale", "mask"],
)
def test_sliced_loading_equals_transformers_loading(
    make: Callable[[], Any], shard_size: str, tmp_path: Path, solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make()
    original.generation_config.update(do_sample=True, top_k=7)
    original.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard_size)
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


def test_rank_reads_only_its_slice(solo: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the second of two ranks on one process."""
    part = DTensor.from_local(torch.zeros(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    monkeypatch.setattr(load_weights, "compute_local_shape_and_global_offset", lambda *_: ((2, 3), (2, 0)))
    stored, found = torch.arange(12.0).reshape(4, 3), []

    class Stored:
        def read(self, where: tuple[slice, ...]) -> torch.Tensor:
            found.append(where)
            return stored[where]

    load_weights._fill_tensor(part, Stored())  # type: ignore[arg-type]
    assert found == [(slice(2, 4), slice(0, 3))]
    assert torch.equal(part.to_local(), stored[2:])


def test_files_without_model_prefix_are_read_by_slices(
    tmp_path: Path, solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = llama()
    original.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    model = load(tmp_path, solo)
    for name, value in original.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name


def test_frozen_parameters_are_read_with_a_checkpoint(tmp_path: Path, solo: Group) -> None:
    """A checkpoint does not contain them, because they are not trained."""
    whole = make_model("ernie4_5_moe", 0)
    whole.save_pretrained(tmp_path)
    frozen = [name for name, parameter in whole.named_parameters() if not parameter.requires_grad]
    model = load_checked(
        ModelConfig(path=str(tmp_path)), str(tmp_path), solo, seq_len=16, options=LoadOptions(with_weights=False)
    )
    assert [name.rpartition(".")[2] for name in frozen] == ["e_score_correction_bias"]
    for name in frozen:
        assert torch.equal(local_part(model.get_parameter(name)), whole.get_parameter(name)), name


def test_missing_weights_are_refused(tmp_path: Path, solo: Group) -> None:
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        RoleError, match=r"its files lack model\.layers\.1\.mlp\.up_proj\.weight, which would"
    ) as caught:
        load(tmp_path, solo)
    assert caught.value.code == exit_codes.DATA


def test_buffer_without_initialization_is_named(tmp_path: Path, solo: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma3().save_pretrained(tmp_path)
    monkeypatch.setattr(start_check, "check_architecture", lambda *_, **__: Support(frozenset(), "row"))
    monkeypatch.setattr(Gemma3PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(RoleError, match=r"its files lack the buffer model\.embed_tokens\.embed_scale") as caught:
        load(tmp_path, solo)
    assert caught.value.code == exit_codes.CONFIGURATION


def test_tensor_of_wrong_shape_is_named(tmp_path: Path, solo: Group) -> None:
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(17)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RoleError, match=r"model\.norm\.weight has shape \[17\] in model\.safetensors, but \[16\]"):
        load(tmp_path, solo)


class Bomb:
    """Object whose unpickling creates a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.folder),))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "model.ckpt"]
)
def test_pickled_weights_are_refused_with_conversion_command(name: str, tmp_path: Path, solo: Group) -> None:
    model, folder = llama(), tmp_path / "model"
    model.config.save_pretrained(folder)
    torch.save(model.state_dict() | {"x": Bomb(tmp_path / "executed")}, folder / name)
    config = ModelConfig(path=str(folder))
    with pytest.raises(RoleError, match=rf"model\.path: .*{name} is a pickle.*python -c .*save_pretrained") as caught:
        check_source(config, str(folder))
    assert caught.value.code == exit_codes.DATA
    with pytest.raises(RoleError):
        load_model(config, str(folder))
    with pytest.raises(RoleError):
        load_checked(config, str(folder), solo, seq_len=16)
    assert not (tmp_path / "executed").exists()


def test_pickle_next_to_safetensors_is_not_read(tmp_path: Path, solo: Group) -> None:
    model, folder = llama(), tmp_path / "model"
    model.save_pretrained(folder)
    torch.save(model.state_dict() | {"x": Bomb(tmp_path / "executed")}, folder / "pytorch_model.bin")
    check_source(ModelConfig(path=str(folder)), str(folder))
    loaded = load(folder, solo)
    load_model(ModelConfig(path=str(folder)), str(folder))
    assert torch.equal(
        loaded.get_parameter("model.norm.weight").full_tensor(), model.get_parameter("model.norm.weight")
    )
    assert not (tmp_path / "executed").exists()


def test_conversion_command_of_refusal_works(tmp_path: Path) -> None:
    model, folder = llama(), tmp_path / "model"
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    source, target = str(folder), tmp_path / "new"
    program = shlex.split(convert_command(source, str(target)))
    assert program[:2] == ["python", "-c"]
    monkey = program[2].replace("T.from_pretrained(a).save_pretrained(b)", "None")  # this model has no tokenizer
    exec(compile(monkey.replace("sys.argv[1:]", repr([source, str(target)])), "command", "exec"), {})
    assert {name: tuple(one.shape) for name, one in load_file(target / "model.safetensors").items()}.items() <= {
        name: tuple(one.shape) for name, one in model.state_dict().items()
    }.items()
