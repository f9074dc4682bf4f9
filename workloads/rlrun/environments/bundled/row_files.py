"""Conversion of problem sets to data files for `dataset`. Each row gets a uid that does not depend on the other rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlrun.environments.bundled.dataset import messages_of, truth_of, with_instruction
from rlrun.environments.dataset_rows import Rows
from rlrun.environments.layouts import LAYOUTS, LayoutName, convert_row, no_prompt
from rlrun.environments.message_content import check_prompt, refuse_media

UID_CHARACTERS = 16


@dataclass
class Converted:
    """Rows in the format of `dataset`."""

    rows: list[dict[str, object]]
    made: int = 0
    """Number of rows that got a new uid."""
    left_out: int = 0
    """Number of rows that were left out because an earlier row has the same prompt."""


def uid_of(row: Mapping[str, object]) -> str:
    """Return 16 hex digits that depend only on the prompt and the ground truth of a row."""
    document = json.dumps([messages_of(row["prompt"]), truth_of(row)], sort_keys=True)
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()[:UID_CHARACTERS]


def convert_rows(rows: Rows, layout: LayoutName | None, *, instruction: str | None, unique: bool | None) -> Converted:
    """Convert all rows of a data set and give them distinct uids. Rows with a uid keep it.

    Args:
        rows: rows of the files.
        layout: layout of the files. None: the layout of `dataset`.
        instruction: text that is appended to the last user message.
        unique: whether to leave out rows whose prompt occurs in an earlier row. None: default of the layout.

    Raises:
        ValueError: a row is malformed, or two rows have the same uid. The message contains file and line.
    """
    if unique is None:
        unique = layout is not None and LAYOUTS[layout].repeats
    found, asked, times = Converted([]), set[str](), Counter[str]()
    places: dict[str, str] = {}
    for place, row in _read_rows(rows, layout):
        try:
            if "prompt" not in row:
                raise ValueError(no_prompt(row))
            refuse_media(row, "column")
            prompt = messages_of(row["prompt"])
            check_prompt(prompt)
            content = uid_of(row)
            if unique and (problem := json.dumps(prompt, sort_keys=True)) in asked:
                found.left_out += 1
                continue
            if unique:
                asked.add(problem)
            times[content] += 1
            made = content if times[content] == 1 else f"{content}-{times[content]}"
            uid = str(row.get("uid", made))
            found.made += "uid" not in row
            if uid in places:
                raise ValueError(f"its uid {uid!r} is also the uid of {places[uid]}; use distinct uids, or remove them")
            places[uid] = place
            asks = prompt if instruction is None else with_instruction(prompt, instruction)
            found.rows.append({"uid": uid} | row | {"uid": uid, "prompt": asks})
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return found


def _read_rows(rows: Rows, layout: LayoutName | None) -> Iterator[tuple[str, dict[str, object]]]:
    for index in range(len(rows)):
        place, row = rows.describe_place(index), rows.row(index)
        try:
            own = row if layout is None else convert_row(layout, row)
            for name, value in own.items():
                _refuse_no_json(name, value)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        yield place, own


def _refuse_no_json(name: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the column {name!r} is not JSON ({error}); leave it out of the file") from None
