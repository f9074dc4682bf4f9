"""The two commands, from a request to an exit code."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID

from rlrun.config.loading.problems import ConfigError
from rlrun.evaluate import dataset, report
from rlrun.evaluate.answers import ANSWERS
from rlrun.evaluate.farewell import short_path, stopped_lines
from rlrun.evaluate.job import Request, describe_request, prepare_job
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.play import Part, answer_missing, until_signalled
from rlrun.evaluate.served.job import ServedJob, ServedRequest, prepare_served
from rlrun.evaluate.served.play import ask_servers
from rlrun.local.farewell import rows_text
from rlrun.local.measures import measures_table
from rlrun.orchestrator.failures import first_cause
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.runtime import exit_codes, role_log

_WIDTH = 160
"""Columns of a table that is written into a file or pipe."""


def run_evaluation(request: Request | ServedRequest, *, command: str) -> int:
    """Run `eval`; returns the exit code.

    Args:
        request: what is asked.
        command: what the user called, for the last words.
    """

    def finish(job: Plan, parts: list[Part], console: Console) -> int:
        document = report.results_document(job, parts)
        path = report.write_path(job.work)
        with storage_errors(job.work):
            write_json(path, document)
        console.print(measures_table(document))
        console.print(f"all of it: {path}", highlight=False, soft_wrap=True)
        code = _report_unanswered(parts)
        more = "more --samples-per-task or --max-tasks with the same command ask only what is new"
        again = f"{command} asks the rest" if report.unanswered_lines(parts) else more
        console.print(
            rows_text([("answers", short_path(job.work / ANSWERS)), ("go on", again)]),
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        return code

    return _run_command("eval", request, finish, command)


def preview_command(name: str, request: Request) -> int:
    """Print what a command would sample; returns the exit code.

    Args:
        name: the command.
        request: its options.
    """
    try:
        print(json.dumps(describe_request(request), indent=2, ensure_ascii=False))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    except RoleError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.code
    return exit_codes.OK


def run_synthesis(request: Request | ServedRequest, output: Path, *, min_reward: float | None, command: str) -> int:
    """Run `run_synthesis`; returns the exit code.

    Args:
        request: what is asked.
        output: the data set's file.
        min_reward: rollouts of a lower reward are left out.
        command: what the user called, for the last words.
    """

    def finish(job: Plan, parts: list[Part], console: Console) -> int:
        selected = dataset.select_rows(parts, min_reward=min_reward)
        left_out = [
            f"{count} left out because {why}"
            for count, why in (
                (selected.truncated, "a token limit cut them"),
                (selected.below, f"their reward is below {min_reward}"),
                (
                    selected.no_chat,
                    f"their messages are no chat: all must be objects with a role; they stay in {job.work}",
                ),
            )
            if count
        ]
        told = "; ".join([f"{len(selected.rows)} rollouts", *left_out])
        if not selected.rows:
            _report_unanswered(parts)
            raise RoleError(
                f"nothing to write: {told}; lower --min-reward, raise maxTokens, or sample more", exit_codes.DATA
            )
        dataset.write_rows(output, selected.rows)
        console.print(f"{output}: {told}", highlight=False, soft_wrap=True)
        code = _report_unanswered(parts)
        if code == exit_codes.OK and not report.unanswered_lines(parts) and not selected.no_chat:
            shutil.rmtree(job.work, ignore_errors=True)  # nothing is left to go on with
        kept = [("answers", short_path(job.work / ANSWERS))] if job.work.exists() else []
        use = f"train on it with task SFT and `data.sources: [{{path: {short_path(output)}}}]`"
        console.print(rows_text([*kept, ("go on", use)]), highlight=False, soft_wrap=True, markup=False)
        return code

    try:
        dataset.check_output(output)
    except RoleError as error:
        print(f"synthesize: {error}", file=sys.stderr)
        return error.code
    return _run_command("synthesize", request, finish, command)


def _run_command(
    name: str, request: Request | ServedRequest, finish: Callable[[Plan, list[Part], Console], int], command: str
) -> int:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH)
    told = Console(stderr=True)
    job: Plan | None = None

    def say(text: str, *, failed: bool) -> None:
        lines = (
            [text] if job is None else [text, stopped_lines(job.work, job.work / f"{name}.log", command, failed=failed)]
        )
        print("\n".join(lines), file=sys.stderr)

    try:
        job = prepare_served(request) if isinstance(request, ServedRequest) else prepare_job(request, told)
        with _lock_folder(job.work):
            role_log.configure_log(job.work / f"{name}.log", "{time:YYYY-MM-DD HH:mm:ss} | {level: <7} | {message}")
            with Shown(told) as shown:
                parts = (
                    until_signalled(ask_servers(job, shown))
                    if isinstance(job, ServedJob)
                    else answer_missing(job, shown)
                )
            return finish(job, parts, console)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    except KeyboardInterrupt:
        say(f"{name}: interrupted: {'nothing was asked' if job is None else 'everything is stopped'}", failed=False)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        raise  # the reader of the table has read enough
    except Exception as failure:
        cause = first_cause(failure)
        if isinstance(cause, RoleError):
            say(f"{name}: {cause}", failed=True)
            return cause.code
        if isinstance(cause, OSError):
            say(f"{name}: {cause.filename or 'volume'}: {cause.strerror}", failed=True)
            return exit_codes.STORAGE
        raise


class Shown:
    """Lines on stderr, and a bar below them where that is a terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def expect(self, answers: int) -> None:
        self._task = self._bar.add_task("answers", total=answers)

    def answered(self) -> None:
        if self._task is not None:
            self._bar.advance(self._task)


@contextmanager
def _lock_folder(work: Path) -> Iterator[None]:
    """Keep a second command out of a folder, for as long as this process lives.

    Raises:
        RoleError: another command is in it.
    """
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RoleError(
                f"another command works in {work}; wait for it, or choose another --output", exit_codes.UNAVAILABLE
            ) from None
        file.write(str(os.getpid()))
        file.flush()
        yield


def _report_unanswered(parts: list[Part]) -> int:
    """Say what was not answered; the exit code."""
    for line in report.unanswered_lines(parts):
        print(f"warning: {line}; the same command asks them again", file=sys.stderr)
    return exit_codes.DATA if report.nothing_answered(parts) else exit_codes.OK
