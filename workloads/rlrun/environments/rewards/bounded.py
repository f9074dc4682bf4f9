"""Calls of plain functions in other processes, with a time limit that also stops code that computes.

A thread cannot be killed, and a reward that computes in the environment's event loop would delay every other episode. The processes are
children of the environment's process and end with it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlrun.runtime.bootstrap import python_command

T = TypeVar("T")
IMPORT_SECONDS = 60.0
"""Time limit for the start of a process and the import and preparation of a function, which do not count as time of the call."""
_LENGTH = struct.Struct("!Q")


class BoundedCallError(RuntimeError):
    """Error for a function that raised or did not finish."""


class UnfinishedCallError(BoundedCallError):
    """Error for a function that did not return before its deadline, or whose process ended during the call."""


class ImportTimeError(BoundedCallError):
    """Error for a function whose module was not imported in time, so that it was not called."""


class BoundedCalls:
    """Pool of processes that call functions.

    Args:
        processes: largest number of simultaneous calls.
        timeout_seconds: time limit of one call.
        prepare: function that is called once in each process before the first call, outside of its time limit. Its errors are ignored.
        name: name of the called function in messages. None: its qualified name.
    """

    def __init__(
        self,
        *,
        processes: int = 2,
        timeout_seconds: float = 10.0,
        prepare: Callable[[], object] | None = None,
        name: str | None = None,
    ) -> None:
        self._timeout_seconds, self._prepare, self._name = timeout_seconds, prepare, name
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[_Caller] = []

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`. The function must belong to a module; arguments and result must support pickling.

        Raises:
            BoundedCallError: the function raised, its process ended, or its time limit passed. In the last case the process is killed.
            UnfinishedCallError: the process ended or the time limit passed, after the function had been imported.
        """
        name = self._name or f"{function.__module__}.{function.__qualname__}"
        async with self._slots:
            caller = self._idle.pop() if self._idle else _Caller()
            prepared = False
            try:
                async with asyncio.timeout(IMPORT_SECONDS):
                    await caller.prepare(function.__module__, self._prepare)
                prepared = True
                async with asyncio.timeout(self._timeout_seconds):
                    good, value = await caller.call_function((function, arguments))
            except BaseException as error:
                caller.kill()
                if isinstance(error, TimeoutError) and not prepared:
                    message = f"the modules that {name} needs were not imported within {IMPORT_SECONDS:g} seconds"
                    raise ImportTimeError(message) from error
                if isinstance(error, TimeoutError):
                    raise UnfinishedCallError(
                        f"{name} did not finish within {self._timeout_seconds:g} seconds"
                    ) from error
                if isinstance(error, OSError | EOFError):
                    kind = UnfinishedCallError if prepared else BoundedCallError
                    raise kind(f"the process that computed {name} ended") from error
                raise
            self._idle.append(caller)
        if not good:
            raise BoundedCallError(f"{name} raised {value}")
        result: T = value
        return result

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().kill()


class _Caller:
    """A process that calls functions one after the other."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._prepared: set[str] = set()
        with theirs:
            self._process = subprocess.Popen(
                python_command(__name__, [str(theirs.fileno())]),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    async def prepare(self, module: str, prepare: Callable[[], object] | None) -> None:
        if module not in self._prepared:
            await self.call_function((importlib.import_module, (module,)))
            if prepare is not None:
                await self.call_function((prepare, ()))
            self._prepared.add(module)

    async def call_function(self, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[bool, Any]:
        loop = asyncio.get_running_loop()
        data = pickle.dumps(call)
        await loop.sock_sendall(self._socket, _LENGTH.pack(len(data)) + data)
        (length,) = _LENGTH.unpack(await self._receive_bytes(_LENGTH.size))
        answer: tuple[bool, Any] = pickle.loads(await self._receive_bytes(length))
        return answer

    async def _receive_bytes(self, count: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), bytearray()
        while len(parts) < count:
            part = await loop.sock_recv(self._socket, count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


def main(argv: Sequence[str]) -> None:
    """Entry point of a calling process: answer calls until the connection is closed."""
    descriptor = int(argv[0])
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        while head := stream.read(_LENGTH.size):
            data = stream.read(_LENGTH.unpack(head)[0])
            try:
                function, arguments = pickle.loads(data)
                value = function(*arguments)
                answer = pickle.dumps((True, None if function is importlib.import_module else value))
            except Exception as error:
                answer = pickle.dumps((False, f"{type(error).__name__}: {error}"))
            stream.write(_LENGTH.pack(len(answer)) + answer)
            stream.flush()
