"""Logs of a run's roles: files in its folder, pods in a cluster, and files on the cluster's volume for ended attempts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrun.inspect.small_files import read_tail
from rlrun.inspect.source import NotFoundError
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime.redact import LogLines

ROLES: Sequence[Role] = ("trainer", "inference", "orchestrator")
_LINE_BYTES = 2000
"""Assumed length of a line in bytes. It determines how much of a file's end is read for a number of lines."""
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class LogSelection:
    """Selection of roles, rank, attempt and number of lines."""

    roles: Sequence[Role]
    rank: int | None
    """Rank of the trainer, or index of the engine; None: all."""
    attempt: int | None
    """Number of the attempt; None: the newest."""
    lines: int


@dataclass(frozen=True)
class LogFile:
    """Log file, and the filter of its lines."""

    path: Path
    label: str
    rank: int | None = None
    """Rank of the trainer whose lines are selected; None: all lines.

    All ranks of a pod write to one file, in which torchrun adds a prefix such as `[rank3]` or `[default3]` to each line.
    """

    def selects_line(self, line: str) -> bool:
        """Return whether a line is selected."""
        marked = re.match(r"\[(?:rank|default)(\d+)\]", line)
        return self.rank is None or (marked is not None and int(marked[1]) == self.rank)


def attempt_folders(root: Path) -> dict[int, Path]:
    """Return the log folders by attempt, oldest first. Their names have leading zeros (`attempt_0003`), so they sort as texts."""
    logs = root / "logs"
    found = [(re.fullmatch(r"attempt_(\d+)", path.name), path) for path in logs.iterdir()] if logs.is_dir() else []
    return {int(match[1]): path for match, path in sorted(found, key=lambda item: item[1]) if match is not None}


def list_log_files(root: Path, selection: LogSelection) -> list[LogFile]:
    """Return the selected log files of a run's folder.

    Call this only if `attempt_folders` returns at least one attempt.

    Raises:
        NotFoundError: no file matches; the message lists the existing ones.
    """
    attempts = attempt_folders(root)
    attempt = selection.attempt if selection.attempt is not None else max(attempts)
    if attempt not in attempts:
        raise NotFoundError(f"--attempt: {root} has no attempt {attempt}; it has {', '.join(map(str, attempts))}")
    found = [file for role in selection.roles for file in _of_role(root, attempt, role, selection.rank)]
    if selection.rank is not None and (problem := _rank_problem(root, attempt, selection.roles, selection.rank)):
        raise NotFoundError(problem)
    if not found:
        there = sorted(str(path.relative_to(root)) for path in attempts[attempt].glob("*/*.log"))
        known = (
            f"existing logs: {', '.join(there)}"
            if there
            else "roles that were started by hand write only to their terminals"
        )
        raise NotFoundError(f"attempt {attempt} has no such log; {known}")
    return found


def _rank_problem(root: Path, attempt: int, roles: Sequence[Role], rank: int) -> str | None:
    """Return a message for a rank that no selected role has.

    Returns None if a role has it, or if the number of processes of any selected role is unknown: that role may have the rank.
    """
    counts = {role: _count_processes(root, attempt, role) for role in roles}
    known = {role: count for role, count in counts.items() if count}
    if not known or len(known) < len(counts) or rank < max(known.values()):
        return None
    there = ", ".join(
        f"{role} has {'rank 0' if count == 1 else f'ranks 0 to {count - 1}'}" for role, count in known.items()
    )
    return f"--rank: got {rank}, but {there} in attempt {attempt}; write --rank {max(known.values()) - 1}"


def _count_processes(root: Path, attempt: int, role: Role) -> int:
    """Return the number of a role's processes: of log files for engines, from the run's configuration for the trainer; 0: unknown."""
    if role == "orchestrator":
        return 1
    paths = RunPaths(root)
    if role == "inference":
        return len(list(paths.logs(attempt, role).glob("inference*.log")))
    try:
        trainer = json.loads(paths.run_json.read_bytes())["trainer"]
        each = trainer.get("processes_per_replica") or trainer.get("gpus_per_replica") or 1
        return int(trainer["replicas"]) * int(each)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _of_role(root: Path, attempt: int, role: Role, rank: int | None) -> list[LogFile]:
    """Return the log files of one role.

    The orchestrator has one process and reports on all roles, so a rank does not exclude its log. An engine's rank is the number in its
    file's name, `inference-<rank>.log`; a single engine writes `inference.log` and has rank 0.
    """
    paths = sorted(RunPaths(root).logs(attempt, role).glob("*.log"))
    if rank is None or role == "orchestrator":
        return [LogFile(path, path.stem) for path in paths]
    if role == "inference":
        one = [path for path in paths if path.stem in (f"inference-{rank}", "inference" if rank == 0 else "")]
        return [LogFile(path, path.stem) for path in one]
    return [LogFile(path, path.stem, rank) for path in paths if path.stem == "trainer"]


def read_last_lines(file: LogFile, count: int, *, complete_only: bool = False) -> tuple[list[str], int]:
    """Return the last selected lines of a file, and the offset in bytes at which `follow_lines` continues.

    Args:
        file: log file.
        count: maximum number of lines.
        complete_only: whether to leave an incomplete last line for `follow_lines`.
    """
    content, offset = read_tail(file.path, max(64 * 1024, count * _LINE_BYTES))
    if complete_only:
        complete = content[: content.rfind(b"\n") + 1]
        content, offset = complete, offset - len(content) + len(complete)
    return [line for line in content.decode(errors="replace").splitlines() if file.selects_line(line)][-count:], offset


def show_line(file: LogFile, line: str, filters: Mapping[Path, LogLines], *, several: bool) -> str:
    """Return a line for the terminal, with the name of its file if several are shown.

    Args:
        file: file of the line.
        line: text of the line.
        filters: for each file, the object that removes secrets from its lines.
        several: whether the terminal shows other files, too.
    """
    text = filters[file.path].clean(line)
    return f"{file.label} | {text}" if several else text


def follow_lines(
    found: Sequence[tuple[LogFile, int]], alive: Callable[[], bool], pause: Callable[[float], None] = time.sleep
) -> Iterator[tuple[LogFile, str]]:
    """Yield new lines until the run has ended and all lines are read.

    Args:
        found: log files, each with the offset of its first new line in bytes, from `read_last_lines`. A truncated file is followed from
            its new end.
        alive: function that returns whether the run is active.
        pause: function that waits between two reads.
    """
    files, offsets = [file for file, _ in found], {file.path: offset for file, offset in found}
    while True:
        going = alive()  # before reading, so that lines from before the end are still read below
        for file in files:
            size = _file_size(file.path)
            if size < offsets[file.path]:
                offsets[file.path] = size
            lines, offsets[file.path] = _new_lines(file.path, offsets[file.path], complete_only=going)
            yield from ((file, line) for line in lines if file.selects_line(line))
        if not going:
            return
        pause(_POLL_SECONDS)


def _new_lines(path: Path, offset: int, *, complete_only: bool) -> tuple[list[str], int]:
    """Return the lines after an offset, and the next offset. `complete_only`: leave an incomplete last line for the next call."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except OSError:
        return [], offset
    if complete_only:
        content = content[: content.rfind(b"\n") + 1]
    return content.decode(errors="replace").splitlines(), offset + len(content)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
