"""The way to a cluster: the `kubectl` of the user, with the credentials, contexts and proxies that it knows already (decision 75)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, Protocol

from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json
from rlrun.runtime.printable import printable
from rlrun.runtime.redaction.log_lines import LogLines

RUNS = "rlruns.rlrun.io"
_END_SECONDS = 5.0
"""Time in which a program ends whose output is closed."""
_LINES = 5
"""Last lines of an error that are shown."""
_SECONDS = 20
"""Longest time that one request may take."""


class ClusterError(Exception):
    """A request that the cluster, or the way to it, has refused; one line for a person.

    Args:
        message: what was wrong and what to do.
        code: exit code.
    """

    def __init__(self, message: str, code: int = exit_codes.UNAVAILABLE) -> None:
        super().__init__(message)
        self.code = code


class Answer(NamedTuple):
    """End of one `kubectl`."""

    code: int
    out: str
    err: str


class Api(Protocol):
    """Access of the commands to a cluster. Tests give recorded answers."""

    def ask(self, words: Sequence[str], *, timeout: float = _SECONDS) -> str:
        """Standard output of `kubectl WORDS`; `ClusterError` if it fails."""

    def show(self, words: Sequence[str]) -> int:
        """Run `kubectl WORDS` on this terminal; its exit code."""

    def stream(self, words: Sequence[str]) -> AbstractContextManager[IO[bytes]]:
        """Standard output of `kubectl WORDS` while it runs; `ClusterError` at the end if it fails."""

    def send(self, words: Sequence[str], write: Callable[[IO[bytes]], object]) -> None:
        """Run `kubectl WORDS` with what `write` writes as its standard input; `ClusterError` if it fails."""


class Kubectl:
    """`kubectl` with the user's flags.

    Args:
        flags: such as `--context a`.
        start: runs a command; for tests.
        show: runs a command on this terminal; for tests.
        stream: runs a command and gives its output; for tests.
        send: runs a command and gives it input; for tests.
    """

    def __init__(
        self,
        flags: Sequence[str] = (),
        start: Callable[[Sequence[str], float], Answer] | None = None,
        show: Callable[[Sequence[str]], int] | None = None,
        stream: Callable[[Sequence[str]], AbstractContextManager[IO[bytes]]] | None = None,
        send: Callable[[Sequence[str], Callable[[IO[bytes]], object]], None] | None = None,
    ) -> None:
        self._flags, self._start = list(flags), start or _start_process
        self._show, self._stream, self._send = show or _on_terminal, stream or _stream_lines, send or _send_input

    def ask(self, words: Sequence[str], *, timeout: float = _SECONDS) -> str:
        """See `Api`."""
        answer = self._start(["kubectl", *self._flags, f"--request-timeout={int(timeout)}s", *words], timeout + 5)
        if answer.code:
            _raise_refusal(answer.err, words)
        return answer.out

    def show(self, words: Sequence[str]) -> int:
        """See `Api`."""
        return self._show(["kubectl", *self._flags, *words])

    def stream(self, words: Sequence[str]) -> AbstractContextManager[IO[bytes]]:
        """See `Api`."""
        return self._stream(["kubectl", *self._flags, *words])

    def send(self, words: Sequence[str], write: Callable[[IO[bytes]], object]) -> None:
        """See `Api`."""
        self._send(["kubectl", *self._flags, *words], write)


def ask_json(api: Api, words: Sequence[str]) -> Json:
    """Answer to `kubectl WORDS -o json`.

    Raises:
        ClusterError: it failed, or answered something else.
    """
    try:
        document = json.loads(api.ask([*words, "-o", "json"]))
    except ValueError:
        raise ClusterError(f"kubectl {words[0]} answered no JSON") from None
    if not isinstance(document, dict):
        raise ClusterError(f"kubectl {words[0]} answered no object")
    return document


_WORDS: Sequence[tuple[str, str, int]] = (
    (
        r'(?s)The (?:RLRun|rlruns) "[^"]+" is invalid: (?:: ValidatingAdmissionPolicy \S+ with binding \S+ denied request: )?(.*)',
        r"the API server refuses it: \1",
        exit_codes.CONFIGURATION,
    ),
    (
        r'the server doesn\'t have a resource type "rlruns"',
        "this cluster has no RLRun resource; install it: rlrun crd | kubectl apply --server-side -f -",
        exit_codes.UNAVAILABLE,
    ),
    (
        r'rlruns\.rlrun\.io "([^"]+)" not found',
        r"there is no run \1 in this namespace; `rlrun get -A` lists all",
        exit_codes.USAGE,
    ),
    (
        r"connection to the server localhost:8080 was refused",  # kubectl's guess where it knows no cluster
        "kubectl knows no cluster (there is no kubeconfig), so that a run has to be named by its folder, such as runs/NAME",
        exit_codes.UNAVAILABLE,
    ),
    (
        r"connection to the server (\S+) was refused",
        r"the API server \1 does not answer; is the context the right one (kubectl config current-context)?",
        exit_codes.UNAVAILABLE,
    ),
    (r"Unable to connect to the server: (.*)", r"the API server cannot be reached: \1", exit_codes.UNAVAILABLE),
    (
        r'context "?([^"\s]+)"? does not exist',
        r"--context: there is no context \1; `kubectl config get-contexts` lists them",
        exit_codes.USAGE,
    ),
)
"""Pattern of an error of kubectl's, the message in its place, and the exit code."""


