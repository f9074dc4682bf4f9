"""Generated reference pages match the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import RLRunStatus
from rlrun.config.algorithm.names import ADVANTAGE_ENTRIES, LOSS_ENTRIES, PRESETS
from rlrun.config.loading.schema import field_meaning, walk_model
from tools.docs import generated_files, pages, run


def test_generated_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--check"]) == 0, capsys.readouterr().out


def test_outdated_file_is_named_and_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    for name in generated_files():
        assert f"{name} is out of date; run python -m tools.docs --write" in out
    assert run(["--folder", str(tmp_path), "--write"]) == 0
    assert run(["--folder", str(tmp_path)]) == 0


def test_reference_pages_contain_all_fields_presets_and_options() -> None:
    text = pages()
    for model, page in ((RLRunSpec, "rlrun.md"), (RLRunStatus, "status.md")):
        for path, owner, name in walk_model(model, "camel"):
            if field_meaning(owner, name):  # Kubernetes documents its own types
                assert f"| `{path[-1]}` |" in text[page]
    for name in PRESETS:
        assert f"| `{name}` |" in text["presets.md"]
    for entry in (*ADVANTAGE_ENTRIES.values(), *LOSS_ENTRIES.values()):
        for option in entry.options:
            assert f"| `{option}` |" in text["presets.md"]


def test_reference_tables_have_complete_rows() -> None:
    for text in pages().values():
        for line in text.splitlines():
            if line.startswith("|"):
                assert line.endswith("|")
                assert "\n" not in line


def test_links_lead_to_headings() -> None:
    for name in ("rlrun.md", "status.md"):
        text = pages()[name]
        headings = {
            "".join(c for c in line.lower() if c.isalnum()) for line in text.splitlines() if line.startswith("#")
        }
        for part in text.split("](#")[1:]:
            assert part.partition(")")[0] in headings
