"""Options of `--bench`, in a separate module so that the command line parses them without importing torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class BenchOptions:
    """Sequence lengths and step counts of a measurement."""

    seq_lens: tuple[int, ...] = ()
    """Tokens per sequence, one row of the table per entry. Default: the run's `seqLen`."""
    rows: int = 1
    """Micro-batches per rank and step; each contains one sequence."""
    steps: int = 5
    """Measured steps."""
    warmup: int = 2
    """Steps before the measured ones."""
    output: str | None = None
    """File for the measurements as JSON."""

    def rank_arguments(self) -> list[str]:
        """Return the command line arguments for a rank."""
        return ["--bench", json.dumps(asdict(self))]

    @classmethod
    def read(cls, text: str) -> BenchOptions:
        """Parse the argument that `rank_arguments` returns."""
        values = json.loads(text)
        return cls(**values | {"seq_lens": tuple(values["seq_lens"])})
