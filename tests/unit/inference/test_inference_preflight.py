"""Validation of folders before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlrun.inference.engine_settings import InferenceSettings
from rlrun.inference.weights import preflight
from rlrun.inference.weights.preflight import (
    INDEX,
    FolderError,
    check_adapter,
    check_model,
    check_weights,
    tensor_shapes,
)


def weights(folder: Path, tensors: dict[str, tuple[int, ...]], complete: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: np.zeros(s, np.float32) for k, s in tensors.items()}, folder / "model.safetensors")
    if complete:
        (folder / "COMPLETE").touch()
    return folder


def test_shapes_of_single_and_sharded_folders(tmp_path: Path) -> None:
    single = weights(tmp_path / "single", {"a": (2, 3), "b": (1,)})
    assert tensor_shapes(single) == {"a": (2, 3), "b": (1,)}
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    save_file({"a": np.zeros((2, 3))}, sharded / "x-1.safetensors")
    save_file({"b": np.zeros(1)}, sharded / "x-2.safetensors")
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}))
    assert tensor_shapes(sharded) == {"a": (2, 3), "b": (1,)}
    (sharded / "x-2.safetensors").unlink()
    with pytest.raises(FolderError, match=r"lacks x-2\.safetensors"):
        tensor_shapes(sharded)


@pytest.mark.parametrize(
    "content", [b"", b"123", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{x"]
)
def test_invalid_safetensors_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FolderError, match=r"model\.safetensors is not a complete safetensors file"):
        tensor_shapes(tmp_path)


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "a/" * 3000, "\ud800", "loop", "loop/x", ""])
def test_invalid_folder_path_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FolderError):
        check_weights(path, str(tmp_path), None)


@pytest.mark.parametrize(
    "config", ["", "[]", "{}", "[" * 100_000, '{"r": null}', '{"r": "4"}', '{"r": true}', '{"r": [1]}', '{"r": 1e400}']
)
def test_adapter_without_rank_is_refused(tmp_path: Path, config: str) -> None:
    folder = weights(tmp_path / "v1", {"a": (2, 3)})
    (folder / "adapter_config.json").write_text(config)
    with pytest.raises(FolderError, match="has no rank r"):
        check_adapter("v1", str(tmp_path), None, 8)


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", "[" * 100_000, '{"weight_map": 1}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "x", "b": null}}',
     '{"weight_map": {"a": "../other/model.safetensors"}}', '{"weight_map": {"a": ["x"]}}'],
)  # fmt: skip
def test_index_of_files_outside_folder_is_refused(tmp_path: Path, index: str) -> None:
    weights(tmp_path / "other", {"a": (2, 3)})
    folder = weights(tmp_path / "v1", {"a": (2, 3)})
    (folder / INDEX).write_text(index)
    with pytest.raises(FolderError, match="is not a valid safetensors index"):
        check_weights("v1", str(tmp_path), None)


@pytest.mark.parametrize("cut", [1, 20])
def test_truncated_safetensors_file_is_refused(tmp_path: Path, cut: int) -> None:
    file = weights(tmp_path / "w", {"a": (4, 4)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(FolderError, match="is not a complete safetensors file"):
        tensor_shapes(file.parent)


def test_weights_must_be_inside_complete_and_fit(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    expected = {"a": (2, 3), "b": (1,)}
    good = weights(root / "v1", expected)
    weights(root / "extra", expected | {"more": (1,)})
    assert check_weights(str(good), str(root), expected) == good
    assert check_weights("v1", str(root), None) == good
    weights(tmp_path / "outside", expected)
    (root / "link").symlink_to(tmp_path / "outside")
    weights(root / "lacking", {"a": (2, 3)})
    weights(root / "other", {"a": (2, 3), "b": (2,)})
    weights(root / "writing", expected, complete=False)
    for path, message in {
        "../outside": "not below the weights folder",
        "link": "not below the weights folder",
        "/etc": "not below the weights folder",
        ".": "not below the weights folder",
        "v2": "does not exist",
        "writing": "has no COMPLETE file",
        "extra": "contains the tensor more",
        "lacking": "lacks the tensor b",
        "other": r"tensor b has shape \(2,\), the served model \(1,\)",
    }.items():
        with pytest.raises(FolderError, match=message):
            check_weights(path, str(root), expected)


def model_settings(path: str) -> InferenceSettings:
    return InferenceSettings(model_path=path, served_model_name="m", weights_dir="/w", api_key="0123456789")


def test_model_with_an_encoder_needs_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    weights(tmp_path, {"a": (1,)})
    one = dataclasses.replace(model_settings(str(tmp_path)), language_model_only=True)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "torchvision" else object())
    with pytest.raises(FolderError, match=r"need torchvision, .*run pip install torchvision"):
        check_model(one)
    assert check_model(model_settings(str(tmp_path))) == {"a": (1,)}
    monkeypatch.setattr(preflight, "find_spec", lambda name: object())
    assert check_model(one) == {"a": (1,)}


def test_model_folder_needs_config_tokenizer_and_weights(tmp_path: Path) -> None:
    assert check_model(model_settings("Qwen/Qwen3-0.6B")) is None
    for missing in (str(tmp_path / "no"), "./no", "a/b/c"):
        with pytest.raises(FolderError, match="does not exist"):
            check_model(model_settings(missing))
    steps = [("config.json", "no config"), ("tokenizer.json", "no tokenizer"), ("", "safetensors")]
    for name, message in steps:
        with pytest.raises(FolderError, match=f"^model: .*{message}"):
            check_model(model_settings(str(tmp_path)))
        if name:
            (tmp_path / name).write_text("{}")
    weights(tmp_path, {"a": (1,)})
    assert check_model(model_settings(str(tmp_path))) == {"a": (1,)}
