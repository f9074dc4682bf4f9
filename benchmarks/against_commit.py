"""CPU time of the trainer's work, compared with another commit in one run.

    python -m benchmarks.against_commit COMMIT [--cases gae] [--write NAME]

The commit is checked out into another folder. Both versions run `benchmarks/cpu_cases.py` of this one, each in a
separate process, alternating case by case, so that other load affects both equally; times are CPU seconds of one
thread. Both have to compute the same numbers. A ratio is this version's time over the other's, with an interval over
the pairs. `--write` writes the table to benchmarks/results/NAME.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks import cpu_cases
from benchmarks.paired import MIN_PAIRS, Estimate, estimate, turns
from rlrun.local.preflight import free_port

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SAME = 1e-4
"""Largest relative difference of two digests, which is that of sums in another order."""
SLOWER = 1.03
"""Ratio above which a version counts as slower; smaller differences are those of the machine."""


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Provide a folder with the files of a commit, deleted at the end."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "files"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(folder), commit], check=True, cwd=ROOT)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(folder)], check=True, cwd=ROOT)


class Cases:
    """A process that runs cases with the product in `root`, where its imports happen only once."""

    def __init__(self, root: Path) -> None:
        path = os.pathsep.join(str(root / part) for part in ("operator", "workloads"))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(ROOT / "benchmarks" / "cpu_cases.py"), str(free_port())]
        self._root = root
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
        )

    def run(self, case: str) -> dict[str, float]:
        """Return seconds and digest of a case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._root}: {case} failed with exit code {self._process.wait()}")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def compare(other: Path, cases: Sequence[str], pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Return seconds of both versions by case, this one's first, pair by pair."""
    seconds: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    order = turns(pairs)
    with closing(Cases(ROOT)) as own, closing(Cases(other)) as others:
        for pair in range(pairs):
            for case in cases:
                found = {mine: (own if mine else others).run(case) for mine in order[2 * pair : 2 * pair + 2]}
                ours, theirs = found[True], found[False]
                if not math.isclose(ours["digest"], theirs["digest"], rel_tol=SAME):
                    raise RuntimeError(f"{case} computes {ours['digest']}, but {theirs['digest']} at the other commit")
                seconds[case].append((ours["seconds"], theirs["seconds"]))
            print(f"pair {pair + 1} of {pairs}", file=sys.stderr, flush=True)
    return seconds


def row(case: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Return one line of the table."""
    ratio: Estimate = estimate(pairs)
    ours, theirs = (statistics.median(one) for one in zip(*pairs, strict=True))
    about = (cpu_cases.CASES[case].__doc__ or "").partition("\n")[0].rstrip(".")
    slower = {"shown": "no", "missed": "yes"}.get(ratio.verdict(SLOWER), "undecided")
    return (
        f"| {case} | {about} | {1000 * theirs:.1f} | {1000 * ours:.1f} | {ratio} | {1 / ratio.median:.2f} | {slower} |"
    )


def table(commit: str, seconds: dict[str, list[tuple[float, float]]]) -> str:
    """Return all cases as Markdown."""
    show = ["git", "show", "--no-patch", "--format=%h (%cs, %s)", commit]
    named = subprocess.run(show, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    here = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, cwd=ROOT)
    pairs = len(next(iter(seconds.values())))
    return "\n".join(
        [
            f"# {here.stdout.strip()} against {named}",
            "",
            f"`python -m benchmarks.against_commit {commit} --cases {' '.join(seconds)} --pairs {pairs}`; one core ({platform.machine()}),",
            f"float32, no GPU; medians of CPU time over {pairs} pairs of runs in turns. The ratio is the time of this version over",
            f"the other's, with the interval that holds it with 95 %; slower is what lies above {SLOWER} with the whole interval. Both",
            f"versions computed the same numbers, within {SAME}.",
            "",
            "| case | what | before, ms | now, ms | ratio | times as fast | slower |",
            "|---|---|---|---|---|---|---|",
            *(row(case, found) for case, found in seconds.items()),
            "",
        ]
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the version to compare with")
    parser.add_argument("--cases", nargs="+", choices=list(cpu_cases.CASES), default=list(cpu_cases.CASES))
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--write", metavar="NAME", help="keep the table in benchmarks/results")
    arguments = parser.parse_args()
    with checked_out(arguments.commit) as other:
        text = table(arguments.commit, compare(other, arguments.cases, arguments.pairs))
    print(text)
    if arguments.write:
        (RESULTS / f"{arguments.write}.md").write_text(text)


if __name__ == "__main__":
    main()
