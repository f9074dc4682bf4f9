"""Version of what orchestrator and engine say to each other: the engine's routes under `/rlrun`, and the folders of weights that they load.

Both sides check it before weights are handed over: the orchestrator in the engine's status, the engine in a header of each request.
Images of two releases that differ in it say that they cannot work together, instead of sampling from weights that are not what they seem.
"""

from __future__ import annotations

from typing import NamedTuple

from rlrun import __version__

PROTOCOL = 1
"""Raised by every change after which one side would misunderstand the other."""
HEADER = "rlrun-protocol"
"""Header of the orchestrator's requests: `Speaker.header`."""
REFUSED = 412
"""Status of a request for other weights by a side that speaks another version."""


class Speaker(NamedTuple):
    """One side."""

    protocol: int
    release: str

    @property
    def header(self) -> str:
        """Value of `HEADER`."""
        return f"{self.protocol} {self.release}"


OWN = Speaker(PROTOCOL, __version__)
"""This side."""
BEFORE = Speaker(1, "0.1.0 or earlier")
"""A side that says nothing about it: releases before there were versions spoke the first one."""


def of_header(text: str | None) -> Speaker:
    """The side that sent a request."""
    protocol, _, release = (text or "").partition(" ")
    return Speaker(int(protocol), release or "unknown") if protocol.isascii() and protocol.isdecimal() else BEFORE


def of_status(protocol: object, release: object) -> Speaker:
    """The engine, by its status' `protocol` and `release`."""
    return Speaker(protocol, str(release)) if isinstance(protocol, int) else BEFORE


def explain_mismatch(engine: Speaker, orchestrator: Speaker) -> str | None:
    """Reason why the two cannot work together; None: they can."""
    if engine.protocol == orchestrator.protocol:
        return None
    return (
        f"the engine's image is of release {engine.release} (protocol {engine.protocol}), the orchestrator's of release "
        f"{orchestrator.release} (protocol {orchestrator.protocol}): use images of one release in spec.inference.image, "
        "spec.orchestrator.image and spec.trainer.image, or leave them out for the operator's own"
    )
