"""Filter for data that is sent to trackers: it removes secrets and characters that change the direction of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlrun.runtime import redact
from rlrun.runtime.printable import printable, printable_document
from rlrun.tracking.record import Record, SampleRow, TrackedRun


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
        return replace(run, name=printable(run.name), config=config)

    def clean_record(self, record: Record) -> Record:
        """Return the record without secrets in names of metrics, names of tables and texts of samples."""
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
        """Clean a text of a model or an environment. Only certain secrets are removed."""
        return printable(redact.redact_certain(content, self._known), lines=True)
