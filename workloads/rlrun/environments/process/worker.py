"""Code inside an environment's process: load the environment, play the requested rollouts and return the results.

Standard output and error are the environment's log, and the connection is a descriptor that children do not inherit. Therefore printed
text cannot be mistaken for a message. Every episode is answered exactly once, even if its code raises. `life` starts this program.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import os
import resource
import socket
from asyncio import CancelledError, get_running_loop
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from rlrun.config.algorithm.names import Kind
from rlrun.custom import bind
from rlrun.diagnostics import heap, stacks
from rlrun.environments.bounds import (
    MAX_REQUESTS,
    BoundsError,
    clip_text,
    describe_exception,
    plain_json,
    plain_messages,
)
from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.containment import enclosure, keeper
from rlrun.environments.process.event_loop import EpisodeLoop, StepHooks, print_exception
from rlrun.environments.process.heartbeat import Page
from rlrun.environments.process.wire import MAX_LINE_BYTES, Document, Lines, WireError, encode_document
from rlrun.environments.protocol import Episode, Message, Reply, Score, Tool
from rlrun.environments.registry import EnvironmentLoadError, load_environment
from rlrun.environments.splits import DuplicateTaskError, PromptError
from rlrun.environments.stage import InProcessStage, Played, Stage, TaskRef
from rlrun.protocol.files.failures import RoleError

BROKEN_LOOP, LOST = 179, 180
"""Exit codes of a process whose event loop is broken, and of one that has lost its connection."""

MAX_FILES = 16_384
"""Largest number of open files of each process of an environment."""


class ModelRefusedError(Exception):
    """Error that replaces an exception of the orchestrator's model client. The original exception stays in the orchestrator."""


class RemoteModel:
    """Model client that sends requests to the policy through the orchestrator.

    Args:
        rollout: number of the rollout.
    """

    def __init__(self, wire: Lines, rollout: int) -> None:
        self._wire, self.rollout = wire, rollout
        self._loop = get_running_loop()
        self._call = 0
        self._answer: asyncio.Future[Reply] | None = None

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        if get_running_loop() is not self._loop:
            # The reply is set in the episode's own loop, and could not wake up another loop.
            raise RuntimeError(
                "complete() was called in another event loop; await it in the loop that runs the episode, "
                "or call it from a thread with asyncio.run_coroutine_threadsafe"
            )
        if self._answer is not None:
            raise RuntimeError("complete() was called before the previous call returned; make one call at a time")
        if self._call >= MAX_REQUESTS:
            raise BoundsError(
                f"the episode has sent {MAX_REQUESTS} requests to the model, the largest number; end it earlier"
            )
        asked = _read_request(messages, max_tokens, stop, tools)
        call = {"rollout": self.rollout, "call": self._call + 1}
        line = encode_document({"op": "complete", **call, **asked})
        if len(line) > MAX_LINE_BYTES:
            raise BoundsError(f"messages and tools have {len(line)} bytes as JSON (at most {MAX_LINE_BYTES})")
        self._call += 1
        self._answer = get_running_loop().create_future()
        try:
            self._wire.send_line(line)
            return await self._answer
        except CancelledError:
            self._wire.send({"op": "abandon", **call})
            raise
        finally:
            self._answer = None

    def set_reply(self, document: Document) -> None:
        """Handle a reply or a refusal. Answers to abandoned calls are ignored."""
        if self._answer is None or self._answer.done() or document["call"] != self._call:
            return
        if document["op"] == "refused":
            self._answer.set_exception(ModelRefusedError(document["message"]))
        else:
            values = {field.name: document[field.name] for field in fields(Reply) if field.name in document}
            self._answer.set_result(Reply(**values | {"tool_calls": tuple(values["tool_calls"])}))


def _read_request(
    messages: Sequence[Message], max_tokens: int | None, stop: Sequence[str], tools: Sequence[Tool] | None
) -> Document:
    """Validate the arguments of a request and return it as a document.

    Raises:
        BoundsError: an argument is invalid; the message contains its name.
    """
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise BoundsError("max_tokens must be a whole number of at least 1, or None")
    words = plain_json(stop, "stop")
    if type(words) is not list or not all(type(word) is str and word for word in words):
        raise BoundsError("stop must be a list of non-empty texts")
    offered = None if tools is None else plain_json(tools, "tools")
    if offered is not None and (type(offered) is not list or not all(type(tool) is dict for tool in offered)):
        raise BoundsError("tools must be a list of dictionaries")
    return {"messages": plain_messages(messages), "max_tokens": max_tokens, "stop": words, "tools": offered}


