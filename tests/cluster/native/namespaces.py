"""Start of processes in new namespaces, and commands in existing ones, by util-linux' unshare and nsenter."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.packages import SEARCH_PATH

from . import cgroups

INIT = Path(__file__).with_name("init.py")
ALL_OF_A_MACHINE = ("--mount", "--net", "--pid", "--uts", "--ipc")
# Environment of a machine, without any variable of the user: a proxy variable, for example, would break every client in
# it.
ENVIRONMENT = {"PATH": SEARCH_PATH, "HOME": "/run", "LANG": "C.UTF-8"}
# Moves itself into the cgroups named before `--`, then becomes the command after it.
JOIN_CGROUPS = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 1; shift; done; shift; exec "$@"'


def start_first_process(spec: Path, cgroup: str, log: Path, *, rack: int | None, tie: bool) -> subprocess.Popen[bytes]:
    """Start `init.py` as PID 1 of new namespaces.

    Args:
        spec: setup of the machine.
        cgroup: the machine's cgroup, without processes of an earlier life.
        log: file for its output.
        rack: first process of the rack to start inside of; None to start the rack itself.
        tie: whether it ends when the calling thread ends for any reason.

    Returns:
        The outermost process. It ends when the first process does.
    """
    inside = ["nsenter", "--target", str(rack), "--mount", "--net", "--pid"] if rack else []
    flags = ["--net", "--mount", "--pid", *(["--uts", "--ipc"] if rack else ["--uts"]), "--fork", "--kill-child"]
    program = [*_without_packages(), str(INIT), str(spec)]
    command = [*inside, "unshare", *flags, "--mount-proc", *program]
    joined = ["sh", "-c", JOIN_CGROUPS, "sh", *map(str, cgroups.create(cgroup)), "--", *command]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*(["setpriv", "--pdeathsig", "KILL"] if tie else []), *joined],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=ENVIRONMENT,
            start_new_session=True,
        )


def _without_packages() -> list[str]:
    return [sys.executable, "-I", "-S"]


def enter(pid: int, command: Sequence[str], *, namespaces: Sequence[str] = ALL_OF_A_MACHINE) -> list[str]:
    """Return the command line that runs `command` in the namespaces of process `pid`."""
    return ["nsenter", "--target", str(pid), *namespaces, "--", *command]


def run_in(pid: int, command: Sequence[str], *, stdin: Path = Path("/dev/null"), timeout: float = 60.0) -> str:
    """Run a command in all namespaces of process `pid`.

    Args:
        stdin: file of the host for its standard input.
        timeout: limit in seconds.

    Returns:
        Its standard output.

    Raises:
        ClusterError: it failed or did not end; the message has its error output.
    """
    return checked(enter(pid, command), stdin=stdin, timeout=timeout, shown=command)


def checked(
    command: Sequence[str], *, stdin: Path = Path("/dev/null"), timeout: float = 60.0, shown: Sequence[str] = ()
) -> str:
    """Run a command of the host.

    Args:
        stdin: file for its standard input.
        timeout: limit in seconds.
        shown: text of the command in messages. Default: the command.

    Raises:
        ClusterError: as for `run_in`.
    """
    name = " ".join(shown or command)
    environment = {**ENVIRONMENT, "CONTAINERD_NAMESPACE": "k8s.io"}
    try:
        with stdin.open("rb") as source:
            result = subprocess.run(
                command, stdin=source, capture_output=True, text=True, timeout=timeout, env=environment
            )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{name}` did not end within {timeout:.0f} s") from None
    if result.returncode != 0:
        raise ClusterError(f"`{name}` failed with {result.returncode}: {(result.stderr or result.stdout).strip()}")
    return result.stdout
