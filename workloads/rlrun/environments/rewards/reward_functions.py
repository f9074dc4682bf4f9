"""Declaration of rewards, and functions of the user as rewards.

A declaration is one name, or several with weights. Each one is a built-in reward or a function of the user.

A plain function is called in the main thread of a process that can be killed, so it may block, compute without end or set signal handlers.
An `async def` is awaited in the environment's event loop, together with the episodes.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rlrun.config.algorithm.names import is_import_path
from rlrun.config.suggest import did_you_mean, unknown_name
from rlrun.custom import imported
from rlrun.environments.bounds import MAX_METRIC, MAX_REWARD, BoundsError, bounded_number, describe_exception
from rlrun.environments.protocol import Score, UnplayableTaskError
from rlrun.environments.rewards.bounded import BoundedCalls
from rlrun.environments.rewards.scorers import BUILT_IN


class RewardEntry(BaseModel):
    """One reward of an environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """A built-in reward, or `package.module:function`."""
    weight: float = Field(default=1.0, allow_inf_nan=False, ge=-1e6, le=1e6)
    """Factor of the reward in the sum. A reward with weight 0 is only reported."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of a built-in reward, or additional arguments of a function."""
    processes: int = Field(default=2, ge=1, le=256)
    """Processes that call a plain function at the same time. An `async def` runs in the environment's event loop."""
    timeout_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Deadline of one call of a function."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in BUILT_IN and not is_import_path(name):
            raise ValueError(unknown_name("reward", name, BUILT_IN) + ", or an import path package.module:function")
        return name

    @model_validator(mode="after")
    def _check_function_fields(self) -> Self:
        for field in ("processes", "timeout_seconds"):
            if field in self.model_fields_set and not is_import_path(self.name):
                raise ValueError(
                    f"{field} applies only to functions; options of the built-in reward {self.name} belong in args"
                )
        return self

    @property
    def label(self) -> str:
        """Name of the reward in metrics."""
        return self.name.rpartition(":")[2]


def _list_entries(value: object) -> object:
    """Return one reward or a list of rewards as a list of entries."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ValueError("the list is empty; name at least one reward")
    return [{"name": item} if isinstance(item, str) else item for item in items]


RewardEntries = Annotated[list[RewardEntry], BeforeValidator(_list_entries)]
"""A name, an entry, or a list of names and entries."""

ANY_SOURCE = "*"
"""Key of the rewards for all values of `data_source` without rewards of their own."""


def describe_sources(entries: Mapping[str, object]) -> str:
    """Return a list of source names for messages."""
    return ", ".join(repr(source) for source in entries) or "none"


KIND = "reward"
COMPLETIONS = "completions"
_REPLY = ("completion", "solution_str")
"""Names of the parameter for the reply; the second is the name in verl."""
_COLUMNS = ("data_source", "ability", "extra_info", "uid")
ARGUMENTS = (*_REPLY, COMPLETIONS, "row", "prompt", "ground_truth", *_COLUMNS)
"""Parameters that a function may have in addition to its own options."""
_REQUIRED_NOWHERE: Mapping[str, Callable[[], Any]] = {"extra_info": dict}
"""Default values of columns for rows without them, even if the function has no default, as in verl."""


class RewardFunctionError(RuntimeError):
    """Error for a user's function that raised or did not return a reward."""


@dataclass(frozen=True)
class Signature:
    """Parameters of a function that are filled from a row and a reply."""

    takes: frozenset[str]
    required: frozenset[str]
    """Parameters without a default."""

    @property
    def group(self) -> bool:
        """Whether the function gets all completions of a group at once."""
        return COMPLETIONS in self.takes


def signature_of(path: str, function: Callable[..., Any], options: Mapping[str, object]) -> Signature:
    """Check a function's parameters against the available arguments.

    Args:
        path: import path of the function, for messages.
        function: function of the user.
        options: arguments from the configuration.

    Raises:
        ValueError: the function has no parameter for the reply, an option has no parameter, or a parameter has no value. The message
            contains the parameter and the fix.
    """
    where = f"reward {path}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: its parameters cannot be read ({error}); wrap it in a Python function") from None
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if bad := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise ValueError(
            f"{where}: {bad[0]} is a positional-only parameter, but arguments are passed by name; remove the '/'"
        )
    _refuse_options(where, options, named, takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters))
    replies = [name for name in (*_REPLY, COMPLETIONS) if name in named]
    if len(replies) != 1:
        got = ", ".join(named) or "none"
        raise ValueError(
            f"{where}: its parameters are ({got}); exactly one must be the parameter for the reply: completion (or solution_str, as in "
            "verl), or completions for all replies of a group"
        )
    for name, required in named.items():
        if required and name not in ARGUMENTS and name not in options:
            raise ValueError(
                f"{where}: the parameter {name!r} has no value{did_you_mean(name, ARGUMENTS)}; set it in args, or use one of "
                f"{', '.join(ARGUMENTS)}"
            )
    takes = frozenset(name for name in named if name in ARGUMENTS)
    return Signature(takes, frozenset(name for name in takes if named[name]))


def _refuse_options(where: str, options: Mapping[str, object], named: Mapping[str, bool], *, takes_any: bool) -> None:
    """Raise ValueError for options without a parameter, and for options with the name of a value from the row or the reply."""
    for option in options:
        if option in ARGUMENTS:
            raise ValueError(
                f"{where}: args has {option!r}, which is filled from the row or the reply; remove it from args"
            )
        if option not in named and not takes_any:
            own = [name for name in named if name not in ARGUMENTS]
            raise ValueError(f"{where}: no parameter {option!r}{did_you_mean(option, own)}; remove it from args")


