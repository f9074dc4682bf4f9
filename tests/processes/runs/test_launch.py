"""Local runs started from Python: launcher process, early failures, and stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlrun import Run, RunError, RunFailedError
from rlrun.protocol.files.launcher_record import LAUNCH_LOG, LAUNCH_MANIFEST, new_record, write_record
from rlrun.runs import run_process
from rlrun.runs import run_process as launching
from tests.support.programs import run_program, wait_for

LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from rlrun.protocol.files.launcher_record import new_record, write_record
from dataclasses import replace
root = Path(sys.argv[sys.argv.index("--output-dir") + 1])
ended = []
signal.signal(signal.SIGINT, lambda *_: ended.append(1))
print("starting", *sys.argv[1:], flush=True)
record = new_record("a", 1, "again")
write_record(root / "launcher.json", record)
while not ended and not (root / "go").exists():
    time.sleep(0.01)
write_record(root / "launcher.json", replace(record, state="Interrupted" if ended else "Complete"))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace `rlrun local` with a launcher without roles."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "PROGRAM", (sys.executable, str(script)))
    return tmp_path / "runs" / "a"


def make_run() -> Run:
    return Run("a", model={"tiny": {}}, environments=[{"id": "reverse-text"}], max_steps=3)


def test_run_continues_in_background_and_completes(stand_in: Path) -> None:
    run = make_run().local()
    assert run._launched is not None
    assert os.getsid(run._launched.process.pid) == run._launched.process.pid, (
        "Ctrl-C of this terminal does not reach it"
    )
    assert run.folder == stand_in
    assert (stand_in / LAUNCH_MANIFEST).read_text() == run.to_yaml()
    wait_for(lambda: run.status().phase != "Starting" or (stand_in / "launcher.json").exists())
    with pytest.raises(RunError, match=r"is already running; follow it with Run\.open\("):
        make_run().local()
    (stand_in / "go").touch()
    assert run.wait(every=0.05) is run
    assert (
        f"starting local {stand_in}/{LAUNCH_MANIFEST} --plain --output-dir {stand_in}"
        in (stand_in / LAUNCH_LOG).read_text()
    )
    with pytest.raises(RunError, match="resume it with resume=True"):
        make_run().local()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt Python, because background shells ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_interrupts_only_the_wait(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run().local()
    wait_for((stand_in / "launcher.json").exists)

    def pressed(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(run_process, "time", SimpleNamespace(sleep=pressed, monotonic=time.monotonic, time=time.time))
        with pytest.raises(KeyboardInterrupt):
            run.wait(every=0.05)
    assert run._launched is not None
    assert run._launched.poll_code() is None
    assert run.stop().status().phase == "Suspended"
    (stand_in / "go").touch()
    assert run.resume().wait(every=0.05).status().phase == "Complete"
    assert "--resume" in (stand_in / LAUNCH_LOG).read_text()


def test_record_of_previous_attempt_is_ignored(stand_in: Path) -> None:
    run = make_run().local()
    file = stand_in / "launcher.json"
    wait_for(file.exists)
    assert write_record(
        file, replace(new_record("a", 1, "again"), state="Failed")
    )  # The record is from another process than the launcher.
    assert run.status().phase == "Starting"
    run.stop()


def test_early_failure_of_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run("a", model={"path": "nothere"}, environments=[{"id": "reverse-text"}]).local()
    assert repr(run).startswith("<Run a (runs/a): ")
    with pytest.raises(RunFailedError) as caught:
        run.wait()
    text = " ".join(str(caught.value).split())
    assert "Failed: NotBegun its launcher ended with exit code 65" in text
    assert "spec.model.path: no folder nothere" in text
    assert str(run.why()) == str(caught.value)
    with pytest.raises(RunError, match="NotBegun"):
        run.wait(step=1)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import rlrun", ("pydantic", "yaml", "rlrun.runs")),
        ("from rlrun import Run", ("torch", "vllm", "kubernetes", "transformers", "numpy", "rich")),
    ],
)
def test_import_loads_no_heavy_modules(code: str, heavy: tuple[str, ...]) -> None:
    script = f"{code}\nimport sys\nprint(*[name for name in {heavy!r} if name in sys.modules])"
    assert run_program([sys.executable, "-c", script], check=True).stdout.split() == []
