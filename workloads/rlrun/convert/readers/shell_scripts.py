"""Shell scripts that start a training: variables, arrays, conditions, functions and the command. Nothing in them is executed.

tree-sitter's bash grammar parses the script; the walk over the syntax tree follows it like a shell. If the result of a condition is unknown
(a file, the output of a command), the walk follows every branch: commands in it count only if no other command is certain, and a variable
that the branches set to different values counts as unset.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rlrun.convert.readers.hydra import refuse_file
from rlrun.convert.readers.shell_conditions import evaluate_test, test_words
from rlrun.convert.readers.shell_expand import (
    Scope,
    TooLongError,
    Value,
    expand_text,
    expand_word,
    mark_unknown,
    source_of,
    split_marks,
)
from rlrun.runtime import extras

if TYPE_CHECKING:
    from tree_sitter import Node


_SETTING = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@-]*(\[[^=]*\])?=", re.DOTALL)
_BRACKET = re.compile(r"(\$\{\w+(?:%%?|##?))\]")
"""A `]` at the start of a pattern, which tree-sitter-bash (0.25) cannot parse without quotes."""
_LAST_LINE = re.compile(r"\\\s*\Z")
"""A line continuation at the end of a script, which shells permit."""
_STEPS = 30_000
_CALLS = 20
_OTHER_PROGRAMS = frozenset(
    {
        "echo",
        "printf",
        "source",
        ".",
        "pip",
        "pip3",
        "cd",
        "mkdir",
        "export",
        "sed",
        "grep",
        "git",
        "wget",
        "curl",
        "tee",
    }
)
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh")
_PARSERS = ("tree_sitter", "tree_sitter_bash")


@dataclass(frozen=True)
class Word:
    """One argument of a command."""

    text: str
    line: int
    unset: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """Command that starts a program with arguments."""

    module: str
    """Module of `python -m`, or the program."""
    words: Sequence[Word]
    """Arguments of the module."""
    options: Sequence[Word] = ()
    """Options with a value of the launcher, such as `--nproc_per_node=8` of torchrun."""
    is_certain: bool = True
    """Whether the script always reaches the command; False inside branches, loops and functions that may not run."""
    texts: Sequence[str] = ()
    """All words including the program."""

    @property
    def has_settings(self) -> bool:
        """Whether an argument has the form `key=value`."""
        return any(_SETTING.match(word.text) for word in self.words)


class _ExitError(Exception):
    """Signal that the branch ends the script."""


@dataclass
class _Script:
    source: str
    scope: Scope
    is_certain: bool = True
    functions: dict[str, Node] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    commands: list[Command] = field(default_factory=list)
    steps: int = 0
    depth: int = 0
    text: str = ""
    line: int = 0
    """Number of lines before the parsed text, for a command in quotes."""

    def line_of(self, node: Node) -> int:
        return self.line + node.start_point[0] + 1


def read_script(text: str, source: str, environment: Mapping[str, str]) -> list[Command]:
    """Return the commands of a script with all words expanded: certain commands first, each group in script order.

    Args:
        text: content of the script.
        source: name of the script in messages.
        environment: variables that are set before the script starts.

    Raises:
        ConfigError: the text is not a shell script, or is too large; the message contains the line.
    """
    script = _Script(source, Scope({"PWD": "/workspace", **environment}), text=text)
    root = _parse_script(text, source)
    try:
        _run_all(script, root.children)
        script.is_certain = False
        for name in [name for name in script.functions if name not in script.called]:
            _call_function(script, name, None)
    except TooLongError:
        raise refuse_file(
            source, "a word has more than 200,000 characters; write the settings into a YAML file"
        ) from None
    except _ExitError:
        pass
    return sorted(script.commands, key=lambda command: not command.is_certain)


def _parse_script(text: str, source: str, line: int = 0) -> Node:
    if (missing := extras.explain_lacking(_PARSERS)) is not None:
        raise refuse_file(source, f"shell scripts cannot be parsed: {missing}")
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    readable = _LAST_LINE.sub("\n", _BRACKET.sub(r'\1"]"', text))
    root = Parser(Language(tree_sitter_bash.language())).parse(readable.encode()).root_node
    if root.has_error:
        wrong = _error_in(root)
        first, last = (line + point[0] + 1 for point in (wrong.start_point, wrong.end_point))
        where = f" up to line {last}" if last > first else ""
        shown = source_of(wrong).strip().partition("\n")[0][:60]
        what = f"{wrong.type!r} is missing" if wrong.is_missing else f"shell syntax error{where}: {shown!r}"
        fix = "rewrite this line, or pass the command's key=value arguments to rlrun convert"
        raise refuse_file(source, f"{what}; {fix}", first)
    return root


def _error_in(node: Node) -> Node:
    """Return the first, innermost error of a tree."""
    while not node.is_missing:
        inner = next((child for child in node.children if child.has_error or child.is_missing or child.is_error), None)
        if inner is None:
            break
        node = inner
    return node


def _run_all(script: _Script, nodes: Sequence[Node]) -> bool | None:
    """Run statements in order; returns the success of the last one, or None if unknown."""
    success: bool | None = None
    for node in nodes:
        if node.is_named and node.type not in ("comment", "heredoc_body"):
            success = _run_statement(script, node)
    return success


def _run_statement(script: _Script, node: Node) -> bool | None:
    """Run one statement; returns its success, or None if unknown."""
    script.steps += 1
    if script.steps > _STEPS:
        raise refuse_file(
            script.source, "the loops of the script have too many iterations to follow", script.line_of(node)
        )
    kind = node.type
    if kind in _STATEMENTS:
        return _STATEMENTS[kind](script, node)
    if kind == "redirected_statement":
        body = node.child_by_field_name("body")
        return _run_statement(script, body) if body is not None else None
    if kind in ("program", "compound_statement", "do_group", "subshell", "pipeline", "ERROR"):
        if source_of(node).startswith("(("):
            return evaluate_test(node, script.scope)
        return _run_all(script, node.children)
    return None


def _run_possibly(script: _Script, branches: Sequence[Callable[[], object]], line: int) -> None:
    """Run alternative branches, and keep the variables with equal values in all of them.

    Args:
        script: state of the walk.
        branches: alternatives; includes an empty one if a shell may run none of them.
        line: line of the condition.
    """
    was_certain, script.is_certain = script.is_certain, False
    before = dict(script.scope.variables)
    unsure = dict(script.scope.unsure)
    outcomes: list[dict[str, Value]] = []
    for run in branches:
        script.scope.variables = dict(before)
        try:
            run()
        except _ExitError:
            continue
        outcomes.append(dict(script.scope.variables))
    script.is_certain = was_certain
    script.scope.variables = last = outcomes[-1] if outcomes else before
    script.scope.unsure = unsure | script.scope.unsure
    for name in {name for outcome in outcomes for name in outcome}:
        values = [outcome.get(name) for outcome in outcomes]
        if any(value != values[-1] for value in values):
            lists = [value for value in values if isinstance(value, list)]
            if len(lists) == len(values):
                last[name] = _merge_arrays(lists, f"{name} (line {line})")
            else:
                script.scope.unsure.setdefault(name, line)


def _merge_arrays(outcomes: Sequence[list[str]], reason: str) -> list[str]:
    """Return the common first items of all outcomes, followed by every other item marked as unknown."""
    same = 0
    while all(len(items) > same and items[same] == outcomes[0][same] for items in outcomes):
        same += 1
    others = dict.fromkeys(item for items in outcomes for item in items[same:])
    return [*outcomes[0][:same], *(mark_unknown(item, [reason]) for item in others)]


def _run_if(script: _Script, node: Node) -> bool | None:
    branches: list[tuple[bool | None, list[Node]]] = []
    for clause in [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]:
        parts = [child for child in clause.children if child.type not in ("elif_clause", "else_clause")]
        at = next((i for i, part in enumerate(parts) if part.type == "then"), None)
        if at is None:
            branches.append((True, parts))
            break
        holds = None if any(held is None for held, _ in branches) else _run_all(script, parts[:at])
        branches.append((holds, parts[at + 1 :]))
        if holds:
            break
    possible = [(holds, body) for holds, body in branches if holds is not False]
    if possible and possible[0][0]:
        return _run_all(script, possible[0][1])
    if possible:
        _run_choices(script, node, [body for _, body in possible], is_complete=possible[-1][0] is True)
    return None


def _run_choices(script: _Script, node: Node, bodies: Sequence[Sequence[Node]], *, is_complete: bool) -> None:
    runs: list[Callable[[], object]] = [partial(_run_all, script, body) for body in bodies]
    if not is_complete:
        runs.append(lambda: None)
    _run_possibly(script, runs, script.line_of(node))


def _run_case(script: _Script, node: Node) -> bool | None:
    value = expand_text(node.child_by_field_name("value"), script.scope)
    bodies: list[list[Node]] = []
    for item in (child for child in node.children if child.type == "case_item"):
        values = item.children_by_field_name("value")
        patterns = [expand_text(pattern, script.scope).text for pattern in values]
        body = [child for child in item.children if child not in values]
        if not value.is_known:
            bodies.append(body)
            if "*" in patterns:
                _run_choices(script, node, bodies, is_complete=True)
                return None
        elif any(fnmatch.fnmatchcase(value.text, pattern) for pattern in patterns):
            return _run_all(script, body)
    if bodies:
        _run_choices(script, node, bodies, is_complete=False)
    return None


def _run_for(script: _Script, node: Node) -> bool | None:
    name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
    if name is None or body is None:
        return None
    values = [expand_word(value, script.scope) for value in node.children_by_field_name("value")]
    if not all(value.is_known for value in values):
        return _run_loop(script, node)
    for value in [text for found in values for text in found.fields]:
        script.scope.variables[source_of(name)] = value
        script.scope.unsure.pop(source_of(name), None)
        _run_statement(script, body)
    return None


def _run_loop(script: _Script, node: Node) -> bool | None:
    """Handle a loop with an unknown number of iterations: its commands are possible, its variables unknown."""
    body = node.child_by_field_name("body")
    if body is not None:
        _run_choices(script, node, [[body]], is_complete=False)
    return None


def _run_list(script: _Script, node: Node) -> bool | None:
    """Run `left && right` or `left || right`."""
    parts = [child for child in node.children if child.is_named]
    sign = next((child.type for child in node.children if not child.is_named), "&&")
    success = _run_statement(script, parts[0]) if parts else None
    if len(parts) < 2:
        return success
    if success is None:
        _run_choices(script, node, [[parts[1]]], is_complete=False)
        return None
    return _run_statement(script, parts[1]) if success is (sign == "&&") else success


def _run_negated(script: _Script, node: Node) -> bool | None:
    success = _run_all(script, node.children)
    return None if success is None else not success


def _run_test(script: _Script, node: Node) -> bool | None:
    return evaluate_test(node, script.scope)


def _define_function(script: _Script, node: Node) -> bool | None:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    if name is not None and body is not None:
        script.functions[source_of(name)] = body
    return True


def _call_function(script: _Script, name: str, arguments: Sequence[str] | None) -> bool | None:
    if script.depth >= _CALLS:
        return None
    script.called.add(name)
    outer, script.scope.arguments = script.scope.arguments, arguments
    script.depth += 1
    try:
        return _run_statement(script, script.functions[name])
    except _ExitError:
        return None
    finally:
        script.depth -= 1
        script.scope.arguments = outer


def _declare_variable(script: _Script, node: Node) -> bool | None:
    for child in node.children:
        if child.type == "variable_assignment":
            _assign_variable(script, child)
    return True


def _unset_variable(script: _Script, node: Node) -> bool | None:
    for child in node.children:
        if child.type == "variable_name":
            script.scope.variables.pop(source_of(child), None)
            script.scope.unsure.pop(source_of(child), None)
    return True


def _assign_variable(script: _Script, node: Node) -> bool | None:
    target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    if target is None or target.type == "subscript":
        return True
    name = source_of(target)
    adds = any(child.type == "+=" for child in node.children)
    before = script.scope.variables.get(name, "") if adds else ""
    if value is not None and value.type == "array":
        found = [expand_word(item, script.scope) for item in value.children if item.is_named and item.type != "comment"]
        items = [text if each.is_known else mark_unknown(text, each.unset) for each in found for text in each.fields]
        script.scope.variables[name] = [*([before] if isinstance(before, str) and before else before), *items]
        _note_unsure(script, node, name, is_known=all(each.is_known or each.fields for each in found), adds=adds)
        return True
    text = expand_text(value, script.scope)
    if text.unset and not text.text and not adds:
        script.scope.variables.pop(name, None)  # the output of a command is unknown, because commands are not executed
    else:
        script.scope.variables[name] = (before if isinstance(before, str) else " ".join(before)) + text.text
    _note_unsure(script, node, name, is_known=text.is_known or bool(text.text), adds=adds)
    return True


def _note_unsure(script: _Script, node: Node, name: str, *, is_known: bool, adds: bool) -> None:
    if not is_known:
        script.scope.unsure[name] = script.line_of(node)
    elif not adds:
        script.scope.unsure.pop(name, None)


def _run_command(script: _Script, node: Node) -> bool | None:
    words: list[Word] = []
    for child in node.children:
        if child.type == "variable_assignment":
            _assign_variable(script, child)
        elif child.type not in ("file_redirect", "herestring_redirect", "heredoc_redirect", "comment"):
            found = expand_word(child, script.scope)
            if not found.fields:
                _refuse_lost_array(script, child)
            for field in found.fields:
                text, names = split_marks(field)
                words.append(Word(text, script.line_of(child), (*found.unset, *names)))
    return _run_words(script, words)


def _refuse_lost_array(script: _Script, node: Node) -> None:
    """Refuse an array of settings that only skipped branches set, because its keys would be lost."""
    name = re.fullmatch(r'"?\$\{(\w+)\[@\]\}"?', source_of(node))
    if name is None or name[1] in script.scope.variables:
        return
    if re.search(rf"(?<!\w){name[1]}=\(", script.text):
        raise refuse_file(
            script.source,
            f"{name[1]} is set only in branches that depend on the script's arguments; keep only one branch in the file",
            script.line_of(node),
        )


def _run_words(script: _Script, words: list[Word]) -> bool | None:
    texts = [word.text for word in words]
    if not texts:
        return None
    program, rest = texts[0], texts[1:]
    if program in script.functions:
        return _call_function(script, program, rest)
    if program in ("exit", "return") and not script.is_certain:
        raise _ExitError
    if program in ("[", "test"):
        return test_words([text for text in rest if text != "]"])
    if program == "set" and rest[:1] == ["--"]:
        script.scope.arguments = rest[1:]
    elif program == "shift":
        script.scope.arguments = (script.scope.arguments or [])[int(rest[0]) if rest and rest[0].isdigit() else 1 :]
    elif program == "read":
        for name in (text for text in rest if not text.startswith("-")):
            script.scope.variables.pop(name, None)
    elif program == "eval":
        return _run_text(script, " ".join(rest), words[0].line)
    elif program in ("exec", "command") and rest[:1] != ["-v"]:
        return _run_words(script, words[1:])
    elif (quoted := _quoted_script(texts)) is not None:
        return _run_text(script, quoted, words[0].line)
    elif program not in _OTHER_PROGRAMS:
        script.commands.append(_make_command(words, is_certain=script.is_certain))
    return {"true": True, "false": False, ":": True}.get(program)


def _quoted_script(texts: Sequence[str]) -> str | None:
    """Return the text of `bash -c TEXT`, including calls through srun, ssh or docker."""
    for at, text in enumerate(texts[:-2]):
        if text in _SHELLS and re.fullmatch(r"-\w*c", texts[at + 1]):
            return texts[at + 2]
    return None


def _run_text(script: _Script, text: str, line: int) -> bool | None:
    if script.depth >= _CALLS:
        return None
    outer, script.line = script.line, line - 1
    script.depth += 1
    try:
        return _run_all(script, _parse_script(text, script.source, line - 1).children)
    finally:
        script.depth -= 1
        script.line = outer


def _make_command(words: list[Word], *, is_certain: bool) -> Command:
    texts = [word.text for word in words]
    module, start = texts[0], 1
    if "-m" in texts[:-1]:
        at = len(texts) - 1 - texts[::-1].index("-m")
        module, start = texts[at + 1], at + 2
    options = [word for word in words[:start] if re.match(r"--[\w-]+=", word.text)]
    return Command(module, list(words[start:]), options, is_certain, texts)


_STATEMENTS: Mapping[str, Callable[[_Script, Node], bool | None]] = {
    "if_statement": _run_if,
    "case_statement": _run_case,
    "for_statement": _run_for,
    "c_style_for_statement": _run_loop,
    "while_statement": _run_loop,
    "list": _run_list,
    "negated_command": _run_negated,
    "test_command": _run_test,
    "function_definition": _define_function,
    "declaration_command": _declare_variable,
    "unset_command": _unset_variable,
    "variable_assignment": _assign_variable,
    "command": _run_command,
}
