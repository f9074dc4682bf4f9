"""Validation of a manifest. The CRD has refused most mistakes already; this finds the others, with the messages of `rlrun validate`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlrun.defaults.team_defaults import Reading, read_spec
from rlrun_operator.render import former_spec_hashes, spec_hash
from rlrun_operator.state import Manifest

_remembered: dict[tuple[str, str], tuple[Manifest, Judgement]] = {}
"""Judgements by namespace and name, until `forget_run`: the operator judges a run at every event."""


@dataclass(frozen=True)
class Judgement(Reading):
    """Validation result of a specification, without the cluster, and its hashes."""

    @cached_property
    def spec_hash(self) -> str | None:
        """See `render.spec_hash`."""
        return spec_hash(self.spec) if self.spec is not None else None

    @cached_property
    def former_spec_hashes(self) -> frozenset[str]:
        """See `render.former_spec_hashes`."""
        return former_spec_hashes(self.spec) if self.spec is not None else frozenset()


def judge_spec(run: Manifest) -> Judgement:
    """Return the judgement of an RLRun's specification.

    The last result of each run is cached with the document that it belongs to, so that it always equals that of a fresh reading.
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
    """Drop the cached judgement of a deleted run."""
    _remembered.pop((namespace, name), None)


def count_noun(number: int, noun: str) -> str:
    """Return number and noun: `1 engine`, `2 engines`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
