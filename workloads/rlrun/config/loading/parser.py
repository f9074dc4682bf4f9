"""Help pages and argument parsers of the command line.

`help_text` makes the `--help` of a configuration model: every option with type, bounds, default and description, in the groups of the
model. `Options` and `Parser` parse the options of commands without a configuration model, with suggestions for unknown options and the
project's exit code.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlrun.config.loading.schema import Shape, describe_expected, field_meaning, field_shapes, spell_name
from rlrun.config.suggest import did_you_mean
from rlrun.runtime import exit_codes, redact

_WIDTH = 100
_INDENT = 6


def help_text(model: type[BaseModel], *, prog: str, states: Mapping[str, str] | None = None) -> str:
    """Return the help page.

    Args:
        model: model whose fields are the options.
        prog: name of the program.
        states: text that replaces `required` or the default, for top-level fields.
    """
    head = [
        f"usage: {prog} [@ FILE ...] [--option VALUE ...] [--dry-run] [--help]",
        "",
        *textwrap.wrap(model.__doc__ or "", _WIDTH),
        "",
        "Files are TOML, YAML or JSON. Later files override earlier files, options override files, and all of them override",
        "variables such as RLRUN_MODEL__NAME. Names may be written batch-size, batch_size or batchSize.",
        "",
        "  --dry-run   print the resolved configuration as JSON and stop",
        "  --help      print this page and stop",
    ]
    return "\n".join([*head, *_help_group(model, "", "options", states or {})])


def _help_group(model: type[BaseModel], prefix: str, title: str, states: Mapping[str, str]) -> Iterator[str]:
    yield ""
    yield f"{title}:"
    nested: list[tuple[str, str, type[BaseModel]]] = []
    for name, shape in field_shapes(model).items():
        info, path = model.model_fields[name], f"{prefix}{spell_name(model, name, 'kebab')}"
        inner, below = (shape.parts[0], f"{path}.N") if shape.kind == "list" else (shape, path)
        if inner.model is not None:
            nested.append((below, name, inner.model))
        else:
            yield from _help_option(path, shape, info, (field_meaning(model, name), states.get(name)))
    for path, name, inner_model in nested:
        info = model.model_fields[name]
        text = field_meaning(model, name).split("\n")[0]
        state = "required" if info.is_required() else "default: none" if default_of(info) is None else ""
        state = states.get(name, state)
        title = f"--{path}{f' ({state})' if state else ''}: {text}".rstrip(":")
        yield from _help_group(inner_model, f"{path}.", title, {})


def _help_option(path: str, shape: Shape, info: FieldInfo, words: tuple[str, str | None]) -> Iterator[str]:
    description, state = words
    flag = f"--{path} / --no-{path}" if shape.kind == "bool" else f"--{path} VALUE"
    state = state or ("required" if info.is_required() else f"default: {shown_default(info)}")
    what = "" if shape.kind == "bool" else f"{describe_expected(shape)}; "
    yield f"  {flag}"
    text = f"{description} [{what}{state}]"
    yield from textwrap.wrap(text.strip(), _WIDTH, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT)


def default_of(info: FieldInfo) -> object:
    """Return a field's default as plain data; None for a required field."""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return None
    return value.model_dump(by_alias=True) if isinstance(value, BaseModel) else value


def shown_default(info: FieldInfo) -> str:
    """Return a field's default as JSON, or `none` for null."""
    value = default_of(info)
    return "none" if value is None else json.dumps(value)


_MESSAGES: Sequence[tuple[str, str]] = (
    (r"invalid int value: (.*)$", r"got \1, expected a whole number"),
    (r"invalid float value: (.*)$", r"got \1, expected a number"),
    (r"ignored explicit argument (.*)$", r"got \1, but the option takes no value; remove the value"),
    (r"expected (one|at least one) argument$", "needs a value after it"),
)
"""Messages of argparse, each with its replacement."""
_TEXT = "TEXT"
"""Metavar of an option whose value may be empty."""


class Options(argparse.ArgumentParser):
    """argparse with the project's exit code, without abbreviations, and with messages that have option, value and what is expected."""

    def __init__(self, prog: str, description: str | None = None, **more: Any) -> None:
        super().__init__(
            prog, description=description, allow_abbrev=False, formatter_class=format_with_fixed_width, **more
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments like argparse, but refuse an empty value, such as that of an unset shell variable."""
        words = list(sys.argv[1:] if args is None else args)
        texts = [name for action in self._actions if action.metavar == _TEXT for name in action.option_strings]
        options = {name for action in self._actions for name in action.option_strings} - {*texts}
        for word, following in zip_longest(words, words[1:]):
            name, equals, value = word.partition("=")
            if name in options and ((equals and not value) or (not equals and following == "")):
                self.error(f"argument {name}: got '', expected a value; remove {name} to use the default")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with the exit code of a wrong command line."""
        for theirs, ours in _MESSAGES:
            message = re.sub(theirs, ours, message)
        print(f"{self.prog}: {redact.redact_text(message, [])}; see {self.prog} --help", file=sys.stderr)
        sys.exit(exit_codes.USAGE)


class Parser(Options):
    """Options and arguments of a whole command line, with suggestions for unknown options."""

    def __init__(self, prog: str, description: str | None = None, **more: Any) -> None:
        super().__init__(prog, description, **more)
        self.also: Collection[str] = ()
        """Options that are extracted before, for suggestions after a mistyped option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments, and refuse unknown ones with the usage of the subcommand that they belong to."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [*own_options(self), *self.also]
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            if name == "--set" and self.also:
                self.error(f"unknown option --set; each field of spec is an option{_as_option(unknown)}")
            longer = [option for option in known if kind == "option" and option.startswith(f"{name}-")]
            hint = f" (did you mean {' or '.join(longer[:3])}?)" if longer else did_you_mean(name, known)
            self.error(f"unknown {kind} {name}{hint}")
        return options, []


def _as_option(words: Sequence[str]) -> str:
    """Return `: --max-steps 20` for `--set maxSteps=20`, or an example if it is not an assignment."""
    text = words[0].partition("=")[2] or (words[1] if len(words) > 1 else "")
    name, equals, value = text.removeprefix("spec.").partition("=")
    path = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()
    return f": --{path} {value}" if equals and re.fullmatch(r"[a-z0-9.-]+", path) else ", such as --max-steps 20"


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of an option: a whole number within inclusive bounds."""

    def read(text: str) -> int:
        digits = text.removeprefix("-")
        fits = digits.isascii() and digits.isdecimal() and len(digits) < 20
        if not fits or int(text) < least or (most is not None and int(text) > most):
            until = "" if most is None else f" to {most}"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from {least}{until}")
        return int(text)

    return read


def whole_numbers(least: int, most: int | None = None, *, such_as: str) -> Callable[[str], list[int]]:
    """Return the type of an option: whole numbers separated by commas; `such_as` is an example."""

    def read(text: str) -> list[int]:
        try:
            return [whole_number(least, most)(word.strip()) for word in text.split(",")]
        except argparse.ArgumentTypeError:
            bounds = "" if most is None else f" from {least} to {most}"
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected whole numbers{bounds} separated by commas, such as {such_as}"
            ) from None

    return read


def finite_number(text: str) -> float:
    """Parse a finite number; the type of an option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number")
    return value


def own_options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of a parser's options."""
    return [name for action in parser._actions for name in action.option_strings]


def format_with_fixed_width(prog: str) -> argparse.HelpFormatter:
    """Return a help formatter whose width does not depend on the terminal."""
    return argparse.HelpFormatter(prog, max_help_position=28, width=100)
