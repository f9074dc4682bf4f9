"""Mistakes of users: each gives one clear message and an exit code, and leaves no process."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlrun.runtime import exit_codes
from tests.e2e.local.local_run import LocalRun, processes_of, quickstart

pytestmark = pytest.mark.full
REPLAYED_STEPS = 20
"""Step limit; the volume is filled after the second step."""


def refused(run: LocalRun, *options: str) -> tuple[int, str]:
    """Start a run that must be refused; return its exit code and its output."""
    run.start(*options)
    code = run.wait()
    assert "Traceback" not in run.output
    assert processes_of(run.folder) == []
    return code, run.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": {"optmizer": {"lr": 1}}}, "optmizer"),
        ({"maxSteps": "many"}, "maxSteps"),
        ({"environments": [{"id": "revrse-text"}]}, "did you mean reverse-text?"),
        ({"environments": [{"id": "reverse-text", "args": {"lenght": 3}}]}, "lenght"),
        ({"orchestrator": {"batchSize": 100}}, "set batchSize to 96 or 104"),
    ],
)
def test_wrong_manifest_is_refused_with_its_field(
    new_run: Callable[..., LocalRun], change: dict[str, Any], message: str
) -> None:
    code, output = refused(new_run(quickstart(**change)))
    assert code == exit_codes.CONFIGURATION
    assert message in output
    assert len(output.splitlines()) <= 4


def test_port_in_use_is_refused(new_run: Callable[..., LocalRun]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        code, output = refused(new_run(quickstart()), "--inference-port", str(port))
    assert code == exit_codes.UNAVAILABLE
    assert f"port {port} (inference)" in output


def test_model_folder_without_weights_is_refused(new_run: Callable[..., LocalRun], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    document = quickstart()
    document["spec"]["model"] = {"path": str(tmp_path)}
    code, output = refused(new_run(document))
    assert code == exit_codes.DATA
    assert f"{tmp_path} has no weights" in output


def test_non_empty_output_folder_is_refused(new_run: Callable[..., LocalRun], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    code, output = refused(new_run(quickstart(), folder=tmp_path))
    assert code == exit_codes.CONFIGURATION
    assert "is not empty: add --resume" in output
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """Mount a volume of 160 MiB."""
    if os.geteuid() != 0:
        pytest.fail("a small volume needs root to be mounted; run the tests as root, or deselect this one")
    folder = tmp_path / "volume"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Fill the volume except for the lines of a log, so that no model fits."""
    with path.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(b"\0" * 65536)
        file.truncate(path.stat().st_size - 512 * 1024)


def test_full_disk_delays_the_run_until_space_returns(
    new_run: Callable[..., LocalRun], learned: LocalRun, small_volume: Path
) -> None:
    document = quickstart(
        model_folder=learned.folder / "model",
        maxSteps=REPLAYED_STEPS,
        evaluation=None,
        trainer={"processesPerReplica": 1},
    )
    run = new_run(document, folder=small_volume / "out")
    run.start("--replay", str(learned.folder / "rollouts"))
    run.wait_until(lambda: (run.folder / "metrics.jsonl").exists() and len(run.steps()) > 1, "two steps")
    fill(small_volume / "ballast")
    run.wait_until(lambda: "cannot publish the weights of step" in run.tails(), "the trainer tells that it waits")
    assert "the volume is full: " in run.tails()
    (small_volume / "ballast").unlink()
    assert run.wait() == exit_codes.OK, run.output + run.tails()
    assert [line["step"] for line in run.steps()] == list(range(1, REPLAYED_STEPS + 1))
    assert "Traceback" not in run.output
    assert processes_of(run.folder) == []
