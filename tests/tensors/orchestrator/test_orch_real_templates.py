"""Conversations with chat templates of real models: turn ends, later prompts, tool turns and SFT labels."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlrun.environments.protocol import Message
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.sft.chat_rows import Conversation as SftConversation
from rlrun.orchestrator.sft.chat_samples import ChatEncoder
from tests.support.chat_templates import FAMILIES, IN_GATE, real_tokenizer
from tests.support.family_conversations import ADD, CALL_AS_TEXT, chat_of, ids_of
from tests.support.family_conversations import spell as spelled
from tests.support.sets import few_in_gate

NATIVE = [name for name, family in FAMILIES.items() if family.form == "native"]
AS_TEXT = [name for name in FAMILIES if name not in NATIVE]
QUESTION: Message = {"role": "user", "content": "U1"}
ONE_CALL_ONLY = ("llama3_1", "llama3_2", "gpt_oss")
"""Families whose templates write one call per reply."""


def reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(count: int) -> Message:
    functions = [{"name": "add", "arguments": f'{{"a": {number}}}'} for number in range(count)]
    return reply("") | {
        "tool_calls": [
            {"id": f"call0000{number}", "type": "function", "function": function}
            for number, function in enumerate(functions)
        ]
    }


def results(count: int) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call0000{number}", "content": f"RESULT{number}"} for number in range(count)
    ]


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_stop_tokens_are_engine_and_template_ends(name: str) -> None:
    family = FAMILIES[name]
    stops = {spelled(name, [id]) for id in chat_of(name).stop_token_ids}
    assert stops == {family.eos, *family.ends, family.end} | ({family.call_end} if family.call_end else set())


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_stop_tokens_are_found_without_generation_config(name: str) -> None:
    """The end after calls is included; GLM's end before a question occurs only in the generation config."""
    family, tokenizer = FAMILIES[name], real_tokenizer(name)[0]
    stops = {spelled(name, [id]) for id in ChatTokens(tokenizer).stop_token_ids}
    wanted = {family.eos, family.end} | ({family.call_end} if family.call_end else set())
    assert stops == wanted - ({"<|user|>"} if name == "glm4_5" else set())


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_second_turn_prompt_equals_template(name: str) -> None:
    family, chat = FAMILIES[name], chat_of(name)
    said = [QUESTION, reply("R1"), {"role": "user", "content": "U2"}]
    sampled = ids_of(name, f"R1{family.end}")
    ids = [*chat.opening(said[:1])[1], *sampled, *chat.continuation(said, 1, sampled)]
    wanted, found = chat.prompt(said), spelled(name, ids)
    if (
        family.end != "<|return|>"
    ):  # Harmony ends a sampled turn with this token and writes another one in later prompts
        assert found[found.index("R1") :] == wanted[wanted.index("R1") :].replace(f"R1{family.end}\n{family.end}", "")
    if family.keeps:
        assert found == wanted


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_alternative_end_token_is_not_repeated(name: str) -> None:
    family, chat = FAMILIES[name], chat_of(name)
    said = [QUESTION, reply("R1"), {"role": "user", "content": "U2"}]
    own = ids_of(name, f"R1{family.end}")
    usual = spelled(name, chat.continuation(said, 1, own))
    for id in chat.stop_token_ids:
        added = spelled(name, chat.continuation(said, 1, [*own[:-1], id]))
        marker = (
            "<|user|>" if name == "glm4_5" and id != own[-1] else ""
        )  # starts the next message and does not end the reply
        assert added == marker + usual.removeprefix(spelled(name, [id])), spelled(name, [id])


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_truncated_reply_gets_the_full_template_ending(name: str) -> None:
    chat = chat_of(name)
    said = [QUESTION, reply("R1"), {"role": "user", "content": "U2"}]
    added = spelled(name, chat.continuation(said, 1, ids_of(name, "R1")))
    assert added == chat.template.after_reply(said, 1)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=[] if name in IN_GATE else pytest.mark.full)
        for name in NATIVE
        for count in (1, 2)
        if count == 1 or name not in ONE_CALL_ONLY
    ],
)
def test_prompt_after_tool_calls_equals_template(name: str, count: int) -> None:
    family, chat = FAMILIES[name], chat_of(name)
    said = [QUESTION, calls(count), *results(count)]
    opening, ids = chat.opening(said[:1], [ADD])
    written, wanted = chat.template.write(said[:2], [ADD]), chat.prompt(said, [ADD])
    form = written[written.rindex("U1") :].partition("add")[2].partition(family.call_end or family.end)[0]
    sampled = ids_of(name, f"add{form}{family.call_end or family.end}")
    found = spelled(name, [*ids, *sampled, *chat.continuation(said, 1, sampled, [ADD])])
    assert found[found.rindex(form) :] == wanted[wanted.rindex(form) :]
    assert found.startswith(opening)


