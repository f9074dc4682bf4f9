"""`python -m tests.e2e.chaos [--write] [WORDS ...]`: the whole matrix, or the cells whose names contain one of the
words.

Cells that break only their own run are played several at a time. Cells that break the cluster are played one by one
afterwards.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import api, deploy
from tests.cluster.images import build
from tests.cluster.native.cluster import NativeCluster
from tests.e2e.chaos.cells import CELLS, Cell
from tests.e2e.chaos.play import INTERVAL, STEP_SECONDS, Outcome, play

NAMESPACE = "chaos"
TABLE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "chaos.md"
AT_A_TIME = 3
FAILED, LOADED = "**failed**", "Played on"


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the cells and print the results; with `--write` update the table. Return 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names of cells; default: all")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--cluster", help="a native cluster of two nodes that is up; default: an own one")
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME, help="default: %(default)s")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # take the cluster down first
    wanted = [c for c in CELLS if not options.words or any(word in c.name for word in options.words)]
    images = build(["operator", "stub"])
    stub = images["stub"].reference
    cluster = (
        api.attach(options.cluster)
        if options.cluster
        else api.up("chaos", nodes=2, images=[image.archive for image in images.values()], tie=True)
    )
    if not isinstance(cluster, NativeCluster):
        parser.error(f"cluster {cluster.name} comes from {cluster.provider}: its machines cannot be broken")
    began, loads = time.monotonic(), [os.getloadavg()[0]]
    try:
        cluster.load_image(*(image.archive for image in images.values()))
        references = {"trainer": stub, "inference": stub, "operator": images["operator"].reference}
        deploy.install(cluster, references, watch=[NAMESPACE])
        results = list(_play(cluster, stub, [c for c in wanted if not c.alone], options.at_a_time, loads))
        results += _play(cluster, stub, [c for c in wanted if c.alone], 1, loads)
    finally:
        if not options.cluster:
            cluster.down()
    print(f"{len(results)} cells in {(time.monotonic() - began) / 60:.0f} minutes")
    text = table(
        {_start(cell): _row(cell, result) for cell, result in results}, TABLE.read_text(), statistics.fmean(loads)
    )
    print(text)
    if options.write:
        TABLE.write_text(text)
    return int(any(isinstance(result, str) for _, result in results))


def _play(
    cluster: NativeCluster, image: str, cells: Sequence[Cell], at_a_time: int, loads: list[float]
) -> list[tuple[Cell, Outcome | str]]:
    def one(cell: Cell) -> tuple[Cell, Outcome | str]:
        began = time.monotonic()
        try:
            result: Outcome | str = play(cluster, NAMESPACE, cell, image)
        except Exception as error:
            print(f"FAILED {cell.role} {cell.fault}: {error}\n{traceback.format_exc()}", flush=True)
            result = str(error).splitlines()[0][:160]
        loads.append(os.getloadavg()[0])
        print(f"{time.monotonic() - began:6.0f} s  {cell.role} {cell.fault}: {result}", file=sys.stderr, flush=True)
        return cell, result

    pool = ThreadPoolExecutor(max(at_a_time, 1))
    try:
        return list(pool.map(one, cells))
    finally:  # also after an interrupt: running cells fail as soon as their cluster is gone
        pool.shutdown(wait=False, cancel_futures=True)


def _row(cell: Cell, result: Outcome | str) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    if isinstance(result, str):
        return f"| {cell.role} | {cell.fault} | {FAILED}: {result.replace('|', '/')} | | | |"
    times = f"{number(result.detected)} | {number(result.recovered)}"
    return f"| {cell.role} | {cell.fault} | {result.happened} | {times} | {result.lost} |"


def table(played: Mapping[str, str], before: str, load: float) -> str:
    """Return the page.

    Args:
        played: new rows by the start that names their cell; other rows are kept.
        before: previous text of the page.
        load: average number of processes that the machine had to run meanwhile.
    """
    old = {start(line): line for line in before.splitlines() if line.count("|") > 2}
    rows = [row for cell in CELLS if (row := played.get(_start(cell)) or old.get(_start(cell))) is not None]
    passed = sum(FAILED not in row for row in rows)
    loads = [line for line in before.splitlines() if line.startswith(LOADED)] if len(played) < len(rows) else []
    loads.append(
        f"{LOADED} {time.strftime('%Y-%m-%d')}, {len(played)} cells: a load of {load:.0f} on {os.cpu_count()} cores."
    )
    lines = "\n".join(loads)
    return f"""# A run that is broken on purpose

`python -m tests.e2e.chaos --write [WORDS ...]`, a part of `make test-full`: a real cluster of two nodes on one machine, a stub trainer of
two pods and stub engines, the real orchestrator and operator; a checkpoint every {INTERVAL} steps, a step every {STEP_SECONDS} s,
{AT_A_TIME} runs at a time.
{passed} of {len(CELLS)} cells passed.

{lines}

Each run went on to Complete, with every step once and in order in `metrics.jsonl`, from a checkpoint that is no older than the newest that
was complete when the fault came; Failed is right for an exit code that no restart can mend. Detected: seconds from the fault until the
run's status has it. Recovered: until the next step is trained; starting the pods and loading the (stub) model are part of it.
A full volume and a suspended run do not recover by themselves: from when there was room again, and from when the run was resumed.
An operator that is killed several times is started again by its kubelet after 10 s, then after 20 s more (CrashLoopBackOff).

| role | fault | what happened | detected, s | recovered, s | steps lost |
|---|---|---|---|---|---|
""" + "".join(f"{row}\n" for row in rows)


def start(row: str) -> str:
    """Return the start of a row, which names its cell."""
    return "|".join(row.split("|")[:3])


def _start(cell: Cell) -> str:
    return f"| {cell.role} | {cell.fault} "


if __name__ == "__main__":
    raise SystemExit(main())
