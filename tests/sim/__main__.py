"""Simulations that CI does not run.

python -m tests.sim --histories 100000 --seed 10000 --jobs 2   random histories
python -m tests.sim --queued --histories 10000 --jobs 2        those of an operator with a queue
python -m tests.sim --elastic --histories 10000 --jobs 2       those of an elastic trainer
python -m tests.sim --engines --histories 10000 --jobs 2       those of engines by load and on interruptible nodes
python -m tests.sim --planted                                  how soon each planted bug is found
python -m tests.sim --fuzz 10000                               hostile resources, statuses and children
python -m tests.sim --day                                      24 simulated hours with a fault a minute

With --write the figures go into benchmarks/results/simulation.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from tests.sim.day import live_through
from tests.sim.fuzz import fuzz
from tests.sim.history import Failure, live
from tests.sim.planted import ELASTIC, ENGINES, PLANTED, QUEUED, WITHIN, hunt
from tests.sim.results import keep

CHUNK = 5000
"""Histories between two progress lines."""
SHOWN = 5
"""Number of failures that are minimized and printed."""


def run(
    histories: int, seed: int, jobs: int, *, queued: bool = False, elastic: bool = False, engines: bool = False
) -> list[Failure]:
    """Run `histories` histories with the seeds from `seed` on."""
    seeds = range(seed, seed + histories)
    one = partial(live, shrink=False, queued=queued, elastic=elastic, engines=engines)
    if jobs == 1:
        found = [failure for failure in map(one, seeds) if failure is not None]
    else:
        with ProcessPoolExecutor(jobs) as pool:
            found = [failure for failure in pool.map(one, seeds, chunksize=20) if failure is not None]
    shown = [
        live(failure.seed, queued=queued, elastic=elastic, engines=engines) or failure for failure in found[:SHOWN]
    ]
    return [*shown, *found[SHOWN:]]


class Outcome(NamedTuple):
    """Result of one part.

    Attributes:
        wrong: number of unexpected failures.
        text: figures in Markdown.
    """

    wrong: int
    text: str


def planted(seed: int) -> Outcome:
    """Measure after how many histories each planted bug is found."""
    missed, lines = 0, ["| planted bug | histories until found | what it broke |", "|---|---|---|"]
    for bug in (*PLANTED, *QUEUED, *ELASTIC, *ENGINES):
        found = hunt(bug, seed, queued=bug in QUEUED, elastic=bug in ELASTIC, engines=bug in ENGINES)
        missed += found is None
        count, problem = (str(found[0]), found[1].problem.split(":")[0]) if found else (f"not in {WITHIN}", "")
        lines.append(f"| {bug.__name__.replace('_', ' ')} | {count} | {problem.replace('_', ' ')} |")
    bugs = len(PLANTED) + len(QUEUED) + len(ELASTIC) + len(ENGINES)
    told = f"{bugs} bugs: {bugs - missed} are found within {WITHIN:,} histories; {missed} are missed."
    return Outcome(missed, "\n".join([told, "", *lines]))


def fuzzed(count: int, seed: int, jobs: int) -> Outcome:
    """Count the failures with hostile input."""
    with ProcessPoolExecutor(jobs) as pool:
        wrong = [problem for problem in pool.map(fuzz, range(seed, seed + count), chunksize=50) if problem is not None]
    for problem in wrong[:SHOWN]:
        print(problem)
    text = f"{count:,} hostile resources, statuses and children from seed {seed}: {len(wrong)} went wrong."
    return Outcome(len(wrong), text)


def run_histories(
    histories: int, seed: int, jobs: int, *, queued: bool = False, elastic: bool = False, engines: bool = False
) -> Iterator[Outcome]:
    """Count the failures of random histories; yield intermediate results, so that an interrupted run still reports its
    histories.
    """
    began, failures, done = time.perf_counter(), list[Failure](), 0
    while done < histories:
        some = min(CHUNK, histories - done)
        found = run(some, seed + done, jobs, queued=queued, elastic=elastic, engines=engines)
        for failure in found[: max(0, SHOWN - len(failures))]:
            print(failure)
        failures, done = [*failures, *found], done + some
        text = f"{done:,} histories from seed {seed}: {len(failures)} went wrong"
        if failures:
            text += f" (seeds {', '.join(str(failure.seed) for failure in failures)})"
        yield Outcome(len(failures), f"{text}, in {time.perf_counter() - began:.0f} s with {jobs} processes.")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--queued", action="store_true")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--engines", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--fuzz", type=int, metavar="N")
    parser.add_argument("--day", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep the figures")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # the processes of the pool inherit it
    if args.planted:
        title, outcomes = "Planted bugs", iter([planted(args.seed)])
    elif args.fuzz:
        title, outcomes = "Hostile input", iter([fuzzed(args.fuzz, args.seed, args.jobs)])
    elif args.day:
        title, outcomes = "A day with a fault a minute", iter([Outcome(0, live_through(seed=args.seed).table())])
    else:
        title = "Random histories with a queue" if args.queued else "Random histories"
        title = "Random histories of an elastic trainer" if args.elastic else title
        title = "Random histories of engines" if args.engines else title
        outcomes = run_histories(
            args.histories, args.seed, args.jobs, queued=args.queued, elastic=args.elastic, engines=args.engines
        )
    outcome = Outcome(0, "")
    for outcome in outcomes:  # the last outcome covers all histories
        print(outcome.text, flush=True)
        if args.write:
            keep(title, outcome.text)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
