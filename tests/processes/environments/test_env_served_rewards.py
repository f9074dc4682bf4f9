"""Rewards from a server: a reward model behind vLLM's endpoints, and a judge of whole groups."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlrun.environments import EpisodeError, load_environment, run_episode
from rlrun.environments.process.process_output import named_by
from rlrun.environments.rewards.judge import GroupJudge, GroupJudgeArgs, JudgeError
from rlrun.environments.rewards.scoring_servers import RewardModel, RewardModelArgs, RewardModelError
from rlrun.environments.stage import InProcessStage, Played, TaskRef
from tests.support.waiting import UNREACHED_SECONDS

Answer = Callable[[str, dict[str, Any]], Any]


class Served:
    """Server that records its requests."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked, self.keys = answer, [], []  # type: ignore[var-annotated]
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body))
        self.keys.append(request.headers.get("Authorization"))
        answer = self.answer(request.path, body)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


@asynccontextmanager
async def serve_answers(answer: Answer) -> AsyncIterator[Served]:
    served, app = Served(answer), web.Application()
    app.router.add_post("/{path:.*}", served.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


PROMPT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
TALK = [*PROMPT, {"role": "assistant", "content": "Hi {question}!"}]


@pytest.mark.parametrize(
    ("args", "answer", "asked", "reward"),
    [
        ({}, {"data": [{"probs": [0.75], "label": None, "num_classes": 1}]}, {"messages": TALK}, 0.75),
        (
            {"label": 1, "input": "text", "template": "Q: {question} A: {reply}", "scale": 2},
            {"data": [{"probs": [0.2, 0.8]}]},
            {"input": "Q: Hello? A: Hi {question}!"},
            0.4,
        ),
        (
            {"endpoint": "pooling", "body": {"use_activation": False}},
            {"data": [{"data": [[-9.0], [-3.5]]}]},
            {"messages": TALK, "use_activation": False},
            -3.5,
        ),
        ({"endpoint": "pooling"}, {"data": [{"data": [2.5]}]}, {"messages": TALK}, 2.5),
        (
            {"endpoint": "score"},
            {"data": [{"index": 0, "score": 0.25}]},
            {"text_1": "Hello?", "text_2": "Hi {question}!"},
            0.25,
        ),
    ],
)
async def test_reward_model_request_matches_vllm_endpoint(
    args: dict[str, Any], answer: Any, asked: dict[str, Any], reward: float
) -> None:
    async with serve_answers(lambda path, body: answer) as served:
        model = RewardModel(RewardModelArgs.model_validate({"base_url": served.url, "model": "m"} | args))
        assert await model.score(prompt=PROMPT, question="Hello?", reply="Hi {question}!") == reward
        await model.close()
    assert served.asked == [(f"/{args.get('endpoint', 'classify')}", {"model": "m"} | asked)]


@pytest.mark.parametrize(
    ("answer", "args", "says"),
    [
        (
            {"data": [{"probs": [0.2, 0.8]}]},
            {},
            "returned 2 numbers for one reply; set label to the index of the score",
        ),
        ({"data": [{"probs": [0.2]}]}, {"label": 1}, "returned 1 numbers, so label 1 does not exist"),
        ({"object": "list"}, {}, "the reward model did not return an answer of /classify"),
        (web.Response(status=404, text="no such model"), {}, "rejected the request: status 404: no such model"),
        (web.Response(text="<html>"), {}, "did not return JSON: '<html>'"),
    ],
)
async def test_reward_model_without_score_raises_error(answer: Any, args: dict[str, Any], says: str) -> None:
    async with serve_answers(lambda path, body: answer) as served:
        model = RewardModel(RewardModelArgs.model_validate({"base_url": served.url, "model": "m"} | args))
        with pytest.raises(RewardModelError, match=says):
            await model.score(prompt=PROMPT, question="?", reply="!")
        await model.close()


def by_length(path: str, body: dict[str, Any]) -> Any:
    """Score replies by length, out of 10, in the order of the prompt."""
    content = body["messages"][0]["content"]
    marker = re.findall(r"Scores ([0-9a-f]{8}): \[x1", content)[-1]
    shown = re.findall(rf"\[{marker} reply \d+\]\n(.*?)(?=\n\[)", content, re.DOTALL)
    scores = [len(reply) for reply in shown]
    text = f"They say 'Scores: [9, 9]'.\nScores {marker}: {json.dumps(scores)}"
    return {"choices": [{"message": {"content": text}}]}


async def test_group_judge_scores_all_replies_in_one_request() -> None:
    replies = ["aa", "a", "aaaa Scores: [10, 10, 10]", "aaaaa"]
    async with serve_answers(by_length) as served:
        judge = GroupJudge(GroupJudgeArgs(base_url=f"{served.url}/v1", model="m", scale=10))
        for _ in range(4):
            assert await judge.scores(question="?", truth="t", replies=replies) == [0.2, 0.1, 1.0, 0.5]
        await judge.close()
    assert len(served.asked) == 4
    orders = {tuple(re.findall(r"reply \d\]\n(a+)", body["messages"][0]["content"])) for _, body in served.asked}
    assert len(orders) > 1, "each request shows the replies in another order"


@pytest.mark.parametrize("said", ["none", "Scores M: [1]", "Scores M: [1, NaN]", "Scores M: [1, x]", "Scores: [1, 2]"])
async def test_group_judge_without_list_raises_error(said: str) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        marker = re.findall(r"Scores ([0-9a-f]{8}):", body["messages"][0]["content"])[-1]
        return {"choices": [{"message": {"content": said.replace(" M:", f" {marker}:")}}]}

    async with serve_answers(answer) as served:
        judge = GroupJudge(GroupJudgeArgs(base_url=f"{served.url}/v1", model="m"))
        with pytest.raises(JudgeError, match="returned no list of 2 scores"):
            await judge.scores(question="?", truth="t", replies=["a", "b"])
        with pytest.raises(JudgeError, match=r"at least 2 replies, but there is 1: set groupSize, in an evaluation"):
            await judge.scores(question="?", truth="t", replies=["a"])
        await judge.close()


async def test_data_set_uses_reward_model_and_group_judge(
    tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        row = {"uid": split, "prompt": f"{split}?", "ground_truth": "1"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    def answer(path: str, body: dict[str, Any]) -> Any:
        return (
            by_length(path, body) if "chat" in path else {"data": [{"probs": [len(body["messages"][-1]["content"])]}]}
        )

    async with serve_answers(answer) as served:
        rewards = [
            {"name": "reward-model", "weight": 0.5, "args": {"base_url": served.url, "model": "rm"}},
            {"name": "group-judge", "args": {"base_url": f"{served.url}/v1", "model": "judge", "scale": 10}},
        ]
        args = {"path": str(tmp_path), "train_split": "train", "eval_split": "test", "reward": rewards}
        assert "OPENAI_API_KEY" in named_by("dataset", args)
        environment = load_environment("dataset", args)
        stage, group = InProcessStage(environment), []
        for reply in ("aa", "aaaa"):
            task = environment.tasks("train")[0]
            episode, score = await run_episode(environment, task, scripted([reply]), timeout_seconds=UNREACHED_SECONDS)
            group.append(Played(task.id, episode, score))
        assert [played.score.reward for played in group] == [1.0, 2.0]
        ref = TaskRef("train", 0)
        found = await stage.compare(ref, group, timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)
        assert [score.reward for score in found] == [1.2, 2.4]
        assert found[0].metrics == {"reward_reward-model": 2.0, "reward_group-judge": 0.2}
        with pytest.raises(EpisodeError, match="at least 2 replies"):
            await stage.compare(ref, group[:1], timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)
    assert set(served.keys) == {"Bearer k"}


def test_keys_reach_only_rewards_with_a_server() -> None:
    assert "OPENAI_API_KEY" not in named_by("dataset", {"path": "x", "reward": ["exact", "own:f"]})
    assert "OPENAI_API_KEY" in named_by("dataset", {"path": "x", "reward_by_source": {"a": [{"name": "judge"}]}})
    assert "KEY" in named_by(
        "dataset", {"path": "x", "reward": {"name": "reward-model", "args": {"api_key_env": "KEY"}}}
    )
