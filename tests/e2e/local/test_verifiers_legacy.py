"""Environments of verifiers 0.1, in a virtual environment without rlrun."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import EpisodeError, Message, Reply
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.process_output import Log
from tests.cluster.cache import cache_root, locked
from tests.support.programs import run_program
from tests.support.python_path import before
from tests.support.waiting import UNREACHED_SECONDS

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "requirements/verifiers-0.1.txt"


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of a virtual environment with verifiers 0.1, which is shared between checkouts."""
    folder = cache_root() / f"verifiers-0.1-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
    found = folder / "bin/python"
    with locked("verifiers-0.1"):
        if not (folder / "complete").exists():
            uv = str(Path(sys.executable).parent / "uv")
            install = ["pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", str(found)]
            # The import writes only the bytecode of the needed modules, a small part of the installed ones.
            writes = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            warm = (
                "import verifiers as v; v.SingleTurnEnv; import verifiers.clients as c; c.OpenAIChatCompletionsClient"
            )
            for command in (
                [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
                [uv, *install, "-r", str(LOCK)],
                [str(found), "-c", warm],
            ):
                subprocess.run(command, check=True, env=writes)
            (folder / "complete").touch()
    assert subprocess.run([found, "-c", "import rlrun"], capture_output=True, check=False).returncode != 0
    return found


class Model:
    """Model client that answers correctly for words with an even number."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[list[Message]] = []

    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        self.seen.append(list(messages))
        if self.error:
            raise self.error
        number = int("".join(c for c in next(m for m in messages if m["role"] == "user")["content"] if c.isdigit()))
        return Reply(f"w{number - number % 2}")


@asynccontextmanager
async def running(python: Path, args: dict[str, Any]) -> AsyncIterator[IsolatedEnvironment]:
    command = Command("verifiers:word-chain", args, str(python))
    environment = IsolatedEnvironment("old", command, Limits(start_seconds=UNREACHED_SECONDS), [Log(None)])
    await environment.start()
    try:
        yield environment
    finally:
        environment.close()


async def test_verifiers_0_1_environment_plays_in_its_own_packages(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", before(Path(__file__).parent / "verifiers_legacy"))
    async with running(python, {"args": {"turns": 2}}) as environment:
        tasks = [*environment.tasks("train"), *environment.tasks("eval")]
        assert (len(tasks), len(environment.tasks("eval"))) == (20, 2)
        models = [Model() for _ in tasks]
        plays = await asyncio.gather(
            *(
                environment.play(t, m, timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)
                for t, m in zip(tasks, models, strict=True)
            )
        )
        rewards = {play.task_id: play.score.reward for play in plays}
        assert rewards == {f"train-{i}": 0.5 * (i % 2 == 0) for i in range(20)}
        play, model = plays[0], models[0]
        assert play.score.metrics["num_turns"] == 2
        assert play.episode.replies == 2
        assert [message["role"] for message in play.episode.messages] == ["user", "assistant", "user", "assistant"]
        assert play.episode.messages[2]["content"] == "word 2?"
        assert model.seen[1] == play.episode.messages[:3]  # a conversation only grows

        with pytest.raises(EpisodeError, match="engine gone") as caught:
            await environment.play(
                tasks[0],
                Model(ConnectionError("engine gone")),
                timeout_seconds=UNREACHED_SECONDS,
                reward_seconds=UNREACHED_SECONDS,
            )
        assert caught.value.kind == "model"
        assert isinstance(caught.value.__cause__, ConnectionError)


class Caller:
    """Model client that calls its offered tool and returns the tool's answer."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []
        self.offered: list[Any] = []

    async def complete(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **_: Any) -> Reply:
        self.seen.append(list(messages))
        self.offered.append(tools)
        if messages[-1]["role"] == "tool":
            return Reply(messages[-1]["content"])
        number = "".join(c for c in messages[-1]["content"] if c.isdigit())
        function = {"name": "spell", "arguments": f'{{"number": {number}}}'}
        return Reply(
            f"<call {number}>",
            tool_calls=({"id": "call_0", "type": "function", "function": function},),
            content="I ask.",
        )


async def test_verifiers_0_1_environment_tools_are_called(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", before(Path(__file__).parent / "verifiers_legacy"))
    async with running(python, {"args": {"turns": 0}}) as environment:
        model = Caller()
        play = await environment.play(
            environment.tasks("train")[0], model, timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS
        )
        assert play.score.reward == 0.5
        assert play.score.metrics["spell_calls"] == 1
        assert [message["role"] for message in play.episode.messages] == ["user", "assistant", "tool", "assistant"]
        assert [[tool["function"]["name"] for tool in tools] for tools in model.offered] == [["spell"]] * 2
        asked, answered = model.seen[1][1:]
        assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] == "call_0"
        assert (asked["content"], answered["content"]) == ("I ask.", play.episode.messages[-1]["content"])
        assert model.seen[1] == play.episode.messages[:3]


ONE_WRONG = {"rewards": [1, 0, 1, 1], "roles": ["ua"] * 4}
PLAYED: dict[str, dict[str, list[Any]]] = {
    "single": ONE_WRONG,
    "system": ONE_WRONG | {"roles": ["sua"] * 4},
    "few_shot": ONE_WRONG | {"roles": ["uaua"] * 4},
    "later": ONE_WRONG | {"rewards": [0.5, 0, 0.5, 0.5]},
    "info": ONE_WRONG | {"rewards": [0.75] * 4},
    "xml": ONE_WRONG,
    "builder": {"rewards": [1, 1, 0, 1, 1], "roles": ["ua"] * 5},
    "rubrics": ONE_WRONG | {"rewards": [2, 0, 2, 2]},
    "own_rubric": ONE_WRONG | {"rewards": [0.5] * 4},
    "stop_words": ONE_WRONG,
    "ends": {"rewards": [1] * 4, "roles": ["ua", "uaua", "ua", "ua"]},
    "tools": {"rewards": [0] * 4, "roles": ["uata"] * 4},
    "stateful": {"rewards": [1] * 4, "roles": ["uata"] * 4},
    "group": {"rewards": [1, 0, 1, 1] + [1] * 4, "roles": ["ua"] * 4 + ["uata"] * 4},
}
REFUSED = {
    "task_column": "row 0 of the train data: task is 't'",
    "group_reward": "rewards whole groups (best_of_group)",
    "group_reward_within": "b: its rubric scores whole groups (best_of_group)",
    "no_weight": "no reward with a weight other than 0",
    "no_rubric": "no reward with a weight other than 0",
    "completion": "message_type is 'completion'",
    "unscored": "score_rollouts is False",
    "temperature": "sampling_args has temperature 0.1; remove it and set environments[].sampling",
    "picture": "row 0 of the train data: prompt[0].content[0] has content of type 'image_url'",
    "eval_only": "it has no dataset",
    "no_builder": "building its data set raised ValueError",
    "alone": "holds 1 distinct tasks",
    "judge": "OPENAI_API_KEY",
}


def test_verifiers_0_1_environments_are_played_or_refused_at_load(python: Path) -> None:
    folder = Path(__file__).parent / "verifiers_legacy"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'workloads'}", "HF_DATASETS_OFFLINE": "1"}
    ended = run_program([python, folder / "foreign.py"], env=environment, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found.keys() == PLAYED.keys() | REFUSED.keys()
    for kind, expected in PLAYED.items():
        plays = found[kind].get("plays")
        assert plays is not None, (kind, found[kind])
        rewards, roles = [play["reward"] for play in plays], [play["roles"] for play in plays]
        assert {"rewards": rewards, "roles": roles} == expected, kind
    for kind, says in REFUSED.items():
        assert says in found[kind].get("refused", ""), (kind, found[kind])
    assert [play["eval"] for play in found["builder"]["plays"]] == [True] + [False] * 4
    for kind, stop in {"stop_words": ["."], "group": []}.items():
        assert found[kind]["plays"][0]["asked"][0] == {"messages": 1, "max_tokens": 7, "stop": stop}
    assert found["group"]["plays"][-1]["asked"][0]["max_tokens"] is None
