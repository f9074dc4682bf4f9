"""YAML as Kubernetes reads it: numbers, refused documents and their lines."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.yaml_text import parse_yaml


def value(text: str) -> Any:
    (document,) = parse_yaml(text, "a.yaml")
    return document.value


def read_error(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "a.yaml")
    return str(error.value)


@pytest.mark.parametrize(
    ("scalar", "meaning"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("1.5", 1.5), (".5", 0.5), ("-3", -3), ("0", 0), ("true", True), ("False", False),
        ("null", None), ("~", None), ("", None), ("yes", "yes"), ("on", "on"), ("010", "010"), ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"), ('"1"', "1"), ("0x10", "0x10"), ("1_000", "1_000"), ("v1", "v1"), ("-", [None]),
        ("!!str 5", "5"), ("!!int 5", 5), ("!!float 5", 5.0),
    ],
)  # fmt: skip
def test_scalars(scalar: str, meaning: Any) -> None:
    got = value(f"a:\n  {scalar}\n")["a"]
    assert got == meaning
    assert type(got) is type(meaning)


def test_infinity_is_parsed_as_number() -> None:
    assert value("a: -.inf") == {"a": float("-inf")}


def test_lines_of_keys_and_items() -> None:
    (document,) = parse_yaml("a: 1\nb:\n  - c: 2\n  - {d: 3}\n", "a.yaml")
    assert document.lines == {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 0, "c"): 3, ("b", 1): 4, ("b", 1, "d"): 4}


def test_anchors_and_merge_keys() -> None:
    text = "base: &b {x: 1, y: 2}\none:\n  <<: *b\n  y: 3\ntwo:\n  <<: [{z: 1}, *b]\n"
    assert value(text)["one"] == {"x": 1, "y": 3}
    assert value(text)["two"] == {"x": 1, "y": 2, "z": 1}
    many = "base: &b {" + ", ".join(f"k{i}: {i}" for i in range(20)) + "}\none:\n  <<: *b\n"
    assert list(value(many)["one"]) == [f"k{i}" for i in range(20)], "in the order in which they were written"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "a.yaml:3: duplicate key 'a': it is already set in line 1; remove one"),
        ("a: {b: 1, b: 2}", "a.yaml:1: duplicate key 'b'"),
        ("a: 1\n2: b\n", "a.yaml:2: key 2 is not a string; write it in quotes"),
        ("a: 1\ntrue: b\n", "a.yaml:2: key true is not a string; write it in quotes"),
        ("? [a]\n: b\n", "a.yaml:1: key a list or mapping is not a string"),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "a.yaml:1: tag tag:yaml.org,2002:python/object/apply:os.system is",
        ),
        ("a: !secret x\n", "a.yaml:1: tag !secret is not supported; remove it"),
        ("a: !!int x\n", "a.yaml:1: 'x' does not have the type of its tag; remove the tag"),
        ("a: &x [*x]\n", "a.yaml:1: an alias contains itself"),
        ("a: 1\n\tb: 2\n", "a.yaml:2: not YAML"),
        ("a: *missing\n", "a.yaml:1: not YAML: found undefined alias"),
        ("a: \x00", "a.yaml: not YAML: special characters are not allowed"),
        ('a: "\\UFFFFFFFF"', "a.yaml"),
        ("<<: 3\n", "a.yaml:1: << needs a mapping"),
        ("a: " + "9" * 5000, "a.yaml:1: '9999"),
    ],
)
def test_invalid_yaml_is_refused(text: str, message: str) -> None:
    assert message in read_error(text)


def test_aliases_that_multiply_end_early() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "an alias repeats too often; write the values in full" in read_error("\n".join(lines))
