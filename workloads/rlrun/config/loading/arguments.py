"""Command line and environment variables as assignments to fields.

@ a.toml @ b.yaml   --max-steps 5   --model.name=X   --environments.0.groupSize 4   --algorithm.loss '{"name": "ppo"}'
--orchestrator.record-rollouts / --no-orchestrator.record-rollouts      --evaluation (its defaults) / --no-evaluation (null)
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
from rlrun.config.loading.options import (
    PROCESS_VARIABLES,
    broken_json,
    dotted_field,
    has_value,
    nearest_option,
    negated_field,
    parse_plain,
    parse_value,
    resolve_option,
    shape_at,
    suggest_names,
    take_value,
    take_values,
    without_no,
)
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT, Problem
from rlrun.config.loading.schema import Shape
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import did_you_mean

OURS = "RLRUN_"
PREFIXES = ("PRIME_", OURS)
"""Prefixes of environment variables. Variables with the last prefix override those with the first."""
_OF_SERVICES = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")
"""Endings of variables that Kubernetes creates for a Service, whose name may start with our prefix."""


@dataclass
class Arguments:
    """A parsed command line."""

    files: list[Path] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    help: bool = False
    dry_run: bool = False
    layer: Layer = field(default_factory=Layer)
    """Origins inside JSON values, and the problems, notices and hints."""
    unread: list[Problem] = field(default_factory=list)
    """Problems of words that were probably meant as files. They are reported without other problems, which could be their consequences."""
    others: OtherNames | None = None
    also: Collection[str] = ()
    """Options of the command itself, for suggestions after a mistyped option."""


class Translated(Protocol):
    """Another project's option, translated into fields of this project."""

    @property
    def assignments(self) -> list[Assignment]:
        """Assignments to our fields."""
        ...

    @property
    def layer(self) -> Layer:
        """Origins inside values, problems, notices and hints."""
        ...


class OtherNames(Protocol):
    """Names of another project; see `rlrun.config.dialects`."""

    def knows(self, words: Sequence[str]) -> bool:
        """Return whether these dotted words are a name of the other project."""
        ...

    def option(self, words: Sequence[str], value: object, shown: str) -> Translated | None:
        """Translate an option. `shown` is the option's name as the user wrote it."""
        ...

    def items(self, words: Sequence[str], value: object, shown: str) -> Translated | None:
        """Translate an option whose value is a list of the other project's tables, or return None for other options."""
        ...


