"""Code of a run that is not RLRun's: checks before the start, and protection against code of another author's run.

Environments, losses and advantages are loaded, each in its own process. A manifest inside of a run's folder may have another author; the
code that it names is loaded only if the caller started the run here or trusts the folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import Variation, parse_manifest
from rlrun.config.algorithm.names import is_import_path
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.language_models import ModelConfig, TinyModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.config.named_code import (
    NamedCode,
    code_of_algorithm,
    code_of_engine,
    code_of_environments,
    code_of_model,
)
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.user_code_check import check_subjects
from rlrun.hub.repository import QUICK_VARIABLE, as_recorded
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code


@dataclass(frozen=True)
class Finding:
    """Problem or notice about one field of a specification."""

    key: Key
    """Field, by Python names relative to the specification."""
    message: str
    notice: bool = False
    """Whether it is only reported, and does not prevent the run."""


@dataclass(frozen=True)
class CodeCheck:
    """Code that is loaded in its own process."""

    key: Key
    """Field that names the code."""
    command: Command
    limits: Limits


def check_user_code(
    environments: Sequence[EnvironmentConfig],
    algorithm: AlgorithmConfig,
    tiny: TinyModelConfig | None,
    *,
    here: bool,
    left_out: Collection[Key] = (),
    models: Sequence[CodeCheck] = (),
) -> list[Finding]:
    """Return findings about all code of a run.

    Args:
        environments: environments of the run.
        algorithm: algorithm of the run.
        tiny: tiny model to create, whose warm-up also uses an environment.
        here: whether the run will run on this machine. Otherwise an environment with an image is not checked, and missing packages are
            only notices, because the run's image may have them.
        left_out: fields that are not checked, because they already have a problem.
        models: checks of models, which the trainer repeats at its start. A check that cannot be made here is only a notice.

    Raises:
        KeyboardInterrupt: a signal arrived during the checks.
    """
    findings = []
    checks = [*models, *_imported_functions(algorithm, ("algorithm",))]
    if tiny is not None and tiny.warmup_environment is not None:
        command = Command(tiny.warmup_environment, tiny.warmup_args)
        checks.append(CodeCheck(("model", "tiny", "warmup_environment"), command, Limits()))
    for i, environment in enumerate(environments):
        key: Key = ("environments", i)
        checks += _imported_functions(environment.algorithm, (*key, "algorithm"))
        if environment.image is not None and not here:
            message = f"({environment.image}) is not on this machine, so this environment is not checked"
            findings.append(Finding((*key, "image"), message, notice=True))
            continue
        named = tuple(environment.variables)
        command = Command(environment.id, environment.args, environment.python, variables=named)
        checks.append(CodeCheck(key, command, limits_of(environment)))
    checks = [check for check in checks if not any(check.key[: len(key)] == key for key in left_out)]

    def add_notice(index: int, text: str) -> None:
        findings.append(Finding(_refused_field(checks[index], missing=False), text, notice=True))

    # A run on this machine needs the hub's files at once, so its checks retry as its downloads do.
    given = None if here else {QUICK_VARIABLE: "1"}
    refusals = check_subjects([(replace(check.command, given=given), check.limits) for check in checks], add_notice)
    for check, refusal in zip(checks, refusals, strict=True):
        if refusal is not None:
            notice = refusal.missing and not here if check not in models else refusal.missing or not refusal.said
            message = f"is not checked on this machine: {refusal.message}" if notice else refusal.message
            finding = Finding(_refused_field(check, refusal.missing), message, notice)
            if finding not in findings:  # several checks of one model can report the same missing package
                findings.append(finding)
    return findings


def limits_of(environment: EnvironmentConfig) -> Limits:
    """Return the resource limits of an environment's process while it loads."""
    return Limits(start_seconds=environment.start_timeout_seconds, memory_bytes=int(environment.memory_gib * 1024**3))


def _imported_functions(algorithm: AlgorithmConfig | EnvironmentAlgorithm, key: Key) -> Iterator[CodeCheck]:
    """Yield the losses and advantages with an import path."""
    kinds: tuple[Literal["loss", "advantage"], ...] = ("loss", "advantage")
    for kind in kinds:
        part = getattr(algorithm, kind)
        if part is not None and is_import_path(part.name):
            yield CodeCheck((*key, kind), Command(part.name, part.options, kind=kind), Limits())


def _refused_field(check: CodeCheck, missing: bool) -> Key:
    """Field to which a refusal belongs."""
    if check.command.kind == "check":
        return check.key
    if check.command.kind != "environment":
        return (*check.key, "name")
    if check.key[0] != "environments":
        return check.key
    from rlrun.environments.registry import SHIPPED

    # A bundled environment always exists, so the missing part belongs to its arguments.
    named = check.command.id in SHIPPED or (not missing and ":" in check.command.id)
    return (*check.key, "args" if named else "id")


def code_of_spec(spec: RLRunSpec) -> list[NamedCode]:
    """Return the code that a specification names."""
    return [
        *code_of_model(spec.model),
        *code_of_algorithm(spec.algorithm),
        *code_of_environments(spec.environments),
        *code_of_engine(spec.inference),
    ]


def code_of_folder(model: ModelConfig, paths: RunPaths) -> Iterator[NamedCode]:
    """Yield the code that a run's folder selects for a manifest with `trustRemoteCode`: a commit of the hub, or a tiny model's files.

    The hub also serves commits of proposed changes, which anyone can create. A tiny model in the folder is used unchanged.
    """
    if not model.trust_remote_code:
        return
    if (recorded := as_recorded(model, paths)) != model:
        yield NamedCode(
            "revisions", f"commit {recorded.revision} of {model.name}, whose code model.trustRemoteCode runs"
        )
    if paths.model.exists():
        yield NamedCode("model", f"files of {paths.model}, whose code model.trustRemoteCode runs")


def check_recorded_manifest(file: Path, text: str, changes: Sequence[str], *, trusted: bool) -> None:
    """Reject code of a manifest inside of a run's folder, as `rlrun fork` and `rlrun why` recommend to use it.

    Checks of a manifest load its code, so this check comes first. Code from the caller's own options is trusted.

    Args:
        file: manifest file.
        text: content of the file.
        changes: options of the command line that change fields.
        trusted: whether the caller trusts the folder.

    Raises:
        ConfigError: the manifest has problems, which must be fixed before its code is loaded.
        RoleError: the manifest names code, and the caller neither started the run here nor trusts the folder.
    """
    root = file.absolute().parent
    if not RunPaths(root).run_json.is_file():
        return
    after = code_of_spec(parse_manifest(text, str(file), Variation(changes, os.environ))[0].spec)
    before = code_of_spec(parse_manifest(text, str(file))[0].spec)
    check_recorded_code(root, [one for one in before if one in after], trusted=trusted)
