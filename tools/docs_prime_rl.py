"""The reference page for users of PRIME-RL: conversion of each key, and of each of its own files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlrun.cli.role_commands import MODELS, load_role
from rlrun.cli.run_layers import EvalConfig, RlConfig, SftConfig, read_layer
from rlrun.config.dialects.prime_rl import orchestrator_keys, run_keys, trainer_keys
from rlrun.config.dialects.rows import Row
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.protocol.files.paths import Role
from tools.docs_resource import NOTE, cells, page
from tools.documented import documentation_rows
from tools.prime_rl_files import File, files

RUNS: dict[str, type[RlConfig]] = {"rl": RlConfig, "sft": SftConfig, "eval": EvalConfig}
ROLES: dict[str, Role] = {role: role for role in MODELS}
_SHOWN = 2
"""Number of reasons for one refused file on the page."""
_SAME_KEYS = ("orchestrator.train.", "orchestrator.source[]", "inference.model.", "inference.vllm.", "source[]")
"""Tables with the keys of another table, which the page lists once."""
_SECTIONS: tuple[tuple[str, str, tuple[Row, ...]], ...] = (
    (
        "The run",
        "At the top of a file of `rl`. Tables such as `ckpt`, `weight_broadcast`, `log`, `wandb` in `[trainer]`, `[orchestrator]` "
        "and `[inference]` have the same keys.",
        run_keys.RUN_ROWS,
    ),
    ("`[trainer]`", "In a file of `sft` or `trainer`, the same keys at its top.", trainer_keys.TRAINER_ROWS),
    (
        "`[orchestrator]`",
        "In a file of `orchestrator`, the same keys at its top. `orchestrator.train` has the same keys below it, and `source` is `env`.",
        orchestrator_keys.ORCHESTRATOR_ROWS,
    ),
    (
        "`[inference]`",
        "In a file of `inference`, the same keys at its top. `inference.model` and `inference.vllm` have the same keys below them; any "
        "other option of vLLM in `inference.vllm` goes to its server unchanged.",
        run_keys.INFERENCE_ROWS,
    ),
    ("`[data]` and `[val]`", "In a file of `sft`.", trainer_keys.DATA_ROWS),
    ("`eval`", "In a file of `eval`; `source` is `env`.", orchestrator_keys.EVALUATION_ROWS),
)


def prime_rl_page() -> str:
    """Return the page on PRIME-RL's keys and files."""
    lines = [
        NOTE,
        "",
        "# Keys and files of PRIME-RL",
        "",
        "`rl`, `sft`, `eval`, `trainer`, `orchestrator` and `inference` accept PRIME-RL's TOML files and options, of v0.3 (January",
        "2026) and of August 2026: `rl @ rl.toml`, `rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml`,",
        "`--trainer.optim.lr 1e-5`, `PRIME_TRAINER__OPTIM__LR=1e-5`. One file may contain names of both projects.",
        "`--dry-run` prints the resulting configuration.",
        "",
        "A key is accepted unchanged, mapped to another field, without effect here (with a note), or refused with its",
        "counterpart or the reason. Main differences:",
        "",
        "- Without `[trainer.loss]` the objective is this project's default, [preset](presets.md) `aipo`; the one of v0.3 is",
        "  `--algorithm.preset masked_is`, today's is `dppo`.",
        "- A file without a model uses PRIME-RL's default, Qwen/Qwen3-0.6B, with a note.",
        "- A file without GPUs runs on CPUs: add `--trainer-gpu-ids 1 --inference-gpu-ids 0`.",
        "- Environments come from verifiers, by their installed name (`verifiers:<name>`).",
        "- Without `max_tokens` a reply may fill the context; a reply of `seq_len` is one token shorter.",
        "- Evaluation during a run uses held-out tasks of its own environments; `rlrun eval` uses others.",
    ]
    seen: set[tuple[str, tuple[str, ...], str]] = set()
    for title, text, rows in _SECTIONS:
        lines += ["", f"## {title}", "", text, "", "| key | here | how |", "|---|---|---|", *_rows(rows, seen)]
    return page([*lines, *_results(), *_documented()])


def _documented() -> Iterator[str]:
    yield from (
        "",
        "## Its documentation",
        "",
        "Examples of its documentation, each in a dry run; `toml`: a table as a file over a small file of the program.",
        "",
        *documentation_rows("PRIME-RL"),
    )


def _rows(rows: Iterable[Row], seen: set[tuple[str, tuple[str, ...], str]]) -> Iterator[str]:
    for row in rows:
        if row.path.startswith(_SAME_KEYS):
            continue
        name = (
            row.path.partition(".")[2] if row.path.startswith(("trainer.", "orchestrator.", "inference.")) else row.path
        )
        key = (name, row.targets, row.fate + row.text)
        if key in seen:
            continue
        seen.add(key)
        targets = ", ".join(f"`{target}`" for target in row.targets)
        here = {"same": targets, "mapped": targets, "ignored": "no effect", "refused": "refused"}[row.fate]
        yield cells(f"`{row.path}`", here, row.text)


def _results() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        results = [(file, *judge(file, Path(folder))) for file in files()]
    yield from ("", "## Their own files", "")
    yield from (
        "Results of `--dry-run` for PRIME-RL's files, from a table of their keys. A file that needs other files, or a model",
        "on the command line, is refused without them.",
        "",
    )
    for era in sorted({file.era for file, *_ in results}):
        of_era = [problems for file, problems, _ in results if file.era == era]
        yield f"- {era}: {sum(not problems for problems in of_era)} of {len(of_era)} start unchanged."
    yield from ("", "| of | file | with | result |", "|---|---|---|---|")
    for file, problems, notices in results:
        yield cells(file.era, f"`{file.path}`", f"`{file.command}`", _result(problems, notices))


def _result(problems: Sequence[Problem], notices: int) -> str:
    if not problems:
        return "starts" + (f", with {notices} notes" if notices > 1 else ", with a note" if notices else "")
    named = [f"`{problem.path}`: {problem.message}" if problem.path else problem.message for problem in problems]
    shown = "; ".join(named[:_SHOWN])
    more = len(problems) - _SHOWN
    return f"refused: {shown}" + (f"; and {more} more" if more > 0 else "")


def judge(file: File, folder: Path) -> tuple[list[Problem], int]:
    """Return problems of a file in its command's dry run, and the number of notices."""
    path = folder / "file.json"
    path.write_text(json.dumps(file.document))
    try:
        if (role := ROLES.get(file.command)) is not None:
            return [], len(load_role(role, MODELS[role], ["@", str(path)], {})[1].notices)
        model = RUNS[file.command]
        given = read_layer(["@", str(path)], {}, model)
        validate_layer(model, given.layer)
    except ConfigError as error:
        return error.problems, 0
    return [], len(given.layer.notices)
