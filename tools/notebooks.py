"""Example notebooks: `python -m tools.notebooks --write` executes them and stores their outputs.

The cells run in order, in one namespace and in the notebook's folder, as in a kernel; no package of Jupyter's is
needed. A cell tagged `varies` may have other values each time: only the kinds of its outputs are compared.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
_BESIDE = ("data",)
"""Folders of the examples that notebooks read."""
_MIME = (("text/html", "_repr_html_"), ("image/svg+xml", "_repr_svg_"))
_TIMES = re.compile(r"\b\d+(\.\d+)?(s|m\d\ds| s| ms)\b|\d\d:\d\d:\d\dZ|(?<=time=)[\d.]+|(?<=ended )\d+s")


def read(path: Path) -> Json:
    """Return a notebook."""
    document: Json = json.loads(path.read_text())
    return document


def execute(document: Json) -> Json:
    """Return a notebook with the outputs of its code, run in this process and folder.

    Raises:
        Exception: any error of a cell.
    """
    space: Json = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = _outputs(source_of(cell), space, count)
            cell = cell | {"outputs": outputs, "execution_count": count}
        cells.append(cell)
    return document | {"cells": cells}


def source_of(cell: Json) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def _outputs(source: str, space: Json, count: int) -> list[Json]:
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
    found: list[Json] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {mime: _lines(getattr(value, name)()) for mime, name in _MIME if hasattr(value, name)}
        data["text/plain"] = _lines(repr(value))
        found.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def differences(stored: Json, come_out: Json) -> list[str]:
    """Return cells whose stored outputs differ from the new ones, except in times."""
    found = []
    for old, new in zip(stored["cells"], come_out["cells"], strict=True):
        if old["cell_type"] == "code":
            varies = "varies" in old["metadata"].get("tags", ())
            if _comparable(old["outputs"], varies=varies) != _comparable(new["outputs"], varies=varies):
                found.append(f"{source_of(old)}\nstored: {old['outputs']}\ncame out: {new['outputs']}")
    return found


def _comparable(outputs: Sequence[Json], *, varies: bool) -> object:
    if varies:
        return [(one["output_type"], sorted(one.get("data", ()))) for one in outputs]
    return _TIMES.sub("<time>", json.dumps([one | {"execution_count": None} for one in outputs]))


@contextlib.contextmanager
def workplace() -> Any:
    """Provide a folder with the notebooks and their input files as the current folder of the block."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="rlrun-notebooks-") as folder:
        for name in _BESIDE:
            shutil.copytree(FOLDER.parent / name, Path(folder, name))
        here = Path(folder, "notebooks")
        here.mkdir()
        os.chdir(here)
        try:
            yield here
        finally:
            os.chdir(before)


def main(argv: Sequence[str]) -> int:
    """Execute all notebooks; with `--write`, store their outputs. Return the exit code."""
    parser = argparse.ArgumentParser(prog="tools.notebooks")
    parser.add_argument("--write", action="store_true", help="store the outputs")
    options = parser.parse_args(argv)
    code = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        stored = read(path)
        with workplace():
            done = execute(stored)
        if options.write:
            path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
        elif found := differences(stored, done):
            print(f"{path}: {found[0]}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
