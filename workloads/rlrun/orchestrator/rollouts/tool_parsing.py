"""Parts of a reply: its text, its calls, and the thoughts before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlrun.environments.protocol import Tool
from rlrun.environments.tool_calls import parse_tool_calls


@dataclass(frozen=True)
class ReplyParts:
    """Parsed reply.

    Attributes:
        content: text without calls and thoughts. None: the complete text.
        calls: (name, arguments as JSON) in order.
        reasoning: thoughts, or None.
        text: text for people, if it differs from the tokens without special ones, otherwise None.
    """

    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None
    text: str | None = None

    def calls_as_messages(self, before: int) -> list[dict[str, object]]:
        """Return the calls as in OpenAI messages. `before` is the number of earlier calls in the conversation.

        All ids have nine letters and digits, because Mistral's templates refuse others.
        """
        return [
            {"id": f"call{before + index:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(self.calls)
        ]


class ParseReply(Protocol):
    """Parser of replies.

    Args:
        token_ids: reply without the token that ended it.
        text: reply without special tokens.
        tools: offered functions; empty for a parser of every reply.
    """

    async def __call__(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts: ...


async def parse_text(token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
    """Parse calls in the text form of `environments.tool_calls`."""
    content, calls = parse_tool_calls(text)
    return (
        ReplyParts(content, tuple((name, json.dumps(arguments)) for name, arguments in calls))
        if calls
        else ReplyParts()
    )
