"""Documented commands: each one is run by a test or excused with a reason."""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.documented_commands import REASONS, ROOT, TESTS, commands, pages, rules

ALL = {command for page in pages() for command in commands(page.read_text())}


@pytest.mark.parametrize("page", [page for page in pages() if commands(page.read_text())], ids=lambda page: page.name)
def test_page_commands_are_tested_or_excused(page: object) -> None:
    told = {command: rules(command) for command in commands(page.read_text())}  # type: ignore[attr-defined]
    unknown = [command for command, found in told.items() if not found]
    assert not unknown, "name the test or the reason in tests/unit/docs/documented_commands.py"
    assert [command for command, found in told.items() if len(found) > 1] == []


def test_command_tables_have_no_obsolete_rows() -> None:
    assert [rule for rule in (*TESTS, *REASONS) if not any(re.fullmatch(rule, command) for command in ALL)] == []


@pytest.mark.parametrize("test", sorted(set(TESTS.values())))
def test_named_test_exists(test: str) -> None:
    file, name = test.split("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_documented_make_targets_exist() -> None:
    targets = {command.split()[1] for command in ALL if command.startswith("make ")}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_commands_are_read_only_from_shell_blocks() -> None:
    page = (
        "```\n.venv/bin/rlrun  validate run.yaml   # all of it\nhelm install a \\\n  --set b=1\n```\n"
        "```text\nrl @ run.toml [--max-steps 10]\n```\n```\nenvironments <--> orchestrator\n```\n```bash\n$ frobnicate\n```\n"
    )
    assert commands(page) == ["rlrun validate run.yaml", "helm install a --set b=1", "frobnicate"]
    assert rules("frobnicate") == []
