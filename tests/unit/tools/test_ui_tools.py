"""Files and types of the page: small, with licenses, and equal to the models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlrun.ui.static_files import StaticFiles
from tools import ui_types
from tools.ui_bundle import BUILT, SOURCES, differences

_BYTES = 400_000


def test_generated_types_match_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ui_types.main([]) == 0
    monkeypatch.setattr(ui_types, "FILE", tmp_path / "answers.ts")
    (tmp_path / "answers.ts").write_text("")
    assert ui_types.main([]) == 1
    assert ui_types.main(["--write"]) == 0
    text = (tmp_path / "answers.ts").read_text()
    assert '  side: "both" | "first" | "second";' in text
    assert "  spans: [number, number][];" in text
    assert "  means: (number | null)[];" in text


def test_page_is_small_and_loads_existing_files() -> None:
    static = StaticFiles()
    assert sum(file.stat().st_size for file in BUILT.rglob("*") if file.is_file()) < _BYTES
    page = (BUILT / "index.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len([name for name in loaded if name != "data:,"]) == 2
    for name in loaded:
        assert name == "data:," or static.get(name.removeprefix("./")) is not None, name
    assert "<script>" not in page
    assert "style=" not in page


def test_page_contains_licenses_of_bundled_packages() -> None:
    text = (BUILT / "licences.txt").read_text()
    for name, version in json.loads((SOURCES / "package.json").read_text())["dependencies"].items():
        assert re.search(
            rf"^{name} {re.escape(version)} \((MIT|ISC|BSD-[23]-Clause|Apache-2.0)\)$", text, re.MULTILINE
        ), name


def test_page_lock_has_hashes_without_addresses() -> None:
    packages = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    own = packages.pop("")
    assert own["dependencies"] | own["devDependencies"] == {
        name: packages[f"node_modules/{name}"]["version"] for name in own["dependencies"] | own["devDependencies"]
    }
    for name, package in packages.items():
        assert package["integrity"].startswith("sha512-"), name
        assert "resolved" not in package, name


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    for folder, files in (
        ("a", {"same": "1", "changed": "1", "gone": "1"}),
        ("b", {"same": "1", "changed": "2", "new": "1"}),
    ):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    assert differences(tmp_path / "a", tmp_path / "b") == ["changed", "gone", "new"]
