"""torchrun with the exit code of the first failed rank: `python -m rlrun.trainer.ranks.torchrun <torchrun's arguments>`.

The original torchrun always exits with 1 after a failure, and prints a table of failures after the relevant message. The launcher of the
group needs the original exit code to decide on a restart (`runtime.exit_codes`). A rank that is ended by a signal cannot report it, while
its peers report lost connections; therefore this program writes the report of that rank.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rlrun.diagnostics import heap, stacks
from rlrun.protocol.files.failures import RoleError, telling_lines, write_error
from rlrun.trainer.ranks.launch import crash_file, log_folder

_SIGNALLED = 128
_SAME_LOOK_SECONDS = 1
"""Seconds within which torchrun detects a crashed rank and its failing peers; its timestamps are whole seconds. Ranks that torchrun kills
end later, after its `--shutdown-timeout`.
"""


class Failure(Protocol):
    """torchrun's record of a failed rank."""

    exitcode: int
    """Exit code, or -n for signal n."""
    timestamp: int
    """Time of detection, in seconds since the epoch."""


def first_failure(failures: Mapping[int, Failure]) -> tuple[int, Failure]:
    """Return the failure that caused the others: a crash by a signal within the same poll of torchrun, otherwise the earliest.

    Args:
        failures: failures by rank, in the order of detection. SIGTERM comes from torchrun itself, which ends the remaining ranks.

    Returns:
        Rank, and its failure.
    """
    begin = min(failure.timestamp for failure in failures.values())

    def order_of(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        ended = failure.exitcode == -signal.SIGTERM
        crashed = failure.exitcode < 0 and not ended and failure.timestamp <= begin + _SAME_LOOK_SECONDS
        return not crashed, ended, failure.timestamp

    rank = min(failures, key=order_of)
    return rank, failures[rank]


def last_word(rank: int, code: int, dump: str) -> RoleError:
    """Return the error of a rank that was ended by a signal.

    Args:
        rank: number of the rank.
        code: -n for signal n.
        dump: output of faulthandler, or an empty string.
    """
    head = f"rank {rank} {stacks.describe_end(code)}"
    lines = telling_lines(dump)
    return RoleError("\n".join([f"{head}; its last lines:", *lines]) if lines else head, _SIGNALLED - code)


def main(argv: Sequence[str]) -> int:
    """Run torchrun and return the exit code; 128 + n if signal n ended a rank or this process."""
    stacks.answer_requests()
    with heap.without_collector():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    from rlrun.transport.links import is_loopback, stay_on_loopback

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    options = parse_args(list(argv))
    if is_loopback(options.master_addr):
        stay_on_loopback(os.environ)
    with tempfile.TemporaryDirectory(prefix="rlrun-crashes-", ignore_cleanup_errors=True) as crashes:
        os.environ[stacks.FOLDER_VARIABLE] = crashes
        try:
            run(options)
        except ChildFailedError as error:
            rank, failure = first_failure(error.failures)
            if failure.exitcode > 0:
                return failure.exitcode
            dump = stacks.crash_report(Path(crashes), crash_file(rank))
            if dump:  # the log gets the complete dump, the message only some lines
                print(f"trainer: crash dump of rank {rank}:\n{dump}", file=sys.stderr, flush=True)
            _report_end(last_word(rank, failure.exitcode, dump), options)
            return _SIGNALLED - failure.exitcode
        except SignalException as error:
            return _SIGNALLED + int(error.sigval)
    return 0


def _report_end(error: RoleError, options: object) -> None:
    print(f"trainer: {error}", file=sys.stderr, flush=True)
    with suppress(RoleError):  # the arguments are invalid, so no rank has started
        write_error(log_folder(_rank_arguments(options)), "trainer", error)


def _rank_arguments(options: object) -> list[str]:
    """Return the arguments of each rank's program, which follow the module name in `python -P -m MODULE ARGUMENTS`."""
    words = list(getattr(options, "training_script_args", ()))
    return words[words.index("-m") + 2 :] if "-m" in words else words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
