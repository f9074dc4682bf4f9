"""`rl @ run.toml`, or `rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml --max-steps N`: a local run from files.

The files are merged into the specification that a manifest holds. What a role's file says about the whole run (model, max_steps,
seq_len, ...) moves to the shared place; two different values for one shared field are an error that names both.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, field_validator

from rlrun.api.resolve import resolve
from rlrun.api.resource import RLRunSpec, check_name
from rlrun.cli.bench import not_benched, run_bench, take_bench
from rlrun.cli.common import arguments, piped, report
from rlrun.config.loading.arguments import COMMAND_LINE, parse_arguments
from rlrun.config.loading.examine import validate
from rlrun.config.loading.files import read_document
from rlrun.config.loading.help import help_text
from rlrun.config.loading.layers import Layer, Origin, Reader, merge
from rlrun.config.loading.loader import combined
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.loading.schema import Shape, fields, snake
from rlrun.config.loading.yaml_text import Document, Key
from rlrun.local.preflight import PreflightError, check_packages
from rlrun.protocol.files.paths import Role
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.options import full_names

ALIASES = {"ckpt": "checkpoint"}
"""PRIME-RL's names of our fields; its rollouts_per_example is the groupSize of every environment."""
_GROUP_SIZE = "rollouts_per_example"
_DATA_SET = ("name", "path", "split")
"""PRIME-RL's names of the only data set stand in `data` itself."""
_ROLES: tuple[Role, ...] = get_args(Role)
UID = "00000000-0000-0000-0000-000000000000"


