"""Plugin for pytest: append one JSON line per failed test to the file given by `--outcomes`.

The runner of tiers reads the file to run failed tests again in isolation. Pytest's short summary is not a reliable
source: it contains no durations, and a test that prints similar lines changes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests import fixture_failures


@dataclass(frozen=True)
class Failure:
    """A test that failed, or that could not run.

    Attributes:
        test: node id.
        seconds: duration of the failed phase.
        dependents: node ids of tests that were skipped because a shared fixture failed in this test.
    """

    test: str
    seconds: float
    dependents: tuple[str, ...] = ()


class OutcomeLog:
    """Writes a line when a test fails, and a line when a test is skipped because of another test's failure."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._append(asdict(Failure(report.nodeid, round(report.duration, 2))))
        elif report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if (cause := fixture_failures.CAUSES.get(reason)) is not None:
                self._append({"skipped": report.nodeid, "because_of": cause})

    def _append(self, line: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file that receives one JSON line per failed test")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(OutcomeLog(path))


def read_failures(path: Path) -> list[Failure]:
    """Return the failures of a log in order, one per test; an absent file holds none."""
    failures: dict[str, Failure] = {}
    skipped: dict[str, list[str]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        if "skipped" in line:
            skipped.setdefault(line["because_of"], []).append(line["skipped"])
        else:
            failures.setdefault(line["test"], Failure(line["test"], line["seconds"]))
    return [Failure(each.test, each.seconds, tuple(skipped.get(each.test, ()))) for each in failures.values()]
