"""`rlrun ui` as a process of its own."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.slow import program

_SECONDS = 90.0
_MAIN = "import sys; from rlrun.cli.main import main; sys.exit(main())"


@dataclass
class Served:
    """A server that runs.

    Attributes:
        url: its page, with the `/`.
        folder: the one that it was given.
        process: to be ended by a test.
    """

    url: str
    folder: Path
    process: subprocess.Popen[str]

    def at(self, path: str) -> str:
        """Address of a page, such as `/run/ID`."""
        return f"{self.url}#{path}"


@contextmanager
def served(folder: Path, *words: str) -> Iterator[Served]:
    """Serve a folder on a free port."""
    with _started(folder, "ui", str(folder), "--port", "0", *words) as server:
        yield server


@contextmanager
def served_team(folder: Path, api_server: str, *words: str) -> Iterator[Served]:
    """Serve the page of a team on a free port.

    Args:
        folder: for the account's token.
        api_server: address of a server that answers as the API server.
        words: more options.
    """
    (folder / "token").write_text("the page's own")
    told = ("--api-server", api_server, "--account", str(folder), "--host", "127.0.0.1", "--port", "0")
    with _started(folder, "ui-team", *told, *words) as server:
        yield server


@contextmanager
def _started(folder: Path, *words: str) -> Iterator[Served]:
    command = [sys.executable, "-c", program(_MAIN, "tests.support.slow.slow_answers"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Served(_url(process), folder, process)
        finally:
            process.terminate()
            process.wait(_SECONDS)


def _url(process: subprocess.Popen[str]) -> str:
    """The address that it prints once it listens."""
    assert process.stdout is not None
    until, said = time.monotonic() + _SECONDS, ""
    while "http" not in said:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        line = process.stdout.readline() if ready else ""
        assert line, f"rlrun ui does not listen: {said}"
        said += line
    return next(word for word in said.split() if word.startswith("http"))
