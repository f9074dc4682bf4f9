"""JSON documents that exceed the nesting limit of the parser."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from rlrun_operator.kube.json_reader import LEVELS_MAX, UnreadableError, flatten_json, parse_json


def nest_json(levels: int, kind: str) -> bytes:
    if kind == "list":
        return b"[" * levels + b"]" * levels
    return b'{"a[{\\"":' * levels + b'"]}\\\\"' + b"}" * levels


@pytest.mark.parametrize("kind", ["list", "mapping"])
@pytest.mark.parametrize("levels", [1, LEVELS_MAX, 150, 300, 3000, 200_000])
def test_deep_document_keeps_its_other_parts(levels: int, kind: str) -> None:
    raw = b'{"metadata":{"name":"hostile"},"spec":{"x":' + nest_json(levels, kind) + b',"y":[1,2]},"z":"]}{["}'
    found = parse_json(raw)
    assert found["metadata"] == {"name": "hostile"}
    assert (found["spec"]["y"], found["z"]) == ([1, 2], "]}{[")


def test_shallow_document_is_unchanged() -> None:
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
        assert cut == prune_tree(value, 3)


def prune_tree(value: Any, levels: int) -> Any:
    if isinstance(value, list | dict):
        if not levels:
            return None
        if isinstance(value, list):
            return [prune_tree(item, levels - 1) for item in value]
        return {key: prune_tree(item, levels - 1) for key, item in value.items()}
    return value


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a":', b"[1,]", b"nonsense", b"]" * 500, b"[" * 500, b'"' + b"[" * 500])
def test_invalid_json_is_an_error(raw: bytes) -> None:
    with pytest.raises(UnreadableError, match="not JSON"):
        parse_json(raw)
