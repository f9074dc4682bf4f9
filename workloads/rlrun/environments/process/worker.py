"""The inside of an environment's process: load the environment, play what is asked for, say what came of it.

Standard output and error lead into the environment's log, and the connection is a descriptor that no child inherits:
what an environment prints cannot be taken for a message. Started by `life`, never by hand.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.wire import Document, Lines, WireError, encode
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.environments.registry import EnvironmentLoadError, load
from rlrun.environments.stage import InProcessStage, Played, Stage, TaskRef
from rlrun.protocol import heap, stacks

_PR_SET_PDEATHSIG = 1
STACKS = signal.SIGUSR1
"""Makes the process write what all its threads do into its log, even while it computes."""


class ModelRefusedError(Exception):
    """The orchestrator's model client failed; its own error stays there."""


class _Model:
    """The policy, asked through the orchestrator."""

    def __init__(self, wire: Lines, rollout: int) -> None:
        self._wire, self._rollout = wire, rollout
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
        if self._answer is not None:
            raise RuntimeError("complete() was called again before it had answered; one call at a time")
        if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages):
            raise TypeError("messages must be dictionaries with a role")
        self._call += 1
        self._answer = asyncio.get_running_loop().create_future()
        call = {"rollout": self._rollout, "call": self._call}
        asked = {"messages": list(messages), "max_tokens": max_tokens, "stop": list(stop)}
        offered = {"tools": None if tools is None else list(tools)}
        try:
            self._wire.send({"op": "complete", **call, **asked, **offered})
            return await self._answer
        except asyncio.CancelledError:
            self._wire.send({"op": "abandon", **call})
            raise
        finally:
            self._answer = None

    def answered(self, document: Document) -> None:
        """A reply, or why there is none; one to a call that was given up is of no use."""
        if self._answer is None or self._answer.done() or document["call"] != self._call:
            return
        if document["op"] == "refused":
            self._answer.set_exception(ModelRefusedError(document["message"]))
        else:
            said = {field.name: document[field.name] for field in fields(Reply)}
            self._answer.set_result(Reply(**said | {"tool_calls": tuple(said["tool_calls"])}))


class Worker:
    """One connection's environment and the rollouts that it plays."""

    def __init__(self) -> None:
        self.wire = Lines(self._receive, self._lost)
        self._stage: Stage | None = None
        self._playing: dict[int, tuple[asyncio.Task[None], _Model]] = {}

    def _lost(self, error: WireError | None) -> None:
        os.killpg(0, signal.SIGKILL)  # the orchestrator is gone: nothing here is of use any more

    def _receive(self, document: Document) -> None:
        match document["op"]:
            case "reply" | "refused":
                if playing := self._playing.get(document["rollout"]):
                    playing[1].answered(document)
            case "play":
                number = document["rollout"]
                model = _Model(self.wire, number)
                self._playing[number] = asyncio.ensure_future(self._play(document, model)), model
            case "cancel":
                if playing := self._playing.get(document["rollout"]):
                    playing[0].cancel()
            case "ping":
                self.wire.send(self._pong(document))
            case "load":
                self._begin(document)

    def _begin(self, document: Document) -> None:
        self.wire.send(self._load(document))

    def _pong(self, document: Document) -> Document:
        return {"op": "pong", "number": document["number"]}

    def _load(self, document: Document) -> Document:
        try:
            self._stage = stage = InProcessStage(load(document["id"], document["args"]))
        except EnvironmentLoadError as error:
            return {"op": "unusable", "message": str(error)}
        except Exception as error:
            return {"op": "unusable", "message": f"its tasks cannot be read: {type(error).__name__}: {error}"}
        sizes = {"train": len(stage.tasks("train")), "eval": len(stage.tasks("eval"))}
        heap.spare()
        return {"op": "ready", "id": stage.id, "single_turn": stage.single_turn, **sizes}

    async def _play(self, document: Document, model: _Model) -> None:
        assert self._stage is not None
        number, task = document["rollout"], TaskRef(document["split"], document["index"])
        try:
            played = await self._stage.play(
                task, model, timeout_seconds=document["timeout_seconds"], reward_seconds=document["reward_seconds"]
            )
            line = _line(number, played, self._stage.id)
        except EpisodeError as error:
            failed = {"kind": error.kind, "task_id": error.task_id, "message": error.message}
            line = encode({"op": "failed", "rollout": number, **failed})
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
            line = self._raised(number, task, "cancelled itself")
        except (SystemExit, KeyboardInterrupt) as error:
            line = self._raised(number, task, f"raised {type(error).__name__}({error})")
        finally:
            self._playing.pop(number, None)
        self.wire.send_line(line)

    def _raised(self, number: int, task: TaskRef, message: str) -> bytes:
        failed = {"kind": "environment", "task_id": str(task), "message": f"its code {message}"}
        return encode({"op": "failed", "rollout": number, **failed})


def _line(number: int, played: Played, env_id: str) -> bytes:
    episode, score = played.episode, played.score
    try:
        return encode(
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
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the episode holds what is not JSON: {error}"
        raise EpisodeError("environment", env_id, played.task_id, message) from error


def _limit(parent: int, memory_bytes: int) -> None:
    """What must hold before any of the environment's code runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above: nobody would tell
        os._exit(1)
    # The orchestrator looks at the memory once in a while; this stops what allocates too fast for it. Not RLIMIT_AS: address space
    # that is only reserved (thread arenas, memory-mapped data sets) is no memory.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    backstop = 2 * memory_bytes
    if hard == resource.RLIM_INFINITY or backstop < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (backstop, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        # Should the container's memory be used up, the kernel is to choose this process, not the orchestrator.
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    stacks.listen()


async def _serve(connection: socket.socket) -> None:
    worker = Worker()
    await asyncio.get_running_loop().create_unix_connection(lambda: worker.wire, sock=connection)
    await asyncio.Event().wait()  # `Worker._lost` ends the process


def main(argv: Sequence[str]) -> None:
    """Serve one connection until it ends.

    Args:
        argv: descriptor of the connection, pid of the orchestrator, memory limit in bytes.
    """
    descriptor, parent, memory_bytes = map(int, argv)
    os.set_inheritable(descriptor, False)
    _limit(parent, memory_bytes)
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_serve(connection))
    except SystemExit as error:  # of a task that the environment started itself
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not a plain return: threads and tasks of the environment could hold the process for ever.
    os._exit(code)
