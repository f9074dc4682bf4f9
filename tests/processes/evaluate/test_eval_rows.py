"""Rollouts with unusual content: tools, lone surrogates, messages that are not objects. No generated rollout is lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support" / "orchestrator" / "simulation"))

from orch_simulation import FakeEngine

from rlrun.config.models.data import DataConfig, DataSetConfig, SourceConfig
from rlrun.environments.dataset_rows import Rows
from rlrun.environments.protocol import Environment, Episode, Message, ModelClient, Score, Split, Task
from rlrun.environments.stage import InProcessStage
from rlrun.evaluate import sampled_rows
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.evaluation.evaluator import Evaluator, list_questions
from rlrun.orchestrator.main import load_chat
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.sft.chat_rows import read_conversation
from tests.processes.evaluate.test_eval_answers import MESSAGES, answer, part
from tests.processes.evaluate.test_eval_role import make

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
LONE = "a\ud800b\U0001f600"


@pytest.mark.parametrize("suffix", sampled_rows.SUFFIXES)
def test_tools_are_kept_and_read_by_sft(tmp_path: Path, suffix: str) -> None:
    found = part(tmp_path / "f.jsonl", [answer(1.0), answer(1.0, 1, tools=(TOOL,))])
    rows = sampled_rows.select_rows([found], min_reward=None).rows
    path = tmp_path / f"data{suffix}"
    sampled_rows.write_rows(path, rows)
    config = DataConfig(sources=[SourceConfig(path=str(path))])
    back = [read_conversation(row, config) for row in map(Rows(DataSetConfig(path=str(path)), "data").row, range(2))]
    assert not back[0].tools
    assert back[1].tools is not None
    assert [tool["function"]["name"] for tool in back[1].tools] == ["add"]


def test_rows_without_tools_have_no_tools_column(tmp_path: Path) -> None:
    assert all(
        "tools" not in row
        for row in sampled_rows.select_rows([part(tmp_path / "f", [answer(1.0)])], min_reward=None).rows
    )


@pytest.mark.parametrize("suffix", sampled_rows.SUFFIXES)
def test_only_lone_surrogates_are_replaced(tmp_path: Path, suffix: str) -> None:
    spoken = [*MESSAGES, {"role": "assistant", "content": LONE, LONE: [{"deep": LONE}]}]
    found = part(tmp_path / "f.jsonl", [answer(1.0, messages=spoken), answer(1.0, 1)])
    path = tmp_path / f"data{suffix}"
    sampled_rows.write_rows(path, sampled_rows.select_rows([found], min_reward=None).rows)
    first, second = (Rows(DataSetConfig(path=str(path)), "data").row(index)["messages"] for index in range(2))
    assert first[-1]["content"] == "a\ufffdb\U0001f600"
    assert first[-1]["a\ufffdb\U0001f600"][0]["deep"] == "a\ufffdb\U0001f600"
    assert [message["content"] for message in second] == [message["content"] for message in MESSAGES]


@pytest.mark.parametrize("odd", ["hello", 5, None, ["user", "hi"], {"content": "no role"}, {"role": 5, "content": "x"}])
def test_invalid_chat_is_excluded_and_counted(tmp_path: Path, odd: Any) -> None:
    found = part(tmp_path / "f.jsonl", [answer(1.0, messages=(*MESSAGES, odd)), answer(1.0, 1)])
    selected = sampled_rows.select_rows([found], min_reward=None)
    assert (len(selected.rows), selected.no_chat) == (1, 1)
    assert json.loads((tmp_path / "f.jsonl").read_text().splitlines()[0])["messages"][-1] == odd


class Offering:
    """Environment that offers a tool to the model."""

    id = "offering"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task("t", [{"role": "user", "content": "hi"}])]

    async def run(self, task: Task, model: ModelClient) -> Episode:
        reply = await model.complete(task.prompt, tools=[TOOL])
        messages: list[Message] = [*task.prompt, {"role": "assistant", "content": reply.text}]
        return Episode(messages, 1)

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)


async def test_answer_contains_offered_tools(tmp_path: Path) -> None:
    config = make(tmp_path, seq_len=1024)
    chat = load_chat(config)
    engine = FakeEngine(version=3)
    replica = Replica("http://engine", cast("Any", engine), version=3)
    pool = EnginePool([replica], Signal())
    stage = InProcessStage(cast("Environment", Offering()))
    arena = Arena(config.environments[0], stage, stage.tasks("train"))
    evaluator = Evaluator(config, [arena], Player(config, pool, chat), pool, chat)
    (found,) = await evaluator.collect_answers(list_questions([arena], "eval", num_tasks=1, samples_per_task=1), 3)
    assert found.rollout is not None, found.error
    assert found.rollout.tools == (TOOL,)
