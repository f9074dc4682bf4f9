"""`model.class`: a model class of the user's package, from its files to published versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.inference.__main__ import main as inference_main
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling.load_weights import model_on_meta
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.recurrent import packing_of
from rlrun.trainer.proof.start_check import check_folder, load_checked, policy_check
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer
from tests.support.own_models import GatedConfig, GatedForCausalLM, MixingForCausalLM, path_of, write_model
from tests.tensors.trainer.companions import plain_logprobs
from tests.tensors.trainer.test_recurrent import make_steps

SEQ_LEN = 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def own(folder: Path, name: str = "GatedForCausalLM") -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", class_=path_of(name))


def test_own_class_trains_packed_rows_like_its_own_code(
    folder: Path, solo: Group, make_batch: Callable[..., Batch]
) -> None:
    batch = make_batch([9, 4, 13])
    model = load_checked(own(folder), str(folder), solo, seq_len=SEQ_LEN)
    assert packing_of(model) == "row"
    (packed,) = logprobs_without_gradient(model, [micro_batch(batch.samples, solo.device)])
    plain = GatedForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = torch.cat([torch.cat([t.new_zeros(1), t]) for t in plain_logprobs(plain, batch)])
    mask = torch.from_numpy(packed.numpy() != 0)
    torch.testing.assert_close(packed[mask], expected[mask], atol=1e-5, rtol=0)


def test_refusal_of_an_unknown_type_names_the_own_class_that_loads_it(folder: Path) -> None:
    named = r"model.class: package.module:Class, whose config_class has model_type 'rlrun_gated'"
    with pytest.raises(RoleError, match=named):
        model_on_meta(ModelConfig(path=str(folder)), str(folder))
    assert isinstance(model_on_meta(own(folder), str(folder)), GatedForCausalLM)


def test_own_class_learns_and_publishes_complete_files(
    folder: Path, tmp_path: Path, solo: Group, make_batch: Callable[..., Batch]
) -> None:
    steps = make_steps(str(folder), solo, None, algorithm=AlgorithmConfig(preset="sft"), model=own(folder))
    losses = [steps.train(step, make_batch([9, 4, 13], step=1), lambda: None)["loss"] for step in range(1, 4)]
    assert losses[0] > losses[1] > losses[2]
    policy, version = steps._policy, tmp_path / "version"
    files = model_files(policy.module, own(folder), str(folder))
    hf_writer.publish_version(policy.module, version, files=files, dtype="float32", group=solo)
    document = json.loads((version / "config.json").read_text())
    assert document["architectures"] == ["GatedForCausalLM"]
    assert (document["model_type"], document["gate_strength"]) == ("rlrun_gated", 2.0)
    again, before = GatedForCausalLM.from_pretrained(version), GatedForCausalLM.from_pretrained(folder)
    trained = dict(policy.module.named_parameters())
    for name, tensor in again.named_parameters():
        assert torch.equal(tensor, trained[name].to_local()), name  # type: ignore[operator]
    gate = "model.layers.1.gate.weight"
    assert not torch.equal(again.state_dict()[gate], before.state_dict()[gate])


def test_class_whose_sequences_mix_in_a_row_gets_rows_of_one(tmp_path: Path, solo: Group) -> None:
    folder = write_model(tmp_path, MixingForCausalLM)
    model = load_checked(own(folder, "MixingForCausalLM"), str(folder), solo, seq_len=SEQ_LEN)
    assert packing_of(model) == "alone"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LosingForCausalLM", r"LosingForCausalLM cannot be trained: .*gate"),
        ("Missing", r"model.class tests.support.own_models:Missing: module tests.support.own_models has no Missing"),
        ("SIZES", r"model.class .*:SIZES: SIZES is a dict, not a (function|class)"),
        ("WithoutConfig", r"WithoutConfig is not a transformers.PreTrainedModel; name a class that inherits from it"),
        ("path_of", r"path_of: function is not a transformers.PreTrainedModel"),
        ("LlamaForCausalLM_", r"transformers has another class LlamaForCausalLM, which engines would use; rename"),
    ],
)
def test_unusable_class_is_refused(folder: Path, name: str, reason: str) -> None:
    with pytest.raises(RoleError, match=reason) as caught:
        check_folder(str(folder), trust_remote_code=False, seq_len=SEQ_LEN, model_class=path_of(name))
    assert caught.value.code == exit_codes.CONFIGURATION
    assert "\n" not in str(caught.value)


def test_class_that_changes_logits_is_refused_if_engines_serve_it(folder: Path, solo: Group) -> None:
    steps = make_steps(str(folder), solo, None, model=own(folder))
    changed = own(folder, "ScaledForCausalLM")
    model = model_on_meta(changed, str(folder))
    config = steps._config.model_copy(update={"model": changed})
    with pytest.raises(RoleError, match="ScaledForCausalLM transforms its logits, which engines would not; return"):
        policy_check(config)(model, str(folder), solo, SEQ_LEN)
    supervised = config.model_copy(update={"task": "SFT"})
    assert policy_check(supervised)(model, str(folder), solo, SEQ_LEN).packing == "row"
    assert policy_check(steps._config)(model_on_meta(own(folder), str(folder)), str(folder), solo, SEQ_LEN)


def test_class_of_a_missing_module_is_refused(folder: Path) -> None:
    with pytest.raises(RoleError, match=r"model.class no_such.module:A: cannot import no_such.module \(ModuleNotFound"):
        check_folder(str(folder), trust_remote_code=False, seq_len=SEQ_LEN, model_class="no_such.module:A")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (
            path_of("UnservedForCausalLM"),
            "vLLM cannot compute UnservedForCausalLM, because its attention is not selected",
        ),
        (path_of("WithoutConfig"), "WithoutConfig is not a transformers.PreTrainedModel"),
        ("no_such.module:A", "cannot import no_such.module (ModuleNotFoundError"),
    ],
)
def test_engine_refuses_unusable_class_before_it_starts(
    path: str, reason: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = RLRunSpec.model_validate(
        {"model": {"path": str(folder), "class": path}, "environments": [{"id": "reverse-text"}]}
    )
    file = tmp_path / "run.json"
    file.write_text(resolve_spec(spec, name="run", uid="u", output_dir=str(tmp_path)).model_dump_json())
    assert inference_main(["--config", str(file)]) == exit_codes.CONFIGURATION
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"inference: model.class {path}: {reason}")


def test_files_of_another_type_are_refused(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    with pytest.raises(RoleError, match=r"GatedConfig has model_type 'rlrun_gated', but config.json of .* has 'llama'"):
        model_on_meta(own(folder), str(folder))


def test_files_of_an_own_type_need_its_class(folder: Path) -> None:
    with pytest.raises(RoleError, match="rlrun_gated"):
        model_on_meta(ModelConfig(path=str(folder)), str(folder))


def test_own_class_is_not_registered_for_other_models(folder: Path) -> None:
    """A teacher of another type in the same process must keep the class of transformers."""
    import transformers

    model_on_meta(own(folder), str(folder))
    assert not hasattr(transformers, "GatedForCausalLM")
    assert GatedConfig.model_type not in transformers.CONFIG_MAPPING


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"path": "/m", "class": "no path"}, "the import path of a class, such as my_package.models:MyForCausalLM"),
        ({"tiny": {}, "class": "a.b:C"}, r"class \(a.b:C\) needs name or path: a tiny model has its own class"),
        (
            {"path": "/m", "class": "a.b:C", "trustRemoteCode": True},
            r"class \(a.b:C\) replaces the code of the model's repository; remove class or trustRemoteCode",
        ),
    ],
)
def test_wrong_value_of_the_field_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelConfig.model_validate(values)
