"""Every reason that reports a problem has a row on the troubleshooting page."""

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
    reasons.NOT_QUEUED,  # a suspended run, which has its own reason
    reasons.CLAIM_BOUND,
    reasons.ALL_SCHEDULED,
    reasons.ALL_READY,
    reasons.TRAINING,
    reasons.ANSWERING,
    reasons.CHECKPOINTS_COMPLETE,
    reasons.BUDGET_LEFT,
    reasons.NOT_RESTARTING,
    reasons.RESTARTING,  # a reason of Progressing; Restarting has its own row
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


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def read_entries() -> list[list[str]]:
    """Rows of the tables with four columns."""
    rows, inside = [], False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
        elif split_cells(line) == HEAD:
            inside = True
        elif inside and not line.startswith("|---"):
            rows.append(split_cells(line))
    return rows


SEEN = {word for row in read_entries() for word in re.findall(r"`([A-Za-z]+)`", row[0])}
WORDS = {*reasons.CONDITION_REASONS, *reasons.EVENT_REASONS, *failure_reasons.FAILURE_REASONS, *get_args(FailureReason)}


@pytest.mark.parametrize("reason", sorted(WORDS - GOOD_NEWS))
def test_problem_reason_has_a_troubleshooting_row(reason: str) -> None:
    assert reason in SEEN, (
        f"{PAGE.name} has no row about `{reason}`; reasons that ask nothing of a reader are in GOOD_NEWS"
    )


def test_good_news_reasons_exist() -> None:
    assert GOOD_NEWS <= WORDS


def test_troubleshooting_row_has_four_cells() -> None:
    assert [row for row in read_entries() if len(row) != len(HEAD) or not all(row)] == []


def test_troubleshooting_links_point_to_existing_headings() -> None:
    text = PAGE.read_text()
    headings = [
        re.sub(r"[^a-z0-9 _-]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    ]
    assert [name for name in re.findall(r"\]\(#([^)]+)\)", text) if name not in headings] == []
