"""Malformed manifests, one defect each, judged by the API server, by the operator and by `rlrun validate`.

The first lines of a file say what a user must be told:

    # expect: regular expression of the message
    # stage: strict (only strict field validation sees it) | apply (the API server refuses it in any case) | operator
    # field: text that names the field
    # local: regular expression of what `rlrun validate` says, where it differs from `expect`; none: it accepts the manifest
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

Stage = Literal["strict", "apply", "operator"]


@dataclass(frozen=True)
class Malformed:
    """One manifest and who must find what."""

    path: Path
    expect: str
    stage: Stage
    field: str
    local: str | None
    """None: only the API server knows."""

    @property
    def name(self) -> str:
        """Name of the file, without its ending."""
        return self.path.stem


def read(path: Path) -> Malformed:
    """One file of the folder.

    Raises:
        ValueError: its first lines do not say what is expected.
    """
    head = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    said = {key: value for key, _, value in (line.removeprefix("# ").partition(": ") for line in head)}
    if not {"expect", "stage", "field"} <= said.keys() or said["stage"] not in get_args(Stage):
        raise ValueError(f"{path} must begin with '# expect:', '# stage: strict|apply|operator' and '# field:'")
    local = said.get("local", said["expect"])
    stage = cast(Stage, said["stage"])
    return Malformed(path, said["expect"], stage, said["field"], None if local == "none" else local)


MALFORMED = [read(path) for path in sorted((Path(__file__).parent / "malformed").glob("*.yaml"))]
