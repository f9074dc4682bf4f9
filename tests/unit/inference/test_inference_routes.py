"""Experts in answers of an engine: packed as raw bytes, parsed only on request, and refused if they do not fit."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from rlrun.inference.client.completions import EngineError, parse_packed
from rlrun.inference.http.generate import SampledTokens, _packed_answer
from rlrun.orchestrator.rollouts.engine_session import _check_routes
from rlrun.protocol.files.routes import EngineRoutes
from rlrun.protocol.messages.packed_columns import FLOATS, INTEGERS, pack_document


def sampled(tokens: int, routes: Any) -> SampledTokens:
    return SampledTokens(
        array(INTEGERS, range(tokens)), array(FLOATS, [-0.5] * tokens), [("3", 0, tokens)], "stop", routes
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_of_several_continuations_round_trip(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    expected = [rng.integers(0, np.iinfo(dtype).max, (rows, 3, 2)).astype(dtype) for rows in (5, 2)]
    data = _packed_answer("m", [sampled(4, expected[0]), sampled(1, expected[1])])
    found = parse_packed(data, 2, routes_start=7)
    for completion, experts in zip(found, expected, strict=True):
        assert completion.routes is not None
        assert completion.routes.start == 7
        assert completion.routes.experts.dtype == dtype
        assert np.array_equal(completion.routes.experts, experts)
    assert [list(completion.token_ids) for completion in found] == [[0, 1, 2, 3], [0]]


def test_answer_without_experts_has_none() -> None:
    (found,) = parse_packed(_packed_answer("m", [sampled(4, None)]), 1, routes_start=0)
    assert found.routes is None


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"shape": [2, 3, 2], "dtype": "float32"}, "type float32"),
        ({"shape": [2, -3, 2], "dtype": "uint8"}, "sizes must be numbers of 0 or more"),
        ({"shape": [12], "dtype": "uint8"}, "expected three sizes"),
        ({"shape": [9, 3, 2], "dtype": "uint8"}, "a column of 54 bytes does not fit"),
    ],
)
def test_damaged_experts_are_refused(described: dict[str, Any], message: str) -> None:
    choice = {
        "tokens": 1,
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
        "routes": described,
    }
    data = pack_document({"model": "m", "choices": [choice]}, [array(INTEGERS, [1]), array(FLOATS, [-0.5]), bytes(12)])
    with pytest.raises(EngineError, match=message):
        parse_packed(data, 1, routes_start=0)


class _Replica:
    url = "http://engine"


@pytest.mark.parametrize(("rows", "top_k", "accepted"), [(6, 2, True), (7, 2, False), (5, 2, False), (6, 1, False)])
def test_rows_of_all_tokens_but_the_last_are_expected(rows: int, top_k: int, accepted: bool) -> None:
    """A prompt of 5 tokens and an answer of 4, from position 2 on."""
    replica: Any = _Replica()
    (completion,) = parse_packed(
        _packed_answer("m", [sampled(4, np.ones((rows, 3, top_k), np.uint8))]), 1, routes_start=2
    )
    assert isinstance(completion.routes, EngineRoutes)
    if accepted:
        _check_routes(replica, 5, [completion])
        return
    with pytest.raises(EngineError, match=f"returned {rows} rows of {top_k} experts instead of 6 rows of 2 or more"):
        _check_routes(replica, 5, [completion])
