"""torchrun, whose exit code is that of the first rank that failed: `python -m rlrun.trainer.ranks.torchrun <torchrun's arguments>`.

torchrun itself ends with 1 whatever happened, and prints a table of failures after the message that a person looks for. A launcher of the
group needs to know whether that can help (`runtime.exit_codes`). A rank that a signal ended says nothing, while its peers report that they
lost a connection: its last word is written here, in place of theirs.
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

from rlrun.diagnostics import crash, heap, stacks
from rlrun.protocol.files.failures import RoleError, telling_lines, write_error
from rlrun.trainer.ranks.rank_arguments import crash_file, log_folder

_SIGNALLED = 128
_SAME_LOOK_SECONDS = 1
"""torchrun counts in whole seconds, and finds a rank that crashed and the peers that lost it in one look. Those that it kills itself end
after its `--shutdown-timeout`, which is longer."""


class Failure(Protocol):
    """torchrun's record of a rank that failed."""

    exitcode: int
    """-n for signal n."""
    timestamp: int
    """Seconds since the epoch."""


def first_failure(failures: Mapping[int, Failure]) -> tuple[int, Failure]:
    """The failure that the others follow from: one by a signal before the exits that torchrun found with it, else the earliest.

    Args:
        failures: by rank, in the order in which torchrun found them. SIGTERM is its own, to the ranks that were left.

    Returns:
        The rank, and its failure.
    """
    begin = min(failure.timestamp for failure in failures.values())

    def place(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        ended = failure.exitcode == -signal.SIGTERM
        crashed = failure.exitcode < 0 and not ended and failure.timestamp <= begin + _SAME_LOOK_SECONDS
        return not crashed, ended, failure.timestamp

    rank = min(failures, key=place)
    return rank, failures[rank]


def last_word(rank: int, code: int, dump: str) -> RoleError:
    """Report on behalf of a rank that a signal ended.

    Args:
        rank: which one.
        code: -n for signal n.
        dump: what faulthandler wrote for it, if it did.
    """
    head = f"rank {rank} {crash.describe_end(code)}"
    lines = telling_lines(dump)
    return RoleError("\n".join([f"{head}; its last lines:", *lines]) if lines else head, _SIGNALLED - code)


def main(argv: Sequence[str]) -> int:
    """Run torchrun; returns the exit code: 128 + n when signal n ended a rank or this process."""
    stacks.listen()
    with heap.without_collector():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    from rlrun.transport.loopback import is_loopback, stay_on_loopback

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    options = parse_args(list(argv))
    if is_loopback(options.master_addr):
        stay_on_loopback(os.environ)
    with tempfile.TemporaryDirectory(prefix="rlrun-crashes-", ignore_cleanup_errors=True) as crashes:
        os.environ[crash.FOLDER_VARIABLE] = crashes
        try:
            run(options)
        except ChildFailedError as error:
            rank, failure = first_failure(error.failures)
            if failure.exitcode > 0:
                return failure.exitcode
            dump = crash.crash_report(Path(crashes), crash_file(rank))
            if dump:  # whole in the log: the message has room for some lines
                print(f"trainer: rank {rank} wrote as it crashed:\n{dump}", file=sys.stderr, flush=True)
            _report_end(last_word(rank, failure.exitcode, dump), options)
            return _SIGNALLED - failure.exitcode
        except SignalException as error:
            return _SIGNALLED + int(error.sigval)
    return 0


def _report_end(error: RoleError, options: object) -> None:
    print(f"trainer: {error}", file=sys.stderr, flush=True)
    with suppress(RoleError):  # the ranks would not have begun
        write_error(log_folder(_rank_arguments(options)), "trainer", error)


def _rank_arguments(options: object) -> list[str]:
    """Return the arguments of each rank's program: all after the module's name in `python -P -m MODULE ARGUMENTS`."""
    words = list(getattr(options, "training_script_args", ()))
    return words[words.index("-m") + 2 :] if "-m" in words else words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