def _raise_refusal(text: str, words: Sequence[str]) -> NoReturn:
    """Raise what kubectl said, in one line."""
    for pattern, told, code in _WORDS:
        if (found := re.search(pattern, text)) is not None:
            raise ClusterError(printable(" ".join(found.expand(told).split())), code)
    lines = [line for line in text.splitlines() if line.strip() and not re.match(r"[EWI]\d{4} ", line)]
    said = " ".join(line.strip() for line in lines[-_LINES:]).removeprefix("error: ").removeprefix("Error from server ")
    raise ClusterError(printable(f"kubectl {words[0]} failed: {said or 'without a word'}"))


def _start_process(command: Sequence[str], timeout: float) -> Answer:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise _missing_kubectl() from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"the cluster did not answer for {timeout:.0f} s") from None
    return Answer(done.returncode, done.stdout, done.stderr)


def _on_terminal(command: Sequence[str]) -> int:
    """Run a command whose output is a log; its lines are shown without secrets. Returns its exit code."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
    except FileNotFoundError:
        raise _missing_kubectl() from None
    lines = LogLines(os.environ)
    with process as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(lines.clean(line.rstrip("\n")), flush=True)
    return process.returncode


@contextmanager
def _stream_lines(command: Sequence[str]) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except FileNotFoundError:
            raise _missing_kubectl() from None
        assert process.stdout is not None
        try:
            with process.stdout as out:
                yield out
                while out.read(1 << 16):  # a tar ends before its stream does
                    pass
        except BaseException:
            if _exit_code(process) > 0:  # its own words say more than what came of it
                _raise_refusal(_decode_text(errors), _command_verb(command))
            raise
        if process.wait():
            _raise_refusal(_decode_text(errors), _command_verb(command))


def _send_input(command: Sequence[str], write: Callable[[IO[bytes]], object]) -> None:
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors)
        except FileNotFoundError:
            raise _missing_kubectl() from None
        assert process.stdin is not None
        try:
            with process.stdin as out:
                write(out)
        except BrokenPipeError:
            process.wait()  # it has refused what was sent; its words say why
        except BaseException:
            process.kill()  # the other end must not take what was sent for all of it
            process.wait()
            raise
        if process.wait():
            _raise_refusal(_decode_text(errors), _command_verb(command))


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Exit code of a process whose output is closed; one that does not end is killed."""
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _decode_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _command_verb(command: Sequence[str]) -> list[str]:
    """Words of a command from its verb on, for the message."""
    return [word for word in command[1:] if not word.startswith("-")]


def is_configured(environment: Mapping[str, str]) -> bool:
    """True if kubectl knows a cluster: by a kubeconfig, or within a pod."""
    if environment.get("KUBECONFIG") or environment.get("KUBERNETES_SERVICE_HOST"):
        return True
    return (Path(environment.get("HOME", "/nonexistent")) / ".kube" / "config").is_file()


def _missing_kubectl() -> ClusterError:
    return ClusterError(
        "there is no kubectl on PATH, which runs in a cluster are reached with; install it, or name a run's folder (runs/NAME)"
    )
