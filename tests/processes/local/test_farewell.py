"""Last output of a local run after a signal or a failure: saved state and the command to continue."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlrun.api.resource import RLRunSpec
from rlrun.local import local_command as launcher
from rlrun.local import summary
from rlrun.local.local_command import add_options, not_yet, run_spec
from rlrun.local.preflight import PreflightError
from rlrun.local.process_plan import RoleProcess, plan_processes
from rlrun.local.summary import Farewell
from rlrun.protocol.files.checkpoint_manifest import FileEntry, Manifest, write_manifest
from rlrun.protocol.files.launcher_record import read_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from tests.support.waiting import wait_until

SPEC = RLRunSpec.model_validate({"task": "SFT", "model": {"tiny": {}}, "data": {"sources": [{"path": "chats.jsonl"}]}})
COMMAND = "rlrun local run.yaml"
WAITS = "import time\ntime.sleep(600)"
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('deaf', 'w')\n{WAITS}"
FAILS = "import sys\nprint('RuntimeError: the optimizer has no state')\nsys.exit(3)"


def write_checkpoint(paths: RunPaths, step: int, size: int = 3 << 20) -> None:
    folder = paths.checkpoint(step, 1)
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(step, 1, 1, "c", (FileEntry("trainer/a", size, 0),), 1.0))


def write_metrics(paths: RunPaths, last: int) -> None:
    lines = [{"step": n, "loss": 1.0} for n in range(1, last + 1)]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def farewell_lines(paths: RunPaths, **changed: Any) -> list[str]:
    known = Farewell(paths, "runs/a", f"{COMMAND} --output-dir runs/a --resume", trains=True)
    return list(replace(known, **changed).lines())


def test_farewell_lists_saved_state_folders_and_continue_command(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    again = f"{COMMAND} --output-dir runs/a --resume"
    assert farewell_lines(paths) == [
        "  saved:    no checkpoint is complete, so the run starts again at step 1",
        f"  continue: {again}",
    ]
    write_metrics(paths, 9)
    assert farewell_lines(paths)[0].endswith("starts again at step 1; steps 1 to 9 are trained again")
    write_checkpoint(paths, 4)
    write_checkpoint(paths, 8)
    paths.checkpoint(10, 1).mkdir()  # This checkpoint is incomplete.
    for attempt in (1, 2):
        paths.logs(attempt, "trainer").mkdir(parents=True)
    paths.traces.mkdir()
    paths.exports.mkdir()
    assert farewell_lines(paths, failed=True) == [
        "  saved:    step 8 in runs/a/checkpoints/step_00000008.a0001 (3.0 MiB)",
        "  lost:     step 9 is trained again",
        "  logs:     runs/a/logs/attempt_0002",
        "  traces:   runs/a/traces",
        "  exports:  runs/a/exports",
        "  model:    rlrun export runs/a --output DIR",
        "  why:      rlrun why runs/a",
        f"  repair the cause, then continue: {again}",
    ]
    assert "will not be requested again" in farewell_lines(paths, trains=False)[0]
    (paths.checkpoint(8, 1) / "manifest.json").write_text("{}")
    paths.metrics.write_text("{torn")
    assert farewell_lines(paths)[0] == "  saved:    step 8 in runs/a/checkpoints/step_00000008.a0001"


def test_full_volume_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "volume_is_full", lambda _: True)
    full = "  full:     the volume is full: you can delete traces/, exports/ and logs/ of the folder"
    assert farewell_lines(RunPaths(tmp_path))[-2] == full


class Played:
    """A run with scripts as roles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.paths, self._patch = RunPaths(folder), monkeypatch
        self.out = io.StringIO()
        self.grace_seconds = 30

    def roles(self, trainer: str = WAITS, orchestrator: str = WAITS) -> None:
        """Replace the roles with scripts."""
        scripts = {"trainer": trainer, "orchestrator": orchestrator}

        def stand_ins(*args: Any, **kwargs: Any) -> list[RoleProcess]:
            return [
                replace(one, command=(sys.executable, "-c", scripts[one.role]))
                for one in plan_processes(*args, **kwargs)
            ]

        self._patch.setattr(launcher, "plan_processes", stand_ins)

    def run(self, *words: str) -> int:
        """Run to the end; return the exit code."""
        parser = launcher.Parser("rlrun local", "")
        add_options(parser)
        options: Namespace = parser.parse_args(["--output-dir", str(self.paths.root), "--plain", *words])
        checkpoint = SPEC.checkpoint.model_copy(update={"grace_period_seconds": self.grace_seconds})
        spec = SPEC.model_copy(update={"checkpoint": checkpoint})
        return run_spec(spec, name="a", options=options, console=Console(file=self.out, width=60), command=COMMAND)

    @property
    def lines(self) -> list[str]:
        """Return the lines of output."""
        return self.out.getvalue().splitlines()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.setattr(launcher, "prepare_model", lambda *_: None)
    found = Played(monkeypatch, tmp_path / "runs" / "a")
    found.roles()
    return found


