"""`eval RUN.yaml` and `synthesize RUN.yaml`: sample from a run's policies, and measure the answers or keep them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from rlrun.api.run_manifest import Variation, take_variation
from rlrun.cli.command_options import call_with_own_options, command_arguments, report_problems, run_command_line
from rlrun.config.loading.files import FORMATS
from rlrun.config.loading.options import parse_value
from rlrun.config.loading.parser import Parser, finite_number, own_options, whole_number, whole_numbers
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.schema import Shape, describe_expected, field_meaning, field_shapes
from rlrun.config.models.rollout import EvaluationSamplingConfig
from rlrun.protocol.files.recorded_code import FLAG, HELP
from rlrun.runtime import exit_codes

if TYPE_CHECKING:
    from rlrun.cli.served_evaluation import Served
    from rlrun.evaluate.evaluation_job import Request
    from rlrun.evaluate.served.served_play import ServedRequest


def eval_parser() -> Parser:
    """Return the parser of `eval`."""
    p = Parser(
        "eval",
        "Measure the base model and the policies of a run on the held-out tasks of its environments: avg@k and unbiased pass@k. "
        "Without --steps and --base: the base model and every available step. --client.base-url URL --model.name X measures "
        "a model at any OpenAI-style server instead.",
    )
    _add_common(p)
    p.add_argument(
        "--steps", type=whole_numbers(0, such_as="10,20"), metavar="10,20", help="policies to measure, by step"
    )
    p.add_argument("--base", action="store_true", help="measure the base model, with or without --steps")
    p.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for results and answers; answers in it are reused (default: evaluations/<name>)",
    )
    p.add_argument(
        "--samples-per-task",
        type=whole_number(1),
        metavar="K",
        help="answers per task (default: spec.evaluation.samplesPerTask, or 1)",
    )
    p.add_argument(
        "--max-tasks",
        type=whole_number(1),
        metavar="N",
        help="first tasks of each environment (default: spec.evaluation.numTasks, or 64)",
    )
    return p


def synthesize_parser() -> Parser:
    """Return the parser of `synthesize`."""
    p = Parser(
        "synthesize",
        "Write a policy's rollouts as a data set of chats for `sft` (data.sources: [{path: data.jsonl}]). "
        "--client.base-url URL --model.name X samples from any OpenAI-style server instead.",
    )
    _add_common(p)
    p.add_argument("--output", type=Path, required=True, metavar="FILE", help="data.jsonl or data.parquet; a new file")
    p.add_argument(
        "--step", type=whole_number(0), metavar="N", help="step of the policy (default: the newest available step)"
    )
    p.add_argument("--base", action="store_true", help="sample from the base model instead")
    p.add_argument("--split", choices=("train", "eval"), default="train", help="split of the tasks (default: train)")
    p.add_argument("--samples-per-task", type=whole_number(1), metavar="K", help="rollouts per task (default: 1)")
    p.add_argument("--max-tasks", type=whole_number(1), metavar="N", help="tasks per environment (default: all)")
    p.add_argument("--min-reward", type=finite_number, metavar="R", help="skip rollouts with a lower reward")
    return p


def _parse_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError(f'got {text!r}, expected a JSON object such as {{"enable_thinking": false}}')
    return document


def _add_common(p: argparse.ArgumentParser) -> None:
    p.add_argument("manifest", type=Path, metavar="RUN.yaml", help="an RLRun manifest, or files as @ FILE")
    p.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder (default: runs/<name>)")
    p.add_argument(
        "--weights-dir",
        type=Path,
        metavar="DIR",
        help="folder with policies (v00000010.a0001, step_10, ...) instead of the run's folder",
    )
    p.add_argument("--environment-ids", type=_split_words, metavar="a,b", help="only these environments, by id or name")
    p.add_argument(
        "--engine-url",
        action="append",
        type=_parse_http_url,
        metavar="URL",
        help="engine that was started for the run's folder, with RLRUN_API_KEY; may be repeated (default: start engines here)",
    )
    p.add_argument(
        "--inference-gpu-ids", type=_parse_gpus, metavar="0,1", help="GPUs for the engines that this command starts"
    )
    p.add_argument("--share-gpus", action="store_true", help="also use GPUs that other runs of this machine use")
    p.add_argument(FLAG, action="store_true", help=HELP)
    p.add_argument("--dry-run", action="store_true", help="print the planned samples, and start nothing")
    drawn = p.add_argument_group("sampling of tokens (default: the values of the manifest)")
    for name in EvaluationSamplingConfig.model_fields:
        kind, metavar = _KINDS[name]
        more: dict[str, Any] = {"action": "append"} if metavar == "TEXT" else {}
        told = field_meaning(EvaluationSamplingConfig, name) + (" May be repeated." if more else "")
        drawn.add_argument(_option_flag(name), type=kind, metavar=metavar, help=told, **more)


def _bounded_number_type(name: str, own: Shape) -> Callable[[str], float]:
    """Return the argparse type of a numeric sampling option, with the bounds of its field."""

    shape = replace(own, nullable=False)

    def parse_number(text: str) -> float:
        value = parse_value(text, shape)
        try:
            EvaluationSamplingConfig.model_validate({name: value}, strict=True)
        except ValidationError:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {describe_expected(shape)}") from None
        return float(value) if shape.kind == "float" else int(value)

    return parse_number


_METAVARS = {"int": "N", "float": "X", "list": "TEXT", "mapping": "JSON"}


def _option_type(name: str, shape: Shape) -> Callable[[str], object]:
    if shape.kind == "list":
        return str
    return _parse_object if shape.kind == "mapping" else _bounded_number_type(name, shape)


_KINDS = {
    name: (_option_type(name, shape), _METAVARS[shape.kind])
    for name, shape in field_shapes(EvaluationSamplingConfig).items()
}


def _option_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def eval_main(argv: Sequence[str] | None = None) -> int:
    """Run `eval` and return the exit code."""
    return run_command_line(lambda: call_with_own_options("eval", command_arguments(argv), run_eval, shown="eval"))


def synthesize_main(argv: Sequence[str] | None = None) -> int:
    """Run `synthesize` and return the exit code."""
    return run_command_line(
        lambda: call_with_own_options("synthesize", command_arguments(argv), run_synthesize, shown="synthesize")
    )


def run_eval(argv: Sequence[str]) -> int:
    """Run `eval` for a manifest, or for files and options like `rl` (`eval @ FILE`); return the exit code."""
    argv = ["--model" if word == "-m" else word for word in argv]  # PRIME-RL's short option
    if (served := _parse_served(argv, eval_parser())) is not None:
        if isinstance(served, int):
            return served
        from rlrun.evaluate.commands import run_evaluation

        asked = _served_request(served, work=served.options.output, split="eval", training_sampling=False)
        return run_evaluation(asked, command=shlex.join(["rlrun", "eval", *argv]))
    if "@" in argv or _names_model(argv):
        from rlrun.cli.rl import start_run
        from rlrun.cli.run_layers import EvalConfig

        return start_run(argv, EvalConfig, prog="eval", usage="eval RUN.yaml | eval @ FILE")
    p = eval_parser()
    rest, varied = take_variation(argv, own_options(p))
    options = p.parse_args(rest)
    options.varied = varied

    from rlrun.evaluate.commands import preview_command, run_evaluation

    request = _make_request(options, work=options.output, steps=options.steps, newest=False, split="eval")
    if options.dry_run:
        return preview_command("eval", request)
    return run_evaluation(request, command=shlex.join(["rlrun", "eval", *argv]))


def _names_model(argv: Sequence[str]) -> bool:
    """Return whether the options name the model without a manifest, as in `eval --model.name X --environment-ids a,b`."""
    names = [word.partition("=")[0] for word in argv]
    return bool({"--model.name", "--model"} & {*names}) and not any(Path(word).suffix in FORMATS for word in argv)


def run_synthesize(argv: Sequence[str]) -> int:
    """Run `synthesize` and return the exit code."""
    if (served := _parse_served(argv, synthesize_parser())) is not None:
        return served if isinstance(served, int) else _synthesize_served(served, argv)
    if "@" in argv:
        print(
            "synthesize: the files set no server; set client.base_url, or convert the files with `rlrun convert FILE -o run.yaml` "
            "and use engines: `synthesize run.yaml`",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    p = synthesize_parser()
    rest, varied = take_variation(argv, own_options(p))
    options = p.parse_args(rest)
    options.varied = varied
    if options.base and options.step is not None:
        p.error("--base and --step name two policies; remove one of them")

    from rlrun.evaluate.commands import preview_command, run_synthesis

    output: Path = options.output.absolute()
    work = output.with_name(f"{output.name}.parts")
    steps = None if options.step is None else [options.step]
    request = _make_request(options, work=work, steps=steps, newest=True, split=options.split)
    if options.dry_run:
        return preview_command("synthesize", request)
    return run_synthesis(request, output, min_reward=options.min_reward, command=_synthesize_command(argv))


def _synthesize_command(argv: Sequence[str]) -> str:
    return shlex.join(["rlrun", "synthesize", *argv])


def _parse_served(argv: Sequence[str], parser: Parser) -> Served | int | None:
    """Parse a command line for OpenAI-style servers. Returns an exit code if the command ends here, None without a server."""
    from rlrun.cli.served_evaluation import asks_servers, read_served

    if "--help" in argv or "-h" in argv or not asks_servers(argv, os.environ):
        return None
    for action in parser._actions:
        if action.dest == "manifest":
            action.nargs = "?"
    try:
        served = read_served(argv, parser)
    except ConfigError as error:
        return report_problems(error)
    if served.dry_run:
        shown = served.run.model_dump(mode="json") | {"model": {"name": served.model}}
        print(json.dumps(shown | {"client": served.client.model_dump(mode="json")}, indent=2))
        return exit_codes.OK
    return served


def _synthesize_served(served: Served, argv: Sequence[str]) -> int:
    from rlrun.evaluate.commands import run_synthesis

    options = served.options
    output: Path = options.output.absolute()
    work = output.with_name(f"{output.name}.parts")
    request = _served_request(served, work=work, split=options.split, training_sampling=True)
    return run_synthesis(request, output, min_reward=options.min_reward, command=_synthesize_command(argv))


def _served_request(served: Served, *, work: Path | None, split: str, training_sampling: bool) -> ServedRequest:
    from rlrun.evaluate.served.served_play import ServedRequest

    folder = served.run.output_dir
    return ServedRequest(
        name=served.run.name,
        spec=served.spec,
        model=served.model,
        client=served.client,
        env=os.environ,
        work=work or (Path(folder) if folder else None),
        **_asked_fields(served.options, split, training_sampling=training_sampling),
    )


def _make_request(
    options: argparse.Namespace, *, work: Path | None, steps: Sequence[int] | None, newest: bool, split: str
) -> Request:
    from rlrun.evaluate.evaluation_job import Request

    return Request(
        manifest=options.manifest,
        variation=Variation(options.varied, os.environ),
        work=work,
        run_dir=options.run_dir,
        weights_dir=options.weights_dir,
        steps=steps,
        newest=newest,
        base=options.base,
        engine_urls=options.engine_url,
        gpu_ids=options.inference_gpu_ids,
        share_gpus=options.share_gpus,
        trusts_code=options.trust_recorded_code,
        **_asked_fields(options, split, training_sampling=newest),
    )


def _asked_fields(options: argparse.Namespace, split: str, *, training_sampling: bool) -> dict[str, Any]:
    """Return the fields of `Asked` that the options set."""
    return {
        "environment_ids": options.environment_ids,
        "split": "train" if split == "train" else "eval",
        "samples_per_task": options.samples_per_task,
        "max_tasks": options.max_tasks,
        "training_sampling": training_sampling,
        "sampling": {
            name: value
            for name in EvaluationSamplingConfig.model_fields
            if (value := getattr(options, name)) is not None
        },
    }


def _split_words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected names, separated by commas")
    return words


def _parse_gpus(text: str) -> list[int | str]:
    from rlrun.local.gpus import gpu_ids

    return gpu_ids(text)


def _parse_http_url(text: str) -> str:
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # the port is not a number
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a URL such as http://127.0.0.1:8000")
    return text


if __name__ == "__main__":
    sys.exit(eval_main())
