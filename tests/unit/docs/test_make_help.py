"""`make help` names every target that a person calls."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "Makefile").read_text()
PARTS = {"unit-operator", "unit-roles", "prepare-tests"}
"""Parts of `unit`, `test` and `test-full`."""


def test_every_target_has_its_line() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    documented = set(re.findall(r"^([a-z-]+):.*## \S", TEXT, re.MULTILINE))
    assert documented == set(phony.split()) - PARTS
