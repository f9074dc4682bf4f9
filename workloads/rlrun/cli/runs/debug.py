"""`rlrun debug`: write a bundle for a bug report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlrun.cli.runs.common import RUN_HELP, answered, api, runs_parser, the_run
from rlrun.config.loading.parser import Parser
from rlrun.inspect import screen
from rlrun.inspect.kubectl import Api
from rlrun.inspect.report import bundle
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import FolderRun, NotFoundError, Run, read_run
from rlrun.inspect.why import explain_run
from rlrun.runtime import exit_codes
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


@answered("debug")
def run_debug(argv: Sequence[str]) -> int:
    """Run `rlrun debug` and return the exit code."""
    options, now = debug_parser().parse_args(list(argv)), time.time()
    run, cluster = the_run(options), api(options)
    seen = read_run(run, cluster, now)
    top = f"rlrun-debug-{seen.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}"
    file: Path = options.file or Path(f"{top}.tar.gz")
    if file.exists():
        raise NotFoundError(f"--file: {file} exists already; set a new file")
    if not file.absolute().parent.is_dir():
        raise NotFoundError(f"--file: there is no folder {file.parent}; create it first")
    names = bundle.write_bundle(file, top, _parts(run, seen, cluster, now), known_secrets(os.environ))
    print(f"{file}: {len(names)} files, {file.stat().st_size // 1024 + 1} KiB")
    print(
        "read it before you send it: a log can contain a secret of your environments that is not recognized",
        file=sys.stderr,
    )
    return exit_codes.OK


def _parts(run: Run, seen: Snapshot, cluster: Api, now: float) -> Iterator[bundle.Part]:
    told = explain_run(seen, now)
    yield "why.txt", screen.explanation_text(told, now) + "\n"
    yield "status.txt", screen.join_blocks([screen.status_screen(seen, told, now), screen.pods_tree(seen, now)]) + "\n"
    yield "versions.txt", bundle.list_versions()
    yield from bundle.parts_of_folder(run) if isinstance(run, FolderRun) else bundle.parts_of_cluster(seen, cluster)
