"""Simulations that CI does not run.

python -m tests.sim.queue --clusters 10000 --jobs 2   random clusters and queues
python -m tests.sim.queue --saturated 40 --jobs 2     shares over 24 hours, where all want more than there is
python -m tests.sim.queue --planted                   how soon each planted bug is found
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from tests.sim.queue.planted import (
    CONTENDED,
    PLANTED,
    hunt,
    live,
    live_contended,
    live_saturated,
    weights_do_not_count,
)

SHOWN = 5
WITHIN = 1000
SATURATED_WITHIN = 10


def _run(what: str, one: Callable[[int], str | None], seeds: range, jobs: int) -> int:
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        answers = list(pool.map(one, seeds, chunksize=max(1, min(20, len(seeds) // (4 * jobs)))))
    found = [(seed, broken) for seed, broken in zip(seeds, answers, strict=True) if broken is not None]
    for seed, broken in found[:SHOWN]:
        print(f"seed {seed}: {broken}")
    print(f"{len(seeds)} {what}: {len(found)} broken, {time.monotonic() - began:.0f} s")
    return len(found)


def _planted(seed: int) -> int:
    missed = 0
    for bug in (*PLANTED, *CONTENDED):
        found = hunt(bug, range(seed, seed + WITHIN), live_contended if bug in CONTENDED else live)
        print(f"{bug.__name__}: {'never found' if found is None else f'found by world {found - seed + 1}'}")
        missed += found is None
    seed_found = hunt(weights_do_not_count, range(seed, seed + SATURATED_WITHIN), live_saturated)
    print(
        f"weights_do_not_count: {'never found' if seed_found is None else f'found by saturated world {seed_found - seed + 1}'}"
    )
    return missed + (seed_found is None)


def main() -> int:
    """Run the selected part; return 1 if an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.queue")
    parser.add_argument("--clusters", type=int, default=0)
    parser.add_argument("--saturated", type=int, default=0)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    wrong = 0
    if args.clusters:
        wrong += _run("clusters", live, range(args.seed, args.seed + args.clusters), args.jobs)
    if args.saturated:
        wrong += _run("saturated clusters", live_saturated, range(args.seed, args.seed + args.saturated), args.jobs)
    if args.planted:
        wrong += _planted(args.seed)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
