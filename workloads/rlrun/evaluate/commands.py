"""Commands `eval` and `synthesize`, from a request to an exit code.

The final lines contain the saved answers, the logs and the command that continues the work.
"""

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
from rlrun.evaluate import report, sampled_rows
from rlrun.evaluate.answers import ANSWERS
from rlrun.evaluate.evaluation_job import Request, describe_request, prepare_job
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.play import AnswerSource, EngineAnswers, Part, answer_missing
from rlrun.evaluate.served.served_play import ServedRequest, ServerAnswers, prepare_served
from rlrun.local.summary import measures_table, rows_text
from rlrun.orchestrator.attempt import first_cause
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError, storage_errors, volume_is_full
from rlrun.runtime import exit_codes, process_logs


def stopped_lines(work: Path, log: Path, command: str, *, failed: bool) -> str:
    """Return the lines after a signal or a failure.

    Args:
        work: folder of the command's answers.
        log: path of its log.
        command: command line that continues the work.
        failed: whether it failed; False after a signal.
    """
    return rows_text(_stopped_text(work, log, command, failed=failed))


def _stopped_text(work: Path, log: Path, command: str, *, failed: bool) -> Iterator[tuple[str, str]]:
    count = _count_answered(work / ANSWERS)
    answers = f"{count} answer{'s' if count > 1 else ''} in {short_path(work / ANSWERS)}"
    yield "saved", f"{answers}, which will not be requested again" if count else "no answers yet"
    if log.is_file():
        yield "log", short_path(log)
    logs = work / "logs"
    if logs.is_dir():
        yield "logs", short_path(logs)
    if volume_is_full(work):
        yield "full", f"the volume of {work} has no free space"
    yield "repair the cause, then continue" if failed else "continue", command


def short_path(path: Path) -> str:
    """Return the shortest form of a path from the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _count_answered(folder: Path) -> int:
    """Count the answers in a folder's files, without failures and damaged lines."""
    count = 0
    for file in folder.rglob("*.jsonl") if folder.is_dir() else ():
        for line in file.read_bytes().splitlines():
            try:
                document = json.loads(line)
            except ValueError:
                continue
            count += isinstance(document, dict) and "error" not in document
    return count


_WIDTH = 160
"""Columns of a table that is written to a file or pipe."""


def run_evaluation(request: Request | ServedRequest, *, command: str) -> int:
    """Run `eval` and return the exit code.

    Args:
        request: options of the command.
        command: command line of the user, for the final lines.
    """

    def finish(job: Plan, parts: list[Part], console: Console) -> int:
        document = report.results_document(job, parts)
        path = report.write_path(job.work)
        with storage_errors(job.work):
            write_json(path, document)
        console.print(measures_table(document))
        console.print(f"results: {path}", highlight=False, soft_wrap=True)
        code = _report_unanswered(parts)
        more = "the same command with more --samples-per-task or --max-tasks requests only the new answers"
        rest = f"{command} requests the missing answers" if report.unanswered_lines(parts) else more
        console.print(
            rows_text([("answers", short_path(job.work / ANSWERS)), ("continue", rest)]),
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        return code

    return _run_command("eval", request, finish, command)


def preview_command(name: str, request: Request) -> int:
    """Print the samples that a command would request, and return the exit code.

    Args:
        name: name of the command.
        request: options of the command.
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
    """Run `synthesize` and return the exit code.

    Args:
        request: options of the command.
        output: file of the data set.
        min_reward: minimum reward of a rollout. None: no minimum.
        command: command line of the user, for the final lines.
    """

    def finish(job: Plan, parts: list[Part], console: Console) -> int:
        selected = sampled_rows.select_rows(parts, min_reward=min_reward)
        left_out = [
            f"{count} skipped because {why}"
            for count, why in (
                (selected.truncated, "a token limit cut them"),
                (selected.below, f"their reward is below {min_reward}"),
                (
                    selected.no_chat,
                    f"a message is not an object with a role; these rollouts stay in {job.work}",
                ),
            )
            if count
        ]
        summary = "; ".join([f"{len(selected.rows)} rollouts", *left_out])
        if not selected.rows:
            _report_unanswered(parts)
            raise RoleError(
                f"no rows to write: {summary}; decrease --min-reward, increase maxTokens, or sample more",
                exit_codes.DATA,
            )
        sampled_rows.write_rows(output, selected.rows)
        console.print(f"{output}: {summary}", highlight=False, soft_wrap=True)
        code = _report_unanswered(parts)
        if code == exit_codes.OK and not report.unanswered_lines(parts) and not selected.no_chat:
            shutil.rmtree(job.work, ignore_errors=True)  # all answers are in the output
        kept = [("answers", short_path(job.work / ANSWERS))] if job.work.exists() else []
        use = f"train on it with task SFT and `data.sources: [{{path: {short_path(output)}}}]`"
        console.print(rows_text([*kept, ("next", use)]), highlight=False, soft_wrap=True, markup=False)
        return code

    try:
        sampled_rows.check_output(output)
    except RoleError as error:
        print(f"synthesize: {error}", file=sys.stderr)
        return error.code
    return _run_command("synthesize", request, finish, command)


def _run_command(
    name: str, request: Request | ServedRequest, finish: Callable[[Plan, list[Part], Console], int], command: str
) -> int:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH)
    errors = Console(stderr=True)
    job: Plan | None = None

    def print_end(text: str, *, failed: bool) -> None:
        lines = (
            [text] if job is None else [text, stopped_lines(job.work, job.work / f"{name}.log", command, failed=failed)]
        )
        print("\n".join(lines), file=sys.stderr)

    try:
        source = _prepare_source(request, errors)
        job = source.plan
        with _lock_folder(job.work):
            process_logs.configure_log(job.work / f"{name}.log", "{time:YYYY-MM-DD HH:mm:ss} | {level: <7} | {message}")
            with Shown(errors) as shown:
                parts = answer_missing(source, shown)
            return finish(job, parts, console)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    except KeyboardInterrupt:
        print_end(f"{name}: interrupted {'before the first request' if job is None else 'and stopped'}", failed=False)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        raise  # the reader of the table has closed the pipe
    except Exception as failure:
        cause = first_cause(failure)
        if isinstance(cause, RoleError):
            print_end(f"{name}: {cause}", failed=True)
            return cause.code
        if isinstance(cause, OSError):
            print_end(f"{name}: {cause.filename or 'volume'}: {cause.strerror}", failed=True)
            return exit_codes.STORAGE
        raise


def _prepare_source(request: Request | ServedRequest, console: Console) -> AnswerSource:
    if isinstance(request, ServedRequest):
        return ServerAnswers(prepare_served(request))
    return EngineAnswers(prepare_job(request, console))


class Shown:
    """Lines on stderr, with a progress bar below them on a terminal."""

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
    """Lock a folder against a second command, until this process ends.

    Raises:
        RoleError: another command uses it.
    """
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RoleError(
                f"{work} is in use by another command; wait for it, or choose another --output", exit_codes.UNAVAILABLE
            ) from None
        file.write(str(os.getpid()))
        file.flush()
        yield


def _report_unanswered(parts: list[Part]) -> int:
    """Print the unanswered questions and return the exit code."""
    for line in report.unanswered_lines(parts):
        print(f"warning: {line}; the same command requests them again", file=sys.stderr)
    return exit_codes.DATA if report.nothing_answered(parts) else exit_codes.OK
