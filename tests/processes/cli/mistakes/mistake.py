"""Mistake at the command line, with its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MANIFEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: quick}
spec:
  model: {tiny: {}}
  maxSteps: 10
  seqLen: 512
  environments:
  - id: reverse-text
    args: {length: 5}
"""
TOML = """\
max_steps = 10
seq_len = 512
[model.tiny]
[[environments]]
id = "reverse-text"
"""
SFT = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: tuned}
spec:
  task: SFT
  model: {tiny: {}}
  maxSteps: 10
  seqLen: 64
  data: {sources: [{path: chats.jsonl}]}
"""
FOLDER = None
"""Content that represents a folder."""
Files = Mapping[str, str | bytes | None]


@dataclass(frozen=True)
class Mistake:
    """A command line with one mistake, and the expected contents of its message."""

    what: str
    """Description of the mistake; unique."""
    words: str
    """Command line, as a shell reads it."""
    code: int
    """Exit code (docs/reference/cli.md)."""
    place: str
    """Flag, field or file that the message names."""
    value: str
    """The given value, if it differs from the place."""
    fix: str
    """Fix in the message: expected or known values, or a command."""
    files: Files = field(default_factory=dict)
    """Files in addition to the correct `run.yaml`, `run.toml` and `sft.yaml`, or replacements of them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    repairs: Sequence[tuple[str, str]] = ()
    """Parts of the file (or command line) and their replacements, which the message must contain. With them the command succeeds.

    An empty replacement needs the word `remove` in the message.
    """
    notice: bool = False
    """True if the command succeeds and prints the message as a note."""
    hidden: str = ""
    """Part of the input that no output may contain."""


SPEC = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: quick}
spec:
  model: {tiny: {}}
  maxSteps: 10
  seqLen: 512
  environments: [{id: reverse-text, args: {length: 5}}]
"""
"""A manifest with one field per line."""
VALIDATE = "rlrun validate run.yaml"


CHATS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
"""Return a file of chats in which each row is correct."""


def spec_with(line: str, base: str = SPEC) -> str:
    """Return the manifest with a line of `spec`, which replaces the line with the same field."""
    name = line.partition(":")[0]
    lines = [one for one in base.splitlines() if not one.startswith(f"  {name}:")]
    return "\n".join([*lines, f"  {line}", ""])


def field_of_spec(
    what: str,
    line: str,
    place: str,
    value: str,
    fix: str,
    repair: tuple[str, str] | None = None,
    *,
    base: str = SPEC,
    code: int = 78,
    words: str = VALIDATE,
    files: Files | None = None,
    hidden: str = "",
    notice: bool = False,
) -> Mistake:
    """Return a mistake in one line of `spec`.

    Args:
        what: description of the mistake.
        line: wrong line.
        place: place as in `Mistake`, like the other undocumented fields.
        value: given value.
        fix: fix in the message.
        repair: part of the line and its replacement; None: `fix` replaces the whole line if it sets the same field.
        base: manifest with the line.
        code: exit code.
        words: command line.
        files: additional files.
        hidden: secret part of the line.
        notice: True if the command succeeds, see `Mistake`.
    """
    same = fix.partition(":")[0] == line.partition(":")[0]
    repairs = (repair,) if repair is not None else ((line, fix),) if same else ()
    made = {"run.yaml": spec_with(line, base)} | dict(files or {})
    return Mistake(
        what, words, 0 if notice else code, place, value, fix, made, repairs=repairs, hidden=hidden, notice=notice
    )


def text(
    what: str,
    content: str | bytes,
    place: str,
    value: str,
    fix: str,
    repair: tuple[str, str] | None = None,
    *,
    words: str = VALIDATE,
    code: int = 78,
) -> Mistake:
    """Return a mistake of the whole manifest."""
    return Mistake(
        what, words, code, place, value, fix, {"run.yaml": content}, repairs=() if repair is None else (repair,)
    )


def manifest(old: str, new: str, *, base: str = MANIFEST) -> Files:
    """Return `run.yaml` with a change.

    Raises:
        ValueError: the manifest lacks the text.
    """
    if old not in base:
        raise ValueError(f"{old!r} is not in the manifest")
    return {"run.yaml": base.replace(old, new)}


def toml(old: str, new: str) -> Files:
    """Return `run.toml` with a change.

    Raises:
        ValueError: the file lacks the text.
    """
    if old not in TOML:
        raise ValueError(f"{old!r} is not in the file")
    return {"run.toml": TOML.replace(old, new)}


def plain(code: int, *rows: tuple[str, str, str, str, str]) -> list[Mistake]:
    """Return mistakes with one exit code that need only a command line.

    Args:
        code: exit code.
        rows: description of the mistake, command line, place, value and fix.
    """
    return [Mistake(what, words, code, place, value, fix) for what, words, place, value, fix in rows]


def changed(words: str, code: int, file: str, *rows: tuple[str, str, str, str, str, str]) -> list[Mistake]:
    """Return mistakes of one command line with a changed `run.yaml` or `run.toml`.

    Args:
        words: command line.
        code: exit code.
        file: name of the file.
        rows: description of the mistake, text of the file and its replacement, place, value and fix.
    """
    change = toml if file == "run.toml" else manifest
    return [
        Mistake(what, words, code, place, value, fix, change(old, new)) for what, old, new, place, value, fix in rows
    ]
