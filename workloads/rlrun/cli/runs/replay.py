"""`rlrun replay`: a step of a run computed again and compared, and a sample of it explained."""

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
    """The command line of `rlrun replay`."""
    text = "Compute a step of a run again from its folder, which is only read; compare it with what the run wrote; explain a sample."
    p = runs_parser("replay", text, output="json")
    p.add_argument("run", metavar="RUN", help="a run's folder (runs/NAME), which may be under way")
    p.add_argument("--step", type=whole_number(1), metavar="N", required=True, help="the step")
    p.add_argument(
        "--sample", metavar="SAMPLE", help="explain this one: index in the batch, GROUP/ROLLOUT, or a task's id"
    )
    p.add_argument("--no-compute", action="store_true", help="explain from the batch alone, without the model")
    p.add_argument(
        "--ranks", type=whole_number(1, 64), metavar="N", help="compute with N ranks on CPUs, not with the run's layout"
    )
    p.add_argument("--model", type=Path, metavar="DIR", help="the model's folder, where it is another one here")
    p.add_argument(FLAG, action="store_true", help=HELP)
    return p


@answered("replay")
def run_replay(argv: Sequence[str]) -> int:
    """Run `rlrun replay`; returns the exit code: 0 equal, 1 different, 64 and above where it cannot be computed."""
    options = replay_parser().parse_args(list(argv))
    run = the_run(options)
    if not isinstance(run, FolderRun):
        print(
            f"rlrun replay: {run.name} is a run in a cluster; `rlrun pull {argument(run, options, 'run')} --to DIR` copies its folder, "
            "then `rlrun replay DIR --step N`",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    if options.no_compute and options.sample is None:
        print("rlrun replay: --no-compute explains a sample: name one with --sample", file=sys.stderr)
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
        print("rlrun replay: interrupted; it reads the run, and has changed nothing", file=sys.stderr)
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
