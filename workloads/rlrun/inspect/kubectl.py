"""Access to a cluster through the user's `kubectl`, with its credentials, contexts and proxies (decision 75)."""

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
from rlrun.runtime.printable import escape_controls
from rlrun.runtime.redact import LogLines

RUNS = "rlruns.rlrun.io"
_END_SECONDS = 5.0
"""Seconds until a process must end after its output was closed."""
_LINES = 5
"""Number of last lines of an error in messages."""
_SECONDS = 20
"""Maximum duration of one request in seconds."""


class ClusterError(Exception):
    """Error for a request that the cluster, or the connection to it, refused; the message is one line for people.

    Args:
        message: problem and fix.
        code: exit code of the command.
    """

    def __init__(self, message: str, code: int = exit_codes.UNAVAILABLE) -> None:
        super().__init__(message)
        self.code = code


class Answer(NamedTuple):
    """Result of one `kubectl` process."""

    code: int
    out: str
    err: str


class Api(Protocol):
    """Access of the commands to a cluster; tests use recorded answers."""

    def read_output(self, words: Sequence[str], *, timeout: float = _SECONDS) -> str:
        """Return the standard output of `kubectl WORDS`; raises `ClusterError` if it fails."""

    def run_attached(self, words: Sequence[str]) -> int:
        """Run `kubectl WORDS` on this terminal and return its exit code."""

    def stream_output(self, words: Sequence[str]) -> AbstractContextManager[IO[bytes]]:
        """Stream the standard output of `kubectl WORDS`; raises `ClusterError` at the end if it fails."""

    def send_input(self, words: Sequence[str], write: Callable[[IO[bytes]], object]) -> None:
        """Run `kubectl WORDS` with standard input from `write`; raises `ClusterError` if it fails."""


class Kubectl:
    """`kubectl` with the user's options.

    Args:
        flags: options such as `--context a`.
        start: function that runs a command; for tests.
        show: function that runs a command on this terminal; for tests.
        stream: function that runs a command and streams its output; for tests.
        send: function that runs a command and writes its input; for tests.
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

    def read_output(self, words: Sequence[str], *, timeout: float = _SECONDS) -> str:
        """See `Api`."""
        answer = self._start(["kubectl", *self._flags, f"--request-timeout={int(timeout)}s", *words], timeout + 5)
        if answer.code:
            _raise_refusal(answer.err, words)
        return answer.out

    def run_attached(self, words: Sequence[str]) -> int:
        """See `Api`."""
        return self._show(["kubectl", *self._flags, *words])

    def stream_output(self, words: Sequence[str]) -> AbstractContextManager[IO[bytes]]:
        """See `Api`."""
        return self._stream(["kubectl", *self._flags, *words])

    def send_input(self, words: Sequence[str], write: Callable[[IO[bytes]], object]) -> None:
        """See `Api`."""
        self._send(["kubectl", *self._flags, *words], write)


def ask_json(api: Api, words: Sequence[str]) -> Json:
    """Return the answer to `kubectl WORDS -o json`.

    Raises:
        ClusterError: the command failed, or its output is not a JSON object.
    """
    try:
        document = json.loads(api.read_output([*words, "-o", "json"]))
    except ValueError:
        raise ClusterError(f"kubectl {words[0]} returned no JSON") from None
    if not isinstance(document, dict):
        raise ClusterError(f"kubectl {words[0]} returned no JSON object")
    return document


_WORDS: Sequence[tuple[str, str, int]] = (
    (
        r'(?s)The (?:RLRun|rlruns) "[^"]+" is invalid: (?:: ValidatingAdmissionPolicy \S+ with binding \S+ denied request: )?(.*)',
        r"the API server refused the change: \1",
        exit_codes.CONFIGURATION,
    ),
    (
        r'the server doesn\'t have a resource type "rlruns"',
        "this cluster has no RLRun resource; install it: rlrun crd | kubectl apply --server-side -f -",
        exit_codes.UNAVAILABLE,
    ),
    (
        r'rlruns\.rlrun\.io "([^"]+)" not found',
        r"there is no run \1 in this namespace; `rlrun get -A` lists the runs of all namespaces",
        exit_codes.USAGE,
    ),
    (
        r"connection to the server localhost:8080 was refused",  # kubectl's default address without a kubeconfig
        "no cluster is configured (there is no kubeconfig); name the run by its folder, such as runs/NAME",
        exit_codes.UNAVAILABLE,
    ),
    (
        r"connection to the server (\S+) was refused",
        r"the API server \1 does not respond; check the context with `kubectl config current-context`",
        exit_codes.UNAVAILABLE,
    ),
    (r"Unable to connect to the server: (.*)", r"the API server is unreachable: \1", exit_codes.UNAVAILABLE),
    (
        r'context "?([^"\s]+)"? does not exist',
        r"--context: there is no context \1; `kubectl config get-contexts` lists them",
        exit_codes.USAGE,
    ),
)
"""Pattern of kubectl's error, the replacement message, and the exit code."""


def _raise_refusal(text: str, words: Sequence[str]) -> NoReturn:
    """Raise kubectl's error as one line."""
    for pattern, told, code in _WORDS:
        if (found := re.search(pattern, text)) is not None:
            raise ClusterError(escape_controls(" ".join(found.expand(told).split())), code)
    lines = [line for line in text.splitlines() if line.strip() and not re.match(r"[EWI]\d{4} ", line)]
    said = " ".join(line.strip() for line in lines[-_LINES:]).removeprefix("error: ").removeprefix("Error from server ")
    raise ClusterError(escape_controls(f"kubectl {words[0]} failed: {said or 'without an error message'}"))


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
        raise ClusterError(f"the cluster did not respond within {timeout:.0f} s") from None
    return Answer(done.returncode, done.stdout, done.stderr)


def _on_terminal(command: Sequence[str]) -> int:
    """Run a command whose output is a log, print its lines without secrets, and return its exit code."""
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
                while out.read(1 << 16):  # read padding: a tar archive ends before its stream does
                    pass
        except BaseException:
            if _exit_code(process) > 0:  # kubectl's error is the cause of the reader's error
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
            process.wait()  # kubectl refused the input; its error is reported below
        except BaseException:
            process.kill()  # the receiver must not accept a partial input as complete
            process.wait()
            raise
        if process.wait():
            _raise_refusal(_decode_text(errors), _command_verb(command))


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process whose output is closed; it is killed if it does not end in time."""
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _decode_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _command_verb(command: Sequence[str]) -> list[str]:
    """Return the words of a command from its verb on, for messages."""
    return [word for word in command[1:] if not word.startswith("-")]


def is_configured(environment: Mapping[str, str]) -> bool:
    """Return whether kubectl has a cluster: from a kubeconfig, or inside a pod."""
    if environment.get("KUBECONFIG") or environment.get("KUBERNETES_SERVICE_HOST"):
        return True
    return (Path(environment.get("HOME", "/nonexistent")) / ".kube" / "config").is_file()


def _missing_kubectl() -> ClusterError:
    return ClusterError(
        "kubectl is not on PATH, but is required for runs in a cluster; install it, or name a run's folder (runs/NAME)"
    )
