"""The oldest supported Go version: code, README, workflow and Go modules agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.binaries import MODULES, OLDEST_GO

ROOT = Path(__file__).resolve().parents[3]
VERSION = ".".join(map(str, OLDEST_GO))


def test_readme_names_the_oldest_go() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert re.findall(r"Go (\d+\.\d+) or newer", text) == [VERSION]


def test_workflow_installs_the_oldest_go() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yaml").read_text()
    assert set(re.findall(r'go-version: "([^"]+)"', text)) == {VERSION}
    assert set(re.findall(r"-go([\d.]+)-", text)) == {VERSION}, "keys of caches"


@pytest.mark.parametrize("module", sorted(path.parent.name for path in MODULES.glob("*/go.mod")))
def test_modules_build_with_the_oldest_go(module: str) -> None:
    found = re.search(r"^go (\d+)\.(\d+)", (MODULES / module / "go.mod").read_text(), re.MULTILINE)
    assert found is not None
    assert (int(found[1]), int(found[2])) <= OLDEST_GO
