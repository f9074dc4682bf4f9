"""Configuration of a single role that is started by hand: its file in RLRun's or PRIME-RL's names, with the defaults of a launcher."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from rlrun.cli.sources.run_config import ALIASES, RlConfig
from rlrun.cli.sources.run_layers import file_layers, translator
from rlrun.config.dialects.complete import complete_environments, complete_layer, complete_model
from rlrun.config.dialects.translate import Translation, Translator
from rlrun.config.loading.arguments import parse_arguments
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.files import read_document
from rlrun.config.loading.help import help_text
from rlrun.config.loading.layers import Assignment, Layer, Reader, merge_layers
from rlrun.config.loading.loader import combined_layer
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT, ConfigError, Problem
from rlrun.config.loading.schema import Style, snake_name
from rlrun.config.loading.yaml_text import Document
from rlrun.config.models.roles import RoleConfig
from rlrun.protocol.files.identity import complete_role_file as complete_role
from rlrun.protocol.files.identity import derived_states
from rlrun.protocol.files.paths import Role

RoleT = TypeVar("RoleT", bound=RoleConfig)


OWN_OPTIONS: Mapping[Role, Sequence[str]] = {
    "trainer": ("--replay", "--bench"),
    "orchestrator": (),
    "inference": (),
}
"""Options of each command that are not fields."""


@dataclass(frozen=True)
class RoleNames:
    """PRIME-RL's names in the options and variables of one role."""

    role: Role
    model: type[RoleConfig]
    names: Translator

    def knows(self, words: Sequence[str]) -> bool:
        """Return whether a dotted name is PRIME-RL's."""
        if [snake_name(word) for word in words] == ["output_dir"]:
            return False
        return self.names.knows([self.role, *words])

    def option(self, words: Sequence[str], value: Any, shown: str) -> Translation | None:
        """Translate an option into the role's own fields."""
        return self._own(self.names.option([self.role, *words], value, shown))

    def items(self, words: Sequence[str], value: object, shown: str) -> Translation | None:
        """Translate a list of PRIME-RL's tables into the role's own fields."""
        return self._own(self.names.items([self.role, *words], value, shown))

    def _own(self, found: Translation | None) -> Translation | None:
        if found is not None:
            found.assignments = [one for each in found.assignments if (one := self.own(each, found.layer)) is not None]
        return found

    def own(self, assignment: Assignment, layer: Layer) -> Assignment | None:
        """Convert an assignment to a field of the run into one of the role. Returns None and adds a notice if the role lacks the field."""
        key = assignment.key[1:] if assignment.key[0] == self.role else assignment.key
        if key and str(key[0]) in self.model.model_fields:
            return replace(assignment, key=key)
        origin = assignment.origin
        message = f"the role {self.role} does not read this field"
        layer.notices.append(Problem(origin.source, origin.path, message, origin.line))
        return None


@dataclass(frozen=True)
class GivenRole:
    """Values of a role's command line and files, before validation."""

    layer: Layer
    dry_run: bool


def load_role(role: Role, model: type[RoleT], argv: Sequence[str], env: Mapping[str, str]) -> tuple[RoleT, Layer]:
    """Load a role's configuration and the layer that it comes from; `--help` and `--dry-run` print and exit the process.

    Raises:
        ConfigError: every problem of every source.
    """
    arguments = parse_arguments(
        model, argv, others=RoleNames(role, model, translator(RlConfig, COMMAND_LINE)), also=OWN_OPTIONS[role]
    )
    if arguments.help:
        print(help_text(model, prog=role, states=derived_states(model)))
        sys.exit(0)
    layers: list[Layer] = []
    problems: list[Problem] = []
    for path in arguments.files:
        try:
            layers.append(role_layer(role, model, path, read_document(path)))
        except ConfigError as error:
            problems += error.problems
    others = RoleNames(role, model, translator(RlConfig, ENVIRONMENT))
    layer = combined_layer(model, arguments, env=env, files=layers, unread=problems, others=others)
    complete_model(layer)
    if role == "orchestrator":
        complete_environments(layer)
    complete_role(model, layer)
    _fill_sampling(layer)
    config = validate_layer(model, layer)
    if arguments.dry_run:
        for notice in layer.notices:
            print(f"note: {notice}", file=sys.stderr)
        print(config.model_dump_json(indent=2))
        sys.exit(0)
    return config, layer


def role_layer(role: Role, model: type[RoleConfig], path: Path, document: Document) -> Layer:
    """Return a file as a layer of the role: the role's own fields, or its part of a whole run (`run.json`, or a file of `rl`)."""
    value, lines = document.value, document.lines
    if "format_version" not in value and any(isinstance(value.get(one), dict) for one in get_args(Role)):
        whole = merge_layers(file_layers(path, None, document))
        complete_layer(whole)
        return _of_role(RoleNames(role, model, translator(RlConfig, str(path), lines)), whole)
    if role in value and isinstance(value[role], dict):
        value = value[role]
        lines = {key[1:]: line for key, line in lines.items() if key[0] == role}
    style: Style = "camel" if path.suffix in (".yaml", ".yml") else "snake"
    reader = Reader(model, str(path), lines, style=style, aliases=ALIASES)
    if "format_version" in document.value:  # a run.json, which only RLRun writes
        return reader.read(value)
    names = RoleNames(role, model, translator(RlConfig, str(path), lines))
    kept = {
        name: one for name, one in value.items() if snake_name(name) == "output_dir"
    }  # the role's own field, not the run's
    translation = names.names.read({name: one for name, one in value.items() if name not in kept}, role)
    run = translation.as_layer(RlConfig)
    complete_layer(run)
    return merge_layers([_of_role(names, run), reader.read(translation.rest | kept)])


def _of_role(names: RoleNames, run: Layer) -> Layer:
    """Return the role's part of a run's layer."""
    found = Layer(problems=run.problems, notices=run.notices, hints=run.hints)
    parts = {**run.values, **(own if isinstance(own := run.values.get(names.role), dict) else {})}
    found.values = {name: value for name, value in parts.items() if name in names.model.model_fields}
    for key, origin in run.origins.items():
        own_key = key[1:] if key[:1] == (names.role,) else key
        if own_key and own_key[0] in found.values:
            found.origins[own_key] = origin
    return found


def _fill_sampling(layer: Layer) -> None:
    """Copy the shared `sampling` into each environment without its own, as a launcher does."""
    shared, environments = layer.values.get("sampling"), layer.values.get("environments")
    for one in environments if isinstance(environments, list) else ():
        if isinstance(one, dict) and isinstance(shared, dict):
            one.setdefault("sampling", dict(shared))
