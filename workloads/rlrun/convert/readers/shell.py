"""Shell scripts that start a training: variables, arrays, conditions and the command, read without running anything."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlrun.convert.readers.setting import refuse
from rlrun.convert.readers.shell_expand import Variables, expand, text_of
from rlrun.convert.readers.shell_words import Token, UnclosedError, split

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SETTING = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@-]*(\[[^=]*\])?=", re.DOTALL)
_KEYWORDS_THAT_ASSIGN = ("export", "local", "declare", "readonly", "typeset")
_NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-gt": ">", "-le": "<=", "-ge": ">="}


@dataclass(frozen=True)
class Word:
    """One argument of a command."""

    text: str
    line: int
    unset: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command with `key=value` arguments."""

    module: str
    """Module of `python -m`, or the program."""
    words: Sequence[Word]
    """The arguments behind it."""
    options: Sequence[Word] = ()
    """Options with a value of what starts the module: `--nproc_per_node=8` of torchrun."""


@dataclass
class _Script:
    source: str
    tokens: Sequence[Token]
    variables: Variables
    commands: list[Command] = field(default_factory=list)
    at: int = 0
    steps: int = 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> Token:
        token = self.peek()
        if token is None:
            raise refuse(self.source, "the script ends in the middle of an if, case or loop")
        self.at += 1
        self.steps += 1
        if self.steps > 200_000:
            raise refuse(self.source, "the script has loops that are too long to read", token.line)
        return token

    def skip_ends(self) -> None:
        while (token := self.peek()) is not None and token.operator and token.text in (";", "&"):
            self.at += 1


def read_script(text: str, source: str, environment: Mapping[str, str]) -> list[Command]:
    """The commands of a script that have at least one `key=value` argument, with everything expanded.

    Args:
        text: the script.
        source: its name in messages.
        environment: variables that are set before it begins.

    Raises:
        ConfigError: it is no shell script that can be read; with the line.
    """
    try:
        script = _Script(source, split(text), dict(environment))
        script.variables.setdefault("PWD", "/workspace")
        _block(script, (), live=True)
    except UnclosedError as error:
        raise refuse(source, str(error), error.line) from None
    if (left := script.peek()) is not None:
        raise refuse(source, f"{left.text!r} closes nothing that is open", left.line)
    return script.commands


def _block(script: _Script, until: Sequence[str], *, live: bool) -> str:
    """Read statements up to one of the words of `until`, which is taken and returned."""
    while True:
        script.skip_ends()
        token = script.peek()
        if token is None or (not until and token.operator and token.text == ")"):
            if until:
                script.take()
            return ""
        if token.text in until:
            return script.take().text
        _list(script, live=live)


def _list(script: _Script, *, live: bool) -> None:
    """Statements joined by `&&` and `||`."""
    success = _statement(script, live=live)
    while (token := script.peek()) is not None and token.operator and token.text in ("&&", "||", "|"):
        joined = script.take().text
        while (end := script.peek()) is not None and end.text == ";":
            script.at += 1
        wanted = joined == "|" or (success is not False if joined == "&&" else success is False)
        success = _statement(script, live=live and wanted) if wanted else (_statement(script, live=False), success)[1]


def _statement(script: _Script, *, live: bool) -> bool | None:
    """One statement; its success where that is known."""
    token = script.peek()
    if token is None:
        return None
    compound = {"if": _if, "case": _case, "for": _for, "while": _while, "until": _while, "function": _function}
    if not token.operator and token.text in compound:
        script.take()
        compound[token.text](script, live)
        return None
    if token.text in ("{", "("):
        script.take()
        _block(script, ("}",) if token.text == "{" else (")",), live=live)
        return None
    words: list[Token] = []
    while (token := script.peek()) is not None and not token.operator:
        words.append(script.take())
    if token is not None and token.text == "(" and len(words) == 1:  # name() { ... }
        script.take()
        script.take()
        script.skip_ends()
        _statement(script, live=False)
        return None
    if not words and token is not None:
        raise refuse(script.source, f"{token.text!r} stands where a command should", token.line)
    return _command(script, words) if live else None


def _if(script: _Script, live: bool) -> None:
    taken = False
    word = "elif"
    while word == "elif":
        holds = _condition(script, live=live and not taken)
        word = _block(script, ("elif", "else", "fi"), live=live and holds and not taken)
        taken = taken or holds
    if word == "else":
        _block(script, ("fi",), live=live and not taken)


def _condition(script: _Script, *, live: bool) -> bool:
    """The commands between `if` and `then`; what cannot be known does not hold."""
    results: list[bool | None] = []
    joins: list[str] = []
    while True:
        script.skip_ends()
        token = script.peek()
        if token is not None and token.text in ("then", "do"):
            script.take()
            break
        negated = token is not None and token.text == "!"
        if negated:
            script.take()
        result = _statement(script, live=live)
        results.append(None if result is None else result is not negated)
        following = script.peek()
        if following is not None and following.operator and following.text in ("&&", "||", "|"):
            joins.append(script.take().text)
    holds = bool(results and results[0])
    for join, result in zip(joins, results[1:], strict=False):
        holds = (holds and bool(result)) if join != "||" else (holds or bool(result))
    return live and holds