@pytest.mark.parametrize("name", few_in_gate(AS_TEXT, [name for name in AS_TEXT if name in IN_GATE]))
def test_template_without_tools_gets_them_as_text(name: str) -> None:
    family, chat = FAMILIES[name], chat_of(name)
    said = [{"role": "system", "content": "SYSTEM"}, QUESTION][family.form.startswith("user") :]
    opening, ids = chat.opening(said, [ADD])
    assert ("You can call these functions" in opening) == (not family.form.startswith("template"))
    assert opening.index('"add"') < opening.index("U1")
    sampled = ids_of(name, CALL_AS_TEXT + family.end)
    later = [*said, calls(1), *results(1)]
    found = spelled(name, [*ids, *sampled, *chat.continuation(later, len(said), sampled, [ADD])])
    assert "RESULT0" in found.partition(CALL_AS_TEXT)[2]
    assert ("<tool_response>\nRESULT0\n</tool_response>" in found) == family.form.endswith("user")
    if family.keeps:
        assert found == chat.prompt(later, [ADD])


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_sft_learns_reply_ends_and_no_questions(name: str) -> None:
    family = FAMILIES[name]
    tokenizer, ends = real_tokenizer(name)
    said = [QUESTION, reply("R1"), {"role": "user", "content": "U2"}, reply("R2")]
    encoded = ChatEncoder(tokenizer, ends).encode(SftConversation(said, [0.0, 1.0, 0.0, 1.0]))
    learned = spelled(name, encoded.input_ids[encoded.weights > 0])
    assert learned.endswith(f"R2{family.end}")
    assert "U2" not in learned
    # Harmony's earlier replies end with a token that does not end a turn, so their end is not learned.
    assert ("R1" if family.end == "<|return|>" else f"R1{family.end}") in learned


def test_role_dropped_by_template_is_refused_by_name() -> None:
    tokenizer, ends = real_tokenizer("phi3")
    chat: Any = ChatTokens(tokenizer, ends=ends)
    said = [QUESTION, reply("R1"), {"role": "developer", "content": "U2"}]
    with pytest.raises(ValueError, match="the chat template drops a message with role developer"):
        chat.continuation(said, 1, ids_of("phi3", "R1<|end|>"))


def test_call_ids_refused_by_template_become_nine_letters() -> None:
    """Data sets and programs use ids of other forms; a call and its result keep a common id."""
    chat = chat_of("mistral_v3_tekken")
    call = calls(1)["tool_calls"][0] | {"id": "call_abc"}
    text = chat.prompt(
        [QUESTION, reply("") | {"tool_calls": [call]}, results(1)[0] | {"tool_call_id": "call_abc"}], [ADD]
    )
    (called,) = re.findall(r'"id": "([a-z0-9]{9})"', text)
    assert f'"call_id": "{called}"' in text
    kept = chat.prompt([QUESTION, calls(1), *results(1)], [ADD])
    assert '"id": "call00000"' in kept
    assert '"call_id": "call00000"' in kept


def test_lone_surrogate_in_call_arguments_is_replaced() -> None:
    """A policy may write half of an emoji as JSON, which tokenizers refuse."""
    chat = chat_of("qwen3")
    call = calls(1)["tool_calls"][0] | {"function": {"name": "add", "arguments": '{"a": "\\ud83d"}'}}
    text, ids = chat.opening([QUESTION, reply("") | {"tool_calls": [call]}, *results(1)], [ADD])
    assert '{"a": "\ufffd"}' in text
    assert spelled("qwen3", ids) == text


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3"])
def test_non_ascii_call_arguments_are_kept(name: str) -> None:
    call = calls(1)["tool_calls"][0] | {"function": {"name": "add", "arguments": '{"a": "n\\u00e9"}'}}
    text = chat_of(name).prompt([QUESTION, reply("") | {"tool_calls": [call]}, *results(1)], [ADD])
    assert '"arguments": {"a": "né"}' in text


ONE_CALL = "renders only one call per reply; put each call into a separate reply, or keep only the first call"


