"""Check at load that a verifiers 0.4 taskset can be played in this process, so that no rollout is spent on the answer.

What verifiers knows only while it runs is found by a rehearsal: `Env.run` plays a task with agents that say nothing and count how often
they are asked for a conversation.
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

from rlrun.environments.adapters.verifiers_errors import VerifiersLoadError

REHEARSAL_SECONDS = 5.0
"""A longer `Env.run` is left to the rollouts."""
_PLAYED_AS = ("null",)
"""The agent program whose place our chat loop takes."""


def check_seat(name: str, seat: AgentConfig) -> None:
    """Refuse a seat whose configuration the chat loop would have to ignore.

    Raises:
        VerifiersLoadError: names the field, its value and what to do.
    """
    at = f"env.{name}"
    default = AgentConfig()
    if seat.harness is not None:
        if seat.harness.id not in _PLAYED_AS:
            raise VerifiersLoadError(
                f"{at}.harness.id is {seat.harness.id!r}, and here the agent is our chat loop: leave it out, or set it to 'null'"
            )
        plain = type(seat.harness).model_validate({"id": seat.harness.id})
        for field, value in seat.harness:
            if value != getattr(plain, field):
                raise VerifiersLoadError(
                    f"{at}.harness.{field} is {value!r}, which our chat loop does not know: remove it"
                )
    if seat.runtime != default.runtime and not isinstance(seat.runtime, SubprocessConfig):
        raise VerifiersLoadError(
            f"{at}.runtime.type is {seat.runtime.type!r}, and here the agent runs in process: remove it, or set it to 'subprocess'"
        )
    for field, instead in (
        ("model", "the policy plays: remove it"),
        ("client", "the policy plays: remove it"),
        ("sampling", "remove it and set environments[].sampling"),
    ):
        if (value := getattr(seat, field)) is not None:
            raise VerifiersLoadError(f"{at}.{field} is {value!r}; {instead}")
    if seat.retries != default.retries:
        raise VerifiersLoadError(f"{at}.retries is set, and a failed episode begins from its prompt again: remove it")


def check_toolsets(toolsets: Sequence[vf.Toolset], at: str) -> None:
    """Refuse toolsets that are servers.

    Raises:
        VerifiersLoadError: names the field, its value and what to do.
    """
    for toolset in toolsets:
        name = type(toolset).__name__
        if url := getattr(toolset.config, "url", None):
            raise VerifiersLoadError(
                f"the tool server {name} of {at} has url {url!r}, and only tools in process are called: remove url"
            )
        runtime = getattr(toolset.config, "runtime", None)
        if runtime is not None and not isinstance(runtime, SubprocessConfig):
            raise VerifiersLoadError(
                f"the tool server {name} of {at} has runtime.type {runtime.type!r}, and only tools in process are called: "
                "set it to 'subprocess'"
            )


def check_tasks(env: vf.Env, tasks: Sequence[vf.Task]) -> None:
    """Refuse tasks that cannot be played.

    Raises:
        VerifiersLoadError: names the task, what it asks for, its value and what to do.
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
        raise VerifiersLoadError("it has no prompt, and its environment plays no user who would begin: set prompt")
    if data.skills:
        raise VerifiersLoadError(f"skills is {data.skills!r}, and our chat loop has none: remove it")
    if data.agent_user is not None:
        raise VerifiersLoadError(f"agent_user is {data.agent_user!r}, and the agent runs in process: remove it")
    for message in [] if data.prompt is None or isinstance(data.prompt, str) else data.prompt:
        parts = message.content if isinstance(message.content, list) else []
        for part in parts:
            if part.type != "text":
                raise VerifiersLoadError(f"its prompt has content of type {part.type!r}; only 'text' is supported")
    try:
        resolve_runtime_config(SubprocessConfig(), task, set())
    except ValueError as error:
        raise VerifiersLoadError(f"{error} (here tasks run in process)") from error
    check_toolsets(type(task).toolsets(task.config), type(task).__name__)


def _check_type(env: vf.Env, task: vf.Task) -> None:
    """Refuse what all tasks of a type have in common and cannot be played."""
    name = type(task).__name__
    try:
        rewards, metrics, judges = task.hooks("reward"), task.hooks("metric"), task.plugged_judges()
    except Exception as error:
        raise VerifiersLoadError(
            f"the rewards, metrics and judges of taskset.task cannot be had: {type(error).__name__}: {error}"
        ) from error
    for kind, functions in (("reward", rewards), ("metric", metrics)):
        for function in functions:
            if not inspect.iscoroutinefunction(inspect.unwrap(function)):
                raise VerifiersLoadError(
                    f"the {kind} {function.__name__!r} of {name} is no coroutine: write 'async def'"
                )
    hooks = (
        (type(task).finalize, vf.Task.finalize),
        (type(env).finalize, vf.Env.finalize),
        (type(env).run, SingleAgentEnv.run),
    )
    if not rewards and not judges and all(own is base for own, base in hooks):
        raise VerifiersLoadError(f"{name} has no @vf.reward and no judge, so there is nothing to train on: give it one")
    conversations = count_conversations(env, task)
    if conversations > 1:
        raise VerifiersLoadError(
            f"run() of {type(env).__name__} plays {conversations} conversations per episode; one can be trained on. Rewards that compare "
            "attempts, and second attempts, belong to the run's groups: play one"
        )


def count_conversations(env: vf.Env, task: vf.Task) -> int:
    """Number of conversations that `Env.run` begins for a task with silent agents; 1 where it fails before a second one."""
    begun: list[Trace] = []

    async def play() -> None:
        agents = Agents(env.config, lambda _, config: _Silent(config, begun))
        async with asyncio.timeout(REHEARSAL_SECONDS):
            await env.setup(agents)
            await env.run(task, agents)

    _in_thread(play)
    return max(len(begun), 1)


def _in_thread(play: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run a coroutine to its end beside the caller's event loop, whatever it raises."""

    def run() -> None:
        try:
            asyncio.run(play())
        except BaseException:  # code that does not understand the silence says nothing about real rollouts
            return

    thread = threading.Thread(target=run, name="rehearsal", daemon=True)
    thread.start()
    thread.join(REHEARSAL_SECONDS + 1)


class _Silent:
    """An agent whose conversations end before they begin."""

    def __init__(self, config: AgentConfig, begun: list[Trace]) -> None:
        self.config, self.trainable = config, True
        self._begun = begun

    async def run(self, task: vf.Task, **_: object) -> Trace:
        return self._trace(task)

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **_: object) -> AsyncIterator[_SilentInteraction]:
        yield _SilentInteraction(self._trace(task))

    def _trace(self, task: vf.Task) -> Trace:
        known = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = Trace(task=known, state=state_cls(type(task))(), agent=AgentInfo(config=self.config))
        self._begun.append(trace)
        trace.stop("agent_completed")
        return trace


class _SilentInteraction:
    """A conversation that is over."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    async def turn(self, *_: object, **__: object) -> Segment:
        return Segment(messages=[], terminated=True)
