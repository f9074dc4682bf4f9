"""Log and environment variables of an environment's process.

The log is a file with a size limit, and its last bytes in memory.

The orchestrator's variables contain the run's key and possibly tokens of its pod or of the user's shell. Therefore a variable is passed on
only if it is listed in the allow-list, in `environments[].variables` or in an argument of the environment. A name with `*` at its end
matches all variables with this prefix.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from rlrun.config.environment_variables import KEY_ARGUMENT, is_passed, matches_pattern, names_in_arguments
from rlrun.config.formats import RESERVED_VARIABLES
from rlrun.diagnostics.stacks import FILE_VARIABLE
from rlrun.environments.rewards.scorers import SERVED
from rlrun.environments.rewards.scoring_servers import ServedArgs
from rlrun.hub.repository import QUICK_VARIABLE
from rlrun.hub.repository import VARIABLE as REVISIONS_VARIABLE
from rlrun.runtime.printable import escape_controls
from rlrun.runtime.process_logs import BoundedLog
from rlrun.runtime.processes import LAUNCH_VARIABLE

MAX_BYTES = 8 * 1024 * 1024
KEPT_BYTES = 16 * 1024
_CHUNK_BYTES = 64 * 1024


class Log:
    """Log of an environment across all restarts of its process.

    Args:
        path: log file, which is created with its folder at the first output. None: keep only the last bytes in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = None if path is None else BoundedLog(path, MAX_BYTES)
        self._end = b""
        self._lock = threading.Lock()

    def follow(self, source: int) -> threading.Thread:
        """Start a thread that reads a descriptor to its end and then closes it.

        The thread also reads on if the file cannot be written, so an environment never waits for its log.
        """

        def run() -> None:
            with os.fdopen(source, "rb", buffering=0) as pipe:
                while chunk := pipe.read(_CHUNK_BYTES):
                    self._store_output(chunk)

        with self._lock:
            self._end = b""
        thread = threading.Thread(target=run, name="environment-log", daemon=True)
        thread.start()
        return thread

    def last_lines(self, count: int = 8, *, whole: bool = False) -> list[str]:
        """Return the last lines that the current process printed, each cut to 300 characters.

        Args:
            count: largest number of lines.
            whole: whether to leave out a last line without a newline.
        """
        with self._lock:
            text = self._end.decode(errors="replace")
        if whole:
            text = text[: text.rfind("\n") + 1]
        lines = (escape_controls(line[:300].strip()) for line in text.splitlines())
        return [line for line in lines if line][-count:]

    def _store_output(self, chunk: bytes) -> None:
        with self._lock:
            self._end = (self._end + chunk)[-KEPT_BYTES:]
        if self._file is not None:
            self._file.append(chunk)  # if the volume is full or missing, `_end` is still available


EVERYTHING = "*"
"""All variables except RLRun's own: for code that has them in the run, too, and for an environment with its own container."""
_OWN = (LAUNCH_VARIABLE, FILE_VARIABLE, REVISIONS_VARIABLE, QUICK_VARIABLE)

_OF_THIS_CONTAINER = ("HOME", "TMPDIR", "TMP", "TEMP", "HOSTNAME", "SHELL", "XDG_*")
"""Variables whose values are folders of this process's container."""


def for_another_container(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values are also valid in another container of the same image."""
    return {
        name: value
        for name, value in variables.items()
        if not any(matches_pattern(name, pattern) for pattern in _OF_THIS_CONTAINER)
    }


def passed_variables(variables: Mapping[str, str], named: Iterable[str]) -> dict[str, str]:
    """Return the variables that an environment's process gets.

    Args:
        variables: variables of this process.
        named: names in addition to the allow-list; `EVERYTHING` for all variables.
    """
    names = tuple(named)
    return {name: value for name, value in variables.items() if name in _OWN or is_passed(name, names)}


def named_by(id: str, args: Mapping[str, object]) -> tuple[str, ...]:
    """Return the variables that an environment's arguments require: keys of judges, and the hub's token for environments that read the hub.

    Args:
        id: id of the environment.
        args: arguments of the environment.
    """
    names = [*names_in_arguments(id, args)]
    if id == "dataset" and SERVED & {*_list_texts(args.get("reward")), *_list_texts(args.get("reward_by_source"))}:
        names.append(str(ServedArgs.model_fields[KEY_ARGUMENT].default))
    return tuple(names)


def _list_texts(value: object) -> Iterator[str]:
    """Yield the texts in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _list_texts(part)


def withheld_hint(message: str, withheld: Collection[str]) -> str:
    """Return advice on an error that contains the name of a variable which was not passed on, or "".

    Args:
        message: message of the error.
        withheld: names of variables that this process has and the environment's process does not have.
    """
    words = set(re.findall(r"\w+", message))
    names = sorted(words & {name for name in withheld if not name.startswith(RESERVED_VARIABLES)})
    if not names:
        return ""
    return (
        f" (environments get only listed variables of the orchestrator: if the code needs it, "
        f"set environments[].variables: [{', '.join(names)}])"
    )
