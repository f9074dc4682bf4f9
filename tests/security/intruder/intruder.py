"""Environment whose tasks are attacks on neighboring processes; the episode's `info` contains each result."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlrun.environments import Episode, Score, SingleTurnEnvironment, Split, Task


def variables() -> Any:
    """Return the names of the environment variables of this process, its children and its keeper."""
    import subprocess
    import sys

    child = [sys.executable, "-c", "import os; print(*os.environ)"]
    return {
        "own": sorted(os.environ),
        "child": sorted(subprocess.run(child, capture_output=True, text=True, check=True).stdout.split()),
        "keeper": _names_of(os.getppid()),
    }


def _names_of(pid: int) -> list[str] | str:
    try:
        entries = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        return sorted(entry.partition(b"=")[0].decode() for entry in entries if entry)
    except OSError as error:
        return type(error).__name__


def inspects(pid: int) -> dict[str, str]:
    """Return the result of each way to inspect a process: "refused", or the inspected data."""
    from ways import WAYS

    return {name: _try_way(way, pid) for name, way in WAYS.items()}


def _try_way(way: Callable[[int], object], pid: int) -> str:
    try:
        return repr(way(pid))[:100]
    except PermissionError:
        return "refused"


def _find_parent(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


def inspects_its_keeper() -> Any:
    return inspects(os.getppid())


def inspects_the_orchestrator() -> Any:
    return inspects(_find_parent(os.getppid()))


def inspects_the_first_process() -> Any:
    return inspects(_find_parent(_find_parent(os.getppid())))


def inspects_an_ordinary_process() -> Any:
    """Inspect its own child process, as a check that the ways work."""
    import subprocess

    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            return inspects(child.pid)
        finally:
            child.kill()


def opens_files() -> Any:
    """Return the number of files that can be open after an attempt to raise the limit."""
    import resource
    from contextlib import suppress

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: list[int] = []
    try:
        while len(opened) < 1 << 18:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for descriptor in opened:
        os.close(descriptor)
    return len(opened)


ARGUMENTS: dict[str, Any] = {}


def _get_outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return "refused" if isinstance(error, PermissionError) else type(error).__name__
    return "done"


def _plant(folder: str) -> dict[str, str]:
    """Return the result of each change in a folder that other processes read."""
    place = Path(folder)
    existing = place / "run.json"
    return {
        "module": _get_outcome(lambda: (place / "trio.py").write_text("raise SystemExit(9)")),
        "package": _get_outcome(lambda: (place / "pydantic").mkdir()),
        "link": _get_outcome(lambda: (place / "link").symlink_to("/etc/passwd")),
        **(
            {
                "change": _get_outcome(lambda: existing.write_text("[]")),
                "truncate": _get_outcome(lambda: os.truncate(existing, 0)),
                "rename": _get_outcome(lambda: existing.rename(place / "other.json")),
                "move here": _get_outcome(lambda: _write_file(Path.home() / "mine").rename(place / "mine")),
                "remove": _get_outcome((place / "other.json" if (place / "other.json").exists() else existing).unlink),
            }
            if existing.exists()
            else {}
        ),
    }


def _write_file(path: Path) -> Path:
    path.write_text("{}")
    return path


def plants_files() -> Any:
    return {name: _plant(folder) for name, folder in ARGUMENTS["places"].items()}


def signals_a_sibling() -> Any:
    """Signal a helper of the orchestrator, such as a tracker's, which is restarted whenever it ends."""
    import signal

    pid = ARGUMENTS["sibling"]
    return {"check": _get_outcome(lambda: os.kill(pid, 0)), "kill": _get_outcome(lambda: os.kill(pid, signal.SIGKILL))}


def connects_to_its_host() -> Any:
    """Connect to the host, which would start any requested process with the requested memory."""
    import json
    import socket

    load = {"op": "load", "id": "reverse-text", "args": {}, "python": None, "variables": {}, "withheld": []}
    limits = {"start_seconds": 60.0, "memory_bytes": 1 << 40, "hang_seconds": 60.0, "look_seconds": 1.0}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(ARGUMENTS["socket"])
        connection.settimeout(60)
        try:
            connection.sendall(json.dumps({**load, "limits": limits}).encode() + b"\n")
            return connection.recv(100).decode()
        except ConnectionError:
            return ""


def uses_its_own_files() -> Any:
    """Use files as honest environments do."""
    import multiprocessing
    import subprocess
    import sys
    import tempfile

    home = Path.home()
    (home / ".cache" / "data").mkdir(parents=True)
    (home / ".cache" / "data" / "a").write_text("1")
    with tempfile.TemporaryDirectory() as folder:
        (home / ".cache" / "data" / "a").rename(Path(folder, "b"))
        (Path(folder) / "helper.py").write_text("WORD = 'helper'")
        (Path(folder) / "program.py").write_text("import helper; print(helper.WORD)")
        program = subprocess.run(
            [sys.executable, str(Path(folder) / "program.py")], capture_output=True, text=True, check=True
        )
        moved = Path(folder, "b").read_text()
    Path("relative").write_text("1")
    multiprocessing.get_context("spawn").Semaphore().acquire()
    cache = Path(os.environ["HF_HOME"], "hub")
    (cache / "model").mkdir()
    Path("/dev/null").write_text("gone")
    child = subprocess.Popen(["sleep", "60"])
    child.kill()
    return {"program": program.stdout.strip(), "moved": moved, "folder": str(Path.cwd()), "signal": child.wait()}


def needs_a_variable() -> Any:
    return os.environ["TEAM_TOKEN"]


DEEDS: dict[str, Callable[[], Any]] = {
    deed.__name__: deed
    for deed in (
        variables,
        needs_a_variable,
        opens_files,
        plants_files,
        signals_a_sibling,
        uses_its_own_files,
        connects_to_its_host,
        inspects_its_keeper,
        inspects_the_orchestrator,
        inspects_the_first_process,
        inspects_an_ordinary_process,
    )
}


class Intruder(SingleTurnEnvironment):
    """Environment that tries the deed of its task."""

    id = "intruder"

    def tasks(self, split: Split) -> Sequence[Task]:
        names = tuple(DEEDS) if split == "train" else ("held-out",)
        return [Task(id=name, prompt=[{"role": "user", "content": name}]) for name in names]

    async def run(self, task: Task, model: Any) -> Episode:
        found = DEEDS[task.id]()
        episode = await super().run(task, model)
        return Episode(episode.messages, 1, {"found": found})

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)


def intruder(**args: Any) -> Intruder:
    ARGUMENTS.update(args)
    return Intruder()


def needy(**_args: Any) -> Intruder:
    """Load only with a variable."""
    needs_a_variable()
    return Intruder()
