"""Trainers that are recognized but not converted: their most used keys and the corresponding fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlrun.config.loading.problems import ConfigError, Problem


@dataclass(frozen=True)
class Counterpart:
    """Key of another trainer and the corresponding field."""

    key: str
    field: str
    """Field below `spec`."""
    note: str


@dataclass(frozen=True)
class OtherTrainer:
    """Trainer whose files are not converted."""

    name: str
    marks: tuple[str, ...]
    """Prefixes of keys that no converted trainer has."""
    commands: tuple[str, ...]
    """Prefixes of words in its commands; for files without their folder."""
    keys: tuple[Counterpart, ...]

    def unsupported_error(self, source: str, line: int | None = None) -> ConfigError:
        """Return an error with the trainer's name and its table."""
        said = f"files of {self.name} are not supported; write a manifest (rlrun init) with these fields:"
        rows = [
            Problem(source, one.key, f"spec.{one.field}{f' ({one.note})' if one.note else ''}") for one in self.keys
        ]
        return ConfigError([Problem(source, "", said, line), *rows])


@cache
def other_trainers() -> tuple[OtherTrainer, ...]:
    """Return the trainers of `others.txt`."""
    text = (Path(__file__).parent / "others.txt").read_text(encoding="utf-8")
    return tuple(_other_trainer(block) for block in text.split("== ")[1:])


def _other_trainer(block: str) -> OtherTrainer:
    name, marks, commands, *rows = block.strip().splitlines()
    keys = []
    for row in rows:
        key, _, there = row.partition(" = ")
        field, _, note = there.partition(" (")
        keys.append(Counterpart(key, field, note.removesuffix(")")))
    return OtherTrainer(
        name, tuple(marks.partition(": ")[2].split()), tuple(commands.partition(": ")[2].split()), tuple(keys)
    )


def trainer_of_keys(keys: Iterable[str]) -> OtherTrainer | None:
    """Return the trainer whose keys these are, or None."""
    found = list(keys)
    return next((one for one in other_trainers() if any(key.startswith(one.marks) for key in found)), None)


def trainer_of_command(words: Sequence[str]) -> OtherTrainer | None:
    """Return the trainer that a command starts, or None."""
    names = [word.rpartition("/")[2] if not word.startswith("-") else word for word in words]
    return next(
        (one for one in other_trainers() if any(_is_marked(name, one.commands) for name in names)),
        None,
    )


def _is_marked(word: str, beginnings: Sequence[str]) -> bool:
    """Return whether a word matches a prefix: equal, an option with a value, or longer after `.` or `_grpo`."""
    return any(
        word == one or word.startswith(f"{one}=") or (word.startswith(one) and one.endswith((".", "_grpo")))
        for one in beginnings
    )
