"""Short reason of a role's failure for the operator: the container's termination message."""

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
    """Return the message. If it has a meaning for the failure policy, it starts with its tag (`rlrun.diagnostics.symptoms`).

    Args:
        code: exit code; 128 + n for signal n.
        said: message of the role, or None.
        full: folder of the run if its volume is full, because roles then fail in arbitrary ways.
        lines: end of its output.
        symptom: most informative symptom in its output.
    """
    if said is not None:
        known = symptom_of(said)
        return cut(tag_message(known.reason if known is not None else None, said))
    head = describe_end(code)
    if full is not None:
        return cut(
            tag_message(
                STORAGE_ERROR, f"{head}: the volume of {full} is full (No space left on device); free space on it"
            )
        )
    if not lines:
        return cut(f"{head}, without output")
    if symptom is not None:
        head = tag_message(symptom.reason, f"{head}: {symptom}")
    return cut("\n".join([f"{head}; its last lines:", *lines]), keep_end=True)


def cut(text: str, *, keep_end: bool = False) -> str:
    """Return at most `MAX_BYTES` of UTF-8: the beginning of a longer text, or its first line and its end."""
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
    """Write the message; outside of a container the file does not exist, and errors are ignored."""
    with suppress(OSError), path.open("w") as file:
        file.write(text)
