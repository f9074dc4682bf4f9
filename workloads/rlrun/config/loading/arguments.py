"""The command line and the environment as assignments to fields.

@ a.toml @ b.yaml   --max-steps 5   --model.name=X   --environments.0.groupSize 4   --algorithm.loss '{"name": "ppo"}'
--orchestrator.record-rollouts / --no-orchestrator.record-rollouts      --evaluation (its defaults) / --no-evaluation (none)
RLRUN_MODEL__NAME=X   RLRUN_ENVIRONMENTS__0__GROUP_SIZE=4   PRIME_MAX_STEPS=5
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel

from rlrun.config.loading.files import FORMATS
from rlrun.config.loading.layers import Assignment, Layer, Origin, Reader
from rlrun.config.loading.option_names import (
    dotted_field,
    nearest_option,
    negated_field,
    resolve_option,
    shape_at,
    suggest_names,
    without_no,
)
from rlrun.config.loading.option_values import broken_json, has_value, parse_plain, parse_value, take_value, take_values
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT, Problem
from rlrun.config.loading.schema import Shape
from rlrun.config.loading.variables import PROCESS_VARIABLES
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import did_you_mean

OURS = "RLRUN_"
PREFIXES = ("PRIME_", OURS)
"""Prefixes of variables; the last one wins."""
_OF_SERVICES = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")
"""Ends of variables that Kubernetes makes of a Service, whose name may begin as ours do."""


@dataclass
class Arguments:
    """A parsed command line."""

    files: list[Path] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    help: bool = False
    dry_run: bool = False
    layer: Layer = field(default_factory=Layer)
    """Origins inside of JSON values, the problems, notices and hints."""
    unread: list[Problem] = field(default_factory=list)
    """Problems of words that most likely were to name files, without which nothing else can be judged."""
    others: OtherNames | None = None
    also: Collection[str] = ()
    """Options of the command itself, for the hint to a mistyped one."""


class Translated(Protocol):
    """Meaning of an option of another project in our names."""

    @property
    def assignments(self) -> list[Assignment]:
        """Values of our fields."""
        ...

    @property
    def layer(self) -> Layer:
        """Origins inside of values, problems, notices and hints."""
        ...


class OtherNames(Protocol):
    """Names of another project; see `rlrun.config.dialects`."""

    def knows(self, words: Sequence[str]) -> bool:
        """True if these dotted words are the other project's."""
        ...

    def option(self, words: Sequence[str], value: object, shown: str) -> Translated | None:
        """Meaning of the option; `shown` is how the user wrote its name."""
        ...

    def items(self, words: Sequence[str], value: object, shown: str) -> Translated | None:
        """Meaning of an option whose value is a list of the other project's tables; None: it is not."""
        ...


def parse_arguments(
    model: type[BaseModel],
    argv: Sequence[str],
    *,
    aliases: Mapping[str, str] | None = None,
    others: OtherNames | None = None,
    also: Collection[str] = (),
) -> Arguments:
    """Split a command line into files and assignments; what cannot be read is a problem in the result's `layer`.

    Args:
        model: what the options are fields of.
        argv: the command line without the program's name.
        aliases: other names of the model's own fields.
        others: another project's names, which are understood too.
        also: options of the command itself, for the hint to a mistyped one.
    """
    result = Arguments(others=others, also=also)
    reader = Reader(model, COMMAND_LINE, style="kebab", aliases=aliases or {})
    rest, before = list(argv), ""
    while rest:
        token = rest.pop(0)
        if token == "@":
            if not rest or rest[0].startswith("--"):
                result.unread.append(Problem(COMMAND_LINE, "@", "needs a file after it"))
                continue
            result.files.append(Path(rest.pop(0)))
        elif token.startswith("@"):
            result.unread.append(Problem(COMMAND_LINE, token, f'write "@ {token[1:]}" with a space'))
        elif token in ("-h", "--help"):
            result.help = True
        elif token == "--dry-run":
            result.dry_run = True
        elif token.startswith("--") and len(token) > 2:
            _parse_option(token, rest, reader, result)
            before = token.partition("=")[0]
        elif token.startswith("-") and len(token) > 2 and not token.startswith("--"):
            _one_dash(token, rest, reader, result, model)
        elif Path(token).suffix in FORMATS:
            result.unread.append(Problem(COMMAND_LINE, token, f'a file is given as "@ {token}"'))
        else:
            more = f"; {before} takes one value" if before and not token.startswith("-") else ""
            _refuse_option(
                result.layer, token, f'not an option; options begin with "--", a file is given as "@ FILE"{more}'
            )
    return result


