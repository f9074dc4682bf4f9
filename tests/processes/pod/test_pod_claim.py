"""Claim of a run's folder in a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pod_harness import Pod, run_config

from rlrun.config.models.run_config import RunConfig
from rlrun.pod.container_settings import Signals
from rlrun.pod.preparation import VOLUME_POLL_SECONDS, claim_folder, claim_when_possible, has_begun
from rlrun.protocol.files import run_folder
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "demo"


def claim_run_folder(config: RunConfig, attempt: int = 1) -> list[str]:
    """Claim the folder and return the messages."""
    said: list[str] = []
    claim_folder(RunPaths(Path(config.trainer.output_dir)), config, attempt, say=said.append)
    return said


def read_recorded(root: Path) -> Any:
    return json.loads((root / "run.json").read_text())["trainer"]


def get_refusal(config: RunConfig) -> RoleError:
    before = RunPaths(Path(config.trainer.output_dir)).run_json.read_text()
    with pytest.raises(RoleError) as caught:
        claim_run_folder(config)
    assert RunPaths(Path(config.trainer.output_dir)).run_json.read_text() == before
    return caught.value


def test_new_run_writes_configuration_next_to_existing_logs(root: Path) -> None:
    (root / "logs").mkdir(parents=True)
    assert claim_run_folder(run_config(root)) == []
    assert read_recorded(root)["uid"] == "uid-1"
    assert claim_run_folder(run_config(root)) == []


def test_changed_configuration_is_recorded(root: Path) -> None:
    claim_run_folder(run_config(root))
    assert "replacing run.json" in claim_run_folder(run_config(root, maxSteps=200), 2)[0]
    assert read_recorded(root)["max_steps"] == 200


def test_each_attempt_keeps_its_initial_configuration(root: Path) -> None:
    claim_run_folder(run_config(root))
    claim_run_folder(run_config(root), 2)
    claim_run_folder(run_config(root, maxSteps=200), 3)
    kept = [json.loads(RunPaths(root).attempt_config(n).read_text())["trainer"]["max_steps"] for n in (1, 2, 3)]
    assert kept == [100, 100, 200]
    assert RunPaths(root).attempts_on_disk() == []


@pytest.mark.parametrize("policy", [{"policy": "Latest"}, {"policy": "Step", "step": 20}])
def test_earlier_run_with_same_name_is_continued(root: Path, policy: dict[str, Any]) -> None:
    claim_run_folder(run_config(root))
    said = claim_run_folder(run_config(root, uid="uid-2", checkpoint={"resume": policy}))
    assert "UID uid-1: continuing it" in said[0]
    assert read_recorded(root)["uid"] == "uid-2"


def test_never_policy_refuses_earlier_run_but_allows_restart(root: Path) -> None:
    never = {"resume": {"policy": "Never"}}
    claim_run_folder(run_config(root, checkpoint=never))
    assert claim_run_folder(run_config(root, checkpoint=never)) == []
    error = get_refusal(run_config(root, uid="uid-2", checkpoint=never))
    assert error.code == exit_codes.CONFIGURATION
    assert "spec.checkpoint.resume.policy is Never" in str(error)
    assert "uid-1" in str(error)
    assert "set the policy to Latest" in str(error)


def test_claim_with_another_model_is_refused(root: Path) -> None:
    claim_run_folder(run_config(root))
    error = get_refusal(run_config(root, model={"path": "other"}))
    assert error.code == exit_codes.CONFIGURATION
    assert "spec.model differs from the run in" in str(error)
    assert "path 'm' there, path 'other' here" in str(error)
    assert "metadata.name" in str(error)


def test_damaged_file_and_full_volume_are_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_run_folder(run_config(root))
    (root / "run.json").write_text('{"trainer": {')
    assert "run.json" in str(get_refusal(run_config(root)))
    monkeypatch.setattr(run_folder, "MIN_FREE_BYTES", 1 << 60)
    error = get_refusal(run_config(root))
    assert error.code == exit_codes.STORAGE
    assert "spec.storage" in str(error)


class Patience(Signals):
    """Signals that count the pauses and run an action in the third."""

    def __init__(self, third: Callable[[], None]) -> None:
        self.pauses: list[float] = []
        self._third = third

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == 3:
            self._third()


def test_pod_waits_for_space_with_message(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_folder, "MIN_FREE_BYTES", 1 << 60)
    signals = Patience(lambda: monkeypatch.setattr(run_folder, "MIN_FREE_BYTES", 1))
    claim_when_possible(RunPaths(root), run_config(root), 1, say=said.append, signals=signals)
    assert signals.pauses == [VOLUME_POLL_SECONDS] * 3
    assert (root / "run.json").is_file()
    assert said[0].startswith("waiting for the run's volume since 0 s: the volume is full: ")


def test_pod_does_not_wait_for_missing_permission(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(RoleError, match="Permission denied") as caught:
        claim_when_possible(RunPaths(root), run_config(root), 1, say=print, signals=Patience(lambda: None))
    assert caught.value.code == exit_codes.STORAGE


def test_only_attempts_of_same_run_count(root: Path) -> None:
    paths = RunPaths(root)
    write_attempt(paths, first_attempt(world_size=1, config_hash="h", uid="uid-1"))
    assert has_begun(paths, "uid-1")
    assert not has_begun(paths, "uid-2")
    paths.attempt_file(2).write_text("{}")
    with pytest.raises(RoleError, match=r"0002\.json is damaged: .*; change the RLRun's"):
        has_begun(paths, "uid-2")
    write_attempt(paths, first_attempt(world_size=1, config_hash="h", attempt=3, uid="uid-3"))
    assert has_begun(paths, "uid-3"), "the damaged file of another attempt ends nothing"


@pytest.mark.parametrize(("policy", "code"), [("Latest", 0), ("Never", exit_codes.DATA)])
def test_damaged_attempt_file_ends_pod_only_with_never_policy(
    tmp_path: Path, root: Path, policy: str, code: int
) -> None:
    paths = RunPaths(root)
    write_attempt(paths, first_attempt(world_size=1, config_hash="h", uid="uid-1"))
    paths.attempt_file(1).write_text("{}")
    guest = GUEST | {"checkpoint": {"resume": {"policy": policy}}}
    pod = Pod(tmp_path, "demo-orchestrator-2", run_config(root, **guest), "127.0.0.1", "127.0.0.1")
    found, _, _ = pod.run("orchestrator", "print('asks for a slot')", RLRUN_ATTEMPT="2")
    assert found == code, pod.message


GUEST = {"trainer": {"sharedWith": "host", "lora": {}}, "checkpoint": {"resume": {"policy": "Never"}}}


def start_guest(tmp_path: Path, root: Path, attempt: int) -> tuple[int, str]:
    """Start a guest's orchestrator with a role that ends at once; return its exit code and termination message."""
    pod = Pod(tmp_path, f"demo-orchestrator-{attempt}", run_config(root, **GUEST), "127.0.0.1", "127.0.0.1")
    code, _, _ = pod.run("orchestrator", "print('asks for a slot')", RLRUN_ATTEMPT=str(attempt))
    return code, pod.message


def test_guest_orchestrator_claims_the_run_folder(tmp_path: Path, root: Path) -> None:
    assert start_guest(tmp_path, root, 1) == (0, "")
    assert read_recorded(root)["shared_with"] == "host"
    assert read_recorded(root)["checkpoint"]["resume"]["policy"] == "Never"
    write_attempt(RunPaths(root), first_attempt(world_size=1, config_hash="c", uid="uid-1"))
    assert start_guest(tmp_path, root, 2) == (0, "")
    assert read_recorded(root)["checkpoint"]["resume"]["policy"] == "Latest", "a restart goes on from its checkpoint"
    code, message = start_guest(tmp_path, root, 1)
    assert (code, "the next is 2" in message) == (exit_codes.ATTEMPT_TAKEN, True), message
