"""Sources of a local run's configuration as one layer, the models of its configuration, and PRIME-RL's fake data.

A run on fake data is a measurement of the trainer's step. The models are the specification of a manifest plus the run's name and folder.

Precedence of the sources: command line, files (a later file overrides an earlier one), environment variables, defaults. Fields of the whole
run (model, max_steps, seq_len, ...) in a role's file or table move to the specification. Two different values for one shared field are an
error that names both, if they are on the same level: in one file, or in the files of several roles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, field_validator

from rlrun.api.resource import RLRun, RLRunSpec, check_name
from rlrun.api.run_manifest import is_manifest
from rlrun.config.dialects.completion import (
    complete_environments,
    complete_gpus,
    complete_layer,
    complete_learning,
    complete_model,
)
from rlrun.config.dialects.prime_rl import PRIME_RL, PRIME_RL_EVAL
from rlrun.config.dialects.translate import Translator
from rlrun.config.loading.arguments import parse_arguments
from rlrun.config.loading.files import read_document
from rlrun.config.loading.layers import Hint, Layer, Origin, Reader, merge_layers
from rlrun.config.loading.loader import combined_layer
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT, ConfigError, Problem
from rlrun.config.loading.schema import Shape, field_shapes, snake_name
from rlrun.config.loading.yaml_text import Document, Key
from rlrun.config.models.roles import Task
from rlrun.evaluate.served.servers import ClientConfig
from rlrun.protocol.files.paths import Role
from rlrun.trainer.ranks.launch import BenchOptions


def is_fake(layer: Layer) -> bool:
    """Return whether a layer selects fake data."""
    return _fake_data_hint(layer) is not None


def _fake_data_hint(layer: Layer) -> Hint | None:
    found = next((layer.hints[name] for name in ("data_type", "data_fake") if name in layer.hints), None)
    return None if found is None or found.value == "sft" or found.value is False else found


def fake_data(layer: Layer) -> BenchOptions | None:
    """Return the options of the measurement for a run on fake data; None for a run on real data."""
    fake = _fake_data_hint(layer)
    if fake is None:
        return None
    origin = fake.origin
    message = "the run uses fake data, so the trainer's step is only measured, as with --bench"
    layer.notices.append(Problem(origin.source, origin.path, message, origin.line))
    steps, seq_len = layer.values.get("max_steps"), layer.values.get("seq_len", 2048)
    options = BenchOptions(steps=steps) if isinstance(steps, int) and 0 < steps < 1000 else BenchOptions()
    varied = "variable" in (fake.value, layer.hints["data_length"].value if "data_length" in layer.hints else None)
    if varied and isinstance(seq_len, int) and seq_len >= 8:
        return replace(options, seq_lens=(seq_len // 4, seq_len // 2, seq_len))
    return options


ALIASES = {"ckpt": "checkpoint"}
"""Alternative names of RLRun's own fields."""


class RlConfig(RLRunSpec):
    """A local run: the specification of a manifest plus the run's name and folder."""

    name: Annotated[str, Field(min_length=1, max_length=40)] = "rl"
    """Name of the run."""
    output_dir: str | None = None
    """The run's folder; default: runs/<name>."""

    @field_validator("name")
    @classmethod
    def _check_rfc1035_name(cls, name: str) -> str:
        return check_name(name)

    def spec(self) -> RLRunSpec:
        """Return the part that a manifest's `spec` contains."""
        return RLRunSpec(**{name: getattr(self, name) for name in RLRunSpec.model_fields})


class SftConfig(RlConfig):
    """A local supervised run: the specification of a manifest plus the run's name and folder."""

    name: str = "sft"
    """Name of the run."""
    task: Task = "SFT"
    """Kind of the run. Default: SFT."""


class EvalConfig(RlConfig):
    """A local evaluation: the specification of a manifest plus the run's name and folder."""

    name: str = "eval"
    """Name of the run."""
    task: Task = "Eval"
    """Kind of the run. Default: Eval."""
    client: ClientConfig | None = None
    """OpenAI-style servers that are used instead of engines. Default: none."""


_DATA_SET = ("name", "path", "split")
"""Options of a single data set, which replaces the data sets of the files."""
_ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Given:
    """Values of a command line and its files, before validation."""

    layer: Layer
    files: list[Path]
    dry_run: bool
    """Whether the configuration is only printed."""


