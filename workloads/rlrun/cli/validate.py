"""`rlrun validate FILE...`: every problem of every manifest, before a cluster or a GPU is asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.api.manifest import parse_manifest
from rlrun.api.resource import RLRun
from rlrun.config.files import read_text
from rlrun.config.layers import Layer
from rlrun.config.parser import Parser
from rlrun.config.problems import ConfigError, Problem
from rlrun.protocol import exit_codes


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
            manifest, layer = parse_manifest(read_text(path), str(path))
            notes = check_environments(manifest, layer)
        except ConfigError as error:
            print(error, file=sys.stderr)
            code = exit_codes.CONFIGURATION
            continue
        print(f"{path}: valid: {summary(manifest)}")
        for note in notes:
            print(f"{path}: note: {note}")
    return code


def summary(manifest: RLRun) -> str:
    """One line: what the run will do."""
    spec = manifest.spec
    model = spec.model.path or spec.model.name or "a tiny model"
    shares = ", ".join(f"{e.label} (groups of {e.group_size})" for e in spec.environments)
    batch, steps = spec.orchestrator.batch_size, spec.max_steps
    return (
        f"RLRun {manifest.metadata.name}, {model}, {steps} steps of {batch} rollouts ({steps * batch} in all), "
        f"versions v0 to v{steps}; {shares}"
    )


def check_environments(manifest: RLRun, layer: Layer) -> list[str]:
    """Load every environment; what is only in the run's image and not on this machine is a note, not a problem.

    Raises:
        ConfigError: an unknown id, or arguments that the environment refuses.
    """
    from rlrun.environments.registry import EnvironmentLoadError, known, load

    problems, notes = [], []
    for i, environment in enumerate(manifest.spec.environments):
        try:
            load(environment.id, environment.args)
        except EnvironmentLoadError as error:
            if isinstance(error.__cause__, ImportError):
                notes.append(f"spec.environments[{i}].id is not checked on this machine: {error}")
                continue
            field = "args" if environment.id in known() or ":" in environment.id else "id"
            line = layer.origin(("spec", "environments", i, field)).line
            problems.append(Problem(layer.origin(()).source, f"spec.environments[{i}].{field}", str(error), line))
    if problems:
        raise ConfigError(problems)
    return notes
