"""From a command line, files and the environment to one validated model.

Precedence: command line > configuration files (`@ a.toml @ b.yaml`, the later one wins) > environment > defaults. All problems are found
at once; each says where the value came from, its path, the value and what is expected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from rlrun.config.loading.arguments import Arguments, OtherNames, parse_arguments, parse_environment
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.files import read_document
from rlrun.config.loading.help import help_text
from rlrun.config.loading.layers import Layer, Origin, Reader, assign_values, merge_layers
from rlrun.config.loading.problems import CONFIGURATION, ConfigError, Problem
from rlrun.config.loading.schema import Style

__all__ = ["ConfigError", "Problem", "combine_sources", "combined_layer", "file_layer", "load_file", "load_model"]

ModelT = TypeVar("ModelT", bound=BaseModel)
Complete = Callable[[type[ModelT], Layer], None]
"""Fills in a layer what follows from what it says."""


def load_model(
    model: type[ModelT],
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    prog: str,
    section: str | None = None,
    defaults: Mapping[str, object] | None = None,
    complete: Complete[ModelT] | None = None,
) -> ModelT:
    """Load `model`; `--help` and `--dry-run` print and end the process with code 0.

    Args:
        model: what to load.
        argv: the command line without the program's name.
        env: the environment.
        prog: the program's name in the help page.
        section: a file that has this key at its top holds the model there (`run.json` holds all roles).
        defaults: values that come before the model's own defaults.
        complete: fills in what follows from the values of all sources, before they are judged.

    Raises:
        ConfigError: every problem of every source.
    """
    arguments = parse_arguments(model, argv)
    if arguments.help:
        print(help_text(model, prog=prog))
        sys.exit(0)
    layers = [] if defaults is None else [Reader(model, "defaults", style="snake").read(defaults)]
    config = combine_sources(
        model, arguments, env=env, below=layers, files=[*arguments.files], section=section, complete=complete
    )
    if arguments.dry_run:
        print(config.model_dump_json(indent=2))
        sys.exit(0)
    return config


def load_file(
    model: type[ModelT], path: Path, *, section: str | None = None, complete: Complete[ModelT] | None = None
) -> ModelT:
    """Load `model` from one file alone: what a role's process does with the file that its launcher wrote.

    `section` and `complete` are as for `load_model`.

    Raises:
        ConfigError: every problem of the file.
    """
    return combine_sources(model, Arguments(), env={}, files=[path], section=section, complete=complete)


def combine_sources(
    model: type[ModelT],
    arguments: Arguments,
    *,
    env: Mapping[str, str],
    below: Sequence[Layer] = (),
    files: Sequence[Path | Layer] = (),
    section: str | None = None,
    complete: Complete[ModelT] | None = None,
) -> ModelT:
    """The model of all sources.

    Args:
        model: what to load.
        arguments: the parsed command line; its own files are not read here.
        env: the environment.
        below: layers under the environment.
        files: files and layers above the environment, in order.
        section: as for `load_model`.
        complete: as for `load_model`.

    Raises:
        ConfigError: every problem of every source.
    """
    layer = combined_layer(model, arguments, env=env, below=below, files=files, section=section)
    if complete is not None:
        complete(model, layer)
    return validate_layer(model, layer)


def combined_layer(
    model: type[BaseModel],
    arguments: Arguments,
    *,
    env: Mapping[str, str],
    below: Sequence[Layer] = (),
    files: Sequence[Path | Layer] = (),
    section: str | None = None,
    unread: Sequence[Problem] = (),
    others: OtherNames | None = None,
) -> Layer:
    """All sources as one layer, which is still to be judged.

    Args:
        model: as for `combine_sources`, and so are the others.
        arguments: the parsed command line.
        env: the environment.
        below: layers under the environment.
        files: files and layers above the environment.
        section: as for `load_model`.
        unread: problems of further files, which could not be read.
        others: another project's names, which variables may have too.

    Raises:
        ConfigError: a file cannot be read; with the unknown fields and options of all other sources.
    """
    base = merge_layers(below)
    _apply_source(base, model, parse_environment(model, env, others=others))
    problems = [*arguments.unread, *unread]
    layers: list[Layer] = []
    for file in files:
        try:
            layers.append(file if isinstance(file, Layer) else file_layer(model, file, section=section))
        except ConfigError as error:
            problems += error.problems
    whole = merge_layers([base, *layers])
    if not files:  # what is missing would be an option
        whole.origins.setdefault((), Origin(CONFIGURATION, "", style="kebab"))
    _apply_source(whole, model, arguments)
    if problems:  # without these files, "required, but not set" would be noise
        raise ConfigError([*whole.problems, *problems])
    return whole


def file_layer(model: type[BaseModel], path: Path, *, section: str | None = None) -> Layer:
    """A configuration file as a layer of `model`.

    Raises:
        ConfigError: the file cannot be read; unknown fields are problems of the layer instead.
    """
    document = read_document(path)
    value, lines = document.value, document.lines
    if section in value and isinstance(value[section], dict):
        value = value[section]
        lines = {key[1:]: line for key, line in lines.items() if key[0] == section}
    style: Style = "snake" if path.suffix == ".toml" else "camel"
    return Reader(model, str(path), lines, style=style).read(value)


def _apply_source(layer: Layer, model: type[BaseModel], arguments: Arguments) -> None:
    assign_values(layer, model, arguments.assignments)
    layer.origins.update(arguments.layer.origins)
    layer.problems += arguments.layer.problems
    layer.notices += arguments.layer.notices
    layer.hints |= arguments.layer.hints
