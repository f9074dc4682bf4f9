"""A mistake at the command line, and the files that it is made with."""

from __future__ import annotations

from collections.abc import Mapping
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
