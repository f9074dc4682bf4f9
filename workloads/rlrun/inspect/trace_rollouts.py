"""Rollouts of a step from its trace: selection by reward, and text for people. No side effects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlrun.inspect.screen import cut_text
from rlrun.runtime.printable import escape_controls

Row = Mapping[str, object]
AnyRow = TypeVar("AnyRow", bound=Row)
"""Row of a trace, or an entry of an index with the same names."""


@dataclass(frozen=True)
class Turn:
    """One message of a rollout from the trace."""

    role: str
    text: str
    """Content; other content than text (parts, images) as JSON."""
    calls: tuple[tuple[str, str], ...] = ()
    """Tool calls: name and arguments."""


def list_turns(row: Row) -> list[Turn]:
    """Return the messages of a rollout. Their texts are unmodified: callers must pass them through `escape_controls`."""
    return [
        Turn(str(one.get("role")), _turn_body(one.get("content")), tuple(_turn_calls(one)))
        for one in _turn_messages(row)
    ]


def _turn_body(content: object) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _turn_calls(message: Row) -> Iterator[tuple[str, str]]:
    for call in _read_maps(message.get("tool_calls")):
        function = call.get("function")
        named = function if isinstance(function, Mapping) else call
        yield str(named.get("name")), str(named.get("arguments", ""))


def version_spans(row: Row) -> list[Row]:
    """Return the spans `{version, start, end}` of all sequences, each with the tokens of one policy version."""
    return [span for spans in _read_lists(row.get("versions")) for span in _read_maps(spans)]


def newest_rollouts(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Return the rollouts of the newest attempt that trained the step."""
    last = max((_show_number(row.get("attempt")) for row in rows), default=0.0)
    return [row for row in rows if _show_number(row.get("attempt")) == last]


def choose_rollouts(rows: Sequence[Row], *, worst: int | None, best: int | None, environment: str | None) -> list[Row]:
    """Return rollouts by reward, worst first or best first; without both, all in the order of the trace."""
    found = [row for row in rows if environment in (None, row.get("environment"))]
    if worst is None and best is None:
        return found
    known = sorted(
        (row for row in found if isinstance(row.get("reward"), int | float)),
        key=lambda row: _show_number(row["reward"]),
    )
    return known[:worst] if worst is not None else known[::-1][:best]


def environment_names(rows: Sequence[Row]) -> list[str]:
    """Return the sorted names of the environments."""
    return sorted({str(row.get("environment")) for row in rows})


def summarize_step(step: str, rows: Sequence[Row], shown: int) -> str:
    """Return one line about a step's rollouts."""
    rewards = [float(reward) for row in rows if isinstance(reward := row.get("reward"), int | float)]
    if not rewards:
        return f"{step}: {len(rows)} rollouts without a reward"
    mean, least, most = sum(rewards) / len(rewards), min(rewards), max(rewards)
    return f"{step}: {shown} of {len(rows)} rollouts; reward {mean:.4f} on average, from {least:.4f} to {most:.4f}"


def rollout_text(row: Row, *, most: int) -> str:
    """Return a rollout as text: reward, metrics and turns.

    Args:
        row: rollout from the trace.
        most: maximum number of characters per message; 0: unlimited.
    """
    lines = [f"── {_rollout_head(row)}"]
    metrics = row.get("metrics")
    if isinstance(metrics, Mapping) and metrics:
        lines.append(
            "   " + ", ".join(f"{escape_controls(str(name))} {_short_text(value)}" for name, value in metrics.items())
        )
    for turn in list_turns(row):
        lines += list(_turn_lines(turn, most))
    return "\n".join(lines)


def _rollout_head(row: Row) -> str:
    versions = sorted({int(_show_number(span.get("version"))) for span in version_spans(row)})
    words = [
        f"reward {_short_text(row.get('reward'))}",
        f"advantage {_short_text(row.get('advantage'))}",
        f"environment {escape_controls(str(row.get('environment')))}",
        f"task {escape_controls(str(row.get('task_id')))}",
    ]
    if row.get("group") is not None:
        words.append(f"group {row.get('group')}, rollout {row.get('rollout')}")
    if row.get("completion_tokens") is not None:
        words.append(f"{row.get('completion_tokens')} tokens sampled")
    if versions:
        words.append(f"versions {', '.join(map(str, versions))}")
    if row.get("finish_reason"):
        words.append(
            f"ended by {escape_controls(str(row.get('finish_reason')))}{', truncated' if row.get('truncated') else ''}"
        )
    return "; ".join(words)


def _turn_messages(row: Row) -> list[Row]:
    """Return the turns; if the messages of a trace lack the sampled text, the completion is added as the last turn."""
    found = list(_read_maps(row.get("messages")))
    if row.get("completion") and not any(message.get("role") == "assistant" for message in found):
        found.append({"role": "assistant", "content": row["completion"]})
    return found


def _turn_lines(turn: Turn, most: int) -> Iterator[str]:
    role, body = escape_controls(turn.role), escape_controls(turn.text, lines=True)
    for at, line in enumerate((cut_text(body, most) if most else body).splitlines() or [""]):
        yield f"   {role + ':' if at == 0 else '':<11} {line}"
    for name, arguments in turn.calls:
        written = escape_controls(f"{name}({arguments})")
        yield f"   {'calls':<11} {cut_text(written, most) if most else written}"


def _read_maps(value: object) -> list[Row]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _read_lists(value: object) -> list[list[object]]:
    return [one for one in value if isinstance(one, list)] if isinstance(value, list) else []


def _show_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _short_text(value: object) -> str:
    return f"{float(value):.4g}" if isinstance(value, int | float) else "–"
