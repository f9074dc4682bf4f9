"""Descriptions of fields, which are read from the source on request."""

from __future__ import annotations

from pydantic import Field

from rlrun.config.base import Config
from rlrun.config.loading.schema import field_meaning


class Plain(Config):
    """Has fields."""

    own: int = 1
    """Of its own,
    on two lines."""
    silent: int = 2
    said: int = Field(3, description="said by pydantic")
    """Not read."""


class Heir(Plain):
    """Has a base."""

    silent: int = 4
    own: int = 5


class Outer:
    """Holds a model."""

    class Inner(Config):
        """Is held."""

        deep: int = 1
        """Deep inside."""


def test_field_meaning_is_docstring_below_field() -> None:
    assert field_meaning(Plain, "own") == "Of its own,\non two lines."
    assert field_meaning(Plain, "said") == "said by pydantic"
    assert field_meaning(Plain, "silent") == ""
    assert field_meaning(Outer.Inner, "deep") == "Deep inside."


def test_redefined_field_uses_description_of_subclass() -> None:
    assert field_meaning(Heir, "said") == "said by pydantic"
    assert field_meaning(Heir, "own") == ""


def test_models_do_not_read_sources_at_definition() -> None:
    assert not Config.model_config.get("use_attribute_docstrings")
