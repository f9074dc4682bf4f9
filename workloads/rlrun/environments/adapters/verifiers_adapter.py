"""`verifiers:<taskset>`: adapter that plays a taskset of verifiers 0.4 (`verifiers.v1`) in this process.

Two parts of verifiers that use servers and programs are replaced by code in this process:

- Its interception server connects an agent program to a model endpoint. Here the agent is a loop in this process
  (`verifiers_harness.ChatHarness`) that calls our `ModelClient`, and `_DirectInterception` only passes on the session.
- Its tool servers are MCP processes. Here their `@vf.tool` methods are called on the object (`verifiers_harness`).

All other parts are those of verifiers: the taskset, `Env.run` with its `interaction`s, limits, `@stop` and `@intercept` hooks, setup,
finalize and rewards. verifiers scores while the rollout's working folder still exists, so `run` stores the result in `Episode.info` and
`score` only reads it.

Tasksets that cannot be played in this way are rejected at load with a reason, see `verifiers_playable`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property
from itertools import islice

import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from verifiers.v1.agent import Agent, Agents, Interaction
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields, resolve_agent
from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.episode import EnvInfo
from verifiers.v1.episode import Episode as VerifiersEpisode
from verifiers.v1.interception import Interception
from verifiers.v1.runtimes import Runtime
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import task_key
from verifiers.v1.trace import Trace, TraceTask
from verifiers.v1.types import Message as VerifiersMessage
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, taskset_class

from rlrun.environments.adapters.verifiers_harness import ChatHarness, ToolBox
from rlrun.environments.adapters.verifiers_playable import check_seat, check_tasks, check_toolsets
from rlrun.environments.message_content import content_text
from rlrun.environments.protocol import Episode, Message, ModelClient, Score, Split, Task, VerifiersLoadError

UNUSED_ENDPOINT = "http://127.0.0.1:9"
"""Endpoint of the agent in traces (the discard port). It is never used for a connection, because our client makes every call."""

OnTrace = Callable[[Trace], None]


class VerifiersArgs(BaseModel):
    """Arguments of a `verifiers:` environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taskset: dict[str, object] = Field(default_factory=dict)
    """Configuration of the taskset (verifiers' `--env.taskset.*`)."""
    env: dict[str, object] = Field(default_factory=dict)
    """Configuration of the environment (verifiers' `--env.*`): `id`, and the fields of its `EnvConfig`."""
    limit: int | None = Field(default=None, ge=2)
    """Number of tasks to take from the taskset. Required for a taskset without an end."""
    eval_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the taskset's distinct tasks that is held out for the eval split (at least one task)."""
    max_turns: int | None = Field(default=None, ge=1)
    """Largest number of replies per episode. Default: the taskset's own limit."""
    setup_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit of a task's `setup`."""
    scoring_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit of a task's `finalize`, and of all its rewards and metrics together."""


