"""Weights & Biases tracker: one run over all attempts, and the reader of its transaction log.

The log has blocks of 32 KiB in LevelDB's log format with the library's protobuf messages. The library has a writer and a synchronizer, but
no public reader. After a kill the end of the file may be torn; reading stops there.

The run's history has one row per record, numbered from 0. Online, the library's own process sends in the background and retries, so the
server's number of rows is read at the next start. Offline, the rows are in transaction logs on the volume, one per start, and are counted
there. In both modes a kill loses and repeats no row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlrun.config.models.trackers import WandbConfig
from rlrun.protocol.files.durable import make_folder
from rlrun.tracking.backends.tracker_packages import missing_package
from rlrun.tracking.enabled import is_offline
from rlrun.tracking.tracker_records import Mark, Record, SampleRow, TrackedRun, TrackerError

_BLOCK = 32768
_PREAMBLE = 7
"""Size of the format's name and version at the start of the file, in bytes."""
_HEADER = 7
"""Size of a fragment's header in bytes: checksum (4), length (2), type (1)."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_messages(content: bytes) -> Iterator[bytes]:
    """Yield the complete records of a log, in order."""
    position, parts = _PREAMBLE, list[bytes]()
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # padding
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind, end = content[position + 6], position + _HEADER + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or end > len(content):
            return
        parts.append(content[position + _HEADER : end])
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []
        position = end


def read_history(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the rows of a run's history in a log: number, and values by name."""
    from wandb.proto import wandb_internal_pb2

    for message in read_messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield int(record.history.step.num), row


def rows_of(paths: Iterable[Path], *, limit: int) -> int:
    """Return the number of rows that the logs contain from row 0 without a gap, at most `limit`."""
    if not limit:
        return 0
    found = {number for path in paths for number, _ in read_history(path)}
    return next((number for number in range(limit) if number not in found), limit)


DEFAULT_PROJECT = "rlrun"
KEY_VARIABLE = "WANDB_API_KEY"
_RETRIES = 1_000_000
"""Retries of the library's process, which must never give up."""
INIT_SECONDS = 60.0
"""Time limit for the server's first answer. Afterwards another worker retries."""
_REFUSED = ("API key", "api_key", "401", "403", "not logged in", "permission denied")


class WandbTracker:
    """A run in W&B.

    Args:
        config: configuration of the tracker.
        environ: environment variables with the library's settings, for fields that are not set.
    """

    def __init__(self, config: WandbConfig, environ: Mapping[str, str]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TrackerError(missing_package("wandb", error), permanent=True) from None
        self._wandb: Any = wandb
        self._config, self._environ = config, environ
        self._offline = is_offline(config, environ)
        self._run: Any = None
        self._base = 0
        """Row of the first record."""

    def open(self, run: TrackedRun, sent: Sequence[Mark], confirmed: int) -> int:
        """See `Tracker.open`."""
        wandb, config, folder = self._wandb, self._config, run.folder
        make_folder(folder)
        kept = rows_of(logs_on_disk(folder), limit=len(sent)) if self._offline else 0
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False, init_timeout=INIT_SECONDS,
            x_disable_stats=True, x_save_requirements=False, x_file_stream_retry_max=_RETRIES, x_file_transfer_retry_max=_RETRIES,
            **self._server_settings(),
        )  # fmt: skip
        try:
            self._run = wandb.init(
                id=run.uid, resume=None if self._offline else "allow", mode="offline" if self._offline else "online",
                dir=str(folder), project=config.project or self._environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
                entity=config.entity, name=config.name or self._environ.get("WANDB_NAME") or run.name, group=config.group,
                tags=list(config.tags) or None, config=dict(run.config), allow_val_change=True, settings=settings,
            )  # fmt: skip
        except Exception as error:
            raise TrackerError(_error_reason(error)) from None
        self._run.define_metric("*", step_metric="step")
        if not self._offline:
            rows = int(self._run.starting_step)
            kept = min(rows, len(sent))
            self._base = rows - kept
        return kept

    def _server_settings(self) -> dict[str, str]:
        """Server and key, if they differ from the library's defaults."""
        given = {
            "base_url": self._config.base_url,
            "api_key": None if self._offline else self._environ.get(KEY_VARIABLE),
        }
        return {name: value for name, value in given.items() if value}

    def log(self, number: int, record: Record) -> None:
        """See `Tracker.log`."""
        wandb = self._wandb
        row: dict[str, object] = {"step": record.mark.step, **record.scalars}
        row |= {name: wandb.Histogram(list(values)) for name, values in record.histograms.items()}
        for name, rows in record.samples.items():
            row[name] = wandb.Table(
                columns=["step", *SampleRow.COLUMNS], data=[[record.mark.step, *r.row_values()] for r in rows]
            )
        self._run.log(row, step=self._base + number)

    def flush(self) -> None:
        """See `Tracker.flush`. The library's process has the records; the next start detects lost ones."""

    def close(self, *, complete: bool) -> None:
        """See `Tracker.close`. Returns after everything is uploaded."""
        self._run.finish(exit_code=0 if complete else 1)


def _error_reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    fix = (
        "; set WANDB_API_KEY (in a cluster: tracking.wandb.secretRef), or tracking.wandb.offline: true"
        if any(sign in text for sign in _REFUSED)
        else ""
    )
    return f"W&B rejected the run: {text}{fix}"


def logs_on_disk(folder: Path) -> Iterable[Path]:
    """Return the transaction logs of a run's offline starts, in order of time."""
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
