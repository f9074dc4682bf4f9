"""Trackio tracker: a database in `tracking/trackio` of the run's folder, which `trackio show` reads and `trackio sync` uploads.

The library writes in the background without confirmation, so its rows are counted at the next start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from rlrun.config.models.trackers import TrackioConfig
from rlrun.protocol.files.durable import make_folder
from rlrun.tracking.backends.tracker_packages import missing_package
from rlrun.tracking.tracker_records import Mark, Record, SampleRow, TrackedRun, TrackerError

DEFAULT_PROJECT = "rlrun"


class TrackioTracker:
    """A run in Trackio.

    Args:
        config: configuration of the tracker.
    """

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._project = config.project or DEFAULT_PROJECT
        self._trackio: Any = None
        self._run: Any = None

    def open(self, run: TrackedRun, sent: Sequence[Mark], confirmed: int) -> int:
        """See `Tracker.open`."""
        folder = run.folder / "trackio"
        make_folder(folder)
        os.environ["TRACKIO_DIR"] = str(folder)  # the library reads it at its import
        try:
            import trackio
            from trackio.sqlite_storage import SQLiteStorage
        except ImportError as error:
            raise TrackerError(missing_package("trackio", error), permanent=True) from None
        self._trackio = trackio
        name = self._config.name or run.name
        rows = len(SQLiteStorage.get_logs(self._project, name))
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=self._project, name=name, config=dict(run.config), resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        return min(rows, len(sent))

    def log(self, number: int, record: Record) -> None:
        """See `Tracker.log`."""
        trackio = self._trackio
        row: dict[str, object] = dict(record.scalars)
        row |= {name: trackio.Histogram(list(values)) for name, values in record.histograms.items()}
        for name, rows in record.samples.items():
            row[name] = trackio.Table(columns=list(SampleRow.COLUMNS), data=[r.row_values() for r in rows])
        self._run.log(row, step=record.mark.step)

    def flush(self) -> None:
        """See `Tracker.flush`. The library's thread has the records; the next start detects lost ones."""

    def close(self, *, complete: bool) -> None:
        """See `Tracker.close`."""
        self._run.finish()
