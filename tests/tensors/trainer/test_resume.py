"""Selection and retention of checkpoints at the start of an attempt."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.config.models.checkpoint import CheckpointConfig, ResumeConfig
from rlrun.protocol.files.attempts import (
    Attempt,
    Origin,
    Segment,
    first_attempt,
    next_attempt,
    read_attempt,
    write_attempt,
)
from rlrun.protocol.files.checkpoint_manifest import (
    ORCHESTRATOR_PART,
    TRAINER_PART,
    Manifest,
    describe_part,
    verify_files,
    write_manifest,
)
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import Artifact, RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints.resume import (
    UNREADABLE_SECONDS,
    Base,
    Beginning,
    begin_attempt,
    checkpoints_to_delete,
    choose_base,
    choose_origin,
)

LATEST = ResumeConfig()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Return a run whose attempt 1 has started."""
    paths = RunPaths(tmp_path)
    write_attempt(paths, first_attempt(world_size=2, config_hash="h"))
    return paths


def add(paths: RunPaths, step: int, attempt: int = 1, *, complete: bool = True, orchestrator: bool = True) -> Path:
    """Write a checkpoint folder."""
    path = paths.checkpoint(step, attempt)
    parts = (TRAINER_PART, ORCHESTRATOR_PART) if orchestrator else (TRAINER_PART,)
    for part in parts:
        (path / part).mkdir(parents=True)
        (path / part / "data").write_text(f"{part} {step}")
    if complete:
        entries = tuple(entry for part in parts for entry in describe_part(path, path / part))
        write_manifest(path, Manifest(step, attempt, 2, "h", entries, 0.0))
    return path


def chosen(paths: RunPaths, resume: ResumeConfig = LATEST, log: list[str] | None = None) -> Artifact | None:
    base = choose_base(paths, resume, with_orchestrator=True, log=(log if log is not None else []).append)
    return base.checkpoint if base else None


def test_new_folder_starts_from_the_model(tmp_path: Path) -> None:
    assert chosen(RunPaths(tmp_path)) is None


def test_run_without_complete_checkpoint_starts_from_model(paths: RunPaths) -> None:
    add(paths, 2, complete=False)
    assert chosen(paths) is None


def test_newest_complete_checkpoint_is_chosen(paths: RunPaths) -> None:
    for step in (2, 4):
        add(paths, step)
    add(paths, 6, complete=False)
    assert chosen(paths) == Artifact(4, 1, paths.checkpoint(4, 1))


@pytest.mark.parametrize("damage", ["shard", "missing", "manifest", "no_orchestrator"])
def test_damaged_checkpoint_is_skipped_with_logged_reason(paths: RunPaths, damage: str) -> None:
    add(paths, 2)
    path = add(paths, 4, orchestrator=damage != "no_orchestrator")
    if damage == "shard":
        (path / TRAINER_PART / "data").write_text("trainer 5")
    elif damage == "missing":
        (path / TRAINER_PART / "data").unlink()
    elif damage == "manifest":
        (path / "manifest.json").write_text('{"step": 4,')
    log: list[str] = []
    assert chosen(paths, log=log) == Artifact(2, 1, paths.checkpoint(2, 1))
    assert len(log) == 1
    assert "step 4" in log[0]


def unreadable(*folders: Path) -> Callable[[Path, Manifest], None]:
    """Return a checkpoint check that fails like a volume that cannot read these folders."""

    def check(folder: Path, manifest: Manifest) -> None:
        if folder in folders:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
        verify_files(folder, manifest)

    return check


@pytest.mark.parametrize("damaged", [False, True])
def test_run_does_not_start_from_model_while_volume_fails(paths: RunPaths, damaged: bool) -> None:
    older, newest = add(paths, 2), add(paths, 4)
    if damaged:
        (older / TRAINER_PART / "data").unlink()
    check = unreadable(newest) if damaged else unreadable(older, newest)
    with pytest.raises(RoleError, match="can be used or read; last problem") as caught:
        choose_base(paths, LATEST, with_orchestrator=True, log=lambda line: None, check=check)
    assert caught.value.code == exit_codes.STORAGE


