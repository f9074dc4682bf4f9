"""Probe of `benchmarks.tracking`, which shows that a run writes nothing for trackers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.python_path import before

PROBE = Path(__file__).parents[3] / "benchmarks" / "probe"


def read_notes(code: str, folder: Path, port: int) -> list[str]:
    """Return the notes of a process that runs this code."""
    notes = folder / "notes.txt"
    environ = {
        **os.environ, "PYTHONPATH": before(PROBE),
        "PROBE_NOTES": str(notes), "PROBE_FOLDER": str(folder / "tracking"), "PROBE_PORT": str(port),
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    return [line.rpartition(": ")[2] for line in notes.read_text().splitlines()] if notes.exists() else []


def test_probe_notes_only_tracker_files_and_connections(tmp_path: Path) -> None:
    (tmp_path / "tracking").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as tracker, socket.create_server(("127.0.0.1", 0)) as other:
        port, elsewhere = tracker.getsockname()[1], other.getsockname()[1]
        connect = "import socket; socket.create_connection(('127.0.0.1', {})).close()"
        harmless = f"open({str(tmp_path / 'metrics.jsonl')!r}, 'a').write('x'); {connect.format(elsewhere)}"
        assert read_notes(harmless, tmp_path, port) == []
        file = tmp_path / "tracking" / "wandb.sent"
        assert read_notes(f"open({str(file)!r}, 'a').write('x')", tmp_path, port) == [str(file)]
        assert read_notes(connect.format(port), tmp_path, port)[1:] == [f"port {port}"]