class RlConfig(RLRunSpec):
    """A local run: the specification of a manifest, with the run's name and folder beside it."""

    name: Annotated[str, Field(min_length=1, max_length=40)] = "rl"
    """Name of the run."""
    output_dir: str | None = None
    """The run's folder; default: runs/<name>."""

    @field_validator("name")
    @classmethod
    def _rfc1035(cls, name: str) -> str:
        return check_name(name)

    def spec(self) -> RLRunSpec:
        """The part that a manifest's `spec` holds."""
        return RLRunSpec(**{name: getattr(self, name) for name in RLRunSpec.model_fields})


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rl`; returns the exit code."""
    usage = "rl [--trainer @ FILE] [--orchestrator @ FILE] [--inference @ FILE]"
    return piped(lambda: start(arguments(argv), RlConfig, prog="rl", usage=usage))


def start(words: Sequence[str], model: type[RlConfig], *, prog: str, usage: str) -> int:
    """Run what a command line and its files say; returns the exit code.

    Args:
        words: the command line without the program's name.
        model: what they describe.
        prog: the program's name.
        usage: how the help page calls it.
    """
    from rlrun.local.judge import judge_layer, nothing, stopped
    from rlrun.local.main import add_options, run_spec

    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_options(parser)
    if "--help" in words or "-h" in words:
        print(help_text(model, prog=usage))
        print("\n" + parser.format_help().replace("options:", "options of the local run:").strip())
        return exit_codes.OK
    try:
        options, rest = parser.parse_known_args(full_names(words))
    except SystemExit:
        return exit_codes.USAGE
    try:
        rest, bench = take_bench(rest)
        given = read_layer(rest, os.environ, model)
        if given.dry_run:
            config = validate(model, given.layer)
            folder = options.output_dir or config.output_dir or str(Path("runs") / config.name)
            print(resolve(config.spec(), name=config.name, uid=UID, output_dir=folder).model_dump_json(indent=2))
            return exit_codes.OK
        check_packages(extras.TRAINING)
    except PreflightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except ConfigError as error:
        return report(error)
    judged = judge_layer(model, given.layer, leave_out=nothing if bench is None else not_benched)
    code = stopped(judged)
    if code is not None or judged.run is None:
        return code or exit_codes.CONFIGURATION
    config = judged.run
    options.output_dir = options.output_dir or config.output_dir
    if bench is not None:
        return run_bench(resolve(config.spec(), name=config.name, uid=UID, output_dir="runs").trainer, bench)

    from rich.console import Console

    called = shlex.join([prog, *words])
    return run_spec(config.spec(), name=config.name, options=options, console=Console(), command=called)


@dataclass(frozen=True)
class Given:
    """Values of a command line and its files, not judged yet."""

    layer: Layer
    files: list[Path]
    dry_run: bool
    """True if it is only printed."""


def read(
    argv: Sequence[str], env: Mapping[str, str], model: type[RlConfig] = RlConfig
) -> tuple[RlConfig, list[Path], bool]:
    """The configuration, the files that it comes from, and whether only to print it.

    Raises:
        ConfigError: every problem of every source.
    """
    given = read_layer(argv, env, model)
    return validate(model, given.layer), given.files, given.dry_run


def read_layer(argv: Sequence[str], env: Mapping[str, str], model: type[RlConfig] = RlConfig) -> Given:
    """All that the sources say, as one layer.

    Raises:
        ConfigError: the command line is none, or a file cannot be read.
    """
    rest, role_files = _split(argv)
    rest, data = take_data_set(rest)
    given = parse_arguments(model, rest, aliases=ALIASES)
    layers: list[Layer] = []
    problems: list[Problem] = []
    group_sizes: list[tuple[Any, Origin]] = []
    for role, path in [*((None, path) for path in given.files), *role_files]:
        try:
            layers += file_layers(path, role, read_document(path), group_sizes)
        except ConfigError as error:
            problems += error.problems
    whole = merge(layers)
    whole.problems += conflicts(layers)
    apply_group_sizes(whole, group_sizes)
    given_data = [Reader(model, COMMAND_LINE, style="kebab").read({"data": {"sources": [data]}})] if data else []
    layer = combined(model, given, env=env, files=[whole, *given_data], unread=problems)
    return Given(layer, [*given.files, *(path for _, path in role_files)], given.dry_run)


def take_data_set(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--data.name`, `--data.path` and `--data.split`, the only data set of a run, out of a command line."""
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


def _with_data_set(document: dict[str, Any]) -> dict[str, Any]:
    """A file's `data.name`, `data.path` and `data.split` as its only source, and `data.seq_len` as the run's."""
    data = document.get("data")
    if not isinstance(data, dict) or not data.keys() & {*_DATA_SET, "seq_len"}:
        return document
    rest = {name: value for name, value in data.items() if name not in (*_DATA_SET, "seq_len")}
    source = {name: data[name] for name in _DATA_SET if name in data}
    if source:
        rest["sources"] = [*rest.get("sources", ()), source]
    shared = {"seq_len": data["seq_len"]} if "seq_len" in data else {}
    return shared | document | {"data": rest}


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[Role, Path]]]:
    """Take `--<role> @ FILE` out of a command line."""
    rest: list[str] = []
    files: list[tuple[Role, Path]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        role = next((role for role in _ROLES if word == f"--{role}"), None)
        if role is None or not words or words[0] != "@":
            rest.append(word)
        elif len(words) < 2:
            raise ConfigError([Problem(COMMAND_LINE, f"{word} @", "needs a file after it")])
        else:
            files.append((role, Path(words[1])))
            del words[:2]
    return rest, files


def file_layers(
    path: Path, role: Role | None, document: Document, group_sizes: list[tuple[Any, Origin]]
) -> list[Layer]:
    """A file as layers: the run's fields, and those of each role's part, whose shared fields move up.

    Args:
        path: the file.
        role: the role whose file it is; None: the whole run's, with a table per role.
        document: its content.
        group_sizes: the values of `rollouts_per_example` are added here.
    """
    reader = Reader(RlConfig, str(path), document.lines, style="snake", aliases=ALIASES)
    if role is not None:
        return _role_layers(reader, role, document.value, "", (), group_sizes)
    content = _with_data_set(document.value)
    tables = {snake(name): name for name in content if snake(name) in _ROLES}
    tables = {known: name for known, name in tables.items() if isinstance(content[name], dict)}
    common = {name: value for name, value in content.items() if name not in tables.values()}
    layers = [reader.read(common)]
    for known in _ROLES:
        if known in tables:
            name = tables[known]
            layers += _role_layers(reader, known, content[name], f"{name}.", (name,), group_sizes)
    return layers


def _role_layers(
    reader: Reader, role: Role, part: dict[str, Any], prefix: str, raw: Key, group_sizes: list[tuple[Any, Origin]]
) -> list[Layer]:
    shape = fields(RlConfig)[role]
    assert shape.model is not None
    own: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, value in part.items():
        known = ALIASES.get(name, snake(name))
        if known == _GROUP_SIZE:
            group_sizes.append((value, Origin(reader.source, prefix + name, reader.lines.get((*raw, name)))))
        elif known in RlConfig.model_fields and known not in (*shape.model.model_fields, *_ROLES):
            shared[name] = value
        else:
            own[name] = value
    own_layer, shared_layer = Layer(), Layer()
    own_layer.values = {role: reader.value(own, shape, (role,), prefix.rstrip("."), raw, own_layer)}
    root = Shape("model", model=RlConfig)
    shared_layer.values = reader.value(shared, root, (), prefix.rstrip("."), raw, shared_layer)
    return [shared_layer, own_layer]


def conflicts(layers: Sequence[Layer]) -> list[Problem]:
    """Shared fields that two files set to different values."""
    problems: list[Problem] = []
    seen: dict[Key, tuple[Any, Origin]] = {}
    for layer in layers:
        for key, origin in layer.origins.items():
            value = _at(layer.values, key)
            if isinstance(value, dict) or not key:
                continue
            if key in seen and seen[key][0] != value:
                other, first = seen[key]
                problems.append(
                    Problem(
                        origin.source,
                        origin.path,
                        f"got {value!r}, but {first.source} sets {first.path} to {other!r}; the roles share it, remove one",
                        origin.line,
                    )
                )
            seen.setdefault(key, (value, origin))
    return problems


def apply_group_sizes(whole: Layer, group_sizes: Sequence[tuple[Any, Origin]]) -> None:
    """Make `rollouts_per_example` the group size of every environment that the files set none for."""
    environments = whole.values.get("environments")
    items = environments if isinstance(environments, list) else []
    for size, origin in group_sizes:
        if not items:
            whole.problems.append(
                Problem(
                    origin.source, origin.path, "there is no environment in the files; set its group_size", origin.line
                )
            )
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                continue
            key: Key = ("environments", i, "group_size")
            if item.setdefault("group_size", size) != size:
                other = whole.origin(key)
                whole.problems.append(
                    Problem(
                        origin.source,
                        origin.path,
                        f"got {size!r}, but {other.source} sets {other.path} to {item['group_size']!r}; remove one",
                        origin.line,
                    )
                )
            whole.origins.setdefault(key, origin)


def _at(values: Any, key: Key) -> Any:
    for part in key:
        values = values[part]
    return values


if __name__ == "__main__":
    sys.exit(main())
