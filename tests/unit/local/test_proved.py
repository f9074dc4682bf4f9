"""Cached proofs that a model is trainable: valid for the same files, packages and code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.config.models.language_models import ModelConfig
from rlrun.local import judge, proved_models
from rlrun.local.user_code import Finding

KEY = ("model", "path")


def write_weights(path: Path, names: dict[str, Any], values: bytes) -> None:
    header = json.dumps(names).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a model folder and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    write_weights(model / "model.safetensors", {"a": {"shape": [2]}}, b"12345678")
    return model


def spec_of(folder: Path) -> RLRunSpec:
    environments = [{"id": "reverse-text"}]
    model = {"path": str(folder)}
    return RLRunSpec.model_validate({"model": model, "maxSteps": 1, "environments": environments})


def name_of(folder: Path, *, seq_len: int = 64) -> str:
    name = proved_models.proof_name(folder, seq_len=seq_len)
    assert name is not None
    return name


def other_configuration(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


def other_names(folder: Path) -> None:
    write_weights(folder / "model.safetensors", {"b": {"shape": [2]}}, b"12345678")


def fewer_values(folder: Path) -> None:
    write_weights(folder / "model.safetensors", {"a": {"shape": [2]}}, b"1234")


@pytest.mark.parametrize("change", [other_configuration, other_names, fewer_values])
def test_another_model_is_another_proof(folder: Path, change: Callable[[Path], None]) -> None:
    before = name_of(folder)
    change(folder)
    assert name_of(folder) != before


def test_other_packages_code_or_lengths_are_another_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name_of(folder), name_of(folder, seq_len=128)}
    monkeypatch.setattr(proved_models, "version", lambda package: f"another {package}")
    names.add(name_of(folder))
    monkeypatch.setattr(proved_models, "_OWN", ("trainer",))
    assert len(names | {name_of(folder)}) == 4


def test_proof_name_ignores_weight_values_and_folder(folder: Path) -> None:
    before = name_of(folder)
    write_weights(folder / "model.safetensors", {"a": {"shape": [2]}}, b"87654321")
    assert name_of(folder.rename(folder.with_name("elsewhere"))) == before


def test_unreadable_weights_have_no_cached_proof(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()
    assert proved_models.proof_name(folder, seq_len=64) is None
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    assert proved_models.proof_name(folder, seq_len=64) is None


def test_successful_proof_is_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, asked = spec_of(folder), []
    refused: list[Finding] = [Finding(KEY, "cannot be trained")]

    def check(*_: object, models: list[object], **__: object) -> list[Finding]:
        asked.append(len(models))
        return refused

    monkeypatch.setattr(judge, "check_model_folder", lambda *_, **__: ())
    monkeypatch.setattr(judge, "check_model_weights", lambda *_, **__: ())
    monkeypatch.setattr(judge, "check_template_arguments", lambda *_, **__: ())
    monkeypatch.setattr(judge, "size_findings", lambda *_: ())
    monkeypatch.setattr(judge, "check_user_code", check)
    judge.find_problems(spec, here=True)
    refused.clear()
    judge.find_problems(spec, here=True, left_out=[("model",)])
    judge.find_problems(spec, here=True)
    judge.find_problems(spec, here=True)
    assert asked == [1, 1, 1, 0], "one that was refused, or not looked at, is made again"


def test_models_with_custom_code_are_never_cached(folder: Path) -> None:
    model = ModelConfig(path=str(folder), trust_remote_code=True)
    [proof] = proved_models.list_proofs({KEY: model}, (), seq_len=64)
    proved_models.keep_proofs([proof], ())
    assert len(proved_models.list_proofs({KEY: model}, (), seq_len=64)) == 1


def test_unwritable_cache_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "config.json"))
    proved_models.keep_proof("name")
    assert not proved_models.is_proved("name")
