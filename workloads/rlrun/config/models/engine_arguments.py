"""Additional arguments of vLLM's server that a run may set (`inference.extraArgs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun.config.base import Rule, list_cel

OWNED_FLAGS: Mapping[str, str | None] = {
    "--allowed-origins": None,
    "--api-key": None,
    "--config": None,
    "--data-parallel-size": "inference.dataParallel",
    "--dtype": "model.dtype",
    "--enable-log-requests": None,
    "--enable-lora": "trainer.lora",
    "--enable-return-routed-experts": "trainer.router.replay",
    "--enable-scale-out": None,
    "--enable-sleep-mode": "placement.colocate",
    "--enforce-eager": None,
    "--gpu-memory-utilization": "inference.gpuMemoryUtilization",
    "--help": None,
    "--host": None,
    "--load-format": None,
    "--logprobs-mode": None,
    "--lora-modules": None,
    "--max-cpu-loras": "trainer.lora.slots",
    "--max-lora-rank": "trainer.lora.rank",
    "--max-loras": "trainer.lora.slots",
    "--max-model-len": "inference.maxModelLen",
    "--max-num-seqs": "inference.maxNumSeqs",
    "--middleware": None,
    "--model": "model.name",
    "--port": None,
    "--revision": "model.revision",
    "--root-path": None,
    "--seed": "seed",
    "--served-model-name": None,
    "--ssl-certfile": None,
    "--ssl-keyfile": None,
    "--tensor-parallel-size": "inference.tensorParallel",
    "--trust-remote-code": "model.trustRemoteCode",
    "--uds": None,
    "--weight-transfer-config": "weightSync.transport",
    "--worker-extension-cls": None,
}
"""Flags that RLRun sets from a run's fields, with the field, or None for flags that no field changes: they would disable the access guard,
hide the server or make it exit. They are sorted, so that a flag comes before the flags that it is a prefix of."""
OWNED_SHORT: Mapping[str, str | None] = {"-tp": "inference.tensorParallel", "-dp": "inference.dataParallel", "-h": None}
"""Short forms of owned flags, with their fields."""
_FIELD, _NO_FIELD = "and set ", "because no field of a run changes it"
"""Ends of the message for an owned flag: before the name of its field, and without one."""
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


def owned_flag(argument: str) -> str | None:
    """Return the owned flag that an argument sets, or None. A prefix counts as the flag, because argparse expands prefixes."""
    if not argument.startswith("--"):
        return next((short for short in OWNED_SHORT if argument.startswith(short)), None)
    flag = flag_of(argument)
    return next((owned for owned in OWNED_FLAGS if len(flag) > len("--") and owned.startswith(flag)), None)


def _explain_owned(flag: str) -> str:
    """Return how a run changes an owned flag, as the end of a message."""
    field = {**OWNED_FLAGS, **OWNED_SHORT}[flag]
    return _NO_FIELD if field is None else f"{_FIELD}{field}"


def problem_of_arguments(arguments: Sequence[str]) -> str | None:
    """Return why vLLM's server cannot have these arguments (field, value and fix), or None if it can."""
    for index, argument in enumerate(arguments):
        if (owned := owned_flag(argument)) is not None:
            return f"extraArgs[{index}] ({argument}) is set by RLRun itself; remove it, {_explain_owned(owned)}"
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


def _pairs_cel(fields: Mapping[str, str | None]) -> str:
    """Return flags and their fields as a CEL list of pairs; the field is empty for None."""
    return f"[{','.join(list_cel((flag, field or '')) for flag, field in fields.items())}]"


_FLAG = "a.split('=')[0].replace('_', '-').split('.')[0].replace('--no-', '--', 1)"
_OWNED = (
    f"i < self.extraArgs.size() && [self.extraArgs[i]].exists(a, a.startsWith('--') ? [{_FLAG}].exists(f, f.size() > 2 && "
    f"{list_cel(OWNED_FLAGS)}.exists(o, o.startsWith(f))) : {list_cel(OWNED_SHORT)}.exists(o, a.startsWith(o)))"
)
_FIRST_OWNED = f"variables.indices.filter(i, {_OWNED})[0]"
_HOW_TO_CHANGE = (
    f"[self.extraArgs[{_FIRST_OWNED}]].map(a, a.startsWith('--') ? {_pairs_cel(OWNED_FLAGS)}.filter(o, o[0].startsWith({_FLAG})) : "
    f"{_pairs_cel(OWNED_SHORT)}.filter(o, a.startsWith(o[0])))[0].map(o, o[1] == '' ? '{_NO_FIELD}' : '{_FIELD}' + o[1])[0]"
)
_VALUE_OF_FLAG = (
    "i >= self.extraArgs.size() || self.extraArgs[i].startsWith('-') || "
    "(i > 0 && !(self.extraArgs[i - 1].startsWith('--') && self.extraArgs[i - 1].contains('=')))"
)
_FIRST_STRAY = f"variables.indices.filter(i, !({_VALUE_OF_FLAG}))[0]"

EXTRA_ARGUMENTS_RULES = (
    Rule(
        f"!has(self.extraArgs) || variables.indices.all(i, !({_OWNED}))",
        f"extraArgs[{{{_FIRST_OWNED}}}] ({{self.extraArgs[{_FIRST_OWNED}]}}) is set by RLRun itself; remove it, "
        f"{{{_HOW_TO_CHANGE}}}",
    ),
    Rule(
        f"!has(self.extraArgs) || variables.indices.all(i, {_VALUE_OF_FLAG})",
        f"extraArgs[{{{_FIRST_STRAY}}}] ({{self.extraArgs[{_FIRST_STRAY}]}}) is neither a flag nor a flag's value; "
        f"write --{{self.extraArgs[{_FIRST_STRAY}]}}, or put it after its flag",
    ),
)
"""Admission rules of a block with `extraArgs`."""
