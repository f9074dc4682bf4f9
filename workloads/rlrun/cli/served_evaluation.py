"""`eval` and `synthesize` against OpenAI-style servers instead of engines: from a manifest, from files (`@ FILE`) or only from options.

Options that the command does not define are fields of the run's configuration, as for `rl`; `client` is an additional field.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import is_manifest, take_variation
from rlrun.cli.command_options import print_notices
from rlrun.cli.run_layers import EvalConfig, read_layer, take_files
from rlrun.config.dialects.prime_rl import PRIME_RL_EVAL
from rlrun.config.loading.arguments import PREFIXES
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.files import FORMATS, read_document
from rlrun.config.loading.layers import Layer
from rlrun.config.loading.parser import Parser, own_options
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.yaml_text import Key
from rlrun.evaluate.served.servers import ClientConfig

if TYPE_CHECKING:
    from rlrun.config.models.rollout import EnvironmentConfig


_OF_ENGINES = ("run_dir", "weights_dir", "steps", "step", "engine_url", "inference_gpu_ids", "share_gpus")
"""Options that apply only to engines."""
_NAME_MAX = 253
_SEQ_LEN = 1_048_576
"""Default `seq_len`, in tokens: the server applies its own limit."""
_UNREAD: tuple[Key, ...] = (("model",), ("algorithm",), ("data",), ("trainer",), ("inference",), ("tracking",))
"""Fields of the run's specification that are not read for servers."""


def asks_servers(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether the options, files or variables of a command line name a server."""
    if any(word.partition("=")[0].partition(".")[0] == "--client" for word in argv):
        return True
    if any(name.startswith(tuple(f"{prefix}CLIENT__" for prefix in PREFIXES)) for name in env):
        return True
    return any(_names_servers(Path(word)) for before, word in pairwise(argv) if before == "@")


def _names_servers(path: Path) -> bool:
    try:
        document = read_document(path).value
    except ConfigError:
        return False  # `read_served` reports the error
    return not is_manifest(document) and "client" in document


@dataclass(frozen=True)
class Served:
    """Parsed command line for servers."""

    options: argparse.Namespace
    """The command's own options."""
    run: EvalConfig
    client: ClientConfig
    model: str | None
    """Name of the model at the servers."""
    dry_run: bool

    @property
    def spec(self) -> RLRunSpec:
        """Specification of the run; its `model` is a placeholder."""
        return self.run.spec()


def read_served(argv: Sequence[str], parser: Parser, env: Mapping[str, str] = os.environ) -> Served:
    """Parse the command line and all its files.

    Args:
        argv: command line without the program's name.
        parser: parser of the command's own options, with an optional manifest.
        env: environment variables.

    Raises:
        ConfigError: every problem of every source.
        SystemExit: the command's own options are invalid.
    """
    rest, files = take_files(argv)
    if any(role is not None for role, _ in files):
        role, path = next(one for one in files if one[0] is not None)
        raise ConfigError([Problem(COMMAND_LINE, f"--{role} @", f"got {path}, but no role is started; write @ {path}")])
    described = [word for word in rest if Path(word).suffix in FORMATS and not word.startswith("-")]
    own = {*own_options(parser)} - (set() if described else {"--environment-ids"})
    rest, fields = take_variation(rest, own, EvalConfig, PRIME_RL_EVAL)
    options = parser.parse_args(rest)
    _refuse_engines(parser, options)
    sources = [*([options.manifest] if options.manifest is not None else []), *(path for _, path in files)]
    words = [word for path in sources for word in ("@", str(path))]
    given = read_layer([*words, *fields], env, EvalConfig, also=own)
    if any(is_manifest(read_document(path).value) for path in sources):
        given.layer.values.setdefault("task", "RL")  # default of a manifest; only its rollouts are sampled
    given.layer.values.setdefault("seq_len", _SEQ_LEN)
    model = _take_model(given.layer)
    run = (
        validate_layer(EvalConfig, given.layer) if options.dry_run else _judge_run(given.layer, options.environment_ids)
    )
    return Served(options, run, run.client or ClientConfig(), model, options.dry_run)


def _refuse_engines(parser: Parser, options: argparse.Namespace) -> None:
    for name in _OF_ENGINES:
        if getattr(options, name, None) not in (None, False):
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} applies only to engines, but client names servers; remove one of both")


def _take_model(layer: Layer) -> str | None:
    """Remove the model from a layer and return its name at the servers, or None for a model folder or a tiny model.

    Raises:
        ConfigError: the value is not a valid name.
    """
    written, origin = layer.values.get("model"), layer.origin(("model", "name"))
    layer.values["model"] = {"name": "served"}
    layer.origins = {key: one for key, one in layer.origins.items() if key[:1] != ("model",)}
    is_default = any(one.path == "model.name" for one in layer.notices)
    layer.notices = [one for one in layer.notices if one.path != "model.name"]
    if not isinstance(written, dict) or is_default:
        return None
    name = written["name"] if "name" in written else written.get("path") if "tiny" not in written else None
    if name is None:
        return None
    if not (isinstance(name, str) and name.strip() and name.isprintable() and len(name) <= _NAME_MAX):
        message = f"got {name!r:.80}, expected the model's name at the server, of at most {_NAME_MAX} characters"
        raise ConfigError([Problem(origin.source, origin.path or "model.name", message, origin.line)])
    return name


def _judge_run(layer: Layer, ids: Sequence[str] | None) -> EvalConfig:
    """Load the code of the environments and return the validated run.

    Raises:
        ConfigError: every problem.
    """
    from rlrun.local.judge import judge_layer

    def unread_fields(spec: RLRunSpec) -> Collection[Key]:
        return [*_UNREAD, *(key for i, one in enumerate(spec.environments) for key in _unread_of(i, one, ids))]

    judged = judge_layer(EvalConfig, layer, leave_out=unread_fields)
    print_notices(judged.notices)
    if judged.problems or judged.run is None:
        raise ConfigError(judged.problems)
    return judged.run


def _unread_of(index: int, environment: EnvironmentConfig, ids: Sequence[str] | None) -> list[Key]:
    if ids is not None and not {environment.label, environment.id} & {*ids}:
        return [("environments", index)]
    return [("environments", index, "algorithm"), ("environments", index, "group_size")]
