"""Damage to a file: one changed byte, a missing end, a block of zeros, two joined lines."""

from __future__ import annotations

from collections.abc import Iterator


def damages(content: bytes, *, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """Yield a name and the damaged content.

    Args:
        content: the whole file.
        every: distance of two damaged places, in bytes.
    """
    for at in range(0, len(content), every):
        for byte in (content[at] ^ 0x01, 0x00, 0xFF, ord("\n"), ord('"')):
            yield f"byte {at} is {byte:#04x}", content[:at] + bytes([byte]) + content[at + 1 :]
        yield f"cut at {at}", content[:at]
        yield f"zeros from {at}", content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]
    yield "line by line twice", content.replace(b"\n", b"\n\n")
    yield "not JSON", b"\x00\xffgarbage\n" + content
    yield "other JSON", b'[1]\n"x"\n{}\n{"step": "1"}\n{"step": 1e400}\n' + content
