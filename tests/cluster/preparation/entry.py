"""The outermost function of a command: every error that a user can meet is one message."""

import errno
import signal
import sys
from collections.abc import Callable

from tests.cluster.cache import full_disk_advice
from tests.cluster.errors import ClusterError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell reports it."""
RESUME = "interrupted: the same command resumes and keeps all finished programs, packages and images"
FULL = (errno.ENOSPC, errno.EDQUOT)


def report_errors(command: Callable[[], int], *, interrupted: str = "") -> int:
    """Run a command. SIGTERM, with which CI cancels a job, ends it as Ctrl-C does.

    Args:
        interrupted: message after such a signal.

    Returns:
        Its exit status; 1 after an error, with a message on standard error, and `INTERRUPTED` after a signal.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return command()
    except ClusterError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in FULL:
            raise
        message = f"{error.filename or error.strerror}: {full_disk_advice()}"
    except KeyboardInterrupt:
        if interrupted:
            print(interrupted, file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"error: {message}", file=sys.stderr)
    return 1