class RewardFunction:
    """A user's function as a reward.

    Args:
        entry: declaration of the reward.

    Raises:
        ValueError: the function cannot be imported, or its parameters do not fit. The message contains the reason.
    """

    def __init__(self, entry: RewardEntry) -> None:
        self._entry = entry
        self._function = imported(KIND, entry.name)
        self.signature = signature_of(entry.name, self._function, entry.args)
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004
        )
        self._calls = BoundedCalls(
            processes=entry.processes,
            timeout_seconds=entry.timeout_seconds,
            prepare=partial(imported, KIND, entry.name),
            name=f"reward {entry.name}",
        )

    def check(self, row: Mapping[str, object]) -> None:
        """Raise ValueError with the column's name if a row has no value for a required parameter."""
        self._column_arguments(row)

    async def score_reply(self, given: Mapping[str, object], row: Mapping[str, object], reply: str) -> Score:
        """Return the function's score of one reply.

        Args:
            given: `prompt` and `ground_truth`.
            row: row of the data set.
            reply: reply of the policy.

        Raises:
            RewardFunctionError: the function raised or did not return a reward.
        """
        name = next(name for name in _REPLY if name in self.signature.takes)
        scores = await self._call_function({name: reply}, given, row, None)
        return scores[0]

    async def score_group(
        self, given: Mapping[str, object], row: Mapping[str, object], replies: Sequence[str]
    ) -> list[Score]:
        """Return the function's scores of all replies of a group; see `score_reply`."""
        return await self._call_function({COMPLETIONS: list(replies)}, given, row, len(replies))

    async def _call_function(
        self,
        reply_arguments: Mapping[str, object],
        given: Mapping[str, object],
        row: Mapping[str, object],
        members: int | None,
    ) -> list[Score]:
        available = {**reply_arguments, **given, "row": dict(row)}
        arguments = {name: value for name, value in available.items() if name in self.signature.takes}
        arguments |= self._column_arguments(row) | self._entry.args
        if self._is_async:
            try:
                async with asyncio.timeout(self._entry.timeout_seconds):
                    return scores_of(await self._function(**arguments), members)
            except TimeoutError as error:
                seconds = f"{self._entry.timeout_seconds:g} seconds"
                raise RewardFunctionError(f"reward {self._entry.name} did not finish within {seconds}") from error
            except Exception as error:
                raise RewardFunctionError(f"reward {self._entry.name}: {_function_error(error)}") from error
        scores, problem, is_unplayable = await self._calls.call(call_here, self._entry.name, arguments, members)
        if problem is not None:
            refused = UnplayableTaskError(problem) if is_unplayable else None
            raise RewardFunctionError(f"reward {self._entry.name}: {problem}") from refused
        return [Score(reward, metrics) for reward, metrics in scores]

    def _column_arguments(self, row: Mapping[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name in _COLUMNS:
            if name not in self.signature.takes:
                continue
            if name in row:
                found[name] = row[name]
            elif name in self.signature.required:
                if name not in _REQUIRED_NOWHERE:
                    raise ValueError(
                        f"the column {name!r} is missing, which reward {self._entry.name} needs; add it, or give the parameter a default"
                    )
                found[name] = _REQUIRED_NOWHERE[name]()
        return found


Numbers = tuple[list[tuple[float, dict[str, float]]], str | None, bool]


def call_here(path: str, arguments: Mapping[str, object], members: int | None) -> Numbers:
    """Call a user's function in this process. Returns its scores, its error, and whether the error is an `UnplayableTaskError`."""
    try:
        value = imported(KIND, path)(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_await_result(value))
        return [(score.reward, score.metrics) for score in scores_of(value, members)], None, False
    except BaseException as error:
        return [], _function_error(error), issubclass(type(error), UnplayableTaskError)


async def _await_result(value: Awaitable[object]) -> object:
    return await value


def _function_error(error: BaseException) -> str:
    """Return the error of a user's function, with the line of the user's file that raised it."""
    if isinstance(error, BoundsError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) != Path(__file__)]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"raised {describe_exception(error)}{where}"


def scores_of(value: object, members: int | None) -> list[Score]:
    """Return the result of a function as scores within the limits of `bounds`.

    Args:
        value: number, or a dictionary with `score` and other numbers, which become metrics; for a group a list of these.
        members: number of replies of the group. None: a single reply.

    Raises:
        BoundsError: the value has another form, or a number is not finite.
    """
    if members is None:
        return [_read_score(value, "reward")]
    try:
        is_text = isinstance(value, str | bytes | Mapping)
        found = list(value) if isinstance(value, Iterable) and not is_text else []
    except TypeError:
        found = []
    if len(found) != members:
        raise BoundsError(
            f"it must return a list of {members} rewards, one for each completion, not {_show_value(value)}"
        )
    return [_read_score(item, f"reward of completion {i}") for i, item in enumerate(found)]


def _read_score(value: object, what: str) -> Score:
    if not isinstance(value, Mapping):
        return Score(bounded_number(value, what, MAX_REWARD))
    if "score" not in value:
        raise BoundsError(f"the returned dictionary has no 'score', only {', '.join(map(repr, value)) or 'nothing'}")
    metrics = {
        str(name): bounded_number(item, f"metric {name!r}", MAX_METRIC)
        for name, item in value.items()
        if name != "score" and not isinstance(item, str | bytes | list | tuple | Mapping | None)
    }
    return Score(bounded_number(value["score"], what, MAX_REWARD), metrics)


def _show_value(value: object) -> str:
    sized = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"{type(value).__name__}{sized}"
