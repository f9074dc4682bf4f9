"""Conversion of Python values to plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def plain(value: object) -> Any:
    """Convert models, mappings, sequences and paths to plain data. Of a model only the set fields are used."""
    if isinstance(value, BaseModel):
        return plain(
            {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
        )
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, os.PathLike) else value
