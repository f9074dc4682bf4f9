"""Quantized files, read by slices: FP8 with scales per block, and MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPTJConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.quantization import Quantization
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.dequantize import write_plain_copy
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.shard import local_part
from rlrun.trainer.modeling.stored.quantized import dequantize, plain_names
from rlrun.trainer.modeling.stored.stored_tensors import Lazy
from rlrun.trainer.modeling.stored.weight_files import open_files, stored_names
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from rlrun.trainer.plain_copy import main
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from tests.support.quantized_models import E2M1, quantize_blocks, quantize_files

FP8, MXFP4 = Quantization("fp8", (128, 128)), Quantization("mxfp4")


def lazy(tensor: Tensor) -> Lazy:
    return Lazy(tuple(tensor.shape), lambda slices: tensor[slices] if slices else tensor)


def scaled_by_loops(values: Tensor, scales: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    found = values.float()
    for row in range(found.shape[0]):
        for first in range(0, found.shape[1], block[1]):
            found[row, first : first + block[1]] *= scales[row // block[0], first // block[1]]
    return found


@pytest.mark.parametrize("rows", [64, 128, 160, 192, 576])
def test_blocks_at_the_edge_have_their_own_scale(rows: int) -> None:
    values, scales = quantize_blocks(torch.randn(rows, 300, generator=torch.Generator().manual_seed(rows)))
    whole = dequantize(lazy(values), lazy(scales), FP8).read_all()
    assert whole.dtype == torch.float32
    assert torch.equal(whole, scaled_by_loops(values, scales))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((0, 1), (0, 1)), ((100, 260), (17, 200)), ((128, 256), (128, 256)), ((575, 576), (299, 300)), ((5, 5), (0, 9))],
)
def test_slice_equals_the_slice_of_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    values, scales = quantize_blocks(torch.randn(576, 300))
    read = dequantize(lazy(values), lazy(scales), FP8)
    part = read.read((slice(*rows), slice(*columns)))
    assert torch.equal(part, read.read_all()[slice(*rows), slice(*columns)])


def test_slice_reads_only_the_scales_that_cover_it() -> None:
    values, scales = quantize_blocks(torch.randn(576, 300))
    asked: list[Any] = []

    def read(slices: Any) -> Tensor:
        asked.append(slices)
        return scales[slices]

    dequantize(lazy(values), Lazy(tuple(scales.shape), read), FP8).read((slice(130, 250), slice(0, 300)))
    assert asked == [(slice(1, 2), slice(0, 3))]


@pytest.mark.parametrize("kind", ["float8_e8m0fnu", "uint8", "float32", "bfloat16"])
def test_scales_are_read_in_each_dtype(kind: str) -> None:
    values = torch.randn(256, 128).to(torch.float8_e4m3fn)
    powers = torch.tensor([[2.0**-10], [2.0**5]])
    scales = (powers.log2() + 127).to(torch.uint8) if kind == "uint8" else powers.to(getattr(torch, kind))
    found = dequantize(lazy(values), lazy(scales), FP8).read_all()
    assert torch.equal(found, scaled_by_loops(values, powers))


def test_experts_and_single_scales_are_dequantized() -> None:
    experts = [quantize_blocks(torch.randn(160, 64)) for _ in range(3)]
    values, scales = torch.stack([one for one, _ in experts]), torch.stack([one for _, one in experts])
    found = dequantize(lazy(values), lazy(scales), FP8)
    assert torch.equal(found.read_all()[2], scaled_by_loops(*experts[2]))
    assert torch.equal(
        found.read((slice(1, 2), slice(130, 150), slice(3, 64)))[0], scaled_by_loops(*experts[1])[130:150, 3:]
    )
    alone = dequantize(lazy(values), lazy(torch.tensor(0.5)), Quantization("fp8"))
    assert torch.equal(alone.read_all(), values.float() * 0.5)


def test_four_bit_numbers_have_the_published_values() -> None:
    blocks, scales = torch.zeros(1, 2, 2, 16, dtype=torch.uint8), torch.full((1, 2, 2), 127, dtype=torch.uint8)
    blocks[0, 0, 0, :4] = torch.tensor([0x52, 0x10, 0xF7, 0x9A])
    scales[0, 0, 0], scales[0, 1, 1] = 129, 124
    blocks[0, 1, 1, 15] = 0x3C
    found = dequantize(lazy(blocks), lazy(scales), MXFP4)
    assert found.shape == (1, 64, 2)
    whole = found.read_all()
    assert whole[0, :8, 0].tolist() == [4, 12, 0, 2, 24, -24, -4, -2]
    assert whole[0, 62:, 1].tolist() == [-0.25, 0.1875]
    assert whole.count_nonzero() == 9
    for start, stop in ((0, 1), (3, 40), (31, 33), (63, 64)):
        assert torch.equal(found.read((slice(0, 1), slice(start, stop), slice(1, 2))), whole[:, start:stop, 1:2])


def test_four_bit_codes_are_all_read() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    found = dequantize(lazy(codes), lazy(torch.full((1, 1, 16), 127, dtype=torch.uint8)), MXFP4).read_all().flatten()
    numbers = torch.tensor((*E2M1, *(-value for value in E2M1)))
    assert torch.equal(found[0::2], numbers.repeat(16))
    assert torch.equal(found[1::2], numbers.repeat_interleave(16))


@pytest.mark.parametrize(
    ("values", "scales", "quantization", "message"),
    [
        (torch.zeros(576, 300), torch.ones(4, 3), FP8, r"blocks of 128 x 128 need \[5, 3\]"),
        (torch.zeros(300), torch.ones(3), FP8, "is no matrix"),
        (torch.zeros(8, 8), torch.ones(2), Quantization("fp8"), "one number is expected"),
        (torch.zeros(2, 2, 8), torch.ones(2, 2), MXFP4, "are not MXFP4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    values: Tensor, scales: Tensor, quantization: Quantization, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize(lazy(values), lazy(scales), quantization)


@pytest.mark.parametrize(
    "scales", [torch.tensor([[float("nan")]]), torch.tensor([[float("inf")]]), torch.tensor([[255]], dtype=torch.uint8)]
)
def test_scale_that_is_no_number_is_refused(scales: Tensor) -> None:
    read = dequantize(lazy(torch.zeros(4, 4).to(torch.float8_e4m3fn)), lazy(scales), FP8)
    with pytest.raises(ValueError, match="the files are damaged"):
        read.read_all()


def test_names_are_those_of_a_plain_repository() -> None:
    names = ["a.weight", "a.weight_scale_inv", "b.weight", "a.input_scale", "c.activation_scale", "d_scale_inv"]
    assert plain_names(names, FP8) == ["a.weight", "b.weight", "d_scale_inv"]
    names = ["e.down_proj_blocks", "e.down_proj_bias", "e.down_proj_scales", "f_blocks"]
    assert plain_names(names, MXFP4) == ["e.down_proj", "e.down_proj_bias", "f_blocks"]


def llama_in_fp8(folder: Path) -> dict[str, Tensor]:
    """Write a Llama with FP8 projections; return the dequantized tensors."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    changed = quantize_files(folder, "fp8", ("proj.weight",), (64, 64))
    found = load_file(folder / "model.safetensors")
    return expected | {name: scaled_by_loops(found[name], found[f"{name}_scale_inv"], (64, 64)) for name in changed}