def test_unreadable_checkpoint_is_retried_for_two_minutes(paths: RunPaths) -> None:
    older, newest = add(paths, 2), add(paths, 4)
    now = [0.0]
    beginning = Beginning(clock=lambda: now[0])

    def choose() -> Base | None:
        return choose_base(
            paths,
            LATEST,
            with_orchestrator=True,
            log=lambda line: None,
            check=unreadable(newest),
            beginning=beginning,
        )

    for now[0] in (0.0, UNREADABLE_SECONDS - 1):
        with pytest.raises(OSError, match="Input/output error"):
            choose()
    now[0] = UNREADABLE_SECONDS
    base = choose()
    assert base is not None
    assert base.checkpoint.path == older


def test_damaged_attempt_file_without_checkpoint_is_skipped(paths: RunPaths) -> None:
    add(paths, 4)
    add(paths, 2)
    base = choose_base(paths, LATEST, with_orchestrator=True)
    assert base is not None
    begin_attempt(paths, base, attempt=2, world_size=2, config_hash="h")
    paths.attempt_file(2).write_bytes(b"\x00" * 30)
    log: list[str] = []
    base = choose_base(paths, LATEST, with_orchestrator=True, log=log.append)
    assert base is not None
    assert (base.checkpoint.step, base.checkpoint.attempt) == (4, 1)
    assert ["0002.json is damaged" in line for line in log] == [True]
    assert begin_attempt(paths, base, attempt=3, world_size=2, config_hash="h").base_step == 4


def test_damaged_attempt_file_without_recorded_lineage_is_refused(paths: RunPaths) -> None:
    add(paths, 4)
    paths.attempt_file(1).write_bytes(b"\x00" * 30)
    with pytest.raises(RoleError, match=r"0001\.json is damaged: .*restore it from a copy") as caught:
        choose_base(paths, LATEST, with_orchestrator=True)
    assert caught.value.code == exit_codes.DATA


def test_required_resume_refuses_damaged_checkpoints(paths: RunPaths) -> None:
    def resume(required: bool) -> Base | None:
        return choose_base(paths, LATEST, with_orchestrator=True, required=required, log=lambda line: None)

    assert resume(required=True) is None, "no checkpoint was complete yet"
    for step in (2, 4):
        (add(paths, step) / "trainer" / "data").unlink()
    with pytest.raises(RoleError, match=r"\(steps 2, 4\) can be used.*data is missing.*another --output-dir") as caught:
        resume(required=True)
    assert caught.value.code == exit_codes.DATA
    assert resume(required=False) is None


def test_replay_accepts_checkpoint_without_orchestrator_part(paths: RunPaths) -> None:
    add(paths, 2, orchestrator=False)
    base = choose_base(paths, LATEST, with_orchestrator=False, log=lambda message: None)
    assert base is not None


def test_checkpoints_outside_the_lineage_are_not_chosen(paths: RunPaths) -> None:
    add(paths, 2)
    add(paths, 4)  # attempt 1 (a zombie) completed it after attempt 2 had started from step 2
    lineage = (Segment(1, 1, 2), Segment(2, 3, None))
    write_attempt(paths, Attempt(2, 2, 1, 2, lineage, "h", 0.0))
    assert chosen(paths) == Artifact(2, 1, paths.checkpoint(2, 1))


def test_resume_policy_never_refuses_existing_run(paths: RunPaths) -> None:
    with pytest.raises(RoleError, match="Never") as caught:
        chosen(paths, ResumeConfig(policy="Never"))
    assert caught.value.code == exit_codes.CONFIGURATION


def test_resume_policy_step_selects_or_refuses_step(paths: RunPaths) -> None:
    for step in (2, 4):
        add(paths, step)
    assert chosen(paths, ResumeConfig(policy="Step", step=2)) == Artifact(2, 1, paths.checkpoint(2, 1))
    with pytest.raises(RoleError, match=r"steps: 2, 4"):
        chosen(paths, ResumeConfig(policy="Step", step=3))


