"""Run a program that a model wrote, in a sandbox without network, files to write, or other processes; see `sandbox`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlrun.environments.rewards import sandbox
from rlrun.runtime.processes import threads_of

Outcome = Literal["ok", "failed", "timeout", "output", "threads"]
"""`ok`: exit code 0. `failed`: another one, or a signal (memory and processor time included). `timeout`, `output`, `threads`: too much
of it."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_CHUNK_BYTES = 65536
_LOOK_SECONDS = 0.02
"""Time between two looks at the number of threads: no limit of the kernel counts those of one process (RLIMIT_NPROC counts a user's)."""


class SandboxUnavailableError(RuntimeError):
    """The machine cannot confine a program, so none is run."""


@dataclass(frozen=True)
class CodeLimits:
    """Resource limits of one program."""

    timeout_seconds: float = 10.0
    """Wall-clock time; processor time is bounded by the same, rounded up."""
    memory_bytes: int = 512 * 1024**2
    """Address space."""
    output_bytes: int = 64 * 1024
    """Bytes on each of stdout and stderr."""
    threads: int = 64
    """Threads at the same time; a program with more is ended at the next look, see `_LOOK_SECONDS`."""


@dataclass(frozen=True)
class Result:
    """Result of a program."""

    outcome: Outcome
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Case:
    """One test: what the program reads, and what it must print."""

    stdin: str
    stdout: str


def last_code_block(text: str) -> str | None:
    """The last fenced block of Python in a reply; None when there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


class CodeRunner:
    """Runs programs, at most `concurrency` at a time.

    Args:
        limits: of each program.
        concurrency: programs at the same time.
    """

    def __init__(self, limits: CodeLimits | None = None, *, concurrency: int = 4) -> None:
        self.limits = limits or CodeLimits()
        self._slots = asyncio.Semaphore(concurrency)

    async def run(self, code: str, stdin: str = "") -> Result:
        """Run one program of Python's standard library to its end.

        Raises:
            SandboxUnavailableError: this machine cannot confine it.
        """
        async with self._slots:
            with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as given:
                for file, text in ((program, code), (given, stdin)):
                    file.write(text.encode(errors="surrogatepass"))
                    file.seek(0)
                return await self._run(program.fileno(), given.fileno())

    async def share(self, code: str, cases: Sequence[Case]) -> float:
        """The share of cases that a program passes, in [0, 1]: it ends well and prints what is wanted, white space at the ends aside."""
        if not cases:
            raise ValueError("there are no cases to pass")
        results = await asyncio.gather(*(self.run(code, case.stdin) for case in cases))
        passed = [
            r.outcome == "ok" and r.stdout.strip() == c.stdout.strip() for r, c in zip(results, cases, strict=True)
        ]
        return sum(passed) / len(cases)

    async def _run(self, program: int, given: int) -> Result:
        limits = self.limits
        bounds = [str(program), str(int(limits.timeout_seconds) + 1), str(limits.memory_bytes)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-B", str(Path(sandbox.__file__)), *bounds),
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=[program],
            env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None

        ending = asyncio.ensure_future(process.wait())

        def kill() -> None:
            # Only while it has not been collected, so that the pid is its own; not `process.kill`, which may collect the process and
            # leave asyncio without its exit code.
            if not ending.done():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

        streams = (process.stdout, process.stderr)
        texts = [asyncio.ensure_future(_take_output(stream, limits.output_bytes, kill)) for stream in streams]
        counting = asyncio.ensure_future(_count_threads(process.pid, limits.threads, kill))
        try:
            # Both: a program can close its streams and go on.
            _, unfinished = await asyncio.wait([*texts, ending], timeout=limits.timeout_seconds)
        finally:
            kill()
            # Read to the end even then: asyncio waits for a process only once its pipes are at their end.
            (stdout, much), (stderr, more) = await asyncio.gather(*texts)
            code = await ending
            crowded = await counting
        if code == sandbox.UNAVAILABLE:
            raise SandboxUnavailableError(f"a program cannot be confined here: {stderr.strip()}")
        if crowded:
            return Result("threads", stdout, stderr)
        outcome: Outcome = "timeout" if unfinished else "output" if much or more else "ok" if code == 0 else "failed"
        return Result(outcome, stdout, stderr)


async def _count_threads(pid: int, limit: int, too_many: Callable[[], None]) -> bool:
    """Look at a process until it has more threads than it may; then `too_many` is called, and this is true. False: it has ended."""
    while (count := threads_of(pid)) is not None:
        if count > limit:
            too_many()
            return True
        await asyncio.sleep(_LOOK_SECONDS)
    return False


async def _take_output(stream: asyncio.StreamReader, limit: int, too_much: Callable[[], None]) -> tuple[str, bool]:
    """The beginning of a stream, read to its end, and whether there was more; `too_much` is called as soon as there is."""
    text, more = bytearray(), False
    while chunk := await stream.read(_CHUNK_BYTES):
        text += chunk[: limit - len(text)]
        if len(text) >= limit:
            more = True
            too_much()
    return bytes(text).decode(errors="replace"), more
