"""Loading of one validated model from a command line, files and the environment.

Precedence: command line > configuration files (`@ a.toml @ b.yaml`, the later file wins) > environment > defaults. All problems are
reported at once, each with source, path, value and what is expected.
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
from rlrun.config.loading.layers import Layer, Origin, Reader, assign_values, merge_layers
from rlrun.config.loading.parser import help_text
from rlrun.config.loading.problems import CONFIGURATION, ConfigError, Problem
from rlrun.config.loading.schema import Style

__all__ = ["ConfigError", "Problem", "combine_sources", "combined_layer", "file_layer", "load_file", "load_model"]

ModelT = TypeVar("ModelT", bound=BaseModel)
Complete = Callable[[type[ModelT], Layer], None]
"""Function that fills in values of a layer that follow from its other values."""


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
    """Load `model`. With `--help` or `--dry-run`, print and exit with code 0.

    Args:
        model: model to load.
        argv: command line without the program's name.
        env: environment variables.
        prog: name of the program on the help page.
        section: top-level key of a file that contains the model (`run.json` contains all roles).
        defaults: values that take precedence over the model's own defaults.
        complete: function that fills in values that follow from all sources, before validation.

    Raises:
        ConfigError: All problems of all sources.
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
    """Load `model` from only one file, as a role's process loads the file that its launcher wrote.

    `section` and `complete` are as in `load_model`.

    Raises:
        ConfigError: All problems of the file.
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
    """Load the model from all sources.

    Args:
        model: model to load.
        arguments: parsed command line; its files are not read here.
        env: environment variables.
        below: layers below the environment.
        files: files and layers above the environment, in order.
        section: top-level key, as in `load_model`.
        complete: function that fills in values, as in `load_model`.

    Raises:
        ConfigError: All problems of all sources.
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
    """Merge all sources into one layer that is not validated yet.

    Args:
        model: model to load, as in `combine_sources`.
        arguments: parsed command line.
        env: environment variables.
        below: layers below the environment.
        files: files and layers above the environment.
        section: top-level key, as in `load_model`.
        unread: problems of further files that could not be read.
        others: names of another project, which environment variables may have too.

    Raises:
        ConfigError: A file cannot be read; includes the unknown fields and options of all other sources.
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
    merged = merge_layers([base, *layers])
    if not files:  # a missing value would be given as an option
        merged.origins.setdefault((), Origin(CONFIGURATION, "", style="kebab"))
    _apply_source(merged, model, arguments)
    if problems:  # without these files, "required, but not set" would be misleading
        raise ConfigError([*merged.problems, *problems])
    return merged


def file_layer(model: type[BaseModel], path: Path, *, section: str | None = None) -> Layer:
    """Read a configuration file as a layer of `model`.

    Raises:
        ConfigError: The file cannot be read. Unknown fields are problems of the layer instead.
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
