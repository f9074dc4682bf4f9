"""Contents of chat messages, read in the same way for all rows and requests.

A content is a text, or a list of parts as in OpenAI's API, Hugging Face data sets and verl's rows. Chat templates of text models and
judges get a text: some templates would write the Python representation of a list into the prompt, and others would drop the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun.runtime.printable import escape_controls

_TEXT_TYPES = (None, "text", "input_text", "output_text")
"""Types of parts that consist only of the field `text`; the last two are types of OpenAI's Responses API."""
MEDIA = (
    *("image", "images", "image_url", "video", "videos", "video_url"),
    *("audio", "audios", "audio_url", "input_audio", "file"),
)
"""Names of columns, and of fields of messages and parts, with content that a text model cannot read."""
AGENT_COLUMNS = ("tools", "agent_name", "need_tools_kwargs", "tools_kwargs", "interaction_kwargs")
"""Columns, and fields of `extra_info`, with which other trainers select an agent loop or offer tools."""
_SHOWN_CHARACTERS = 60


class ContentError(ValueError):
    """Error for a message whose content is not text. The message of the error contains the field, the value and the fix."""


def content_text(content: object, where: str = "content") -> str:
    """Return the text of a message's content. The texts of several parts are joined without a separator, as chat templates do it.

    Args:
        content: text, list of parts, one part, or None for an empty content.
        where: name of the content in errors, such as `messages[0].content`.

    Raises:
        ContentError: a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return _part_text(content, where)
    if not isinstance(content, list | tuple):
        raise ContentError(f"{where} is {_show_value(content)}; it must be a text or a list of parts of type text")
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ContentError(f"{where} is {_show_value(part)}; it must be a part of type text")
    kind = part.get("type")
    media = media_columns(part)
    if kind not in _TEXT_TYPES or media:
        named = _show_value(kind if kind not in _TEXT_TYPES else media[0])
        raise ContentError(f"{where} has content of type {named}; only parts of type text are read: remove the part")
    text = part.get("text")
    if not isinstance(text, str):
        raise ContentError(f"{where}.text is {_show_value(text)}; it must be a text")
    return text


def refuse_media(fields: Mapping[str, object], what: str) -> None:
    """Reject a row or message that contains images, videos, sound or files in addition to its text.

    Args:
        fields: columns of the row, or fields of the message.
        what: name for one of the fields in errors: `column` or `field`.

    Raises:
        ContentError: contains the name of the first such field.
    """
    for name in media_columns(fields):
        raise ContentError(
            f"the {what} {name!r} is not empty, and only text is read: remove the {what} if the prompt can be answered without it, "
            "otherwise remove the row"
        )


def unread_columns(row: Mapping[str, object]) -> list[str]:
    """Return the columns of a row that request tools or an agent, which environments of data rows do not offer."""
    extra = row.get("extra_info")
    inner = [name for name in AGENT_COLUMNS if isinstance(extra, Mapping) and not _is_empty(extra.get(name))]
    return [name for name in AGENT_COLUMNS if not _is_empty(row.get(name))] + [f"extra_info.{name}" for name in inner]


def media_columns(row: Mapping[str, object]) -> list[str]:
    """Return the columns of a row that contain images, videos, sound or files."""
    return [name for name in MEDIA if not _is_empty(row.get(name))]


def check_prompt(messages: Sequence[Mapping[str, object]]) -> None:
    """Reject a prompt that cannot be sent to a model.

    Args:
        messages: prompt, whose contents are texts or lists of parts.

    Raises:
        ContentError: no message has text except system messages, or a text is not Unicode.
    """
    texts = [content_text(message.get("content"), f"prompt[{i}].content") for i, message in enumerate(messages)]
    asked = [text for text, message in zip(texts, messages, strict=True) if message.get("role") != "system"]
    if not any(text.strip() for text in asked):
        raise ContentError("the prompt is empty; write a question into it, or remove the row")
    for index, text in enumerate(texts):
        refuse_surrogates(text, f"prompt[{index}].content")


def refuse_surrogates(text: str, where: str) -> None:
    """Reject a text that contains half of a surrogate pair: tokenizers and files accept only valid Unicode.

    Raises:
        ContentError: contains the character's position.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ContentError(
                f"{where} contains a lone surrogate at character {error.start}, which is not Unicode text; replace it with U+FFFD"
            ) from None


def _is_empty(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | bytes | Mapping | Sequence) and not value)


def _show_value(value: object) -> str:
    text = escape_controls(repr(value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
