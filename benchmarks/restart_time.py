"""Phases of a restart on one machine: `python -m benchmarks.restart_time [--kills 5] [--write]`.

`rlrun local` trains a tiny model with two ranks on recorded batches, so that no engine takes part. Repeatedly, one rank
is killed with SIGKILL after an attempt has trained a step, the launcher ends, and the same command continues with
`--resume`. Phases are those of `status.lastRestart`: the trainer's own come from the metrics of each attempt's first
step, the others are measured from outside.

A second table reads a checkpoint of several ranks for its checksums as earlier restarts did, by one process, and as
present ones do, by one process per rank; each time with the files out of the page cache.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.local_command import local_command
from benchmarks.results_page import run_page
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.protocol.files.checkpoint_manifest import FileEntry, check_sums, file_checksum
from rlrun.protocol.messages.lease_annotations import PHASES, start_times
from rlrun.trainer.checkpoints.shared_check import share_files
from rlrun.trainer.modeling.tiny_model import make_tiny_model
from tests.e2e.local.local_run import processes_of
from tests.support.command_line import command_line
from tests.trainer.conftest import record

RESULTS = Path(__file__).parent / "results" / "restart_time.md"
OUTSIDE = ("ending", "launcher")
"""Phases until the killed run's processes are gone, and until torchrun is started again: the launcher's own start and
its checks."""
STEPS = 400
SHARDS, SHARD_BYTES = 4, 64 << 20
DEADLINE_SECONDS = 600.0


def manifest(model: Path) -> dict[str, object]:
    """Return a run of two ranks that saves every step."""
    spec = {
        "model": {"path": str(model), "dtype": "float32"},
        "maxSteps": STEPS,
        "seqLen": 64,
        "environments": [{"id": "reverse-text", "groupSize": 4}],
        "sampling": {"maxTokens": 8},
        "orchestrator": {"batchSize": 12},
        "trainer": {"processesPerReplica": 2},
        "checkpoint": {"interval": 1, "keepLast": 2},
    }
    return {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "restart-time"}, "spec": spec}


def until(condition: Callable[[], object], launcher: subprocess.Popen[bytes], log: Path) -> None:
    """Wait while the launcher lives.

    Raises:
        RuntimeError: it has ended, or the wait is too long.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run does not get on:\n{log.read_text()[-3000:]}")
        time.sleep(0.01)


def first_steps(metrics: Path) -> dict[int, dict[str, float]]:
    """Return seconds of each attempt's start by phase, for attempts that have trained a step."""
    found: dict[int, dict[str, float]] = {}
    whole = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""
    for text in whole.splitlines():
        line = json.loads(text)
        if (seconds := start_times(line)) is not None:
            found[int(line["attempt"])] = seconds
    return found


def is_training(run: Path, attempt: int) -> bool:
    """Return whether an attempt of the run has trained a step."""
    return attempt in first_steps(run / "metrics.jsonl")


def kill_a_rank(folder: Path) -> None:
    """Kill the last rank, not torchrun."""
    lines = {pid: command_line(pid) for pid in processes_of(folder)}
    ranks = [pid for pid, line in lines.items() if "rlrun.trainer" in line and "ranks.torchrun" not in line]
    os.kill(max(ranks), signal.SIGKILL)


def restarts(folder: Path, kills: int) -> list[dict[str, float]]:
    """Return seconds by phase of each restart, the total under `total`."""
    make_tiny_model(folder / "model", TinyModelConfig(hidden_size=32, layers=2))
    (folder / "run.yaml").write_text(yaml.safe_dump(manifest(folder / "model")))
    run, log = folder / "run", folder / "launcher.log"
    command = local_command(folder / "run.yaml", run, "--replay", str(record(folder / "recorded", STEPS)))
    found: list[dict[str, float]] = []
    killed = ended = 0.0
    for attempt in range(1, kills + 2):
        with log.open("ab") as output:
            more = ["--resume"] if attempt > 1 else []
            launcher = subprocess.Popen([*command, *more], stdout=output, stderr=subprocess.STDOUT)
        try:
            until(partial(is_training, run, attempt), launcher, log)
            now = time.monotonic()
            if attempt > 1:
                inside = first_steps(run / "metrics.jsonl")[attempt]
                launched = now - ended - sum(inside.values())
                found.append({"ending": ended - killed, "launcher": launched, **inside, "total": now - killed})
            killed = time.monotonic()
            kill_a_rank(run)
            launcher.wait(DEADLINE_SECONDS)
            ended = time.monotonic()
        finally:
            launcher.kill()
            launcher.wait()
    return found


