"""TensorBoard event files. This module writes the events itself, without a SummaryWriter, so that `flush` makes them durable (fsync).

Each worker process writes a new file. The file starts with a session start at the first step that was not flushed: TensorBoard then drops
the events of that step and of later ones in earlier files. Therefore a step that was sent twice, or trained again, appears once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from rlrun.protocol.files.durable import make_folder
from rlrun.tracking.backends.tracker_packages import missing_package
from rlrun.tracking.tracker_records import Mark, Record, SampleRow, TrackedRun, TrackerError

_BINS = 30
"""Number of bins of a histogram."""


class TensorBoardTracker:
    """Event files in `tracking/tensorboard` of the run's folder."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise TrackerError(missing_package("tensorboard", error), permanent=True) from None
        self._event, self._summary, self._tensor = event_pb2, summary_pb2, tensor_pb2
        self._shape, self._types, self._writer_of = tensor_shape_pb2, types_pb2, RecordWriter
        self._newest = -1

    def open(self, run: TrackedRun, sent: Sequence[Mark], confirmed: int) -> int:
        """See `Tracker.open`. The first `confirmed` records of `sent` were flushed, so they are in durable files."""
        folder = run.folder / "tensorboard"
        make_folder(folder)
        # TensorBoard reads the files of a folder in the order of their names. Clocks of nodes differ, so the names start with a number.
        number = 1 + sum(1 for _ in folder.glob("events.out.tfevents.*"))
        path = folder / f"events.out.tfevents.{number:010d}.{os.getpid()}.rlrun"
        self._file: BinaryIO = path.open("xb")
        self._writer = self._writer_of(self._file)
        # The first event of a file has the version of the format.
        self._write_event(self._event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._newest = sent[confirmed - 1].step if confirmed else -1
        self._begin_at(self._newest + 1)
        if not confirmed:
            text = "```json\n" + json.dumps(run.config, indent=1, sort_keys=True) + "\n```"
            self._put_values(0, time.time(), [self._text_summary("config", text)])
        self.flush()
        return confirmed

    def log(self, number: int, record: Record) -> None:
        """See `Tracker.log`."""
        step = record.mark.step
        if step <= self._newest:  # a later attempt trained this step again
            self._begin_at(step)
        self._newest = step
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in record.scalars.items()]
        for tag, found in record.histograms.items():
            values.append(self._summary.Summary.Value(tag=tag, histo=self._histogram_proto(found)))
        for tag, rows in record.samples.items():
            values.append(self._text_summary(tag, _markdown_table(rows)))
        self._put_values(step, record.time or time.time(), values)

    def flush(self) -> None:
        """See `Tracker.flush`."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, *, complete: bool) -> None:
        """See `Tracker.close`."""
        self.flush()
        self._file.close()

    def _begin_at(self, step: int) -> None:
        session = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write_event(self._event.Event(wall_time=time.time(), step=max(0, step), session_log=session))

    def _put_values(self, step: int, wall_time: float, values: Sequence[object]) -> None:
        self._write_event(
            self._event.Event(wall_time=wall_time, step=step, summary=self._summary.Summary(value=values))
        )

    def _write_event(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _histogram_proto(self, values: Sequence[float]) -> object:
        # All values may be equal.
        low, high = min(values), max(values)
        width = (high - low) / _BINS or 1.0
        counts = [0] * _BINS
        for value in values:
            counts[min(_BINS - 1, int((value - low) / width))] += 1
        return self._summary.HistogramProto(
            min=low,
            max=high,
            num=len(values),
            sum=sum(values),
            sum_squares=sum(value * value for value in values),
            bucket_limit=[low + width * (i + 1) for i in range(_BINS)],
            bucket=counts,
        )

    def _text_summary(self, tag: str, text: str) -> object:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        shape = self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=1)])
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        return self._summary.Summary.Value(
            tag=tag, metadata=self._summary.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )


def _markdown_table(rows: Sequence[SampleRow]) -> str:
    head = "|" + "|".join(SampleRow.COLUMNS) + "|\n|" + "---|" * len(SampleRow.COLUMNS) + "\n"
    return head + "".join("|" + "|".join(map(_table_cell, row.row_values())) + "|\n" for row in rows)


def _table_cell(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
