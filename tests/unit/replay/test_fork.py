"""Forks: the stored manifest, allowed changes and refused changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import Variation, manifest_text, parse_manifest
from rlrun.cli.main import main
from rlrun.protocol.files.attempts import first_attempt
from rlrun.protocol.files.checkpoint_manifest import Manifest, describe_part, write_manifest
from rlrun.protocol.files.paths import Artifact, RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom, fork_document, read_fork
from rlrun.replay import fork_run
from rlrun.replay.step_files import Recorded, ReplayError
from rlrun.runtime import exit_codes
from tests.unit.replay.test_find import config

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
QUICKSTART = ROOT / "examples" / "quickstart.yaml"


def manifests() -> list[Path]:
    return [path for path in EXAMPLES if "\nkind: RLRun" in f"\n{path.read_text()}"]


@pytest.mark.parametrize("path", manifests(), ids=lambda path: path.stem)
def test_stored_manifest_equals_user_manifest(path: Path) -> None:
    run = parse_manifest(path.read_text(), str(path))[0]
    again = parse_manifest(manifest_text(run.spec, "other"), "kept")[0]
    pods = {role: {"env", "env_from"} for role in ("trainer", "inference", "orchestrator")}
    assert again.spec.model_dump(exclude=pods) == run.spec.model_dump(exclude=pods)
    assert again.metadata.name == "other"


def test_variables_of_pods_are_not_kept() -> None:
    document = yaml.safe_load(QUICKSTART.read_text())
    document["spec"]["trainer"]["env"] = [{"name": "TOKEN", "value": "hunter2"}]
    run = parse_manifest(yaml.safe_dump(document), "x")[0]
    assert "hunter2" not in manifest_text(run.spec, "a")


def changed(*changes: str) -> tuple[dict[str, Any], RLRunSpec]:
    text = QUICKSTART.read_text()
    before = parse_manifest(text, "x")[0].spec
    after = parse_manifest(text, "x", Variation(fork_run._read_options(changes)))[0].spec
    return fork_run._changed_fields(before, after), after


def test_changes_are_named_with_both_values() -> None:
    found, after = changed("trainer.optimizer.lr=1e-3", "spec.maxSteps=200", "checkpoint.resume.policy=Never")
    assert found == {"maxSteps": (120, 200), "trainer.optimizer.lr": (1.5e-4, 1e-3)}
    fork_run._refuse_fork(found, after, 20)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("model.dtype=bfloat16", "model.dtype"),
        ("trainer.lora.rank=4", "trainer.lora"),
        ("trainer.optimizer.name=sgd", "trainer.optimizer.name"),
        ("trainer.optimizer.moments=int8", "trainer.optimizer.moments"),
    ],
)
def test_change_incompatible_with_checkpoint_is_refused(change: str, field: str) -> None:
    found, after = changed(change)
    with pytest.raises(ReplayError, match=f"{field} cannot be changed: the checkpoint") as error:
        fork_run._refuse_fork(found, after, 20)
    assert error.value.code == exit_codes.CONFIGURATION


def test_fixed_fields_exist_in_manifest() -> None:
    known = parse_manifest(QUICKSTART.read_text(), "x")[0].spec.model_dump(by_alias=True)
    for path in fork_run.FIXED:
        value: Any = known
        for part in path.split("."):
            assert part in value, path
            value = value[part]


def test_fork_without_remaining_steps_or_assignment_is_refused() -> None:
    found, after = changed("maxSteps=20")
    with pytest.raises(ReplayError, match="maxSteps is 20, but the checkpoint is at step 20"):
        fork_run._refuse_fork(found, after, 20)
    with pytest.raises(ReplayError, match="expected FIELD=VALUE"):
        fork_run._read_options(["maxSteps"])


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Write a run with checkpoints of steps 4 and 8; the second one has no orchestrator state."""
    paths = RunPaths(tmp_path)
    parts = {4: ("trainer", "orchestrator"), 8: ("trainer",)}
    for step, names in parts.items():
        folder = paths.checkpoint(step, 1)
        for name in names:
            (folder / name).mkdir(parents=True)
            (folder / name / "file").write_text("x")
        entries = [entry for name in names for entry in describe_part(folder, folder / name)]
        write_manifest(folder, Manifest(step, 1, 1, "h", tuple(entries), 0.0))
    found = tuple(Artifact(step, 1, paths.checkpoint(step, 1)) for step in parts)
    return Recorded(paths, config(tmp_path), None, first_attempt(world_size=1, config_hash="h"), found, {})


def test_fork_uses_given_checkpoint_or_suggests_nearest(recorded: Recorded) -> None:
    assert fork_run._find_checkpoint(recorded, 4).step == 4
    with pytest.raises(ReplayError, match=r"of steps 4, 8; use the nearest earlier one with --step 4;") as error:
        fork_run._find_checkpoint(recorded, 6)
    assert error.value.code == exit_codes.USAGE
    with pytest.raises(ReplayError, match=r"step_00000008.a0001 has no orchestrator part"):
        fork_run._find_checkpoint(recorded, None)
    (recorded.paths.checkpoint(4, 1) / "trainer" / "file").write_text("y")
    with pytest.raises(ReplayError, match=r"is unusable: .*differs from the manifest"):
        fork_run._find_checkpoint(recorded, 4)


def test_folder_without_manifest_requires_manifest_option(recorded: Recorded) -> None:
    with pytest.raises(
        ReplayError, match=r"runs of older releases have no manifest in their folder, .* --manifest FILE"
    ):
        fork_run._read_specs(recorded.paths, "a", (), None)


def test_names_fit(recorded: Recorded) -> None:
    assert fork_run._default_name("run", 20) == "run-20"
    assert len(fork_run._default_name("r" * 40, 12345)) == 40


def test_damaged_fork_record_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "fork.json"
    assert read_fork(file) is None
    origin = ForkedFrom("a", "u", 3, 1, "/runs/a", ("maxSteps 1 -> 2",))
    file.write_text(fork_document(origin))
    assert read_fork(file) == origin
    file.write_text('{"forkedFrom": {"run": 3}}')
    assert read_fork(file) is None


@pytest.mark.parametrize("words", [["fork", "no-such-run"], ["replay", "no-such-run", "--step", "3"]])
def test_cluster_run_error_recommends_pull(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == exit_codes.USAGE
    assert "`rlrun pull no-such-run run --to DIR`" in capsys.readouterr().err
