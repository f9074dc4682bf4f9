"""Index of a trace: the data that lists, filters and histograms need of each rollout, and the position of its line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypedDict

from rlrun.inspect import trace_rollouts
from rlrun.inspect.trace_rollouts import Row
from rlrun.runtime.printable import escape_controls

_LINE_MAX = 32 * 1024 * 1024
"""Maximum bytes of a rollout; a longer line is skipped."""
_EXCERPT = 160
Order = Literal["trace", "worst", "best", "longest", "shortest"]


class IndexRow(TypedDict):
    """Entry of a rollout in the index of its trace."""

    number: int
    """Number of the rollout in the file."""
    begin: int
    """Offset of its line in bytes."""
    attempt: object
    group: int | None
    rollout: int | None
    environment: str
    task_id: str
    reward: float | None
    advantage: float | None
    tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    truncated: bool
    error: str | None
    turns: int
    versions: tuple[tuple[int, int], ...]
    """Policy versions, each with the number of tokens that it sampled."""
    prompt: str
    """Start of the first message of the user."""
    answer: str
    """End of the last message of the model."""


@dataclass(frozen=True)
class Filter:
    """Filter of rollouts; None matches all."""

    environment: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    """Minimum number of sampled tokens."""
    tokens_max: int | None = None
    group: int | None = None

    def selects_row(self, row: IndexRow) -> bool:
        """Return whether the filter selects a row of the index."""
        reward, tokens = row["reward"], row["completion_tokens"]
        return (
            self.environment in (None, row["environment"])
            and self.group in (None, row["group"])
            and _between_steps(reward, self.reward_min, self.reward_max)
            and _between_steps(tokens, self.tokens_min, self.tokens_max)
        )


def _between_steps(value: float | None, least: float | None, most: float | None) -> bool:
    if least is None and most is None:
        return True
    if value is None:
        return False
    return (least is None or value >= least) and (most is None or value <= most)


class TraceIndex:
    """Index of the rollouts in one file, of the newest attempt that wrote it.

    Args:
        file: trace; it is read to its end and not closed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.lines_read = 0
        """Number of parsed lines."""
        rows = [_read_entry(number, begin, row) for number, (begin, row) in enumerate(self._read_rows(file))]
        self.rows: Sequence[IndexRow] = trace_rollouts.newest_rollouts(rows)
        self._by_number = {row["number"]: row for row in self.rows}
        self.environments = trace_rollouts.environment_names(self.rows)

    def _read_rows(self, file: BinaryIO) -> Iterator[tuple[int, Mapping[str, object]]]:
        while True:
            begin = file.tell()
            line = file.readline(_LINE_MAX)
            if not line:
                return
            if not line.endswith(b"\n") and len(line) == _LINE_MAX:
                while (rest := file.readline(_LINE_MAX)) and not rest.endswith(b"\n"):
                    pass
                continue
            self.lines_read += 1
            for row in rollouts_of(line):
                yield begin, row

    def select_rows(self, wanted: Filter, order: Order) -> list[IndexRow]:
        """Return the selected rows in an order. With an order by reward, rollouts without a reward (mostly errors) come last."""
        found = [row for row in self.rows if wanted.selects_row(row)]
        match order:
            case "worst" | "best":
                rated = sorted((row for row in found if row["reward"] is not None), key=_read_reward)
                unrated = [row for row in found if row["reward"] is None]
                return [*(rated if order == "worst" else reversed(rated)), *unrated]
            case "longest" | "shortest":
                return sorted(found, key=_read_length, reverse=order == "longest")
            case "trace":
                return found

    def read_rollout(self, file: BinaryIO, number: int) -> Row:
        """Return the whole rollout of a row.

        Raises:
            LookupError: the rollout does not exist, or its line no longer exists.
        """
        file.seek(self._by_number[number]["begin"])
        return next(iter(rollouts_of(file.readline(_LINE_MAX))), None) or _raise_gone(number)

    def lag_counts(self, policy: int) -> dict[int, int]:
        """Return the numbers of sampled tokens by the lag of their version behind `policy`."""
        found: Counter[int] = Counter()
        for row in self.rows:
            for version, tokens in row["versions"]:
                found[policy - version] += tokens
        return dict(sorted(found.items()))


def _raise_gone(number: int) -> Row:
    raise LookupError(number)


def _read_reward(row: IndexRow) -> float:
    assert row["reward"] is not None
    return row["reward"]


def _read_length(row: IndexRow) -> int:
    return row["completion_tokens"] or 0


def rollouts_of(line: bytes) -> list[Mapping[str, object]]:
    """Return the rollout in a line of a trace; an empty list if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return [row] if isinstance(row, dict) else []


def _read_entry(number: int, begin: int, row: Row) -> IndexRow:
    turns = trace_rollouts.list_turns(row)
    asked = next((turn.text for turn in turns if turn.role == "user"), "")
    said = next((turn.text for turn in reversed(turns) if turn.role == "assistant"), "")
    return {
        "number": number,
        "begin": begin,
        "attempt": row.get("attempt"),
        "group": _read_whole(row.get("group")),
        "rollout": _read_whole(row.get("rollout", row.get("sample"))),
        "environment": escape_controls(str(row.get("environment"))),  # the name that the page shows and filters by
        "task_id": str(row.get("task_id")),
        "reward": _read_number(row.get("reward")),
        "advantage": _read_number(row.get("advantage")),
        "tokens": _read_whole(row.get("tokens")),
        "completion_tokens": _read_whole(row.get("completion_tokens")),
        "finish_reason": reason if isinstance(reason := row.get("finish_reason"), str) else None,
        "truncated": row.get("truncated") is True,
        "error": str(row["error"]) if row.get("error") else None,
        "turns": len(turns),
        "versions": _version_counts(row),
        "prompt": asked[:_EXCERPT],
        "answer": said[-_EXCERPT:],
    }


def _version_counts(row: Row) -> tuple[tuple[int, int], ...]:
    """Return versions with the number of tokens that each sampled."""
    found: Counter[int] = Counter()
    for span in trace_rollouts.version_spans(row):
        version, start, end = (_read_whole(span.get(name)) for name in ("version", "start", "end"))
        if version is not None and start is not None and end is not None:
            found[version] += max(0, end - start)
    return tuple(sorted(found.items()))


def _read_whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _read_number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return None
