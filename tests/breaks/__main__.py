"""Plant each break of a table in a copy of the checkout and run tests until one fails: `python -m tests.breaks [--full] [ROW ...]`.

A row names tests in the order in which they run: the cheapest first. The gate's tests run first (without the marker `full`); with
`--full`, a break that the gate does not catch meets the tests of the full set as well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.python_path import before
from tests.tiers import GATE, TESTS_FAILED

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.yaml")
RESULTS = ROOT / "benchmarks" / "results" / "planted_breaks.md"
PATHS = ("workloads", "operator", ".")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
_STALE = "stale: the text is not in the file exactly once"


@dataclass(frozen=True)
class Break:
    """One fault.

    Attributes:
        number: row of the table, from 1.
        behavior: promise that the fault breaks.
        file: path in the checkout.
        old: text that occurs exactly once in the file.
        new: text that replaces it.
        tests: files, folders or node ids, in the order in which they run.
    """

    number: int
    behavior: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """Result of one break.

    Attributes:
        caught_in: "gate", "full", or None if no test failed.
        test: the first test that failed, or the reason why no test ran.
        seconds: time until then.
    """

    planted: Break
    caught_in: str | None
    test: str
    seconds: float


def read_table(path: Path = TABLE) -> list[Break]:
    rows = yaml.safe_load(path.read_text())
    return [Break(number, **row | {"tests": tuple(row["tests"])}) for number, row in enumerate(rows, start=1)]


def plant(planted: Break, checkout: Path) -> bool:
    """Replace the text in a copy of the checkout; return False if the table does not fit the file any more."""
    file = checkout / planted.file
    text = file.read_text() if file.exists() else ""
    if text.count(planted.old) != 1:
        return False
    file.write_text(text.replace(planted.old, planted.new))
    return True


def copy_checkout(target: Path) -> None:
    """Copy all files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def first_failure(checkout: Path, tests: Iterable[str], options: Sequence[str]) -> str | None:
    """Run tests one argument after the other; return the first that fails."""
    environment = os.environ | {"PYTHONPATH": before(*(checkout / path for path in PATHS))}
    for test in tests:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, test]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if done.returncode in (TESTS_FAILED, 2):  # 2: the break keeps tests from being collected
            found = _FAILED.search(done.stdout)
            return found[1] if found else f"{test} (not collected)"
    return None


def try_break(planted: Break, *, full: bool) -> Result:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlrun-break-") as folder:
        checkout = Path(folder)
        copy_checkout(checkout)
        if not plant(planted, checkout):
            return Result(planted, None, _STALE, 0.0)
        sets = {"gate": GATE} | ({"full": ("-m", "full")} if full else {})
        for name, options in sets.items():
            if (test := first_failure(checkout, planted.tests, options)) is not None:
                return Result(planted, name, test, time.monotonic() - started)
    return Result(planted, None, "", time.monotonic() - started)


def as_page(results: Sequence[Result]) -> str:
    """Return the table of results as Markdown."""
    gate = sum(result.caught_in == "gate" for result in results)
    full = gate + sum(result.caught_in == "full" for result in results)
    lines = [
        "# Planted breaks",
        "",
        f"{len(results)} faults were planted one at a time. The gate catches {gate}, the full set {full}"
        f"{f' ({gate / full:.0%})' if full else ''}. Repeat it with `python -m tests.breaks --full --write`.",
        "",
        "| # | broken behavior | file | caught in | first failed test |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        row = result.planted
        test = result.test.replace("|", "\\|")
        lines.append(f"| {row.number} | {row.behavior} | `{row.file}` | {result.caught_in or 'none'} | `{test}` |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Return exit code 0 if the gate catches all breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaks", description="Measure the gate by planted breaks.")
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="numbers of rows; default: all")
    parser.add_argument(
        "--full", action="store_true", help="run tests of the full set for breaks that the gate does not catch"
    )
    parser.add_argument("--jobs", type=int, default=2, help="breaks at the same time (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    table = [row for row in read_table() if not options.rows or row.number in options.rows]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda row: try_break(row, full=options.full), table):
            outcome = (
                f"caught in the {'gate' if result.caught_in == 'gate' else 'full set'} by"
                if result.caught_in
                else "NOT CAUGHT"
            )
            print(
                f"{result.planted.number}. {result.planted.behavior}: {outcome} {result.test} ({result.seconds:.0f} s)",
                flush=True,
            )
            results.append(result)
    if options.write:
        RESULTS.write_text(as_page(results))
    return 0 if all(result.caught_in == "gate" for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
