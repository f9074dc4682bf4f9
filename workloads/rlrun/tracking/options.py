"""Tracker options on command lines of runs: `--wandb`, `--wandb.project X`, `--tracking.tensorboard`, ..."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.config.base import Config
from rlrun.config.loading.arguments import parse_arguments
from rlrun.config.loading.layers import Reader
from rlrun.config.loading.loader import combine_sources
from rlrun.config.models.trackers import TRACKERS, TrackingConfig

_PREFIX = "tracking."


class _Tracked(Config):
    tracking: TrackingConfig | None = None


def full_names(words: Sequence[str]) -> list[str]:
    """Replace options that start with a tracker's name, as in PRIME-RL, by the full names of the fields."""
    return [_full_name(word) for word in words]


def _full_name(word: str) -> str:
    for prefix in ("--", "--no-"):
        first = word.removeprefix(prefix).partition("=")[0].partition(".")[0]
        if word.startswith(prefix) and first in TRACKERS:
            return prefix + _PREFIX + word.removeprefix(prefix)
    return word


def take_tracking(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the tracker options, with their full names, and all other words."""
    own: list[str] = []
    rest: list[str] = []
    left = full_names(words)
    while left:
        word = left.pop(0)
        if not word.removeprefix("--no-").removeprefix("--").partition("=")[0].startswith("tracking"):
            rest.append(word)
            continue
        own.append(word)
        if word.startswith("--") and "=" not in word and left and not left[0].startswith(("-", "@")):
            own.append(left.pop(0))
    return own, rest


def with_options(config: TrackingConfig | None, options: Sequence[str]) -> TrackingConfig | None:
    """Apply options of `take_tracking` to the trackers of a run.

    Raises:
        ConfigError: contains the option, its value and the fix.
    """
    if not options:
        return config
    reader = Reader(_Tracked, "manifest", style="camel")
    given = {} if config is None else {"tracking": config.model_dump(by_alias=True, exclude_unset=True)}
    return combine_sources(_Tracked, parse_arguments(_Tracked, options), env={}, below=[reader.read(given)]).tracking
