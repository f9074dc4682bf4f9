"""One entry point per role: `trainer @ run.json --optimizer.lr 1e-5`. Loads the configuration, then becomes the role's process.

A file can be a whole `run.json`, from which the role reads its own part, or contain only the role's fields. If options or variables change
a value of the file, or the file is incomplete, the resolved configuration is written into the role's log folder and the role reads that
file. `protocol.files.identity` lists the fields that such a file can omit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rlrun.cli.bench import run_bench, take_bench
from rlrun.cli.common import arguments, notices, report
from rlrun.cli.sources.fake_data import fake_data
from rlrun.cli.sources.role_layers import load_role
from rlrun.config.loading.arguments import parse_arguments
from rlrun.config.loading.files import read_document
from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, RoleConfig, TrainerConfig
from rlrun.local.preflight import free_port, has_gpus
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.identity import claim_identity
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime import exit_codes, extras
from rlrun.runtime.bootstrap import module_command

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
    _become("trainer", arguments(argv))


def orchestrator(argv: Sequence[str] | None = None) -> NoReturn:
    """Start the orchestrator."""
    _become("orchestrator", arguments(argv))


def inference(argv: Sequence[str] | None = None) -> NoReturn:
    """Start the server of one engine."""
    _become("inference", arguments(argv))


def _become(role: Role, words: Sequence[str]) -> NoReturn:
    try:
        argv, bench = take_bench(words) if role == "trainer" else (list(words), None)
        if role == "trainer" and (bench is not None or _says_fake(argv)):
            config, layer = load_role("trainer", TrainerConfig, argv, os.environ)
            bench = bench or fake_data(layer)
            if bench is not None:
                sys.exit(run_bench(config, bench))
        command, env = prepare(role, argv, os.environ)
    except ConfigError as error:
        sys.exit(report(error))
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


def prepare(role: Role, argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
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
    notices(layer.notices)
    attempt = _attempt(env)
    _check(config)
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


def _check(config: RoleConfig) -> None:
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


def _attempt(env: Mapping[str, str]) -> int:
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
