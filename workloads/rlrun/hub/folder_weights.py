"""Completeness of the weights in a model's folder: the files that an index names, and the headers of safetensors. Values are not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a single file, and of the index of several files; transformers reads the index if both exist."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 64 << 20
_AGAIN = "copy or download it again"


def read_header(path: Path) -> bytes:
    """Return the header of a safetensors file: JSON with the name, type, shape and position of each tensor.

    Raises:
        ValueError: the file is not a safetensors file.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} has no header")
        header = file.read(length)
    json.loads(header)
    return header


def check_weights(path: Path) -> frozenset[str]:
    """Reject a file that safetensors cannot read, such as one of an interrupted copy or a pointer of Git LFS.

    Returns:
        Names of its tensors.

    Raises:
        ValueError: the file is not a safetensors file, or its end is missing.
        OSError: the file cannot be read.
    """
    try:
        header = read_header(path)
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file") from error
    expected, found = _LENGTH_BYTES + len(header) + end, path.stat().st_size
    if found < expected:
        raise ValueError(f"{path} has {found} bytes, but its header requires {expected}")
    return frozenset(tensors)


def weights_problem(folder: Path) -> str | None:
    """Return why the weights of a model's folder cannot be read completely, with a fix, or None.

    Other files of the folder are ignored. The trainer reports a file that cannot be opened when it reads the weights.

    Args:
        folder: folder of a model in safetensors.
    """
    index = folder / INDEX
    if not index.is_file():
        return _single_problem(folder)
    try:
        files = _read_index(index)
    except OSError as error:
        return f"{index} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{index} is not an index of weights: {error}; {_AGAIN}"
    if absent := [name for name in files if not (folder / name).is_file()]:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        return f"{folder} lacks {absent[0]}{more} of the {len(files)} files that {INDEX} names; copy or download the missing files"
    for name, tensors in files.items():
        if (problem := _file_problem(folder / name, tensors)) is not None:
            return problem
    return None


def _single_problem(folder: Path) -> str | None:
    if (folder / SINGLE).is_file():
        return _file_problem(folder / SINGLE, frozenset())
    if (found := sorted(file.name for file in folder.glob("*.safetensors"))) and all(
        name[:5] == "model" for name in found
    ):
        return (
            f"{folder} has {found[0]} but no {INDEX}, which names the file of each tensor; copy or download the index"
        )
    return (
        f"{folder} has no weights: expected {SINGLE} or {INDEX}"
        f"{f', but it has only {found[0]}' if found else ''}; use the folder of a complete language model"
    )


def _read_index(index: Path) -> Mapping[str, frozenset[str]]:
    """Return the names of each file's tensors, by file in sorted order."""
    content = json.loads(index.read_bytes())
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise ValueError("it has no weight_map from tensors to files")
    files: dict[str, set[str]] = {file: set() for file in sorted(set(where.values()))}
    for name, file in where.items():
        files[file].add(name)
    return {file: frozenset(names) for file, names in files.items()}


def _file_problem(file: Path, expected: frozenset[str]) -> str | None:
    try:
        found = check_weights(file)
    except ValueError as error:
        return f"{error}; copy or download the file again"
    except OSError:
        return None
    if not found:
        return f"{file} has no tensors; copy or download the file again"
    if absent := sorted(expected - found):
        return (
            f"{file} lacks {absent[0]}, which {INDEX} assigns to it; copy or download the index and the weights again, from the same "
            "revision"
        )
    return None
