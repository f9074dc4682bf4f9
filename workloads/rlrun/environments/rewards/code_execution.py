"""Execution of programs that a model wrote, in a sandbox without network, writable files or other processes (see `sandbox`)."""

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
"""`ok`: exit code 0. `failed`: another exit code or a signal, which includes the limits of memory and processor time. `timeout`,
`output`, `threads`: the program exceeded this limit."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_CHUNK_BYTES = 65536
_LOOK_SECONDS = 0.02
"""Time between two counts of the threads. The kernel cannot limit the threads of one process (RLIMIT_NPROC counts all of a user)."""


class SandboxUnavailableError(RuntimeError):
    """Error for a machine that cannot confine a program, so the program was not run."""


@dataclass(frozen=True)
class CodeLimits:
    """Resource limits of one program."""

    timeout_seconds: float = 10.0
    """Wall-clock time. The limit of processor time is the next higher whole number of seconds (11 s for 10.0)."""
    memory_bytes: int = 512 * 1024**2
    """Address space."""
    output_bytes: int = 64 * 1024
    """Bytes on each of stdout and stderr. A program that writes this number is killed."""
    threads: int = 64
    """Threads at the same time. A program with more is killed at the next count, see `_LOOK_SECONDS`."""


@dataclass(frozen=True)
class Result:
    """Outcome and output of one program."""

    outcome: Outcome
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Case:
    """One test case: input of the program, and expected output."""

    stdin: str
    stdout: str


def last_code_block(text: str) -> str | None:
    """Return the last fenced block of Python in a reply, or None if there is no block."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


class CodeRunner:
    """Runner of programs in the sandbox.

    Args:
        limits: limits of each program.
        concurrency: largest number of programs that run at the same time.
    """

    def __init__(self, limits: CodeLimits | None = None, *, concurrency: int = 4) -> None:
        self.limits = limits or CodeLimits()
        self._slots = asyncio.Semaphore(concurrency)

    async def run(self, code: str, stdin: str = "") -> Result:
        """Run one program, which can use Python's standard library, and return its result.

        Raises:
            SandboxUnavailableError: this machine cannot confine a program.
        """
        async with self._slots:
            with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as given:
                for file, text in ((program, code), (given, stdin)):
                    file.write(text.encode(errors="surrogatepass"))
                    file.seek(0)
                return await self._run_program(program.fileno(), given.fileno())

    async def score_cases(self, code: str, cases: Sequence[Case]) -> float:
        """Return the share of passed cases, in [0, 1]. A case passes with exit code 0 and the expected output (stripped of white space).

        Raises:
            ValueError: there are no cases.
            SandboxUnavailableError: this machine cannot confine a program.
        """
        if not cases:
            raise ValueError("there are no test cases; add at least one")
        results = await asyncio.gather(*(self.run(code, case.stdin) for case in cases))
        passed = [
            r.outcome == "ok" and r.stdout.strip() == c.stdout.strip() for r, c in zip(results, cases, strict=True)
        ]
        return sum(passed) / len(cases)

    async def _run_program(self, program: int, given: int) -> Result:
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
            # Only before the process is collected, because its pid may then belong to another process. `process.kill` is not used: it
            # may collect the process itself, and asyncio would not get the exit code.
            if not ending.done():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

        streams = (process.stdout, process.stderr)
        texts = [asyncio.ensure_future(_take_output(stream, limits.output_bytes, kill)) for stream in streams]
        counting = asyncio.ensure_future(_count_threads(process.pid, limits.threads, kill))
        try:
            # Wait for the streams and for the process: a program can close its streams and continue.
            _, unfinished = await asyncio.wait([*texts, ending], timeout=limits.timeout_seconds)
        finally:
            kill()
            # The streams are read to the end also after the kill: asyncio waits for a process only after its pipes are at their end.
            (stdout, much), (stderr, more) = await asyncio.gather(*texts)
            code = await ending
            crowded = await counting
        if code == sandbox.UNAVAILABLE:
            raise SandboxUnavailableError(f"this machine cannot confine a program: {stderr.strip()}")
        # A program that exceeded a limit was killed, so the limits are checked before the exit code.
        if crowded:
            return Result("threads", stdout, stderr)
        outcome: Outcome = "timeout" if unfinished else "output" if much or more else "ok" if code == 0 else "failed"
        return Result(outcome, stdout, stderr)


async def _count_threads(pid: int, limit: int, too_many: Callable[[], None]) -> bool:
    """Check a process until it ends (returns False) or has too many threads (calls `too_many` and returns True)."""
    while (count := threads_of(pid)) is not None:
        if count > limit:
            too_many()
            return True
        await asyncio.sleep(_LOOK_SECONDS)
    return False


async def _take_output(stream: asyncio.StreamReader, limit: int, too_much: Callable[[], None]) -> tuple[str, bool]:
    """Read a stream to its end. Returns the first `limit` bytes as text, and whether it has that many; then `too_much` was called."""
    text, more = bytearray(), False
    while chunk := await stream.read(_CHUNK_BYTES):
        text += chunk[: limit - len(text)]
        if len(text) >= limit:
            more = True
            too_much()
    return bytes(text).decode(errors="replace"), more