def act_when(condition: Callable[[], bool], *acts: Callable[[], object]) -> threading.Thread:
    """Run actions as soon as a condition holds."""

    def wait() -> None:
        for act, at in zip(acts, (condition, *(lambda: True,) * (len(acts) - 1)), strict=True):
            wait_until(at)
            act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def send_signal(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def is_watched(played: Played) -> Callable[[], bool]:
    return lambda: read_record(played.paths.launcher) is not None


def test_signal_during_model_creation_stops_everything(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        send_signal()
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "prepare_model", interrupted)
    assert played.run() == 130
    assert played.lines == [
        "interrupted: everything is stopped",
        "  saved:    no checkpoint is complete, so the run starts again at step 1",
        "  continue: rlrun local run.yaml --output-dir runs/a --resume",
    ], "a command is one line, however narrow the terminal is"
    monkeypatch.setattr(launcher, "prepare_model", lambda *_: None)
    thread = act_when(is_watched(played), send_signal)
    assert played.run("--resume") == 130, "the command goes on"
    thread.join()


def test_signal_before_first_write_starts_nothing(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "check_trackers", interrupted)
    assert played.run() == 130
    assert played.lines == ["interrupted: nothing was started"]


def test_signal_before_launcher_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert not_yet(interrupted) == 130
    assert capsys.readouterr().err.strip() == "interrupted: nothing was started"


@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, ""), (signal.SIGTERM, " by SIGTERM")])
def test_signal_during_training_prints_saved_state(played: Played, number: int, by: str) -> None:
    def trained() -> None:
        write_metrics(played.paths, 5)
        write_checkpoint(played.paths, 4)
        send_signal(number)

    thread = act_when(is_watched(played), trained)
    assert played.run() == 130
    thread.join()
    assert played.lines[-6:] == [
        f"interrupted{by}: everything is stopped",
        "  saved:    step 4 in runs/a/checkpoints/step_00000004.a0001 (3.0 MiB)",
        "  lost:     step 5 is trained again",
        "  logs:     runs/a/logs/attempt_0001",
        "  model:    rlrun export runs/a --output DIR",
        "  continue: rlrun local run.yaml --output-dir runs/a --resume",
    ]
    assert (
        "stopping: the last trained step is being saved (press Ctrl-C again to stop immediately without saving)"
        in played.lines
    )
    assert "starting trainer, orchestrator" in played.lines
    assert "data chats.jsonl: 35 B" in played.lines


def test_second_signal_stops_at_once(played: Played) -> None:
    played.roles(trainer=DEAF)
    thread = act_when(
        lambda: is_watched(played)() and Path("deaf").is_file(),
        send_signal,
        lambda: act_when(lambda: "stopping:" in played.out.getvalue(), send_signal),
    )
    played.grace_seconds = 3600  # Longer than any test may take.
    assert played.run() == 130
    thread.join()
    assert played.lines[-1].startswith("  continue:")


def test_failed_role_is_reported_with_its_log(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    played.roles(trainer=FAILS)
    assert played.run() == 3
    lines = capsys.readouterr().err.strip().splitlines()
    assert "error: trainer ended with exit code 3" in lines[0]
    assert "  | RuntimeError: the optimizer has no state" in lines
    assert lines[-6:] == [
        "stopping the other processes",
        "everything is stopped",
        "  saved:    no checkpoint is complete, so the run starts again at step 1",
        "  logs:     runs/a/logs/attempt_0001",
        "  why:      rlrun why runs/a",
        "  repair the cause, then continue: rlrun local run.yaml --output-dir runs/a --resume",
    ]


def test_failed_model_creation_is_reported_with_fix(
    played: Played, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise PreflightError("the tiny model could not be created (exit code 1)", exit_codes.FAILURE)

    monkeypatch.setattr(launcher, "prepare_model", broken)
    assert played.run() == exit_codes.FAILURE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: the tiny model could not be created (exit code 1)"
    assert lines[-1] == "  repair the cause, then continue: rlrun local run.yaml --output-dir runs/a --resume"


def test_interrupted_run_prints_no_error_words(played: Played) -> None:
    thread = act_when(is_watched(played), send_signal)
    played.run()
    thread.join()
    text = played.out.getvalue().lower()
    assert [word for word in ("none", "error", "fail", "nan", "traceback", "warning") if word in text] == []


def test_folder_with_space_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played: Played) -> None:
    played.paths = RunPaths(tmp_path / "my runs")
    thread = act_when(is_watched(played), send_signal)
    played.run()
    thread.join()
    assert played.lines[-1] == "  continue: rlrun local run.yaml --output-dir 'my runs' --resume"
    shutil.rmtree(played.paths.root)
