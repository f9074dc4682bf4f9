"""Bounds on what one episode may bring, held in the environment's own process, where only that episode pays.

Everything here works on exact built-in types: whatever an object of the environment overrides (`__repr__`, `__iter__`, `__float__`,
`items`) is not called, or its failure is reported as one of the environment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from rlrun.environments.protocol import Episode, Message, Score
from rlrun.runtime.printable import printable

MAX_REWARD = 1e9
"""Largest absolute reward: in float32, in which advantages are trained on, squares and sums over a batch stay finite."""
MAX_METRIC = 3.4028234663852886e38
"""Largest absolute metric: the largest float32; sums over a batch stay finite in float64."""
MAX_METRICS = 256
MAX_NAME_CHARACTERS = 200
"""Characters of a task's id and of a metric's name."""
MAX_TEXT_CHARACTERS = 16 * 1024 * 1024
"""Characters of all texts together, in one request to the model and in one episode."""
MAX_VALUES = 1_000_000
"""JSON values in one request and in one episode."""
MAX_DEPTH = 64
"""Nesting of JSON values."""
MAX_MESSAGES = 10_000
"""Messages in one request and in one episode."""
MAX_REQUESTS = 10_000
"""Requests to the model in one episode."""
MAX_ERROR_CHARACTERS = 2_000
"""Characters of one error's text."""
_MAX_INTEGER_BITS = 1024


class BoundsError(ValueError):
    """Error for a value of an episode that is above a bound or no JSON; names the place, the value and the bound."""


def clip_text(text: str, limit: int = MAX_ERROR_CHARACTERS) -> str:
    """A text that any file can hold and any terminal show (see `printable`), its middle left out where it is longer than `limit`."""
    plain = str.__str__(text)
    if len(plain) > limit:
        head = limit * 3 // 4
        plain = f"{plain[:head]} ... {plain[len(plain) - (limit - head) :]}"
    return printable(plain, lines=True)


def describe_exception(error: BaseException) -> str:
    """An exception in words, whatever its class does when it is looked at; the leaves of a group one by one. Never raises."""
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
    except BaseException as failure:  # its __str__ is the environment's code as well
        return f"(its text cannot be read: {type.__getattribute__(type(failure), '__name__')})"


_id = attrgetter("id")


def name_of(owner: object) -> str:
    """`owner.id` as printable text, for any value."""
    try:
        return clip_text(str(_id(owner)), MAX_NAME_CHARACTERS)
    except BaseException as error:
        return f"(its id cannot be read: {describe_exception(error)})"


# ---- JSON


class _Left:
    """Remainder of the bounds."""

    def __init__(self) -> None:
        self.values, self.characters = MAX_VALUES, MAX_TEXT_CHARACTERS


