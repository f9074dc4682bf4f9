"""Plan of a command. All problems are reported before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.api.run_manifest import Variation, read_manifest
from rlrun.config.base import Fields
from rlrun.config.loading.files import read_text
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, EvaluationSamplingConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.config.named_code import NamedCode
from rlrun.config.suggest import did_you_mean
from rlrun.environments.protocol import Split
from rlrun.evaluate import policies
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.staging import highest_rank, make_exporter
from rlrun.fit.report import TRAINER
from rlrun.hub.repository import as_recorded
from rlrun.local.judge import judge_manifest
from rlrun.local.made_model import prepare_model
from rlrun.local.preflight import check_model
from rlrun.local.process_plan import GpuId
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code
from rlrun.protocol.files.shared_trainer_files import model_folder
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json

API_KEY_VARIABLE = "RLRUN_API_KEY"
"""Environment variable with the key of given engines."""
ALL_TASKS = 1_000_000
"""Number of tasks that means all tasks of an environment."""
_UID = "evaluation"
_BASE = Policy(None, "base", None, "")
"""Placeholder for the base model before it is read."""


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Options for the folder, the questions (samples of tasks) and the sampling. None: not given."""

    work: Path | None
    """Folder for answers, logs and the weights of the engines."""
    environment_ids: Sequence[str] | None
    split: Split
    samples_per_task: int | None
    max_tasks: int | None
    training_sampling: bool
    """Whether to ignore `spec.evaluation`: the sampling is then the one of the training, with the changes in `sampling` below, and without
    other options each task is sampled once.
    """
    sampling: Fields
    """Fields of `EvaluationSamplingConfig` that replace those of the manifest."""


@dataclass(frozen=True, kw_only=True)
class Request(QuestionOptions):
    """Options of the command line. None: not given."""

    manifest: Path
    run_dir: Path | None
    weights_dir: Path | None
    steps: Sequence[int] | None
    newest: bool
    """Whether to evaluate only the newest policy. The option has no effect if steps or the base model are given."""
    base: bool
    engine_urls: Sequence[str] | None
    gpu_ids: Sequence[GpuId] | None
    share_gpus: bool = False
    trusts_code: bool = False
    """Whether to run the model's code at the commit that is recorded in the run's folder, although the manifest does not name it."""
    variation: Variation = field(default_factory=Variation)
    """Options and variables that change the manifest."""


@dataclass(frozen=True, kw_only=True)
class Job(Plan):
    """Plan of a command, with its engines."""

    config: RunConfig
    """Configuration of engines and orchestrator, with `work` as output folder."""
    engine_urls: Sequence[str]
    """Addresses of given engines; empty if engines are started."""
    api_key: str
    """Key of given engines; empty if engines are started."""
    gpu_ids: Sequence[GpuId] | None
    share_gpus: bool = False
    engine_weights: Path
    """Folder from which given engines read weights. Default: the weights of the run."""


def prepare_job(request: Request, console: Console) -> Job:
    """Prepare a command, and create the tiny model if the manifest needs one that does not exist.

    Raises:
        ConfigError: the manifest is invalid.
        RoleError: a field or option is wrong; the message contains its value and a fix.
        OSError: the folder for answers cannot be written.
    """
    manifest = _read_manifest(request)
    name, spec = manifest.metadata.name, manifest.spec
    work, run = _choose_folders(request, name)
    environments = chosen_environments(spec, request.environment_ids)
    evaluation = evaluation_settings(spec, request, environments)
    available, wanted, where = _available_policies(request, run)
    # Check the choice before a model is created; only the identity of the base model is missing here.
    policies.choose_policies(available, _BASE, steps=wanted, with_base=request.base, where=where)
    api_key = _api_key() if request.engine_urls else ""
    work.mkdir(parents=True, exist_ok=True)  # an unwritable folder fails before a model is created in it
    # `local_folder`: folder of the model, or None for a model on the hub.
    model, local_folder = _resolve_model(spec, name, run, work, console, trusts_code=request.trusts_code)
    base = policies.base_policy(model, local_folder)
    chosen = policies.choose_policies(available, base, steps=wanted, with_base=request.base, where=where)
    served_as = policies.served_as(chosen)
    adapters = [policy for policy in chosen if policy.kind == "adapter"]
    served = LoRAConfig(rank=highest_rank(adapters)) if served_as == "adapter" else None
    config = resolve_rollouts(
        spec, name, work, model=model, environments=environments, evaluation=evaluation, lora=served
    )
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


