"""`python -m rlrun.tracking.worker --config run.json --tracker wandb`: sends the run to one tracker.

The worker may hang, crash or be killed at any time. The sink then starts another one, which continues after the records that the tracker
has kept.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.run import RunConfig
from rlrun.config.models.tracking import TRACKERS
from rlrun.protocol.files.durable import make_folder
from rlrun.runtime import exit_codes, redact
from rlrun.runtime.ending import Ending, on_sigterm
from rlrun.runtime.printable import printable
from rlrun.runtime.processes import refuse_inspection
from rlrun.tracking.backends import make_tracker
from rlrun.tracking.backends.wandb_run import KEY_VARIABLE
from rlrun.tracking.outgoing import Outgoing
from rlrun.tracking.record import Mark, Record, TrackedRun, Tracker, TrackerError
from rlrun.tracking.sent import Sent
from rlrun.tracking.source import Source

BATCH = 32
"""Largest number of records between two confirmations."""
POLL_SECONDS = 1.0
ERROR_MARK = "error: "
"""Prefix of the worker's error message. Libraries may print other lines, even after it."""


def _take_lock(path: Path) -> BinaryIO:
    """Take the right to send a run to a tracker. It is held until the file is closed.

    Raises:
        TrackerError: another process has it, such as a worker whose sink was killed.
    """
    make_folder(path.parent)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrackerError("another process already sends this run") from None
    return file


def tracked_run(config: RunConfig) -> TrackedRun:
    """Return the identity of a run for trackers."""
    own = config.trainer
    document = config.model_dump(mode="json", exclude={"tracking"})
    return TrackedRun(own.uid, own.name, Path(own.output_dir), document, own.max_steps)


def _error_line(error: object, environ: Mapping[str, str]) -> str:
    """Return the worker's error message without secrets: a library's error may contain addresses and headers of requests."""
    return f"{ERROR_MARK}{printable(redact.redact_text(str(error), redact.known_secrets(environ)))}"


def feed_tracker(
    tracker: Tracker,
    run: TrackedRun,
    sent: Sent,
    source: Callable[[Sequence[Mark]], Source],
    clean: Callable[[Record], Record] = lambda record: record,
    *,
    stop: Ending,
    pulse: Callable[[], None],
) -> None:
    """Send records of the volume until `stop` is set and no record is left.

    Args:
        tracker: tracker to send to.
        run: identity of the run.
        sent: journal of the tracker.
        source: function that creates the reader of the records after those that the tracker has kept.
        clean: function that removes secrets from a record.
        stop: event that is set after the last record was written.
        pulse: function that is called after each progress.
    """
    sent.cut(tracker.open(run, sent.marks[:], sent.confirmed))
    reader = source(sent.marks)
    last = sent.marks[-1].step if sent.marks else 0
    while True:
        pulse()
        stopping = stop.is_set()  # checked before reading, so that records written before the signal are still read
        records = reader.records()
        found = False
        while batch := list(islice(records, BATCH)):
            found, first = True, len(sent.marks)
            # The marks are written first: after a kill, the journal contains every record that may have been sent.
            sent.add([record.mark for record in batch])
            for number, record in enumerate(batch, first):
                tracker.log(number, clean(record))
                pulse()
            tracker.flush()
            sent.confirm()
            last = batch[-1].mark.step
        if stopping and not found:
            break
        if not found:
            stop.wait(POLL_SECONDS)
    tracker.close(complete=last >= run.max_steps)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the worker and return the exit code: `CONFIGURATION` if a restart is useless."""
    refuse_inspection()
    environ = dict(environ)
    os.environ.pop(KEY_VARIABLE, None)  # otherwise a library's own process would show it to all processes of this user
    parser = argparse.ArgumentParser("rlrun.tracking.worker")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tracker", choices=TRACKERS, required=True)
    parser.add_argument("--pulse", type=int, help="file descriptor that gets a byte after each progress")
    parser.add_argument("--once", action="store_true", help="send all existing records, then end")
    options = parser.parse_args(argv)
    stop = Ending()
    if options.once:
        stop.set()

    on_sigterm(stop.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def pulse() -> None:
        if options.pulse is not None:
            with suppress(BlockingIOError):
                os.write(options.pulse, b".")

    pulse()
    try:
        config = load_file(RunConfig, options.config)
        if config.tracking is None:
            return exit_codes.OK
        outgoing = Outgoing(environ)
        run = outgoing.clean_run(tracked_run(config))
        lock = _take_lock(run.folder / f"{options.tracker}.lock")
        sent = Sent(run.folder / f"{options.tracker}.sent")
        tracker = make_tracker(options.tracker, config.tracking, environ)
        feed_tracker(
            tracker, run, sent, lambda marks: Source(config, marks), outgoing.clean_record, stop=stop, pulse=pulse
        )
        lock.close()
    except (TrackerError, ConfigError, OSError) as error:
        print(_error_line(error, environ), file=sys.stderr)
        wrong = isinstance(error, ConfigError) or (isinstance(error, TrackerError) and error.permanent)
        return exit_codes.CONFIGURATION if wrong else exit_codes.FAILURE
    except Exception as error:  # an error of a library: report it in one line, and let the next worker retry
        print(_error_line(f"{type(error).__name__}: {error}", environ), file=sys.stderr)
        return exit_codes.FAILURE
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
