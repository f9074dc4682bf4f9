"""Channels of a reply in the Harmony format of GPT-OSS.

A reply consists of several messages:
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`. The channel `final` is for
users, `analysis` contains thoughts, and `commentary` contains calls (`to=functions.NAME` in the header) and the text
before them. Source: the Harmony response format, https://github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlrun.environments.protocol import Tool
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.tool_parsing import ReplyParts

_TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"})
_MESSAGE = re.compile(r"(.*?)<\|message\|>(.*?)(?=<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>|$)", re.DOTALL)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def speaks_harmony(chat: ChatTokens) -> bool:
    """Return whether the tokenizer has the format's special tokens."""
    return {*chat.template.special_tokens} >= _TOKENS


class HarmonyParser:
    """Parser of replies by channel.

    Args:
        chat: tokenizer of the policy.
    """

    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat

    async def __call__(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
        return parse_channels(self._chat.decode_all(token_ids))


def parse_channels(spelled: str) -> ReplyParts:
    """Parse a reply.

    Args:
        spelled: complete reply with special tokens.
    """
    final: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str]] = []
    for header, body in _MESSAGE.findall(spelled):
        if recipient := _RECIPIENT.search(header):
            calls.append((recipient[1], body.strip() or "{}"))
            continue
        channel = _CHANNEL.search(header)
        (final if channel is None or channel[1] == "final" else thoughts).append(body)
    if not (final or thoughts or calls):
        return ReplyParts()
    content = "".join(final)
    return ReplyParts(content, tuple(calls), reasoning="\n".join(thoughts) or None, text=content)