class VerifiersEnvironment:
    """A verifiers 0.4 taskset as an environment."""

    def __init__(self, id: str, taskset_id: str, args: VerifiersArgs) -> None:
        self.id = id
        self.args = args
        self._env = _load_env(taskset_id, args)
        if type(self._env.taskset).task_type().NEEDS_CONTAINER:
            raise VerifiersLoadError("its tasks need a container, but tasks are played in process")
        if args.limit is None and not self._env.taskset.bounded:
            raise VerifiersLoadError("the taskset has no end: set the argument 'limit'")
        self._started = False
        self._start_lock = asyncio.Lock()
        shared = self._env.taskset.toolsets(self._env.taskset.config)
        check_toolsets(shared, type(self._env.taskset).__name__)
        self._has_shared_tools = bool(shared)
        self._shared_tools = ToolBox(shared, shared=True)
        try:
            theirs = [*islice(self._env.taskset, args.limit)]
        except Exception as error:
            raise VerifiersLoadError(f"its load() raised {type(error).__name__}: {error}") from error
        check_tasks(self._env, theirs)
        self._tasks: dict[str, vf.Task] = {}
        self._splits = self._divide_tasks(theirs)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split. A hash of a task's content, without its position, determines its split."""
        return self._splits[split]

    @cached_property
    def single_turn(self) -> bool:
        """Whether an episode sends one request: either the limit is one turn, or the environment never answers."""
        [seat] = agent_config_fields(self._env.config).values()
        if (self.args.max_turns or seat.max_turns) == 1:
            return True
        first = next(iter(self._tasks.values()))  # all tasks have the same configuration and therefore the same tools
        has_tools = self._has_shared_tools or bool(type(first).toolsets(first.config))
        return type(self._env) is SingleAgentEnv and not has_tools

    async def run(self, task: Task, model: ModelClient) -> Episode:
        theirs = self._tasks[task.id]
        async with self._start_lock:
            if not self._started:
                await self._env.start()
                await self._shared_tools.setup()
                self._started = True
        traces: list[Trace] = []
        harnesses: list[ChatHarness] = []

        def make_agent(name: str, spec: AgentConfig) -> Agent:
            return _InProcessAgent(self._agent_config(spec), model, self._shared_tools, traces, harnesses)

        agents: Agents[Agent] = Agents(self._env.config, make_agent)
        try:
            async with asyncio.timeout(self._env.config.timeout.episode):
                await self._env.setup(agents)
                await self._env.run(theirs, agents)
        except Exception:
            _raise_model_error(harnesses)
            raise
        _raise_model_error(harnesses)
        if len(traces) != 1:
            raise RuntimeError(f"its run() played {len(traces)} conversations; an episode must have exactly one")
        trace = traces[0]
        _check_rollout(trace)
        record = VerifiersEpisode(
            env=EnvInfo(id=self._env.config.env_id),
            task=TraceTask(type=type(theirs).__name__, data=theirs.data, key=theirs.key, hash=theirs.hash),
            traces=traces,
        )
        async with asyncio.timeout(self._env.config.timeout.finalize):
            await self._env.finalize(theirs, record)
        return Episode(
            messages=harnesses[0].conversation,
            replies=trace.num_turns,
            info={
                "reward": trace.reward,
                "metrics": _read_metrics(trace),
                "stop_condition": trace.stop_condition,
                "truncated": trace.is_truncated,
            },
        )

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(reward=episode.info["reward"], metrics=dict(episode.info["metrics"]))

    def _agent_config(self, spec: AgentConfig) -> AgentConfig:
        timeout = spec.timeout.model_copy(
            update={
                "setup": spec.timeout.setup or self.args.setup_timeout_seconds,
                "finalize": spec.timeout.finalize or self.args.scoring_timeout_seconds,
                "scoring": spec.timeout.scoring or self.args.scoring_timeout_seconds,
            }
        )
        max_turns = self.args.max_turns or spec.max_turns
        # A retry would append to the tokens of the failed attempt; the orchestrator starts a new episode instead.
        spec = spec.model_copy(update={"timeout": timeout, "max_turns": max_turns, "retries": RetryConfig()})
        client = EvalClientConfig(base_url=UNUSED_ENDPOINT, api_key_var="RLRUN_NO_API_KEY")
        return resolve_agent(spec, model="policy", client=client)

    def _divide_tasks(self, theirs: list[vf.Task]) -> dict[str, list[Task]]:
        contents = {index: _task_content(task) for index, task in enumerate(theirs)}
        distinct = sorted(set(contents.values()))
        if len(distinct) < 2:
            raise VerifiersLoadError(
                f"the taskset has {len(distinct)} distinct tasks; training and evaluation need at least two"
            )
        held_out = set(distinct[: max(1, min(len(distinct) - 1, round(len(distinct) * self.args.eval_share)))])
        splits: dict[str, list[Task]] = {"train": [], "eval": []}
        for index, task in enumerate(theirs):
            ours = Task(
                id=f"{index}-{contents[index][:8]}",
                prompt=_task_prompt(task.data),
                answer=_text_or_none(getattr(task.data, "answer", None)),
                info={"index": index},
            )
            self._tasks[ours.id] = task
            splits["eval" if contents[index] in held_out else "train"].append(ours)
        return splits


class _InProcessAgent(Agent):  # type: ignore[misc]
    """verifiers' agent with our chat loop as its harness, without servers."""

    def __init__(
        self,
        config: AgentConfig,
        model: ModelClient,
        shared_tools: ToolBox,
        traces: list[Trace],
        harnesses: list[ChatHarness],
    ) -> None:
        super().__init__(config, interception=_DirectInterception())
        self._model = model
        self._shared = shared_tools
        self._traces = traces
        self._harnesses = harnesses

    async def run(self, task: vf.Task, *, on_trace: OnTrace | None = None, **options: object) -> Trace:
        watched = self._record_traces(on_trace)
        return await super().run(_without_tool_servers(task), **options | {"on_trace": watched, "tools": {}})

    @asynccontextmanager
    async def interaction(
        self, task: vf.Task, *, on_trace: OnTrace | None = None, **options: object
    ) -> AsyncIterator[Interaction]:
        watched = options | {"on_trace": self._record_traces(on_trace), "tools": {}}
        async with super().interaction(_without_tool_servers(task), **watched) as interaction:
            yield interaction

    def _record_traces(self, theirs: OnTrace | None) -> OnTrace:
        def on_trace(trace: Trace) -> None:
            self._traces.append(trace)
            if theirs is not None:
                theirs(trace)

        return on_trace

    def _rollout_params(
        self, task: vf.Task, runtime: Runtime | None, shared_tools: dict[str, object]
    ) -> dict[str, object]:
        params = super()._rollout_params(task, runtime, shared_tools)
        own = ToolBox(type(task).toolsets(task.config), shared=False)
        assert isinstance(self.interception, _DirectInterception)
        harness = ChatHarness(params["harness"].config, self._model, self.interception.sessions, [self._shared, own])
        self._harnesses.append(harness)
        return {**params, "harness": harness}


