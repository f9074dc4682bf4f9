"""Checksum of a JSON document that a run reads back: a changed byte is found, whatever the layout of the text."""

from __future__ import annotations

import json
import zlib

KEY = "crc32"


class ChecksumError(ValueError):
    """Error for a document that is not what was written."""


def document_crc32(document: object) -> int:
    """CRC-32 of the content of a JSON document without its key `crc32`."""
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def check_document(document: dict[str, object]) -> bool:
    """Remove the key `crc32` and compare it; False if the document has none, as those of earlier releases.

    Raises:
        ChecksumError: it is not what was written.
    """
    if KEY not in document:
        return False
    if document.pop(KEY) != document_crc32(document):
        raise ChecksumError("it has another checksum than when it was written")
    return True
