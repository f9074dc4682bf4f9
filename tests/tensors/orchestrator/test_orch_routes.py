"""Routes of conversations: each token keeps the experts of the first request that computed it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rlrun.environments.protocol import Message
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation
from rlrun.orchestrator.types import Recorded
from rlrun.protocol.files.routes import EngineRoutes, has_route
from rlrun.trainer.modeling.tiny_model import CHAT_TEMPLATE, make_tokenizer

EOS = 2
DENSE, MIXED = 1, 2
"""Decoder layers of each kind; the dense layer is the first."""


class RoutingEngine:
    """Engine whose experts of a token are the token's position and the number of the request.

    With `whole` it returns the experts of all tokens, whatever position is requested.
    """

    def __init__(self, replies: Sequence[str], *, whole: bool = False) -> None:
        self.whole = whole
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        self.chat, self.replies = ChatTokens(tokenizer), list(replies)
        self.starts: list[int] = []
        self.lengths: list[int] = []

    async def __call__(
        self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = (), routes_start: int = 0
    ) -> Completion:
        tokens = [*self.chat._tokenize_text(self.replies.pop(0)), EOS]
        self.starts.append(routes_start)
        self.lengths.append(len(token_ids) + len(tokens))
        routes_start = 0 if self.whole else routes_start
        positions = np.arange(routes_start, self.lengths[-1] - 1, dtype=np.uint8)
        experts = np.zeros((len(positions), DENSE + MIXED, 2), np.uint8)
        experts[:, DENSE:, 0] = positions[:, None]
        experts[:, DENSE:, 1] = 200 + len(self.starts)
        count = len(tokens)
        return Completion(tokens, [-0.5] * count, [0] * count, "stop", EngineRoutes(routes_start, experts))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def requests_of(recorded: Recorded) -> list[int]:
    """Return the number of the request that chose each token's experts, without the last token."""
    assert recorded.routes is not None
    found = has_route(recorded.routes)
    assert recorded.routes.shape == (len(recorded.input_ids), MIXED, 2), "dense layers are left out"
    assert found[:-1].all()
    assert not found[-1].any(), "no request has computed the last token"
    assert (recorded.routes[:-1, :, 0] == np.arange(len(found) - 1)[:, None]).all()
    return [int(number) - 200 for number in recorded.routes[:-1, 0, 1]]


@pytest.mark.parametrize("whole", [False, True])
async def test_later_turn_keeps_the_experts_of_earlier_turns(whole: bool) -> None:
    engine = RoutingEngine(["xy", "z", "zz"], whole=whole)
    conversation = Conversation(engine, engine.chat, seq_len=200, max_tokens=20)
    messages: list[Message] = []
    for text in ("a", "b", "c"):
        messages.append(user(text))
        messages.append((await conversation.complete(messages)).message)
    (recorded,) = conversation.recorded()
    first, second, third = engine.lengths
    assert engine.starts == [0, first - 1, second - 1], (
        "the last sampled token of a turn has no row before the next one"
    )
    assert requests_of(recorded) == [1] * (first - 1) + [2] * (second - first) + [3] * (third - second)


async def test_branch_from_an_earlier_reply_keeps_its_experts() -> None:
    engine = RoutingEngine(["x", "y", "z"])
    conversation = Conversation(engine, engine.chat, seq_len=200, max_tokens=20)
    first = await conversation.complete([user("a")])
    await conversation.complete([user("a"), first.message, user("b")])
    await conversation.complete([user("a"), first.message, user("c")])
    one, two = sorted(conversation.recorded(), key=lambda recorded: requests_of(recorded)[-1])
    known = engine.lengths[0] - 1
    # The second request computed the last sampled token of the first reply, before the branch.
    assert requests_of(one)[: known + 1] == requests_of(two)[: known + 1] == [1] * known + [2]
    assert set(requests_of(one)[known:]) == {2}
    assert set(requests_of(two)[known + 1 :]) == {3}


async def test_cut_reply_has_no_experts_beyond_its_end() -> None:
    engine = RoutingEngine(["abcSTOPdef"])
    conversation = Conversation(engine, engine.chat, seq_len=200, max_tokens=40, stop=("STOP",))
    await conversation.complete([user("a")])
    (recorded,) = conversation.recorded()
    assert recorded.routes is not None
    assert len(recorded.routes) == len(recorded.input_ids) < engine.lengths[0]
