"""Examples of the environments page, run as printed, and the names on the page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.environments import Demonstrates, Reply, known_environments, load_environment, run_episode
from rlrun.environments.bundled.dataset import DatasetArgs
from rlrun.environments.layouts import LAYOUTS
from rlrun.environments.rewards.reward_functions import ARGUMENTS
from rlrun.environments.rewards.scorers import BUILT_IN
from rlrun.environments.stage import InProcessStage, Played, TaskRef
from tests.support.waiting import UNREACHED_SECONDS

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def find_block(language: str, title: str) -> str:
    """Return the code block that follows the line with `title`."""
    found = re.search(rf"`{re.escape(title)}`:\n\n```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"the page has no {language} block titled {title}"
    return found[1]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "word_games.py").write_text(find_block("python", "word_games.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("word_games", None)


@pytest.mark.usefixtures("example")
async def test_example_of_page_plays_and_scores(scripted: Any) -> None:
    env = load_environment("word_games:hangman", {"words": ["otter", "heron", "snail", "tapir"], "max_turns": 8})
    assert not {t.answer for t in env.tasks("train")} & {t.answer for t in env.tasks("eval")}
    assert isinstance(env, Demonstrates)
    task = env.tasks("train")[0]
    assert task.answer is not None
    ideal = env.demonstration(task)
    episode, score = await run_episode(
        env,
        task,
        scripted([m["content"] for m in ideal if m["role"] == "assistant"]),
        timeout_seconds=UNREACHED_SECONDS,
    )
    assert episode.messages == [*task.prompt, *ideal]
    assert score.reward == 1.0
    episode, score = await run_episode(env, task, scripted(lambda _: "z"), timeout_seconds=UNREACHED_SECONDS)
    assert (episode.replies, score.reward) == (8, 0.0)


async def test_agent_of_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sum_agent.py").write_text(find_block("python", "sum_agent.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    env: Any = load_environment("sum_agent:sums", {})
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

    _, score = await run_episode(env, task, Model(), timeout_seconds=UNREACHED_SECONDS)
    await env.close()
    assert score.reward == 1.0
    assert asked[1][-1] == {"role": "tool", "tool_call_id": "call_0", "content": task.answer}


@pytest.mark.usefixtures("tasksets")
async def test_verifiers_taskset_of_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted: Any) -> None:
    (tmp_path / "my_taskset.py").write_text(find_block("python", "my_taskset.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    env = load_environment("verifiers:my-taskset", {})
    task = env.tasks("train")[0]
    _, score = await run_episode(env, task, scripted([task.answer]), timeout_seconds=UNREACHED_SECONDS)
    assert score.reward == 1.0


async def test_rewards_of_page_return_documented_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted: Any
) -> None:
    (tmp_path / "my_rewards.py").write_text(find_block("python", "my_rewards.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = re.search(r"The environment, with a data set of GSM8K's layout:\n\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert found
    (tmp_path / "gsm8k").mkdir()
    for split, n in (("train", 3), ("test", 4)):
        row = {"question": f"1+{n - 1}?", "answer": f"It is so.\n#### {n}"}
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(row))
    monkeypatch.chdir(tmp_path)
    (declared,) = yaml.safe_load(found[1])
    stage = InProcessStage(environment := load_environment(declared["id"], declared["args"]))
    task = environment.tasks("train")[0]
    assert task.prompt == [{"role": "user", "content": "1+2?\n\nEnd with the number."}]
    group = []
    for reply in ("It is 3", "It is so long: " + "ha " * 400 + "4"):
        episode, score = await run_episode(environment, task, scripted([reply]), timeout_seconds=UNREACHED_SECONDS)
        group.append(Played(task.id, episode, score))
    assert group[0].score.reward == pytest.approx(1 + 0.1)
    assert group[0].score.metrics["compute_score_answered"] == 1.0
    assert 0 < group[1].score.reward < 0.1
    ref = TaskRef("train", 0)
    compared = await stage.compare(ref, group, timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)
    assert compared[0].reward == pytest.approx(1.15)
    assert compared[1].reward == group[1].score.reward


def test_reward_routes_of_page_are_valid() -> None:
    found = re.search(r"```yaml\n( +reward_by_source:.*?)```", PAGE, re.DOTALL)
    assert found
    args = DatasetArgs.model_validate({"path": "x", **yaml.safe_load(found[1])})
    assert list(args.rewards) == ["openai/gsm8k", "codeforces", "*"]


def test_page_names_each_reward_option_and_parameter() -> None:
    for name, (model, _) in BUILT_IN.items():
        assert f"`{name}`" in PAGE
        for option in model.model_fields:
            assert f"`{option}`" in PAGE, f"{name}: {option}"
    for parameter in ARGUMENTS:
        assert f"`{parameter}`" in PAGE, parameter
    data = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    for layout, entry in LAYOUTS.items():
        assert all(f"`{word}`" in data for word in (layout, *entry.columns)), layout


def test_page_lists_each_shipped_environment_and_argument() -> None:
    from rlrun.environments.registry import SHIPPED

    for id in known_environments():
        assert f"`{id}`" in PAGE
        for name in SHIPPED[id]().args.model_fields:
            assert f"`{name}`" in PAGE, f"{id}: {name}"
