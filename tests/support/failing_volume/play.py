"""Player for every fault at every operation of a write: `python -m tests.support.failing_volume.play WRITER FOLDER
[--counts 1,4] [--every N] [--kills N]`.

Prints one JSON line per operation. The process has to be started with the variables of `failing_volume.environment`.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loguru import logger

from rlrun.protocol.files.failures import exit_code_of
from rlrun.protocol.files.paths import TMP_SUFFIX
from rlrun.runtime import exit_codes
from tests.support.failing_volume import KILL, FailingVolume
from tests.support.failing_volume.writers import WRITERS, Writer, without_pauses

NOT_TRIED = "not tried"
FAULTS = ("EIO", "ENOSPC", "EROFS", "EDQUOT", "ESTALE", "ETIMEDOUT")


@dataclass
class Result:
    """Results at one operation of a write."""

    operation: str
    number: int
    """Number of the operation, from 1."""
    faults: int = 0
    """Number of faults played at this operation."""
    went_on: int = 0
    """Number of faults after which the role completed its write."""
    ended: list[str] = field(default_factory=list)
    """Other faults: fault, exit code and message."""
    lost: list[str] = field(default_factory=list)
    """Errors found by a reader."""
    left: list[str] = field(default_factory=list)
    """Temporary files that stay, which no reader mistakes for data."""
    killed: str = NOT_TRIED
    """State found by a reader after a kill at this operation: old or new."""


def _unused(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob(f"*{TMP_SUFFIX}"))


def _template(root: Path) -> Path:
    return root.with_name("template")


def _prepare(writer: Writer, root: Path, begin: Callable[[], None]) -> None:
    """Make the state before the write once in a separate process, so that its threads and process groups are not forked
    again."""
    _template(root).mkdir()
    child = os.fork()
    if not child:
        begin()
        writer.prepare(_template(root))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the state before the write cannot be made"


def _fresh(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(_template(root), root)


def _read_state(writer: Writer, root: Path, result: Result, what: str) -> str:
    """Return the state found by a reader, and record an error if it is neither the old nor the new one."""
    try:
        return writer.seen(root)
    except Exception as error:
        result.lost.append(f"{what}: {type(error).__name__}: {error}")
        return "damaged"


def _play_fault(writer: Writer, root: Path, volume: FailingVolume, result: Result, name: str, count: int) -> None:
    _fresh(root)
    what, result.faults = f"{name} x {count}", result.faults + 1
    volume.arm(root, first=result.number, count=count, number=getattr(errno, name))
    try:
        writer.act(root, 1)
    except Exception as error:
        volume.disarm()
        code = exit_code_of(error)
        result.ended.append(f"{what}: {code}: {type(error).__name__}: {error}")
        _read_state(writer, root, result, f"{what}, at the end of the role")
        writer.act(root, 2)
    else:
        volume.disarm()
        result.went_on += 1
    if _read_state(writer, root, result, what) != "new":
        result.lost.append(f"{what}: reported as written, and a reader does not find it")
    if unused := _unused(root):
        result.left += unused


def _play_kill(writer: Writer, root: Path, volume: FailingVolume, result: Result, begin: Callable[[], None]) -> None:
    _fresh(root)
    child = os.fork()
    if not child:
        begin()
        volume.arm(root, first=result.number, number=KILL)
        writer.act(root, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        result.lost.append(f"kill: the operation was not reached (status {status})")
    result.killed = _read_state(writer, root, result, "kill")
    child = os.fork()
    if not child:
        begin()
        writer.act(root, 2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status or _read_state(writer, root, result, "the attempt after the kill") != "new":
        result.lost.append(f"kill: the next attempt has not written it (status {status})")


def play(
    writer: Writer,
    root: Path,
    counts: Sequence[int],
    every: int,
    begin: Callable[[], None] = lambda: None,
    kills: int = 1,
) -> list[Result]:
    """Return the results of all operations of a write.

    Args:
        writer: the write.
        root: folder that is created again for each fault.
        counts: numbers of consecutive operations that fail.
        every: distance of the tested operations.
        begin: function called in each process before its first write.
        kills: distance of the tested operations at which the process is killed.
    """
    volume = FailingVolume()
    results = []
    _prepare(writer, root, begin)
    for operation, number in _operations(writer, root, volume, begin):
        if number % every:
            continue
        results.append(Result(operation, number))
        if number // every % kills == 0:
            _play_kill(writer, root, volume, results[-1], begin)
    begin()
    for result in results:
        for name in FAULTS:
            for count in counts:
                _play_fault(writer, root, volume, result, name, count)
    return results


def _operations(writer: Writer, root: Path, volume: FailingVolume, begin: Callable[[], None]) -> list[tuple[str, int]]:
    """Return operations of the write without a fault, with their numbers, from a separate process."""
    _fresh(root)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        begin()
        volume.arm(root)
        writer.act(root, 1)
        volume.disarm()
        os.write(theirs, " ".join(volume.operations()).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        names = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0, "the write fails without a fault"
    return [(name, number) for number, name in enumerate(names, 1)]


def counted(results: Sequence[Result]) -> list[str]:
    """Return ends of a role that would count against its run's restarts."""
    return [end for result in results for end in result.ended if f": {exit_codes.STORAGE}: " not in end]


def main(argv: Sequence[str]) -> int:
    """Play a writer's faults; return 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.failing_volume.play")
    parser.add_argument("writer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--counts", default="1,4,40")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1)
    options = parser.parse_args(argv)
    logger.remove()
    without_pauses()
    writers, begin = dict(WRITERS), (lambda: None)
    if options.writer.startswith("real-"):
        from tests.support.failing_volume.torch_writers import TORCH_WRITERS, begin_rank

        writers, begin = TORCH_WRITERS, begin_rank
    counts = [int(count) for count in options.counts.split(",")]
    root = options.folder.resolve() / "run"
    for result in play(writers[options.writer], root, counts, options.every, begin, options.kills):
        print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
