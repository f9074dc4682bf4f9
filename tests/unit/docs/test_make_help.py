"""`make help` lists all targets for users."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "Makefile").read_text()
PARTS = {"unit-operator", "unit-roles", "prepare-tests"}
"""Parts of `unit`, `test` and `test-full`."""


def test_make_targets_have_help_lines() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    documented = set(re.findall(r"^([a-z0-9-]+):.*## \S", TEXT, re.MULTILINE))
    assert documented == set(phony.split()) - PARTS
