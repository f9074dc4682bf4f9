"""Can the manifest be run? The CRD has refused most mistakes already; this finds the rest, in the words of `rlrun validate`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlrun.defaults.judgement import Reading, read_spec
from rlrun_operator.render import former_spec_hashes, spec_hash
from rlrun_operator.state import Manifest

_remembered: dict[tuple[str, str], tuple[Manifest, Judgement]] = {}
"""Judgements by namespace and name, until `forget_run`: a run is judged again at every event, however many there are."""


@dataclass(frozen=True)
class Judgement(Reading):
    """Validation of a specification without the cluster, and its marks."""

    @cached_property
    def spec_hash(self) -> str | None:
        """See `render.spec_hash`."""
        return spec_hash(self.spec) if self.spec is not None else None

    @cached_property
    def former_spec_hashes(self) -> frozenset[str]:
        """See `render.former_spec_hashes`."""
        return former_spec_hashes(self.spec) if self.spec is not None else frozenset()


def judge_spec(run: Manifest) -> Judgement:
    """Read the specification of an RLRun.

    The last answer for each run is kept with the very document that it was for, so that the result is always that of a fresh reading.
    """
    document = {key: run[key] for key in ("apiVersion", "kind", "spec") if key in run}
    document["metadata"] = {key: run["metadata"].get(key) for key in ("name", "uid", "generation")}
    key = (str(run["metadata"].get("namespace")), str(run["metadata"].get("name")))
    known = _remembered.get(key)
    if known is not None and known[0] == document:
        return known[1]
    found = read_spec(document)
    result = Judgement(found.spec, found.problems, found.ignored)
    _remembered[key] = (document, result)
    return result


def forget_run(namespace: str, name: str) -> None:
    """Drop what is kept of a run that is gone."""
    _remembered.pop((namespace, name), None)


def count_noun(number: int, noun: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
