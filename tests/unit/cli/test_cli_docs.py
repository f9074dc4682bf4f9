"""The reference pages are those of the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.cli.docs import FOLDER, pages, run
from rlrun.config.algorithm_names import ADVANTAGE_ENTRIES, LOSS_ENTRIES, PRESETS
from rlrun.config.schema import walk


def test_the_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0, capsys.readouterr().out
    assert FOLDER.is_dir()


def test_a_page_that_is_out_of_date_is_named_and_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--folder", str(tmp_path)]) == 1
    assert "rlrun.md is out of date; run python -m rlrun.cli.docs --write" in capsys.readouterr().out
    assert run(["--folder", str(tmp_path), "--write"]) == 0
    assert run(["--folder", str(tmp_path)]) == 0


def test_every_field_preset_and_option_is_on_its_page() -> None:
    text = pages()
    for path, _ in walk(RLRunSpec, "camel"):
        assert f"| `{path[-1]}` |" in text["rlrun.md"]
    for name in PRESETS:
        assert f"| `{name}` |" in text["presets.md"]
    for entry in (*ADVANTAGE_ENTRIES.values(), *LOSS_ENTRIES.values()):
        for option in entry.options:
            assert f"| `{option}` |" in text["presets.md"]


def test_tables_are_whole() -> None:
    for text in pages().values():
        for line in text.splitlines():
            if line.startswith("|"):
                assert line.endswith("|")
                assert "\n" not in line


def test_links_lead_to_headings() -> None:
    text = pages()["rlrun.md"]
    headings = {"".join(c for c in line.lower() if c.isalnum()) for line in text.splitlines() if line.startswith("#")}
    for part in text.split("](#")[1:]:
        assert part.partition(")")[0] in headings
