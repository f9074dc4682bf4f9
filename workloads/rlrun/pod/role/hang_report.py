"""Stack report of a role that does not end after a stop request, before the kubelet kills it.

The stacks of all its processes are written next to its log on the run's volume, and to the container's log. Best effort: if the volume
hangs, only the file is missing.
"""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from typing import Self

from rlrun.diagnostics import stacks
from rlrun.pod.role.output import Output
from rlrun.pod.role.process import descendants
from rlrun.pod.signals import Signals

_SHOWN_BYTES = 64 * 1024
"""Maximum bytes of a dump in the container's log."""
_CLOSE_SECONDS = 5.0


class StuckRole:
    """Watcher of the role's end from the first signal on. A context: entered before the role starts, left when it has ended.

    Args:
        signals: signals of this process.
        after: seconds from the signal to the dump.
        file: file that `RLRUN_STACKS_FILE` names in the role's environment.
        keep: file that keeps the dump.
        output: output of the role.
    """

    def __init__(self, signals: Signals, *, after: float, file: Path, keep: Path, output: Output) -> None:
        self._signals, self._after, self._file, self._keep, self._output = signals, after, file, keep, output
        self._ended_reader, self._ended_writer = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="stuck", daemon=True)

    def __enter__(self) -> Self:
        self._file.touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._ended_writer, b"x")
        self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        if self._has_ended(None, self._signals) or self._has_ended(self._after):
            return
        try:
            why = f"the role has not ended {self._after:g} s after the stop request"
            dump = stacks.request_stacks(descendants(os.getpid()), self._file, why=why)
        except OSError as error:
            self._output.say(f"cannot read the stacks of the role: {error}")
            return
        if not dump:
            self._output.say(f"{why}; none of its processes reports its stacks")
            return
        self._output.say(f"{why}; its stacks are written to {self._keep}")
        self._output.show(dump[:_SHOWN_BYTES])
        try:
            self._keep.parent.mkdir(parents=True, exist_ok=True)
            with self._keep.open("ab") as out:
                out.write(dump)
        except OSError as error:
            self._output.say(f"cannot write {self._keep}: {error.strerror}")

    def _has_ended(self, seconds: float | None, *others: Signals) -> bool:
        """Return whether the role has ended, within these seconds and before one of the others is readable."""
        found, _, _ = select.select([self._ended_reader, *(other.fileno() for other in others)], [], [], seconds)
        return self._ended_reader in found
