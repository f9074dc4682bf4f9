"""Documents that are too deep for a parser are read all the same."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from rlrun_operator.kube.json_reader import LEVELS_MAX, UnreadableError, flatten_json, parse_json


def nested(levels: int, kind: str) -> bytes:
    if kind == "list":
        return b"[" * levels + b"]" * levels
    return b'{"a[{\\"":' * levels + b'"]}\\\\"' + b"}" * levels


@pytest.mark.parametrize("kind", ["list", "mapping"])
@pytest.mark.parametrize("levels", [1, LEVELS_MAX, 150, 300, 3000, 200_000])
def test_the_rest_of_a_document_is_read_however_deep_a_part_is(levels: int, kind: str) -> None:
    raw = b'{"metadata":{"name":"hostile"},"spec":{"x":' + nested(levels, kind) + b',"y":[1,2]},"z":"]}{["}'
    found = parse_json(raw)
    assert found["metadata"] == {"name": "hostile"}
    assert (found["spec"]["y"], found["z"]) == ([1, 2], "]}{[")


def test_what_is_not_too_deep_is_not_touched() -> None:
    random = Random(7)

    def tree(levels: int) -> Any:
        if not levels or random.random() < 0.2:
            return random.choice(['"', "\\", "[{", 1.5, None, True, "\u202e\n", ""])
        inner = [tree(levels - 1) for _ in range(random.randrange(4))]
        return inner if random.random() < 0.5 else {f'{i}]"\\': value for i, value in enumerate(inner)}

    for _ in range(300):
        value = tree(9)
        raw = json.dumps(value).encode()
        assert flatten_json(raw, 10) == raw
        cut = json.loads(flatten_json(raw, 3))
        assert cut == pruned(value, 3)


def pruned(value: Any, levels: int) -> Any:
    if isinstance(value, list | dict):
        if not levels:
            return None
        if isinstance(value, list):
            return [pruned(item, levels - 1) for item in value]
        return {key: pruned(item, levels - 1) for key, item in value.items()}
    return value


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a":', b"[1,]", b"nonsense", b"]" * 500, b"[" * 500, b'"' + b"[" * 500])
def test_what_is_no_json_is_an_error_and_not_an_empty_object(raw: bytes) -> None:
    with pytest.raises(UnreadableError, match="not JSON"):
        parse_json(raw)
