"""One setting of another trainer's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.runtime import redact


@dataclass(frozen=True)
class Setting:
    """One key with its value and origin."""

    key: str
    """Dotted, as the other trainer spells it, without Hydra's `+`."""
    value: object
    """A JSON value, after variables and interpolations."""
    source: str
    line: int | None = None
    unset: tuple[str, ...] = ()
    """Variables and interpolations of the value that nothing sets."""

    @property
    def shown(self) -> object:
        """Value without secrets, for messages and comments."""
        return redact.redact_document(self.value, [], self.key)


def refuse_file(source: str, message: str, line: int | None = None, path: str = "") -> ConfigError:
    """One problem as an error to raise."""
    return ConfigError([Problem(source, path, message, line)])


def latest_settings(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Settings by key; a later one replaces an earlier one of the same key."""
    return {setting.key: setting for setting in settings}
