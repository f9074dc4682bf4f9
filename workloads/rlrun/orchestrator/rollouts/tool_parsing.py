"""Parts of a reply: its text, the calls in it, and the thoughts before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlrun.environments.protocol import Tool
from rlrun.environments.tool_calls import parse_tool_calls


@dataclass(frozen=True)
class Said:
    """A reply taken apart.

    Attributes:
        content: the text without calls and thoughts; None: the whole text.
        calls: (name, arguments as JSON) in order.
        reasoning: the thoughts; None: there are none.
        text: the reply as people read it, where it is another text than its tokens without special ones; None: it is not.
    """

    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None
    text: str | None = None

    def messages_calls(self, before: int) -> list[dict[str, object]]:
        """Return the calls as OpenAI's messages have them; `before` of the conversation's calls have ids already.

        An id has nine letters and digits for every family: Mistral's templates refuse others.
        """
        return [
            {"id": f"call{before + index:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(self.calls)
        ]


class ParseReply(Protocol):
    """Takes a reply apart.

    Args:
        token_ids: the reply, without the token that ended it.
        text: the reply without special tokens.
        tools: functions that were offered; none for a parser that takes every reply apart.
    """

    async def __call__(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> Said: ...


async def parse_text(token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> Said:
    """Calls in the form of `environments.tool_calls`."""
    content, calls = parse_tool_calls(text)
    return Said(content, tuple((name, json.dumps(arguments)) for name, arguments in calls)) if calls else Said()