def _one_dash(token: str, rest: list[str], reader: Reader, result: Arguments, model: type[BaseModel]) -> None:
    """Refuse an option with one dash, with its value."""
    close = nearest_option(f"-{token}", result.also, model) or suggest_names(reader, [token[1:]], 0, model)
    _refuse_option(result.layer, token, f'not an option; options begin with "--"{close if "mean" in close else ""}')
    if rest and not rest[0].startswith(("-", "@")):
        rest.pop(0)  # its value, not a second problem


def value_words(
    model: type[BaseModel],
    option: str,
    rest: Sequence[str],
    *,
    aliases: Mapping[str, str] | None = None,
    others: OtherNames | None = None,
) -> int:
    """Number of the words behind an option that are its value, as `parse_arguments` takes them.

    Args:
        model: what the options are fields of.
        option: with its dashes; one that has its value behind `=` takes none.
        rest: the words after it.
        aliases: as for `parse_arguments`, and so is `others`.
    """
    if "=" in option:
        return 0
    reader = Reader(model, COMMAND_LINE, style="kebab", aliases=aliases or {})
    result, left = Arguments(others=others), list(rest)
    _parse_option(option, left, reader, result)
    return len(rest) - len(left)


def parse_environment(model: type[BaseModel], env: Mapping[str, str], *, others: OtherNames | None = None) -> Arguments:
    """Variables that name a field.

    One of `PRIME_` without `__` that names none belongs to another program; an unknown one of ours is a notice.
    """
    result = Arguments(others=others)
    for prefix in PREFIXES:
        reader = Reader(model, ENVIRONMENT, style="snake", prefix=prefix)
        for name in sorted(env):
            words = name.removeprefix(prefix).lower().split("__")
            if not name.startswith(prefix) or name in PROCESS_VARIABLES:
                continue
            if others is not None and others.knows(words):
                _translate_option(result, reader, words, name, env[name])
                continue
            if len(words) == 1 and words[0] not in model.model_fields:
                if prefix == OURS and (told := _unknown_variable(model, name)) is not None:
                    result.layer.notices.append(told)
                continue
            found = resolve_option(reader, words)
            if isinstance(found, str):
                result.layer.problems.append(Problem(ENVIRONMENT, name, f"unknown field{found}"))
            else:
                key, shape = found
                _add_value(result, reader, key, shape, name, parse_value(env[name], shape))
    return result


def _parse_option(token: str, rest: list[str], reader: Reader, result: Arguments) -> None:
    name, equals, given = token[2:].partition("=")
    shown = f"--{name}"
    if result.others is not None and _of_others(result.others, name, given if equals else None, rest, reader, result):
        return
    found = resolve_option(reader, name.split("."))
    if isinstance(found, str):
        _not_a_field(name, found, rest, reader, result, alone=not equals)
        return
    key, shape = found
    follows = has_value(rest)
    text = given if equals else rest[0] if follows else ""
    if shape.kind == "model" and Path(text).suffix in FORMATS:
        result.unread.append(Problem(COMMAND_LINE, f"{shown} {text}", f'a file is given as "{shown} @ {text}"'))
        del rest[: not equals]
        return
    if shape.kind in ("model", "list", "mapping") and (broken := broken_json(text)):
        _refuse_option(result.layer, shown, f"got {text!r}, expected JSON: {broken}")
        del rest[: not equals]
    elif equals:
        _add_value(result, reader, key, shape, shown, parse_value(given, shape))
    elif follows or shape.kind in ("bool", "model"):
        _add_value(result, reader, key, shape, shown, take_value(rest, shape))
    else:
        _refuse_option(result.layer, shown, "needs a value")