def read_layer(
    argv: Sequence[str],
    env: Mapping[str, str],
    model: type[RlConfig] = RlConfig,
    *,
    hints: Mapping[str, Hint] | None = None,
    also: Collection[str] = (),
    gpus: int = 0,
) -> Given:
    """Read all sources into one layer.

    Args:
        argv: command line without the program's name and without the options of the local run.
        env: environment variables.
        model: model of the run's configuration.
        hints: values of the local run's options that affect the run itself.
        also: further known options, for the suggestion after a misspelled option.
        gpus: number of GPUs of the machine on which the run starts.

    Raises:
        ConfigError: the command line is invalid, or a file cannot be read.
    """
    rest, files = take_files(argv)
    rest, data = take_data_set(rest)
    given = parse_arguments(model, rest, aliases=ALIASES, others=prime_rl_translator(model, COMMAND_LINE), also=also)
    levels: list[Layer] = []
    problems: list[Problem] = []
    for _, group in groupby(enumerate(files), key=lambda one: one[0] if one[1][0] is None else "roles"):
        level: dict[Role | None, list[Layer]] = {}
        for _, (role, path) in group:
            try:
                level.setdefault(role, []).append(merge_layers(file_layers(path, role, read_document(path), model)))
            except ConfigError as error:
                problems += error.problems
        parts = [merge_layers(layers) for layers in level.values()]
        levels.append(merge_layers(parts))
        levels[-1].problems += find_conflicts(parts)
    given_data = [Reader(model, COMMAND_LINE, style="kebab").read({"data": {"sources": [data]}})] if data else []
    layer = combined_layer(
        model,
        given,
        env=env,
        files=[*levels, *given_data],
        unread=problems,
        others=prime_rl_translator(model, ENVIRONMENT),
    )
    layer.hints |= hints or {}
    if model is RlConfig:
        complete_environments(layer)
    complete_layer(layer)
    complete_model(layer)
    if model is RlConfig:
        if is_fake(layer):  # the rows configure the measurement; an RL run has no `data`
            layer.values.pop("data", None)
        complete_learning(layer, layer.values.get("task", "RL"))
        complete_gpus(layer, gpus)
    elif model is SftConfig and not is_fake(layer):
        complete_learning(layer, "SFT")
    return Given(layer, [path for _, path in files], given.dry_run)


def prime_rl_translator(model: type[RlConfig], source: str, lines: Mapping[Key, int] | None = None) -> Translator:
    """Return the translator of PRIME-RL's names in one source."""
    dialect = PRIME_RL_EVAL if issubclass(model, EvalConfig) else PRIME_RL
    return Translator(dialect, model, source, lines or {}, aliases=ALIASES, fallback="trainer")


