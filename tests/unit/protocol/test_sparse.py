"""Differences between two versions of a bucket: any bits, in few bytes."""

from __future__ import annotations

import numpy as np
import pytest

from rlrun.protocol.messages import packed_columns
from rlrun.protocol.messages.packed_columns import Bytes, DeltaError, apply_difference, encode_difference


def body(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def changed(base: Bytes, places: list[int]) -> Bytes:
    new = base.copy()
    new[places] ^= 0x80
    return new


def rebuilt(delta: Bytes, base: Bytes) -> Bytes:
    target = base.copy()
    apply_difference(delta, target)
    return target


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_columns, "BLOCK_WORDS", 70_000)


@pytest.mark.parametrize(
    ("places", "most"),
    [
        ([0], 60),
        ([399_999], 60),
        ([2 * 69_999, 2 * 70_000], 60),  # the last of a block, and the first of the next
        ([0, 2 * 66_000], 60),  # too far for two bytes
        (list(range(0, 400_000, 2000)), 1100),  # farther than a byte: two bytes each
        (list(range(0, 400_000, 200)), 6100),  # a byte each
        (list(range(0, 400_000, 8)), 125_100),  # a bit of each word
        (list(range(400_000)), 400_100),  # whole blocks
    ],
)
def test_difference_rebuilds_changed_values_from_few_bytes(places: list[int], most: int) -> None:
    base = body(400_000)
    new = changed(base, places)
    delta = encode_difference(base, new, most=len(base) + 1000)
    assert delta is not None
    assert 0 < len(delta) <= most
    assert np.array_equal(rebuilt(delta, base), new)
    assert encode_difference(base, new, most=len(delta) - 1) is None


@pytest.mark.parametrize("size", [0, 1, 2, 7, 40, 150_001])
def test_difference_supports_any_bucket_size(size: int) -> None:
    base = body(size)
    same = encode_difference(base, base.copy(), most=0)
    assert same is not None
    assert len(same) == 0
    assert np.array_equal(rebuilt(same, base), base)
    if size:
        new = changed(base, [size - 1])
        delta = encode_difference(base, new, most=size + 100)
        assert delta is not None
        assert np.array_equal(rebuilt(delta, base), new)


def test_numbers_are_compared_by_bits() -> None:
    base = np.array([0.0, np.nan, 1.0], np.float32).view(np.uint8)
    new = np.array([-0.0, np.nan, 1.0], np.float32).view(np.uint8)
    delta = encode_difference(base, new, most=100)
    assert delta is not None
    assert len(delta)
    assert np.array_equal(rebuilt(delta, base), new)


@pytest.mark.parametrize("every", [8, 200, 2000])
def test_damage_is_an_error_or_other_bytes(every: int) -> None:
    """Damage causes no access outside of the bucket: it raises an error, or the checksum of the result differs."""
    base = body(40_000)
    delta = encode_difference(base, changed(base, list(range(0, 40_000, every))), most=40_000)
    assert delta is not None
    for cut in (0, 5, 12, len(delta) // 2, len(delta) - 1):
        if cut:
            with pytest.raises(DeltaError, match="the difference is damaged at byte"):
                rebuilt(delta[:cut], base)
    with pytest.raises(DeltaError, match="but the bucket uses"):
        rebuilt(np.concatenate([delta, delta[:1]]), base)
    with pytest.raises(DeltaError):
        rebuilt(delta, base[:2000])
    for at in range(13):
        damaged = delta.copy()
        damaged[at] ^= 0xFF
        try:
            rebuilt(damaged, base)
        except DeltaError:
            continue
