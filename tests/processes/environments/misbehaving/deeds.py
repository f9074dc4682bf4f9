"""Deeds that an episode survives, or that fail only that episode."""

from __future__ import annotations

import asyncio
import gc
import json
import locale
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlrun.environments import EpisodeError

Deed = Callable[[], Any]
IN_RUN: dict[str, Deed] = {}
"""Deeds before the model request; awaitables are awaited."""
EPISODES: dict[str, Deed] = {}
"""Deeds that create the episode: a dictionary of changes, or the episode itself."""
SCORES: dict[str, Deed] = {}
"""Deeds that create the score."""
HELD: list[Any] = []


def deed(kind: dict[str, Deed]) -> Callable[[Deed], Deed]:
    def add(function: Deed) -> Deed:
        kind[function.__name__] = function
        return function

    return add


# ---- exceptions


class OwnBaseException(BaseException):
    pass


class SilentError(Exception):
    def __str__(self) -> str:
        raise OwnBaseException

    __repr__ = __str__


class MaskedError(Exception):
    """Exception that raises on every access."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise OwnBaseException

    def __getattribute__(self, name: str) -> Any:
        raise OwnBaseException

    def __str__(self) -> str:
        raise OwnBaseException


def raising(name: str, make: Callable[[], BaseException], kind: dict[str, Deed] = IN_RUN) -> None:
    def raises() -> None:
        raise make()

    kind[name] = raises


raising("raises_base_exception", lambda: OwnBaseException("all is lost"))
raising("raises_generator_exit", GeneratorExit)
raising("raises_keyboard_interrupt", KeyboardInterrupt)
raising("raises_cancelled_error", asyncio.CancelledError)
raising("raises_system_exit", lambda: SystemExit(4))
raising("raises_stop_iteration", StopIteration)
raising("raises_group", lambda: ExceptionGroup("two", [ValueError("row 9"), KeyError("k")]))
raising("raises_base_group", lambda: BaseExceptionGroup("two", [OwnBaseException("lost"), SystemExit(4)]))
raising("raises_without_text", SilentError)
raising("raises_what_is_masked", MaskedError)
raising("raises_long_text", lambda: ValueError("x" * 10_000_000))
raising("raises_surrogates", lambda: ValueError("\ud800"))
raising("lies_about_its_end", lambda: EpisodeError("crash", "other", "other", "its process was shot", death=7))
raising("score_exits", lambda: SystemExit(4), SCORES)
raising("score_raises_base_exception", lambda: OwnBaseException("all is lost"), SCORES)
raising("score_raises_cancelled_error", asyncio.CancelledError, SCORES)


@deed(IN_RUN)
def raises_in_a_circle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


@deed(IN_RUN)
def recurses() -> None:
    recurses()


# ---- the event loop


@deed(IN_RUN)
async def stops_the_loop() -> None:
    for _ in range(3):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)


@deed(IN_RUN)
async def cancels_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


@deed(IN_RUN)
async def background_task_exits() -> None:
    async def exits() -> None:
        sys.exit(4)

    HELD.append(asyncio.ensure_future(exits()))
    await asyncio.sleep(0.05)


@deed(IN_RUN)
async def awaited_task_exits() -> None:
    async def exits() -> None:
        sys.exit(4)

    await asyncio.gather(exits(), asyncio.sleep(0.01))


@deed(IN_RUN)
async def callback_exits() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 4)
    await asyncio.sleep(0.05)


@deed(IN_RUN)
def replaces_task_factory() -> None:
    asyncio.get_running_loop().set_task_factory(lambda *_, **__: 1 / 0)


@deed(IN_RUN)
def replaces_exception_handlers() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: sys.exit(4))
    sys.excepthook = threading.excepthook = lambda *_: os._exit(4)


@deed(IN_RUN)
def interrupts_itself() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # The signal is ignored if the tests were started in the background.
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


@deed(IN_RUN)
async def swallows_its_end() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


# ---- shared state of the process


@deed(IN_RUN)
def replaces_json() -> None:
    json.dumps = json.loads = None  # type: ignore[assignment]


@deed(IN_RUN)
def replaces_the_clock() -> None:
    time.monotonic = lambda: 0.0
    time.time = lambda: 0.0


@deed(IN_RUN)
def replaces_asyncio() -> None:
    asyncio.timeout = asyncio.wait_for = asyncio.Task = asyncio.ensure_future = None  # type: ignore


@deed(IN_RUN)
def clears_the_environment() -> None:
    os.environ.clear()


@deed(IN_RUN)
def removes_its_folder() -> None:
    folder = Path("/tmp", f"hostile-{os.getpid()}")
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


@deed(IN_RUN)
def changes_settings() -> None:
    os.umask(0o777)
    gc.disable()
    warnings.simplefilter("error")
    locale.setlocale(locale.LC_ALL, "C")
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@deed(IN_RUN)
def lowers_the_recursion_limit() -> None:
    for limit in range(1, 1000):
        try:
            sys.setrecursionlimit(limit)
            return
        except RecursionError:
            continue


@deed(IN_RUN)
def takes_all_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    while True:
        HELD.append(os.open("/dev/null", os.O_RDONLY))


@deed(IN_RUN)
def takes_memory() -> None:
    bytearray(2_000_000_000)


@deed(IN_RUN)
def starts_endless_threads() -> None:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(600,), daemon=False).start()


@deed(IN_RUN)
def floods_its_output() -> None:
    for descriptor in (1, 2):
        for _ in range(300):
            os.write(descriptor, b'{"op":"played","rollout":1,"reward":1}\n' * 300)


@deed(IN_RUN)
def closes_standard_streams() -> None:
    for descriptor in (0, 1, 2):
        os.close(descriptor)


@deed(IN_RUN)
def fills_the_disk() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x" * 1000)


@deed(IN_RUN)
def lets_a_fork_return() -> None:
    os.fork()


def sockets() -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:"):
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if copy.family == socket.AF_UNIX and copy.type == socket.SOCK_STREAM:
                    found.append(int(entry.name))
    return found


@deed(IN_RUN)
def answers_for_others() -> None:
    score: dict[str, Any] = {"reward": 1, "metrics": {}, "messages": [], "replies": 1, "info": {}, "task_id": "x"}
    for descriptor in sockets():
        for number in range(1, 50):
            os.write(descriptor, json.dumps({"op": "played", "rollout": number, **score}).encode() + b"\n")
