"""Documented commands and files of PRIME-RL, verl and AReaL: each starts, is converted or is refused with a counterpart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tools.documented import PROGRAMS, Documented, documented, outcome

ALL = list(documented())
NO_COUNTERPART = ("unknown field", "unknown option", "known: ", "is not a", "Traceback")
REFUSED = {
    "--data-parallel-address": "inference.replicas are engines on one node each",
    "--api-key": "RLRUN_API_KEY",
    "weights-only": "checkpoint.resume.from_run",
    "--bench": "the option --bench of trainer, sft and rl",
    "trainer.loss.type": "algorithm.loss.name takes package.module:function",
    "model.vlm": "trained on text",
    "inference.deployment.type": "set inference.replicas",
    "teacher": "rlrun synthesize",
}
"""For each refusal: a word of the command or its message, and the counterpart."""


@pytest.mark.parametrize("one", ALL, ids=[f"{one.page}-{i}" for i, one in enumerate(ALL)])
def test_documented_example_has_actionable_outcome(one: Documented, tmp_path: Path) -> None:
    found = outcome(one, tmp_path)
    said = "\n".join(found.said)
    if found.kind == "refused":
        assert not any(words in said for words in NO_COUNTERPART), said
        assert any(word in said and counterpart in said for word, counterpart in REFUSED.items()), said
    elif found.kind == "converted":
        assert all("nothing" not in line and ":" in line for line in found.said), said
    else:
        assert found.kind in ("starts", "other")
        assert bool(said) == (found.kind == "other")


def test_most_documented_examples_start_or_convert() -> None:
    pages = {project: {one.page for one in ALL if one.project == project} for project in ("PRIME-RL", "verl", "AReaL")}
    assert {project: len(found) for project, found in pages.items()} == {"PRIME-RL": 15, "verl": 5, "AReaL": 4}
    commands = Counter(one.text.split()[0] for one in ALL if one.kind == "command")
    assert commands.keys() == PROGRAMS.keys()
    assert len(ALL) - sum(one.kind == "other" for one in ALL) >= 110
