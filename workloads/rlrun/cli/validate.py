"""`rlrun validate`, `render` and `fit`: checks of a manifest before anything starts.

- `--defaults` and `--namespace` combine a manifest with an administrator's defaults.
- `validate FILE...` reports every problem of every manifest, without a cluster or a GPU.
- `render FILE` prints the resolved configuration of all roles, in the format of `run.json`, with the parts of the preset.
- `fit FILE` compares the memory that a run needs on each GPU with the GPU's memory, and suggests changes that fit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.api.run_manifest import Variation, field_options, read_manifest, take_variation
from rlrun.cli.command_options import report_problems
from rlrun.config.loading.files import read_text
from rlrun.config.loading.parser import Parser, own_options
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.models.rollout import EvaluationConfig
from rlrun.defaults.given_defaults import GivenDefaults, read_given
from rlrun.fit.advice import advise_roles
from rlrun.fit.memory_parts import MEMORY_MIB, MIB, memory_of, parse_size
from rlrun.fit.model_sources import UnknownModelError, read_shape, shape_of
from rlrun.fit.report import (
    Surroundings,
    gpu_products,
    needs_of,
    refusals_of,
    report_document,
    report_lines,
    untrainable_models,
)
from rlrun.local.judge import Judged, judge_manifest
from rlrun.runtime import exit_codes


def add_options(p: Parser) -> None:
    """Add `--defaults` and `--namespace` to a parser."""
    what = "file with the administrator's defaults for runs: the ConfigMap, or values of the operator's chart"
    p.add_argument("--defaults", metavar="FILE", type=Path, help=what)
    p.add_argument(
        "-n", "--namespace", default="", help="with --defaults: the run's namespace (default: the manifest's)"
    )


def read_given_defaults(options: argparse.Namespace) -> GivenDefaults | None:
    """Read the file of `--defaults`; returns None without the option.

    Raises:
        ConfigError: the file contains no defaults.
    """
    return read_given(options.defaults, options.namespace) if options.defaults is not None else None


def apply_given_defaults(defaults: GivenDefaults | None, source: Path, spec: RLRunSpec) -> None:
    """Apply defaults to a specification, and print the applied fields to standard error.

    Raises:
        ConfigError: the manifest sets a locked field.
    """
    if defaults is None:
        return
    defaults.update_after_options(spec)
    if problems := defaults.problems(str(source)):
        raise ConfigError(problems)
    for notice in defaults.notices(str(source)):
        print(" ".join(filter(None, (f"{notice.source}: note:", notice.path, notice.message))), file=sys.stderr)


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
    add_options(p)
    return p


def run_validate(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    rest, varied = take_variation(argv, own_options(p := validate_parser()))
    variation = Variation(varied, os.environ)
    p.also = field_options()
    options = p.parse_args(rest)
    try:
        defaults = read_given_defaults(options)
    except ConfigError as error:
        return report_problems(error)
    judged = [(_source_name(path), _judge_file(path, variation, defaults)) for path in options.files]
    if options.json:
        print(json.dumps([findings_document(source, one) for source, one in judged], indent=2))
    else:
        for source, one in judged:
            _print_judged(source, one)
    return exit_codes.OK if all(_is_valid(one) for _, one in judged) else exit_codes.CONFIGURATION


def _source_name(path: Path) -> str:
    return STANDARD_INPUT if path == Path("-") else str(path)


def _judge_file(path: Path, variation: Variation, defaults: GivenDefaults | None) -> Judged[RLRun]:
    try:
        text = _standard_input() if path == Path("-") else read_text(path)
        judged = judge_manifest(text, source := _source_name(path), here=False, variation=variation, defaults=defaults)
    except ConfigError as error:
        return Judged(None, error.problems, ())
    if defaults is None:
        return judged
    defaults.update_after_options(judged.run.spec if judged.run is not None else None)
    problems, notices = [*judged.problems, *defaults.problems(source)], [*judged.notices, *defaults.notices(source)]
    return replace(judged, problems=problems, notices=notices)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(STANDARD_INPUT, "", f"not UTF-8 text (byte {error.start})")]) from None


def _is_valid(judged: Judged[RLRun]) -> bool:
    return not judged.problems and judged.run is not None


def _print_judged(source: str, judged: Judged[RLRun]) -> None:
    for problem in judged.problems:
        print(problem, file=sys.stderr)
    if judged.run is not None and _is_valid(judged):
        print(f"{source}: valid: {summarize_run(judged.run)}")
    for notice in judged.notices:
        print(" ".join(filter(None, (f"{notice.source}: note:", notice.path, notice.message))))


def findings_document(source: str, judged: Judged[RLRun]) -> dict[str, object]:
    """Return the findings about one manifest as a JSON document."""
    valid = _is_valid(judged)
    return {
        "file": source,
        "valid": valid,
        "name": judged.run.metadata.name if judged.run is not None and valid else None,
        "summary": summarize_run(judged.run) if judged.run is not None and valid else None,
        "problems": [_as_json(problem) for problem in judged.problems],
        "notices": [_as_json(notice) for notice in judged.notices],
    }


def _as_json(problem: Problem) -> dict[str, object]:
    return {"field": problem.path, "line": problem.line, "message": problem.message}


def summarize_run(manifest: RLRun) -> str:
    """Return one line that describes the work of a run."""
    spec = manifest.spec
    model = spec.model.path or spec.model.name or "a tiny model"
    summary = {"SFT": _summarize_sft, "Eval": _summarize_evaluation}.get(spec.task, _summarize_rl)(spec)
    return f"RLRun {manifest.metadata.name}, {model}, {summary}"


def _summarize_rl(spec: RLRunSpec) -> str:
    shares = ", ".join(f"{e.label} (groups of {e.group_size})" for e in spec.environments)
    batch, steps = spec.orchestrator.batch_size, spec.max_steps
    return f"{steps} steps of {batch} rollouts ({steps * batch} in all), versions v0 to v{steps}; {shares}"


def _summarize_sft(spec: RLRunSpec) -> str:
    data = spec.data
    if data is None:
        return "supervised fine-tuning"
    batch = f"{data.batch_size} rows" if data.batch_tokens is None else f"{data.batch_tokens} tokens"
    read = f", at most {data.epochs} epochs" if data.epochs is not None else ""
    held_out = f"; held out: {data.validation.label}" if data.validation is not None else ""
    sources = ", ".join(source.label for source in data.sources)
    return f"supervised fine-tuning on {sources}: {spec.max_steps} steps of {batch}{read}{held_out}"


def _summarize_evaluation(spec: RLRunSpec) -> str:
    wanted = spec.evaluation or EvaluationConfig()
    asked = spec.policies.from_run if spec.policies is not None and spec.policies.from_run is not None else None
    policies = f"the policies of {asked}" if asked else "the model itself"
    names = ", ".join(environment.label for environment in spec.environments)
    return (
        f"evaluation of {policies}, nothing is trained: up to {wanted.num_tasks} held-out tasks of each environment, "
        f"{wanted.samples_per_task} answers each; {names}"
    )


_UID = "00000000-0000-0000-0000-000000000000"
"""Uid in the output for a run that does not exist in a cluster yet."""


def render_parser() -> Parser:
    """Return the parser of `rlrun render`."""
    p = Parser(
        prog="rlrun render",
        description="Print run.json: the configuration of each role, with the parts of the preset. Fields of spec are also options.",
    )
    p.add_argument("file", metavar="FILE", type=Path, help="an RLRun manifest")
    add_options(p)
    p.add_argument("--output-dir", help="the run's folder in the output (default: runs/<name>)")
    return p


def run_render(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    rest, varied = take_variation(argv, own_options(p := render_parser()))
    p.also = field_options()
    options = p.parse_args(rest)
    try:
        defaults = read_given_defaults(options)
        manifest = read_manifest(options.file, Variation(varied, os.environ), defaults)
        apply_given_defaults(defaults, options.file, manifest.spec)
    except ConfigError as error:
        return report_problems(error)
    name = manifest.metadata.name
    folder = options.output_dir or str(Path("runs") / name)
    config = resolve_spec(manifest.spec, name=name, uid=manifest.metadata.uid or _UID, output_dir=folder)
    print(config.with_presets_applied().model_dump_json(indent=2))
    return exit_codes.OK


_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 20.0


class UnknownMemoryError(ValueError):
    """Error for a run whose GPU memory is unknown; the message explains how to set it."""


def fit_parser() -> Parser:
    """Return the parser of `rlrun fit`."""
    p = Parser(
        prog="rlrun fit",
        description="Check whether a run fits the memory of its GPUs. If not, print changes that make it fit; exit code 78.",
    )
    p.add_argument("file", metavar="FILE", type=Path, help="an RLRun manifest")
    p.add_argument("--gpu-memory", metavar="SIZE", type=_parse_gpu_memory, help="memory of one GPU, such as 80Gi")
    p.add_argument(
        "--gpu-product",
        metavar="NAME",
        help="product of the GPUs, such as NVIDIA-H100-80GB-HBM3, if --gpu-memory is not set",
    )
    p.add_argument("--model-config", metavar="FOLDER", type=Path, help="folder with the config.json of the model")
    p.add_argument(
        "--reference-config", metavar="FOLDER", type=Path, help="folder with the config.json of algorithm.reference"
    )
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    add_options(p)
    return p


def run_fit(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = fit_parser().parse_args(list(argv))
    try:
        defaults = read_given_defaults(options)
        manifest = read_manifest(options.file, defaults=defaults)
        apply_given_defaults(defaults, options.file, manifest.spec)
    except ConfigError as error:
        return report_problems(error)
    spec, name = manifest.spec, manifest.metadata.name
    try:
        around = _fit_surroundings(spec, options)
    except (UnknownModelError, UnknownMemoryError) as error:
        # A model that cannot be trained may have no sizes of a decoder, which is then not the reason.
        refused = [f"spec.{'.'.join(map(str, key))}: {why}" for key, why in untrainable_models(spec)]
        for message in refused or [str(error)]:
            print(f"{options.file}: {message}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    needs, refusals = needs_of(spec, around), refusals_of(spec, around)
    advice = advise_roles(spec, around, needs)
    if options.json:
        print(json.dumps(report_document(name, needs, advice, around.model, refusals), indent=2))
    elif needs or refusals:
        print("\n".join(report_lines(name, needs, advice, around.model, refusals)))
    else:
        print(f"{name}: no role of this run uses GPUs, so there is nothing to fit")
    fits = not refusals and all(one.fits for one in needs)
    return exit_codes.OK if fits else exit_codes.CONFIGURATION


def _fit_surroundings(spec: RLRunSpec, options: argparse.Namespace) -> Surroundings:
    given = options.model_config
    model = read_shape(given, "--model-config") if given is not None else shape_of(spec.model, "spec.model")
    reference = None
    if spec.algorithm.reference is not None and spec.trainer.shared_with is None:
        chosen = spec.algorithm.reference.resolve_model(spec.model)
        if options.reference_config is not None:
            reference = read_shape(options.reference_config, "--reference-config")
        elif chosen == spec.model:
            reference = model
        else:
            reference = shape_of(chosen, "spec.algorithm.reference.model", option="--reference-config")
    products = {role: options.gpu_product or product for role, product in gpu_products(spec).items()}
    memory = _memory_by_role(spec, options)
    return Surroundings(model, reference, memory, products.get("trainer"), products.get("inference"))


def _memory_by_role(spec: RLRunSpec, options: argparse.Namespace) -> dict[str, int]:
    """Return the bytes of one GPU per role. Order: command line, manifest, GPUs of this machine."""
    found = {}
    for role, asked in gpu_products(spec).items():
        product = options.gpu_product or asked
        memory = options.gpu_memory or (memory_of(product) if product else _local_memory())
        if memory is None:
            what = (
                f"the memory of {product} is unknown"
                if product
                else "this machine has no NVIDIA GPU, and placement.gpuProduct is not set"
            )
            raise UnknownMemoryError(
                f"spec.{role}: {what}; add --gpu-memory 80Gi (known products: {', '.join(MEMORY_MIB)})"
            )
        found[role] = memory
    return found


def _local_memory() -> int | None:
    """Return the bytes of the smallest GPU of this machine, or None without an NVIDIA GPU."""
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
        return min(int(line) for line in output.split()) * MIB
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _parse_gpu_memory(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
