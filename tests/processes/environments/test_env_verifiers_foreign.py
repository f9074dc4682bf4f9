"""Tasksets of verifiers 0.4 as users write them: each is played correctly, or refused at load with the unsupported feature."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import Field

from rlrun.environments import EnvironmentLoadError, EpisodeError, load_environment, run_episode
from tests.support.waiting import UNREACHED_SECONDS

pytestmark = pytest.mark.usefixtures("no_network")


class Data(vf.TaskData):
    answer: str = ""


class Right(vf.Task[Data]):
    """Task with an exact-match reward."""

    @vf.reward
    async def right(self, task: Data, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


def install_taskset(name: str, *, task: type = Right, data: type = Data, env: type | None = None, **more: Any) -> str:
    """Create a taskset module with two tasks; `more` goes into each task's data, `toolsets` to the taskset."""
    shared = more.pop("toolsets", None)
    numbers = more.pop("numbers", (1, 2))

    class Tasks(vf.Taskset[task, vf.TasksetConfig]):  # type: ignore[valid-type]
        def load(self) -> Iterator[Any]:
            for number in numbers:
                yield task(data(**{"prompt": f"say {number}", "answer": str(number)} | more), self.config.task)

        @classmethod
        def toolsets(cls, config: Any) -> list[Any]:
            return shared() if shared else []

    module = types.ModuleType(name)
    exported = {"Tasks": Tasks} | ({env.__name__: env} if env is not None else {})
    for key, value in exported.items():
        value.__module__ = name
        setattr(module, key, value)
    module.__all__ = list(exported)  # type: ignore[attr-defined]
    sys.modules[name] = module
    return f"verifiers:{name}"


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("foreign_"):
            del sys.modules[name]


class Weighted(Right):
    @vf.reward(weight=0.0)
    async def shown(self) -> float:
        return 7.0

    @vf.reward(weight=0.5)
    async def several(self) -> dict[str, float]:
        return {"a": 1.0, "b": 0.5}

    @vf.metric
    async def several_metrics(self) -> dict[str, float]:
        return {"m": 3.0}


class Hooks(Right):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("key.txt", b"key")

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.info["key"] = (await runtime.read("key.txt")).decode()

    @vf.metric
    async def kept(self, trace: vf.Trace) -> float:
        return float(trace.info["key"] == "key")


class XmlParsed(vf.Task[Data]):
    @vf.reward
    async def right(self, task: Data, trace: vf.Trace) -> float:
        return float(trace.last_reply.partition("<answer>")[2].partition("</answer>")[0] == task.answer)


class Stopped(Right):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1


class ByFinalize(vf.Task[Data]):
    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.record_reward("recorded", 0.25)


class TwiceConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class Twice(vf.Env[TwiceConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        first = await agents.agent.run(task)
        if first.reward < 1:
            await agents.agent.run(task)


class Asks(vf.Env[TwiceConfig]):
    """Environment that plays the user and ends the conversation."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while segment.last_reply != task.data.answer and not segment.terminated:
                segment = await interaction.turn("no")


class Opens(vf.Env[TwiceConfig]):
    """Environment that starts the conversation."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn(f"please say {task.data.answer}")


class Limited(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(max_output_tokens=5)


class UntilLimit(vf.Env[Limited]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                segment = await interaction.turn("on")


class Bag(vf.State):
    items: list[str] = Field(default_factory=list)


class PutConfig(vf.ToolsetConfig):
    pass


class Put(vf.Toolset[PutConfig, Bag]):
    TOOL_PREFIX = None

    @vf.tool
    async def put(self, item: str) -> str:
        """Put an item."""
        self.state.items.append(item)
        return f"{len(self.state.items)} items"


class Puts(vf.Task[Data, Bag]):
    toolset: Any = None

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [cls.toolset or Put(PutConfig())]

    @vf.reward
    async def full(self, trace: vf.Trace) -> float:
        return float(len(trace.state.items))


PLAYED: list[tuple[str, dict[str, Any], dict[str, Any], list[str], float, list[str]]] = [
    ("plain", {}, {}, ["{answer}"], 1.0, ["user", "assistant"]),
    ("system", {"system_prompt": "Be brief."}, {}, ["{answer}"], 1.0, ["system", "user", "assistant"]),
    ("weights", {"task": Weighted}, {}, ["{answer}"], 1.75, ["user", "assistant"]),
    ("hooks", {"task": Hooks}, {}, ["x"], 0.0, ["user", "assistant"]),
    ("xml", {"task": XmlParsed}, {}, ["<think>1</think><answer>{answer}</answer>"], 1.0, ["user", "assistant"]),
    ("stop", {"task": Stopped, "env": Asks}, {}, ["x"], 0.0, ["user", "assistant", "user"]),
    ("finalize", {"task": ByFinalize}, {}, ["x"], 0.25, ["user", "assistant"]),
    ("user", {"env": Asks}, {}, ["x", "{answer}"], 1.0, ["user", "assistant", "user", "assistant"]),
    ("opens", {"env": Opens, "prompt": None}, {}, ["{answer}"], 1.0, ["user", "assistant"]),
    ("tools", {"task": Puts}, {}, ["<tool_call>{\"name\": \"put\", \"arguments\": {\"item\": \"a\"}}</tool_call>", "ok"],
     1.0, ["user", "assistant", "tool", "assistant"]),
    ("one_attempt", {}, {"env": {"id": "best-of-n", "n": 1}}, ["{answer}"], 1.0, ["user", "assistant"]),
    ("null_harness", {}, {"env": {"agent": {"harness": {"id": "null"}}}}, ["{answer}"], 1.0, ["user", "assistant"]),
    ("turns", {"env": Asks}, {"max_turns": 2}, ["x", "y"], 0.0, ["user", "assistant"] * 2 + ["user"]),
    ("plugged", {}, {"taskset": {"task": {"rewards": {"right": {"weight": 3}}}}}, ["{answer}"], 3.0, ["user", "assistant"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "made", "args", "says", "reward", "roles"), PLAYED, ids=[case[0] for case in PLAYED])
async def test_supported_taskset_is_played(
    scripted: Any,
    name: str,
    made: dict[str, Any],
    args: dict[str, Any],
    says: list[str],
    reward: float,
    roles: list[str],
) -> None:
    env = load_environment(install_taskset(f"foreign_{name}", **made), args)
    task = env.tasks("train")[0]
    model = scripted([text.replace("{answer}", task.answer or "") for text in says])
    episode, score = await run_episode(env, task, model, timeout_seconds=UNREACHED_SECONDS)
    assert score.reward == pytest.approx(reward)
    assert [message["role"] for message in episode.messages] == roles
    assert episode.replies == len(says) == len(model.seen)
    assert [m["content"] for m in episode.messages if m["role"] == "assistant"][-1] == says[-1].replace(
        "{answer}", task.answer or ""
    )


async def test_token_limit_ends_the_episode(scripted: Any) -> None:
    from rlrun.environments import Reply

    env = load_environment(install_taskset("foreign_limit", env=UntilLimit), {})
    model = scripted([Reply("x", prompt_tokens=4, completion_tokens=3)] * 9)
    episode, _ = await run_episode(env, env.tasks("train")[0], model, timeout_seconds=UNREACHED_SECONDS)
    assert episode.replies == 2
    assert episode.info["stop_condition"] == "max_output_tokens"


class Sync(vf.Task[Data]):
    @vf.reward
    def right(self) -> float:
        return 1.0


class SyncMetric(Right):
    @vf.metric
    def length(self) -> float:
        return 1.0


class Rewardless(vf.Task[Data]):
    @vf.metric
    async def length(self) -> float:
        return 1.0


class FarTools(Puts):
    toolset = Put(PutConfig(url="http://tools:9/mcp"))


class BoxedTools(Puts):
    toolset = Put(PutConfig.model_validate({"runtime": {"type": "docker"}}))


class SharedConfig(vf.SharedToolsetConfig):
    pass


class Shared(vf.Toolset[SharedConfig, vf.State]):
    @vf.tool
    async def look(self) -> str:
        return ""


class Boxed(Right):
    NEEDS_CONTAINER = True


class Pinned(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig.model_validate({"harness": {"id": "bash"}})


class BashEnv(vf.Env[Pinned]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.player.run(task)


class TwoConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    two: vf.AgentConfig = vf.AgentConfig()


class Two(vf.Env[TwoConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.one.run(task)


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("group_rewards", {}, {"env": {"id": "best-of-n"}}, "plays 4 conversations per episode"),
    ("two_attempts", {"env": Twice}, {}, "Twice plays 2 conversations"),
    ("two_agents", {"env": Two}, {}, r"has 2 agents \(one, two\)"),
    ("user_simulator", {}, {"env": {"id": "user-sim"}}, "has 2 agents"),
    ("bash", {}, {"env": {"agent": {"harness": {"id": "bash"}}}}, r"env\.agent\.harness\.id is 'bash'"),
    ("own_bash", {"env": BashEnv}, {}, r"env\.player\.harness\.id is 'bash'"),
    ("codex", {}, {"env": {"agent": {"harness": {"id": "codex"}}}}, r"env\.agent\.harness\.id is 'codex'"),
    ("skills", {}, {"env": {"agent": {"harness": {"id": "null", "disabled_tools": ["a"]}}}}, "disabled_tools is"),
    ("docker", {}, {"env": {"agent": {"runtime": {"type": "docker"}}}}, r"env\.agent\.runtime\.type is 'docker'"),
    ("model", {}, {"env": {"agent": {"model": "gpt"}}}, r"env\.agent\.model is 'gpt'"),
    ("sampling", {}, {"env": {"agent": {"sampling": {"temperature": 0.1}}}}, r"set environments\[\]\.sampling"),
    ("retries", {}, {"env": {"agent": {"retries": {"max_retries": 2}}}}, r"env\.agent\.retries is set"),
    ("far_tools", {"task": FarTools}, {}, r"tool server Put of FarTools has url 'http://tools:9/mcp'"),
    ("boxed_tools", {"task": BoxedTools}, {}, r"runtime\.type 'docker'"),
    ("far_shared", {"toolsets": lambda: [Shared(SharedConfig(url="http://t:9"))]}, {}, "tool server Shared of Tasks has url"),
    ("container", {"task": Boxed}, {}, "need a container"),
    ("image", {"image": "python:3"}, {}, "task 0: .*requires image 'python:3'"),
    ("network", {"network_allow": ["a.org"]}, {}, "requires a network policy"),
    ("skill_data", {"skills": ["/tmp"]}, {}, "skills is"),
    ("user", {"agent_user": "bob"}, {}, "agent_user is 'bob'"),
    ("picture", {"prompt": IMAGE}, {}, "content of type 'image_url'"),
    ("promptless", {"prompt": None}, {}, "has no prompt"),
    ("sync_reward", {"task": Sync}, {}, "reward 'right' of Sync is not a coroutine"),
    ("sync_metric", {"task": SyncMetric}, {}, "metric 'length' of SyncMetric is not a coroutine"),
    ("rewardless", {"task": Rewardless}, {}, r"Rewardless has no @vf\.reward"),
    ("plug", {}, {"taskset": {"task": {"rewards": {"x": {"fn": "no_such:fn"}}}}}, "taskset.task cannot be loaded: .*no_such"),
    ("broken", {"numbers": None}, {}, r"load\(\) raised TypeError"),
    ("single", {"numbers": (1,)}, {}, "has 1 distinct tasks"),
    ("wrong_id", {}, {"env": {"id": "nothing-like-it"}}, "nothing-like-it"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "made", "args", "says"), REFUSED, ids=[case[0] for case in REFUSED])
def test_unsupported_taskset_feature_is_refused_at_load(
    name: str, made: dict[str, Any], args: dict[str, Any], says: str
) -> None:
    id = install_taskset(f"foreign_{name}", **made)
    with pytest.raises(EnvironmentLoadError, match=says) as caught:
        load_environment(id, args)
    assert id in str(caught.value)


class Slow(vf.Env[TwiceConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        import asyncio

        await agents.agent.run(task)
        await asyncio.sleep(60)


async def test_time_limit_of_verifiers_environment_is_kept(scripted: Any) -> None:
    env = load_environment(install_taskset("foreign_slow", env=Slow), {"env": {"timeout": {"episode": 0.4}}})
    with pytest.raises(EpisodeError, match="TimeoutError"):
        await run_episode(env, env.tasks("train")[0], scripted(["x"]), timeout_seconds=UNREACHED_SECONDS)
