"""Checks of a verifiers 0.4 taskset at load: whether it can be played in this process. They avoid rollouts that would all fail.

The number of conversations per episode is known only at run time. A rehearsal counts it: `Env.run` plays a task with agents that end
each conversation immediately.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager

import verifiers.v1 as vf
from verifiers.v1.agent import Agents, Segment
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.utils.compile import resolve_runtime_config

from rlrun.environments.protocol import VerifiersLoadError

REHEARSAL_SECONDS = 5.0
"""Time limit of the rehearsal. If `Env.run` takes longer, the number of conversations is checked in real rollouts."""
_PLAYED_AS = ("null",)
"""Agent programs that our chat loop can replace."""


def check_seat(name: str, seat: AgentConfig) -> None:
    """Reject an agent's configuration if the chat loop would ignore a part of it.

    Raises:
        VerifiersLoadError: contains the field, its value and the fix.
    """
    at = f"env.{name}"
    default = AgentConfig()
    if seat.harness is not None:
        if seat.harness.id not in _PLAYED_AS:
            raise VerifiersLoadError(
                f"{at}.harness.id is {seat.harness.id!r}, but only our chat loop is supported: remove it, or set it to 'null'"
            )
        plain = type(seat.harness).model_validate({"id": seat.harness.id})
        for field, value in seat.harness:
            if value != getattr(plain, field):
                raise VerifiersLoadError(
                    f"{at}.harness.{field} is {value!r}, which our chat loop does not support: remove it"
                )
    if seat.runtime != default.runtime and not isinstance(seat.runtime, SubprocessConfig):
        raise VerifiersLoadError(
            f"{at}.runtime.type is {seat.runtime.type!r}, but the agent runs in process: remove it, or set it to 'subprocess'"
        )
    for field, instead in (
        ("model", "the agent uses the policy: remove it"),
        ("client", "the agent uses the policy: remove it"),
        ("sampling", "remove it and set environments[].sampling"),
    ):
        if (value := getattr(seat, field)) is not None:
            raise VerifiersLoadError(f"{at}.{field} is {value!r}; {instead}")
    if seat.retries != default.retries:
        raise VerifiersLoadError(f"{at}.retries is set, but a failed episode starts again from its prompt: remove it")


def check_toolsets(toolsets: Sequence[vf.Toolset], at: str) -> None:
    """Reject toolsets that run as servers.

    Raises:
        VerifiersLoadError: contains the field, its value and the fix.
    """
    for toolset in toolsets:
        name = type(toolset).__name__
        if url := getattr(toolset.config, "url", None):
            raise VerifiersLoadError(
                f"the tool server {name} of {at} has url {url!r}, but only tools in process are supported: remove url"
            )
        runtime = getattr(toolset.config, "runtime", None)
        if runtime is not None and not isinstance(runtime, SubprocessConfig):
            raise VerifiersLoadError(
                f"the tool server {name} of {at} has runtime.type {runtime.type!r}, but only tools in process are supported: "
                "set it to 'subprocess'"
            )


def check_tasks(env: vf.Env, tasks: Sequence[vf.Task]) -> None:
    """Reject tasks that are not supported.

    Raises:
        VerifiersLoadError: contains the task, the field, its value and the fix.
    """
    for index, task in enumerate(tasks):
        try:
            _check_task(env, task)
        except VerifiersLoadError as error:
            raise VerifiersLoadError(f"task {index}: {error}") from None
    for task in {type(task): task for task in tasks}.values():
        _check_type(env, task)


def _check_task(env: vf.Env, task: vf.Task) -> None:
    data = task.data
    if data.prompt is None and type(env) is SingleAgentEnv:
        raise VerifiersLoadError("it has no prompt, and its environment sends no first message: set prompt")
    if data.skills:
        raise VerifiersLoadError(f"skills is {data.skills!r}, but our chat loop has no skills: remove it")
    if data.agent_user is not None:
        raise VerifiersLoadError(f"agent_user is {data.agent_user!r}, but the agent runs in process: remove it")
    for message in [] if data.prompt is None or isinstance(data.prompt, str) else data.prompt:
        parts = message.content if isinstance(message.content, list) else []
        for part in parts:
            if part.type != "text":
                raise VerifiersLoadError(f"its prompt has content of type {part.type!r}; only 'text' is supported")
    try:
        resolve_runtime_config(SubprocessConfig(), task, set())
    except ValueError as error:
        raise VerifiersLoadError(f"{error} (tasks run in process)") from error
    check_toolsets(type(task).toolsets(task.config), type(task).__name__)


def _check_type(env: vf.Env, task: vf.Task) -> None:
    """Reject unsupported rewards, metrics and conversations, which all tasks of a type share."""
    name = type(task).__name__
    try:
        rewards, metrics, judges = task.hooks("reward"), task.hooks("metric"), task.plugged_judges()
    except Exception as error:
        raise VerifiersLoadError(
            f"the rewards, metrics and judges of taskset.task cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    for kind, functions in (("reward", rewards), ("metric", metrics)):
        for function in functions:
            if not inspect.iscoroutinefunction(inspect.unwrap(function)):
                raise VerifiersLoadError(
                    f"the {kind} {function.__name__!r} of {name} is not a coroutine: write 'async def'"
                )
    hooks = (
        (type(task).finalize, vf.Task.finalize),
        (type(env).finalize, vf.Env.finalize),
        (type(env).run, SingleAgentEnv.run),
    )
    if not rewards and not judges and all(own is base for own, base in hooks):
        raise VerifiersLoadError(f"{name} has no @vf.reward and no judge, so there is no reward to train on: add one")
    conversations = count_conversations(env, task)
    if conversations > 1:
        raise VerifiersLoadError(
            f"run() of {type(env).__name__} plays {conversations} conversations per episode; only one is supported. Play one: a run's "
            "groups compare several attempts at a task"
        )


def count_conversations(env: vf.Env, task: vf.Task) -> int:
    """Return the number of conversations that `Env.run` starts for a task with silent agents; 1 if it fails before the second one."""
    begun: list[Trace] = []

    async def play() -> None:
        agents = Agents(env.config, lambda _, config: _Silent(config, begun))
        async with asyncio.timeout(REHEARSAL_SECONDS):
            await env.setup(agents)
            await env.run(task, agents)

    _in_thread(play)
    return max(len(begun), 1)


def _in_thread(play: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run a coroutine in another thread, because this thread may already run an event loop. Exceptions are ignored."""

    def run() -> None:
        try:
            asyncio.run(play())
        except BaseException:  # code that fails with silent agents may still work in real rollouts
            return

    thread = threading.Thread(target=run, name="rehearsal", daemon=True)
    thread.start()
    thread.join(REHEARSAL_SECONDS + 1)


class _Silent:
    """Agent whose conversations end immediately."""

    def __init__(self, config: AgentConfig, begun: list[Trace]) -> None:
        self.config, self.trainable = config, True
        self._begun = begun

    async def run(self, task: vf.Task, **_: object) -> Trace:
        return self._make_trace(task)

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **_: object) -> AsyncIterator[_SilentInteraction]:
        yield _SilentInteraction(self._make_trace(task))

    def _make_trace(self, task: vf.Task) -> Trace:
        known = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = Trace(task=known, state=state_cls(type(task))(), agent=AgentInfo(config=self.config))
        self._begun.append(trace)
        trace.stop("agent_completed")
        return trace


class _SilentInteraction:
    """Conversation that is already over."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    async def turn(self, *_: object, **__: object) -> Segment:
        return Segment(messages=[], terminated=True)
