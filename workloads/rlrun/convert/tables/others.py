"""Trainers whose files are called by their name: their most used keys and our fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlrun.config.loading.problems import ConfigError, Problem


@dataclass(frozen=True)
class Counterpart:
    """A key of another trainer and the field here."""

    key: str
    field: str
    """Below `spec`."""
    note: str


@dataclass(frozen=True)
class OtherTrainer:
    """A trainer whose files are not converted."""

    name: str
    marks: tuple[str, ...]
    """Beginnings of keys that no converted trainer has."""
    commands: tuple[str, ...]
    """Beginnings of words of its commands, a file's name without its folder."""
    keys: tuple[Counterpart, ...]

    def refusal(self, source: str, line: int | None = None) -> ConfigError:
        """Return the name and the table as an error to raise."""
        said = f"a file of {self.name}, which is not converted; write a manifest (rlrun init) with these fields:"
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
    """True if a word is a beginning, an option with a value, or goes on behind a beginning that ends with `.` or names a file."""
    return any(
        word == one or word.startswith(f"{one}=") or (word.startswith(one) and one.endswith((".", "_grpo")))
        for one in beginnings
    )
