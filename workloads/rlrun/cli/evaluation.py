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

from rlrun.api.variation import Variation, take_variation
from rlrun.cli.common import arguments, piped, report
from rlrun.cli.general_options import call_with_own_options
from rlrun.config.loading.files import FORMATS
from rlrun.config.loading.option_values import parse_value
from rlrun.config.loading.parser import Parser, finite_number, own_options, whole_number, whole_numbers
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.schema import Shape, describe_expected, field_shapes
from rlrun.config.meaning import field_meaning
from rlrun.config.models.rollout import EvaluationSamplingConfig
from rlrun.protocol.files.recorded_code import FLAG, HELP
from rlrun.runtime import exit_codes

if TYPE_CHECKING:
    from rlrun.cli.served import Served
    from rlrun.evaluate.job import Request
    from rlrun.evaluate.served.job import ServedRequest


def eval_parser() -> Parser:
    """The command line of `eval`."""
    p = Parser(
        "eval",
        "Measure the base model and the policies of a run on its environments' held-out tasks: avg@k and unbiased pass@k. "
        "Without --steps and --base: the base model and every step that is there. --client.base-url URL --model.name X asks "
        "any OpenAI-style server instead.",
    )
    _add_common(p)
    p.add_argument(
        "--steps", type=whole_numbers(0, such_as="10,20"), metavar="10,20", help="policies to measure, by step"
    )
    p.add_argument("--base", action="store_true", help="measure the base model, beside --steps or alone")
    p.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the results and of all answers, which are never asked twice (default: evaluations/<name>)",
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
        help="tasks per environment, from the first on (default: spec.evaluation.numTasks, or 64)",
    )
    return p


def synthesize_parser() -> Parser:
    """The command line of `run_synthesis`."""
    p = Parser(
        "synthesize",
        "Write a policy's rollouts as a data set of chats, which `sft` reads (data.sources: [{path: data.jsonl}]). "
        "--client.base-url URL --model.name X asks any OpenAI-style server instead.",
    )
    _add_common(p)
    p.add_argument("--output", type=Path, required=True, metavar="FILE", help="data.jsonl or data.parquet; a new file")
    p.add_argument(
        "--step", type=whole_number(0), metavar="N", help="the policy's step (default: the newest that is there)"
    )
    p.add_argument("--base", action="store_true", help="ask the base model instead")
    p.add_argument("--split", choices=("train", "eval"), default="train", help="whose tasks (default: train)")
    p.add_argument("--samples-per-task", type=whole_number(1), metavar="K", help="rollouts per task (default: 1)")
    p.add_argument("--max-tasks", type=whole_number(1), metavar="N", help="tasks per environment (default: all)")
    p.add_argument("--min-reward", type=finite_number, metavar="R", help="leave out rollouts of a lower reward")
    return p


def _document(text: str) -> dict[str, Any]:
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
        help="a folder with policies (v00000010.a0001, step_10, ...) instead of the run's folder",
    )
    p.add_argument("--environment-ids", type=_split_words, metavar="a,b", help="only these environments, by id or name")
    p.add_argument(
        "--engine-url",
        action="append",
        type=_url,
        metavar="URL",
        help="an engine that was started for the run's folder, with RLRUN_API_KEY; again for more of them (default: start them here)",
    )
    p.add_argument("--inference-gpu-ids", type=_gpus, metavar="0,1", help="GPUs of the engines that are started here")
    p.add_argument("--share-gpus", action="store_true", help="use GPUs that other runs of this machine use, too")
    p.add_argument(FLAG, action="store_true", help=HELP)
    p.add_argument("--dry-run", action="store_true", help="print what would be sampled, and start nothing")
    drawn = p.add_argument_group("how tokens are drawn (default: as the manifest has it)")
    for name in EvaluationSamplingConfig.model_fields:
        kind, metavar = _KINDS[name]
        more: dict[str, Any] = {"action": "append"} if metavar == "TEXT" else {}
        told = field_meaning(EvaluationSamplingConfig, name) + (" Again for more." if more else "")
        drawn.add_argument(_option(name), type=kind, metavar=metavar, help=told, **more)


def _within(name: str, own: Shape) -> Callable[[str], float]:
    """The type of an option that is a number of the sampling, within its bounds."""

    shape = replace(own, nullable=False)

    def read(text: str) -> float:
        value = parse_value(text, shape)
        try:
            EvaluationSamplingConfig.model_validate({name: value}, strict=True)
        except ValidationError:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {describe_expected(shape)}") from None
        return float(value) if shape.kind == "float" else int(value)

    return read


_METAVARS = {"int": "N", "float": "X", "list": "TEXT", "mapping": "JSON"}


def _kind(name: str, shape: Shape) -> Callable[[str], object]:
    if shape.kind == "list":
        return str
    return _document if shape.kind == "mapping" else _within(name, shape)


_KINDS = {
    name: (_kind(name, shape), _METAVARS[shape.kind]) for name, shape in field_shapes(EvaluationSamplingConfig).items()
}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def eval_main(argv: Sequence[str] | None = None) -> int:
    """Run `eval`; returns the exit code."""
    return piped(lambda: call_with_own_options("eval", arguments(argv), run_eval, shown="eval"))


def synthesize_main(argv: Sequence[str] | None = None) -> int:
    """Run `run_synthesis`; returns the exit code."""
    return piped(lambda: call_with_own_options("synthesize", arguments(argv), run_synthesize, shown="synthesize"))


