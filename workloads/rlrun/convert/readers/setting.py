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
    """Dotted key in the other trainer's spelling, without Hydra's `+`."""
    value: object
    """JSON value after variables and interpolations."""
    source: str
    line: int | None = None
    unset: tuple[str, ...] = ()
    """Variables and interpolations in the value without a known value."""

    @property
    def shown(self) -> object:
        """Value without secrets, for messages and comments."""
        return redact.redact_document(self.value, [], self.key)


def refuse_file(source: str, message: str, line: int | None = None, path: str = "") -> ConfigError:
    """Return an error with one problem, ready to raise."""
    return ConfigError([Problem(source, path, message, line)])


def latest_settings(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the settings by key; a later setting replaces an earlier one with the same key."""
    return {setting.key: setting for setting in settings}
