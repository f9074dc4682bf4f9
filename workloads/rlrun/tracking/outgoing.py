"""Runs and records as they leave for a tracker: without secrets, and without characters that turn the direction of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlrun.runtime import redact
from rlrun.runtime.printable import printable, printable_document
from rlrun.tracking.record import Record, SampleRow, TrackedRun


class Outgoing:
    """Filter between the volume and a tracker.

    Args:
        environment: variables of the worker; the values of its secret variables are known secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known = redact.known_secrets(environment)

    def clean_run(self, run: TrackedRun) -> TrackedRun:
        """Return a run whose configuration has no secret; values of free form that are not known to be harmless are hidden."""
        config = printable_document(redact.redact_configuration(run.config, self._known))
        assert isinstance(config, dict)
        return replace(run, name=printable(run.name), config=config)

    def clean_record(self, record: Record) -> Record:
        """Return a record without secrets: names of metrics and of tables, and texts of samples."""
        samples = {self._text(name): [self._sample(row) for row in rows] for name, rows in record.samples.items()}
        return replace(
            record,
            scalars={self._text(name): value for name, value in record.scalars.items()},
            histograms={self._text(name): values for name, values in record.histograms.items()},
            samples=samples,
        )

    def _sample(self, row: SampleRow) -> SampleRow:
        return replace(
            row,
            environment=self._text(row.environment),
            task=self._text(row.task),
            prompt=self._text(row.prompt),
            completion=self._text(row.completion),
        )

    def _text(self, content: str) -> str:
        """Return a text of a model or an environment: only what is a secret for certain is removed."""
        return printable(redact.redact_certain(content, self._known), lines=True)
