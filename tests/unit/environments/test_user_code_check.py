"""Checks of user code: equal code is loaded only once."""

from __future__ import annotations

import pytest

from rlrun.environments.process import user_code_check
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.talk import Ready, StartError


def test_equal_subjects_share_one_check_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Process:
        def __init__(self, command: Command, limits: Limits, log: Log) -> None:
            self._command, self._limits = command, limits

        async def start(self) -> Ready:
            started.append((self._command.id, self._limits.memory_bytes))
            if self._command.id == "bad":
                raise StartError("does not load", permanent=True)
            return Ready("good", True, False, 1, 1, notices=("few tasks",))

        def end(self) -> None: ...

    monkeypatch.setattr(user_code_check, "Life", Process)
    good, bad = (Command(id, {"seed": 1}) for id in ("good", "bad"))
    other = Command("good", {"seed": 2})
    little, much = Limits(memory_bytes=1), Limits(memory_bytes=2)
    subjects = [(bad, little), (good, little), (other, little), (good, little), (good, much), (bad, little)]
    notices: list[tuple[int, str]] = []
    results = user_code_check.check_subjects(subjects, lambda index, text: notices.append((index, text)))
    assert [None if result is None else result.message for result in results] == [
        "does not load", None, None, None, None, "does not load"
    ]  # fmt: skip
    assert sorted(started) == [("bad", 1), ("good", 1), ("good", 1), ("good", 2)]
    assert sorted(notices) == [(index, "few tasks") for index in (1, 2, 3, 4)]