def resolve_rollouts(
    spec: RLRunSpec,
    name: str,
    work: Path,
    *,
    model: ModelConfig,
    environments: Sequence[EnvironmentConfig],
    evaluation: EvaluationConfig,
    lora: LoRAConfig | None = None,
) -> RunConfig:
    """Return the configuration of a command that only plays episodes.

    Args:
        spec: specification with the fields that stay.
        name: name of the run.
        work: folder for the answers, and of the engines' files.
        model: model of the engines.
        environments: environments of the questions.
        evaluation: number of the questions, and their sampling.
        lora: adapters that the engines serve.
    """
    changes = {
        "task": "RL",  # only its rollouts are used
        "model": model,
        "environments": list(environments),
        # No trainer is started, so its block has only defaults, and LoRA if the engines serve adapters.
        "trainer": type(spec.trainer)(lora=lora),
        "evaluation": evaluation,
        "policies": None,  # the command selects them
    }
    return resolve_spec(spec.model_copy(update=changes), name=name, uid=_UID, output_dir=str(work))


def answers_folder(options: QuestionOptions, name: str) -> Path:
    """Return the folder for the answers of a run with this name."""
    return (options.work or Path("evaluations") / name).absolute()


def describe_request(request: Request) -> Json:
    """Return policies, environments and sampling of a request, without reading the model or code; writes no files.

    Raises:
        ConfigError: the manifest is invalid.
        RoleError: see `prepare_job`.
    """
    manifest = read_manifest(request.manifest, request.variation)
    name, spec = manifest.metadata.name, manifest.spec
    work, run = _choose_folders(request, name)
    environments = chosen_environments(spec, request.environment_ids)
    evaluation = evaluation_settings(spec, request, environments)
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
    """Return the folder for the answers, and the paths of the run.

    Raises:
        RoleError: the given run folder does not contain a run.
    """
    work = answers_folder(request, name)
    run = RunPaths((request.run_dir or Path("runs") / name).absolute())
    if request.run_dir is not None and not run.run_json.is_file():
        raise RoleError(
            f"--run-dir: {run.root} has no run.json; set the folder of a run, such as runs/NAME",
            exit_codes.USAGE,
        )
    return work, run


def _available_policies(request: Request, run: RunPaths) -> tuple[dict[int, Policy], Sequence[int] | None, str]:
    """Return the policies by step, the requested steps (None: all), and the name of the place in messages."""
    folder = request.weights_dir.absolute() if request.weights_dir is not None else None
    available = policies.of_run(run.root) if folder is None else policies.in_folder(folder)
    where = str(folder or run.root)
    if request.newest and request.steps is None and not request.base:
        # Policies in a folder have a step; only the base model has none.
        return available, [policies.newest_policy(available, where).step or 0], where
    return available, request.steps, where


def _read_manifest(request: Request) -> RLRun:
    """Read the manifest and check its model and the code of the selected environments.

    Raises:
        ConfigError: the manifest is invalid.
    """
    ids = request.environment_ids

    def unread_fields(spec: RLRunSpec) -> list[Key]:
        # Fields that an evaluation does not read: training settings of selected environments, and all of the other environments.
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
        read_text(request.manifest),
        str(request.manifest),
        here=True,
        leave_out=unread_fields,
        variation=request.variation,
    )
    if judged.problems or judged.run is None:
        raise ConfigError(judged.problems)
    return judged.run


