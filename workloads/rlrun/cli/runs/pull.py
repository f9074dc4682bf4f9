"""`rlrun pull`: copy a run's model, checkpoint, traces, metrics, logs or whole folder from the volume of a cluster."""

from __future__ import annotations

import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.runs.common import answered, api, runs_parser, the_run
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect.kubectl import ClusterError
from rlrun.inspect.pull import PARTS, place_of, unpack_part
from rlrun.inspect.source import FolderRun, NotFoundError, read_run
from rlrun.inspect.volume import Volume
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import printable

_SHOWN_PARTS = 5


def pull_parser() -> Parser:
    """Return the parser of `rlrun pull`."""
    text = "Copy a part of a run from the cluster's volume, through the orchestrator's pod."
    p = runs_parser("pull", text)
    p.add_argument("run", metavar="RUN", help="name of the run in the cluster")
    p.add_argument(
        "part",
        choices=PARTS,
        help="part to copy; model and checkpoint: the newest complete one; run: the whole folder",
    )
    p.add_argument("--step", type=whole_number(0), metavar="N", help="step of the model or checkpoint")
    p.add_argument("--to", type=Path, metavar="PATH", help="a new path (default: RUN-PART here)")
    return p


@answered("pull")
def run_pull(argv: Sequence[str]) -> int:
    """Run `rlrun pull` and return the exit code."""
    options = pull_parser().parse_args(list(argv))
    run, cluster = the_run(options), api(options)
    if isinstance(run, FolderRun):
        raise NotFoundError(f"{run.root} is on this machine already")
    target: Path = options.to or Path(f"{run.name}-{options.part}")
    if target.exists():
        raise NotFoundError(f"--to: {target} exists already; set a new path")
    volume = Volume(run, read_run(run, cluster, time.time(), events=False), cluster)
    place = place_of(options.part, options.step, volume.names)
    try:
        with volume.packed(place) as stream:
            unpacked = unpack_part(stream, place, target)
    except (tarfile.TarError, FileNotFoundError) as error:
        raise ClusterError(f"the copy of {place} is incomplete: {error}", exit_codes.FAILURE) from None
    what = "the folder" if options.part == "run" else place
    print(f"{target}: {what} of {run.name}, {unpacked.files} files")
    if unpacked.left_out:
        shown = ", ".join(printable(name) for name in unpacked.left_out[:_SHOWN_PARTS])
        print(f"{len(unpacked.left_out)} links and devices were skipped: {shown}", file=sys.stderr)
    return exit_codes.OK
