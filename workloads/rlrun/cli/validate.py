"""`rlrun validate FILE...`: every problem of every manifest, before a cluster or a GPU is asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.config.loading.files import read_text
from rlrun.config.loading.parser import Parser
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.rollout import EvaluationConfig
from rlrun.local.judge import Judged, judge_manifest
from rlrun.runtime import exit_codes


def parser() -> Parser:
    """The command line."""
    p = Parser(prog="rlrun validate", description="Check RLRun manifests; exit code 78 if one has a problem.")
    p.add_argument("files", nargs="+", metavar="FILE", type=Path, help="an RLRun manifest")
    return p


def run(argv: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    code = exit_codes.OK
    for path in parser().parse_args(list(argv)).files:
        try:
            judged = judge_manifest(read_text(path), str(path), here=False)
        except ConfigError as error:
            judged = Judged(None, error.problems, ())
        for problem in judged.problems:
            print(problem, file=sys.stderr)
        if judged.problems or judged.run is None:
            code = exit_codes.CONFIGURATION
        else:
            print(f"{path}: valid: {summary(judged.run)}")
        for notice in judged.notices:
            print(f"{notice.source}: note: {notice.path} {notice.message}")
    return code


def summary(manifest: RLRun) -> str:
    """One line about the work of the run."""
    spec = manifest.spec
    model = spec.model.path or spec.model.name or "a tiny model"
    told = {"SFT": _supervision, "Eval": _evaluation}.get(spec.task, _learning)(spec)
    return f"RLRun {manifest.metadata.name}, {model}, {told}"


def _learning(spec: RLRunSpec) -> str:
    shares = ", ".join(f"{e.label} (groups of {e.group_size})" for e in spec.environments)
    batch, steps = spec.orchestrator.batch_size, spec.max_steps
    return f"{steps} steps of {batch} rollouts ({steps * batch} in all), versions v0 to v{steps}; {shares}"


def _supervision(spec: RLRunSpec) -> str:
    data = spec.data
    if data is None:
        return "supervised fine-tuning"
    batch = f"{data.batch_size} rows" if data.batch_tokens is None else f"{data.batch_tokens} tokens"
    read = f", or {data.epochs} times through the data, whichever ends first" if data.epochs is not None else ""
    held_out = f"; held out: {data.validation.label}" if data.validation is not None else ""
    sources = ", ".join(source.label for source in data.sources)
    return f"supervised fine-tuning on {sources}: {spec.max_steps} steps of {batch}{read}{held_out}"


def _evaluation(spec: RLRunSpec) -> str:
    wanted = spec.evaluation or EvaluationConfig()
    asked = spec.policies.from_run if spec.policies is not None and spec.policies.from_run is not None else None
    policies = f"the policies of {asked}" if asked else "the model itself"
    names = ", ".join(environment.label for environment in spec.environments)
    return (
        f"evaluation of {policies}, nothing is trained: up to {wanted.num_tasks} held-out tasks of each environment, "
        f"{wanted.samples_per_task} answers each; {names}"
    )
