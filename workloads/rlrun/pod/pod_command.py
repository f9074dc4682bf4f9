"""Program `rlrun-pod trainer|inference|orchestrator|model`: the first process of a container."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlrun.pod.container_settings import Signals, StoppedError
from rlrun.runtime import exit_codes

if TYPE_CHECKING:
    from rlrun.pod.container_settings import PodSettings
    from rlrun.pod.role_commands import Programs


# Slow imports are late: before `Signals` exists, a signal to the first process of a container is lost, and the container then
# lives until the end of its grace period. A pod is often deleted just when its container starts again.

UMASK = 0o027
"""Mask of new files: a run's files on its volume are private to its user and group."""
COMMANDS = ("trainer", "inference", "orchestrator", "model")
SHARE_CODE, MAKE_FOLDERS, ENVIRONMENTS, DEMONSTRATIONS = "share-code", "make-folders", "environments", "demonstrations"
_USAGE = (
    f"usage: rlrun-pod {{{','.join(COMMANDS)}}}: the first process of a container, started by the operator\n"
    f"       rlrun-pod {SHARE_CODE} FOLDER: copy this package there, for containers of other images\n"
    f"       rlrun-pod {MAKE_FOLDERS} FOLDER...: create them on the run's volume, before the pod's other containers mount them\n"
    f"       rlrun-pod {ENVIRONMENTS} SOCKET: start environments for the orchestrator, in a container without its secrets\n"
    f"       rlrun-pod {DEMONSTRATIONS} FOLDER: write the data of a tiny model's warm-up, in a container without the run's secrets"
)


def main(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] = os.environ,
    programs: Callable[[], Programs] | None = None,
) -> int:
    """Run a container's role and return the exit code.

    Args:
        argv: arguments of the command line; default: those of this process.
        env: environment of the container.
        programs: factory of the command lines for an image with its own roles, called once signals are handled; default: this package's.
    """
    signals = Signals()
    os.umask(UMASK)
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        print(_USAGE)
        return exit_codes.OK
    if len(words) == 2 and words[0] == SHARE_CODE:
        return _share_code(words[1])
    if len(words) > 1 and words[0] == MAKE_FOLDERS:
        return _make_folders(words[1:], signals)
    if len(words) == 2 and words[0] == ENVIRONMENTS:
        return _serve_environments(words[1], signals)
    if len(words) == 2 and words[0] == DEMONSTRATIONS:
        return _make_demonstrations(words[1])
    if len(words) != 1 or words[0] not in COMMANDS:
        print(_USAGE, file=sys.stderr)
        return exit_codes.USAGE
    from rlrun.pod.container_settings import settings_from_environment
    from rlrun.protocol.files.failures import RoleError
    from rlrun.runtime.processes import refuse_inspection

    refuse_inspection()  # its environment contains the run's key
    try:
        pod = settings_from_environment(env)
    except RoleError as error:
        print(f"rlrun-pod: {error}", file=sys.stderr)
        return error.code
    return _run_command(words[0], pod, env, signals, programs)


def _log_line(text: str) -> None:
    print(f"rlrun-pod: {text}", file=sys.stderr, flush=True)


def _share_code(folder: str) -> int:
    """Copy the sources; a restarted container copies them again."""
    import shutil
    from pathlib import Path

    import rlrun

    try:
        shutil.copytree(
            Path(rlrun.__file__).parent,
            Path(folder) / "rlrun",
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copyfile,
            dirs_exist_ok=True,
        )
    except OSError as error:
        print(f"rlrun-pod: cannot copy this package to {folder}: {error}", file=sys.stderr)
        return exit_codes.STORAGE
    return exit_codes.OK


def _make_folders(folders: Sequence[str], signals: Signals) -> int:
    from pathlib import Path

    from rlrun.pod.preparation import make_folders
    from rlrun.protocol.files.failures import RoleError

    try:
        make_folders([Path(folder) for folder in folders], say=_log_line, signals=signals)
    except StoppedError as stopped:
        _log_line(str(stopped))
        return stopped.exit_code
    except RoleError as error:
        _log_line(str(error))
        return error.code
    return exit_codes.OK


def _serve_environments(socket: str, signals: Signals) -> int:
    from pathlib import Path

    from rlrun.environments.process.host import serve_shared

    serve_shared(Path(socket), signals.fileno())
    return exit_codes.OK


def _make_demonstrations(folder: str) -> int:
    from pathlib import Path

    from rlrun.pod.container import cut_message, write_termination_message
    from rlrun.pod.container_settings import PodSettings
    from rlrun.pod.preparation import make_demonstrations
    from rlrun.protocol.files.failures import RoleError

    try:
        make_demonstrations(Path(folder), os.environ)
    except RoleError as error:
        _log_line(str(error))
        log = Path(os.environ.get("RLRUN_TERMINATION_LOG") or PodSettings.termination_log)
        write_termination_message(log, cut_message(str(error)))
        return error.code
    return exit_codes.OK


def _run_command(
    command: str,
    pod: PodSettings,
    env: Mapping[str, str],
    signals: Signals,
    programs: Callable[[], Programs] | None,
) -> int:
    import tempfile
    from pathlib import Path

    from rlrun.pod.container import cut_message, write_termination_message
    from rlrun.protocol.files.failures import RoleError

    try:
        if command == "trainer":
            from rlrun.pod.preparation import is_first_start

            if not is_first_start(pod.state, pod.attempt):
                return _wait_for_deletion(pod, signals)
        from rlrun.pod.preparation import wait_for_own_file

        wait_for_own_file(pod, command, say=_log_line, signals=signals)
        from rlrun.pod.container import Container
        from rlrun.pod.role_commands import Programs

        with tempfile.TemporaryDirectory(prefix="rlrun-") as scratch:
            return Container(pod, env, signals, Path(scratch), (programs or Programs)()).run(command)
    except StoppedError as stopped:
        print(f"rlrun-pod: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except (RoleError, OSError) as error:
        code = error.code if isinstance(error, RoleError) else exit_codes.FAILURE
        print(f"rlrun-pod: {error}", file=sys.stderr)
        write_termination_message(pod.termination_log, cut_message(str(error)))
        return code


def _wait_for_deletion(pod: PodSettings, signals: Signals) -> int:
    """Idle until the pod is deleted."""
    from rlrun.pod.rendezvous import PodServer

    reason = "the trainer's process of this pod has ended; the pod waits for its deletion"
    print(f"rlrun-pod: {reason}", file=sys.stderr, flush=True)
    server = PodServer(pod.pod_ip or "0.0.0.0", attempt=pod.attempt, api_key=pod.api_key, look=lambda: reason)
    try:
        signals.sleep(None)
    except StoppedError:
        return exit_codes.OK
    finally:
        server.close()
    raise AssertionError("an endless sleep ends only with a signal")