def cold(files: Sequence[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check(work: tuple[Path, list[FileEntry]]) -> float:
    began = time.perf_counter()
    check_sums(*work)
    return time.perf_counter() - began


def checks(folder: Path) -> dict[str, float]:
    """Return seconds of a checkpoint's check by one process, by all ranks at once, and of one rank's share."""
    (folder / "trainer").mkdir()
    files = [folder / f"trainer/__{rank}_0.distcp" for rank in range(SHARDS)]
    for path in files:
        path.write_bytes(os.urandom(SHARD_BYTES))
    entries = [FileEntry(f"trainer/{path.name}", SHARD_BYTES, file_checksum(path)) for path in files]
    with ProcessPoolExecutor(SHARDS) as ranks:
        list(ranks.map(_check, [(folder, [])] * SHARDS))  # the processes are ready
        cold(files)
        alone = _check((folder, entries))
        cold(files)
        part = _check((folder, share_files(entries, 1, SHARDS)))
        cold(files)
        longest = max(ranks.map(_check, [(folder, share_files(entries, rank, SHARDS)) for rank in range(SHARDS)]))
    return {"alone": alone, "together": longest, "share": part}


def table(kills: int) -> str:
    """Return both tables as Markdown."""
    with TemporaryDirectory() as name:
        found = restarts(Path(name), kills)
    with TemporaryDirectory() as name:
        read = checks(Path(name))
    total = statistics.median(one["total"] for one in found)
    lines = [
        "# Where the time of a restart goes on one machine",
        "",
        f"`python -m benchmarks.restart_time --kills {kills}`; {platform.machine()}, {os.cpu_count()} cores, CPU, two ranks of a tiny",
        "model (width 32, two layers) under `rlrun local`, without engines, a rank killed with SIGKILL. There is no pod, no image and no",
        "scheduler here, the weights are nothing, and other work shares the cores: shares count, seconds do not. For real sizes see the",
        "table in [failures](../../docs/failures.md#estimates-for-large-models).",
        "",
        "| phase | median, s | least | most | share |",
        "|---|---:|---:|---:|---:|",
        *(_row(phase, [one.get(phase, 0.0) for one in found], total) for phase in (*OUTSIDE, *PHASES, "total")),
        "",
        "`launcher` is the start of `rlrun local` with its checks, up to that of torchrun; a pod's is in `containers` and `other`.",
        "",
        f"## The check of a checkpoint of {SHARDS} ranks, {SHARDS * SHARD_BYTES >> 20} MiB",
        "",
        "One disk and these cores for all: on machines of their own each rank reads its share over a link of its own, and `one rank's",
        "share` is what all of them wait for.",
        "",
        "| who reads | s | of alone |",
        "|---|---:|---:|",
        *_check_rows(read),
    ]
    return "\n".join([*lines, ""])


def _row(phase: str, seconds: Sequence[float], total: float) -> str:
    middle = statistics.median(seconds)
    return f"| `{phase}` | {middle:.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {middle / total:.0%} |"


def _check_rows(read: Mapping[str, float]) -> list[str]:
    words = {
        "alone": "rank 0 alone, all files (before)",
        "together": "all ranks at once, each its own files (now), here",
        "share": "one rank's share",
    }
    return [f"| {text} | {read[key]:.2f} | {read[key] / read['alone']:.2f} |" for key, text in words.items()]


if __name__ == "__main__":
    run_page(__doc__, RESULTS, table, kills=5)
