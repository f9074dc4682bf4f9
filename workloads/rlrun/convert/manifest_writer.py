"""YAML text of a manifest, with comments about the origin of each field and the result of every other key."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlrun.api.resource import API_VERSION, KIND
from rlrun.convert.draft import KINDS, Draft, Fate, Field
from rlrun.runtime.printable import escape_controls

_PLAIN = re.compile(r"[A-Za-z_./][\w./:@+-]*")
_RESERVED = re.compile(r"(?i)true|false|null|yes|no|on|off|y|n|[-+.]?[\d.].*|\.inf|\.nan")
_ORDER = (
    *(
        "metadata",
        "task",
        "model",
        "maxSteps",
        "seqLen",
        "seed",
        "environments",
        "data",
        "sampling",
        "algorithm",
        "evaluation",
    ),
    *("orchestrator", "trainer", "inference", "placement", "weightSync", "checkpoint", "tracking", "failurePolicy"),
)
_WIDTH = 120
_Tree = Mapping[str, "Field | _Tree"]


def write_manifest(draft: Draft, name: Field, fates: Sequence[Fate], sources: Sequence[str]) -> str:
    """Return the text of the manifest.

    Args:
        draft: fields of the manifest.
        name: name of the run.
        fates: result of every key.
        sources: names of the converted files.
    """
    written = {fate.setting.key for fate in fates}
    lines = [
        f"# Created by `rlrun convert` from {', '.join(sources)} ({draft.trainer}).",
        f"# {summarize_keys(fates)}",
        f"apiVersion: {API_VERSION}",
        f"kind: {KIND}",
        _comment_lines(f"metadata: {{name: {name.value}}}", _row_reason(name, draft, written)),
        "spec:",
    ]
    ordered = sorted(draft.fields.items(), key=lambda item: _key_rank(item[0].partition(".")[0]))
    lines += _field_tree(_nested_fields(dict(ordered)), draft, written, 1)
    lines += _remaining_keys(fates, draft)
    return escape_controls("\n".join(lines) + "\n", lines=True)


def summarize_keys(fates: Sequence[Fate]) -> str:
    """Return one line with the number of keys of each kind."""
    counts = Counter(fate.kind for fate in fates)
    return f"{len(fates)} keys: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])


def _key_rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _nested_fields(fields: Mapping[str, Field]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, there in fields.items():
        *parents, last = path.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = there
    return tree


def _field_tree(tree: _Tree, draft: Draft, written: set[str], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, inner in tree.items():
        if not isinstance(inner, Field):
            yield f"{indent}{name}:"
            yield from _field_tree(inner, draft, written, depth + 1)
        elif isinstance(inner.value, list) and inner.value and isinstance(inner.value[0], dict):
            yield _comment_lines(f"{indent}{name}:", _row_reason(inner, draft, written))
            for i, item in enumerate(inner.value):
                causes = inner.items[i : i + 1]
                comment = ", ".join(_row_cause(cause, draft, written) for cause in causes[0]) if causes else ""
                yield _comment_lines(f"{indent}- {_flow_text(item)}", comment)
        else:
            yield _comment_lines(f"{indent}{name}: {_flow_text(inner.value)}", _row_reason(inner, draft, written))


def _row_reason(there: Field, draft: Draft, written: set[str]) -> str:
    parts = [_row_cause(cause, draft, written) for cause in there.causes]
    return "; ".join([", ".join(parts), there.note]).strip("; ")


def _row_cause(cause: str, draft: Draft, written: set[str]) -> str:
    key = draft.settings[cause].key if cause in draft.settings else cause
    return (
        f"{key}={_show_value(draft.settings[cause].shown)}" if key in written else f"{cause}: {draft.trainer}'s default"
    )


def _comment_lines(line: str, comment: str) -> str:
    comment = comment.replace("\n", " ")
    return f"{line}  # {comment}" if comment else line


def _remaining_keys(fates: Sequence[Fate], draft: Draft) -> Iterator[str]:
    left = [fate for fate in fates if not fate.to]
    if left:
        yield "# Keys without a separate field in this manifest:"
    for fate in left:
        yield f"#   {fate.setting.key}={_show_value(fate.setting.shown)}: {fate.kind}: {fate.note}"
    for line in draft.missing:
        yield f"# Missing: {line}"


def _show_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)  # TOML has dates
    text = escape_controls(text)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _flow_text(value: object) -> str:
    """Return a value in YAML's flow style, restricted to the syntax that RLRun's reader supports."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow_text(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow_text(item) for item in value) + "]"
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if (
        isinstance(value, str)
        and _PLAIN.fullmatch(value)
        and not _RESERVED.fullmatch(value)
        and not value.endswith(":")
    ):
        return value
    return json.dumps(value, ensure_ascii=False)
