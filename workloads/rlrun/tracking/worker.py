"""`python -m rlrun.tracking.worker --config run.json --tracker wandb`: sends the run to one tracker.

Data for trackers passes a filter that removes secrets and characters that change the direction of text.

The journal of sent records is `tracking/<tracker>.sent` on the volume. The mark of a record is written as `step attempt` before the record
is sent. After the first `n` records have left this machine, or are in durable files, a line `= n` is added. Therefore the journal shows
after any kill which records may be missing.

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
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.run_config import RunConfig
from rlrun.config.models.trackers import TRACKERS
from rlrun.protocol.files.durable import make_folder, write_bytes
from rlrun.runtime import exit_codes, redact
from rlrun.runtime.printable import escape_controls, printable_document
from rlrun.runtime.processes import Ending, on_sigterm, refuse_inspection
from rlrun.tracking.backends import make_tracker
from rlrun.tracking.backends.wandb_run import KEY_VARIABLE
from rlrun.tracking.record_source import Source
from rlrun.tracking.tracker_records import Mark, Record, SampleRow, TrackedRun, Tracker, TrackerError


class Outgoing:
    """Filter between the volume and a tracker.

    Args:
        environment: environment variables of the worker. The values of its secret variables are known secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known = redact.known_secrets(environment)

    def clean_run(self, run: TrackedRun) -> TrackedRun:
        """Return the run without secrets in its configuration. Values of free form that may be secrets are hidden."""
        config = printable_document(redact.redact_configuration(run.config, self._known))
        assert isinstance(config, dict)
        return replace(run, name=escape_controls(run.name), config=config)

    def clean_record(self, record: Record) -> Record:
        """Return the record without secrets in names of metrics, names of tables and texts of samples."""
        samples = {
            self._clean_text(name): [self._clean_sample(row) for row in rows] for name, rows in record.samples.items()
        }
        return replace(
            record,
            scalars={self._clean_text(name): value for name, value in record.scalars.items()},
            histograms={self._clean_text(name): values for name, values in record.histograms.items()},
            samples=samples,
        )

    def _clean_sample(self, row: SampleRow) -> SampleRow:
        return replace(
            row,
            environment=self._clean_text(row.environment),
            task=self._clean_text(row.task),
            prompt=self._clean_text(row.prompt),
            completion=self._clean_text(row.completion),
        )

    def _clean_text(self, content: str) -> str:
        """Clean a text of a model or an environment. Only certain secrets are removed."""
        return escape_controls(redact.redact_certain(content, self._known), lines=True)


class Sent:
    """Journal of one tracker. Only the tracker's worker writes it.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.marks, self.confirmed = read_sent(path)

    def keep_first(self, kept: int) -> None:
        """Keep only the first `kept` records, which are confirmed. A torn last line is removed, too."""
        del self.marks[kept:]
        self.confirmed = len(self.marks)
        write_bytes(self._path, ("".join(map(_sent_line, self.marks)) + f"= {self.confirmed}\n").encode())

    def add(self, marks: Sequence[Mark]) -> None:
        """Write the marks of records that will be sent next. The file is durable afterwards."""
        self._append_text("".join(map(_sent_line, marks)))
        self.marks += marks

    def confirm_all(self) -> None:
        """Record that all records so far have left this process."""
        self.confirmed = len(self.marks)
        self._append_text(f"= {self.confirmed}\n")

    def _append_text(self, text: str) -> None:
        make_folder(self._path.parent)
        with self._path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


def _sent_line(mark: Mark) -> str:
    return f"{mark.step} {mark.attempt}\n"


def read_sent(path: Path) -> tuple[list[Mark], int]:
    """Return the marks of a journal in order, and the number of confirmed ones. Reading stops at the first incomplete line."""
    marks: list[Mark] = []
    confirmed = 0
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return marks, confirmed
    for line in text.splitlines(keepends=True):
        words = line.split()
        if not line.endswith("\n") or len(words) != 2 or not words[1].isdecimal():
            break
        if words[0] == "=":
            confirmed = min(int(words[1]), len(marks))
        elif words[0].isdecimal():
            marks.append(Mark(int(words[0]), int(words[1])))
        else:
            break
    return marks, confirmed


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
    return f"{ERROR_MARK}{escape_controls(redact.redact_text(str(error), redact.known_secrets(environ)))}"


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
    sent.keep_first(tracker.open(run, sent.marks[:], sent.confirmed))
    reader = source(sent.marks)
    last = sent.marks[-1].step if sent.marks else 0
    while True:
        pulse()
        stopping = stop.is_set()  # checked before reading, so that records written before the signal are still read
        records = reader.read_records()
        found = False
        while batch := list(islice(records, BATCH)):
            found, first = True, len(sent.marks)
            # The marks are written first: after a kill, the journal contains every record that may have been sent.
            sent.add([record.mark for record in batch])
            for number, record in enumerate(batch, first):
                tracker.log(number, clean(record))
                pulse()
            tracker.flush()
            sent.confirm_all()
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
        # Before the journal is read: another worker with the lock may still write to it.
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
