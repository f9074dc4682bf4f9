"""Rows of agents and thinking models with chat templates of real models: learned texts and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.environments.protocol import Message
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.sft.chat_rows import Conversation
from rlrun.orchestrator.sft.chat_samples import ChatEncoder
from tests.support.chat_templates import FAMILIES, IN_GATE, real_tokenizer
from tests.support.family_conversations import ADD, spell
from tests.support.sets import few_in_gate

WRITES_THOUGHTS = (
    "qwen3",
    "qwen3_5",
    "qwen3_6",
    "qwen3_8",
    "gemma4_v5",
    "glm4_5",
    "gpt_oss",
    "lfm2_5",
    "nemotron3_nano",
)
DROPS_THOUGHTS = ("deepseek_v3", "deepseek_r1", "gemma4_v2", "phi4", "exaone4")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def make_reply(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def call(number: int = 0, **fields: Any) -> Message:
    function = {"name": "add", "arguments": {"a": number}}
    return make_reply("", tool_calls=[{"id": f"call0000{number}", "type": "function", "function": function}], **fields)


def result(number: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": f"RESULT{number}"}


def learned(name: str, *messages: Message, tools: bool = False) -> list[str]:
    """Return the learned texts, one for each reply."""
    tokenizer, ends = real_tokenizer(name)
    weights = [float(message["role"] == "assistant") for message in messages]
    made = ChatEncoder(tokenizer, ends).encode(Conversation(messages, weights, [ADD] if tools else None))
    runs: list[list[int]] = [[]]
    for id, weight in zip(made.input_ids, made.weights, strict=True):
        if weight:
            runs[-1].append(id)
        elif runs[-1]:
            runs.append([])
    return [spell(name, run) for run in runs if run]


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_two_tool_turns_and_replies_are_learned(name: str) -> None:
    """Calls and the replies after results are learned; questions and results are not."""
    family = FAMILIES[name]
    texts = learned(
        name,
        user("U1"),
        call(),
        result(),
        make_reply("R1"),
        user("U2"),
        call(1),
        result(1),
        make_reply("R2"),
        tools=True,
    )
    assert len(texts) == 4
    assert all("add" in text and str(n) in text for n, text in enumerate(texts[::2]))
    assert [text.count(f"R{n}") for n, text in enumerate(texts[1::2], 1)] == [1, 1]
    assert texts[-1].endswith(f"R2{family.end}")
    for text in texts:
        assert "U2" not in text
        assert "RESULT" not in text


@pytest.mark.parametrize("name", WRITES_THOUGHTS)
def test_thoughts_of_last_reply_are_learned(name: str) -> None:
    *_, last = learned(
        name, user("U1"), make_reply("R1", reasoning_content="T1"), user("U2"), make_reply("R2", reasoning_content="T2")
    )
    family = FAMILIES[name]
    assert last == f"{(family.thought or '').format('T2')}{family.head}R2{family.end}"


@pytest.mark.parametrize("name", DROPS_THOUGHTS)
def test_thoughts_dropped_from_last_reply_are_refused(name: str) -> None:
    problem = "drops the thoughts of message 2; remove them from the row, or use a chat template that renders them"
    with pytest.raises(TemplateError, match=problem):
        learned(name, user("U1"), make_reply("R1", reasoning_content="T1"))


@pytest.mark.parametrize("name", ["deepseek_r1", "exaone4"])
def test_tagged_thoughts_dropped_by_template_are_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="drops the thoughts of message 2"):
        learned(name, user("U1"), make_reply("<think>\nT1\n</think>\n\nR1"))


TAGGED = ("<think>T{0}</think>R{0}", "<think>\nT{0}\n</think>\n\nR{0}", "T{0}\n</think>\n\nR{0}")
"""Thoughts inside of the content, as in public data sets."""
KEEPS_TAGS = (
    *(name for name, family in FAMILIES.items() if family.thought is None and name != "qwen3_5_nothink"),
    "phi4",
    "gemma4_v2",
)
"""Families whose templates ignore thoughts: the text is learned unchanged, as in distillation into a model without
thoughts.
"""
REFUSES_TAGS = ("gemma4", "deepseek_v3", "deepseek_r1", "exaone4")


@pytest.mark.parametrize("tagged", TAGGED)
@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_tagged_thoughts_are_learned_once_or_refused(name: str, tagged: str) -> None:
    rows = [user("U1"), make_reply(tagged.format(1)), user("U2"), make_reply(tagged.format(2))]
    if name in REFUSES_TAGS:
        with pytest.raises(TemplateError, match="drops the thoughts of message 4; remove them from the row"):
            learned(name, *rows)
        return
    first, last = learned(name, *rows)
    family = FAMILIES[name]
    if name in KEEPS_TAGS:
        assert (first.strip(), last.strip()) == tuple(tagged.format(n) + family.end for n in (1, 2))
        return
    assert (first.count("T1") <= 1, first.count("R1"), last.count("T2"), last.count("R2")) == (True, 1, 1, 1)
    assert (first.count("</think>") <= 1, last.count("</think>") <= 1) == (True, True)
    # Must equal thoughts in a separate field, which the models of this family sample.
    fields = [
        user("U1"),
        make_reply("R1", reasoning_content="T1"),
        user("U2"),
        make_reply("R2", reasoning_content="T2"),
    ]
    assert [first, last] == learned(name, *fields)
    if family.thought is not None and name in WRITES_THOUGHTS:
        assert last == f"{family.thought.format('T2')}{family.head}R2{family.end}"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (make_reply("<think>T</think>R", reasoning_content="T"), "both in reasoning_content and in its content"),
        (
            make_reply("<think>T"),
            "message 2 has <think> without </think> in its content; add </think> after the thoughts",
        ),
        (make_reply("Before <think>T</think>R"), "changes the content of message 2"),
    ],
)
def test_inseparable_tagged_thoughts_are_refused(reply: Message, problem: str) -> None:
    with pytest.raises(TemplateError, match=problem):
        learned("qwen3", user("U1"), reply)
    with pytest.raises(TemplateError, match=problem):
        learned("qwen3", user("U1"), reply, user("U2"), make_reply("R2"))


def test_empty_tagged_thought_is_learned_as_empty() -> None:
    assert learned("qwen3", user("U1"), make_reply("<think>\n\n</think>\n\nR1")) == [
        "<think>\n\n</think>\n\nR1<|im_end|>"
    ]
    assert learned("gpt_oss", user("U1"), make_reply("<think></think>R1")) == [
        "<|channel|>final<|message|>R1<|return|>"
    ]


def test_dropped_developer_message_is_refused_with_fix() -> None:
    with pytest.raises(TemplateError, match="drops message 1 with role developer; change its role to system"):
        learned("qwen3", {"role": "developer", "content": "D"}, user("U1"), make_reply("R1"))


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v3_tekken"])
def test_dropped_system_message_is_refused_with_fix(name: str) -> None:
    """These templates write the system message before the last question, and only if no reply follows."""
    problem = "drops message 1 with role system; move its text to the first user message"
    with pytest.raises(TemplateError, match=problem):
        learned(name, {"role": "system", "content": "S"}, user("U1"), make_reply("R1"))
    assert [text.strip() for text in learned(name, user("S\n\nU1"), make_reply("R1"))] == ["R1</s>"]


@pytest.mark.parametrize("name", ["mistral_common_v3", "mistral_common_v3_tekken"])
def test_moved_system_message_is_accepted(name: str) -> None:
    texts = learned(
        name, {"role": "system", "content": "S"}, user("U1"), make_reply("R1"), user("U2"), make_reply("R2")
    )
    assert [text.strip() for text in texts] == ["R1</s>", "R2</s>"]


def test_dropped_second_call_is_refused() -> None:
    both = call() | {"tool_calls": [*call()["tool_calls"], *call(1)["tool_calls"]]}
    with pytest.raises(TemplateError, match="renders only one call per reply"):
        learned("gpt_oss", user("U1"), both, result(), result(1), make_reply("R"), tools=True)
