"""`rlrun trainer`, `orchestrator` and `inference`: a single role that is started by hand, and its configuration.

Example: `trainer @ run.json --optimizer.lr 1e-5`. The command loads the configuration, then becomes the role's process.

The file has RLRun's or PRIME-RL's names, and missing fields have the defaults of a launcher. It can be a whole `run.json`, from which the
role reads its own part, or contain only the role's fields. If options or variables change a value of the file, or the file is incomplete,
the resolved configuration is written into the role's log folder and the role reads that file. `protocol.files.identity` lists the fields
that such a file can omit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from rlrun.cli.command_options import command_arguments, print_notices, report_problems
from rlrun.cli.rl import bench_parser, run_bench, take_bench
from rlrun.cli.run_layers import ALIASES, RlConfig, fake_data, file_layers, prime_rl_translator
from rlrun.config.dialects.completion import complete_environments, complete_layer, complete_model
from rlrun.config.dialects.translate import Translation, Translator
from rlrun.config.loading.arguments import parse_arguments
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.files import read_document
from rlrun.config.loading.layers import Assignment, Layer, Reader, merge_layers
from rlrun.config.loading.loader import combined_layer, load_file
from rlrun.config.loading.parser import help_text
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT, ConfigError, Problem
from rlrun.config.loading.schema import Style, snake_name
from rlrun.config.loading.yaml_text import Document
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, RoleConfig, TrainerConfig
from rlrun.local.preflight import free_port, has_gpus
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.identity import claim_identity, default_texts
from rlrun.protocol.files.identity import complete_role_file as complete_role
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime import exit_codes, extras
from rlrun.runtime.bootstrap import module_command

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
        return self._role_translation(self.names.option([self.role, *words], value, shown))

    def items(self, words: Sequence[str], value: object, shown: str) -> Translation | None:
        """Translate a list of PRIME-RL's tables into the role's own fields."""
        return self._role_translation(self.names.items([self.role, *words], value, shown))

    def _role_translation(self, found: Translation | None) -> Translation | None:
        if found is not None:
            found.assignments = [
                one for each in found.assignments if (one := self.role_assignment(each, found.layer)) is not None
            ]
        return found

    def role_assignment(self, assignment: Assignment, layer: Layer) -> Assignment | None:
        """Convert an assignment to a field of the run into one of the role. Returns None and adds a notice if the role lacks the field."""
        key = assignment.key[1:] if assignment.key[0] == self.role else assignment.key
        if key and str(key[0]) in self.model.model_fields:
            return replace(assignment, key=key)
        origin = assignment.origin
        message = f"the role {self.role} does not read this field"
        layer.notices.append(Problem(origin.source, origin.path, message, origin.line))
        return None


def load_role(role: Role, model: type[RoleT], argv: Sequence[str], env: Mapping[str, str]) -> tuple[RoleT, Layer]:
    """Load a role's configuration and the layer that it comes from; `--help` and `--dry-run` print and exit the process.

    Raises:
        ConfigError: every problem of every source.
    """
    arguments = parse_arguments(
        model, argv, others=RoleNames(role, model, prime_rl_translator(RlConfig, COMMAND_LINE)), also=OWN_OPTIONS[role]
    )
    if arguments.help:
        print(help_text(model, prog=role, states=default_texts(model)))
        if role == "trainer":
            print("\n" + bench_parser().format_help().strip())
        sys.exit(0)
    layers: list[Layer] = []
    problems: list[Problem] = []
    for path in arguments.files:
        try:
            layers.append(role_layer(role, model, path, read_document(path)))
        except ConfigError as error:
            problems += error.problems
    others = RoleNames(role, model, prime_rl_translator(RlConfig, ENVIRONMENT))
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
        return _of_role(RoleNames(role, model, prime_rl_translator(RlConfig, str(path), lines)), whole)
    if role in value and isinstance(value[role], dict):
        value = value[role]
        lines = {key[1:]: line for key, line in lines.items() if key[0] == role}
    style: Style = "camel" if path.suffix in (".yaml", ".yml") else "snake"
    reader = Reader(model, str(path), lines, style=style, aliases=ALIASES)
    if "format_version" in document.value:  # a run.json, which only RLRun writes
        return reader.read(value)
    names = RoleNames(role, model, prime_rl_translator(RlConfig, str(path), lines))
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


MODELS: dict[Role, type[RoleConfig]] = {
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
}
NEEDED: dict[Role, Sequence[str]] = {
    "trainer": extras.TRAINING,
    "orchestrator": extras.SAMPLING,
    "inference": extras.ENGINE,
}


def trainer(argv: Sequence[str] | None = None) -> NoReturn:
    """Start the torchrun group of the trainer on this machine."""
    _exec_role("trainer", command_arguments(argv))


def orchestrator(argv: Sequence[str] | None = None) -> NoReturn:
    """Start the orchestrator."""
    _exec_role("orchestrator", command_arguments(argv))


def inference(argv: Sequence[str] | None = None) -> NoReturn:
    """Start the server of one engine."""
    _exec_role("inference", command_arguments(argv))


def _exec_role(role: Role, words: Sequence[str]) -> NoReturn:
    try:
        argv, bench = take_bench(words) if role == "trainer" else (list(words), None)
        if role == "trainer" and (bench is not None or _says_fake(argv)):
            config, layer = load_role("trainer", TrainerConfig, argv, os.environ)
            bench = bench or fake_data(layer)
            if bench is not None:
                sys.exit(run_bench(config, bench))
        command, env = prepare_process(role, argv, os.environ)
    except ConfigError as error:
        sys.exit(report_problems(error))
    except RoleError as error:
        print(f"{role}: {error}", file=sys.stderr)
        sys.exit(error.code)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(exit_codes.STORAGE)
    if (lack := extras.explain_lacking(NEEDED[role], gpu=has_gpus())) is not None:
        print(f"error: {lack}", file=sys.stderr)
        sys.exit(extras.EXIT_CODE)
    os.execve(command[0], command, env)


def _says_fake(argv: Sequence[str]) -> bool:
    """Return whether the command line or one of its files may set fake data; only then all sources are read before the exec."""
    if any(word.startswith("--data.") for word in argv):
        return True
    documents = [read_document(path).value for path in parse_arguments(TrainerConfig, argv).files]
    return any(isinstance(document.get("data"), dict) for document in documents)


def prepare_process(role: Role, argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of the role's process.

    Args:
        role: name of the role.
        argv: command line without the program's name.
        env: environment variables. `RLRUN_API_KEY` is required; `RLRUN_ATTEMPT` defaults to 1.

    Raises:
        ConfigError: the configuration, the key or the attempt is invalid.
        RoleError: the folder belongs to another run, or its record of the run is damaged.
        OSError: the resolved configuration cannot be written.
    """
    argv, replay = _take_replay(role, argv)
    config, layer = load_role(role, MODELS[role], argv, env)
    print_notices(layer.notices)
    attempt = _read_attempt(env)
    _check_manifest_rules(config)
    config = claim_identity(config)
    file = _config_file(role, config, argv, attempt)
    if isinstance(config, TrainerConfig):
        from rlrun.trainer.ranks.launch import torchrun_command

        command = torchrun_command(
            config, config_file=file, rendezvous_port=free_port(), attempt=attempt, replay=replay
        )
    else:
        command = module_command(f"rlrun.{role}", ["--config", str(file)])
    return list(command), {**env, "RLRUN_ATTEMPT": str(attempt)}


