"""Cause among the failures of a group of ranks, and reports of ranks without an error message."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlrun.trainer.ranks.torchrun import first_failure, last_word


@dataclass
class Ended:
    """Failure as torchrun reports it."""

    exitcode: int
    timestamp: int = 100


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ({0: Ended(1), 1: Ended(-11)}, 1),  # detected together: the peer lost its connection to the crashed rank
        ({0: Ended(1, 100), 1: Ended(-11, 101)}, 1),  # detected together, across the boundary of a second
        ({0: Ended(1), 1: Ended(-9), 2: Ended(-15)}, 1),
        ({0: Ended(-15), 1: Ended(65), 2: Ended(-15)}, 1),  # torchrun itself ended the others
        ({0: Ended(-9, 140), 1: Ended(65, 100)}, 1),  # torchrun killed the rank that did not end
        ({0: Ended(65, 100), 1: Ended(1, 101)}, 0),
        ({3: Ended(1), 2: Ended(1)}, 3),
    ],
)
def test_first_failure_is_the_cause(failures: dict[int, Ended], rank: int) -> None:
    assert first_failure(failures) == (rank, failures[rank])


def test_rank_without_message_is_reported_by_signal() -> None:
    error = last_word(3, -9, "")
    assert (str(error), error.code, error.follows) == (
        "rank 3 was ended by SIGKILL (often for lack of memory)",
        137,
        False,
    )


def test_crashed_rank_is_reported_with_its_own_frames() -> None:
    frames = ["Current thread 0x00007f (most recent call first):", '  File "loss.py", line 3 in crashes']
    dump = "\n".join(["Fatal Python error: Segmentation fault", "", *frames, ""])
    error = last_word(1, -11, dump)
    assert str(error).splitlines() == [
        "rank 1 was ended by SIGSEGV; its last lines:",
        "Fatal Python error: Segmentation fault",
        *frames,
    ]
    assert error.code == 139
