"""`go build` of one program with progress: first the downloads of its modules, then its packages."""

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.cache import full_disk_advice
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress

from .commands import run, text_from
from .output import build_state, download_state, is_disk_full, packages, without_packages

BUILD_JOBS = 2  # a link of Kubernetes takes 2 GB: more jobs at a time help little and can exhaust a small machine
TAIL_LINES = 15
_REQUIRED = re.compile(r"^(?:require)?\s+\S+ v\S+", re.MULTILINE)
_OFFLINE = re.compile(
    r"dial tcp|no such host|lookup disabled by GOPROXY|i/o timeout|connection re|handshake|proxyconnect|: EOF"
)
_KILLED = re.compile(r"signal: killed|cannot allocate memory|out of memory")


def environment(scratch: Path | None = None) -> dict[str, str]:
    """Return the environment of the go command.

    Args:
        scratch: work folder of a build, unless GOTMPDIR is set.
    """
    work = {"GOTMPDIR": str(scratch)} if scratch and not os.environ.get("GOTMPDIR") else {}
    flags = "-trimpath -buildvcs=false"
    return {**os.environ, **work, "GOTOOLCHAIN": "local", "GOFLAGS": flags, "CGO_ENABLED": "0"}


@dataclass(frozen=True)
class Program:
    """A program that is built from a Go module.

    Attributes:
        name: name and version, for messages.
        module: folder with go.mod.
        package: main package.
        linker_flags: value of -ldflags.
    """

    name: str
    module: Path
    package: str
    linker_flags: str


def build(program: Program, output: Path, progress: Progress) -> None:
    """Build a program.

    Args:
        output: file to write. The build's work folder is next to it, so that a killed build leaves nothing elsewhere.

    Raises:
        ClusterError: the go command failed; the message holds the end of its output and the fix.
    """
    with tempfile.TemporaryDirectory(prefix=".go-", dir=output.parent, ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        log = work / "list.log"
        required = len(_REQUIRED.findall((program.module / "go.mod").read_text()))
        _go(
            ["list", "-deps", program.package],
            program,
            log,
            progress,
            lambda text: download_state(text, required),
        )
        needed = packages(text_from(log))
        jobs = ["-p", str(BUILD_JOBS)]
        _go(
            ["build", "-v", *jobs, "-ldflags", program.linker_flags, "-o", str(output), program.package],
            program,
            work / "build.log",
            progress,
            lambda text: build_state(text, needed),
        )


def _go(arguments: Sequence[str], program: Program, log: Path, progress: Progress, state: Callable[[str], str]) -> None:
    """Run the go command in the program's module.

    Raises:
        ClusterError: it failed.
    """
    code = run(
        ["go", *arguments],
        log,
        progress=progress,
        name=program.name,
        state=state,
        cwd=program.module,
        environment={**environment(log.parent), "GOMAXPROCS": str(BUILD_JOBS)},
    )
    if code != 0:
        text = "\n".join(without_packages(text_from(log))[-TAIL_LINES:])
        command = f"go {arguments[0]} {arguments[-1]}"
        raise ClusterError(
            f"{program.name}: `{command}` failed with {code} in {program.module}: {advice(text)}\n{text}"
        )


def advice(text: str) -> str:
    """Return what to do about a failed go command.

    Args:
        text: its error output.
    """
    if is_disk_full(text):
        return full_disk_advice()
    if _OFFLINE.search(text):
        return (
            "a module could not be downloaded. Check the network or set GOPROXY to a proxy that this machine reaches, "
            "then repeat the command: it keeps the modules that it has"
        )
    if _KILLED.search(text):
        return "memory ran out: a link of Kubernetes takes 2 GB. Stop other programs, then repeat the command"
    return "the compiler's messages follow"
