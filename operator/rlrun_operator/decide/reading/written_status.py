"""Parsing of a status that this or another release of the operator has written."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import ValidationError

from rlrun.api.status import RLRunStatus
from rlrun_operator.state import Manifest


def read_status(raw: Manifest) -> RLRunStatus:
    """Parse a written status, without unknown and unreadable fields."""
    document: object = raw
    for _ in range(100):
        try:
            return RLRunStatus.model_validate(document)
        except ValidationError as error:
            document = copy.deepcopy(document) if document is raw else document
            for detail in sorted(error.errors(), key=lambda d: str(d["loc"]), reverse=True):
                _drop_invalid(document, detail["loc"])
    return RLRunStatus()


def _drop_invalid(document: Any, loc: tuple[int | str, ...]) -> None:
    """Remove the value at `loc`, or the innermost existing value around it."""
    place = document
    for i, part in enumerate(loc):
        try:
            inner = place[part]
        except (KeyError, IndexError, TypeError):
            return _drop_invalid(document, loc[:i]) if i else None
        if i == len(loc) - 1:
            del place[part]
            return None
        place = inner
    return None
