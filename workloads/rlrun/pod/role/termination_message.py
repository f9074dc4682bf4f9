"""Reason of a role's failure, in a few words, where the operator finds them: the container's termination message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlrun.diagnostics.crash import describe_end
from rlrun.diagnostics.symptoms import STORAGE_ERROR, Symptom, symptom_of, tag_message
from rlrun.runtime.printable import printable

MAX_BYTES = 2048


def failure_text(
    code: int, *, said: str | None, full: str | None, lines: Sequence[str], symptom: Symptom | None = None
) -> str:
    """The message. One that means something to the failure policy begins with its word (`rlrun.diagnostics.symptoms`).

    Args:
        code: the exit code; 128 + n for signal n.
        said: the role's own message, if it left one.
        full: the run's folder when its volume is full: roles then fail in any way.
        lines: the end of its output.
        symptom: the one that says most in its output.
    """
    if said is not None:
        known = symptom_of(said)
        return cut(tag_message(known.reason if known is not None else None, said))
    head = describe_end(code)
    if full is not None:
        return cut(
            tag_message(STORAGE_ERROR, f"{head}: the volume of {full} is full (No space left on device); make space")
        )
    if not lines:
        return cut(f"{head} without a word")
    if symptom is not None:
        head = tag_message(symptom.reason, f"{head}: {symptom}")
    return cut("\n".join([f"{head}; its last lines:", *lines]), keep_end=True)


def cut(text: str, *, keep_end: bool = False) -> str:
    """At most `MAX_BYTES` of UTF-8; of what is too long the head's first line and the end are kept, or the beginning."""
    text = printable(text, lines=True)
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    if not keep_end:
        return data[: MAX_BYTES - 3].decode(errors="ignore") + "..."
    first, _, rest = text.partition("\n")
    room = MAX_BYTES - len(first.encode()) - 5
    return f"{first}\n..." + rest.encode()[-room:].decode(errors="ignore")


def write_termination_message(path: Path, text: str) -> None:
    """Best effort: outside a container there is no such file."""
    with suppress(OSError), path.open("w") as file:
        file.write(text)