@dataclass
class _Playing:
    """A running episode."""

    model: RemoteModel
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    """Whether the orchestrator has canceled the episode, which then gets no answer."""


class Worker:
    """Environment of one connection, and its running rollouts.

    Args:
        page: page that records whose code runs, or None.
    """

    def __init__(self, page: Page | None = None) -> None:
        # No threads: user code may fork this process, and may replace the functions that decode.
        self.wire = Lines(self._receive_message, self._on_connection_lost, apart=False)
        self._stage: Stage | None = None
        self._page = page
        self._playing: dict[int, _Playing] = {}

    def _on_connection_lost(self, error: WireError | None) -> None:
        os._exit(LOST)  # the keeper ends the other processes

    def _receive_message(self, document: Document) -> None:
        match document["op"]:
            case "reply" | "refused":
                if playing := self._playing.get(document["rollout"]):
                    playing.model.set_reply(document)
            case "play" | "compare":
                self._start_rollout(document)
            case "cancel":
                if (playing := self._playing.get(document["rollout"])) and playing.task is not None:
                    playing.cancelled = True
                    playing.task.cancel()
            case "ping":
                self.wire.send(self._make_pong(document))
            case "load":
                self._handle_load(document)

    def _handle_load(self, document: Document) -> None:
        self.wire.send(self._load_code(document))

    def _make_pong(self, document: Document) -> Document:
        return {"op": "pong", "number": document["number"]}

    def _load_code(self, document: Document) -> Document:
        if (kind := document.get("kind", "environment")) != "environment":
            return _call_checked(document) if kind == "check" else _bind_function(kind, document)
        try:
            self._stage = stage = InProcessStage(load_environment(document["id"], document["args"]))
            stage.check_tasks()
            sizes = {"train": len(stage.tasks("train")), "eval": len(stage.tasks("eval"))}
            kind_of = {"single_turn": stage.single_turn, "compares": stage.compares}
            ready = {
                "op": "ready",
                "id": stage.id,
                **kind_of,
                **sizes,
                "notices": stage.notices,
                "digests": stage.digests,
            }
        except EnvironmentLoadError as error:
            missing = isinstance(error.__cause__, ImportError | RoleError)  # a missing package, or missing data
            return _unusable_answer(str(error), error) | {"missing": missing}
        except (DuplicateTaskError, PromptError) as error:
            return _unusable_answer(f"environment {document['id']!r}: {error}", error)
        except BaseException as error:
            return _unusable_answer(
                f"environment {document['id']!r}: its code raised {describe_exception(error)} while loading", error
            )
        heap.freeze_loaded()
        return ready

    def _start_rollout(self, document: Document) -> None:
        number = document["rollout"]
        playing = self._playing[number] = _Playing(RemoteModel(self.wire, number))
        loop, page, work = get_running_loop(), self._page, self._send_result(document, playing)
        if not isinstance(loop, EpisodeLoop) or page is None:
            playing.task = loop.create_task(work)
            return

        # Each step of the episode's coroutine is bracketed, so that the page always shows whose code runs.
        def end_step() -> None:
            loop.end_if_forked()
            page.enter(0)

        playing.task = loop.start_task(StepHooks(work, lambda: page.enter(number), end_step))

    async def _send_result(self, document: Document, playing: _Playing) -> None:
        """Play an episode or compare a group, and send the result."""
        assert self._stage is not None
        stage, number, task = self._stage, document["rollout"], TaskRef(document["split"], document["index"])
        deadlines = {name: document[name] for name in ("timeout_seconds", "reward_seconds")}
        try:
            if document["op"] == "compare":
                group = [_read_member(member) for member in document["members"]]
                scores = await self._compare_group(stage, number, task, group, deadlines)
                line = encode_document({"op": "compared", "rollout": number, **_read_columns(scores)})
            else:
                line = _answer_line(number, await stage.play(task, playing.model, **deadlines), stage.id)
        except EpisodeError as error:
            line = _failed_answer(number, error.kind, error.task_id, error.message)
        except BaseException as error:
            if playing.cancelled:
                return
            what = "was cancelled by other code of the environment" if isinstance(error, CancelledError) else None
            line = _failed_answer(
                number, "environment", str(task), what or f"its code raised {describe_exception(error)}"
            )
        finally:
            self._playing.pop(number, None)
        self.wire.send_line(line)

    async def _compare_group(
        self, stage: Stage, number: int, task: TaskRef, group: Sequence[Played], deadlines: Mapping[str, float]
    ) -> list[Score]:
        return await stage.compare(task, group, **deadlines)


