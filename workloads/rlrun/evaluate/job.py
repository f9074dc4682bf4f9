"""Plan of a request: every problem is reported before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from rlrun.api.manifest import read_manifest
from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.api.variation import Variation
from rlrun.config.base import Fields
from rlrun.config.loading.files import read_text
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.lora import LoRAConfig
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, EvaluationSamplingConfig
from rlrun.config.models.run import RunConfig
from rlrun.config.named_code import NamedCode
from rlrun.config.suggest import did_you_mean
from rlrun.environments.protocol import Split
from rlrun.evaluate import policies
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.staging import highest_rank, make_exporter
from rlrun.fit.trainable import TRAINER
from rlrun.hub.revisions import as_recorded
from rlrun.local.judge import judge_manifest
from rlrun.local.model import prepare_model
from rlrun.local.plan import GpuId
from rlrun.local.preflight import check_model
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code
from rlrun.protocol.files.shared import model_folder
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json

API_KEY_VARIABLE = "RLRUN_API_KEY"
ALL_TASKS = 1_000_000
_BASE = Policy(None, "base", None, "")
"""The base model before it is read."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options that say what is asked; None: not given."""

    work: Path | None
    """Folder for answers, logs and what engines load."""
    environment_ids: Sequence[str] | None
    split: Split
    samples_per_task: int | None
    max_tasks: int | None
    training_sampling: bool
    """Sample as in training, whatever `spec.evaluation.sampling` says, but for `sampling`; by default all tasks once."""
    sampling: Fields
    """Fields of `EvaluationSamplingConfig`, over those of the manifest."""


@dataclass(frozen=True, kw_only=True)
class Request(Asked):
    """Options of the command line; None: not given."""

    manifest: Path
    run_dir: Path | None
    weights_dir: Path | None
    steps: Sequence[int] | None
    newest: bool
    """Choose the newest policy alone, where neither steps nor the base model are named."""
    base: bool
    engine_urls: Sequence[str] | None
    gpu_ids: Sequence[GpuId] | None
    share_gpus: bool = False
    trusts_code: bool = False
    """True if the caller trusts the run's folder with the commit of a model's own code."""
    variation: Variation = field(default_factory=Variation)
    """Options and variables that change the manifest."""


@dataclass(frozen=True, kw_only=True)
class Job(Plan):
    """A command's plan, and by what means."""

    config: RunConfig
    """Configuration of engines and orchestrator; its output folder is `work`."""
    engine_urls: Sequence[str]
    """Empty: engines are started."""
    api_key: str
    gpu_ids: Sequence[GpuId] | None
    share_gpus: bool = False
    engine_weights: Path
    """The folder of weights of engines that are given."""


def prepare_job(request: Request, console: Console) -> Job:
    """Decide everything, and make the tiny model where a manifest asks for one that no run has made yet.

    Raises:
        ConfigError: the manifest is wrong.
        RoleError: names the field or option, its value and what to do.
        OSError: the folder for answers cannot be written.
    """
    manifest = _read_manifest(request)
    name, spec = manifest.metadata.name, manifest.spec
    work, run = _choose_folders(request, name)
    environments = chosen_environments(spec, request.environment_ids)
    evaluation = asked_evaluation(spec, request, environments)
    available, wanted, where = _available_policies(request, run)
    # Found out before a model is made: only the identity of the base model is missing.
    policies.choose_policies(available, _BASE, steps=wanted, with_base=request.base, where=where)
    api_key = _api_key() if request.engine_urls else ""
    work.mkdir(parents=True, exist_ok=True)
    model, made = _resolve_model(spec, name, run, work, console, trusts_code=request.trusts_code)
    base = policies.base_policy(model, made)
    chosen = policies.choose_policies(available, base, steps=wanted, with_base=request.base, where=where)
    served_as = policies.served_as(chosen)
    adapters = [policy for policy in chosen if policy.kind == "adapter"]
    served = LoRAConfig(rank=highest_rank(adapters)) if served_as == "adapter" else None
    changes = {
        "task": "RL",  # of which nothing but rollouts is asked
        "model": model,
        "environments": environments,
        "trainer": type(spec.trainer)(lora=served),  # nothing is trained
        "evaluation": evaluation,
    }
    config = resolve_spec(spec.model_copy(update=changes), name=name, uid="evaluation", output_dir=str(work))
    return Job(
        work=work,
        config=config,
        orchestrator=config.orchestrator,
        policies=chosen,
        split=request.split,
        engine_urls=tuple(request.engine_urls or ()),
        api_key=api_key,
        gpu_ids=request.gpu_ids,
        share_gpus=request.share_gpus,
        engine_weights=request.weights_dir.absolute() if request.weights_dir is not None else run.weights,
        export=make_exporter(model, model.source(run.model), spec.trainer.lora),
    )


