"""Descriptions of fields, which are read from the source when somebody asks."""

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


def test_a_description_is_the_docstring_below_the_field() -> None:
    assert field_meaning(Plain, "own") == "Of its own,\non two lines."
    assert field_meaning(Plain, "said") == "said by pydantic"
    assert field_meaning(Plain, "silent") == ""
    assert field_meaning(Outer.Inner, "deep") == "Deep inside."


def test_a_field_of_a_base_has_the_words_of_whoever_wrote_it_last() -> None:
    assert field_meaning(Heir, "said") == "said by pydantic"
    assert field_meaning(Heir, "own") == ""


def test_no_model_reads_sources_as_it_is_made() -> None:
    assert not Config.model_config.get("use_attribute_docstrings")
