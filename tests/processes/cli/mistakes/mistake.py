"""A mistake at the command line, and the files that it is made with."""

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
"""Content of what is a folder."""
Files = Mapping[str, str | bytes | None]


@dataclass(frozen=True)
class Mistake:
    """A command line with one mistake, and what its message must hold."""

    what: str
    """The mistake in words; unique."""
    words: str
    """The command line, as a shell reads it."""
    code: int
    """Exit code (docs/reference/cli.md)."""
    place: str
    """The flag, field or file that the message names."""
    value: str
    """Value that was given, as far as it is another thing than the place."""
    fix: str
    """The way out: what is expected, known, or to be done."""
    files: Files = field(default_factory=dict)
    """Files beside `run.yaml`, `run.toml` and `sft.yaml`, which are correct, or instead of them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    repairs: Sequence[tuple[str, str]] = ()
    """Parts of the file (or of the command line) and their replacements, which the message must contain. With them the command succeeds.

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
"""A manifest with one field in a line."""
VALIDATE = "rlrun validate run.yaml"


CHATS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
"""A file of chats in which each row is right."""


def spec_with(line: str, base: str = SPEC) -> str:
    """The manifest with a line of `spec`, in place of the one that has the same field."""
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
    """A mistake in one line of `spec`.

    Args:
        what: the mistake in words.
        line: the line.
        place: as in `Mistake`, and so are the others.
        value: the value.
        fix: the message's fix.
        repair: part of the line and its replacement; None: `fix` replaces the whole line if it sets the same field.
        base: manifest that gets the line.
        code: exit code.
        words: command line.
        files: further files.
        hidden: secret part of the line.
        notice: see `Mistake`.
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
    """A mistake of the whole manifest."""
    return Mistake(
        what, words, code, place, value, fix, {"run.yaml": content}, repairs=() if repair is None else (repair,)
    )


def manifest(old: str, new: str, *, base: str = MANIFEST) -> Files:
    """`run.yaml` with a change.

    Raises:
        ValueError: there is nothing to change.
    """
    if old not in base:
        raise ValueError(f"{old!r} is not in the manifest")
    return {"run.yaml": base.replace(old, new)}


def toml(old: str, new: str) -> Files:
    """`run.toml` with a change.

    Raises:
        ValueError: there is nothing to change.
    """
    if old not in TOML:
        raise ValueError(f"{old!r} is not in the file")
    return {"run.toml": TOML.replace(old, new)}


def plain(code: int, *rows: tuple[str, str, str, str, str]) -> list[Mistake]:
    """Mistakes of one exit code in the command line alone.

    Args:
        code: exit code.
        rows: mistake in words, command line, place, value and fix.
    """
    return [Mistake(what, words, code, place, value, fix) for what, words, place, value, fix in rows]


def changed(words: str, code: int, file: str, *rows: tuple[str, str, str, str, str, str]) -> list[Mistake]:
    """Mistakes that one command line meets in a changed `run.yaml` or `run.toml`.

    Args:
        words: command line.
        code: exit code.
        file: name of the file.
        rows: mistake in words, text of the file and its replacement, place, value and fix.
    """
    change = toml if file == "run.toml" else manifest
    return [
        Mistake(what, words, code, place, value, fix, change(old, new)) for what, old, new, place, value, fix in rows
    ]
