"""Description of a recomputation, in a separate module so that the command line creates it without importing torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Steps to recompute, and the file for the result."""

    output: str
    """JSON file for the result; only rank 0 writes it."""
    batches: tuple[tuple[int, str], ...]
    """Steps in order, each with the folder of its batch."""
    start: str | None = None
    """Folder of the first checkpoint, or None to start from the model."""
    origin: bool = False
    """Whether `start` belongs to another run, whose weights are version 0 of this run."""
    end: str | None = None
    """Folder of the run's own checkpoint after the last step, for a comparison."""
    sample: int | None = None
    """Index of the sample of the last batch to explain, or None."""

    def rank_arguments(self) -> list[str]:
        """Return the command line arguments for a rank."""
        return ["--recompute", json.dumps(asdict(self))]

    @classmethod
    def read(cls, text: str) -> Job:
        """Parse the argument that `rank_arguments` returns."""
        values = json.loads(text)
        return cls(**values | {"batches": tuple((int(step), str(path)) for step, path in values["batches"])})

    def answer(self) -> dict[str, object]:
        """Read the result that rank 0 wrote.

        Raises:
            OSError: the file does not exist.
        """
        found: dict[str, object] = json.loads(Path(self.output).read_text())
        return found
