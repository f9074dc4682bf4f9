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

Outcome = Literal["ok", "failed", "timeout", "output"]
"""`ok`: exit code 0. `failed`: another one, or a signal (memory and processor time included). `timeout`, `output`: too much of it."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_CHUNK_BYTES = 65536


class SandboxUnavailableError(RuntimeError):
    """The machine cannot confine a program, so none is run."""


@dataclass(frozen=True)
class CodeLimits:
    """What one program may take."""

    timeout_seconds: float = 10.0
    """Wall-clock time; processor time is bounded by the same, rounded up."""
    memory_bytes: int = 512 * 1024**2
    """Address space."""
    output_bytes: int = 64 * 1024
    """On each of stdout and stderr."""


@dataclass(frozen=True)
class Result:
    """What a program did."""

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

        def kill() -> None:
            # Only while its streams are open, so that the pid is its own; not `process.kill`, which may collect the process and
            # leave asyncio without its exit code.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

        streams = (process.stdout, process.stderr)
        texts = [asyncio.ensure_future(_take(stream, limits.output_bytes, kill)) for stream in streams]
        try:
            # The program has no children, so both streams end with it.
            _, unfinished = await asyncio.wait(texts, timeout=limits.timeout_seconds)
        finally:
            if not all(text.done() for text in texts):
                kill()
            # Read to the end even then: asyncio waits for a process only once its pipes are at their end.
            (stdout, much), (stderr, more) = await asyncio.gather(*texts)
            code = await process.wait()
        if code == sandbox.UNAVAILABLE:
            raise SandboxUnavailableError(f"a program cannot be confined here: {stderr.strip()}")
        outcome: Outcome = "timeout" if unfinished else "output" if much or more else "ok" if code == 0 else "failed"
        return Result(outcome, stdout, stderr)


async def _take(stream: asyncio.StreamReader, limit: int, too_much: Callable[[], None]) -> tuple[str, bool]:
    """The beginning of a stream, read to its end, and whether there was more; `too_much` is called as soon as there is."""
    text, more = bytearray(), False
    while chunk := await stream.read(_CHUNK_BYTES):
        text += chunk[: limit - len(text)]
        if len(text) >= limit:
            more = True
            too_much()
    return bytes(text).decode(errors="replace"), more
