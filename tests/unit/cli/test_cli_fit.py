"""Output and exit codes of `rlrun fit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrun.cli import validate
from rlrun.cli.main import main
from rlrun.fit.memory_parts import GIB
from rlrun.runtime import exit_codes

MODELS = Path(__file__).parents[3] / "examples" / "models"
ONE_GPU = str(MODELS / "qwen3-0-6b-gsm8k.yaml")


def test_fitting_run_is_reported_per_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", ONE_GPU, "--gpu-memory", "24Gi"]) == exit_codes.OK
    shown = capsys.readouterr().out
    assert "trainer, 1 GPU: fits" in shown
    assert "inference, 1 GPU: fits" in shown
    assert "key-value cache" in shown


def test_oversized_run_gets_recommended_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(MODELS / "qwen3-4b-math.yaml"), "--gpu-memory", "32Gi"]) == exit_codes.CONFIGURATION
    shown = capsys.readouterr().out
    assert "trainer, 4 GPUs: DOES NOT FIT" in shown
    assert "- spec.trainer.parallelism.cp: 2" in shown


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fit", str(MODELS / "qwen3-30b-a3b.yaml"), "--gpu-product", "NVIDIA-A100-SXM4-40GB", "--json"]
    assert main(argv) == exit_codes.CONFIGURATION
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    trainer = next(role for role in found["roles"] if role["role"] == "trainer")
    assert trainer["needed_gib"] == pytest.approx(sum(trainer["parts_gib"].values()), abs=0.02)
    assert all(change["needed_gib"] <= trainer["limit_gib"] for change in trainer["advice"])


def test_unsupported_attention_kernel_is_refused_despite_fitting_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer would fail at its start."""
    file = tmp_path / "run.yaml"
    file.write_text(Path(ONE_GPU).read_text().replace("  trainer:\n", "  trainer:\n    attention: fa4\n", 1))
    argv = ["fit", str(file), "--gpu-product", "NVIDIA-A100-SXM4-80GB"]
    assert main(argv) == exit_codes.CONFIGURATION
    shown = capsys.readouterr().out
    assert "  REFUSED: spec.trainer.attention: fa4: it needs a GPU of compute capability 9.x to 11.x" in shown
    assert "trainer, 1 GPU: fits" in shown
    assert main([*argv, "--json"]) == exit_codes.CONFIGURATION
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], [one["field"] for one in found["refused"]]) == (False, ["spec.trainer.attention"])
    assert main(["fit", str(file), "--gpu-product", "NVIDIA-H100-80GB-HBM3"]) == exit_codes.OK


def test_unknown_gpu_memory_is_requested(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "_local_memory", lambda: None)
    assert main(["fit", ONE_GPU]) == exit_codes.CONFIGURATION
    assert "--gpu-memory 80Gi" in capsys.readouterr().err
    assert main(["fit", ONE_GPU, "--gpu-product", "NVIDIA-X1"]) == exit_codes.CONFIGURATION
    assert "the memory of NVIDIA-X1 is unknown" in capsys.readouterr().err
    monkeypatch.setattr(validate, "_local_memory", lambda: 24 * GIB)
    assert main(["fit", ONE_GPU]) == exit_codes.OK


def test_unknown_model_requires_model_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(Path(ONE_GPU).read_text().replace("Qwen/Qwen3-0.6B", "a/b"))
    assert main(["fit", str(file), "--gpu-memory", "24Gi"]) == exit_codes.CONFIGURATION
    assert f"{file}: spec.model.name (a/b)" in capsys.readouterr().err
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128, "vocab_size": 100}))
    assert main(["fit", str(file), "--gpu-memory", "24Gi", "--model-config", str(tmp_path)]) == exit_codes.OK


def test_run_without_gpus_has_nothing_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(MODELS.parent / "quickstart.yaml")]) == exit_codes.OK
    assert "nothing to fit" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["80", "much", "0Gi"])
def test_invalid_memory_size_is_a_usage_error(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", ONE_GPU, "--gpu-memory", size]) == exit_codes.USAGE
    assert f"'{size}' is not a size of memory" in capsys.readouterr().err
