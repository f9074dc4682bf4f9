"""The example on the documentation page runs as it stands there, and the page names what exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import Demonstrates, known, load, run_episode

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
