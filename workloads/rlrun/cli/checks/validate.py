"""`rlrun validate FILE...`: report every problem of every manifest, without a cluster or a GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.api.variation import Variation, field_options, take_variation
from rlrun.cli.checks import defaults
from rlrun.cli.common import report
from rlrun.config.loading.files import read_text
from rlrun.config.loading.parser import Parser, own_options
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.models.rollout import EvaluationConfig
from rlrun.defaults.given import Laid
from rlrun.local.judge import Judged, judge_manifest
from rlrun.runtime import exit_codes

STANDARD_INPUT = "standard input"
"""Name of the file `-` in messages."""


def validate_parser() -> Parser:
    """Return the parser of `rlrun validate`."""
    p = Parser(
        prog="rlrun validate",
        description="Check RLRun manifests; the exit code is 78 if a manifest has a problem. Fields of spec are also options.",
    )
    p.add_argument("files", nargs="+", metavar="FILE", type=Path, help="an RLRun manifest, or - for standard input")
    p.add_argument("--json", action="store_true", help="print a JSON list with an object for each file")
    defaults.add_options(p)
    return p


def run_validate(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    rest, varied = take_variation(argv, own_options(p := validate_parser()))
    variation = Variation(varied, os.environ)
    p.also = field_options()
    options = p.parse_args(rest)
    try:
        lay = defaults.laid(options)
    except ConfigError as error:
        return report(error)
    judged = [(_source(path), _judge(path, variation, lay)) for path in options.files]
    if options.json:
        print(json.dumps([document(source, one) for source, one in judged], indent=2))
    else:
        for source, one in judged:
            _print(source, one)
    return exit_codes.OK if all(_valid(one) for _, one in judged) else exit_codes.CONFIGURATION


def _source(path: Path) -> str:
    return STANDARD_INPUT if path == Path("-") else str(path)


def _judge(path: Path, variation: Variation, lay: Laid | None) -> Judged[RLRun]:
    try:
        text = _standard_input() if path == Path("-") else read_text(path)
        judged = judge_manifest(text, source := _source(path), here=False, variation=variation, lay=lay)
    except ConfigError as error:
        return Judged(None, error.problems, ())
    if lay is None:
        return judged
    lay.settle(judged.run.spec if judged.run is not None else None)
    problems, notices = [*judged.problems, *lay.problems(source)], [*judged.notices, *lay.notices(source)]
    return replace(judged, problems=problems, notices=notices)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(STANDARD_INPUT, "", f"not UTF-8 text (byte {error.start})")]) from None


def _valid(judged: Judged[RLRun]) -> bool:
    return not judged.problems and judged.run is not None


def _print(source: str, judged: Judged[RLRun]) -> None:
    for problem in judged.problems:
        print(problem, file=sys.stderr)
    if judged.run is not None and _valid(judged):
        print(f"{source}: valid: {summary(judged.run)}")
    for notice in judged.notices:
        print(" ".join(filter(None, (f"{notice.source}: note:", notice.path, notice.message))))


def document(source: str, judged: Judged[RLRun]) -> dict[str, Any]:
    """Return the findings about one manifest as a JSON document."""
    valid = _valid(judged)
    return {
        "file": source,
        "valid": valid,
        "name": judged.run.metadata.name if judged.run is not None and valid else None,
        "summary": summary(judged.run) if judged.run is not None and valid else None,
        "problems": [_as_json(problem) for problem in judged.problems],
        "notices": [_as_json(notice) for notice in judged.notices],
    }


def _as_json(problem: Problem) -> dict[str, Any]:
    return {"field": problem.path, "line": problem.line, "message": problem.message}


def summary(manifest: RLRun) -> str:
    """Return one line that describes the work of a run."""
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
    read = f", at most {data.epochs} epochs" if data.epochs is not None else ""
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
