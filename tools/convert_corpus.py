"""Keys and values of other projects' example files (tests/unit/convert/corpus), and their results with `rlrun convert`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import Converted, convert_settings
from rlrun.convert.readers.hydra import Setting, read_scalar

CORPUS = Path(__file__).parents[1] / "tests" / "unit" / "convert" / "corpus"
_BRACES = re.compile(r"\{([\w.,]+)\}")


def corpus(name: str) -> Mapping[str, list[Setting]]:
    """Return the settings of each file of one project (`verl`, `areal`), by the file's name.

    Raises:
        ValueError: the corpus is malformed.
    """
    files: dict[str, dict[str, Setting]] = {}
    current: dict[str, Setting] = {}
    for line in (CORPUS / f"{name}.txt").read_text().splitlines():
        if line.startswith("== "):
            title, _, other = line[3:].partition(" < ")
            current = files[title] = dict(files[other]) if other else {}
        elif line.startswith("!"):
            del current[line[1:]]
        elif line and not line.startswith("#"):
            pattern, equals, value = line.partition("=")
            if not equals:
                raise ValueError(f"{name}.txt: {line!r} is not in the form key=value")
            for key in _expanded(pattern):
                current[key] = Setting(key, read_scalar(value), name)
    return {title: list(settings.values()) for title, settings in files.items()}


def converted(name: str) -> Iterator[tuple[str, list[Setting], Converted]]:
    """Return each file of a project with its settings and its conversion, with 1,000 rows if the number is unknown."""
    for title, settings in corpus(name).items():
        yield title, settings, convert_settings(settings, Context(Path(title).stem, 1000), [title])


def _expanded(pattern: str) -> Iterator[str]:
    """Expand `{a,b}.c` to `a.c` and `b.c`."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    for name in match[1].split(","):
        yield from _expanded(pattern[: match.start()] + name + pattern[match.end() :])
