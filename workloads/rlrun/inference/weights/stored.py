"""Raw bytes of a published folder's tensors, without torch (numpy has no bfloat16)."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from rlrun.inference.weights.preflight import FolderError
from rlrun.protocol.messages.buckets import Bucket
from rlrun.protocol.messages.sparse import Bytes


class StoredTensors:
    """Memory-mapped safetensors files of a folder.

    Args:
        folder: folder of a complete version.

    Raises:
        FolderError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Bytes] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                self._found |= _stored_tensors(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise FolderError(f"{path} is not a complete safetensors file: {error}") from None

    def fill(self, bucket: Bucket, body: Bytes) -> None:
        """Copy a bucket's tensors to their offsets in its body.

        Raises:
            FolderError: a tensor is missing, or has another size.
        """
        for slot in bucket.slots:
            name, found = slot.tensor.name, self._found.get(slot.tensor.name)
            if found is None or len(found) != slot.tensor.size:
                size = "no" if found is None else f"{len(found)}"
                raise FolderError(f"{self._folder} has {size} bytes of {name}, expected {slot.tensor.size}")
            body[slot.offset : slot.end] = found


def _stored_tensors(path: Path) -> dict[str, Bytes]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content = np.frombuffer(memory, np.uint8)[8 + length :]
    found: dict[str, Bytes] = {}
    for name, about in header.items():
        if name != "__metadata__":
            first, end = about["data_offsets"]
            found[name] = content[first:end]
    return found
