"""`rlrun tiny-model` and `put`: files for runs, and their copy onto a claim.

- `tiny-model DIR` creates a model of about a million parameters; the options are the fields of `TinyModelConfig`.
- `put` copies local files and folders onto the claim of a run, or onto any claim.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rlrun.cli.command_options import report_problems
from rlrun.cli.run_options import cluster_client, one_line_errors, run_argument, runs_parser
from rlrun.config.loading.loader import load_model
from rlrun.config.loading.parser import Parser, help_text
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.inspect.copies import (
    HELPER_MOUNT,
    SCRIPT,
    Mount,
    entries_of,
    folder_of,
    helper_pod,
    mount_of,
    pods_of_namespace,
    write_archive,
)
from rlrun.inspect.kubectl import RUNS, Api, ClusterError, ask_json
from rlrun.inspect.source import ClusterRun, NotFoundError
from rlrun.local.user_code import check_user_code
from rlrun.protocol.files.volume_faults import show_size
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json

PROG = "rlrun tiny-model DIR"
"""Name of the command in its help and messages."""


def run_tiny_model(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(TinyModelConfig, prog=PROG))
        return exit_codes.OK if argv else exit_codes.USAGE
    if argv[0].startswith(("-", "@")):
        print(f"rlrun tiny-model: write the folder first: {PROG} [--hidden-size 128 ...]", file=sys.stderr)
        return exit_codes.USAGE
    folder = Path(argv[0])
    try:
        config = load_model(TinyModelConfig, argv[1:], env={}, prog=PROG)
    except ConfigError as error:
        return report_problems(error)
    if folder.exists() and (not folder.is_dir() or os.listdir(folder)):  # noqa: PTH208
        print(f"{folder}: the folder is not empty; choose a new folder, or delete its files", file=sys.stderr)
        return exit_codes.USAGE

    if config.warmup_environment is not None:
        # No environments and the default algorithm, so that only the code of the warm-up is checked. The first finding is reported.
        for finding in check_user_code((), AlgorithmConfig(), config, here=True):
            print(f"rlrun tiny-model: --warmup-environment: {finding.message}", file=sys.stderr)
            return exit_codes.CONFIGURATION

    try:
        # Before the slow import of torch, so that an unwritable folder fails at once.
        folder.mkdir(parents=True, exist_ok=True)

        from rlrun.trainer.modeling.tiny_model import make_tiny_model

        make_tiny_model(folder, config)
    except OSError as error:
        print(f"{error.filename or folder}: cannot write: {error.strerror}; choose another folder", file=sys.stderr)
        return exit_codes.STORAGE
    except ValueError as error:
        print(f"rlrun tiny-model: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    print(f"{folder}: tiny model of width {config.hidden_size}, {config.layers} layers")
    return exit_codes.OK


_CLAIM = "claim/"
"""Prefix of a target that names a claim (PersistentVolumeClaim) and not a run."""
_SHOW_SECONDS = 1.0
"""Minimum interval of progress lines."""
_READY = "300s"
"""Time within which the temporary pod must be ready."""


def put_parser() -> Parser:
    """Return the parser of `rlrun put`."""
    text = (
        "Copy files and folders onto the volume of a run, or onto a claim, through a pod that mounts it. The files become visible "
        "together, after the whole copy."
    )
    p = runs_parser("put", text)
    p.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a file or a folder; the copy keeps its name")
    p.add_argument("target", metavar="RUN|claim/NAME", help="name of a run in the cluster, or of a claim")
    p.add_argument("--to", default="data", metavar="FOLDER", help="folder below the claim's root (default: data)")
    p.add_argument("--force", action="store_true", help="replace files that exist; folders are never replaced")
    p.add_argument(
        "--image",
        metavar="IMAGE",
        help="image with sh and tar for a temporary pod, such as busybox:1.37; only needed if no pod mounts the claim",
    )
    return p


@one_line_errors("put")
def run_put(argv: Sequence[str]) -> int:
    """Run `rlrun put` and return the exit code."""
    options = put_parser().parse_args(list(argv))
    if len(options.files) == 1 and not options.files[0].exists() and Path(options.target).exists():
        run, file = options.files[0], options.target  # the user wrote them in the reverse order
        raise NotFoundError(f"FILE: there is no file {run}; write the file first, then the run: rlrun put {file} {run}")
    folder, entries = folder_of(options.to), entries_of(options.files)
    # The given files and folders, without the contents of folders.
    names = [entry.name for entry in entries if "/" not in entry.name]
    cluster = cluster_client(options)
    claim, path = _claim_of(options, cluster)
    with _mount_claim(claim, cluster, options) as mount:
        # Positional arguments of `SCRIPT`. The token names a temporary folder, from which the complete copy is moved to its place.
        words = [mount.path, str(folder), secrets.token_hex(4), "yes" if options.force else "no", *names]
        command = ["exec", "-i", mount.pod, "-c", mount.container, "--", "sh", "-c", SCRIPT, "sh", *words]
        progress = _Progress(sum(entry.size for entry in entries))

        def write(out: IO[bytes]) -> None:
            write_archive(entries, out, progress.count_sent)

        try:
            cluster.send_input(command, write)
        finally:
            progress.clear_line()
    count = sum(not entry.is_folder for entry in entries)
    copy = f"{folder}/{names[0]}"
    # The mount path of `mount` is that of a helper pod or of some other pod, so it is not shown.
    place = f"{copy} below spec.storage.mountPath (default: /data)" if path is None else f"{path}/{copy}"
    print(f"claim {claim}: {count} files, {show_size(progress.done)}, in {folder}; in a run's pods: {place}")
    return exit_codes.OK


def _claim_of(options: argparse.Namespace, cluster: Api) -> tuple[str, str | None]:
    """Return the name of the claim, and its mount path in the run's pods if a run is named.

    Raises:
        NotFoundError: the run does not exist or has no claim yet.
    """
    target: str = options.target
    if target.startswith(_CLAIM) and "/" not in (claim_name := target.removeprefix(_CLAIM)) and claim_name:
        return claim_name, None
    if "/" in target or target.startswith("."):
        raise NotFoundError(f"RUN: got {target}, expected the name of a run in a cluster, or {_CLAIM}NAME")
    try:
        run: Json = ask_json(cluster, ["get", RUNS, target])
    except ClusterError as error:
        if error.code != exit_codes.USAGE:
            raise
        raise NotFoundError(f"{error}; for a claim write {_CLAIM}{target}") from None
    storage = (run.get("spec") or {}).get("storage") or {}
    claim = ((run.get("status") or {}).get("storage") or {}).get("claimName") or storage.get("claimName")
    if not claim:
        raise NotFoundError(
            f"{target} has no claim yet; `rlrun why {run_argument(ClusterRun(target), options)}` shows what it waits for"
        )
    return str(claim), str(storage.get("mountPath") or "/data")


@contextmanager
def _mount_claim(claim: str, cluster: Api, options: argparse.Namespace) -> Iterator[Mount]:
    """Yield a container that mounts the claim; a pod that was created for the copy is deleted at the end."""
    found = mount_of(pods_of_namespace(cluster), claim)
    if found is not None:
        yield found
        return
    cluster.read_output(["get", "persistentvolumeclaims", claim])  # raises an error if the claim does not exist
    if options.image is None:
        raise NotFoundError(
            f"no running pod mounts the claim {claim}; add --image busybox:1.37, or another image with sh and tar, for a temporary pod"
        )
    name = f"rlrun-put-{secrets.token_hex(4)}"
    document = json.dumps(helper_pod(name, claim, options.image)).encode()
    cluster.send_input(["create", "-f", "-"], lambda out: out.write(document))
    try:
        # The request may take longer than `_READY`, so that kubectl reports the end of the wait itself.
        cluster.read_output(["wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={_READY}"], timeout=310)
        yield Mount(name, "put", HELPER_MOUNT)
    finally:
        cluster.read_output(["delete", "pod", name, "--wait=false"])


class _Progress:
    """Progress of a copy in bytes, shown on a terminal.

    Args:
        total: size of all files in bytes.
    """

    def __init__(self, total: int) -> None:
        self._total, self.done, self._shown = total, 0, time.monotonic()

    def count_sent(self, count: int) -> None:
        """Count sent bytes, and show the total at most once per second."""
        self.done += count
        if time.monotonic() - self._shown >= _SHOW_SECONDS and sys.stderr.isatty():
            self._shown = time.monotonic()
            print(f"\r{show_size(self.done)} of {show_size(self._total)} ", end="", file=sys.stderr, flush=True)

    def clear_line(self) -> None:
        """Clear the progress line."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