def describe_request(request: Request) -> Json:
    """Policies, environments and sampling of a request, without a look at the model or at code; writes nothing.

    Raises:
        ConfigError: the manifest is wrong.
        RoleError: as for `prepare_job`.
    """
    manifest = read_manifest(request.manifest, request.variation)
    name, spec = manifest.metadata.name, manifest.spec
    work, run = _choose_folders(request, name)
    environments = chosen_environments(spec, request.environment_ids)
    evaluation = asked_evaluation(spec, request, environments)
    available, wanted, where = _available_policies(request, run)
    chosen = policies.choose_policies(available, _BASE, steps=wanted, with_base=request.base, where=where)
    shown: dict[str, Any] = {"mode": "json", "by_alias": True}
    return {
        "name": name,
        "output": str(work),
        "model": spec.model.model_dump(**shown, exclude_none=True),
        "policies": [
            {"name": one.name, "kind": one.kind, "path": None if one.path is None else str(one.path)} for one in chosen
        ],
        "split": request.split,
        "environments": [one.model_dump(**shown, exclude_unset=True) for one in environments],
        "numTasks": evaluation.num_tasks if evaluation.num_tasks < ALL_TASKS else "all",
        "samplesPerTask": evaluation.samples_per_task,
        "sampling": (evaluation.sampling or EvaluationSamplingConfig()).model_dump(**shown, exclude_unset=True),
        "seqLen": spec.seq_len,
    }


def _choose_folders(request: Request, name: str) -> tuple[Path, RunPaths]:
    """Folder for the answers, and the run's folder.

    Raises:
        RoleError: the run's folder is named and is not one.
    """
    work = (request.work or Path("evaluations") / name).absolute()
    run = RunPaths((request.run_dir or Path("runs") / name).absolute())
    if request.run_dir is not None and not run.run_json.is_file():
        raise RoleError(
            f"--run-dir: {run.root} is not the folder of a run: it has no run.json; name one such as runs/NAME",
            exit_codes.USAGE,
        )
    return work, run


def _available_policies(request: Request, run: RunPaths) -> tuple[dict[int, Policy], Sequence[int] | None, str]:
    """Policies by step, the requested steps (None: all), and the name of the place in messages."""
    folder = request.weights_dir.absolute() if request.weights_dir is not None else None
    available = policies.of_run(run.root) if folder is None else policies.in_folder(folder)
    where = str(folder or run.root)
    if request.newest and request.steps is None and not request.base:
        return available, [policies.newest_policy(available, where).step or 0], where
    return available, request.steps, where


def _read_manifest(request: Request) -> RLRun:
    """The manifest, after a look at its model and at the code of the environments that are asked."""
    ids = request.environment_ids

    def unused(spec: RLRunSpec) -> list[Key]:
        return [
            ("algorithm",),
            ("data",),
            TRAINER,
            *(
                ("environments", i, *part)
                for i, e in enumerate(spec.environments)
                for part in ([("algorithm",), ("group_size",)] if ids is None or {e.label, e.id} & {*ids} else [()])
            ),
        ]

    judged = judge_manifest(
        read_text(request.manifest), str(request.manifest), here=True, leave_out=unused, variation=request.variation
    )
    if judged.problems or judged.run is None:
        raise ConfigError(judged.problems)
    return judged.run


