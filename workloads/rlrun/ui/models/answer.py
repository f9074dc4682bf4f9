"""Base class of all responses, and responses without a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Answer(BaseModel):
    """Base class of all responses."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class Me(Answer):
    """User of the page."""

    user: str | None
    """Name of the user; None: this server has no login."""
    session: bool
    """Whether there is a session that can be closed; False: each request contains a token."""


class Problem(Answer):
    """Error response: the problem and a fix."""

    problem: str
    login: bool = False
    """Whether a login would solve the problem."""