def run_eval(argv: Sequence[str]) -> int:
    """Run `eval`: of a manifest, or of files and options (`eval @ FILE`) as `rl` takes them; returns the exit code."""
    argv = ["--model" if word == "-m" else word for word in argv]  # as PRIME-RL's users write it
    if (served := _served(argv, eval_parser())) is not None:
        if isinstance(served, int):
            return served
        from rlrun.evaluate.main import run_evaluation

        asked = _served_request(served, work=served.options.output, split="eval", training_sampling=False)
        return run_evaluation(asked, command=shlex.join(["rlrun", "eval", *argv]))
    if "@" in argv or _describes(argv):
        from rlrun.cli.rl import start
        from rlrun.cli.sources.run_config import EvalConfig

        return start(argv, EvalConfig, prog="eval", usage="eval RUN.yaml | eval @ FILE")
    p = eval_parser()
    rest, varied = take_variation(argv, own_options(p))
    options = p.parse_args(rest)
    options.varied = varied

    from rlrun.evaluate.main import preview_command, run_evaluation

    request = _request(options, work=options.output, steps=options.steps, newest=False, split="eval")
    if options.dry_run:
        return preview_command("eval", request)
    return run_evaluation(request, command=shlex.join(["rlrun", "eval", *argv]))


def _describes(argv: Sequence[str]) -> bool:
    """True for options alone that name the model to measure, as `eval --model.name X --environment-ids a,b`."""
    names = [word.partition("=")[0] for word in argv]
    return bool({"--model.name", "--model"} & {*names}) and not any(Path(word).suffix in FORMATS for word in argv)


def run_synthesize(argv: Sequence[str]) -> int:
    """Run `run_synthesis`; returns the exit code."""
    if (served := _served(argv, synthesize_parser())) is not None:
        return served if isinstance(served, int) else _synthesize_served(served, argv)
    if "@" in argv:
        print(
            "synthesize: the files name no server; set client.base_url, or make a manifest of them with `rlrun convert FILE -o run.yaml` "
            "and take engines: `synthesize run.yaml`",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    p = synthesize_parser()
    rest, varied = take_variation(argv, own_options(p))
    options = p.parse_args(rest)
    options.varied = varied
    if options.base and options.step is not None:
        p.error("--base and --step are two policies; choose one")

    from rlrun.evaluate.main import preview_command, run_synthesis

    output: Path = options.output.absolute()
    work = output.with_name(f"{output.name}.parts")
    steps = None if options.step is None else [options.step]
    request = _request(options, work=work, steps=steps, newest=True, split=options.split)
    if options.dry_run:
        return preview_command("synthesize", request)
    return run_synthesis(request, output, min_reward=options.min_reward, command=_synthesize_command(argv))


def _synthesize_command(argv: Sequence[str]) -> str:
    return shlex.join(["rlrun", "synthesize", *argv])


def _served(argv: Sequence[str], parser: Parser) -> Served | int | None:
    """The command line against servers; an exit code if it ends there, None if it names no server."""
    from rlrun.cli.served import asks_servers, read_served

    if "--help" in argv or "-h" in argv or not asks_servers(argv, os.environ):
        return None
    for action in parser._actions:
        if action.dest == "manifest":
            action.nargs = "?"
    try:
        served = read_served(argv, parser)
    except ConfigError as error:
        return report(error)
    if served.dry_run:
        shown = served.run.model_dump(mode="json") | {"model": {"name": served.model}}
        print(json.dumps(shown | {"client": served.client.model_dump(mode="json")}, indent=2))
        return exit_codes.OK
    return served


def _synthesize_served(served: Served, argv: Sequence[str]) -> int:
    from rlrun.evaluate.main import run_synthesis

    options = served.options
    output: Path = options.output.absolute()
    work = output.with_name(f"{output.name}.parts")
    request = _served_request(served, work=work, split=options.split, training_sampling=True)
    return run_synthesis(request, output, min_reward=options.min_reward, command=_synthesize_command(argv))


def _served_request(served: Served, *, work: Path | None, split: str, training_sampling: bool) -> ServedRequest:
    from rlrun.evaluate.served.job import ServedRequest

    folder = served.run.output_dir
    return ServedRequest(
        name=served.run.name,
        spec=served.spec,
        model=served.model,
        client=served.client,
        env=os.environ,
        work=work or (Path(folder) if folder else None),
        **_asked(served.options, split, training_sampling=training_sampling),
    )


def _request(
    options: argparse.Namespace, *, work: Path | None, steps: Sequence[int] | None, newest: bool, split: str
) -> Request:
    from rlrun.evaluate.job import Request

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
        **_asked(options, split, training_sampling=newest),
    )


def _asked(options: argparse.Namespace, split: str, *, training_sampling: bool) -> dict[str, Any]:
    """Fields of `Asked` that options say."""
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
        raise argparse.ArgumentTypeError(f"got {text!r}, expected names with commas between them")
    return words


def _gpus(text: str) -> list[int | str]:
    from rlrun.local.shared.gpus import gpu_ids

    return gpu_ids(text)


def _url(text: str) -> str:
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is none
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a URL such as http://127.0.0.1:8000")
    return text


if __name__ == "__main__":
    sys.exit(eval_main())