def chosen_environments(spec: RLRunSpec, ids: Sequence[str] | None) -> list[EnvironmentConfig]:
    """The environments that are asked; None: all.

    Raises:
        RoleError: there are none, or one has no such name.
    """
    if not spec.environments:
        raise RoleError(
            f"spec.environments is empty (task {spec.task}), so nothing can be asked; take a manifest with environments, and name the "
            "weights with --run-dir or --weights-dir",
            exit_codes.CONFIGURATION,
        )
    if ids is None:
        return list(spec.environments)
    known = [name for e in spec.environments for name in dict.fromkeys((e.label, e.id))]
    for wanted in ids:
        if wanted not in known:
            labels = ", ".join(e.label for e in spec.environments)
            raise RoleError(
                f"--environment-ids: got {wanted!r}{did_you_mean(wanted, known)}; the manifest's environments are: {labels}",
                exit_codes.USAGE,
            )
    return [e for e in spec.environments if e.label in ids or e.id in ids]


def asked_evaluation(spec: RLRunSpec, request: Asked, environments: Sequence[EnvironmentConfig]) -> EvaluationConfig:
    """Number of questions, and how tokens are drawn: the options over the specification.

    Raises:
        RoleError: a number does not fit.
    """
    told = spec.evaluation or EvaluationConfig()
    if request.training_sampling:
        told = EvaluationConfig(num_tasks=ALL_TASKS)
    changes = {"num_tasks": request.max_tasks, "samples_per_task": request.samples_per_task}
    if request.sampling:
        told = told.model_copy(update={"sampling": _read_sampling(spec, told.sampling, request.sampling, environments)})
    return told.model_copy(update={field: value for field, value in changes.items() if value is not None})


def _read_sampling(
    spec: RLRunSpec,
    told: EvaluationSamplingConfig | None,
    changes: Fields,
    environments: Sequence[EnvironmentConfig],
) -> EvaluationSamplingConfig:
    try:
        sampling = EvaluationSamplingConfig(**(told.model_dump(exclude_unset=True) if told else {}) | dict(changes))
    except ValidationError as error:
        first = error.errors()[0]
        told_of = first["msg"].removeprefix("Value error, ")
        given = str(first["loc"][0]) if first["loc"] else told_of.partition(" ")[0]
        option = next(n for n, info in EvaluationSamplingConfig.model_fields.items() if given in (n, info.alias))
        raise RoleError(
            f"--{option.replace('_', '-')}: got {changes.get(option)!r}: {told_of}", exit_codes.USAGE
        ) from None
    for environment in environments:
        try:
            sampling.check(environment.sampling or spec.sampling, seq_len=spec.seq_len)
        except ValueError as error:
            raise RoleError(f"sampling for {environment.label}: {error}", exit_codes.USAGE) from None
    return sampling


def _api_key() -> str:
    key = os.environ.get(API_KEY_VARIABLE, "")
    if not key:
        raise RoleError(
            f"--engine-url needs {API_KEY_VARIABLE} in the environment: the key that the engine was started with",
            exit_codes.USAGE,
        )
    return key


def _resolve_model(
    spec: RLRunSpec, name: str, run: RunPaths, work: Path, console: Console, *, trusts_code: bool
) -> tuple[ModelConfig, Path | None]:
    """The model as a folder or a name on the hub, and its folder. A tiny one is the run's, or else made here."""
    model = spec.model
    if model.tiny is not None:
        folder = model_folder(run.root, spec.trainer.shared_with)
        if not folder.is_dir():
            folder = RunPaths(work).model
            trainer = type(spec.trainer)()
            config = resolve_spec(
                spec.model_copy(update={"trainer": trainer}), name=name, uid="evaluation", output_dir=str(work)
            )
            file = work / "model.json"
            write_bytes(file, (config.model_dump_json(indent=1, by_alias=False) + "\n").encode())
            prepare_model(
                config, file, RunPaths(work), 1, lambda text: console.print(text, highlight=False, markup=False)
            )
        model = ModelConfig(path=str(folder), dtype=model.dtype)
    elif model.path is not None:
        model = model.model_copy(update={"path": str(Path(model.path).absolute())})
    asked, model = model, as_recorded(model, run)
    if (
        model.trust_remote_code and model != asked
    ):  # the hub serves commits of proposed changes, which anybody may write
        code = NamedCode("revisions", f"commit {model.revision} of {model.name}, whose code model.trustRemoteCode runs")
        check_recorded_code(run.root, [code], trusted=trusts_code)
    if model.path is None:
        return model, None
    check_model(model)
    return model, Path(model.path)
