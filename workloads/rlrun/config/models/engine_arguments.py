"""Additional arguments of vLLM's server that a run may set (`inference.extraArgs`)."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.config.base import Rule, list_cel

OWNED_FLAGS = (
    "--allowed-origins",
    "--api-key",
    "--config",
    "--data-parallel-size",
    "--dtype",
    "--enable-log-requests",
    "--enable-lora",
    "--enable-return-routed-experts",
    "--enable-scale-out",
    "--enable-sleep-mode",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--help",
    "--host",
    "--load-format",
    "--logprobs-mode",
    "--lora-modules",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--max-loras",
    "--max-model-len",
    "--max-num-seqs",
    "--middleware",
    "--model",
    "--port",
    "--revision",
    "--root-path",
    "--seed",
    "--served-model-name",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--tensor-parallel-size",
    "--trust-remote-code",
    "--uds",
    "--weight-transfer-config",
    "--worker-extension-cls",
)
"""Flags that RLRun sets from a run's fields, or that would disable the access guard, hide the server or make it exit."""
OWNED_SHORT = ("-tp", "-dp", "-h")
"""Short forms of owned flags."""
ENABLE_TOOLS = "--enable-auto-tool-choice"
"""vLLM's flag that enables a tool-call parser; `--tool-call-parser` selects the parser."""
REASONING_PARSER = "--reasoning-parser"
"""vLLM's flag that selects a parser for the reasoning before an answer."""
_PARSER_FLAGS = {
    ENABLE_TOOLS,
    "--tool-call-parser",
    "--tool-parser-plugin",
    REASONING_PARSER,
    "--reasoning-parser-plugin",
}
"""vLLM's flags that configure how a reply is parsed."""


def flag_of(argument: str) -> str:
    """Return the flag of an argument as vLLM reads it: without its value, with `-` for `_`, and `--flag` for `--flag.key`."""
    return argument.partition("=")[0].replace("_", "-").partition(".")[0].replace("--no-", "--", 1)


def is_owned(argument: str) -> bool:
    """Return whether RLRun itself sets an argument. A prefix counts as the flag, because argparse expands prefixes."""
    if argument.startswith("--"):
        flag = flag_of(argument)
        return len(flag) > len("--") and any(owned.startswith(flag) for owned in OWNED_FLAGS)
    return any(argument.startswith(short) for short in OWNED_SHORT)


def problem_of_arguments(arguments: Sequence[str]) -> str | None:
    """Return why vLLM's server cannot have these arguments (field, value and fix), or None if it can."""
    for index, argument in enumerate(arguments):
        if is_owned(argument):
            return f"extraArgs[{index}] ({argument}) is set by RLRun itself; remove it, and set the corresponding field if there is one"
        if argument.startswith("-"):
            continue
        before = arguments[index - 1] if index else "--first="
        if before.startswith("--") and "=" in before:
            return f"extraArgs[{index}] ({argument}) is neither a flag nor a flag's value; write --{argument}, or put it after its flag"
    return None


def parser_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that configure how a reply is parsed: its tool calls and its reasoning."""
    found, values = [], False
    for argument in arguments:
        flag, _, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if flag.startswith("--"):
            values = flag in _PARSER_FLAGS
            argument = f"{flag}={value}" if value else flag
        if values:
            found.append(argument)
    return found


_OWNED = (
    "i < self.extraArgs.size() && [self.extraArgs[i]].exists(a, a.startsWith('--') ? "
    "[a.split('=')[0].replace('_', '-').split('.')[0].replace('--no-', '--', 1)].exists(f, f.size() > 2 && "
    f"{list_cel(OWNED_FLAGS)}.exists(o, o.startsWith(f))) : {list_cel(OWNED_SHORT)}.exists(o, a.startsWith(o)))"
)
_FIRST_OWNED = f"variables.indices.filter(i, {_OWNED})[0]"
_VALUE_OF_FLAG = (
    "i >= self.extraArgs.size() || self.extraArgs[i].startsWith('-') || "
    "(i > 0 && !(self.extraArgs[i - 1].startsWith('--') && self.extraArgs[i - 1].contains('=')))"
)
_FIRST_STRAY = f"variables.indices.filter(i, !({_VALUE_OF_FLAG}))[0]"

EXTRA_ARGUMENTS_RULES = (
    Rule(
        f"!has(self.extraArgs) || variables.indices.all(i, !({_OWNED}))",
        f"extraArgs[{{{_FIRST_OWNED}}}] ({{self.extraArgs[{_FIRST_OWNED}]}}) is set by RLRun itself; remove it, "
        "and set the corresponding field if there is one",
    ),
    Rule(
        f"!has(self.extraArgs) || variables.indices.all(i, {_VALUE_OF_FLAG})",
        f"extraArgs[{{{_FIRST_STRAY}}}] ({{self.extraArgs[{_FIRST_STRAY}]}}) is neither a flag nor a flag's value; "
        f"write --{{self.extraArgs[{_FIRST_STRAY}]}}, or put it after its flag",
    ),
)
"""Admission rules of a block with `extraArgs`."""