def _failed_answer(number: int, kind: str, task_id: str, message: str) -> bytes:
    failed = {"kind": kind, "task_id": task_id, "message": clip_text(message)}
    return encode_document({"op": "failed", "rollout": number, **failed})


def _unusable_answer(message: str, error: BaseException) -> Document:
    return {"op": "unusable", "message": clip_text(message), "missing": isinstance(error.__cause__, ImportError)}


def _bind_function(kind: Kind, document: Document) -> Document:
    """Import a user's loss or advantage and check its options against its parameters."""
    try:
        bind(kind, document["id"], {}, document["args"])
    except ValueError as error:
        return _unusable_answer(str(error), error)
    except BaseException as error:
        return _unusable_answer(
            f"{kind} {document['id']!r}: its code raised {describe_exception(error)} while loading", error
        )
    return _nothing_to_play(document)


def _call_checked(document: Document) -> Document:
    """Call one of RLRun's own checks, which may run users' code. If it returns a list, the list becomes the notices."""
    module, name = document["id"].split(":")
    try:
        with heap.without_collector():
            check = getattr(importlib.import_module(module), name)
        notices = check(**document["args"])
    except RoleError as error:
        return _unusable_answer(str(error), error)
    except ImportError as error:
        return _unusable_answer(describe_exception(error), error) | {"missing": True}
    except BaseException as error:
        return _unusable_answer(f"its check raised {describe_exception(error)}", error)
    return _nothing_to_play(document) | {"notices": notices if isinstance(notices, list) else []}


def _nothing_to_play(document: Document) -> Document:
    return {"op": "ready", "id": document["id"], "single_turn": True, "compares": False, "train": 0, "eval": 0}


def _read_member(document: Document) -> Played:
    return Played(
        "", Episode(document["messages"], document["replies"]), Score(document["reward"], document["metrics"])
    )


def _read_columns(scores: Sequence[Score]) -> Document:
    return {"rewards": [score.reward for score in scores], "metrics": [score.metrics for score in scores]}


def _answer_line(number: int, played: Played, env_id: str) -> bytes:
    episode, score = played.episode, played.score
    line = encode_document(
        {
            "op": "played",
            "rollout": number,
            "task_id": played.task_id,
            "messages": episode.messages,
            "replies": episode.replies,
            "info": episode.info,
            "reward": score.reward,
            "metrics": score.metrics,
        }
    )
    if len(line) > MAX_LINE_BYTES:
        message = f"the episode has {len(line)} bytes as JSON (at most {MAX_LINE_BYTES}); return less"
        raise EpisodeError("environment", env_id, played.task_id, message)
    return line


def _set_limits(memory_bytes: int) -> None:
    """Set the process's limits before any code of the environment runs."""
    # The orchestrator checks the memory periodically; this limit stops allocations that are too fast for it. RLIMIT_AS is not used,
    # because reserved address space (thread arenas, memory-mapped data sets) is not memory.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    backstop = 2 * memory_bytes
    if hard == resource.RLIM_INFINITY or backstop < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (backstop, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The orchestrator raises its own limit for all its connections; one environment must not inherit it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files[0], MAX_FILES), min(files[1], MAX_FILES)))
    with suppress(OSError):
        # If the container runs out of memory, the kernel kills this process and not the orchestrator.
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()
    faulthandler.register(keeper.STACKS, all_threads=False)  # see `stacks.answer_requests`
    stacks.answer_requests()


def main(argv: Sequence[str]) -> NoReturn:
    """Serve one connection until it ends.

    Args:
        argv: descriptor of the connection, descriptor of the heartbeat's page, pid of the orchestrator, memory limit in bytes, and the
            only folders that the environment may write. Without folders, it may write all.
    """
    # The order matters: the keeper must exist before any other process, and the limits apply before user code is imported.
    descriptor, page_descriptor, parent, memory_bytes = map(int, argv[:4])
    os.set_inheritable(descriptor, False)
    keeper.fork_kept(parent)
    _set_limits(memory_bytes)
    enclosure.enclose_process(writable=argv[4:] or None)
    page = Page(page_descriptor)
    page.close_descriptor()
    page.start()
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    loop = EpisodeLoop()
    asyncio.set_event_loop(loop)
    worker = Worker(page)
    os.register_at_fork(after_in_child=worker.wire.stop_sending)
    try:
        loop.run_until_complete(loop.create_unix_connection(lambda: worker.wire, sock=connection))
        loop.run_without_end()
    except BaseException:
        print_exception()
    # `os._exit`, not return: threads and tasks of the environment could keep the process running.
    os._exit(BROKEN_LOOP)