def test_attempt_number_is_unique_and_increasing(paths: RunPaths) -> None:
    with pytest.raises(RoleError, match="the next is 2") as caught:
        begin_attempt(paths, None, attempt=1, world_size=1, config_hash="h")
    assert caught.value.code == exit_codes.ATTEMPT_TAKEN
    add(paths, 2)
    base = choose_base(paths, LATEST, with_orchestrator=True, log=lambda message: None)
    begun = begin_attempt(paths, base, attempt=3, world_size=4, config_hash="h", uid="u")
    assert (begun.base_step, begun.base_attempt, begun.world_size, begun.uid) == (2, 1, 4, "u")
    with pytest.raises(RoleError, match="the next is 4"):
        begin_attempt(paths, base, attempt=2, world_size=4, config_hash="h")


def test_last_checkpoints_and_interval_are_kept() -> None:
    attempt = next_attempt(first_attempt(world_size=1, config_hash=""), 4, attempt=2, world_size=1, config_hash="")

    def artifact(step: int, writer: int) -> Artifact:
        return Artifact(step, writer, Path(f"{step}.{writer}"))

    complete = [artifact(step, 1) for step in (2, 4)] + [artifact(step, 2) for step in (6, 8, 10)]
    unfinished = [artifact(5, 2), artifact(12, 2), artifact(6, 1), artifact(12, 3)]
    gone = checkpoints_to_delete(
        sorted(complete + unfinished),
        complete=complete,
        attempt=attempt,
        config=CheckpointConfig(keep_last=2, keep_interval=4),
    )
    assert gone == [artifact(2, 1), artifact(5, 2), artifact(6, 1), artifact(6, 2)]


def other_run(paths: RunPaths, *steps: int) -> RunPaths:
    """Create another run with complete checkpoints on the same volume."""
    other = RunPaths(paths.root.parent / "other")
    write_attempt(other, first_attempt(world_size=2, config_hash="o"))
    for step in steps:
        add(other, step)
    return other


def origin_of(paths: RunPaths, resume: ResumeConfig, log: list[str] | None = None) -> int | None:
    origin = choose_origin(paths, resume, log=(log if log is not None else []).append)
    return origin.step if origin else None


def test_origin_run_is_found_by_name_or_folder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "mine")
    other = other_run(paths, 2, 4)
    assert origin_of(paths, LATEST) is None
    assert origin_of(paths, ResumeConfig(from_run="other")) == 4
    assert origin_of(paths, ResumeConfig(from_run=str(other.root))) == 4
    assert origin_of(paths, ResumeConfig(from_run="other", from_step=2)) == 2
    with pytest.raises(RoleError, match="fromStep 3, but its complete checkpoints are of steps: 2, 4") as caught:
        origin_of(paths, ResumeConfig(from_run="other", from_step=3))
    assert caught.value.code == exit_codes.CONFIGURATION
    with pytest.raises(RoleError, match=r"fromRun is none, but .* contains no run"):
        origin_of(paths, ResumeConfig(from_run="none"))
    with pytest.raises(RoleError, match="which is this run itself"):
        origin_of(paths, ResumeConfig(from_run="mine"))


def test_damaged_origin_falls_back_unless_step_is_set(tmp_path: Path) -> None:
    paths, log = RunPaths(tmp_path / "mine"), list[str]()
    other = other_run(paths, 2, 4)
    (other.checkpoint(4, 1) / TRAINER_PART / "data").unlink()
    assert origin_of(paths, ResumeConfig(from_run="other"), log) == 2
    assert "cannot start from step 4" in log[0]
    with pytest.raises(RoleError, match=r"damaged; last problem: .*data is missing") as caught:
        origin_of(paths, ResumeConfig(from_run="other", from_step=4))
    assert caught.value.code == exit_codes.DATA


def test_first_attempt_pins_the_origin_while_it_exists(tmp_path: Path) -> None:
    paths, resume = RunPaths(tmp_path / "mine"), ResumeConfig(from_run="other")
    other = other_run(paths, 2)
    origin = choose_origin(paths, resume)
    begun = begin_attempt(paths, None, attempt=1, world_size=1, config_hash="h", origin=origin)
    assert begun.origin == origin == Origin(str(other.checkpoint(2, 1)), 2, 1)
    assert read_attempt(paths.attempt_file(1)) == begun
    add(other, 4)
    assert origin_of(paths, resume) == 2, "the second attempt would start from other weights than the first"
    (other.checkpoint(2, 1) / "manifest.json").unlink()  # retention of the other run does not consider forks
    assert origin_of(paths, resume) == 4
