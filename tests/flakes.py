"""The list of flaky tests, `tests/flakes.md`: tests that failed next to other tiers and passed in isolation.

Such a test does not fail a run, but it has a row in the list until its cause is found. The list must stay short: `make
test` fails if it has more than five open rows, or if a row has been open for more than a week.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

PATH = Path(__file__).with_name("flakes.md")
OPEN_HEADING = "## Open"
MAX_OPEN = 5
MAX_AGE = timedelta(days=7)
_ROW = re.compile(r"^\|\s*(\d{4}-\d{2}-\d{2})\s*\|\s*`(.+)`\s*\|")


@dataclass(frozen=True)
class Flake:
    """A test that failed next to other tiers and passed twice in isolation.

    Attributes:
        seed: argument of `--seed` that draws the same examples again.
        seconds: duration of the failed phase.
    """

    test: str
    tier: str
    seed: int
    seconds: float

    def row(self, today: date) -> str:
        """Return the row of the list. A person replaces the last column with the suspected cause."""
        test = self.test.replace("|", "\\|")
        return f"| {today} | `{test}` | {self.tier} | {self.seed} | {self.seconds:.1f} s | not examined |"


def open_rows(text: str) -> list[tuple[date, str]]:
    """Return date and test of each open row."""
    _, _, rest = text.partition(OPEN_HEADING + "\n")
    section, _, _ = rest.partition("\n## ")
    rows = (_ROW.match(line) for line in section.splitlines())
    return [(date.fromisoformat(row[1]), row[2].replace("\\|", "|")) for row in rows if row]


def problems(text: str, today: date, new: Sequence[Flake] = ()) -> list[str]:
    """Return why the list makes a run fail; empty if it does not.

    Args:
        text: content of the list.
        today: date of the run.
        new: flaky tests of the run that are not yet in the list.
    """
    rows = open_rows(text)
    tests = {test for _, test in rows} | {flake.test for flake in new}
    found = [
        f"{PATH.name}: {test} has been open since {day}, longer than {MAX_AGE.days} days: find the cause and repair it"
        for day, test in rows
        if today - day > MAX_AGE
    ]
    if len(tests) > MAX_OPEN:
        found.append(
            f"{PATH.name}: {len(tests)} flaky tests are open, at most {MAX_OPEN} may be: repair some of them first"
        )
    return found


def add_rows(text: str, new: Sequence[Flake], today: date) -> str:
    """Return the list with a row for each new flaky test that has no open row yet."""
    known = {test for _, test in open_rows(text)}
    rows = [flake.row(today) for flake in new if flake.test not in known]
    if not rows:
        return text
    before, heading, rest = text.partition(OPEN_HEADING + "\n")
    section, separator, after = rest.partition("\n## ")
    return before + heading + section.rstrip("\n") + "\n" + "\n".join(rows) + "\n" + separator + after
