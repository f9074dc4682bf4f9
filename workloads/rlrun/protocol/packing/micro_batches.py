"""Packing: assigns samples to micro-batches and ranks. Pure; every rank computes the same plan from the same lengths.

Samples are distributed to the ranks so that each has nearly the same work `sum(n + quadratic * n^2)` (`balance`). The samples of a rank
are packed into micro-batches, "rows", of at most `row_tokens`. All ranks have the same number of rows, the fewest that hold all samples,
because all of them take part in every collective. The rows of a rank are level too, and heavy ones come first: row `m` costs every rank
about the same, so that no rank waits long for another one in a collective.

Work is counted in integers: sums are exact, so that neither the order of additions nor the processor can make two ranks disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlrun.protocol.packing.balance import Load, deal
from rlrun.protocol.packing.bin_packing import fewest_rows, level

Row = tuple[int, ...]
"""Indices of the samples that share one micro-batch; empty for a micro-batch without work."""

WORK_UNITS = 1024
"""Units of work per token."""


@dataclass(frozen=True)
class Plan:
    """Assignment of samples: `ranks[r][m]` is micro-batch `m` of rank `r`; all ranks have the same number of them."""

    ranks: tuple[tuple[Row, ...], ...]


def work(length: int, quadratic: float) -> int:
    """Return the work of a sequence in units of 1/1024 of a token's work: `length + quadratic * length^2`."""
    return WORK_UNITS * length + round(WORK_UNITS * quadratic * length * length)


def plan(lengths: Sequence[int], *, row_tokens: int, ranks: int, quadratic: float = 0.0) -> Plan:
    """Distribute all samples to all ranks.

    Args:
        lengths: tokens of each sample, `[N]`.
        row_tokens: maximum number of tokens of one micro-batch.
        ranks: data-parallel world size.
        quadratic: work of one pair of tokens (attention) relative to that of one token.

    Returns:
        The plan. A row is empty only if there are fewer samples than rows.

    Raises:
        ValueError: a sample is longer than a row, or empty.
    """
    for index, need in enumerate(lengths):
        if not 0 < need <= row_tokens:
            raise ValueError(f"lengths[{index}] is {need}; a row holds 1 to {row_tokens} tokens")
    rows = -(-fewest_rows(lengths, row_tokens, multiple=ranks) // ranks)
    works = [work(length, quadratic) for length in lengths]
    load = Load(tuple(lengths), tuple(works), ranks=ranks, rows=rows, row_tokens=row_tokens)
    dealt = [level(own, load.lengths, load.works, count=rows, row_tokens=row_tokens) for own in deal(load)]
    return Plan(tuple(tuple(tuple(row) for row in own) for own in dealt))
