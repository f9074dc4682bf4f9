"""Damaged attempt files: the run continues from its complete checkpoints, or the error names the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlrun.protocol.files.attempts import Attempt, Origin, first_attempt, next_attempt, write_attempt
from rlrun.protocol.files.checkpoint_manifest import (
    Manifest,
    complete_checkpoints,
    describe_part,
    newest_attempt,
    write_manifest,
)
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from tests.support.damage import damages

ORIGIN = Origin("/other/checkpoints/step_00000009.a0001", 9, 1)


class History:
    """Folder of attempts and their checkpoints."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.log: list[str] = []
        self.attempts: list[Attempt] = []

    def begin(self, base_step: int | None = None) -> Attempt:
        """Start the next attempt from a checkpoint of the previous attempt, or the first attempt."""
        number = len(self.attempts) + 1
        if base_step is None:
            attempt = first_attempt(world_size=2, config_hash="h", attempt=number, origin=ORIGIN)
        else:
            attempt = next_attempt(self.attempts[-1], base_step, attempt=number, world_size=2, config_hash="h")
        write_attempt(self.paths, attempt)
        self.attempts.append(attempt)
        return attempt

    def save(self, attempt: Attempt, step: int, *, recorded: bool = True) -> Path:
        """Complete a checkpoint. `recorded`: with the lineage, as the current release does."""
        folder = self.paths.checkpoint(step, attempt.attempt)
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "a").write_text(f"step {step}")
        manifest = Manifest(step, attempt.attempt, 2, "h", tuple(describe_part(folder, folder / "trainer")), 1.0)
        if recorded:
            manifest = replace(manifest, lineage=attempt.lineage, origin=attempt.origin)
        write_manifest(folder, manifest)
        return folder

    def damage(self, number: int) -> None:
        """Damage an attempt's file."""
        self.paths.attempt_file(number).write_bytes(b"\x00" * 40)

    def newest(self) -> Attempt | None:
        """Return the newest attempt as a role finds it."""
        self.log.clear()
        return newest_attempt(self.paths, self.log.append)

    def owned(self) -> list[tuple[int, int]]:
        """Return step and attempt of the run's complete checkpoints."""
        attempt = self.newest()
        assert attempt is not None
        return [(one.step, one.attempt) for one in attempt.owned(complete_checkpoints(self.paths))]


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Write attempt 1 with steps 2 and 4, and attempt 2 from step 2 with step 3. Step 4 of attempt 1 is not part of the run."""
    made = History(tmp_path)
    first = made.begin()
    made.save(first, 2)
    made.save(first, 4)
    second = made.begin(2)
    made.save(second, 3)
    return made


def test_undamaged_file_is_used_without_a_warning(history: History) -> None:
    assert history.owned() == [(2, 1), (3, 2)]
    assert history.log == []


def test_damaged_newest_file_is_replaced_by_a_manifest(history: History) -> None:
    content = history.paths.attempt_file(2).read_bytes()
    replaced = 0
    for what, damaged in damages(content, every=20):
        history.paths.attempt_file(2).write_bytes(damaged)
        assert history.owned() == [(2, 1), (3, 2)], what
        found = history.newest()
        assert found is not None
        assert (found.lineage, found.origin) == (history.attempts[1].lineage, ORIGIN), what
        assert (found.base_step, found.base_attempt, found.attempt) == (2, 1, 2)
        if history.log:
            replaced += 1
            assert ["0002.json is damaged: the manifest of step 3" in line for line in history.log] == [True]
    assert replaced > 20


def test_attempt_without_checkpoint_is_treated_as_unfinished(history: History) -> None:
    history.begin(3)
    history.damage(3)
    assert history.owned() == [(2, 1), (3, 2)]
    assert ["0003.json is damaged: attempt 3 has no complete checkpoint" in line for line in history.log] == [True]


def test_damaged_files_without_checkpoint_cause_new_start(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.begin()
    history.damage(1)
    assert history.newest() is None
    assert len(history.log) == 1


def test_checkpoints_of_an_earlier_release_are_never_dropped(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.save(history.begin(), 2)
    history.save(history.begin(2), 3, recorded=False)
    history.damage(2)
    with pytest.raises(RoleError, match=r"0002\.json is damaged: .*restore it from a copy"):
        history.newest()


@pytest.mark.parametrize("spoil", [lambda file: file.write_bytes(b"{"), lambda file: file.unlink()])
def test_older_manifest_replaces_damaged_newest_manifest(history: History, spoil: Callable[[Path], object]) -> None:
    newest = history.save(history.attempts[1], 5)
    spoil(newest / "manifest.json")
    history.damage(2)
    found = history.newest()
    assert found is not None
    assert found.lineage == history.attempts[1].lineage
