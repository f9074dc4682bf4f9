"""The architecture page names existing files and definitions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "architecture.md"
_LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<target>[^)]+)\)")
_NAME = re.compile(r"`(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)`")


def links() -> list[tuple[str, str]]:
    """Return text and target of each link, in the order of the page."""
    return [(found["text"].replace("\n", " "), found["target"]) for found in _LINK.finditer(PAGE.read_text())]


def defined(file: Path) -> set[str]:
    """Return the names of a module's classes, functions and methods (`Class.method`), and the name of the module."""

    def walk(body: list[ast.stmt], before: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield before + node.name
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{node.name}.")

    return {file.stem, *walk(ast.parse(file.read_text()).body)}


@pytest.mark.parametrize(("text", "target"), links())
def test_architecture_link_names_existing_definition(text: str, target: str) -> None:
    file = (PAGE.parent / target).resolve()
    assert file.exists(), f"{target} is not there"
    if file.suffix == ".py" and (name := _NAME.fullmatch(text)) is not None:
        assert name["name"] in defined(file), f"{target} defines no {name['name']}"


def test_architecture_page_has_five_code_walks() -> None:
    walks = PAGE.read_text().split("\n## ")[1:]
    assert len(walks) == 5
    for walk in walks:
        assert len(_LINK.findall(walk)) >= 5
        assert "\n1. " in walk


def test_definitions_of_module_are_found(tmp_path: Path) -> None:
    module = tmp_path / "room.py"
    module.write_text("class A:\n    def b(self): ...\n\nasync def c(): ...\n")
    assert defined(module) == {"room", "A", "A.b", "c"}