class _DirectInterception(Interception):  # type: ignore[misc]
    """Interception that passes a rollout's session to the harness. There is no server, so the base URL is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, RolloutSession] = {}

    async def start(self) -> None:
        return None

    def acquire(self, session: RolloutSession) -> AbstractAsyncContextManager[tuple[str, str, str]]:
        return self._open_session(session)

    @asynccontextmanager
    async def _open_session(self, session: RolloutSession) -> AsyncIterator[tuple[str, str, str]]:
        secret = session.trace.id
        self.sessions[secret] = session
        try:
            yield UNUSED_ENDPOINT, secret, secret
        finally:
            self.sessions.pop(secret, None)
            session.release()


def _without_tool_servers(task: vf.Task) -> vf.Task:
    """Return a copy for which verifiers starts no tool server. `ToolBox` still finds the tools in the task's class."""
    clone = copy.copy(task)
    clone.toolsets = lambda config: []
    return clone


def _load_env(taskset_id: str, args: VerifiersArgs) -> vf.Env:
    """Return the verifiers environment of a taskset. It must have one agent seat, whose harness and runtime are replaced by ours."""
    try:
        taskset_class(taskset_id)
        config_type = env_config_type(taskset_id, args.env.get("id", ""))
        harness_id = default_harness_id(taskset_id)
    except Exception as error:
        install = "; `rlrun env install SOURCE` installs one and prints the fields to set"
        raise VerifiersLoadError(
            f"verifiers cannot load the taskset {taskset_id!r} ({type(error).__name__}: {error}). A taskset is an installed "
            "top-level package or module, named without dots, whose __all__ exports its Taskset"
            f"{install if isinstance(error, ImportError) else ''}"
        ) from error
    if harness_id != "bash":
        raise VerifiersLoadError(
            "it has its own agent program (harness), but only our chat loop is supported as the agent"
        )
    seats = [name for name, field in config_type.model_fields.items() if isinstance(field.default, AgentConfig)]
    if len(seats) != 1:
        raise VerifiersLoadError(f"its environment has {len(seats)} agents ({', '.join(seats)}); only one is supported")
    try:
        config = config_type.model_validate({**args.env, "taskset": {**args.taskset, "id": taskset_id}})
        seat = agent_config_fields(config)[seats[0]]
        check_seat(seats[0], seat)
        pinned = AgentConfig.model_validate({"harness": {"id": "null"}, "runtime": {"type": "subprocess"}})
        seat = seat.model_copy(update={"harness": pinned.harness, "runtime": pinned.runtime})
        config = config.model_copy(update={seats[0]: seat})
        return load_environment(config)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise VerifiersLoadError(f"its configuration is invalid: {problems}") from error


def _raise_model_error(harnesses: list[ChatHarness]) -> None:
    """Raise the original error of a model call: verifiers records it and continues."""
    for harness in harnesses:
        if harness.model_error is not None:
            raise harness.model_error


def _check_rollout(trace: Trace) -> None:
    """Raise if the rollout failed or was not scored completely."""
    if not trace.ok:
        error = trace.last_error
        raise RuntimeError(f"{error.type}: {error.message}" if error else f"stopped by {trace.stop_condition}")
    if trace.is_timeout and trace.stop_condition != "agent_timeout":
        raise TimeoutError(f"{(trace.stop_condition or '').removesuffix('_timeout')} took too long")
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise RuntimeError(f"unscored rewards: {', '.join(unscored)}")


def _read_metrics(trace: Trace) -> dict[str, float]:
    scored = {f"reward_{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    return scored | {name: value for name, value in trace.metrics.items() if value is not None}


def _task_content(task: vf.Task) -> str:
    return str(task_key(task.data.model_dump(mode="json", exclude_none=True, exclude={"idx"})))


def _task_prompt(data: vf.TaskData) -> list[Message]:
    messages: list[Message] = []
    if data.system_prompt is not None:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [_wire_message(message) for message in data.prompt or []]
    return messages


def _wire_message(message: VerifiersMessage) -> Message:
    wire: Message = message_to_wire(message)
    return wire | {"content": content_text(wire["content"])} if isinstance(wire.get("content"), list) else wire


def _text_or_none(answer: object) -> str | None:
    return None if answer is None else str(answer)
