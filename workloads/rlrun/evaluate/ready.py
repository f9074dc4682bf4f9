"""Start of an attempt of task Eval: its number, and the policies to evaluate."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlrun.config.models.lora import LoRAConfig
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EvaluationConfig
from rlrun.config.models.run import config_fingerprint
from rlrun.evaluate import policies
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.staging import highest_rank, make_exporter
from rlrun.protocol.files.attempts import check_number, first_attempt, write_attempt
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import recorded_run
from rlrun.runtime import exit_codes

_STAGING = ".evaluation.a"


def begin_attempt(paths: RunPaths, config: OrchestratorConfig, attempt: int) -> Path:
    """Claim the attempt's number, as a trainer does for other tasks, and return the folder for the engines' weights.

    Raises:
        RoleError: the number is in use, or the volume refuses the write.
    """
    check_number(paths, attempt)
    begun = first_attempt(world_size=1, config_hash=config_fingerprint(config), attempt=attempt, uid=config.uid)
    with storage_errors(paths.root, "start the attempt"):
        try:
            write_attempt(paths, begun)
        except FileExistsError:
            check_number(paths, attempt)
            raise
        for left in paths.weights.glob(f"{_STAGING}*"):  # left by killed attempts
            shutil.rmtree(left, ignore_errors=True)
    return paths.weights / f"{_STAGING}{attempt:04d}"


def make_plan(config: OrchestratorConfig, attempt: int) -> Plan:
    """Make the plan from the current content of the volume.

    Raises:
        RoleError: a field is wrong; the message contains its value and a fix.
    """
    paths = RunPaths(Path(config.output_dir))
    model, source = config.model, config.model.source(paths.model)
    base = policies.base_policy(model, None if model.name is not None else Path(source))
    chosen, trained_with = _choose_policies(config, paths, base)
    own = recorded_run(paths)
    _check_served(chosen, own.lora if own is not None else None)
    return Plan(
        work=paths.root,
        orchestrator=config.model_copy(update={"evaluation": config.evaluation or EvaluationConfig()}),
        policies=chosen,
        split="eval",
        export=make_exporter(model, source, trained_with),
        attempt=attempt,
    )


def _choose_policies(
    config: OrchestratorConfig, paths: RunPaths, base: Policy
) -> tuple[list[Policy], LoRAConfig | None]:
    """Return the policies, and the adapter settings of the run that trained them."""
    wanted = config.policies
    if wanted is None:
        return [base], None
    folder = paths.root.parent / wanted.from_run
    field = f"policies.fromRun ({wanted.from_run})"
    if not folder.is_dir():
        raise RoleError(
            f"{field}: the folder {folder} does not exist; set a run on the same volume, or a folder with its path in the pods",
            exit_codes.DATA,
        )
    other = RunPaths(folder)
    trained = recorded_run(other)
    available = policies.in_folder(folder) if trained is None else policies.of_run(folder)
    if not available and not wanted.base:
        raise RoleError(
            f"{field}: {folder} has no policy yet; wait for its first version, or set policies.base: true",
            exit_codes.DATA,
        )
    where = f"{folder} (policies.fromRun)"
    chosen = policies.choose_policies(available, base, steps=wanted.steps, with_base=wanted.base, where=where)
    return chosen, None if trained is None else trained.lora


def _check_served(chosen: Sequence[Policy], lora: LoRAConfig | None) -> None:
    """Refuse policies that the engines cannot serve. Support for adapters is fixed at the engines' start."""
    kind = policies.served_as(chosen)
    adapters = [policy for policy in chosen if policy.kind == "adapter"]
    if kind == "adapter":
        rank = highest_rank(adapters)
        if lora is None or lora.rank < rank:
            has = "not set" if lora is None else str(lora.rank)
            raise RoleError(
                f"trainer.lora.rank is {has}, but the engines must reserve memory for {adapters[0].name}, an adapter of rank {rank}; "
                f"set trainer.lora: {{rank: {rank}}}",
                exit_codes.CONFIGURATION,
            )
    elif lora is not None and (whole := [policy.name for policy in chosen if policy.kind != "base"]):
        raise RoleError(
            f"trainer.lora is set, but {', '.join(whole)} are complete models; remove trainer.lora",
            exit_codes.CONFIGURATION,
        )
