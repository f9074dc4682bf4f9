"""The inputs of an image build: found in its Dockerfile and `.dockerignore`, hashed into a key, copied to a separate
folder."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KEY_LENGTH = 16
TIMESTAMP = 1577836800
"""Modification time of every file in a build's folder: builders compare it, and a new clone must find the layers of the
old one."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its lines joined."""

    name: str
    rest: str


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    words = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [Instruction(name.upper(), " ".join(rest)) for name, *rest in words]


def arguments(instructions: Sequence[Instruction]) -> dict[str, str]:
    """Return the build arguments of a Dockerfile with their defaults; "" for none."""
    pairs = [entry.rest.partition("=") for entry in instructions if entry.name == "ARG"]
    return {name: default.strip('"') for name, _, default in pairs}


def copied(instructions: Sequence[Instruction], values: Mapping[str, str]) -> list[str]:
    """Return the paths that a Dockerfile copies from the checkout, relative to it.

    Args:
        values: build arguments; missing ones have their default.
    """
    known = {**arguments(instructions), **values}
    paths = []
    for entry in instructions:
        words = entry.rest.split()
        if entry.name in ("COPY", "ADD") and not any(word.startswith("--from=") for word in words):
            sources = [word for word in words if not word.startswith("--")][:-1]
            paths += [re.sub(r"\$\{(\w+)\}", lambda match: known[match[1]], source) for source in sources]
    return paths


class Ignore:
    """The rules of a `.dockerignore`: the last one that matches a path or a folder above it counts."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        rules = [line for line in lines if line and not line.startswith("#")]
        self._rules = [(rule.startswith("!"), _pattern(rule.removeprefix("!").strip("/"))) for rule in rules]

    def excludes(self, path: str) -> bool:
        """Return whether a build cannot see `path`, a file relative to the checkout."""
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        excluded = False
        for keep, pattern in self._rules:
            if any(pattern.fullmatch(prefix) for prefix in prefixes):
                excluded = not keep
        return excluded


@cache
def _pattern(rule: str) -> re.Pattern[str]:
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", rule)
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts))


def files(root: Path, paths: Sequence[str], ignore: Ignore) -> list[str]:
    """Return all files at and below `paths` that a build sees, sorted, relative to `root`.

    Raises:
        FileNotFoundError: one of the paths is missing or ignored, so the build would fail.
    """
    found: set[str] = set()
    for path in paths:
        below = (
            [root / path] if (root / path).is_file() else [file for file in (root / path).rglob("*") if file.is_file()]
        )
        seen = {name for name in (file.relative_to(root).as_posix() for file in below) if not ignore.excludes(name)}
        if not seen:
            raise FileNotFoundError(f"{path} is not there for an image's build; look at {root / '.dockerignore'}")
        found |= seen
    return sorted(found)


@dataclass(frozen=True)
class File:
    """Content and executable bit of a file in a build."""

    content: bytes
    executable: bool


def read(root: Path, names: Sequence[str]) -> dict[str, File]:
    """Read files by name, once: an edit during a build can neither reach the image nor falsify its key."""
    return {name: File((root / name).read_bytes(), bool((root / name).stat().st_mode & 0o100)) for name in names}


def key(values: Mapping[str, str], content: Mapping[str, File]) -> str:
    """Return the name of a build's result: a hash over the build arguments and the files, the Dockerfile included."""
    digest = hashlib.sha256(json.dumps(sorted(values.items())).encode())
    for name, file in sorted(content.items()):
        digest.update(f"{name} {file.executable} {hashlib.sha256(file.content).hexdigest()}\n".encode())
    return digest.hexdigest()[:KEY_LENGTH]


def write(content: Mapping[str, File], folder: Path) -> None:
    """Write a build's files to an empty folder; equal content gives equal times and modes."""
    for name, file in content.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(0o755 if file.executable else 0o644)
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (TIMESTAMP, TIMESTAMP))
