"""`rlrun replay`: compute a step of a run again, compare it with the recorded step, and explain a sample."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.runs.common import answered, argument, runs_parser, the_run, write
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect.source import FolderRun
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.recorded_code import FLAG, HELP
from rlrun.runtime import exit_codes, extras


def replay_parser() -> Parser:
    """Return the parser of `rlrun replay`."""
    text = "Compute a step of a run again from its folder, compare it with the record, and explain a sample. The folder is not changed."
    p = runs_parser("replay", text, output="json")
    p.add_argument("run", metavar="RUN", help="folder of a run (runs/NAME); the run may be active")
    p.add_argument("--step", type=whole_number(1), metavar="N", required=True, help="step to compute")
    p.add_argument(
        "--sample", metavar="SAMPLE", help="sample to explain: index in the batch, GROUP/ROLLOUT, or the id of a task"
    )
    p.add_argument("--no-compute", action="store_true", help="explain only from the batch, without the model")
    p.add_argument(
        "--ranks",
        type=whole_number(1, 64),
        metavar="N",
        help="compute with N ranks on CPUs instead of the run's layout",
    )
    p.add_argument("--model", type=Path, metavar="DIR", help="folder of the model, if it differs on this machine")
    p.add_argument(FLAG, action="store_true", help=HELP)
    return p


@answered("replay")
def run_replay(argv: Sequence[str]) -> int:
    """Run `rlrun replay` and return the exit code: 0 if equal, 1 if different, 64 and above if the step cannot be computed."""
    options = replay_parser().parse_args(list(argv))
    run = the_run(options)
    if not isinstance(run, FolderRun):
        print(
            f"rlrun replay: {run.name} is a run in a cluster; copy its folder with `rlrun pull {argument(run, options, 'run')} --to DIR`, "
            "then run `rlrun replay DIR --step N`",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    if options.no_compute and options.sample is None:
        print("rlrun replay: --no-compute needs a sample: set --sample", file=sys.stderr)
        return exit_codes.USAGE
    from rlrun.local.preflight import check_packages

    try:
        if not options.no_compute:
            check_packages(extras.TRAINING)
        return _replay(
            run.root,
            options.step,
            sample=options.sample,
            computes=not options.no_compute,
            ranks=options.ranks,
            model=options.model,
            form=options.output,
            trusts_code=options.trust_recorded_code,
        )
    except RoleError as error:
        print(f"rlrun replay: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("rlrun replay: interrupted; the run is unchanged", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _replay(
    root: Path,
    step: int,
    *,
    sample: str | None,
    computes: bool,
    ranks: int | None,
    model: Path | None,
    form: str | None,
    trusts_code: bool,
) -> int:
    from rlrun.replay import again

    found = again.replay_step(
        root, step, sample=sample, computes=computes, ranks=ranks, model=model, trusts_code=trusts_code
    )
    if form is not None:
        write(found.document(), form)
    else:
        print(found.text())
    return found.code
