"""Base of all answers, and those that are of no run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class Me(Answer):
    """The user of the page."""

    user: str | None
    """None: this server asks nobody who they are."""
    session: bool
    """True if a session can be ended; False: each request brings its token."""


class Problem(Answer):
    """An answer that is none: what was wrong, and what to do."""

    problem: str
    login: bool = False
    """True if it would be answered after a login."""