def chosen_environments(spec: RLRunSpec, ids: Sequence[str] | None) -> list[EnvironmentConfig]:
    """Return the selected environments. None: all.

    Raises:
        RoleError: the manifest has no environments, or a name is unknown.
    """
    if not spec.environments:
        raise RoleError(
            f"spec.environments is empty (task {spec.task}), so there are no questions; use a manifest with environments, and set "
            "the weights with --run-dir or --weights-dir",
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


def evaluation_settings(
    spec: RLRunSpec, request: QuestionOptions, environments: Sequence[EnvironmentConfig]
) -> EvaluationConfig:
    """Merge the options for the number of questions and the sampling into those of the specification.

    Raises:
        RoleError: a number is out of range.
    """
    settings = spec.evaluation or EvaluationConfig()
    if request.training_sampling:
        settings = EvaluationConfig(num_tasks=ALL_TASKS)
    changes = {"num_tasks": request.max_tasks, "samples_per_task": request.samples_per_task}
    if request.sampling:
        sampling = _read_sampling(spec, settings.sampling, request.sampling, environments)
        settings = settings.model_copy(update={"sampling": sampling})
    return settings.model_copy(update={field: value for field, value in changes.items() if value is not None})


def _read_sampling(
    spec: RLRunSpec,
    base: EvaluationSamplingConfig | None,
    changes: Fields,
    environments: Sequence[EnvironmentConfig],
) -> EvaluationSamplingConfig:
    try:
        sampling = EvaluationSamplingConfig(**(base.model_dump(exclude_unset=True) if base else {}) | dict(changes))
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        # An error of a single field has its name as location. An error of several fields has none; its message starts with a name.
        given = str(first["loc"][0]) if first["loc"] else reason.partition(" ")[0]
        option = next(n for n, info in EvaluationSamplingConfig.model_fields.items() if given in (n, info.alias))
        raise RoleError(
            f"--{option.replace('_', '-')}: got {changes.get(option)!r}: {reason}", exit_codes.USAGE
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
            f"--engine-url needs {API_KEY_VARIABLE} in the environment; set it to the key with which the engine was started",
            exit_codes.USAGE,
        )
    return key


def _resolve_model(
    spec: RLRunSpec, name: str, run: RunPaths, work: Path, console: Console, *, trusts_code: bool
) -> tuple[ModelConfig, Path | None]:
    """Return the model as a folder or hub name, and its folder (None for a model on the hub).

    A tiny model (`model.tiny`, created at the start of a run) is the one in the run's folder. If the run has none, the model is created in
    `work`, from a resolved configuration in `model.json`. The folder may also contain the plain copy of a quantized model. A model on the
    hub has the commit that the run has recorded.

    Raises:
        RoleError: the model cannot be used, or the recorded commit contains code that `trusts_code` does not allow.
    """
    model = spec.model
    if model.tiny is not None:
        folder = model_folder(run.root, spec.trainer.shared_with)
        if not folder.is_dir():
            folder = RunPaths(work).model
            trainer = type(spec.trainer)()
            config = resolve_spec(
                spec.model_copy(update={"trainer": trainer}), name=name, uid=_UID, output_dir=str(work)
            )
            file = work / "model.json"
            write_bytes(file, (config.model_dump_json(indent=1, by_alias=False) + "\n").encode())
            prepare_model(
                config, file, RunPaths(work), 1, lambda text: console.print(text, highlight=False, markup=False)
            )
        model = ModelConfig(path=str(folder), dtype=model.dtype)
    elif (folder := model_folder(run.root, spec.trainer.shared_with)).is_dir():
        if model.trust_remote_code:
            code = NamedCode("model", f"files of {folder}, whose code model.trustRemoteCode runs")
            check_recorded_code(run.root, [code], trusted=trusts_code)
        model = model.model_copy(update={"name": None, "revision": None, "path": str(folder)})
    elif model.path is not None:
        model = model.model_copy(update={"path": str(Path(model.path).absolute())})
    requested_model, model = model, as_recorded(model, run)
    # The commit comes from the run's folder and not from the manifest, so its code needs the caller's trust: the hub also
    # serves commits of pull requests, which any user can write.
    if model.trust_remote_code and model != requested_model:
        code = NamedCode("revisions", f"commit {model.revision} of {model.name}, whose code model.trustRemoteCode runs")
        check_recorded_code(run.root, [code], trusted=trusts_code)
    if model.path is None:
        return model, None
    check_model(model)
    return model, Path(model.path)
