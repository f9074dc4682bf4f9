"""Programs forked from a process that has imported their modules: `python -m tests.support.forks MODULE...`.

The import of vLLM takes 7 s of CPU time, more than the rest of the start of an engine with a tiny model. Each line on
stdin is a request as JSON, `{"module": ..., "arguments": [...], "environment": {...}, "exact": false, "log": path}`,
with `errors` for a separate file for stderr and `folder` for another working directory. The program runs as `python -m
module` does; its environment is that of this process with the given variables, or exactly these. Answers on stdout:
`{"pid": p}`, and `{"pid": p, "code": c}` at its end (negative: the signal that ended it). The process ends with its
stdin, and kills the programs that still run.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

POLL_SECONDS = 0.02
ANSWER_SECONDS = 240.0


class Forked:
    """A program in a separate process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, args: str, pid: int, ended: threading.Condition, codes: dict[int, int]) -> None:
        self.args, self.pid, self._ended, self._codes = args, pid, ended, codes

    @property
    def returncode(self) -> int | None:
        return self._codes.get(self.pid)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._ended:
            if not self._ended.wait_for(lambda: self.pid in self._codes, timeout):
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        return self._codes[self.pid]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProgram(Forked):
    """A forked program whose output is read through pipes.

    Args:
        forked: the process.
        stdout: end of a pipe to read.
        stderr: end of a pipe to read.
    """

    def __init__(self, forked: Forked, stdout: IO[str], stderr: IO[str]) -> None:
        super().__init__(forked.args, forked.pid, forked._ended, forked._codes)
        self.stdout, self.stderr = stdout, stderr
        self._read: dict[IO[str], str] = {}
        self._readers: list[threading.Thread] = []

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends, then wait for the process, as `subprocess.Popen.communicate`; stdin is empty."""
        assert not input
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read_all, args=(pipe,)) for pipe in (self.stdout, self.stderr)
            ]
            for reader in self._readers:
                reader.daemon = True
                reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._read[self.stdout], self._read[self.stderr]

    def _read_all(self, pipe: IO[str]) -> None:
        with pipe:
            self._read[pipe] = pipe.read()

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the program if it still runs."""
        self.kill()
        self.wait(ANSWER_SECONDS)


class Forks:
    """The process from which programs are forked.

    Args:
        modules: names of modules that it imports first.
        environment: variables in addition to those of this process.
        prefix: words before its command, such as those of `setpriv`.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str], prefix: Sequence[str] = ()) -> None:
        self._ended = threading.Condition()
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.forks", *modules],
            cwd=Path(__file__).parents[2],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._ended:
                if "code" in answer:
                    self._codes[answer["pid"]] = answer["code"]
                else:
                    self._started.append(answer["pid"])
                self._ended.notify_all()

    def start(
        self,
        module: str,
        *arguments: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        exact: bool = False,
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> Forked:
        """Run `python -m module arguments`; its output goes to `log`.

        Args:
            module: name of the module.
            arguments: words of the command line.
            log: file to append to.
            environment: variables that the program has in addition to those of the forking process.
            exact: whether it has only these variables.
            errors: file for stderr. Default: `log`.
            folder: working directory. Default: the forking process's directory at its start.
        """
        assert self._process.stdin is not None
        request: dict[str, Any] = {
            "module": module,
            "arguments": arguments,
            "environment": dict(environment or {}),
            "log": str(log),
        }
        request |= {"exact": exact, "errors": str(errors or log), "folder": None if folder is None else str(folder)}
        with self._ended:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            if not self._ended.wait_for(lambda: self._started, ANSWER_SECONDS):
                raise AssertionError(
                    f"no process for {module}: the process that forks it ends with {self._process.poll()}"
                )
            return Forked(module, self._started.pop(), self._ended, self._codes)

    def open(
        self, module: str, *arguments: str, environment: Mapping[str, str], folder: Path | None = None
    ) -> ForkedProgram:
        """Run `python -m module arguments` with exactly these variables and pipes, as `subprocess.Popen` does."""
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        try:
            # The other process opens the pipes by these names before it answers.
            out_file, err_file = (Path(f"/proc/{os.getpid()}/fd/{descriptor}") for descriptor in (out, err))
            forked = self.start(
                module, *arguments, log=out_file, errors=err_file, environment=environment, exact=True, folder=folder
            )
        finally:
            os.close(out)
            os.close(err)
        return ForkedProgram(forked, os.fdopen(stdout), os.fdopen(stderr))

    def call(
        self, module: str, *arguments: str, environment: Mapping[str, str], folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m module arguments` to its end, as `tests.support.programs.run_program`."""
        from tests.support.programs import finish  # not in the process that forks

        with self.open(module, *arguments, environment=environment, folder=folder) as program:
            out, err = finish(cast("subprocess.Popen[str]", program))
        return subprocess.CompletedProcess([module, *arguments], program.wait(), out, err)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(ANSWER_SECONDS)


def run(request: dict[str, Any]) -> int:
    """Fork a process for the program; return its pid."""
    files = [
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for path in (request["log"], request.get("errors", request["log"]))
    ]
    if pid := os.fork():
        for file in files:
            os.close(file)
        return pid
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (files[0], 1), (files[1], 2)):
        os.dup2(descriptor, target)
    for file in files:
        os.close(file)
    if request.get("folder") is not None:
        os.chdir(request["folder"])
    if request.get("exact"):
        os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    code = 1
    try:
        if torch := sys.modules.get("torch"):
            # The fork runs here, with one thread: torch's pool does not survive a fork, and two threads that replace it
            # at once fail.
            torch.set_num_threads(1)
        if not hasattr(sys.modules.get(request["module"]), "__path__"):
            sys.modules.pop(
                request["module"], None
            )  # another program needs it: runpy warns of a module that runs twice
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        if request.get("exact"):
            _end_as_interpreter()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_as_interpreter() -> None:
    """Wait for threads and call exit functions, as at the end of a started program."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    with suppress(Exception):
        atexit._run_exitfuncs()


def serve(start: Callable[[dict[str, Any]], int], answer: Callable[[dict[str, int]], None]) -> None:
    """Start a process for each request, and report its end, until stdin ends."""
    running: set[int] = set()
    pending = b""
    while True:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            if not (received := os.read(0, 65536)):
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                running.add(pid := start(json.loads(line)))
                answer({"pid": pid})
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                answer({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def main(modules: Sequence[str]) -> None:
    """Import the modules, then serve."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print while they are imported

    def answer(document: dict[str, int]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # programs do not look through imported modules, and do not copy pages for that
    serve(run, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
