"""Docstrings and comments of the product name only modules, classes and functions that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {"rlrun": REPOSITORY / "workloads/rlrun", "rlrun_operator": REPOSITORY / "operator/rlrun_operator"}
NOT_MODULES = {"rlrun.uid", "process.kill"}
"""Dotted names of other things: a tag in MLflow, a method of Python."""
COMMANDS = {"rlrun", "eval", "synthesize", "verifiers"}
"""Names of programs and packages of others in docstrings of packages."""
_LISTED = re.compile(r"`([a-z_][a-z0-9_]*)`")
_DOTTED = re.compile(r"`((?:[a-z_][a-z0-9_]*)(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
_BARE = re.compile(r"(?:\bmodules? `(\w+)`|`(\w+)` module\b)")
_SUFFIXES = ("py", "sh", "json", "jsonl", "toml", "yaml", "log", "txt", "parquet", "safetensors")


@cache
def manifest_fields() -> frozenset[str]:
    """First parts of field paths: blocks of the manifest and of the status."""
    from rlrun.api.resource import RLRun, RLRunSpec
    from rlrun.config.models.run_config import RunConfig

    fields = [RLRun.model_fields, RLRunSpec.model_fields, RunConfig.model_fields]
    return frozenset(name for known in fields for name in known)


@cache
def modules_by_name() -> dict[str, list[Path]]:
    """Modules and packages by their name without the packages above."""
    found: dict[str, list[Path]] = {}
    for root in PACKAGES.values():
        for path in root.rglob("*.py"):
            at = path.parent if path.stem == "__init__" else path
            found.setdefault(at.stem, []).append(at)
    return found


@cache
def defined_names(file: Path) -> frozenset[str]:
    """Names of a module, and names of its classes' members as `Class.member`."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
                for part in ast.walk(node):
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                        found.add(f"{prefix}{node.name}.{part.attr}")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found.update(prefix + (one.asname or one.name.partition(".")[0]) for one in node.names)
            elif isinstance(node, ast.If | ast.Try):
                collect([one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node], prefix)
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.update(
                    prefix + one.id
                    for one in ast.walk(node)
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                )

    collect(ast.parse(file.read_text()).body, "")
    return frozenset(found)


def resolves(at: Path, names: list[str]) -> bool:
    """Return whether names below a package or module lead to a package, a module, or a name in one."""
    while names and at.suffix != ".py":
        if (at / f"{names[0]}.py").exists():
            at, names = at / f"{names[0]}.py", names[1:]
        elif (at / names[0] / "__init__.py").exists():
            at, names = at / names[0], names[1:]
        else:
            break
    file = at if at.suffix == ".py" else at / "__init__.py"
    return not names or ".".join(names[:2]) in defined_names(file) or _is_inherited(names, file)


def _is_inherited(names: list[str], file: Path) -> bool:
    """Return whether a name is a member of an imported or inheriting class, which the syntax tree does not show."""
    return (
        len(names) > 1
        and names[0] in defined_names(file)
        and not any(name.startswith(f"{names[0]}.") for name in defined_names(file))
    )


def unresolved_names(text: str) -> Iterator[str]:
    """Yield names of modules in backticks that do not exist.

    A dotted name starts with a package, or with a module if it ends with a class or a constant; other dotted names are often attributes
    of a variable, such as `batch.entropy`.
    """
    for path in _DOTTED.findall(text):
        first, *names = path.split(".")
        if names[-1] in _SUFFIXES or path in NOT_MODULES:
            continue
        if first in PACKAGES:
            starts = [PACKAGES[first]]
        else:
            known = [] if first in manifest_fields() else modules_by_name().get(first, [])
            starts = [start for start in known if start.suffix != ".py" or names[-1][:1].isupper()]
        if starts and not any(resolves(start, names) for start in starts):
            yield path
    for match in _BARE.finditer(text):
        name = match[1] or match[2]
        if name not in modules_by_name():
            yield name


def texts_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module with their lines."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for number, line in enumerate(text.splitlines(), 1):
        if "`" in line and (comment := re.search(r"(?:^|\s)# (.*)", line)) is not None:
            yield number, comment[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_modules_exist(package: str) -> None:
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}: `{name}`"
        for file in sorted(PACKAGES[package].rglob("*.py"))
        for line, text in texts_of(file)
        for name in unresolved_names(text)
    ]
    assert not found, "names of modules that do not exist:\n" + "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_docstring_names_exist(package: str) -> None:
    """The docstring of a package lists its modules; other names in it are defined below it, or are commands."""
    unknown = []
    for file in sorted(PACKAGES[package].rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        below = list(file.parent.rglob("*.py"))
        known = {one.stem for one in below} | {one.parent.name for one in below}
        known |= {name for one in below for name in defined_names(one)} | COMMANDS
        unknown += [f"{file.parent.name}: `{name}`" for name in _LISTED.findall(docstring) if name not in known]
    assert not unknown, "names in docstrings of packages that do not exist: " + ", ".join(unknown)
