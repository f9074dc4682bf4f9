"""Exported model folders: loadable by transformers and equal to the trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from rlrun.cli.main import main
from rlrun.config.models.checkpoint import ExportConfig
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.shard import load_model, shard_model
from rlrun.trainer.proof.small_models import small_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import export
from rlrun.trainer.weights.hf_writer import publish_version
from tests.support.sets import few_in_gate


@pytest.fixture
def save(tmp_path: Path, solo: Group) -> Callable[[nn.Module], Path]:
    """Return a function that writes a model's checkpoint."""

    def save(model: nn.Module) -> Path:
        shard_model(model, solo)
        optimizer = make_optimizer(model, OptimizerConfig(), solo.device)
        saver = Saver({POLICY: Part(model, optimizer)}, solo, background=False)
        saver.save(Progress(3), tmp_path / "checkpoint")
        return tmp_path / "checkpoint"

    return save


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_exported_checkpoint_equals_published_model(
    tmp_path: Path,
    solo: Group,
    make_model: Callable[..., nn.Module],
    save: Callable[[nn.Module], Path],
    family: str,
    tied: bool,
) -> None:
    from rlrun.trainer.modeling.tiny_model import make_tokenizer

    model = make_model(family, tied=tied)
    model.save_pretrained(tmp_path / "source")  # type: ignore[operator]
    make_tokenizer().save_pretrained(tmp_path / "source")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)  # differs from the source
    source, config = str(tmp_path / "source"), ModelConfig(path=str(tmp_path / "source"), dtype="float32")
    exported = export.export_checkpoint(save(model), tmp_path / "out", config, source, step=3, shard_bytes=30_000)
    publish_version(
        model,
        tmp_path / "published",
        files=model_files(model, config, source),
        dtype="float32",
        group=solo,
        shard_bytes=30_000,
    )

    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "published").iterdir() if path.name != "COMPLETE")
    assert sum(name.endswith(".safetensors") for name in files) > 2
    for name in files:
        if not name.endswith((".safetensors", ".jinja")):
            one, other = (json.loads((tmp_path / folder / name).read_text()) for folder in ("out", "published"))
            (
                one.pop("_name_or_path", None),
                other.pop("_name_or_path", None),
            )  # the model under test was created without a source
            assert one == other, name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = {name: tensor.to_local() for name, tensor in model.named_parameters()}  # type: ignore[attr-defined]
    assert exported.parameters == sum(tensor.numel() for tensor in expected.values())
    assert {name for name, _ in again.named_parameters()} == expected.keys()
    for name, tensor in again.named_parameters():
        assert torch.equal(tensor, expected[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == make_tokenizer().vocab_size

    export.export_checkpoint(tmp_path / "checkpoint", tmp_path / "half", config, source, step=3, dtype="bfloat16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    for name, tensor in half.named_parameters():
        assert torch.equal(tensor, expected[name].bfloat16()), name


@pytest.mark.parametrize(
    "kind", few_in_gate(["mixtral", "phimoe", "gpt_neox", "ernie4_5_moe"], ["mixtral", "gpt_neox"])
)
def test_export_keeps_tensor_names_of_source(
    kind: str, tmp_path: Path, source: Path, save: Callable[[nn.Module], Path]
) -> None:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    small_model(type(whole), whole.config, attention="eager", seq_len=64, seed=0).save_pretrained(source)
    expected = load_file(source / "model.safetensors")
    config = ModelConfig(path=str(source), dtype="float32")
    checkpoint = save(load_model(config, str(source)))
    export.export_checkpoint(checkpoint, tmp_path / "out", config, str(source), step=3, shard_bytes=300_000)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_exported_adapters_are_merged_like_published_ones(
    tmp_path: Path, solo: Group, source: Path, save: Callable[[nn.Module], Path]
) -> None:
    config, adapters = ModelConfig(path=str(source), dtype="float32"), LoRAConfig(rank=4, modules_to_save=["lm_head"])
    model = load_model(config, str(source))
    lora.inject_adapters(model, adapters)
    torch.manual_seed(1)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter.data, std=0.1)
    checkpoint = save(model)
    files = model_files(model, config, str(source))
    publish_version(model, tmp_path / "published", files=files, dtype="float32", group=solo)
    export.export_checkpoint(checkpoint, tmp_path / "out", config, str(source), step=3, adapters=adapters)
    found, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "published"))
    base = AutoModelForCausalLM.from_pretrained(source)
    for name, tensor in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), tensor), name
        frozen = "norm" in name or "embed" in name
        assert torch.equal(base.get_parameter(name), tensor) == frozen, name


def test_export_of_another_models_checkpoint_is_refused(
    tmp_path: Path, source: Path, make_model: Callable[..., nn.Module], save: Callable[[nn.Module], Path]
) -> None:
    checkpoint = save(make_model("llama"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(RoleError, match=r"lacks 9 parameters, such as model\.layers\.2") as caught:
        export.export_checkpoint(checkpoint, tmp_path / "out", ModelConfig(path=str(source)), str(source), step=3)
    assert caught.value.code == exit_codes.DATA
    assert not (tmp_path / "out").exists()


def test_export_remains_after_its_version_is_deleted(tmp_path: Path) -> None:
    version = tmp_path / "weights/v00000003.a0001"
    version.mkdir(parents=True)
    for name in ("config.json", "model-00001-of-00001.safetensors", "COMPLETE"):
        (version / name).write_text(name)
    export.export_version(version, tmp_path / "exports/step_00000003.a0001")
    export.export_version(version, tmp_path / "exports/step_00000003.a0001")  # repeated after an interrupted export
    for path in version.iterdir():
        path.unlink()
    found = {path.name: path.read_text() for path in (tmp_path / "exports/step_00000003.a0001").iterdir()}
    assert found == {name: name for name in ("config.json", "model-00001-of-00001.safetensors")}


def test_export_interval_selects_steps() -> None:
    def steps(config: ExportConfig) -> list[int]:
        return [step for step in range(1, 8) if export.is_due(config, step, last=step == 7)]

    assert steps(ExportConfig()) == [7]
    assert steps(ExportConfig(interval=3)) == [3, 6, 7]
    assert steps(ExportConfig(interval=3, at_end=False)) == [3, 6]
    assert steps(ExportConfig(at_end=False)) == []


def test_export_command_reports_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> tuple[int, str]:
        return main(["export", *words]), capsys.readouterr().err

    code, message = said(str(tmp_path / "none"), "--output", str(tmp_path / "out"))
    assert code == exit_codes.USAGE
    assert "is not the folder of a run" in message
    code, message = said(str(tmp_path), "--output", str(tmp_path / "out"), "--step", "0")
    assert code == exit_codes.USAGE
    assert "--step: got '0'" in message
    code, message = said(str(tmp_path), "--output", str(tmp_path / "out"), "--dtype", "int8")
    assert code == exit_codes.USAGE
    assert "int8" in message
