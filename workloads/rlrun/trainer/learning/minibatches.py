"""Division of a step's batch into its optimizer updates."""

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
    """Samples of this update on all ranks; the denominators count them."""
    rows: Sequence[Row]
    """Micro-batches of this rank as indices into `batch.samples`; every rank has the same number."""


def mini_batches(batch: Batch, count: int, *, seed: int) -> list[Batch]:
    """Divide the samples with a loss token randomly into `count` parts of nearly equal size.

    The division depends only on `seed` and the batch's step, so it is the same on every rank and after a resume. For `count` 1 the result
    is the batch itself. With fewer samples than `count`, each sample is one part.
    """
    if count == 1:
        return [batch]
    trained = [index for index, sample in enumerate(batch.samples) if sample.loss_mask.any()]
    order = np.random.default_rng([seed, batch.step]).permutation(trained)
    parts = np.array_split(order, min(count, len(trained)))
    return [replace(batch, samples=tuple(batch.samples[i] for i in sorted(part))) for part in parts]
