"""Comparison table of two revisions, from minimal sources."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tools import house_table
from tools.house_table import House, table
from tools.import_graph import arrows, both_ways, circles, longest_chain, read_graph, room_arrows, shortest_chain
from tools.source_measures import Measures, complexity, lines_of, measure, parameters_of

FILES = {
    "workloads/rlrun/__init__.py": '"""Package."""\n',
    "workloads/rlrun/trainer/__init__.py": "",
    "workloads/rlrun/trainer/loop.py": "from rlrun.trainer.weights.hf import write\nimport rlrun.trainer.trained_run\n",
    "workloads/rlrun/trainer/trained_run.py": "from rlrun.trainer import weights\n",
    "workloads/rlrun/trainer/weights/__init__.py": "",
    "workloads/rlrun/trainer/weights/hf.py": "def write(): ...\n",
    "workloads/rlrun/trainer/weights/notes.md": "no module\n",
}


def function(text: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (found,) = ast.parse(text).body
    assert isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef))
    return found


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ("pass", 1),
        ("if a:\n  b\n elif c:\n  d\n else:\n  e", 3),
        ("x = a if b else c", 2),
        ("x = a and b and c or d", 4),
        ("for a in b:\n  c\n else:\n  d", 3),
        ("while a:\n  b", 2),
        ("try:\n  a\n except B:\n  c\n except D:\n  e\n else:\n  f\n finally:\n  g", 4),
        ("with a:\n  b", 1),
        ("assert a", 2),
        ("x = [a for a in b if c if d]", 4),
        ("match a:\n  case 1:\n   b\n  case _:\n   c", 3),
        ("def g():\n  if a:\n   b", 1),
    ],
)
def test_complexity_counts_ways(body: str, paths: int) -> None:
    assert complexity(function(f"def f():\n {body}\n")) == paths


@pytest.mark.parametrize(
    ("signature", "count"),
    [("", 0), ("self, a, /, b, *, c", 3), ("cls", 0), ("a, self", 2), ("*args, **kwargs", 2)],
)
def test_self_is_not_counted_as_parameter(signature: str, count: int) -> None:
    assert parameters_of(function(f"def f({signature}): ...")) == count


def test_function_lines_start_at_def() -> None:
    assert lines_of(function('@a\n@b\ndef f():\n    """Text."""\n    return 1\n')) == 3


def test_measures_of_a_module() -> None:
    long = "def long():\n" + "    pass\n" * 60
    many = "async def many(self, a, b, c, d, e, f, g, h): ...\n"
    deep = "def deep():\n" + "    if a: pass\n" * 20
    text = (
        '"""What a module is."""\nfrom typing import Any\nimport typing\n'
        f"{long}{many}{deep}"
        'class A:\n    """Whether it is."""\n    x: Any\n    """Ofthen, no pronoun."""\n    y: typing.Any = 1\n    """Of y."""\n'
        '    def f(self):\n        """Name."""\n        return "What"\n'
    )
    assert measure(text) == Measures(
        lines=text.count("\n"),
        functions=4,
        long_functions=1,
        many_parameters=1,
        complex_functions=1,
        anys=2,
        docstrings=5,
        bare_docstrings=3,
    )


def test_imports_are_arrows_between_modules_and_between_folders() -> None:
    house = House.of(FILES)
    package, hf = "rlrun.trainer", "rlrun.trainer.weights.hf"
    expected = {
        (f"{package}.loop", hf),
        (f"{package}.loop", f"{package}.trained_run"),
        (f"{package}.trained_run", f"{package}.weights"),
    }
    assert arrows(house.graph, package) == expected
    assert room_arrows(house.graph, package, house.folders) == {("rlrun/trainer", "rlrun/trainer/weights")}
    assert house.modules() == {"rlrun/trainer": 2, "rlrun/trainer/weights": 1}


def test_chains_count_files_and_treat_cycle_as_one() -> None:
    graph = read_graph(
        {"a": "import b\nimport d", "b": "import c", "c": "import b\nimport d", "d": "", "e": "from elsewhere import a"}
    )
    assert circles(graph) == [["b", "c"]]
    assert shortest_chain(graph, ["a"], ["d"]) == ["a", "d"]
    assert longest_chain(graph, ["a"], ["d"]) == 4
    assert (shortest_chain(graph, ["d"], ["a"]), longest_chain(graph, ["d"], ["a"])) == ([], 0)
    assert shortest_chain(both_ways(graph), ["d"], ["a"]) == ["d", "a"]


def test_table_has_columns_for_both_revisions() -> None:
    before = {"workloads/rlrun/flat.py": "x = 1\n", **FILES}
    text = table(House.of(before), House.of(FILES), ("1234567", "89abcde"))
    assert "| | 1234567 | 89abcde |" in text
    assert "| modules | 4 | 3 |" in text
    assert "| `rlrun` | 1 |  |" in text
    assert "| `rlrun.trainer`: arrows between modules | 3 | 3 |" in text


def test_unknown_revision_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(revision: str, root: Path = Path()) -> str:
        raise subprocess.CalledProcessError(128, "git", stderr=f"fatal: {revision} is unknown\n")

    monkeypatch.setattr(house_table, "_short", fail)
    assert house_table.main(["--before", "nothing"]) == 2
    assert capsys.readouterr().err == "error: fatal: nothing is unknown\n"
