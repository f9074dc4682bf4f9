"""Base of all configuration models: camelCase outside, snake_case inside, unknown keys refused, docstrings as descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from rlrun.config.rule import Rule

Fields = dict[str, Any]
"""Fields of a block by their Python names, as its model takes them."""


class Config(BaseModel):
    """Base of every block. Immutable; a field's docstring is its description (`meaning`), as in `kubectl explain`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    EXAMPLES: ClassVar[Mapping[str, object]] = {}
    """Examples of required fields by their Python names, for the message where one is missing."""
    CEL_RULES: ClassVar[tuple[Rule, ...]] = ()
    """The validators' conditions as the API server checks them, in the same words, so that `kubectl apply` refuses at once.

    A model with a validator has rules; the tests judge the same malformed manifests by both.
    """
