"""Signals of later passes over the samples of a step (`trainer.epochsPerStep`).

The signals (log-probs of the proximal policy and the reference, values, advantages) belong to the policy before the first update, so they
are computed once, on the rows of the first pass. A later pass has other rows, possibly on other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning.forward import Signals
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.ranks.group import Group


class SampleSignals:
    """Signals of all samples of a step on every rank. All ranks create it together.

    Args:
        updates: updates of the first pass.
        signals: signals of each of their rows on this rank.
        group: all ranks.
    """

    def __init__(self, updates: Sequence[Update], signals: Sequence[Signals], group: Group) -> None:
        self._starts: dict[int, int] = {}
        total = 0
        for sample in (sample for update in updates for sample in update.batch.samples):
            self._starts[id(sample)] = total
            total += len(sample)
        names = [one.name for one in fields(Signals) if signals and getattr(signals[0], one.name) is not None]
        rows = [samples for update in updates for samples in row_samples(update)]
        self._columns = {name: torch.zeros(total, device=group.device) for name in names}
        for name, column in self._columns.items():
            if group.represents_rows:
                for samples, signal in zip(rows, signals, strict=True):
                    self._fill(column, samples, getattr(signal, name))
            # Each token has a value on one rank and 0 on the others, so the sum is exact.
            if group.world_size > 1:
                dist.all_reduce(column)

    def of_row(self, samples: Sequence[Sample], tokens: int) -> Signals:
        """Return the signals of a row, zeros if it has no samples.

        Args:
            samples: samples of the row, the same objects as in the first pass.
            tokens: length of the row.
        """
        found = {}
        for name, column in self._columns.items():
            row = column.new_zeros(tokens)
            start = 0
            for sample in samples:
                place = self._starts[id(sample)]
                row[start : start + len(sample)] = column[place : place + len(sample)]
                start += len(sample)
            found[name] = row
        return Signals(**found)

    def _fill(self, column: Tensor, samples: Sequence[Sample], row: Tensor) -> None:
        start = 0
        for sample in samples:
            place = self._starts[id(sample)]
            column[place : place + len(sample)] = row[start : start + len(sample)]
            start += len(sample)


def row_samples(update: Update) -> list[list[Sample]]:
    """Return the samples of each row of an update."""
    return [[update.batch.samples[index] for index in row] for row in update.rows]
