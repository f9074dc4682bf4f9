"""Routes of mixtures: type of the column, refusals, and round trips in batch files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlrun.protocol.files.batch import Batch, BatchError, Sample, read_batch, write_batch
from rlrun.protocol.files.routes import (
    EngineRoutes,
    RoutesError,
    RouteShape,
    check_routes,
    has_route,
    join_columns,
    join_engine_routes,
    make_missing,
)
from tests.unit.protocol.test_protocol_batch import sample

SHAPE = RouteShape(layers=3, top_k=2, experts=8)


def routed(length: int, dtype: Any = np.uint8) -> Sample:
    column = make_missing(length, 3, 2, dtype)
    column[:-1] = np.arange(6).reshape(3, 2)
    return replace(sample(length), routes=column)


@pytest.mark.parametrize(
    ("experts", "top_k", "dtype"),
    [(8, 2, "uint8"), (256, 8, "uint8"), (257, 8, "uint16"), (255, 1, "uint8"), (256, 1, "uint16")],
)
def test_type_of_routes_leaves_a_number_for_missing_routes(experts: int, top_k: int, dtype: str) -> None:
    """With one choice of 256 experts, expert 255 would be a missing route."""
    shape = RouteShape(1, top_k, experts)
    assert shape.dtype.name == dtype
    last = np.arange(experts - top_k, experts).astype(shape.dtype).reshape(1, 1, top_k)
    assert has_route(last).all()
    assert not has_route(make_missing(1, 1, top_k, shape.dtype)).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_of_batch_round_trip(dtype: Any, tmp_path: Path) -> None:
    written = Batch(7, 2, (routed(4, dtype), sample(3), routed(9, dtype)))
    write_batch(tmp_path / "b", written)
    read = read_batch(tmp_path / "b")
    assert read.samples[1].routes is None
    for index in (0, 2):
        found, expected = read.samples[index].routes, written.samples[index].routes
        assert found is not None
        assert expected is not None
        assert found.dtype == dtype
        assert np.array_equal(found, expected)
    document = json.loads((tmp_path / "b" / "batch.json").read_text())
    assert document["format_version"] == 2
    assert document["routes"] == {"moe_layers": 3, "top_k": 2, "dtype": np.dtype(dtype).name}


def test_routes_in_another_memory_layout_round_trip(tmp_path: Path) -> None:
    """A selection of layers has another order in memory than its shape."""
    experts = np.random.default_rng(0).integers(0, 8, (4, 5, 2)).astype(np.uint8)
    column = np.concatenate([experts[:, [1, 2, 4]], experts[:, [0, 1, 2]]])
    assert not column.flags.c_contiguous
    write_batch(tmp_path / "b", Batch(7, 2, (replace(sample(8), routes=column),)))
    (found,) = read_batch(tmp_path / "b").samples
    assert found.routes is not None
    assert np.array_equal(found.routes, column)


def test_batch_without_routes_keeps_format_1(tmp_path: Path) -> None:
    write_batch(tmp_path / "b", Batch(7, 2, (sample(4),)))
    document = json.loads((tmp_path / "b" / "batch.json").read_text())
    assert document["format_version"] == 1
    assert "routes" not in document
    assert read_batch(tmp_path / "b").samples[0].routes is None


def test_batch_of_a_later_format_is_refused_with_both_formats(tmp_path: Path) -> None:
    """As an earlier release refuses format 2: by name, before a token of it is trained."""
    write_batch(tmp_path / "b", Batch(7, 2, (sample(4),)))
    file = tmp_path / "b" / "batch.json"
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 3'))
    with pytest.raises(BatchError, match="it has format 3, this version reads 1 and 2"):
        read_batch(tmp_path / "b")


def test_selected_samples_have_their_own_routes(tmp_path: Path) -> None:
    samples = tuple(
        replace(one, routes=np.where(np.arange(len(one))[:, None, None] < 9, index, one.routes).astype(np.uint8))
        for index, one in enumerate((routed(4), routed(9), routed(5)))
    )
    write_batch(tmp_path / "b", Batch(7, 2, samples))
    (found,) = read_batch(tmp_path / "b", indices=[2]).samples
    assert found.routes is not None
    assert found.routes.shape == (5, 3, 2)
    assert (found.routes == 2).all()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.zeros((4, 3, 2), np.int32), "routes have type int32; supported: uint8, uint16"),
        (np.zeros((3, 3, 2), np.uint8), r"routes have shape \(3, 3, 2\), expected \(4, layers, experts of a token\)"),
        (np.zeros((4, 3), np.uint8), r"routes have shape \(4, 3\)"),
        (np.zeros((4, 0, 2), np.uint8), r"routes have shape \(4, 0, 2\)"),
    ],
)
def test_sample_with_wrong_routes_is_not_written(column: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=message):
        write_batch(tmp_path / "b", Batch(7, 2, (replace(sample(4), routes=column),)))
    assert not (tmp_path / "b").exists()


def test_samples_with_routes_of_different_models_are_not_written(tmp_path: Path) -> None:
    other = replace(sample(4), routes=make_missing(4, 2, 2, np.uint8))
    with pytest.raises(BatchError, match=r"step 7: routes of one batch have shapes \(3, 2\) \(uint8\) and \(2, 2\)"):
        write_batch(tmp_path / "b", Batch(7, 2, (routed(4), other)))


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ([[0, 1], [2, 8], [4, 5]], "routes contain expert 8, the model has 8 experts"),
        ([[0, 1], [2, 2], [4, 5]], "routes contain the same expert twice for one token"),
        ([[0, 1], [2, 255], [4, 5]], "routes contain expert 255"),
        ([[0, 1], [2, 3]], "routes have 2 layers with 2 experts, the model has 3 with 2"),
    ],
)
def test_routes_that_model_cannot_choose_are_refused(route: list[list[int]], message: str) -> None:
    with pytest.raises(RoutesError, match=message):
        check_routes(np.array([route], np.uint8), SHAPE)


def test_missing_and_valid_routes_are_accepted() -> None:
    check_routes(np.array([[[0, 1], [255, 255], [7, 6]]], np.uint8), SHAPE)


def test_routes_of_another_type_are_refused() -> None:
    with pytest.raises(RoutesError, match="routes have type uint16, a model with 8 experts has uint8"):
        check_routes(make_missing(2, 3, 2, np.uint16), SHAPE)


def test_samples_without_routes_are_filled_with_missing_ones() -> None:
    first = routed(4).routes
    joined = join_columns([first, None], [4, 2])
    assert joined is not None
    assert has_route(joined)[:, 0].tolist() == [True, True, True, False, False, False]
    assert join_columns([None, None], [4, 2]) is None


def test_engine_routes_lose_dense_layers_and_rows_beyond_the_sequence() -> None:
    experts = np.zeros((4, 3, 2), np.uint8)
    experts[:, 0], experts[:, 2] = (0, 1), (5, 4)
    joined = join_engine_routes([EngineRoutes(0, experts[:2]), EngineRoutes(2, experts)], 5)
    assert joined is not None
    assert joined.shape == (5, 2, 2)
    assert (joined[:, 0] == (0, 1)).all()
    assert (joined[:, 1] == (5, 4)).all()
    assert join_engine_routes([], 5) is None


def test_engine_routes_of_different_models_are_refused() -> None:
    parts = [EngineRoutes(0, np.ones((2, layers, 2), np.uint8)) for layers in (3, 4)]
    with pytest.raises(RoutesError, match="different layers, choices or types"):
        join_engine_routes(parts, 5)
    with pytest.raises(RoutesError, match="experts of 0 for every layer"):
        join_engine_routes([EngineRoutes(0, np.zeros((2, 3, 2), np.uint8))], 5)
