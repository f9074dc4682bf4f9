"""The page of symptoms has an entry for every reason that is no good news: what you see, why, what the operator does, what you may do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rlrun.api.lifecycle import FailureReason
from rlrun_operator.status import failure_reasons, reasons

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
GOOD_NEWS = {
    reasons.VALID,
    reasons.HOST_READY,
    reasons.ADMITTED,
    reasons.ROOM_FOUND,
    reasons.NOT_QUEUED,  # of a run that is suspended, which says why
    reasons.CLAIM_BOUND,
    reasons.ALL_SCHEDULED,
    reasons.ALL_READY,
    reasons.TRAINING,
    reasons.ANSWERING,
    reasons.CHECKPOINTS_COMPLETE,
    reasons.BUDGET_LEFT,
    reasons.NOT_RESTARTING,
    reasons.RESTARTING,  # of Progressing, while Restarting itself says why
    reasons.NOT_SUSPENDED,
    reasons.COMPLETED,
    reasons.NOT_FAILED,
    reasons.RUN_OVER,
    reasons.ATTEMPT_STARTED,
    reasons.RESUMED,
    reasons.ENGINES_AVAILABLE,
    reasons.INFERENCE_SCALED,
    reasons.SPOT_ENGINES_READY,
    reasons.TRAINER_RESIZED,
    reasons.HEARTBEAT_RESUMED,
    reasons.KEY_ROTATION_REQUESTED,
    reasons.RESTART_REQUESTED,
}
HEAD = ["symptom", "cause", "operator", "fix"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def entries() -> list[list[str]]:
    """Rows of the tables of four parts."""
    rows, inside = [], False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
        elif cells(line) == HEAD:
            inside = True
        elif inside and not line.startswith("|---"):
            rows.append(cells(line))
    return rows


SEEN = {word for row in entries() for word in re.findall(r"`([A-Za-z]+)`", row[0])}
WORDS = {*reasons.CONDITION_REASONS, *reasons.EVENT_REASONS, *failure_reasons.FAILURE_REASONS, *get_args(FailureReason)}


@pytest.mark.parametrize("reason", sorted(WORDS - GOOD_NEWS))
def test_a_reason_has_an_entry(reason: str) -> None:
    assert reason in SEEN, (
        f"{PAGE.name} has no row about `{reason}`; reasons that ask nothing of a reader are in GOOD_NEWS"
    )


def test_good_news_are_reasons() -> None:
    assert GOOD_NEWS <= WORDS


def test_an_entry_has_its_four_parts() -> None:
    assert [row for row in entries() if len(row) != len(HEAD) or not all(row)] == []


def test_the_page_links_to_headings_that_it_has() -> None:
    text = PAGE.read_text()
    headings = [
        re.sub(r"[^a-z0-9 _-]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    ]
    assert [name for name in re.findall(r"\]\(#([^)]+)\)", text) if name not in headings] == []
