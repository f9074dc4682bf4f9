"""Conversion of rollouts to rows of a data set for supervised fine-tuning: OpenAI chats with their origin."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrun.evaluate.play import Part
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import TMP_SUFFIX
from rlrun.runtime import exit_codes

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Selected:
    """Rollouts selected as rows, and counts of the others."""

    rows: Sequence[dict[str, object]]
    truncated: int
    """Number of rollouts skipped because a limit cut their last message, which would teach the model to stop in the
    middle.
    """
    below: int
    """Number of rollouts skipped because of a low reward."""
    no_chat: int = 0
    """Number of rollouts skipped because a message is not an object with a role."""


def select_rows(parts: Sequence[Part], *, min_reward: float | None) -> Selected:
    """Select the rows, in order of environment, task and sample.

    Args:
        parts: parts of one policy.
        min_reward: minimum reward of a rollout. None: no minimum.
    """
    rows: list[dict[str, object]] = []
    truncated = below = no_chat = 0
    for part in parts:
        for answer in part.answers():
            if answer.rollout is None:
                continue
            if answer.rollout.truncated:
                truncated += 1
            elif min_reward is not None and answer.rollout.reward < min_reward:
                below += 1
            elif not _is_chat(answer.messages):
                no_chat += 1
            else:
                rows.append(
                    {
                        "messages": answer.messages,
                        "tools": answer.tools,
                        "environment": answer.environment,
                        "task_id": answer.task_id,
                        "sample": answer.sample,
                        "reward": answer.rollout.reward,
                        "policy": part.policy.name,
                    }
                )
    if not any(row["tools"] for row in rows):
        for row in rows:
            del row["tools"]
    plain = [{name: _as_text(value) for name, value in row.items()} for row in rows]
    return Selected(plain, truncated, below, no_chat)


def _is_chat(messages: Sequence[object]) -> bool:
    return all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages)


def _as_text(value: object) -> object:
    """Return the value with U+FFFD instead of lone surrogates, which neither UTF-8 files nor tokenizers accept."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, list | tuple) else value


def check_output(path: Path) -> None:
    """Refuse an unwritable output before the first question is sent.

    Raises:
        RoleError: the suffix is unsupported, the file exists, or a package is missing.
    """
    if path.suffix not in SUFFIXES:
        raise RoleError(f"--output: got {path.name}; expected a name that ends in .jsonl or .parquet", exit_codes.USAGE)
    if path.exists():
        raise RoleError(f"--output: {path} exists; choose another name or remove it", exit_codes.USAGE)
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise RoleError(
                f"--output: {path.name} needs the package pyarrow; install it, or write .jsonl",
                exit_codes.CONFIGURATION,
            ) from None


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write the file, which appears only when it is complete.

    Raises:
        RoleError: the volume refuses the write, or the rows do not fit a table.
    """
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            write_bytes(path, "".join(_row_lines(rows)).encode())
        else:
            _write_parquet(path, rows)


def _row_lines(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(path: Path, rows: Sequence[dict[str, object]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path.with_name(path.name + TMP_SUFFIX)
    try:
        # Tool schemas have arbitrary shapes, which do not fit a column type; `sft` also reads them as JSON.
        flat = [row | {"tools": json.dumps(row["tools"])} if "tools" in row else row for row in rows]
        pq.write_table(pa.Table.from_pylist(flat), temporary)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        temporary.unlink(missing_ok=True)
        raise RoleError(
            f"--output: the rollouts do not fit the columns of a table ({str(error).splitlines()[0]}); write .jsonl instead",
            exit_codes.DATA,
        ) from None
    temporary.replace(path)
