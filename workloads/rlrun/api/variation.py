"""Options and environment variables that override a manifest: `rlrun local run.yaml --max-steps 20 --trainer.optimizer.lr 1e-5`.

Precedence: command line > manifest > environment > defaults.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.config.dialects.complete import complete_layer
from rlrun.config.dialects.prime_rl import PRIME_RL
from rlrun.config.dialects.rows import Dialect
from rlrun.config.dialects.translate import Translator
from rlrun.config.loading.arguments import Arguments, parse_arguments, parse_environment, value_words
from rlrun.config.loading.files import FORMATS
from rlrun.config.loading.layers import Layer, assign_values, merge_layers
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT
from rlrun.config.loading.schema import find_field, snake_name, spell_name

_ALIASES = {"ckpt": "checkpoint"}
_SPEC = ("spec",)
_OF_COMMANDS = frozenset({"--dry-run", "--resume", "--output-dir"})
"""PRIME-RL options that are fields there but options of commands here: a command supports or refuses them itself."""


def take_variation(
    argv: Sequence[str], own: Collection[str] = (), model: type[RLRunSpec] = RLRunSpec, dialect: Dialect = PRIME_RL
) -> tuple[list[str], list[str]]:
    """Extract the options that are fields of a specification, with their values, from a command line.

    A list takes all words after its option up to the next option or file. A flag takes only `true` and `false`. Any other option takes one
    word. A further word that is not a file stays with its option, which then refuses it.

    Args:
        argv: command line without the program's name.
        own: options of the command itself, which stay in the command line.
        model: model of the specification, possibly extended.
        dialect: another project's option names, which are extracted too.
    """
    others = _dialect_translator(COMMAND_LINE, model, dialect)
    rest: list[str] = []
    taken: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.partition("=")[0] in own or not _is_field(word, others):
            rest.append(word)
            continue
        count = value_words(model, word, words, aliases=_ALIASES, others=others)
        while len(words) > count and _is_stray(words[count]):
            count += 1
        taken += [word, *words[:count]]
        del words[:count]
    return rest, taken


def _is_stray(word: str) -> bool:
    return not word.startswith(("-", "@")) and Path(word).suffix not in FORMATS and not os.path.lexists(word)


def is_field(word: str) -> bool:
    """Return whether an option starts with a field's name, or with another project's name of a field."""
    return _is_field(word, _dialect_translator(COMMAND_LINE))


def _is_field(word: str, others: Translator) -> bool:
    option = word.partition("=")[0]
    name = option.removeprefix("--")
    if not word.startswith("--") or not name or option in _OF_COMMANDS:
        return False
    first = snake_name(name.partition(".")[0])
    positive = first.removeprefix("no_")
    known = find_field(others.model, _ALIASES.get(positive, positive)) is not None
    return known or others.knows(name.split("."))


def field_options() -> list[str]:
    """Return the options of the top-level fields of a specification."""
    return [f"--{spell_name(RLRunSpec, name, 'kebab')}" for name in RLRunSpec.model_fields]


def _dialect_translator(source: str, model: type[RLRunSpec] = RLRunSpec, dialect: Dialect = PRIME_RL) -> Translator:
    return Translator(dialect, model, source, aliases=_ALIASES, fallback="trainer")


@dataclass(frozen=True)
class Variation:
    """Changes of a manifest by a command line and an environment."""

    options: Sequence[str] = ()
    """Options with their values, in order."""
    env: Mapping[str, str] = field(default_factory=dict)

    def over(self, manifest: Layer) -> Layer:
        """Return the manifest's layer with the options applied over it and the environment variables below it."""
        given = parse_arguments(RLRunSpec, self.options, aliases=_ALIASES, others=_dialect_translator(COMMAND_LINE))
        variables = parse_environment(RLRunSpec, self.env, others=_dialect_translator(ENVIRONMENT))
        below = Layer()
        _apply_variation(below, variables)
        if not isinstance(manifest.values.get("spec", {}), dict):
            return manifest
        merged = merge_layers([below, manifest])
        _apply_variation(merged, given)
        complete_layer(merged, _SPEC)
        return merged


def _apply_variation(layer: Layer, arguments: Arguments) -> None:
    assign_values(layer, RLRun, [replace(item, key=(*_SPEC, *item.key)) for item in arguments.assignments])
    layer.origins.update({(*_SPEC, *key): origin for key, origin in arguments.layer.origins.items()})
    layer.problems += arguments.layer.problems
    layer.notices += arguments.layer.notices
    layer.hints |= arguments.layer.hints
