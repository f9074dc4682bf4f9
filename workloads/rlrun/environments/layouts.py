"""Layouts of public problem sets, and their conversion to rows of the `dataset` environment.

A row of `dataset` has verl's format: `prompt`, `reward_model` with `ground_truth`, and optionally `data_source`, `ability`, `extra_info`
and `uid`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

LayoutName = Literal["gsm8k", "math", "dapo", "deepscaler", "geometry3k"]
Row = Mapping[str, object]


@dataclass(frozen=True)
class Layout:
    """Layout of one public set."""

    columns: tuple[str, ...]
    """Columns that identify the layout; every row has them."""
    convert: Callable[[Row], dict[str, object]]
    """Conversion of a row to a row of `dataset`. Raises ValueError if the row does not have this layout."""
    repeats: bool = False
    """Whether the set contains each row several times."""


def convert_row(name: LayoutName, row: Row) -> dict[str, object]:
    """Convert a row of a public set to a row of `dataset`.

    Raises:
        ValueError: the row does not have this layout; the message contains the column.
    """
    layout = LAYOUTS[name]
    if missing := [column for column in layout.columns if row.get(column) is None]:
        hint = f"; it looks like layout: {found}" if (found := recognize_layout(row)) else ""
        raise ValueError(
            f"layout {name}: the column {missing[0]!r} is missing (columns: {', '.join(row) or 'none'}){hint}"
        )
    return layout.convert(row)


def recognize_layout(columns: Collection[str]) -> LayoutName | None:
    """Return the layout that matches these columns, or None. If several match, the one with the most columns is returned."""
    fitting = [name for name, layout in LAYOUTS.items() if set(layout.columns) <= set(columns)]
    return max(fitting, key=lambda name: len(LAYOUTS[name].columns), default=None)


def no_prompt(columns: Collection[str]) -> str:
    """Return an error message for rows without the column `prompt`."""
    hint = f"; these columns have layout: {found}" if (found := recognize_layout(columns)) else ""
    return f"the column 'prompt' is missing (columns: {', '.join(columns) or 'none'}){hint}"


_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{}.,;:!?)\]`'\"$*])")
"""Start of a box: a brace, or the first character of a box without braces. A command before punctuation is only mentioned in the text."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with the character after it, so that an escaped brace and the line break `\\\\` do not count as braces."""


def has_box(text: str) -> bool:
    r"""Return whether a text contains the start of a `\boxed` or `\fbox`, closed or not."""
    return _BOX.search(text) is not None


def boxed_content(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (or `\fbox{...}`, `\boxed x`) of a solution, or None if it is not closed or missing."""
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    last = starts[-1]
    if last[1] != "{":
        return re.split(r"[\s$]", text[last.start(1) :], maxsplit=1)[0]
    depth = 0
    for brace in _BRACE.finditer(text, last.start(1)):
        if brace[0] in "{}":
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[last.start(1) + 1 : brace.start()].strip()
    return None


def final_answer(answer: str) -> str:
    """Return the number after `####` in an answer of GSM8K, without thousands separators. Raises ValueError if there is no such number."""
    found = re.search(r"####\s*(.+?)\s*$", answer)
    if found is None:
        raise ValueError("the answer has no final line '#### ...'")
    return found[1].replace(",", "")


def _make_row(source: str, question: object, truth: object, extra: Mapping[str, object]) -> dict[str, object]:
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"the problem is not a text: {str(question)[:80]!r}")
    return {
        "prompt": [{"role": "user", "content": question.strip()}],
        "data_source": source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, str) else json.dumps(truth)},
        "extra_info": dict(extra),
    }


def _with_own(row: Row, made: dict[str, object]) -> dict[str, object]:
    """Add to a converted row the columns that the original row already has in the format of `dataset`."""
    return made | {name: row[name] for name in ("data_source", "ability", "uid") if row.get(name) is not None}


def _convert_gsm8k(row: Row) -> dict[str, object]:
    extra = {"question": row["question"], "answer": row["answer"]}
    return _with_own(row, _make_row("openai/gsm8k", row["question"], final_answer(str(row["answer"])), extra))


def _convert_math(row: Row) -> dict[str, object]:
    truth = row.get("answer") or boxed_content(str(row["solution"]))
    if truth is None:
        raise ValueError("the solution has no \\boxed{...}, and the column 'answer' is missing")
    extra = {name: row[name] for name in ("solution", "level", "type", "subject", "unique_id") if name in row}
    return _with_own(row, _make_row("DigitalLearningGmbH/MATH-lighteval", row["problem"], truth, extra))


def _convert_dapo(row: Row) -> dict[str, object]:
    truth = row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], Mapping) else None
    if truth is None:
        raise ValueError("reward_model has no field 'ground_truth'")
    extra = row.get("extra_info") or {}
    # `index` identifies a problem, so repeated rows of a problem get the same uid.
    index = {"uid": str(extra["index"])} if isinstance(extra, Mapping) and extra.get("index") is not None else {}
    return index | dict(row)


def _convert_deepscaler(row: Row) -> dict[str, object]:
    extra = {"solution": row["solution"]} if row.get("solution") else {}
    return _with_own(row, _make_row("agentica-org/DeepScaleR-Preview-Dataset", row["problem"], row["answer"], extra))


def _convert_geometry3k(row: Row) -> dict[str, object]:
    question = re.sub(r"\s*<image>\s*", " ", str(row["problem"]))
    return _with_own(row, _make_row("hiyouga/geometry3k", question, row["answer"], {}))


LAYOUTS: Mapping[LayoutName, Layout] = {
    "gsm8k": Layout(("question", "answer"), _convert_gsm8k),
    "math": Layout(("problem", "solution"), _convert_math),
    "dapo": Layout(("prompt", "reward_model", "data_source"), _convert_dapo, repeats=True),
    "deepscaler": Layout(("problem", "answer"), _convert_deepscaler),
    "geometry3k": Layout(("images", "problem", "answer"), _convert_geometry3k),
}
