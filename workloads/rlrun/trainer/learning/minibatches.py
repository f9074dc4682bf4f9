"""Division of a step's batch among its optimizer updates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlrun.protocol.files.batch import Batch
from rlrun.protocol.packing.micro_batches import Row


@dataclass(frozen=True)
class Update:
    """Data of one optimizer update."""

    batch: Batch
    """The samples of this update, of all ranks: the denominators count these."""
    rows: Sequence[Row]
    """This rank's micro-batches, as indices into `batch.samples`; every rank has the same number."""


def mini_batches(batch: Batch, count: int, *, seed: int) -> list[Batch]:
    """Divide the samples that have a loss token into `count` parts of nearly equal number, drawn at random.

    The draw is a function of `seed` and the batch's step, the same on every rank and after a resume. With one part it is the batch
    itself; with fewer samples than parts there are as many parts as samples.
    """
    if count == 1:
        return [batch]
    trained = [index for index, sample in enumerate(batch.samples) if sample.loss_mask.any()]
    order = np.random.default_rng([seed, batch.step]).permutation(trained)
    parts = np.array_split(order, min(count, len(trained)))
    return [replace(batch, samples=tuple(batch.samples[i] for i in sorted(part))) for part in parts]
