"""`rlrun debug`, `pull` and `rollouts`: parts of a run from its folder or from the volume of a cluster.

- `debug` writes a bundle for a bug report.
- `pull` copies a run's model, checkpoint, traces, metrics, logs or whole folder from the volume of a cluster.
- `rollouts` prints the rollouts of a step with their rewards.
"""

from __future__ import annotations

import os
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlrun.cli.run_options import RUN_HELP, cluster_client, one_line_errors, print_document, runs_parser, the_run
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect import bundle, screen, trace_rollouts
from rlrun.inspect.copies import PARTS, place_of, unpack_part
from rlrun.inspect.kubectl import Api, ClusterError
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import FolderRun, NotFoundError, Run, Volume, read_run
from rlrun.inspect.why import explain_run
from rlrun.runs import volume_reader
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls
from rlrun.runtime.redact import known_secrets


def debug_parser() -> Parser:
    """Return the parser of `rlrun debug`."""
    text = (
        "Write status, configuration, events and logs of a run into one file for a bug report. The file contains no model, no rollouts and "
        "no Kubernetes Secret. Recognized secrets are removed, and unknown values of arguments, variables and annotations are hidden. "
        "A log can contain a secret that is not recognized: read the file before you send it."
    )
    p = runs_parser("debug", text)
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    p.add_argument("--file", type=Path, metavar="FILE", help="a new file (default: rlrun-debug-NAME-TIME.tar.gz here)")
    return p


@one_line_errors("debug")
def run_debug(argv: Sequence[str]) -> int:
    """Run `rlrun debug` and return the exit code."""
    options, now = debug_parser().parse_args(list(argv)), time.time()
    run, cluster = the_run(options), cluster_client(options)
    seen = read_run(run, cluster, now)
    top = f"rlrun-debug-{seen.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}"
    file: Path = options.file or Path(f"{top}.tar.gz")
    if file.exists():
        raise NotFoundError(f"--file: {file} exists already; set a new file")
    if not file.absolute().parent.is_dir():
        raise NotFoundError(f"--file: there is no folder {file.parent}; create it first")
    names = bundle.write_bundle(file, top, _bundle_parts(run, seen, cluster, now), known_secrets(os.environ))
    print(f"{file}: {len(names)} files, {file.stat().st_size // 1024 + 1} KiB")
    print(
        "read it before you send it: a log can contain a secret of your environments that is not recognized",
        file=sys.stderr,
    )
    return exit_codes.OK


def _bundle_parts(run: Run, seen: Snapshot, cluster: Api, now: float) -> Iterator[bundle.Part]:
    told = explain_run(seen, now)
    yield "why.txt", screen.explanation_text(told, now) + "\n"
    yield "status.txt", screen.join_blocks([screen.status_screen(seen, told, now), screen.pods_tree(seen)]) + "\n"
    yield "versions.txt", bundle.list_versions()
    yield from bundle.parts_of_folder(run) if isinstance(run, FolderRun) else bundle.parts_of_cluster(seen, cluster)


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


@one_line_errors("pull")
def run_pull(argv: Sequence[str]) -> int:
    """Run `rlrun pull` and return the exit code."""
    options = pull_parser().parse_args(list(argv))
    run, cluster = the_run(options), cluster_client(options)
    if isinstance(run, FolderRun):
        raise NotFoundError(f"{run.root} is on this machine already")
    target: Path = options.to or Path(f"{run.name}-{options.part}")
    if target.exists():
        raise NotFoundError(f"--to: {target} exists already; set a new path")
    volume = Volume(run, read_run(run, cluster, time.time(), events=False), cluster)
    place = place_of(options.part, options.step, volume.list_names)
    try:
        with volume.stream_tar(place) as stream:
            unpacked = unpack_part(stream, place, target)
    except (tarfile.TarError, FileNotFoundError) as error:
        raise ClusterError(f"the copy of {place} is incomplete: {error}", exit_codes.FAILURE) from None
    what = "the folder" if options.part == "run" else place
    print(f"{target}: {what} of {run.name}, {unpacked.files} files")
    if unpacked.left_out:
        shown = ", ".join(escape_controls(name) for name in unpacked.left_out[:_SHOWN_PARTS])
        print(f"{len(unpacked.left_out)} links and devices were skipped: {shown}", file=sys.stderr)
    return exit_codes.OK


_CHARACTERS = 2000
_SHOWN_ROLLOUTS = 8


def rollouts_parser() -> Parser:
    """Return the parser of `rlrun rollouts`."""
    text = "Print rollouts of a step: prompt, turns, tool calls, reward, advantage and the policy versions that sampled them."
    p = runs_parser("rollouts", text, output="json")
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    p.add_argument(
        "--step", type=whole_number(1), metavar="N", help="trained step (default: the newest step with a trace)"
    )
    p.add_argument(
        "--evaluation",
        type=whole_number(0),
        metavar="VERSION",
        help="show the evaluation rollouts of a policy version instead",
    )
    some = p.add_mutually_exclusive_group()
    some.add_argument("--worst", type=whole_number(1), metavar="N", help="the N rollouts with the lowest rewards")
    some.add_argument("--best", type=whole_number(1), metavar="N", help="the N rollouts with the highest rewards")
    p.add_argument("--environment", metavar="NAME", help="only rollouts of one environment")
    p.add_argument("--full", action="store_true", help=f"complete messages (default: {_CHARACTERS} characters of each)")
    return p


@one_line_errors("rollouts")
def run_rollouts(argv: Sequence[str]) -> int:
    """Run `rlrun rollouts` and return the exit code."""
    options = rollouts_parser().parse_args(list(argv))
    label, rows = volume_reader.read_trace(the_run(options), cluster_client(options), options.step, options.evaluation)
    volume_reader.check_environment(rows, options.environment, "--environment")
    found = trace_rollouts.choose_rollouts(
        rows, worst=options.worst, best=options.best, environment=options.environment
    )
    if options.output == "json":
        print_document(found, "json")
        return exit_codes.OK
    if options.worst is None and options.best is None:
        found = found[:_SHOWN_ROLLOUTS]
    print(trace_rollouts.summarize_step(label, rows, len(found)))
    for row in found:
        print("\n" + trace_rollouts.rollout_text(row, most=0 if options.full else _CHARACTERS))
    if len(found) < len(rows) and options.worst is None and options.best is None:
        print(f"\n{len(rows) - len(found)} more: --worst N, --best N or -o json", file=sys.stderr)
    return exit_codes.OK
