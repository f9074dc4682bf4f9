"""YAML as JSON values with the line of every field. Reads the YAML that Kubernetes reads, and refuses ambiguous constructs.

Scalars follow the YAML 1.2 core schema: `1e-6` is a number, `yes` and `010` are strings, dates remain strings. Duplicate keys, keys that
are not strings, custom tags and recursive aliases are problems with a line number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlrun.config.loading.fixes.text_slips import explain_template, yaml_slip
from rlrun.config.loading.problems import ConfigError, Problem

Key = tuple[str | int, ...]
_MAX_NODES = 100_000
_MAX_LEVELS = 100
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})\Z"), _first)


@dataclass
class Document:
    """One YAML document."""

    value: Any
    line: int = 1
    """First line of the document."""
    lines: dict[Key, int] = field(default_factory=dict)
    """Line of each key and each list item, by path."""


def parse_yaml(text: str, source: str) -> list[Document]:
    """Parse all documents of a text, except empty ones.

    Raises:
        ConfigError: All problems, each with its line.
    """
    documents, problems = examine_yaml(text, source)
    if problems:
        raise ConfigError(problems)
    return documents


def examine_yaml(text: str, source: str) -> tuple[list[Document], list[Problem]]:
    """Parse all documents of a text as far as possible, and return every problem.

    Raises:
        ConfigError: The text is not complete YAML.
    """
    builder = _Builder(source, text.splitlines())
    documents = []
    complete = False
    try:
        for node in yaml.compose_all(text, Loader=_Loader):
            document = Document(None, node.start_mark.line + 1)
            document.value = builder.build_value(node, (), document.lines)
            if document.value is not None:
                documents.append(document)
        complete = True
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark else None
        opened = error.context_mark if "quoted scalar" in reason else None  # the parser stops far below an open quote
        if (slip := yaml_slip(text, opened.line + 1 if opened else line, reason)) is not None:
            builder.add_problem(slip.line, f"not YAML: {slip.message}")
        else:
            fix = "; indent with spaces" if "'\\t'" in reason else ""
            builder.add_problem(line, f"not YAML: {reason}{fix}")
    except yaml.YAMLError as error:
        builder.add_problem(None, f"not YAML: {getattr(error, 'reason', error)}; save it as UTF-8 text")
    except (ValueError, OverflowError) as error:
        builder.add_problem(None, f"not YAML: {error}")
    except RecursionError:
        builder.add_problem(_too_deep(text), f"more than {_MAX_LEVELS} nested lists and mappings; flatten it")
    if not complete:
        raise ConfigError(builder.problems)
    return documents, builder.problems


def _too_deep(text: str) -> int | None:
    """Return the line at which a text exceeds the nesting limit. Reads events, without recursion."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_LEVELS:
            return event.start_mark.line + 1 if event.start_mark is not None else None
    return None


class _Builder:
    def __init__(self, source: str, text: Sequence[str]) -> None:
        self.source, self.text = source, text
        self.problems: list[Problem] = []
        self.nodes = 0

    def add_problem(self, line: int | None, message: str) -> None:
        self.problems.append(Problem(self.source, "", message, line))

    def build_value(
        self, node: yaml.Node, path: Key, lines: dict[Key, int], inside: frozenset[int] = frozenset()
    ) -> Any:
        line = node.start_mark.line + 1
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise ValueError(
                f"more than {_MAX_NODES} values, because an alias repeats too often; write the values in full"
            )
        if id(node) in inside:
            self.add_problem(line, "an alias contains itself; write the value instead")
            return None
        inside = inside | {id(node)}
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node, line)
        if not node.tag.startswith((_TAG + "map", _TAG + "seq")):
            self.add_problem(line, f"tag {node.tag} is not supported; remove it")
            return None
        if isinstance(node, yaml.SequenceNode):
            lines.update({(*path, i): item.start_mark.line + 1 for i, item in enumerate(node.value)})
            return [self.build_value(item, (*path, i), lines, inside) for i, item in enumerate(node.value)]
        return self._build_mapping(node, path, lines, inside)

    def _build_scalar(self, node: yaml.ScalarNode, line: int) -> object:
        kind = node.tag.removeprefix(_TAG)
        try:
            match kind:
                case "str" | "merge":
                    return node.value
                case "null":
                    return None
                case "bool":
                    return node.value.lower() == "true"
                case "int":
                    return int(node.value)
                case "float":
                    return float(re.sub(r"\.(?=inf|nan)", "", node.value.lower()))
        except ValueError:
            self.add_problem(line, f"{node.value[:40]!r} does not have the type of its tag; remove the tag")
            return None
        self.add_problem(line, f"tag {node.tag} is not supported; remove it")
        return None

    def _build_mapping(
        self, node: yaml.Node, path: Key, lines: dict[Key, int], inside: frozenset[int]
    ) -> dict[str, object]:
        result: dict[str, object] = {}
        first: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            if key_node.tag != _TAG + "str" or not isinstance(key_node, yaml.ScalarNode):
                shown = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                here = self.text[line - 1] if line <= len(self.text) else ""
                self.add_problem(line, explain_template(here) or f"key {shown} is not a string; write it in quotes")
                continue
            key = key_node.value
            if key in first:
                self.add_problem(line, f"duplicate key {key!r}: it is already set in line {first[key]}; remove one")
                continue
            first[key] = lines[*path, key] = line
            result[key] = self.build_value(value_node, (*path, key), lines, inside)
        for source in merged:
            inherited_lines: dict[Key, int] = {}
            inherited = self.build_value(source, path, inherited_lines, inside)
            if not isinstance(inherited, dict):
                self.add_problem(source.start_mark.line + 1, "<< needs a mapping; write one, or remove the line")
                continue
            for key in [key for key in inherited if key not in result]:
                result[key] = inherited[key]
                here = (*path, key)
                lines.update({k: v for k, v in inherited_lines.items() if k[: len(here)] == here})
        return result
