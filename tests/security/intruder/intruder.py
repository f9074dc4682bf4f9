"""An environment whose tasks are attempts on what runs beside it; what each of them got is in the episode's `info`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlrun.environments import Episode, Score, SingleTurnEnvironment, Split, Task


def variables() -> Any:
    """Names of the environment variables of this process, of its children and of its keeper."""
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
    """What came of each way to look into a process: "refused", or what it was good for."""
    from ways import WAYS

    return {name: _tried(way, pid) for name, way in WAYS.items()}


def _tried(way: Callable[[int], object], pid: int) -> str:
    try:
        return repr(way(pid))[:100]
    except PermissionError:
        return "refused"


def _parent(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


def inspects_its_keeper() -> Any:
    return inspects(os.getppid())


def inspects_the_orchestrator() -> Any:
    return inspects(_parent(os.getppid()))


def inspects_the_first_process() -> Any:
    return inspects(_parent(_parent(os.getppid())))


def inspects_an_ordinary_process() -> Any:
    """Of its own: to see that the ways are ways."""
    import subprocess

    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            return inspects(child.pid)
        finally:
            child.kill()


def opens_files() -> Any:
    """How many files it can have open, after an attempt to raise its limit."""
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


def needs_a_variable() -> Any:
    return os.environ["TEAM_TOKEN"]


DEEDS: dict[str, Callable[[], Any]] = {
    deed.__name__: deed
    for deed in (
        variables,
        needs_a_variable,
        opens_files,
        inspects_its_keeper,
        inspects_the_orchestrator,
        inspects_the_first_process,
        inspects_an_ordinary_process,
    )
}


class Intruder(SingleTurnEnvironment):
    """Tries what its task names."""

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


def intruder(**_args: Any) -> Intruder:
    return Intruder()


def needy(**_args: Any) -> Intruder:
    """Does not load without a variable."""
    needs_a_variable()
    return Intruder()
