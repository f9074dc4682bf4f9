"""The architecture page names existing files and definitions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tools.import_graph import Graph, read_graph

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "architecture.md"
_LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<target>[^)]+)\)")
_LENGTH = re.compile(r"^\*(\d+) files, (\d+) returns?\.\*$", re.MULTILINE)
_STEPS = re.compile(r"^(?:\d\. |   ).*$", re.MULTILINE)
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


def walks() -> dict[str, str]:
    """Return the text of each walk, by its title."""
    return {title: text for title, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:])}


def code_modules() -> dict[str, str]:
    """Return the texts of the shipped modules by their dotted names."""
    found = {}
    for top in (ROOT / "operator", ROOT / "workloads"):
        for file in top.rglob("*.py"):
            parts = file.relative_to(top).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    return found


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph(code_modules())


def steps_of(walk: str) -> list[str]:
    """Return the modules of a walk's numbered list in the order of the links, without direct repetitions."""
    files = [target for line in _STEPS.findall(walk) for target in re.findall(r"\]\(\.\./([^)#]+)\.py\)", line)]
    modules = [file.partition("/")[2].replace("/", ".") for file in files]
    return [name for number, name in enumerate(modules) if not number or modules[number - 1] != name]


def imports_of(module: str, graph: Graph) -> frozenset[str]:
    """Return the modules that a module imports, also through the `__init__` of a package."""
    direct = graph[module]
    return direct.union(*(graph[name] for name in direct if any(other.startswith(f"{name}.") for other in graph)))


def count_returns(steps: Sequence[str], graph: Graph) -> int:
    """Return how often a walk continues in a file that it had left.

    A step is a return if its file was linked before, or if neither it nor the file before imports the other one, but an earlier file of
    the walk imports it. If no earlier file imports it, the step is a callback, a file or a request to another program.
    """
    returns = 0
    for number, module in enumerate(steps[1:], 1):
        before, earlier = steps[number - 1], steps[: number - 1]
        meets = module in imports_of(before, graph) or before in imports_of(module, graph)
        called_by_earlier = any(module in imports_of(name, graph) for name in earlier)
        returns += module in steps[:number] or (not meets and called_by_earlier)
    return returns


@pytest.mark.parametrize("title", walks())
def test_walk_states_its_files_and_returns(title: str, graph: Graph) -> None:
    walk = walks()[title]
    steps = steps_of(walk)
    stated = _LENGTH.search(walk)
    assert stated is not None
    assert [int(number) for number in stated.groups()] == [len(set(steps)), count_returns(steps, graph)]


def test_walk_from_event_to_manifest_is_short(graph: Graph) -> None:
    steps = steps_of(walks()["An event becomes an applied manifest"])
    assert len(set(steps)) <= 12
    assert count_returns(steps, graph) <= 8


def test_returns_are_counted_by_links_and_imports() -> None:
    graph: Mapping[str, frozenset[str]] = {
        "a": frozenset({"b", "c"}),
        "b": frozenset(),
        "c": frozenset(),
        "far": frozenset(),
    }
    assert count_returns(["a", "b", "c", "far"], graph) == 1  # b does not call c, a does; nothing calls far
    assert count_returns(["a", "b", "a", "c"], graph) == 1
