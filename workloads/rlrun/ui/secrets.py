"""Answers without secrets, by `rlrun.runtime.redact`: its three nets for what runs are, two of them for what models wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

from rlrun.runtime import redact
from rlrun.runtime.printable import printable

Model = TypeVar("Model", bound=BaseModel)


class Redactor:
    """Takes secrets out of what is sent.

    Args:
        environment: of this process; the values of its secret variables are known secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known = redact.known_secrets(environment)

    def model(self, answer: Model) -> Model:
        """An answer about a run without secrets."""
        return type(answer).model_validate(redact.redact_document(answer.model_dump(), self._known))

    def document(self, value: dict[str, object]) -> dict[str, object]:
        """A configuration without secrets; values of free form that are not known to be harmless are hidden."""
        found = redact.redact_configuration(value, self._known)
        assert isinstance(found, dict)
        return found

    def text(self, content: str) -> str:
        """A text of a model or an environment: only what is a secret for certain goes, and what would turn the text's direction."""
        return printable(redact.redact_certain(content, self._known), lines=True)

    def spans(self, content: str) -> list[tuple[int, int]]:
        """Places of a text that are secrets for certain."""
        return redact.certain_spans(content, self._known)
