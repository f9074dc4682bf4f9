"""Prompts and replies of a megabyte: rendered and tokenized outside of the event loop, once per group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rlrun.environments.protocol import Message
from rlrun.inference.client.completions import Completion
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation, _count_characters
from rlrun.runtime.background_compute import SMALL
from rlrun.trainer.modeling.tiny_model import make_tokenizer

GROUP = 8


class Noted:
    """Tokenizer that records the thread in which each text is rendered, tokenized and decoded."""

    def __init__(self) -> None:
        self._tokenizer: Any = make_tokenizer()
        self.threads: list[tuple[str, int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def _note(self, what: str, size: int) -> None:
        self.threads.append((what, size, threading.current_thread() is threading.main_thread()))

    def __call__(self, text: str, **options: Any) -> Any:
        self._note("tokenise", len(text))
        return self._tokenizer(text, **options)

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> Any:
        self._note("render", sum(len(str(message["content"])) for message in messages))
        return self._tokenizer.apply_chat_template(messages, **options)

    def decode(self, ids: list[int], **options: Any) -> Any:
        self._note("decode", len(ids))
        return self._tokenizer.decode(ids, **options)

    def in_the_loop(self, *, above: int = SMALL) -> list[tuple[str, int, bool]]:
        return [noted for noted in self.threads if noted[1] > above and noted[2]]


async def generate(token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
    count = min(max_tokens, 30_000)
    return Completion([81] * count, [-0.5] * count, [1] * count, "length")


def conversation(chat: ChatTokens) -> Conversation:
    return Conversation(generate, chat, seq_len=1 << 21, max_tokens=1 << 20)


async def test_long_texts_are_processed_outside_the_event_loop() -> None:
    tokenizer = Noted()
    chat = ChatTokens(tokenizer)
    talk = conversation(chat)
    messages: list[Message] = [{"role": "user", "content": "ab " * 100_000}]
    reply = await talk.complete(messages)
    await talk.complete([*messages, reply.message, {"role": "user", "content": "cd " * 20_000}], stop=["zz"])
    assert {what for what, size, _ in tokenizer.threads if size > SMALL} == {"tokenise", "render", "decode"}
    assert tokenizer.in_the_loop() == []


def test_message_size_counts_all_texts() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "x" * 500}}
    parts = [{"type": "text", "text": "y" * 1000}]
    assert (
        1500
        <= _count_characters([{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}])
        < 1600
    )


async def test_short_prompts_stay_in_the_event_loop() -> None:
    tokenizer = Noted()
    talk = Conversation(short, ChatTokens(tokenizer), seq_len=1000, max_tokens=8)
    await talk.complete([{"role": "user", "content": "abc"}])
    assert all(in_loop for _, _, in_loop in tokenizer.threads)


async def short(token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
    return Completion([81], [-0.5], [1], "stop")


async def test_group_tokenizes_its_long_prompt_once() -> None:
    tokenizer = Noted()
    chat = ChatTokens(tokenizer)
    messages: list[Message] = [{"role": "user", "content": "ab " * 100_000}]
    await asyncio.gather(*(conversation(chat).complete(messages) for _ in range(GROUP)))
    assert len([noted for noted in tokenizer.threads if noted[0] == "tokenise" and noted[1] > SMALL]) == 1


async def test_refused_prompt_fails_every_waiter_and_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTokens(make_tokenizer())
    messages: list[Message] = [{"role": "user", "content": "ab " * 100_000}]

    def refuse(*_: object, **__: object) -> str:
        raise TemplateError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(chat.template, "_apply_template", refuse)
        tries = (conversation(chat).complete(messages) for _ in range(3))
        found = await asyncio.gather(*tries, return_exceptions=True)
    assert [str(error) for error in found] == ["refused"] * 3
    assert (await conversation(chat).complete(messages)).completion_tokens == 30_000


async def test_event_loop_runs_while_long_prompt_is_tokenized() -> None:
    """Count iterations of the loop instead of seconds, because other work on the machine slows both."""
    entered, leave, turns = threading.Event(), threading.Event(), 0

    class Slow(Noted):
        def __call__(self, text: str, **options: Any) -> Any:
            if len(text) > SMALL:
                entered.set()
                assert leave.wait(60)
            return super().__call__(text, **options)

    playing = asyncio.create_task(
        conversation(ChatTokens(Slow())).complete([{"role": "user", "content": "ab " * 100_000}])
    )
    while turns < 100:
        await asyncio.sleep(0.001)
        turns += entered.is_set()
    assert not playing.done()
    leave.set()
    await playing
