"""Configuration changes between the attempts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrun.inspect.configurations import Change, attempts_kept, changed_fields, describe_changes, list_edits
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom

Json = dict[str, Any]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "attempts").mkdir()
    return RunPaths(tmp_path)


def config(**fields: Any) -> Json:
    base = {"uid": "u", "max_steps": 20, "optimizer": {"lr": 1e-5}, "checkpoint": {"resume": {"policy": "Never"}}}
    return {"format_version": 1, "trainer": base | fields, "inference": None, "orchestrator": base | fields}


def begin(paths: RunPaths, attempt: int, base_step: int, document: Json | None, mark: str = "") -> None:
    record = {"attempt": attempt, "base_step": base_step, "started_at": 1.7e9, "config_hash": mark}
    paths.attempt_file(attempt).write_text(json.dumps(record))
    if document is not None:
        paths.attempt_config(attempt).write_text(json.dumps(document))


def read(paths: RunPaths, fork: ForkedFrom | None = None) -> tuple[str, list[Any]]:
    kept = attempts_kept(paths, lambda path: path.open("rb"), fork, lambda document: document)
    found = list_edits(kept)
    return describe_changes(kept, found), found


def test_changed_fields_show_attempt_step_and_values(paths: RunPaths) -> None:
    begin(paths, 1, 0, config())
    begin(paths, 2, 10, config())
    begin(paths, 3, 14, config(max_steps=40, optimizer={"lr": 2e-5}))
    words, (edit,) = read(paths)
    assert words == "Edited once in 3 attempts."
    assert (edit.attempt, edit.first_step, edit.started, edit.known) == (3, 15, "2023-11-14T22:13:20Z", True)
    assert edit.changes == (Change("max_steps", "20", "40"), Change("optimizer.lr", "1e-05", "2e-05"))


def test_newest_change_is_listed_first(paths: RunPaths) -> None:
    for attempt, steps in enumerate((20, 30, 30, 40), start=1):
        begin(paths, attempt, attempt * 5, config(max_steps=steps))
    words, found = read(paths)
    assert (words, [edit.attempt for edit in found]) == ("Edited twice in 4 attempts.", [4, 2])


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "No attempt has started yet, so there are no changes."),
        (1, "Never edited: the run has had one attempt."),
        (3, "Never edited: all 3 attempts started with the same configuration."),
    ],
)
def test_unedited_run_is_reported_as_never_edited(paths: RunPaths, count: int, words: str) -> None:
    for attempt in range(1, count + 1):
        begin(paths, attempt, attempt, config())
    assert read(paths) == (words, [])


def test_fingerprints_detect_changes_of_attempts_without_configuration(paths: RunPaths) -> None:
    begin(paths, 1, 0, None, "a")
    begin(paths, 2, 5, None, "a")
    assert read(paths)[0].endswith("according to their fingerprints.")
    begin(paths, 3, 9, config(), "b")
    words, (edit,) = read(paths)
    assert (words, edit.attempt, edit.known, edit.changes) == ("Edited once in 3 attempts.", 3, False, ())


def test_attempt_without_configuration_and_fingerprint_is_reported_unknown(paths: RunPaths) -> None:
    begin(paths, 1, 0, None)
    begin(paths, 2, 5, config())
    assert read(paths) == (
        "The configuration of attempt 1 was not saved, so it is unknown whether the run was edited.",
        [],
    )


def test_manually_started_roles_use_their_own_configuration_files(paths: RunPaths) -> None:
    for attempt, steps in ((1, 20), (2, 40)):
        begin(paths, attempt, attempt, None)
        for role in ("trainer", "orchestrator"):
            file = paths.logs(attempt, role) / "config.json"  # type: ignore[arg-type]
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps({"max_steps": steps}))
    assert read(paths)[1][0].changes == (Change("max_steps", "20", "40"),)


def test_fork_history_excludes_source_attempts(paths: RunPaths) -> None:
    begin(paths, 2, 5, None, "theirs")
    begin(paths, 3, 10, config(), "own")
    fork = ForkedFrom("other", "u", 10, 2, "/runs/other")
    assert read(paths, fork) == ("Never edited: the run has had one attempt.", [])


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_damaged_fork_record_is_ignored(paths: RunPaths, content: str) -> None:
    begin(paths, 1, 0, config())
    begin(paths, 2, 5, config())
    paths.attempt_config(2).write_text(content)
    paths.attempt_file(2).write_text(content)
    assert read(paths)[0].startswith("The configuration of attempt 2 was not saved")


def test_location_and_resume_policy_are_not_changes() -> None:
    after = config(uid="v", output_dir="/data", checkpoint={"resume": {"policy": "Latest"}})
    assert changed_fields(config(), after) == ()


def test_role_known_to_one_attempt_only_is_ignored() -> None:
    before, after = config() | {"inference": {"max_steps": 20}}, config(max_steps=40)
    del after["inference"]
    assert changed_fields(before, after) == (Change("max_steps", "20", "40"),)


def test_field_that_differs_for_one_role_names_role() -> None:
    after = config()
    after["orchestrator"]["max_steps"] = 40
    after["inference"] = {"max_model_len": 99}
    assert changed_fields(config(), after) == (
        Change("inference", "None", "–"),
        Change("max_model_len", "–", "99"),
        Change("orchestrator.max_steps", "20", "40"),
    )


def test_default_of_a_new_field_is_not_a_change() -> None:
    """A run that an upgrade restarted was not edited."""

    def trainer(**fields: Any) -> Json:
        document = config()
        return {**document, "trainer": {**document["trainer"], **fields}}

    after = trainer(router={"replay": "Off"}, later="3")
    assert [change.field for change in changed_fields(config(), after)] == ["later"]
    (change,) = changed_fields(config(), trainer(router={"replay": "Step"}))
    assert change == Change("router.replay", "–", "Step")
    assert changed_fields(trainer(router={"replay": "Step"}), trainer(router={"replay": "Off"})) != ()
