"""Limits on the size and the values of one episode, checked in the environment's own process.

A value above a limit fails only its own episode. The functions work on exact built-in types: they do not call methods that an
environment's class overrides (`__repr__`, `__iter__`, `__float__`, `items`), or they report the failure as an error of the environment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from rlrun.environments.protocol import Episode, Message, Score
from rlrun.runtime.printable import escape_controls

MAX_REWARD = 1e9
"""Largest absolute reward. Advantages are float32 in training; up to this value their squares and sums over a batch stay finite."""
MAX_METRIC = 3.4028234663852886e38
"""Largest absolute metric: the largest float32; sums over a batch stay finite in float64."""
MAX_METRICS = 256
MAX_NAME_CHARACTERS = 200
"""Longest task id and longest name of a metric, in characters."""
MAX_TEXT_CHARACTERS = 16 * 1024 * 1024
"""Characters of all texts together, per request to the model and per episode."""
MAX_VALUES = 1_000_000
"""JSON values per request and per episode."""
MAX_DEPTH = 64
"""Deepest nesting of JSON values."""
MAX_MESSAGES = 10_000
"""Messages per request and per episode."""
MAX_REQUESTS = 10_000
"""Requests to the model per episode."""
MAX_ERROR_CHARACTERS = 2_000
"""Longest text of one error, in characters."""
_MAX_INTEGER_BITS = 1024


class BoundsError(ValueError):
    """Error for a value of an episode that is not JSON or exceeds a limit. The message contains the path, the value and the limit."""


def clip_text(text: str, limit: int = MAX_ERROR_CHARACTERS) -> str:
    """Return a text that every file and terminal can show (see `escape_controls`), cut in the middle if it exceeds `limit` characters."""
    plain = str.__str__(text)
    if len(plain) > limit:
        head = limit * 3 // 4
        plain = f"{plain[:head]} ... {plain[len(plain) - (limit - head) :]}"
    return escape_controls(plain, lines=True)


def describe_exception(error: BaseException) -> str:
    """Return a text that describes an exception, including up to four members of an exception group. Never raises."""
    try:
        return _exception_text(error)
    except BaseException:
        return "an exception that cannot be described"


def _exception_text(error: BaseException) -> str:
    name = clip_text(type.__getattribute__(type(error), "__name__"), MAX_NAME_CHARACTERS)
    if issubclass(type(error), SystemExit | KeyboardInterrupt):
        return f"{name}({_text_of(error)})"
    text = _text_of(error)
    if isinstance(error, BaseExceptionGroup):
        leaves = "; ".join(describe_exception(inner) for inner in error.exceptions[:4])
        return clip_text(f"{name}: {text}: {leaves}")
    return f"{name}: {text}" if text else name


def _text_of(error: BaseException) -> str:
    try:
        return clip_text(str(error))
    except BaseException as failure:  # `__str__` is code of the environment, too
        return f"(its text cannot be read: {type.__getattribute__(type(failure), '__name__')})"


_id = attrgetter("id")


def name_of(owner: object) -> str:
    """Return `owner.id` as printable text, for any object."""
    try:
        return clip_text(str(_id(owner)), MAX_NAME_CHARACTERS)
    except BaseException as error:
        return f"(its id cannot be read: {describe_exception(error)})"


# ---- JSON


class _Left:
    """Values and characters that may still be used."""

    def __init__(self) -> None:
        self.values, self.characters = MAX_VALUES, MAX_TEXT_CHARACTERS


class _FaultError(Exception):
    """A rejected value.

    Attributes:
        path: keys and indices that lead to the value, innermost first.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path: list[str] = []


def plain_json(value: object, where: str) -> object:
    """Return a copy of a JSON value that consists of plain dicts, lists, texts and numbers. Tuples become lists.

    Raises:
        BoundsError: the value is not JSON or exceeds a limit.
    """
    try:
        return _plain_value(value, _Left(), 0)
    except _FaultError as fault:
        raise BoundsError(f"{where}{''.join(reversed(fault.path))} {fault}") from None


def _plain_value(value: object, left: _Left, depth: int) -> object:
    left.values -= 1
    if left.values < 0:
        raise _FaultError(f"holds more than {MAX_VALUES} values; return fewer")
    # `issubclass` of the type decides: an environment can replace `__class__`, which `isinstance` reads. `isinstance` is for mypy.
    kind = type(value)
    if issubclass(kind, str):
        return _plain_text(str.__str__(value), left)
    if value is None or kind is bool:
        return value
    if issubclass(kind, int) and isinstance(value, int):
        return _plain_integer(int.__index__(value))
    if issubclass(kind, float) and isinstance(value, float):
        number = float.__float__(value)
        if not math.isfinite(number):
            raise _FaultError(f"is {number}, which is not JSON; use a finite number or None")
        return number
    if depth >= MAX_DEPTH:
        raise _FaultError(f"is nested deeper than {MAX_DEPTH} levels, or contains itself; use fewer levels")
    if issubclass(kind, dict) and isinstance(value, dict):
        return _plain_dict(value, left, depth)
    if issubclass(kind, list) and isinstance(value, list):
        return _plain_items(list.__iter__(value), left, depth)
    if issubclass(kind, tuple) and isinstance(value, tuple):
        return _plain_items(tuple.__iter__(value), left, depth)
    name = clip_text(type.__getattribute__(kind, "__name__"), MAX_NAME_CHARACTERS)
    raise _FaultError(f"is of type {name}, which is not JSON; use texts, numbers, lists and dictionaries")


