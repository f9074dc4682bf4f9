"""Malformed manifests, one defect each, for the API server, the operator and `rlrun validate`.

The first lines of a file state the expected message:

    # expect: regular expression of the message
    # stage: strict (only strict field validation finds it) | apply (the API server always refuses it) | operator
    # field: name of the wrong field
    # local: regular expression of the message of `rlrun validate`, if it is another one; none: the manifest is valid
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

Stage = Literal["strict", "apply", "operator"]


@dataclass(frozen=True)
class Malformed:
    """One malformed manifest and its expected error."""

    path: Path
    expect: str
    stage: Stage
    field: str
    local: str | None
    """Expected message of `rlrun validate`, or None if only the API server can find the defect."""

    @property
    def name(self) -> str:
        """Name of the file, without its suffix."""
        return self.path.stem


def read(path: Path) -> Malformed:
    """Read one file of the folder.

    Raises:
        ValueError: its first lines do not state the expected message.
    """
    head = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    said = {key: value for key, _, value in (line.removeprefix("# ").partition(": ") for line in head)}
    if not {"expect", "stage", "field"} <= said.keys() or said["stage"] not in get_args(Stage):
        raise ValueError(f"{path} must begin with '# expect:', '# stage: strict|apply|operator' and '# field:'")
    local = said.get("local", said["expect"])
    stage = cast(Stage, said["stage"])
    return Malformed(path, said["expect"], stage, said["field"], None if local == "none" else local)


MALFORMED = [read(path) for path in sorted((Path(__file__).parent / "malformed").glob("*.yaml"))]
