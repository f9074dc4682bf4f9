"""Loss masks of SFT conversations for every kind of chat template."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun.config.models.data import DataConfig
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.sft.chat_rows import Conversation, read_conversation
from rlrun.orchestrator.sft.chat_samples import ChatEncoder
from tests.tensors.sft.conftest import TEMPLATES, make_tokenizer

STOPS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "thinking": "<|im_end|>", "plain": ""}
LAST_END = {"plain": "</s>"}
"""Text appended to the last reply if the template does not end turns."""
WORDS = st.text(st.sampled_from("ab é\nthe is:,<>/"), min_size=1, max_size=12).map(lambda text: f"x{text}y")


@cache
def encoder(name: str) -> ChatEncoder:
    return ChatEncoder(make_tokenizer(TEMPLATES[name]))


def learned(name: str, chat: Conversation, *, pieces: bool = False) -> Any:
    made = encoder(name).encode(chat)
    tokenizer = make_tokenizer(TEMPLATES[name])
    text = tokenizer.decode(made.input_ids[made.weights > 0])
    return (text, tokenizer.decode(made.input_ids)) if pieces else text


def turns(*texts: str, roles: tuple[str, ...] = ("assistant",)) -> Conversation:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return Conversation(messages, [float(m["role"] in roles) for m in messages])


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "plain"])
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(WORDS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_sft_learns_replies_and_their_ends(name: str, texts: list[str]) -> None:
    chat = turns(*texts)
    text, whole = learned(name, chat, pieces=True)
    added = LAST_END.get(name, "")
    written = make_tokenizer(TEMPLATES[name]).apply_chat_template(chat.messages, tokenize=False)
    assert text == "".join(reply + STOPS[name] for reply in texts[1::2]) + added
    assert whole == (written.rstrip("\n") if added else written) + added


def test_tiny_model_template_has_equal_labels(tmp_path: Any) -> None:
    from rlrun.trainer.modeling.tiny_model import encode_demonstration
    from rlrun.trainer.modeling.tiny_model import make_tokenizer as tiny

    tokenizer = tiny()
    chat = turns("<abcd>", "dcba", "more", "of it")
    made = ChatEncoder(tokenizer).encode(chat)
    ids, labels = encode_demonstration(tokenizer, chat.messages)
    assert made.input_ids.tolist() == ids
    assert (made.weights > 0).tolist() == [label != -100 for label in labels]


def test_template_dropping_earlier_thoughts_is_learned_as_written() -> None:
    chat = turns("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
    assert learned("thinking", chat) == "a1<|im_end|><think>\nt2\n</think>\n\na2<|im_end|>"
    # The model has to write the empty thought of the last turn too.
    assert learned("thinking", turns("q", "a")) == "<think>\n\n</think>\n\na<|im_end|>"


def test_tool_calls_are_learned_without_results() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
            },
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "It is 4"},
        ]
    }
    chat = read_conversation(row, DataConfig.model_validate({"sources": [{"path": "x"}]}))
    text = learned("thinking", chat)
    assert text == (
        '<think>\n\n</think>\n\n<tool_call>add {"a": 2}</tool_call><|im_end|><think>\n\n</think>\n\nIt is 4<|im_end|>'
    )


def test_other_learned_roles_include_their_text() -> None:
    assert learned("llama3", turns("q1", "a1", "q2", "a2", roles=("user",))) == "q1<|eot_id|>q2<|eot_id|>"
    assert learned("plain", turns("q1", "a1", roles=("user", "assistant"))) == "q1a1</s>"


def test_replies_without_end_token_are_refused() -> None:
    """The model would learn to continue a reply without end."""
    with pytest.raises(TemplateError, match="no learned reply ends with an end-of-turn token"):
        encoder("plain").encode(turns("q1", "a1", "q2"))


def test_message_weight_scales_its_tokens() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "no", "weight": 0},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "half", "weight": 0.5},
        ]
    }
    made = encoder("chatml").encode(read_conversation(row, DataConfig.model_validate({"sources": [{"path": "x"}]})))
    assert set(made.weights.tolist()) == {0.0, 0.5}
    assert make_tokenizer(TEMPLATES["chatml"]).decode(made.input_ids[made.weights > 0]) == "half<|im_end|>"


def test_completion_is_learned_without_its_prompt() -> None:
    data = DataConfig.model_validate({"sources": [{"path": "x"}], "promptField": "q", "completionField": "a"})
    assert learned("chatml", read_conversation({"q": "ask", "a": "answer"}, data)) == "answer<|im_end|>"
    before = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "v"},
    ]
    row = {"q": before, "a": [{"role": "assistant", "content": "new"}]}
    assert learned("chatml", read_conversation(row, data)) == "new<|im_end|>"


def test_first_token_is_never_learned() -> None:
    chat = Conversation([{"role": "assistant", "content": "hi"}], [1.0])
    made = ChatEncoder(make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")).encode(chat)
    assert made.weights.tolist() == [0.0] + [1.0] * (len(made) - 1)


@pytest.mark.parametrize(
    ("template", "texts", "problem"),
    [
        ("{{ messages[0].content }}", ("q", "a"), "drops an assistant message"),
        (
            "{% for m in messages %}{{ m.content }}</s>{{ messages | length }}{% endfor %}",
            ("q", "a"),
            "renders the text before message 2 differently",
        ),
        (TEMPLATES["chatml"].replace("m.content", "m.content | upper"), ("q", "a"), "drops an assistant message"),
        (TEMPLATES["chatml"].replace("m.content", "m.content | replace('a', '')"), ("q", "banana"), "message 2"),
        ("{{ raise_exception('no') }}", ("q", "a"), "refuses the conversation: no"),
        (TEMPLATES["chatml"], ("q", "a<|im_end|>"), "message 2 contains <|im_end|>"),
    ],
)
def test_incompatible_sft_template_is_refused(template: str, texts: tuple[str, ...], problem: str) -> None:
    with pytest.raises(TemplateError, match=problem.replace("|", r"\|")):
        ChatEncoder(make_tokenizer(template)).encode(turns(*texts))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "x"}, "neither messages nor prompt and completion \\(columns: text"),
        ({"prompt": "x"}, "completion is missing"),
        ({"messages": []}, "messages is \\[\\]; it must be a list of messages"),
        ({"messages": ["x"]}, "messages\\[0\\] is 'x'; it must be a message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages\\[0\\].role is 'robot'; it must be one of"),
        ({"messages": [{"role": "user"}]}, "messages\\[0\\].content is None; it must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": -1}]}, "message 1: weight is -1"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "tool_calls\\[0\\].function.arguments is not valid JSON",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "["}, "tools is not valid JSON"),
    ],
)
def test_invalid_chat_row_is_named_with_its_field(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_conversation(row, DataConfig.model_validate({"sources": [{"path": "x"}]}))
