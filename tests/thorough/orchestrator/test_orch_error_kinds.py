"""Episodes that fail without an engine: errors of the conversation have the kind `tokens` in every environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from orch_simulation import make_config

from rlrun.config.models.rollout import EnvironmentConfig, SamplingConfig
from rlrun.environments import Episode, EpisodeError, Message, ModelClient, Reply, Score, Split, Task
from rlrun.environments.stage import InProcessStage, TaskRef
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import RolloutError
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.player import Player


class Asks:
    """Environment that sends one fixed conversation; `wraps` converts its client's errors or hides their cause."""

    id = "asks"

    def __init__(self, messages: list[Message], wraps: str = "") -> None:
        self._messages, self._wraps = messages, wraps

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task("0", self._messages)]

    async def run(self, task: Task, model: ModelClient) -> Episode:
        try:
            reply: Reply = await model.complete(task.prompt)
        except Exception as error:
            if self._wraps == "from":
                raise RuntimeError("the client failed") from error
            if self._wraps:
                raise RuntimeError("the client failed")  # noqa: B904 - as careless environments do
            raise
        return Episode([*task.prompt, reply.message], 1)

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)


class Sends:
    """Session that returns a fixed answer or raises a fixed error."""

    troubled = False

    def __init__(self, answer: Completion | Exception) -> None:
        self._answer = answer

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def parse(self, *_: Any) -> Any: ...


async def play(tmp_path: Path, tokenizer: Path, messages: list[Message], wraps: str, answer: Any) -> None:
    config = make_config(tmp_path, tokenizer)
    player = Player(config, EnginePool([], Signal()), ChatTokens.load(tokenizer))
    environment = InProcessStage(Asks(messages, wraps))
    arena = Arena(EnvironmentConfig(id="asks"), environment, [TaskRef("train", 0)])
    await player.play(arena, arena.tasks[0], sampling=SamplingConfig(max_tokens=8), session=Sends(answer))  # type: ignore[arg-type]


LONG: list[Message] = [{"role": "user", "content": "ab" * 200}]
SHORT: list[Message] = [{"role": "user", "content": "ab"}]
MISSHAPEN: list[Message] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
NOTHING = Completion([], [], [], "stop")


@pytest.mark.parametrize("wraps", ["", "from", "careless"])
@pytest.mark.parametrize(
    ("messages", "answer", "says"),
    [
        (LONG, NOTHING, r"the prompt has \d+ tokens, so seqLen \(64\)"),
        (MISSHAPEN, NOTHING, "has content of type 'image_url'"),
        (SHORT, NOTHING, "the engine returned an empty reply"),
    ],
)
async def test_conversation_refusal_is_not_a_model_failure(
    tmp_path: Path, tokenizer_folder: Path, messages: list[Message], answer: Any, says: str, wraps: str
) -> None:
    with pytest.raises(RolloutError, match=says):
        await play(tmp_path, tokenizer_folder, messages, wraps, answer)


@pytest.mark.parametrize("wraps", ["", "from"])
async def test_other_client_failure_is_a_model_failure(tmp_path: Path, tokenizer_folder: Path, wraps: str) -> None:
    with pytest.raises(EpisodeError, match="the model client failed") as caught:
        await play(tmp_path, tokenizer_folder, SHORT, wraps, OSError("boom"))
    assert caught.value.kind == "model"
