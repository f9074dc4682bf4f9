"""`rlrun crd`, `rlrun charts` and `rlrun init`: files of an installation without a checkout that a user needs to start."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlrun.api.crd.admission_policy import as_yaml, validating_policy
from rlrun.api.crd.definition import build_crd
from rlrun.api.resource import check_name
from rlrun.config.algorithm.names import PRESETS, algorithm_inputs
from rlrun.config.loading.parser import Parser
from rlrun.config.suggest import did_you_mean
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import shipped_folder

_START = "quickstart"
"""Example that `rlrun init` writes by default and uses as the base for a preset."""
_MODELS = "models"
"""Folder of the examples with published models."""
_NEEDS = {
    "critic": "    critic: {}  # a value model, trained together with the policy\n",
    "reference": "    reference: {model: initial}  # the initial model; for a teacher: {model: org/name}\n",
}


def crd_parser() -> Parser:
    """Return the parser of `rlrun crd`."""
    p = Parser("rlrun crd", "Print the RLRun resource for `kubectl apply --server-side -f -`.")
    p.add_argument(
        "--policy", action="store_true", help="also print the admission policy that refuses invalid specifications"
    )
    return p


def charts_parser() -> Parser:
    """Return the parser of `rlrun charts`."""
    return Parser(
        "rlrun charts", 'Print the folder of the Helm charts: helm install rlrun-crds "$(rlrun charts)/rlrun-crds".'
    )


def init_parser() -> Parser:
    """Return the parser of `rlrun init`."""
    p = Parser(
        "rlrun init", "Write a manifest to start from: an example, or the quickstart with a preset of the algorithm."
    )
    p.add_argument(
        "preset",
        nargs="?",
        default=_START,
        help=f"name of an example, a model or a preset (default: {_START}); --list prints all names",
    )
    p.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a new file (default: <preset>.yaml; -: standard output)"
    )
    p.add_argument(
        "--gpu", action="store_true", help="run the trainer and the engine on one GPU each (default: both on the CPU)"
    )
    p.add_argument(
        "--list", action="store_true", help="print the names and descriptions of examples, models and presets"
    )
    return p


def run_crd(argv: Sequence[str]) -> int:
    """Run `rlrun crd` and return the exit code."""
    options = crd_parser().parse_args(list(argv))
    documents = [build_crd(), *(validating_policy() if options.policy else ())]
    print(as_yaml(*documents), end="")
    return exit_codes.OK


def run_charts(argv: Sequence[str]) -> int:
    """Run `rlrun charts` and return the exit code."""
    charts_parser().parse_args(list(argv))
    folder = shipped_folder()
    if folder is None:
        return _print_refusal(
            "charts",
            "this installation contains no charts, like all images; use an installation from a wheel or a checkout",
        )
    print(folder / "charts")
    return exit_codes.OK


def run_init(argv: Sequence[str]) -> int:
    """Run `rlrun init` and return the exit code."""
    options = init_parser().parse_args(list(argv))
    examples = _shipped_examples()
    if options.list and options.preset != _START:
        return _print_refusal("init", f"--list prints all names; remove {options.preset!r} or --list")
    if options.list:
        print("\n".join(_example_lines(examples)))
        return exit_codes.OK
    name = options.preset
    if name not in examples and name not in PRESETS:
        return _print_refusal(
            "init", f"there is no example or preset {name!r}{did_you_mean(name, [*examples, *PRESETS])}; see --list"
        )
    if _START not in examples:
        return _print_refusal(
            "init",
            "this installation contains no examples, like all images; use an installation from a wheel or a checkout",
        )
    text = examples[name].read_text() if name in examples else _of_preset(examples[_START].read_text(), name)
    if options.gpu and name in examples and examples[name].parent.name == _MODELS:
        return _print_refusal("init", f"--gpu: {name} uses GPUs already; remove --gpu")
    if options.gpu:
        text = _on_gpus(text)
        if text.count("gpusPerReplica: 1") < 2:
            return _print_refusal(
                "init",
                f"--gpu: the example {name} has no GPU variant; set gpusPerReplica of trainer and inference in the file",
            )
    if str(options.output) == "-":
        print(text, end="")
        return exit_codes.OK
    output = options.output or Path(f"{name.replace('_', '-')}.yaml")
    return _write_manifest(output, text, _data_of(text, examples[_START].parent))


def _shipped_examples() -> dict[str, Path]:
    folder = shipped_folder()
    if folder is None:
        return {}
    paths = (sorted((folder / "examples" / below).glob("*.yaml")) for below in ("", _MODELS))
    return {path.stem: path for of_folder in paths for path in of_folder}


def _example_lines(examples: dict[str, Path]) -> Iterator[str]:
    """Yield one line per example, model and preset, with its description."""
    for name, path in examples.items():
        kind = "model" if path.parent.name == _MODELS else "example"
        about = re.match(r"(?:#.*\n)*", path.read_text())
        text = " ".join(about[0].replace("#", " ").split()) if about is not None else ""
        yield f"{name:<24} {kind:<8} {re.split(r'[.:] ', text)[0].rstrip('.')}".rstrip()
    for name, preset in PRESETS.items():
        yield f"{name:<24} preset   {preset.description.splitlines()[0].rstrip('.')}"


def _of_preset(start: str, preset: str) -> str:
    """Return the quickstart with another preset: its name, its description and the roles that it needs."""
    name = check_name(preset.replace("_", "-"))
    text = re.sub(r"\A(?:#.*\n)*", f"# {PRESETS[preset].description.splitlines()[0]}\n", start)
    text = re.sub(r"metadata: \{name: [\w-]+\}", f"metadata: {{name: {name}}}", text)
    chosen = PRESETS[preset]
    parts = {
        **algorithm_inputs("advantage", chosen.advantage, chosen.advantage_options),
        **algorithm_inputs("loss", chosen.loss, chosen.loss_options),
    }
    lines = "".join(_NEEDS[part] for part in parts)
    return re.sub(
        r"  algorithm: \{preset: \w+, (.*)\}\n", rf"  algorithm:\n    preset: {preset}\n    \1\n{lines}", text
    )


def _on_gpus(text: str) -> str:
    """Return a manifest with one GPU for the trainer and one for the engine, in bfloat16, as GPU kernels need it."""
    text = text.replace("    dtype: float32\n", "    dtype: bfloat16\n")
    text = re.sub(
        r"^  trainer:\n(?:    processesPerReplica: \d+\n)?",
        "  trainer:\n    gpusPerReplica: 1\n",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^(# .*) on CPU", r"\1", text)
    return re.sub(
        r"^  inference: \{cpuKvCacheGib: \d+\}$", "  inference: {gpusPerReplica: 1}", text, flags=re.MULTILINE
    )


def _data_of(text: str, folder: Path) -> dict[Path, Path]:
    """Return the data files that a manifest refers to (`examples/data/...`): relative path in a checkout -> installed file."""
    named = sorted(set(re.findall(r"examples/data/[\w./-]+", text)))
    return {Path(path): source for path in named if (source := folder.parent / path).is_file()}


def _write_manifest(output: Path, text: str, data: dict[Path, Path]) -> int:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x") as file:
            file.write(text)
        for path, source in data.items():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source.read_bytes())
                print(f"{path}: the example's data")
    except FileExistsError:
        return _print_refusal("init", f"{output} exists already; set a new file with --output")
    except OSError as error:
        print(f"rlrun init: {error.filename or output}: cannot be written: {error.strerror}", file=sys.stderr)
        return exit_codes.STORAGE
    print(f"{output} is written; edit it, then run `rlrun validate {output}` and `rlrun local {output}`")
    return exit_codes.OK


def _print_refusal(command: str, message: str) -> int:
    print(f"rlrun {command}: {message}", file=sys.stderr)
    return exit_codes.USAGE