def _case(script: _Script, live: bool) -> None:
    subject = text_of(script.take().text, script.variables).fields[0]
    script.skip_ends()
    script.take()  # in
    taken = False
    while True:
        script.skip_ends()
        if (token := script.take()).text == "esac":
            return
        patterns = []
        while token.text != ")":
            if token.text not in ("|", "("):
                patterns.append(text_of(token.text, script.variables).fields[0])
            token = script.take()
        holds = not taken and any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)
        end = _block(script, (";;", "esac"), live=live and holds)
        taken = taken or holds
        if end == "esac":
            return


def _for(script: _Script, live: bool) -> None:
    name = script.take().text
    values: list[str] = []
    while (token := script.take()).text not in (";", "do"):
        if token.text != "in":
            values += expand(token.text, script.variables).fields
    script.skip_ends()
    if token.text != "do":
        script.take()
    start = script.at
    _block(script, ("done",), live=False)
    end = script.at
    for value in values if live else ():
        script.at = start
        script.variables[name] = value
        _block(script, ("done",), live=True)
    script.at = end


def _while(script: _Script, live: bool) -> None:
    _condition(script, live=False)
    _block(script, ("done",), live=False)


def _function(script: _Script, live: bool) -> None:
    script.take()
    while (token := script.peek()) is not None and token.text in ("(", ")", ";"):
        script.take()
    _statement(script, live=False)


def _command(script: _Script, words: Sequence[Token]) -> bool | None:
    rest = list(words)
    if rest[0].text in _KEYWORDS_THAT_ASSIGN:
        rest = [word for word in rest[1:] if not word.text.startswith("-")]
        for word in rest:
            _assign(script, word)
        return True
    while rest and _ASSIGNMENT.fullmatch(rest[0].text):
        _assign(script, rest.pop(0))
    if not rest:
        return True
    if rest[0].text in ("[", "[[", "test"):
        return _test(script, [word for word in rest[1:] if word.text not in ("]", "]]")])
    expanded: list[Word] = []
    for word in rest:
        found = expand(word.text, script.variables)
        expanded += [Word(text, word.line, tuple(found.unset)) for text in found.fields]
    _keep(script, expanded)
    return {"true": True, "false": False}.get(rest[0].text)


def _keep(script: _Script, words: Sequence[Word]) -> None:
    """Keep a command that has settings behind its module."""
    texts = [word.text for word in words]
    start = 1
    module = texts[0] if texts else ""
    if (
        module in ("echo", "printf", "source", ".", "set", "uv", "pip", "pip3", "cd", "mkdir", "export")
        and "-m" not in texts
    ):
        return
    if "-m" in texts[:-1]:
        at = len(texts) - 1 - texts[::-1].index("-m")
        module, start = texts[at + 1], at + 2
    settings = [word for word in words[start:] if _SETTING.match(word.text) or word.text.startswith("-")]
    if any(_SETTING.match(word.text) for word in settings):
        options = [word for word in words[:start] if re.match(r"--[\w-]+=", word.text)]
        script.commands.append(Command(module, list(words[start:]), options))


def _assign(script: _Script, word: Token) -> None:
    match = _ASSIGNMENT.fullmatch(word.text)
    if match is None:
        return
    name, more, raw = match.groups()
    if raw.startswith("("):
        items: list[str] = []
        for token in split(raw[1:-1]):
            items += [] if token.operator else expand(token.text, script.variables).fields
        before = script.variables.get(name, [])
        script.variables[name] = [*([before] if isinstance(before, str) else before), *items] if more else items
        return
    found = text_of(raw, script.variables)
    if found.unset and not found.fields[0]:
        script.variables.pop(name, None)  # what comes from a command that is not run is as unset as the command
        return
    old = script.variables.get(name, "") if more else ""
    script.variables[name] = (old if isinstance(old, str) else " ".join(old)) + found.fields[0]


def _test(script: _Script, words: Sequence[Token]) -> bool | None:
    """The truth of `[ ... ]`; None where it asks for files or more than a comparison."""
    texts = [text_of(word.text, script.variables).fields[0] for word in words]
    match texts:
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case ["!", *others]:
            inner = _test(script, words[1:]) if others else None
            return None if inner is None else not inner
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, comparison, right] if comparison in _NUMBERS and _is_number(left) and _is_number(right):
            return _compare(int(left), _NUMBERS[comparison], int(right))
    return None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


def _compare(left: int, comparison: str, right: int) -> bool:
    order = (left > right) - (left < right)
    return {"==": order == 0, "!=": order != 0, "<": order < 0, ">": order > 0, "<=": order <= 0, ">=": order >= 0}[
        comparison
    ]