def _check_manifest_rules(config: RoleConfig) -> None:
    """Check rules of the whole manifest that the model of a single role does not check.

    Raises:
        ConfigError: a value is invalid; the message contains the field, its value and a fix.
    """
    problems = []
    if isinstance(config, OrchestratorConfig) and config.task == "RL":
        size = config.batch_size
        problems += [
            Problem(
                "configuration",
                "batch_size",
                f"got {size}, not divisible by environments[{i}].group_size ({each.group_size}); "
                f"set batch_size = {(size // each.group_size + 1) * each.group_size}",
            )
            for i, each in enumerate(config.environments)
            if size % each.group_size
        ]
    made = RunPaths(Path(config.output_dir)).model
    if config.model.tiny is not None and not made.is_dir():
        problems.append(
            Problem(
                "configuration",
                "model.tiny",
                f"there is no folder {made}: only `rl` and `rlrun local` create the tiny model; run "
                f"`rlrun tiny-model {made}`, or set model.path",
            )
        )
    if problems:
        raise ConfigError(problems)


def _take_replay(role: Role, argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Split `--replay DIR` of the trainer from a command line; it is not a field of the configuration.

    Raises:
        ConfigError: the folder does not exist.
    """
    words = list(argv)
    if role != "trainer" or "--replay" not in words:
        return words, None
    at = words.index("--replay")
    given = words[at + 1 : at + 2]
    if not given or not Path(given[0]).is_dir():
        named = f"there is no folder {given[0]}" if given else "needs the folder of recorded batches after it"
        raise ConfigError([Problem(COMMAND_LINE, "--replay", named)])
    return words[:at] + words[at + 2 :], Path(given[0]).absolute()


def _read_attempt(env: Mapping[str, str]) -> int:
    problems = []
    if not env.get("RLRUN_API_KEY"):
        problems.append(
            Problem(
                "environment",
                "RLRUN_API_KEY",
                "required, but not set: all roles of a run share one secret; create it once with "
                "`export RLRUN_API_KEY=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')`",
            )
        )
    attempt = env.get("RLRUN_ATTEMPT", "1")
    if not (attempt.isdecimal() and attempt.isascii() and int(attempt[:9]) >= 1):
        problems.append(Problem("environment", "RLRUN_ATTEMPT", f"got {attempt!r}, expected a whole number from 1"))
    if problems:
        raise ConfigError(problems)
    return int(attempt)


def _config_file(role: Role, config: RoleConfig, argv: Sequence[str], attempt: int) -> Path:
    """Return a file with `config`: the given file if it has equal content, else a new file in the role's log folder."""
    files = parse_arguments(type(config), argv).files
    whole: dict[str, object] | None = None
    if len(files) == 1:
        document = read_document(files[0]).value
        whole = document if role in document and "format_version" in document else None
        if whole is not None and load_file(type(config), files[0], section=role) == config:
            return files[0].absolute()
    resolved = config.model_dump(mode="json")
    file = RunPaths(Path(config.output_dir)).logs(attempt, role) / "config.json"
    write_json(file, resolved if whole is None else whole | {role: resolved})
    return file.absolute()
