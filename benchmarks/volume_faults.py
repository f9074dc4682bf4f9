"""Faults of the volume at every operation of every durable write: `python -m benchmarks.volume_faults [--writers
NAME,...] [--write]`.

Each write runs as in its role, in a process whose file system fails on command (`tests/support/failing_volume`): with
each of six errors, from each operation on, for 1, 4 and 40 operations, and with a kill at each operation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.failing_volume import build, environment
from tests.support.failing_volume.play import FAULTS, Result, counted

RESULTS = Path(__file__).parent / "results" / "volume_faults.md"
ROOT = Path(__file__).parents[1]
COUNTS = (1, 4, 40)
WRITERS: Mapping[str, str] = {
    "batch": "a batch (orchestrator)",
    "journal": "finished rollouts in the journal (orchestrator)",
    "metrics": "`metrics.jsonl`: its lines at the start of an attempt, and two more (orchestrator)",
    "attempt": "the file of an attempt (trainer)",
    "configuration": "`run.json` and the attempt's copy (pod)",
    "checkpoint": "a checkpoint with stand-in shards, the orchestrator's part, the manifest and retention (both)",
    "real-version": "a version of the weights, by safetensors, and retention (trainer)",
    "real-checkpoint": "a checkpoint with the real shards, by torch's writer, the manifest and retention (trainer)",
    "real-resume": "the load of the checkpoint that an attempt starts from, which writes nothing (trainer)",
}
"""Descriptions of the writes by their names in `tests.support.failing_volume.play`."""

EVERY = {"real-version": 3}
"""Distance of the tested operations, if it is not 1."""
KILLS = {"real-checkpoint": 6}
"""Distance of the operations with a kill, if it is not 1: each kill starts two ranks of the trainer."""


def play(writer: str, folder: Path, *, counts: Sequence[int] = COUNTS, every: int | None = None) -> list[Result]:
    """Return results at the operations of one write, from a separate process.

    Args:
        writer: its name.
        folder: existing and empty folder.
        counts: numbers of consecutive operations that fail.
        every: distance of the tested operations. Default: `EVERY`.
    """
    every = every or EVERY.get(writer, 1)
    module, numbers = "tests.support.failing_volume.play", ",".join(map(str, counts))
    command = [sys.executable, "-m", module, writer, str(folder), "--counts", numbers, "--every", str(every)]
    command += ["--kills", str(KILLS.get(writer, 1))]
    done = subprocess.run(command, env=environment(build(folder)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Result(**json.loads(line)) for line in done.stdout.splitlines()]


def rows(results: Sequence[Result]) -> list[str]:
    """Return rows of a write's table; consecutive operations with the same results share one."""
    found: list[tuple[list[Result], tuple[object, ...]]] = []
    for result in results:
        key = (result.operation, result.faults, result.went_on, bool(result.lost), result.killed)
        if found and found[-1][1] == key:
            found[-1][0].append(result)
        else:
            found.append(([result], key))
    return [_row(group) for group, _ in found]


def _row(group: Sequence[Result]) -> str:
    first, last = group[0], group[-1]
    number = f"{first.number}" if first is last else f"{first.number} to {last.number}"
    faults, went_on = sum(r.faults for r in group), sum(r.went_on for r in group)
    lost = "; ".join(entry for result in group for entry in result.lost) or "nothing"
    end = len(counted(group))
    return f"| {number} | {first.operation} | {faults} | {went_on} | {faults - went_on} | {end} | {lost} | {first.killed} |"


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """Return all results as Markdown."""
    lines = [
        "# Faults of the volume at every operation of a durable write",
        "",
        "`python -m benchmarks.volume_faults --write`. Faults: "
        + ", ".join(FAULTS)
        + ", each from the operation on for",
        f"{', '.join(map(str, COUNTS[:-1]))} and {COUNTS[-1]} operations, and a kill (SIGKILL) at the operation. Opens for reading are",
        "operations, too. Ended: the role ended with exit code 10 (StorageError), which does not count; the next attempt wrote all.",
        "Counted: it ended with another code, which counts against `maxRestarts`. Lost: a reader found something that was neither",
        "the old state nor the new one, or did not find an entry that was reported as durable. After a kill a reader found the old",
        "state or the new one, and the next attempt wrote the new one.",
    ]
    for name, found in results.items():
        total, went_on = sum(r.faults for r in found), sum(r.went_on for r in found)
        left = sum(bool(r.left) for r in found)
        lines += [
            "",
            f"## {name}: {WRITERS[name]}",
            "",
            f"{len(found)} operations, {total} faults: {went_on} times the role went on by itself, {total - went_on} times the",
            f"next attempt did; {len(counted(found))} ends counted; {sum(bool(r.lost) for r in found)} operations lost something.",
            f"Temporary files that no reader takes for anything stayed at {left} operations.",
            "",
            "| operations | kind | faults | went on | ended | counted | lost | after a kill |",
            "|---|---|---|---|---|---|---|---|",
            *rows(found),
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Play all writes, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.volume_faults", description=__doc__)
    parser.add_argument("--writers", default=",".join(WRITERS), help="names, separated by commas")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args(argv)
    found = {}
    for name in options.writers.split(","):
        with TemporaryDirectory() as folder:
            found[name] = play(name, Path(folder))
        print(f"{name}: {len(found[name])} operations", file=sys.stderr)
    text = table(found)
    if options.write:
        RESULTS.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