class _FaultError(Exception):
    """A value that is refused.

    Attributes:
        path: keys and indices that lead to it, innermost first.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path: list[str] = []


def plain_json(value: object, where: str) -> object:
    """A copy of a JSON value in plain dicts, lists, texts and numbers; tuples become lists.

    Raises:
        BoundsError: it is none, or above a bound.
    """
    try:
        return _plain_value(value, _Left(), 0)
    except _FaultError as fault:
        raise BoundsError(f"{where}{''.join(reversed(fault.path))} {fault}") from None


def _plain_value(value: object, left: _Left, depth: int) -> object:
    left.values -= 1
    if left.values < 0:
        raise _FaultError(f"holds more than {MAX_VALUES} values; bring fewer")
    kind = type(value)
    if issubclass(kind, str):
        return _plain_text(str.__str__(value), left)
    if value is None or kind is bool:
        return value
    if issubclass(kind, int):
        return _plain_integer(int.__index__(value))  # type: ignore[arg-type]
    if issubclass(kind, float):
        number = float.__float__(value)  # type: ignore[arg-type]
        if not math.isfinite(number):
            raise _FaultError(f"is {number}, which is not JSON; bring a finite number or None")
        return number
    if depth >= MAX_DEPTH:
        raise _FaultError(f"is nested deeper than {MAX_DEPTH} levels, or holds itself; bring less")
    if issubclass(kind, dict):
        return _plain_dict(value, left, depth)  # type: ignore[arg-type]
    if issubclass(kind, list):
        return _plain_items(list.__iter__(value), left, depth)  # type: ignore[arg-type]
    if issubclass(kind, tuple):
        return _plain_items(tuple.__iter__(value), left, depth)  # type: ignore[arg-type]
    name = clip_text(type.__getattribute__(kind, "__name__"), MAX_NAME_CHARACTERS)
    raise _FaultError(f"is of type {name}, which is not JSON; bring texts, numbers, lists and dictionaries")


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
    if kind is int:
        return str(_plain_integer(int.__index__(key)))  # type: ignore[arg-type]
    name = clip_text(type.__getattribute__(kind, "__name__"), MAX_NAME_CHARACTERS)
    raise _FaultError(f"has a key of type {name}, which is not JSON; keys are texts")


def _plain_text(text: str, left: _Left) -> str:
    left.characters -= len(text)
    if left.characters < 0:
        raise _FaultError(f"and what comes before it have more than {MAX_TEXT_CHARACTERS} characters; bring less")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _FaultError(f"holds a lone surrogate at character {error.start}; replace it") from None
    return text


def _plain_integer(number: int) -> int:
    if number.bit_length() > _MAX_INTEGER_BITS:
        raise _FaultError(
            f"is an integer of {number.bit_length()} bits (at most {_MAX_INTEGER_BITS}); bring it as a text"
        )
    return number


# ---- episodes and scores


def plain_episode(episode: Episode) -> Episode:
    """An episode within the bounds, in plain types.

    Raises:
        BoundsError: names what is not.
    """
    if not issubclass(type(episode.messages), list | tuple):
        raise BoundsError("messages must be a list of dictionaries")
    replies = episode.replies
    if type(replies) is not int or replies < 1:
        raise BoundsError(f"replies must be a whole number of at least 1, not {_show_value(replies)}")
    return Episode(plain_messages(episode.messages), replies, plain_dict(episode.info, "info"))


def plain_messages(messages: object) -> list[Message]:
    """A conversation within the bounds, in plain types.

    Raises:
        BoundsError: names what is not.
    """
    if not issubclass(type(messages), list | tuple):
        raise BoundsError(f"messages must be a list of dictionaries, not {_show_value(messages)}")
    count = list.__len__(messages) if isinstance(messages, list) else tuple.__len__(messages)  # type: ignore[arg-type]
    if count > MAX_MESSAGES:
        raise BoundsError(f"messages has {count} entries (at most {MAX_MESSAGES}); bring fewer")
    found = plain_json(messages, "messages")
    assert isinstance(found, list)
    for index, message in enumerate(found):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BoundsError(f"messages[{index}] must be a dictionary with a role, not {_show_value(message)}")
    return found


def plain_dict(value: object, where: str) -> dict[str, object]:
    """A dictionary of JSON values within the bounds.

    Raises:
        BoundsError: names what is not.
    """
    if not issubclass(type(value), dict):
        raise BoundsError(f"{where} must be a dictionary, not {_show_value(value)}")
    found = plain_json(value, where)
    assert isinstance(found, dict)
    return found


def plain_score(score: Score) -> Score:
    """A score whose numbers are floats that training and metrics can hold.

    Raises:
        BoundsError: names the number that is not.
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
            raise BoundsError(f"there are more than {MAX_METRICS} metrics; bring fewer")
        found[str.__str__(name)] = bounded_number(metrics[name], f"metric {clip_text(name)!r}", MAX_METRIC)
    return Score(bounded_number(reward, "reward", MAX_REWARD), found)


def bounded_number(value: object, what: str, limit: float) -> float:
    """A finite number of at most `limit`, in either direction, as a float.

    Raises:
        BoundsError: it is none.
    """
    found = math.nan
    if not isinstance(value, str | bytes | bytearray | None):
        try:
            found = float.__float__(float(value))  # type: ignore[arg-type]
        except OverflowError:
            found = math.inf  # an integer beyond float64
        except (TypeError, ValueError):
            pass  # no number, or more than one
    if math.isnan(found) or (math.isinf(found) and not issubclass(type(value), int)):
        raise BoundsError(f"the {what} must be a finite number, not {_show_value(value)}")
    if abs(found) > limit:
        raise BoundsError(
            f"the {what} must be between {-limit:g} and {limit:g}, not {_show_value(value)}; scale it down"
        )
    return found


def _show_value(value: object) -> str:
    """A value in words; of one whose text is the environment's own, its type."""
    kind = type(value)
    if value is None or kind in (float, bool) or (kind is int and int.bit_length(value) <= 128):  # type: ignore[arg-type]
        return repr(value)
    if kind is str:
        return repr(clip_text(str.__getitem__(value, slice(0, 80))))  # type: ignore[index]
    return clip_text(type.__getattribute__(kind, "__name__"), MAX_NAME_CHARACTERS)
