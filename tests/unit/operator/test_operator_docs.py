"""The page of reasons agrees with the code, and the code uses only documented reasons."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rlrun_operator.status import failure_reasons, reasons
from tools.operator_docs import files

PACKAGE = Path(reasons.__file__).parents[1]
EXPLAINED = {
    **reasons.CONDITION_TYPES,
    **reasons.CONDITION_REASONS,
    **reasons.EVENT_REASONS,
    **failure_reasons.FAILURE_REASONS,
}


@pytest.mark.parametrize("file", files(), ids=lambda file: file.name)
def test_generated_page_is_up_to_date(file: Path) -> None:
    assert file.read_text() == files()[file], "run `make docs`"


def test_reason_constants_are_documented() -> None:
    both = {**vars(reasons), **vars(failure_reasons)}
    constants = {name: value for name, value in both.items() if name.isupper() and isinstance(value, str)}
    assert [name for name, value in constants.items() if value not in EXPLAINED] == []


def test_reasons_are_used_only_through_their_constants() -> None:
    spelled = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name in ("reasons.py", "failure_reasons.py"):
            continue
        tree = ast.parse(file.read_text())
        for call in ast.walk(tree):
            if isinstance(call, ast.Call):
                words = [*call.args, *(k.value for k in call.keywords if k.arg == "reason")]
                named = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if named in ("EventRecord", "Condition", "condition"):
                    spelled += [
                        f"{file.name}:{w.lineno} {w.value}"
                        for w in words
                        if isinstance(w, ast.Constant) and w.value in EXPLAINED
                    ]
    assert spelled == []