def _not_a_field(name: str, why: str, rest: list[str], reader: Reader, result: Arguments, *, alone: bool) -> None:
    """Take an option that names no field: `--no-flag`, or a mistake, which takes its value with it.

    Args:
        name: the option without its dashes.
        why: end of the message that says why there is no such field.
        rest: the words after it.
        reader: the reader of the command line.
        result: where the assignment or the problem goes.
        alone: True if no `=` and value were written behind the name.
    """
    shown = f"--{name}"
    if alone and (negated := negated_field(name, reader)) is not None:
        key, shape = negated
        _add_value(result, reader, key, shape, shown, False if shape.kind == "bool" else None)
        return
    dotted = dotted_field(reader, name) if "." not in name else ""
    hint = f" (did you mean --{dotted}?)" if dotted else nearest_option(shown, result.also, reader.model) or why
    _refuse_option(result.layer, shown, f"unknown option{hint}")
    if alone and rest and not rest[0].startswith(("-", "@")):
        rest.pop(0)  # its value, not a second problem


def _of_others(
    others: OtherNames, name: str, given: str | None, rest: list[str], reader: Reader, result: Arguments
) -> bool:
    """Take an option in another project's names; False if it is none."""
    positive = without_no(name)
    if others.knows(words := name.split(".")):
        several = [] if given is not None else take_values(rest)
        text = several[0] if several else given
        value = [parse_plain(one) for one in several] if len(several) > 1 else None
        _translate_option(result, reader, words, f"--{name}", text, value)
    elif positive is not None and given is None and others.knows(words := positive.split(".")):
        _translate_option(result, reader, words, f"--{name}", False)
    elif (text := given if given is not None else rest[0] if rest else "").startswith("["):
        translated = others.items(name.split("."), parse_plain(text), f"--{name}")
        if translated is None:
            return False
        _take_translated(result, translated)
        del rest[: given is None]
    else:
        return False
    return True


def _take_translated(result: Arguments, translated: Translated) -> None:
    result.assignments += translated.assignments
    result.layer.origins |= translated.layer.origins
    result.layer.problems += translated.layer.problems
    result.layer.notices += translated.layer.notices
    result.layer.hints |= translated.layer.hints


def _translate_option(
    result: Arguments,
    reader: Reader,
    words: Sequence[str],
    shown: str,
    text: str | Literal[False] | None,
    several: list[object] | None = None,
) -> None:
    """Take an option in another project's names.

    Args:
        result: where assignments and problems go.
        reader: the reader of the command line.
        words: the option's name.
        shown: the option as it was written.
        text: its value; None: it stands alone; False: with `no-` before its name.
        several: all values, where there is more than one.
    """
    written = "true" if text is None else "false" if text is False else text
    value = parse_plain(written) if several is None else several
    translated = None if result.others is None else result.others.option(words, value, shown)
    if translated is None:
        return
    for one in translated.assignments:
        shape = shape_at(reader.model, one.key)
        as_written = one.value is value and isinstance(value, int | float)
        if as_written and not isinstance(text, str) and shape.kind in ("str", "int", "float"):
            if text is None or not shape.nullable:
                _refuse_option(result.layer, shown, "needs a value")
            else:
                result.assignments.append(replace(one, value=None))
            continue
        result.assignments.append(replace(one, value=parse_value(written, shape) if as_written else one.value))
    result.layer.problems += translated.layer.problems
    result.layer.notices += translated.layer.notices
    result.layer.hints |= translated.layer.hints


def _unknown_variable(model: type[BaseModel], name: str) -> Problem | None:
    """The notice of a variable that begins as ours do and is none."""
    if name.endswith(_OF_SERVICES) or "_PORT_" in name:
        return None
    known = [*PROCESS_VARIABLES, *(f"{OURS}{field.upper()}" for field in model.model_fields)]
    hint = did_you_mean(name, known) or f"; a field is written as {OURS}MAX_STEPS or {OURS}MODEL__NAME"
    return Problem(ENVIRONMENT, name, f"is read by nothing{hint}")


def _add_value(result: Arguments, reader: Reader, key: Key, shape: Shape, shown: str, value: object) -> None:
    value = reader.value(value, shape, key, shown, (), result.layer)
    result.assignments.append(Assignment(key, value, Origin(reader.source, shown, None, reader.style)))


def _refuse_option(layer: Layer, path: str, message: str) -> None:
    layer.problems.append(Problem(COMMAND_LINE, path, message))