def gpt_oss_in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write a GPT-OSS with MXFP4 experts; return the dequantized tensors."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
    )  # fmt: skip
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    changed = quantize_files(folder, "mxfp4", ("experts.gate_up_proj", "experts.down_proj"))
    found = load_file(folder / "model.safetensors")
    return expected | {
        name: dequantize(lazy(found[f"{name}_blocks"]), lazy(found[f"{name}_scales"]), MXFP4).read_all()
        for name in changed
    }


@pytest.mark.parametrize("make", [llama_in_fp8, gpt_oss_in_mxfp4])
def test_repository_is_read_like_a_plain_one(make: Any, tmp_path: Path) -> None:
    expected = make(tmp_path)
    assert set(stored_names(str(tmp_path), {}) or ()) == set(expected)
    files = open_files(str(tmp_path), {})
    for name, tensor in expected.items():
        assert torch.equal(files.lazy_tensor(name).read_all(), tensor), name


@pytest.mark.parametrize("make", [llama_in_fp8, gpt_oss_in_mxfp4])
def test_reference_is_loaded_from_quantized_files(make: Any, tmp_path: Path, solo: Group) -> None:
    expected, config = make(tmp_path), ModelConfig(path=str(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    model = load_checked(config, str(tmp_path), solo, seq_len=64)
    state = model.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(local_part(state[name]), tensor.float()) for name, tensor in expected.items())
    published = json.loads(model_files(model, config, str(tmp_path)).contents["config.json"])
    assert "quantization_config" not in published


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("make", [llama_in_fp8, gpt_oss_in_mxfp4])
def test_plain_copy_is_a_repository_without_quantization(make: Any, dtype: Any, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "model"
    expected = make(source)
    (source / "tokenizer.json").write_text("{}")
    write_plain_copy(source, folder, dtype, shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert (folder / "tokenizer.json").read_text() == "{}"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    state = model.state_dict()
    assert {name for name in state if state[name].dtype != getattr(torch, dtype)} == set()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.to(getattr(torch, dtype))), name


def test_large_tensor_is_converted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gpt_oss_in_mxfp4(tmp_path / "source")
    monkeypatch.setattr("rlrun.trainer.modeling.dequantize._CHUNK_NUMBERS", 3 * 64 * 64)  # three of four experts
    write_plain_copy(tmp_path / "source", tmp_path / "model", "float32")
    found = load_file(tmp_path / "model" / "model-00001.safetensors")
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in expected.items())


def test_damaged_repository_leaves_no_copy(tmp_path: Path) -> None:
    llama_in_fp8(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"][:1].contiguous()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RoleError, match=rf"{name} in model.safetensors: the scales of a tensor of shape \[160, 96\]"):
        write_plain_copy(tmp_path / "source", tmp_path / "model", "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def run_program(source: Path, folder: Path) -> int:
    """Run the program that writes the plain copy of a run in `folder`."""
    spec = {"model": {"path": str(source)}, "environments": [{"id": "reverse-text"}], "seqLen": 512}
    config = resolve_spec(RLRunSpec.model_validate(spec), name="a", uid="u", output_dir=str(folder))
    folder.mkdir()
    (folder / "run.json").write_text(config.model_dump_json(by_alias=False))
    return main(["--config", str(folder / "run.json")])


def test_program_copies_a_quantized_model_and_no_other(tmp_path: Path) -> None:
    llama_in_fp8(tmp_path / "source")
    assert run_program(tmp_path / "source", tmp_path / "run") == 0
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert run_program(tmp_path / "run" / "model", tmp_path / "plain") == 0
    assert not (tmp_path / "plain" / "model").exists()


def test_program_refuses_an_architecture_before_it_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source := tmp_path / "source").mkdir()
    GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8).save_pretrained(source)
    file = source / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    assert run_program(source, tmp_path / "run") == exit_codes.CONFIGURATION
    assert "models of type gptj cannot be trained" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()