def parse_arguments(
    model: type[BaseModel],
    argv: Sequence[str],
    *,
    aliases: Mapping[str, str] | None = None,
    others: OtherNames | None = None,
    also: Collection[str] = (),
) -> Arguments:
    """Split a command line into files and assignments. Problems are added to the result's `layer`.

    Args:
        model: model whose fields are the options.
        argv: command line without the program's name.
        aliases: other names of the model's own fields.
        others: names of another project, which are accepted too.
        also: options of the command itself, for suggestions after a mistyped option.
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
            result.unread.append(Problem(COMMAND_LINE, token, f'is not an option; write a file as "@ {token}"'))
        else:
            more = f"; {before} takes one value" if before and not token.startswith("-") else ""
            _refuse_option(
                result.layer,
                token,
                f'is not an option; options start with "--", and a file is written as "@ FILE"{more}',
            )
    return result


def _one_dash(token: str, rest: list[str], reader: Reader, result: Arguments, model: type[BaseModel]) -> None:
    """Refuse an option with one dash, with its value."""
    close = nearest_option(f"-{token}", result.also, model) or suggest_names(reader, [token[1:]], 0, model)
    _refuse_option(result.layer, token, f'is not an option; options start with "--"{close if "mean" in close else ""}')
    if rest and not rest[0].startswith(("-", "@")):
        rest.pop(0)  # skip its value, which would be reported as a second problem


def value_words(
    model: type[BaseModel],
    option: str,
    rest: Sequence[str],
    *,
    aliases: Mapping[str, str] | None = None,
    others: OtherNames | None = None,
) -> int:
    """Return how many words after an option are its value, by the rules of `parse_arguments`.

    Args:
        model: model whose fields are the options.
        option: option with its dashes; if it contains `=` and a value, no word is counted.
        rest: words after the option.
        aliases: as in `parse_arguments`, like `others`.
    """
    if "=" in option:
        return 0
    reader = Reader(model, COMMAND_LINE, style="kebab", aliases=aliases or {})
    result, left = Arguments(others=others), list(rest)
    _parse_option(option, left, reader, result)
    return len(rest) - len(left)


def parse_environment(model: type[BaseModel], env: Mapping[str, str], *, others: OtherNames | None = None) -> Arguments:
    """Read the environment variables that name a field.

    A `PRIME_` variable without `__` and without a field belongs to another program. An unknown `RLRUN_` variable is reported as a notice.
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
                if prefix == OURS and (notice := _unknown_variable(model, name)) is not None:
                    result.layer.notices.append(notice)
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
    if result.others is not None and _take_other_option(
        result.others, name, given if equals else None, rest, reader, result
    ):
        return
    found = resolve_option(reader, name.split("."))
    if isinstance(found, str):
        _not_a_field(name, found, rest, reader, result, alone=not equals)
        return
    key, shape = found
    follows = has_value(rest)
    text = given if equals else rest[0] if follows else ""
    if shape.kind == "model" and Path(text).suffix in FORMATS:
        result.unread.append(Problem(COMMAND_LINE, f"{shown} {text}", f'write a file as "{shown} @ {text}"'))
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
    """Handle an option that names no field: `--no-flag`, or a mistake, whose value is skipped with it.

    Args:
        name: option without its dashes.
        why: end of the message, with the reason.
        rest: words after the option.
        reader: reader of the command line.
        result: receiver of the assignment or the problem.
        alone: whether the option has no `=` and value.
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
        rest.pop(0)  # skip its value, which would be reported as a second problem


def _take_other_option(
    others: OtherNames, name: str, given: str | None, rest: list[str], reader: Reader, result: Arguments
) -> bool:
    """Handle an option with another project's name; return False for other options."""
    positive = without_no(name)
    if others.knows(words := name.split(".")):
        several = [] if given is not None else take_values(rest)
        text = several[0] if several else given
        value = [parse_plain(word) for word in several] if len(several) > 1 else None
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
    """Handle an option with another project's name.

    Args:
        result: receiver of assignments and problems.
        reader: reader of the command line.
        words: name of the option.
        shown: option as it was written.
        text: value of the option; None: no value; False: `no-` before its name.
        several: all values, if there are several.
    """
    written = "true" if text is None else "false" if text is False else text
    value = parse_plain(written) if several is None else several
    translated = None if result.others is None else result.others.option(words, value, shown)
    if translated is None:
        return
    for assignment in translated.assignments:
        shape = shape_at(reader.model, assignment.key)
        as_written = assignment.value is value and isinstance(value, int | float)
        if as_written and not isinstance(text, str) and shape.kind in ("str", "int", "float"):
            if text is None or not shape.nullable:
                _refuse_option(result.layer, shown, "needs a value")
            else:
                result.assignments.append(replace(assignment, value=None))
            continue
        new_value = parse_value(written, shape) if as_written else assignment.value
        result.assignments.append(replace(assignment, value=new_value))
    result.layer.problems += translated.layer.problems
    result.layer.notices += translated.layer.notices
    result.layer.hints |= translated.layer.hints


def _unknown_variable(model: type[BaseModel], name: str) -> Problem | None:
    """Return the notice for an `RLRUN_` variable that names no field, or None for variables of Kubernetes."""
    if name.endswith(_OF_SERVICES) or "_PORT_" in name:
        return None
    known = [*PROCESS_VARIABLES, *(f"{OURS}{field.upper()}" for field in model.model_fields)]
    hint = did_you_mean(name, known) or f"; a field is written as {OURS}MAX_STEPS or {OURS}MODEL__NAME"
    return Problem(ENVIRONMENT, name, f"is not a known variable and has no effect{hint}")


def _add_value(result: Arguments, reader: Reader, key: Key, shape: Shape, shown: str, value: object) -> None:
    value = reader.value(value, shape, key, shown, (), result.layer)
    result.assignments.append(Assignment(key, value, Origin(reader.source, shown, None, reader.style)))


def _refuse_option(layer: Layer, path: str, message: str) -> None:
    layer.problems.append(Problem(COMMAND_LINE, path, message))
