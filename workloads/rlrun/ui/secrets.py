"""Removal of secrets from responses with `rlrun.runtime.redact`: all three filters for data of runs, two of them for model output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

from rlrun.runtime import redact
from rlrun.runtime.printable import printable

Model = TypeVar("Model", bound=BaseModel)


class Redactor:
    """Remover of secrets from responses.

    Args:
        environment: environment of this process; values of its secret variables are treated as known secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known = redact.known_secrets(environment)

    def model(self, answer: Model) -> Model:
        """Return a response about a run without secrets."""
        return type(answer).model_validate(redact.redact_document(answer.model_dump(), self._known))

    def document(self, value: dict[str, object]) -> dict[str, object]:
        """Return a configuration without secrets; free-form values that are not known to be harmless are hidden."""
        found = redact.redact_configuration(value, self._known)
        assert isinstance(found, dict)
        return found

    def text(self, content: str) -> str:
        """Return a text of a model or an environment without certain secrets and without direction controls."""
        return printable(redact.redact_certain(content, self._known), lines=True)

    def spans(self, content: str) -> list[tuple[int, int]]:
        """Return the spans of a text that are certainly secrets."""
        return redact.certain_spans(content, self._known)
