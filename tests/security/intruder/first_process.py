"""Product process that starts the intruder: `first_process.py ENTRY DEED` prints the result of the deed.

ENTRY selects the first code: of the orchestrator, of the first process of its container or of an environment's, or of a command line. One
life of the intruder replaces the later work of that code.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlrun.cli import command_options
from rlrun.environments import Reply
from rlrun.environments.process import host
from rlrun.environments.process.containment.enclosure import make_private_folder
from rlrun.environments.process.isolated import Remote
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.talk import Talk
from rlrun.environments.stage import TaskRef
from rlrun.orchestrator import main as orchestrator
from rlrun.orchestrator.rollouts.environment_pool import _with_variables
from rlrun.pod import pod_command as pod
from rlrun.runtime.bootstrap import module_command

sys.path.insert(0, str(Path(__file__).parent))
from intruder import DEEDS


class _Echo:
    async def complete(self, messages: Any, **_: Any) -> Reply:
        return Reply(str(messages[-1]["content"]), "stop")


def _make_places() -> dict[str, str]:
    """Create folders that the orchestrator's user may write, and that other processes of the run read."""
    run = Path(tempfile.mkdtemp(prefix="run-"))
    (run / "run.json").write_text("{}")
    modules = Path(os.environ["HF_HOME"]) / "modules"
    modules.mkdir(parents=True)
    return {
        "run's folder": str(run),
        "home of the orchestrator": os.environ["HOME"],
        "folder for temporary files": tempfile.gettempdir(),
        "working directory": str(Path.cwd()),
        "folder of another environment": str(make_private_folder() / "home"),
        "modules of the hub's cache": str(modules),
    }


async def _run_deed(deed: str) -> int:
    sibling = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        return await _play_deed(deed, {"places": _make_places(), "sibling": sibling.pid})
    finally:
        with suppress(ProcessLookupError):
            sibling.kill()
        await sibling.wait()


async def _play_deed(deed: str, args: dict[str, Any]) -> int:
    return await _play_in(Life(Command("intruder:intruder", args), Limits(start_seconds=60), Log(None)), deed)


async def _play_in(life: Talk, deed: str) -> int:
    await life.start()
    task = TaskRef("train", list(DEEDS).index(deed))
    played = await life.play(task, _Echo(), timeout_seconds=60, reward_seconds=60)
    life.end()
    print(json.dumps(played.episode.info["found"]))
    return 0


def _as_orchestrator(deed: str) -> int:
    orchestrator.read_config = lambda _: SimpleNamespace(output_dir=".")  # type: ignore
    orchestrator.raise_limit = lambda _: None  # type: ignore
    return orchestrator.run_process(["--config", "x"], "x", lambda *_, **__: _run_deed(deed))


def _as_pod(deed: str) -> int:
    pod._run_command = lambda *_: asyncio.run(_run_deed(deed))  # type: ignore
    return pod.main(["orchestrator"])


def _as_container(deed: str) -> int:
    async def serve(*_: object) -> None:
        await _run_deed(deed)

    host.serve_connections = serve  # type: ignore
    host.main(["/tmp/none.sock"])
    return 0


async def _attempt_in_shared_container(deed: str) -> int:
    """The container is a process without RLRun variables."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RLRUN_")}
    command = module_command("rlrun.pod", ["environments", str(folder / "socket")])
    container = await asyncio.create_subprocess_exec(*command, env=variables)
    sibling = await asyncio.create_subprocess_exec("sleep", "60")
    args = {"places": _make_places(), "sibling": sibling.pid, "socket": str(folder / "socket")}
    wanted = _with_variables(Command("intruder:intruder", args), os.environ)
    try:
        return await _play_in(Remote(folder / "socket", wanted, Limits(start_seconds=60), Log(None)), deed)
    finally:
        for process in (sibling, container):
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


ENTRIES = {
    "shared container": lambda deed: asyncio.run(_attempt_in_shared_container(deed)),
    "container": _as_container,
    "orchestrator": _as_orchestrator,
    "pod": _as_pod,
    "command line": lambda deed: command_options.run_command_line(lambda: asyncio.run(_run_deed(deed))),
    "nothing": lambda deed: asyncio.run(_run_deed(deed)),
}

if __name__ == "__main__":
    sys.exit(ENTRIES[sys.argv[1]](sys.argv[2]))