def take_data_set(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split `--data.name`, `--data.path` and `--data.split`, which define a single data set, from a command line."""
    rest: list[str] = []
    data: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        field = option.removeprefix("--data.")
        if field == option or field not in _DATA_SET:
            rest.append(word)
        elif not equals and (not left or left[0].startswith("--")):
            raise ConfigError([Problem(COMMAND_LINE, option, "needs a value after it")])
        else:
            data[field] = value if equals else left.pop(0)
    return rest, data


def take_files(argv: Sequence[str]) -> tuple[list[str], list[tuple[Role | None, Path]]]:
    """Split `@ FILE` and `--<role> @ FILE` from a command line, in their order."""
    rest: list[str] = []
    files: list[tuple[Role | None, Path]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        role = next((role for role in _ROLES if word == f"--{role}"), None)
        if word == "@" and words and words[0].startswith("--"):
            raise ConfigError([Problem(COMMAND_LINE, "@", "needs a file after it")])
        if word == "@" and words:
            files.append((None, Path(words.pop(0))))
        elif role is None or not words or words[0] != "@":
            rest.append(word)
        elif len(words) < 2 or words[1].startswith("--"):
            raise ConfigError([Problem(COMMAND_LINE, f"{word} @", "needs a file after it")])
        else:
            files.append((role, Path(words[1])))
            del words[:2]
    return rest, files


def file_layers(path: Path, role: Role | None, document: Document, model: type[RlConfig] = RlConfig) -> list[Layer]:
    """Return a file as layers: the run's fields, and the fields of each role, from which shared fields move to the run.

    Args:
        path: path of the file.
        role: role of the file; None for a file of the whole run (with a table per role) or a manifest.
        document: content of the file.
        model: model of the run's configuration.
    """
    if role is None and is_manifest(document.value):
        return [_manifest_layer(document, str(path))]
    reader = Reader(model, str(path), document.lines, style="snake", aliases=ALIASES)
    translation = prime_rl_translator(model, str(path), document.lines).read(document.value, role or "")
    translated = translation.as_layer(model)
    if role is not None:
        return _with_conflicts([translated, *_role_layers(reader, role, translation.rest, "", ())])
    content = translation.rest
    tables = {snake_name(name): name for name in content if snake_name(name) in _ROLES}
    tables = {known: name for known, name in tables.items() if isinstance(content[name], dict)}
    common = {name: value for name, value in content.items() if name not in tables.values()}
    layers = [translated, reader.read(common)]
    for known in _ROLES:
        if known in tables:
            name = tables[known]
            layers += _role_layers(reader, known, content[name], f"{name}.", (name,))
    return _with_conflicts(layers)


def _manifest_layer(document: Document, source: str) -> Layer:
    """Return the specification and the name of a manifest as a layer."""
    whole = Reader(RLRun, source, document.lines, camel_only=True).read(document.value, line=document.line)
    found = Layer(problems=whole.problems, notices=whole.notices)
    spec, metadata = whole.values.get("spec"), whole.values.get("metadata")
    found.values = dict(spec) if isinstance(spec, dict) else {}
    found.origins = {key[1:]: origin for key, origin in whole.origins.items() if key[:1] == ("spec",)}
    if isinstance(metadata, dict) and "name" in metadata:
        found.values["name"] = metadata["name"]
        found.origins[("name",)] = whole.origin(("metadata", "name"))
    return found


def _with_conflicts(layers: list[Layer]) -> list[Layer]:
    """Return the layers of one file, plus a layer with their conflicts."""
    return [*layers, Layer(problems=find_conflicts(layers))]


def _role_layers(reader: Reader, role: Role, part: dict[str, Any], prefix: str, raw: Key) -> list[Layer]:
    shape = field_shapes(reader.model)[role]
    assert shape.model is not None
    own: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    misplaced: list[Problem] = []
    for name, value in part.items():
        known = ALIASES.get(name, snake_name(name))
        if known in _ROLES:
            place = "into a separate file" if known != role else "at the top level"
            message = f"this table is read by the {role}; write the fields of the {known} {place}"
            misplaced.append(Problem(reader.source, prefix + name, message, reader.lines.get((*raw, name))))
        elif known in reader.model.model_fields and known not in shape.model.model_fields:
            shared[name] = value
        else:
            own[name] = value
    own_layer, shared_layer = Layer(problems=misplaced), Layer()
    own_layer.values = {role: reader.value(own, shape, (role,), prefix.rstrip("."), raw, own_layer)}
    root = Shape("model", model=reader.model)
    shared_layer.values = reader.value(shared, root, (), prefix.rstrip("."), raw, shared_layer)
    return [shared_layer, own_layer]


def find_conflicts(layers: Sequence[Layer]) -> list[Problem]:
    """Return a problem for every field that two layers of one level set to different values."""
    problems: list[Problem] = []
    seen: dict[Key, tuple[Any, Origin]] = {}
    for layer in layers:
        for key, value, origin in _leaf_values(layer):
            if key in seen and seen[key][0] != value:
                other, first = seen[key]
                line = f":{first.line}" if first.line is not None else ""
                message = f"got {value!r}, but {first.source}{line} sets {first.path} to {other!r}; the roles share it, remove one"
                problems.append(Problem(origin.source, origin.path, message, origin.line))
            seen.setdefault(key, (value, origin))
    return problems


def _leaf_values(layer: Layer) -> Iterator[tuple[Key, Any, Origin]]:
    """Yield the values of a layer with their keys and origins, without the tables that contain them."""
    for key, origin in layer.origins.items():
        value: Any = layer.values
        for part in key:
            value = value[part]
        if key and not isinstance(value, dict):
            yield key, value, origin
