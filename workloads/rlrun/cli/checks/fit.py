"""`rlrun fit FILE`: compare the memory that a run needs on each GPU with the GPU's memory, and suggest changes that fit."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.api.manifest import read_manifest
from rlrun.api.resource import RLRunSpec
from rlrun.cli.checks import defaults
from rlrun.cli.common import report
from rlrun.config.loading.parser import Parser
from rlrun.config.loading.problems import ConfigError
from rlrun.fit.advice import advise_roles
from rlrun.fit.gpu_products import MEMORY_MIB, MIB, memory_of, parse_size
from rlrun.fit.report import Surroundings, gpu_products, needs_of, refusals_of, report_document, report_lines
from rlrun.fit.sources import UnknownModelError, read_shape, shape_of
from rlrun.runtime import exit_codes

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
    p.add_argument("--gpu-memory", metavar="SIZE", type=_size, help="memory of one GPU, such as 80Gi")
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
    defaults.add_options(p)
    return p


def run_fit(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = fit_parser().parse_args(list(argv))
    try:
        lay = defaults.laid(options)
        manifest = read_manifest(options.file, lay=lay)
        defaults.settled(lay, options.file, manifest.spec)
    except ConfigError as error:
        return report(error)
    spec, name = manifest.spec, manifest.metadata.name
    try:
        around = _surroundings(spec, options)
    except (UnknownModelError, UnknownMemoryError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
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


def _surroundings(spec: RLRunSpec, options: argparse.Namespace) -> Surroundings:
    given = options.model_config
    model = read_shape(given, "--model-config") if given is not None else shape_of(spec.model, "spec.model")
    reference = None
    if spec.algorithm.reference is not None and spec.trainer.shared_with is None:
        chosen = spec.algorithm.reference.resolved(spec.model)
        if options.reference_config is not None:
            reference = read_shape(options.reference_config, "--reference-config")
        elif chosen == spec.model:
            reference = model
        else:
            reference = shape_of(chosen, "spec.algorithm.reference.model", option="--reference-config")
    product = options.gpu_product or gpu_products(spec).get("trainer")
    return Surroundings(model, reference, _memory(spec, options), product)


def _memory(spec: RLRunSpec, options: argparse.Namespace) -> dict[str, int]:
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
        told = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
        return min(int(line) for line in told.split()) * MIB
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
