"""Order of rows in a mixture: proportions, epochs and stopping rules, computed from the draw number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun.orchestrator.sft.samples import Mixture

MIXTURES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0])), min_size=1, max_size=4)


def mixture(parts: list[tuple[int, float]], **options: Any) -> Mixture:
    return Mixture(3, tuple(size for size, _ in parts), tuple(weight for _, weight in parts), **options)


@settings(max_examples=50, deadline=None)
@given(MIXTURES)
def test_mixture_counts_follow_the_weights(parts: list[tuple[int, float]]) -> None:
    order = mixture(parts)
    counts: Counter[int] = Counter()
    total = sum(weight for _, weight in parts)
    for number in range(120):
        assert order.counts(number) == tuple(counts[i] for i in range(len(parts)))
        for source, (_, weight) in enumerate(parts):
            assert abs(counts[source] - number * weight / total) <= 2.0
        counts[order.draw(number).source] += 1


@settings(max_examples=50, deadline=None)
@given(MIXTURES, st.booleans())
def test_epoch_visits_every_row_once(parts: list[tuple[int, float]], shuffle: bool) -> None:
    order = mixture(parts, shuffle=shuffle)
    seen: dict[tuple[int, int], list[int]] = {}
    for number in range(100):
        draw = order.draw(number)
        seen.setdefault((draw.source, draw.epoch), []).append(draw.row)
    for (source, epoch), rows in seen.items():
        size = parts[source][0]
        assert len(set(rows)) == len(rows)
        if (source, epoch + 1) in seen:
            assert sorted(rows) == list(range(size))
        if not shuffle:
            assert rows == list(range(len(rows)))


@settings(max_examples=50, deadline=None)
@given(MIXTURES, st.integers(1, 3), st.booleans())
def test_mixture_ends_at_its_stopping_rule(parts: list[tuple[int, float]], epochs: int, all_exhausted: bool) -> None:
    order = mixture(parts, epochs=epochs, all_exhausted=all_exhausted)
    length = order.length
    assert length is not None

    def ended(number: int) -> bool:
        read = [count >= size * epochs for count, (size, _) in zip(order.counts(number), parts, strict=True)]
        return all(read) if all_exhausted else any(read)

    assert ended(length)
    assert not ended(length - 1)


def test_mixture_without_epochs_never_ends() -> None:
    assert mixture([(3, 1.0)]).length is None


def test_row_order_depends_on_seed_and_epoch() -> None:
    def rows(order: Mixture, start: int) -> list[int]:
        return [order.draw(start + i).row for i in range(50)]

    first = Mixture(1, (50,), (1.0,))
    assert rows(first, 0) == rows(Mixture(1, (50,), (1.0,)), 0)
    assert rows(first, 0) != rows(first, 50)
    assert rows(first, 0) != rows(Mixture(2, (50,), (1.0,)), 0)


@pytest.mark.parametrize(("all_exhausted", "length"), [(False, 6), (True, 16)])
def test_stopping_rules_give_expected_lengths(all_exhausted: bool, length: int) -> None:
    # Rows alternate: the short source of 3 rows ends with draw 6 at the latest, the long source of 8 rows with draw 16.
    assert abs((mixture([(3, 1.0), (8, 1.0)], epochs=1, all_exhausted=all_exhausted).length or 0) - length) <= 1