def _plain_items(items: Iterable[object], left: _Left, depth: int) -> list[object]:
    found: list[object] = []
    for item in items:
        try:
            found.append(_plain_value(item, left, depth + 1))
        except _FaultError as fault:
            fault.path.append(f"[{len(found)}]")
            raise
    return found


def _plain_dict(value: dict[object, object], left: _Left, depth: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, item in dict.items(value):
        name = _plain_key(key, left)
        try:
            found[name] = _plain_value(item, left, depth + 1)
        except _FaultError as fault:
            fault.path.append(f"[{clip_text(name, 80)!r}]")
            raise
    return found


def _plain_key(key: object, left: _Left) -> str:
    kind = type(key)
    if issubclass(kind, str):
        return _plain_text(str.__str__(key), left)
    if type(key) is int:
        return str(_plain_integer(int.__index__(key)))
    name = clip_text(type.__getattribute__(kind, "__name__"), MAX_NAME_CHARACTERS)
    raise _FaultError(f"has a key of type {name}, which is not JSON; keys are texts")


def _plain_text(text: str, left: _Left) -> str:
    left.characters -= len(text)
    if left.characters < 0:
        raise _FaultError(f"and the values before it have more than {MAX_TEXT_CHARACTERS} characters; return less text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _FaultError(f"holds a lone surrogate at character {error.start}; replace it") from None
    return text


def _plain_integer(number: int) -> int:
    if number.bit_length() > _MAX_INTEGER_BITS:
        raise _FaultError(
            f"is an integer of {number.bit_length()} bits (at most {_MAX_INTEGER_BITS}); return it as a text"
        )
    return number


# ---- episodes and scores


def plain_episode(episode: Episode) -> Episode:
    """Return a copy of an episode in plain types.

    Raises:
        BoundsError: a value is not JSON or exceeds a limit.
    """
    if not issubclass(type(episode.messages), list | tuple):
        raise BoundsError("messages must be a list of dictionaries")
    replies = episode.replies
    if type(replies) is not int or replies < 1:
        raise BoundsError(f"replies must be a whole number of at least 1, not {_show_value(replies)}")
    return Episode(plain_messages(episode.messages), replies, plain_dict(episode.info, "info"))


def plain_messages(messages: object) -> list[Message]:
    """Return a copy of a conversation in plain types.

    Raises:
        BoundsError: a value is not JSON or exceeds a limit, or a message has no role.
    """
    if issubclass(type(messages), list) and isinstance(messages, list):
        count = list.__len__(messages)
    elif issubclass(type(messages), tuple) and isinstance(messages, tuple):
        count = tuple.__len__(messages)
    else:
        raise BoundsError(f"messages must be a list of dictionaries, not {_show_value(messages)}")
    if count > MAX_MESSAGES:
        raise BoundsError(f"messages has {count} entries (at most {MAX_MESSAGES}); return fewer")
    found = plain_json(messages, "messages")
    assert isinstance(found, list)
    for index, message in enumerate(found):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BoundsError(f"messages[{index}] must be a dictionary with a role, not {_show_value(message)}")
    return found


def plain_dict(value: object, where: str) -> dict[str, object]:
    """Return a copy of a dictionary of JSON values.

    Raises:
        BoundsError: the value is not a dictionary, or a part of it is not JSON or exceeds a limit.
    """
    if not issubclass(type(value), dict):
        raise BoundsError(f"{where} must be a dictionary, not {_show_value(value)}")
    found = plain_json(value, where)
    assert isinstance(found, dict)
    return found


def plain_score(score: Score) -> Score:
    """Return a copy of a score whose numbers are finite floats.

    Raises:
        BoundsError: a number is not finite or exceeds its limit, or a metric's name is unusable.
    """
    reward, metrics = score.reward, score.metrics
    if not isinstance(metrics, Mapping):
        raise BoundsError(f"metrics must be a dictionary of numbers, not {_show_value(metrics)}")
    found: dict[str, float] = {}
    for name in metrics:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS or clip_text(name) != name:
            raise BoundsError(
                f"a metric's name must be a text of at most {MAX_NAME_CHARACTERS} characters, not {_show_value(name)}"
            )
        if len(found) >= MAX_METRICS:
            raise BoundsError(f"there are more than {MAX_METRICS} metrics; return fewer")
        found[str.__str__(name)] = bounded_number(metrics[name], f"metric {clip_text(name)!r}", MAX_METRIC)
    return Score(bounded_number(reward, "reward", MAX_REWARD), found)


def bounded_number(value: object, what: str, limit: float) -> float:
    """Return a number as a finite float between `-limit` and `limit`.

    Raises:
        BoundsError: the value is not such a number.
    """
    found = math.nan
    if not isinstance(value, str | bytes | bytearray | None):
        try:
            found = float.__float__(float(value))  # type: ignore[arg-type]
        except OverflowError:
            found = math.inf  # an integer that float64 cannot hold
        except (TypeError, ValueError):
            pass  # not a number, or an array of several numbers
    if math.isnan(found) or (math.isinf(found) and not issubclass(type(value), int)):
        raise BoundsError(f"the {what} must be a finite number, not {_show_value(value)}")
    if abs(found) > limit:
        raise BoundsError(
            f"the {what} must be between {-limit:g} and {limit:g}, not {_show_value(value)}; scale it down"
        )
    return found


def _show_value(value: object) -> str:
    """A value as text. A value whose `__repr__` is code of the environment is shown by its type."""
    kind = type(value)
    if value is None or kind in (float, bool) or (type(value) is int and int.bit_length(value) <= 128):
        return repr(value)
    if type(value) is str:
        return repr(clip_text(str.__getitem__(value, slice(0, 80))))
    return clip_text(type.__getattribute__(kind, "__name__"), MAX_NAME_CHARACTERS)
