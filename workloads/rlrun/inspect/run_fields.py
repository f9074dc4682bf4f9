"""Fields of a run for a comparison, of a folder's files or of a cluster's object: the only way for all callers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import yaml

from rlrun.inspect.folder.small_files import read_config
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.json_types import Json

_BYTES_MAX = 4 << 20
"""Larger files are not those of a run."""


@dataclass(frozen=True)
class RunFields:
    """Fields of a run in the names of its manifest."""

    values: Mapping[str, object]
    known: Collection[str] | None = None
    """Dotted paths below which all fields are known; None: all are. Folders without a manifest only know what the run computes."""


def fields_of_spec(spec: Mapping[str, object]) -> RunFields:
    """Fields of a specification, with defaults; of one that this version cannot read, the fields as they are written."""
    from rlrun.api import comparable

    found = comparable.fields_of_spec(spec)
    if found is not None:
        return RunFields(found)
    return RunFields(_without_variables(spec), sorted(spec))


def fields_of_config(config: Mapping[str, object]) -> RunFields:
    """Fields of a resolved configuration (`run.json`)."""
    from rlrun.api import comparable

    return RunFields(comparable.fields_of_config(config), comparable.computed_fields())


def fields_of_folder(
    paths: RunPaths, config: Mapping[str, object], opened: Callable[[Path], BinaryIO] | None = None
) -> RunFields:
    """Fields of a run in a folder: of its manifest, or else of its configuration.

    Args:
        paths: of the run.
        config: sections of its `run.json`.
        opened: opens a file of the folder; None: without a check.
    """
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        with (opened or (lambda path: path.open("rb")))(paths.manifest) as file:
            content = file.read(_BYTES_MAX + 1)
        document = yaml.safe_load(content) if len(content) <= _BYTES_MAX else None
        if isinstance(document, dict) and isinstance(spec := document.get("spec"), dict):
            return fields_of_spec(spec)
    return fields_of_config(config)


def sections_by_hand(paths: RunPaths, attempts: Sequence[int]) -> Json:
    """Sections of a configuration, of which a run whose roles were started by hand has no `run.json`."""
    config = read_config(paths, attempts)
    return {"trainer": config} if config else {}


def _without_variables(spec: Mapping[str, object]) -> dict[str, object]:
    return {
        name: {key: one for key, one in value.items() if key not in ("env", "envFrom")}
        if isinstance(value, Mapping)
        else value
        for name, value in spec.items()
    }
