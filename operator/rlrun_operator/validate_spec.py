"""Can the manifest be run? The CRD has refused most mistakes already; this finds the rest, in the words of `rlrun validate`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.config.loading.examine import validate
from rlrun.config.loading.layers import Reader
from rlrun.config.loading.problems import ConfigError
from rlrun.runtime.printable import printable
from rlrun_operator.render import former_spec_hashes, spec_hash
from rlrun_operator.state import Manifest

log = logging.getLogger(__name__)
MESSAGE_MAX = 2000
"""Characters of a message in the status."""


_remembered: dict[tuple[str, str], tuple[Manifest, Judgement]] = {}
"""Judgements by namespace and name, until `forget`: a run is judged again at every event, however many there are."""


@dataclass(frozen=True)
class Judgement:
    """Validation of a specification without the cluster."""

    spec: RLRunSpec | None
    """None: it is invalid."""
    problems: str = ""
    """Field, value and fix of everything that is wrong."""
    ignored: str = ""
    """Fields that this operator does not know: the CRD may be of a newer release."""

    @cached_property
    def spec_hash(self) -> str | None:
        """See `render.spec_hash`."""
        return spec_hash(self.spec) if self.spec is not None else None

    @cached_property
    def former_spec_hashes(self) -> frozenset[str]:
        """See `render.former_spec_hashes`."""
        return former_spec_hashes(self.spec) if self.spec is not None else frozenset()


def judge(run: Manifest) -> Judgement:
    """Read the specification of an RLRun.

    The last answer for each run is kept with the very document that it was for, so that the result is always that of a fresh reading.
    """
    document = {key: run[key] for key in ("apiVersion", "kind", "spec") if key in run}
    document["metadata"] = {key: run["metadata"].get(key) for key in ("name", "uid", "generation")}
    key = (str(run["metadata"].get("namespace")), str(run["metadata"].get("name")))
    known = _remembered.get(key)
    if known is not None and known[0] == document:
        return known[1]
    result = _read(document)
    _remembered[key] = (document, result)
    return result


def forget(namespace: str, name: str) -> None:
    """Drop what is kept of a run that is gone."""
    _remembered.pop((namespace, name), None)


def _read(document: Manifest) -> Judgement:
    try:
        return _validated(document)
    except Exception as error:  # the only place that reads what users write: whatever a reader does not bear is an invalid specification
        log.exception("run %s: its specification could not be read", document["metadata"].get("name"))
        return Judgement(None, problems=f"the specification cannot be read ({type(error).__name__}): simplify spec")


def _validated(document: Manifest) -> Judgement:
    try:
        return Judgement(RLRun.model_validate(document, strict=True).spec)
    except ValidationError:
        pass
    layer = Reader(RLRun, "", camel_only=True).read(document)
    ignored = bounded(problem.path for problem in layer.problems)
    layer.problems.clear()
    try:
        return Judgement(validate(RLRun, layer).spec, ignored=ignored)
    except ConfigError as error:
        return Judgement(None, problems=bounded(str(problem) for problem in error.problems))


def shorten(text: str, limit: int = MESSAGE_MAX) -> str:
    """`text` on one line that a terminal can show, of at most `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def counted(number: int, noun: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def bounded(parts: Iterable[str]) -> str:
    """`parts` as one message of at most `MESSAGE_MAX` characters, with the number of those left out."""
    shown: list[str] = []
    left = MESSAGE_MAX
    every = [shorten(part, 600) for part in parts]
    for part in every:
        left -= len(part) + 2
        if left < 40 and shown:
            break
        shown.append(part)
    more = len(every) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
