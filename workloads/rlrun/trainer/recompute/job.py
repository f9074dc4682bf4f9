"""Description of what is computed again; a module of its own, so that a command line needs no torch to write it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Steps to compute again, and the file for the answer."""

    output: str
    """File for the answer, JSON; the ranks beside rank 0 write none."""
    batches: tuple[tuple[int, str], ...]
    """Each step, in order, and the folder of its batch."""
    start: str | None = None
    """Folder of the checkpoint to begin with; None: the model."""
    origin: bool = False
    """True if `start` is another run's, whose weights are version 0 of this one."""
    end: str | None = None
    """Folder of the checkpoint that the run itself saved after the last step, to compare with."""
    sample: int | None = None
    """Index of a sample of the last batch to explain."""

    def words(self) -> list[str]:
        """Arguments of a rank."""
        return ["--recompute", json.dumps(asdict(self))]

    @classmethod
    def read(cls, text: str) -> Job:
        """The inverse of `words`."""
        values = json.loads(text)
        return cls(**values | {"batches": tuple((int(step), str(path)) for step, path in values["batches"])})

    def answer(self) -> dict[str, object]:
        """The answer that the ranks wrote.

        Raises:
            OSError: there is none.
        """
        found: dict[str, object] = json.loads(Path(self.output).read_text())
        return found
