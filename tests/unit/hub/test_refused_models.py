"""Refusal of untrainable models before their weights are fetched or read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlrun.config.models.language_models import ModelConfig, ReferenceConfig
from rlrun.hub import fetch
from rlrun.hub.refused_models import format_refusal, refuse_other_formats
from rlrun.local.read_inputs import check_model_folder
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

UNREADABLE = {"model_type": "qwen3", "quantization_config": {"quant_method": "awq", "bits": 4}}
FP8 = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(UNREADABLE))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Return the parts of a repository that were fetched."""
    parts: list[str] = []

    def take(_repository: object, part: str, **_named: Any) -> Path:
        parts.append(part)
        return folder

    monkeypatch.setattr(fetch, "_fetch_files", take)
    return parts


def test_quantized_folder_is_refused_if_it_is_trained(folder: Path) -> None:
    model = ModelConfig(path=str(folder))
    with pytest.raises(RoleError, match=r"model.path: .* is quantized, and the format awq is not read") as refused:
        fetch.model_source(model, Path("made"), with_weights=True, trained=True)
    assert refused.value.code == exit_codes.CONFIGURATION
    assert fetch.model_source(model, Path("made"), with_weights=True) == str(folder)


def test_quantized_repository_is_refused_before_its_weights(fetched: list[str]) -> None:
    with pytest.raises(RoleError, match=r"model.name: Qwen/Qwen3-8B-AWQ is quantized, .* use Qwen/Qwen3-8B, or"):
        fetch.model_source(ModelConfig(name="Qwen/Qwen3-8B-AWQ"), Path("made"), with_weights=True, trained=True)
    assert fetched == ["files"]


def test_quantized_repository_is_fetched_for_an_evaluation(fetched: list[str]) -> None:
    fetch.model_source(ModelConfig(name="Qwen/Qwen3-8B-AWQ"), Path("made"), with_weights=True)
    assert fetched[:2] == ["files", "weights"]


def test_quantized_reference_is_refused(folder: Path) -> None:
    with pytest.raises(RoleError, match=r"algorithm\.reference\.model: .* is quantized"):
        fetch.reference_source(ReferenceConfig(model=str(folder)), ModelConfig(path=str(folder)))


def test_format_that_the_trainer_reads_is_fetched_and_needs_a_plain_copy(folder: Path, fetched: list[str]) -> None:
    (folder / "config.json").write_text(json.dumps(FP8))
    for model in (ModelConfig(path=str(folder)), ModelConfig(name="Qwen/Qwen3-8B-FP8")):
        assert fetch.model_source(model, Path("made"), with_weights=True, trained=True) == str(folder)
        assert fetch.needs_plain_copy(model)
    assert fetched == ["files", "weights", "files"]


def test_plain_model_needs_no_copy(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert not fetch.needs_plain_copy(ModelConfig(path=str(folder)))


def test_training_uses_the_plain_copy_if_it_exists(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps(FP8))
    (copy := tmp_path / "run" / "model").mkdir(parents=True)
    model = ModelConfig(path=str(folder))
    assert fetch.model_source(model, copy, with_weights=True, trained=True) == str(copy)
    assert fetch.policy_source(model, copy) == str(copy)
    assert fetch.policy_source(model, tmp_path / "other") == str(folder)
    assert fetch.model_source(model, copy, with_weights=True) == str(folder)


ADAPTER = json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"})


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        (
            {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""},
            "is an adapter of Qwen/Qwen3-0.6B .* use Qwen/Qwen3-0.6B, or",
        ),
        (
            {"adapter_config.json": "[]", "config.json": "{}"},
            "is an adapter .*does not name its base model; set base_model_name_or_path",
        ),
        ({"model-Q4_K_M.gguf": "", "config.json": "{}"}, r"has only weights for llama.cpp \(model-Q4_K_M.gguf\)"),
        ({"model_index.json": "{}"}, "is a pipeline of diffusers"),
        (
            {"pytorch_model.bin": "", "config.json": "{}"},
            r"no safetensors weights \(pytorch_model.bin is a pickle\), .*python -c",
        ),
    ],
)
def test_folder_without_own_safetensors_is_refused_by_its_format(
    files: dict[str, str], refusal: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    model = ModelConfig(path=str(tmp_path))
    (found,) = check_model_folder(model, here=True)
    assert found.key == ("model", "path")
    assert re.search(refusal, found.message)
    with pytest.raises(RoleError, match=refusal) as refused:
        refuse_other_formats(tmp_path, "model.path", str(tmp_path))
    assert str(refused.value) == f"model.path: {found.message}"
    (tmp_path / "model.safetensors").touch()
    assert format_refusal(tmp_path, str(tmp_path)) is None


def test_adapter_in_the_cache_of_the_hub_is_refused_before_its_weights(folder: Path, fetched: list[str]) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").write_text(ADAPTER)
    with pytest.raises(RoleError, match=r"model\.name: org/my-lora is an adapter of Qwen/Qwen3-0.6B"):
        fetch.model_source(ModelConfig(name="org/my-lora"), Path("made"), with_weights=True, trained=True)
    assert fetched == ["files"]
