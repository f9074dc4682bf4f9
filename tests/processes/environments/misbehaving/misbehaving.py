"""Environment whose tasks are misdeeds that try to harm other rollouts; only `good` behaves well."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlrun.environments import Episode, Score, SingleTurnEnvironment, Split, Task


def raises() -> None:
    raise KeyError("row 9")


def exits() -> None:
    print("so long")
    os._exit(3)


def exits_politely() -> None:
    sys.exit(4)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    os.abort()


def computes() -> None:
    while True:
        sum(range(1000))


def swallows_memory() -> None:
    bytearray(600_000_000)


def multiplies() -> None:
    for _ in range(30):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)


def garbles() -> None:
    for descriptor in range(3, 200):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\x00garbage\n")


def hangs_up() -> None:
    for descriptor in range(3, 200):
        with contextlib.suppress(OSError):
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("socket:"):
                os.close(descriptor)


def deafens() -> None:
    """Keep the event loop running but stop reading the connection."""
    loop: Any = asyncio.get_running_loop()
    for key in list(loop._selector.get_map().values()):
        if key.fd != loop._ssock.fileno():
            loop._selector.unregister(key.fd)


def prints() -> None:
    sys.stdout.write('{"op":"played","rollout":1,"reward":1}\n' * 10_000)
    os.write(2, b"\xff\x00\n" * 1000)


def lets_children_go() -> None:
    """Start a child in the group, one in its own session, and one whose parent has ended."""
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(sleep)
        os._exit(0)
    os.wait()


DEEDS: dict[str, Callable[[], None]] = {
    deed.__name__: deed
    for deed in (raises, exits, exits_politely, dies, crashes, computes, swallows_memory, multiplies, garbles)
} | {deed.__name__: deed for deed in (hangs_up, deafens, prints, lets_children_go)}
ENDED = ("multiplies", "garbles", "hangs_up", "deafens")
"""Deeds that end their process."""
ASYNC = ("leaks", "waits", "ignores", "dies_late", "gives_up", "no_json", "scores_slowly", "slow", "good")


class Misbehaving(SingleTurnEnvironment):
    """Environment whose task ids name the deeds."""

    id = "misbehaving"

    def __init__(self) -> None:
        self.hoard: list[bytearray] = []

    def tasks(self, split: Split) -> Sequence[Task]:
        names = (*DEEDS, *ASYNC) if split == "train" else ("held-out",)
        return [Task(id=name, prompt=[{"role": "user", "content": name}]) for name in names]

    async def run(self, task: Task, model: Any) -> Episode:
        if task.id in DEEDS:
            DEEDS[task.id]()
        if task.id in ("waits", *ENDED):
            await asyncio.Event().wait()
        elif task.id == "leaks":
            for _ in range(60):  # More than the limit allows, and less than the size at which an allocation fails.
                self.hoard.append(bytearray(b"x" * 4_000_000))
                await asyncio.sleep(0.005)
            await asyncio.Event().wait()
        elif task.id == "ignores":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        elif task.id == "dies_late":
            with contextlib.suppress(asyncio.CancelledError):
                await super().run(task, model)
            os._exit(3)
        elif task.id == "gives_up":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(model.complete([{"role": "user", "content": "slow"}]), 0.05)
        episode = await super().run(task, model)
        return Episode(episode.messages, 1, {"x": object()}) if task.id == "no_json" else episode

    async def score(self, task: Task, episode: Episode) -> Score:
        if task.id == "scores_slowly":
            await asyncio.sleep(60)
        return Score(1.0, {"n": 2})


def misbehaving() -> Misbehaving:
    return Misbehaving()


def slow_start() -> Misbehaving:
    time.sleep(60)
    return Misbehaving()


def dies_at_start() -> Misbehaving:
    print("no licence found")
    os._exit(7)
