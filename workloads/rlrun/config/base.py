"""Base of all configuration models: camelCase in files, snake_case in Python, unknown keys refused, docstrings as descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from rlrun.config.rule import Rule

Fields = dict[str, Any]
"""Fields of a block by their Python names, as its model takes them."""


class Config(BaseModel):
    """Immutable base of every block. The docstring below a field is its description (`meaning`), also in `kubectl explain`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    EXAMPLES: ClassVar[Mapping[str, object]] = {}
    """Examples of required fields by their Python names, for the message about a missing field."""
    CEL_RULES: ClassVar[tuple[Rule, ...]] = ()
    """Conditions of the validators as CEL rules for the API server, with the same messages, so that `kubectl apply` fails immediately.

    Every model with a validator has rules. The tests check the same invalid manifests against both.
    """
