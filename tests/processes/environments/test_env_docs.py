"""The example on the documentation page runs as it stands there, and the page names what exists."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import Demonstrates, Reply, known, load, run_episode

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def block(language: str, title: str) -> str:
    """The code block that follows the line naming `title`."""
    found = re.search(rf"`{re.escape(title)}`:\n\n```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"the page has no {language} block titled {title}"
    return found[1]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "word_games.py").write_text(block("python", "word_games.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("word_games", None)


@pytest.mark.usefixtures("example")
async def test_the_pages_example_plays_and_scores(scripted: Any) -> None:
    env = load("word_games:hangman", {"words": ["otter", "heron", "snail", "tapir"], "max_turns": 8})
    assert not {t.answer for t in env.tasks("train")} & {t.answer for t in env.tasks("eval")}
    assert isinstance(env, Demonstrates)
    task = env.tasks("train")[0]
    assert task.answer is not None
    ideal = env.demonstration(task)
    episode, score = await run_episode(
        env, task, scripted([m["content"] for m in ideal if m["role"] == "assistant"]), timeout_seconds=5
    )
    assert episode.messages == [*task.prompt, *ideal]
    assert score.reward == 1.0
    episode, score = await run_episode(env, task, scripted(lambda _: "z"), timeout_seconds=5)
    assert (episode.replies, score.reward) == (8, 0.0)


async def test_the_pages_agent_is_played_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sum_agent.py").write_text(block("python", "sum_agent.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    env: Any = load("sum_agent:sums", {})
    assert not {t.id for t in env.tasks("train")} & {t.id for t in env.tasks("eval")}
    task = env.tasks("train")[0]
    asked: list[Any] = []

    class Model:
        async def complete(self, messages: Any, **options: Any) -> Reply:
            asked.append(messages)
            if len(asked) == 1:
                assert options["tools"][0]["function"]["name"] == "add"
                call = {
                    "name": "add",
                    "arguments": json.dumps(dict(zip("ab", map(int, task.id.split("+")), strict=True))),
                }
                return Reply("", tool_calls=({"id": "call_0", "type": "function", "function": call},), content="")
            return Reply(messages[-1]["content"])

    _, score = await run_episode(env, task, Model(), timeout_seconds=60)
    await env.close()
    assert score.reward == 1.0
    assert asked[1][-1] == {"role": "tool", "tool_call_id": "call_0", "content": task.answer}


@pytest.mark.usefixtures("tasksets")
async def test_the_pages_verifiers_taskset_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted: Any) -> None:
    (tmp_path / "my_taskset.py").write_text(block("python", "my_taskset.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    env = load("verifiers:my-taskset", {})
    task = env.tasks("train")[0]
    _, score = await run_episode(env, task, scripted([task.answer]), timeout_seconds=20)
    assert score.reward == 1.0


def test_the_page_lists_every_shipped_environment_and_argument() -> None:
    from rlrun.environments.registry import _SHIPPED

    for id in known():
        assert f"`{id}`" in PAGE
        for name in _SHIPPED[id].args.model_fields:
            assert f"`{name}`" in PAGE, f"{id}: {name}"
