"""Policies of an evaluation: discovery, selection and staging for an engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlrun.config.models.language_models import ModelConfig
from rlrun.evaluate.policies import Policy, base_policy, choose_policies, in_folder, newest_policy, of_run, served_as
from rlrun.evaluate.staging import Staging, highest_rank
from rlrun.protocol.files.attempts import first_attempt, next_attempt, write_attempt
from rlrun.protocol.files.checkpoint_manifest import MANIFEST
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMPLETE, RunPaths
from rlrun.runtime import exit_codes

BASE = Policy(None, "base", None, "model")


def write_weights(folder: Path, *, complete: bool = True, adapter: int | None = None) -> Path:
    """Write a folder like a version; with a rank, like an adapter."""
    folder.mkdir(parents=True)
    name = "model.safetensors" if adapter is None else ADAPTER_WEIGHTS
    tensors = {"q.lora_A.weight": np.ones((2, 3), np.float32), "q.lora_B.weight": np.ones((3, 2), np.float32)}
    save_file(tensors, folder / name)
    if adapter is not None:
        (folder / ADAPTER_CONFIG).write_text(json.dumps({"r": adapter}))
    if complete:
        (folder / COMPLETE).touch()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Run with an attempt 1 that trained to step 10 and an attempt 2 that continued from step 5."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    config = {"name": "r", "uid": "u1", "output_dir": str(paths.root), "model": {"tiny": {}}, "max_steps": 9}
    shared = config | {"seq_len": 64, "seed": 1, "algorithm": {}, "checkpoint": {}}
    paths.run_json.write_text(json.dumps({"trainer": shared}))
    first = first_attempt(world_size=1, config_hash="h", uid="u1")
    write_attempt(paths, first)
    write_attempt(paths, next_attempt(first, 5, attempt=2, world_size=1, config_hash="h", uid="u1"))
    return paths


def test_version_precedes_checkpoint_and_only_lineage_counts(run: RunPaths) -> None:
    write_weights(run.version(5, 1))
    write_weights(run.version(8, 1))  # Attempt 2 had branched off before this step.
    write_weights(run.version(8, 2))
    write_weights(run.version(10, 1))
    write_weights(run.version(9, 2), complete=False)
    for step in (5, 7):
        run.checkpoint(step, 2 if step > 5 else 1).mkdir(parents=True)
        (run.checkpoint(step, 2 if step > 5 else 1) / MANIFEST).touch()
    write_weights(run.export(6, 2), complete=False)
    found = of_run(run.root)
    assert {step: (policy.kind, policy.path) for step, policy in found.items()} == {
        5: ("whole", run.version(5, 1)),
        6: ("whole", run.export(6, 2)),
        7: ("checkpoint", run.checkpoint(7, 2)),
        8: ("whole", run.version(8, 2)),
    }
    assert [policy.identity for policy in found.values()] == ["u1 attempt 1", *["u1 attempt 2"] * 3]
    assert {*in_folder(run.weights)} == {5, 8}, "the run's folder of weights is of that run"
    assert in_folder(run.weights)[8] == found[8]


def test_folder_without_run_has_no_policies(tmp_path: Path) -> None:
    assert of_run(tmp_path / "none") == {}
    with pytest.raises(RoleError, match=r"--weights-dir: the folder .* does not exist"):
        in_folder(tmp_path / "none")


def test_folders_of_other_programs_are_policies(tmp_path: Path) -> None:
    for name in ("step_10", "checkpoint-20", "v00000030.a0001", "v00000030.a0002", "notes"):
        write_weights(tmp_path / name, complete=name.startswith("v"))
    write_weights(tmp_path / "v00000040.a0001", complete=False)
    write_weights(tmp_path / "step_50", adapter=4)
    (tmp_path / "step_60").mkdir()
    found = in_folder(tmp_path)
    assert {step: policy.path.name for step, policy in found.items() if policy.path} == {
        10: "step_10",
        20: "checkpoint-20",
        30: "v00000030.a0002",
        50: "step_50",
    }
    assert found[50].kind == "adapter"
    before = found[10].identity
    save_file({"other": np.zeros(7, np.float32)}, tmp_path / "step_10" / "model.safetensors")
    assert in_folder(tmp_path)[10].identity != before, "other weights under the same name are another policy"


def test_base_model_identity_depends_on_weights_not_place(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model")
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    one, same = (base_policy(ModelConfig(path=str(place)), place) for place in (folder, moved))
    assert one.identity == same.identity
    save_file({"other": np.zeros(7, np.float32)}, moved / "model.safetensors")
    assert base_policy(ModelConfig(path=str(moved)), moved).identity != one.identity
    hub = base_policy(ModelConfig(name="org/model"), None)
    assert hub.identity != base_policy(ModelConfig(name="org/model", revision="v2"), None).identity


def make_policies(*steps: int) -> dict[int, Policy]:
    return {step: Policy(step, "whole", Path("w"), str(step)) for step in steps}


@pytest.mark.parametrize(
    ("steps", "base", "expected"),
    [
        (None, False, ["base", "step 10", "step 20"]),
        (None, True, ["base"]),
        ([20, 10, 20], False, ["step 10", "step 20"]),
        ([0], True, ["base", "step 0"]),
    ],
)
def test_chosen_policies_match_options(steps: list[int] | None, base: bool, expected: list[str]) -> None:
    chosen = choose_policies(make_policies(0, 10, 20), BASE, steps=steps, with_base=base, where="runs/r")
    assert [policy.name for policy in chosen] == expected


def test_missing_step_error_lists_available_steps() -> None:
    with pytest.raises(RoleError, match="no policy of step 15, 25; the steps in runs/r are: 10, 20") as raised:
        choose_policies(make_policies(10, 20), BASE, steps=[10, 15, 25], with_base=False, where="runs/r")
    assert raised.value.code == exit_codes.USAGE
    with pytest.raises(RoleError, match="in runs/r are: none"):
        choose_policies({}, BASE, steps=[1], with_base=False, where="runs/r")
    with pytest.raises(RoleError, match="no policy in runs/r; evaluate the base model with --base"):
        newest_policy({}, "runs/r")
    assert newest_policy(make_policies(3, 12), "runs/r").step == 12


def test_engine_serves_whole_models_or_adapters() -> None:
    whole, adapter = Policy(1, "whole", Path("w"), ""), Policy(2, "adapter", Path("a"), "")
    assert served_as([BASE, whole]) == "whole"
    assert served_as([BASE, adapter]) == "adapter"
    with pytest.raises(RoleError, match=r"step 2 are adapters and step 1 complete models, .* with --steps"):
        served_as([whole, adapter])


def no_export(policy: Policy, target: Path) -> None:
    raise AssertionError("nothing is exported")


def test_staged_policy_outlives_its_version(tmp_path: Path) -> None:
    source = write_weights(tmp_path / "v")
    staging = Staging(tmp_path / "engine", no_export)
    assert staging.put(BASE, 0) is None, "the engine has it already"
    put = staging.put(Policy(10, "whole", source, ""), 1)
    assert put is not None
    assert (put / "model.safetensors").samefile(source / "model.safetensors"), "no copy"
    shutil.rmtree(source)
    assert {path.name for path in put.iterdir()} == {"model.safetensors", COMPLETE}
    staging.remove(put)
    assert not put.exists()
    with pytest.raises(RoleError, match="step 10: cannot read"):
        staging.put(Policy(10, "whole", source, ""), 2)
    staging.close()
    assert not (tmp_path / "engine").exists()


def test_checkpoint_is_exported_and_marked_complete(tmp_path: Path) -> None:
    def export(policy: Policy, target: Path) -> None:
        assert policy.step == 7
        write_weights(target, complete=False)

    put = Staging(tmp_path, export).put(Policy(7, "checkpoint", tmp_path / "c", ""), 3)
    assert put is not None
    assert (put / COMPLETE).exists()


def test_base_of_adapters_is_a_zero_adapter(tmp_path: Path) -> None:
    adapter = Policy(10, "adapter", write_weights(tmp_path / "v", adapter=2), "")
    put = Staging(tmp_path / "engine", no_export, [adapter]).put(BASE, 0)
    assert put is not None
    tensors = load_file(put / ADAPTER_WEIGHTS)
    assert not tensors["q.lora_B.weight"].any()
    assert (tensors["q.lora_A.weight"] == 1).all()
    assert json.loads((put / ADAPTER_CONFIG).read_text()) == {"r": 2}
    assert load_file(adapter.path / ADAPTER_WEIGHTS)["q.lora_B.weight"].all(), "the policy itself stays as it is"


def test_engines_start_with_highest_adapter_rank(tmp_path: Path) -> None:
    found = [Policy(rank, "adapter", write_weights(tmp_path / f"{rank}", adapter=rank), "") for rank in (8, 16, 4)]
    assert highest_rank(found) == 16
    (tmp_path / "8" / ADAPTER_CONFIG).unlink()
    with pytest.raises(RoleError, match=r"step 8: .*adapter_config.json is missing or has no rank r"):
        highest_rank(found)
