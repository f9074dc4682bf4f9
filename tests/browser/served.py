"""`rlrun ui` as a separate process."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import tree_progress, wait_for_exit
from tests.support.slow import program
from tests.support.waiting import LONG_POLL_SECONDS, Wait

_MAIN = "import sys; from rlrun.cli.main import main; sys.exit(main())"


@dataclass
class Served:
    """A running server.

    Attributes:
        url: address of its page, with the trailing `/`.
        folder: served folder.
        process: server process; a test may end it.
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
    with _start_server(folder, "ui", str(folder), "--port", "0", *words) as server:
        yield server


@contextmanager
def served_team(folder: Path, api_server: str, *words: str) -> Iterator[Served]:
    """Serve the page of a team on a free port.

    Args:
        folder: folder for the account's token.
        api_server: address of a server that responds like the API server.
        words: additional options.
    """
    (folder / "token").write_text("the page's own")
    told = ("--api-server", api_server, "--account", str(folder), "--host", "127.0.0.1", "--port", "0")
    with _start_server(folder, "ui-team", *told, *words) as server:
        yield server


@contextmanager
def _start_server(folder: Path, *words: str) -> Iterator[Served]:
    command = [sys.executable, "-c", program(_MAIN, "tests.support.slow.slow_answers"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Served(_read_url(process), folder, process)
        finally:
            process.terminate()
            wait_for_exit(process)


def _read_url(process: subprocess.Popen[str]) -> str:
    """Return the address that the server prints once it listens."""
    assert process.stdout is not None
    wait, said = Wait("rlrun ui listens", tree_progress(process.pid), lambda: said, LONG_POLL_SECONDS), ""
    while "http" not in said:
        ready, _, _ = select.select([process.stdout], [], [], LONG_POLL_SECONDS)
        if ready:
            line = process.stdout.readline()
            assert line, f"rlrun ui ended: {said}"
            said += line
        else:
            wait.woke()
            wait.poll()
    return next(word for word in said.split() if word.startswith("http"))
