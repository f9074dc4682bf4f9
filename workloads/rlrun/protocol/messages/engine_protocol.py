"""Version of the protocol between orchestrator and engine: the engine's routes under `/rlrun`, and the weight folders that it loads.

Both sides check it before weights are transferred: the orchestrator in the engine's status, the engine in a header of each request. Images
of two incompatible releases then report an error instead of sampling from misread weights.
"""

from __future__ import annotations

from typing import NamedTuple

from rlrun import __version__

PROTOCOL = 1
"""Protocol version, increased by every change after which one side would misunderstand the other."""
HEADER = "rlrun-protocol"
"""Header of the orchestrator's requests: `Speaker.header`."""
REFUSED = 412
"""HTTP status for a request about weights from a side with another version."""


class Speaker(NamedTuple):
    """Protocol version and release of one side."""

    protocol: int
    release: str

    @property
    def header(self) -> str:
        """Value of `HEADER`."""
        return f"{self.protocol} {self.release}"


OWN = Speaker(PROTOCOL, __version__)
"""Version of this side."""
BEFORE = Speaker(1, "0.1.0 or earlier")
"""Version of a side that does not report one: releases before the introduction of versions use the first one."""


def of_header(text: str | None) -> Speaker:
    """Return the version of the side that sent a request."""
    protocol, _, release = (text or "").partition(" ")
    return Speaker(int(protocol), release or "unknown") if protocol.isascii() and protocol.isdecimal() else BEFORE


def of_status(protocol: object, release: object) -> Speaker:
    """Return the version of an engine, from `protocol` and `release` in its status."""
    return Speaker(protocol, str(release)) if isinstance(protocol, int) else BEFORE


def explain_mismatch(engine: Speaker, orchestrator: Speaker) -> str | None:
    """Return why the two cannot work together, or None if they can."""
    if engine.protocol == orchestrator.protocol:
        return None
    return (
        f"the engine's image is of release {engine.release} (protocol {engine.protocol}), the orchestrator's of release "
        f"{orchestrator.release} (protocol {orchestrator.protocol}): use images of one release in spec.inference.image, "
        "spec.orchestrator.image and spec.trainer.image, or remove these fields to use the operator's own images"
    )