@pytest.mark.parametrize("name", ["gpt_oss", "llama3_1", "llama3_2"])
def test_template_with_one_call_per_reply_refuses_two(name: str) -> None:
    """Without the fix, Llama's template refuses them and GPT-OSS's writes only the first call."""
    chat = chat_of(name)
    with pytest.raises(TemplateError, match=ONE_CALL):
        chat.prompt([QUESTION, calls(2), *results(2)], [ADD])
    first = calls(2) | {"tool_calls": calls(2)["tool_calls"][:1]}
    assert "RESULT0" in chat.prompt([QUESTION, first, *results(1)], [ADD])


def test_continuation_after_two_calls_is_refused() -> None:
    """GPT-OSS's template would report that the results have no call."""
    with pytest.raises(TemplateError, match=ONE_CALL):
        chat_of("gpt_oss").template.after_reply([QUESTION, calls(2), *results(2)], 1, [ADD])


SYSTEM: Message = {"role": "system", "content": "TEXT0"}
QUESTIONS: list[Message] = [{"role": "user", "content": f"TEXT{number}"} for number in range(4)]
REPLIES: list[Message] = [{"role": "assistant", "content": f"TEXT{number}"} for number in range(4)]
UNUSUAL: dict[str, list[Message]] = {
    "two replies": [QUESTIONS[0], *REPLIES[1:3], QUESTIONS[3]],
    "two questions": QUESTIONS[:2],
    "an empty reply": [QUESTIONS[0], {"role": "assistant", "content": ""}, QUESTIONS[1]],
    "a reply first": [REPLIES[0], QUESTIONS[1]],
    "a system message only": [SYSTEM],
    "a system message and a reply": [SYSTEM, REPLIES[1], QUESTIONS[2]],
    "a system message later": [QUESTIONS[0], {"role": "system", "content": "TEXT1"}, QUESTIONS[2]],
    "a developer first": [{"role": "developer", "content": "TEXT0"}, QUESTIONS[1]],
}


@pytest.mark.parametrize("shape", UNUSUAL)
@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_unusual_prompt_keeps_every_message_or_is_refused(name: str, shape: str) -> None:
    messages, said = UNUSUAL[shape], None
    try:
        text, _ = chat_of(name).opening(messages)
    except TemplateError as error:
        said = str(error)
    if said is not None:
        assert re.search(r"refuses the conversation: \w+|drops message \d with role \w+; \w+", said)
        return
    known = [message["content"] for message in messages if message["content"]]
    assert [text.count(content) for content in known] == [1] * len(known)


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("qwen3", "a developer first", "drops message 1 with role developer; change its role to system"),
        (
            "gpt_oss",
            "a system message later",
            "drops message 2 with role system; move its text to the first user message",
        ),
        (
            "gemma3",
            "a system message only",
            "drops message 1 with role system; move its text to the first user message",
        ),
    ],
)
def test_prompt_with_dropped_message_is_refused(name: str, shape: str, problem: str) -> None:
    chat = chat_of(name)
    for _ in range(2):  # the cache of known shapes must not mark this prompt as complete
        with pytest.raises(TemplateError, match=problem):
            chat.opening(UNUSUAL[shape])


@pytest.mark.parametrize("name", few_in_gate(FAMILIES, IN_GATE))
def test_prompt_ending_with_reply_is_refused(name: str) -> None:
    with pytest.raises(
        TemplateError, match="prefilled replies are unsupported; end the conversation with another role"
    ):
        chat_of(name).opening([QUESTIONS[0], REPLIES[1]])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3", "gemma4", "lfm2_5"])
def test_thoughts_before_call_reach_the_next_prompt(name: str, field: str) -> None:
    """Each template reads thoughts from another field; the call belongs to the turn that continues."""
    text = chat_of(name).prompt([QUESTION, calls(1) | {field: "THOUGHT"}, *results(1)], [ADD])
    assert text.index("THOUGHT") < text.index("RESULT0")


def test_content_with_thoughts_and_call_is_kept() -> None:
    """GPT-OSS's template refuses both together, although it writes both to the same channel."""
    said = calls(1) | {"content": "I will add.", "reasoning_content": "Think."}
    text = chat_of("gpt_oss").prompt([QUESTION, said, *results(1)], [ADD])
    assert "<|channel|>analysis<|message|>Think.\nI will add.<|end|>" in text


def test_non_text_thoughts_are_refused() -> None:
    with pytest.raises(TemplateError, match="reasoning_content is 3"):
        chat_of("qwen3").prompt([QUESTION, reply("R1") | {"reasoning_content": 3}])
