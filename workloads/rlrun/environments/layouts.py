"""Layouts of the public sets of problems, and each one's rows as rows of `dataset`.

A row of `dataset` is one of verl's: `prompt`, `reward_model` with `ground_truth`, and optionally `data_source`, `ability`, `extra_info`
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
    """One set's layout."""

    columns: tuple[str, ...]
    """Columns that each row has."""
    convert: Callable[[Row], dict[str, object]]
    """A row in the format of `dataset`. Raises ValueError: it is none of the layout."""
    repeats: bool = False
    """True if the set holds its rows several times."""


def convert_row(name: LayoutName, row: Row) -> dict[str, object]:
    """A row of a public set as one of `dataset`.

    Raises:
        ValueError: it is none of this layout; names the column.
    """
    layout = LAYOUTS[name]
    if missing := [column for column in layout.columns if row.get(column) is None]:
        hint = f"; it looks like layout: {found}" if (found := recognize_layout(row)) else ""
        raise ValueError(
            f"layout {name}: there is no column {missing[0]!r} (columns: {', '.join(row) or 'none'}){hint}"
        )
    return layout.convert(row)


def recognize_layout(columns: Collection[str]) -> LayoutName | None:
    """The one layout that has these columns, if there is one; the most columns decide."""
    fitting = [name for name, layout in LAYOUTS.items() if set(layout.columns) <= set(columns)]
    return max(fitting, key=lambda name: len(LAYOUTS[name].columns), default=None)


def no_prompt(columns: Collection[str]) -> str:
    """The problem of a row without the column `prompt`, in words."""
    hint = f"; these are of layout: {found}" if (found := recognize_layout(columns)) else ""
    return f"there is no column 'prompt' (columns: {', '.join(columns) or 'none'}){hint}"


_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{}.,;:!?)\]`'\"$*])")
"""Start of a box: a brace, or the first character of a box without braces. Before punctuation the command is only mentioned."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a character behind a backslash: the second backslash of a line break escapes nothing."""


def has_box(text: str) -> bool:
    r"""True if a `\boxed` or `\fbox` starts in a text, closed or not."""
    return _BOX.search(text) is not None


def boxed_content(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox{...}`, `\boxed x`) of a solution; None: there is none that is closed."""
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
    """The number after `####` in an answer of GSM8K, without separators of thousands. Raises ValueError: there is none."""
    found = re.search(r"####\s*(.+?)\s*$", answer)
    if found is None:
        raise ValueError("the answer has no final line '#### ...'")
    return found[1].replace(",", "")


def _make_row(source: str, question: object, truth: object, extra: Mapping[str, object]) -> dict[str, object]:
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"the problem is no text: {str(question)[:80]!r}")
    return {
        "prompt": [{"role": "user", "content": question.strip()}],
        "data_source": source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, str) else json.dumps(truth)},
        "extra_info": dict(extra),
    }


def _with_own(row: Row, made: dict[str, object]) -> dict[str, object]:
    """A converted row with the columns that it has already in this project's format."""
    return made | {name: row[name] for name in ("data_source", "ability", "uid") if row.get(name) is not None}


def _convert_gsm8k(row: Row) -> dict[str, object]:
    extra = {"question": row["question"], "answer": row["answer"]}
    return _with_own(row, _make_row("openai/gsm8k", row["question"], final_answer(str(row["answer"])), extra))


def _convert_math(row: Row) -> dict[str, object]:
    truth = row.get("answer") or boxed_content(str(row["solution"]))
    if truth is None:
        raise ValueError("the solution has no \\boxed{...}, and there is no column 'answer'")
    extra = {name: row[name] for name in ("solution", "level", "type", "subject", "unique_id") if name in row}
    return _with_own(row, _make_row("DigitalLearningGmbH/MATH-lighteval", row["problem"], truth, extra))


def _convert_dapo(row: Row) -> dict[str, object]:
    truth = row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], Mapping) else None
    if truth is None:
        raise ValueError("reward_model has no field 'ground_truth'")
    extra = row.get("extra_info") or {}
    # Its `index` names a problem, and repeats with it.
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
