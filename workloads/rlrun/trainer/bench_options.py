"""Options of `--bench`; a module of its own, so that a command line needs no torch to read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class BenchOptions:
    """Subject of the measurement."""

    seq_lens: tuple[int, ...] = ()
    """Tokens of each sequence, a row of the table each; none: the run's `seqLen`."""
    rows: int = 1
    """Micro-batches of one sequence that every rank trains on per step."""
    steps: int = 5
    """Measured steps."""
    warmup: int = 2
    """Steps before them."""
    output: str | None = None
    """File for the measurements as JSON."""

    def words(self) -> list[str]:
        """Arguments of a rank."""
        return ["--bench", json.dumps(asdict(self))]

    @classmethod
    def read(cls, text: str) -> BenchOptions:
        """The inverse of `words`."""
        values = json.loads(text)
        return cls(**values | {"seq_lens": tuple(values["seq_lens"])})
