"""Message content in parts: all readers of rows and requests return the same text and refuse the same parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlrun.config.models.data import DataConfig, SourceConfig
from rlrun.environments.adapters.openai_api import RequestError, read_request
from rlrun.environments.bundled.dataset import messages_of, with_instruction
from rlrun.environments.message_content import ContentError, check_prompt, content_text, unread_columns
from rlrun.environments.protocol import Episode, Task
from rlrun.environments.rewards.scorers import _prompt_text
from rlrun.orchestrator.rollouts.chat_template import ChatTemplate, TemplateError
from rlrun.orchestrator.sft.chat_rows import read_conversation

DATA = DataConfig(sources=(SourceConfig(path="rows.jsonl"),))


def read_row(content: object) -> str:
    (message,) = messages_of([{"role": "user", "content": content}])
    return str(message["content"])


def read_sft(content: object) -> str:
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}
    return str(read_conversation(row, DATA).messages[0]["content"])


def read_agent(content: object) -> str:
    return str(read_request({"messages": [{"role": "user", "content": content}]}).messages[0]["content"])


def read_policy(content: object) -> str:
    tokenizer: Any = SimpleNamespace(
        chat_template="{{ messages }}",
        apply_chat_template=lambda messages, **_: "".join(message["content"] for message in messages),
    )
    return ChatTemplate(tokenizer).write([{"role": "user", "content": content}])


def read_judge(content: object) -> str:
    return _prompt_text(Task("1", [{"role": "system", "content": "s"}, {"role": "user", "content": content}]))


def read_reply(content: object) -> str:
    return Episode([{"role": "assistant", "content": content}], 1).last_reply


READERS: list[Callable[[object], str]] = [
    content_text,
    read_row,
    read_sft,
    read_agent,
    read_policy,
    read_judge,
    read_reply,
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("What is 1+1?", "What is 1+1?"),
        ([{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}], "What is 1+1?"),
        ([{"type": "text", "text": "a", "image_url": None, "index": None}, "b"], "ab"),
        ([{"type": "input_text", "text": "a"}], "a"),
    ],
)
def test_parts_of_text_are_read_as_one_text(read: Callable[[object], str], content: object, text: str) -> None:
    assert read(content) == text


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "has content of type 'image_url'"),
        ({"type": "image", "text": "a cat"}, "has content of type 'image'"),
        ({"type": "text", "text": "a", "image": "a.png"}, "has content of type 'image'"),
        ({"type": "text"}, "text is None"),
        (3, "is 3; it must be a part of type text"),
    ],
)
def test_non_text_part_is_refused_with_its_position(read: Callable[[object], str], part: object, says: str) -> None:
    with pytest.raises((ContentError, RequestError, TemplateError)) as caught:
        read([{"type": "text", "text": "Look: "}, part])
    assert says in str(caught.value)
    assert "[1]" in str(caught.value)


def test_judge_gets_the_conversation_without_the_system_message() -> None:
    prompt: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "first"}]},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "user", "content": "second"},
    ]
    assert _prompt_text(Task("1", prompt)) == "first\n\n\n\nsecond"


def test_instruction_follows_the_text_of_parts() -> None:
    prompt = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert with_instruction(prompt, "b") == [{"role": "user", "content": "a\n\nb"}]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the prompt is empty"),
        ([{"role": "user", "content": " \n"}], "the prompt is empty"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}]}], "the prompt is empty"),
        ([{"role": "system", "content": "Be brief."}], "the prompt is empty"),
        ([{"role": "user", "content": "a\ud800b"}], r"prompt\[0\].content contains a lone surrogate at character 1"),
    ],
)
def test_prompt_without_user_content_is_refused(prompt: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ContentError, match=says):
        check_prompt(prompt)


def test_agent_columns_with_content_are_reported() -> None:
    row = {
        "prompt": "?",
        "tools": [],
        "agent_name": "tool_agent",
        "extra_info": {"need_tools_kwargs": True, "index": 1},
    }
    assert unread_columns(row) == ["agent_name", "extra_info.need_tools_kwargs"]
    assert unread_columns({"prompt": "?", "tools": None, "extra_info": {"need_tools_kwargs": False}}) == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"images": ["a.png"]}, "the column 'images' is not empty, and only text is read"),
        ({"messages": [{"role": "user", "content": "?", "images": ["a.png"]}]}, "'images' is not empty"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "lone surrogate"),
    ],
)
def test_fine_tuning_row_with_other_content_is_refused(row: dict[str, Any], says: str) -> None:
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]}
    with pytest.raises(ValueError, match=says):
        read_conversation(chat | row, DATA)


def test_message_content_is_read_by_one_module() -> None:
    """`str(message["content"])` would write the Python representation of parts."""
    source = Path(__file__).parents[3] / "workloads" / "rlrun"
    for path in source.rglob("*.py"):
        text = path.read_text()
        assert 'str(message["content"])' not in text, path
        assert "m.get('content')}" not in text, path
