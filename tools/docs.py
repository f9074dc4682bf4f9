"""`python -m tools.docs [--write]`: files generated from the models: reference pages, CRD and its chart.

Without `--write`, the exit code is 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic.alias_generators import to_camel

from rlrun.cli import (
    change_runs,
    completion,
    convert,
    copies,
    data_files,
    doctor,
    env,
    evaluation,
    export,
    installation,
    logs,
    main,
    plots,
    replay_runs,
    show_runs,
    validate,
    version,
    web_pages,
)
from rlrun.config.algorithm.names import (
    ADVANTAGE_ENTRIES,
    AGGREGATIONS,
    CORRECTION_OPTIONS,
    LOSS_ENTRIES,
    PRESETS,
    PROXIMAL_METHODS,
    Entry,
    algorithm_inputs,
    default_aggregation,
)
from rlrun.local import local_command as local
from rlrun.runtime import exit_codes
from tools.crd import crd_files
from tools.docs_algorithms import algorithm_pages
from tools.docs_convert import convert_page
from tools.docs_models import models_page
from tools.docs_options import given, option_table
from tools.docs_prime_rl import prime_rl_page
from tools.docs_python import python_page
from tools.docs_resource import NOTE, cells, page, resource_page, status_page

ROOT = Path(__file__).parents[1]
REFERENCE = "docs/reference"


_OTHER_SUBCOMMANDS = (
    "",
    "### `rlrun local`",
    "",
    "Starts all roles of a manifest on this machine.",
    "",
    "```text",
    local.local_parser().format_help().rstrip(),
    "```",
    "",
    "`validate`, `render`, `local`, `eval` and `synthesize` accept the fields of `spec` as options after the manifest:",
    "`rlrun local run.yaml --max-steps 20 --trainer.optimizer.lr 1e-5`. Their own options have precedence over a field of the same name.",
    "",
    "### `rlrun rl`, `rlrun sft`, `rlrun trainer`, `rlrun orchestrator`, `rlrun inference`",
    "",
    "The commands below, under one name.",
    "",
    "### `rlrun tiny-model DIR`",
    "",
    "Creates a tiny model; its options are the fields of [`spec.model.tiny`](rlrun.md#specmodeltiny), such as",
    "`--hidden-size 64`. A folder that is not empty is refused.",
    "",
)

_LOCAL_RUNS = (
    "## `rl`",
    "",
    "A local run from configuration files, in one file or one per role:",
    "",
    "```text",
    "rl @ run.toml [--max-steps 10 ...]",
    "rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml [--max-steps 10 ...]",
    "rl @ run.yaml [--max-steps 10 ...]",
    "```",
    "",
    "The files contain the fields of [`spec`](rlrun.md#spec), and also `name` and `output_dir`. Fields of the whole run in",
    "a role's file (`model`, `max_steps`, `seq_len`, `environments`, ...) apply to all roles. Two different values in one",
    "file, or in parallel files of several roles, are an error that names both. A manifest may replace a file. Files and",
    "options may also use [PRIME-RL's names](prime-rl.md). `rl` accepts the options of `rlrun local` too.",
    "",
    "## `sft`",
    "",
    "Supervised fine-tuning, from a manifest (as `rlrun local`) or from files and options (as `rl`):",
    "",
    "```text",
    "sft run.yaml [--output-dir DIR] [--resume]",
    "sft @ run.toml [--data.path chats.jsonl | --data.name org/chats] [--data.split train] [--max-steps 10 ...]",
    "```",
    "",
    "`data.path`, `data.name` and `data.split` are the only data set; `data.seq_len` in a file means `seq_len`.",
    "",
)

_ROLES_AND_BENCH = (
    "## `trainer`, `orchestrator`, `inference`",
    "",
    "```text",
    "trainer @ run.json [--optimizer.lr 1e-5 ...]",
    "trainer @ trainer.toml --model.name Qwen/Qwen3-0.6B",
    "```",
    "",
    "Start one role by hand. The command reads the role's part of a `run.json` (printed by `rlrun render`). `RLRUN_API_KEY`",
    "contains the common secret of all roles of the run, `RLRUN_ATTEMPT` the attempt's number (default 1).",
    "[Roles by hand](../cli.md#roles-by-hand) lists the optional fields of a file.",
    "",
    "## `--bench`",
    "",
    "`rlrun local RUN.yaml --bench`, and `trainer`, `rl` and `sft` with `@ FILE --bench`, measure the trainer's step on fake data, with",
    "random weights of the model's shape, and print a table of MFU, tokens/s, step time (mean ± standard deviation) and peak memory.",
    "MFU counts 6·active parameters + 12·layers·hidden size·T FLOPs per token of a sequence of T tokens; it is `-` on a CPU,",
    "whose peak is not known. `--bench.seq-lens 8192,16384` measures these instead of `seqLen`; `--bench.rows` are micro-batches per",
    "rank and step (1), `--bench.steps` the measured steps (5) after `--bench.warmup` (2), `--bench.output FILE` keeps the",
    "values as JSON.",
    "",
)

_SOURCES = (
    "## Where values come from",
    "",
    "Sources of values, in the order of precedence:",
    "",
    "1. the command line: `--trainer.optimizer.lr 1e-5`, `--batch-size 8` or `--batch_size=8`, `--environments.0.group-size 4`,",
    "   `--flag` and `--no-flag`, objects and lists as JSON; `--evaluation` turns an optional block on, `--no-evaluation` off;",
    "2. configuration files, `@ a.toml @ b.yaml`: TOML, YAML or JSON; a later file wins, objects are merged, lists are replaced;",
    "3. the environment: `RLRUN_TRAINER__OPTIMIZER__LR=1e-5`, or `PRIME_` instead of `RLRUN_`; a note names an unknown",
    "   variable with this prefix;",
    "4. defaults.",
    "",
    "`--dry-run` prints the result as JSON and stops; `--help` lists every option. Each problem is one line: the source, the",
    "field as written, the value, and the expected value.",
    "",
)


@cache
def pages() -> dict[str, str]:
    """Return every reference page as text, by file name."""
    return {
        "rlrun.md": resource_page(),
        "status.md": status_page(),
        "presets.md": presets_page(),
        "cli.md": cli_page(),
        "convert.md": convert_page(),
        "prime-rl.md": prime_rl_page(),
        "python.md": python_page(),
        "models.md": models_page(),
    }


@cache
def generated_files() -> dict[str, str]:
    """Return every generated file as text, by path from the repository's root."""
    return {f"{REFERENCE}/{name}": text for name, text in pages().items()} | algorithm_pages() | crd_files()


def presets_page() -> str:
    """Return the page of presets, with every advantage and loss and its options."""
    lines = [
        NOTE,
        "",
        "# Presets, advantages and losses",
        "",
        "`spec.algorithm.preset` names an advantage, a loss, how the tokens' losses become one number, and filters. The other fields of",
        "`spec.algorithm` replace its parts: `algorithm: {preset: aipo, loss: {name: aipo, options: {delta: 4.0}}}`. A name may also be an",
        "import path `package.module:function` of your own: a loss is called as `function(LossInputs, **options)` and returns a",
        "`TokenLoss` (see `rlrun.algorithms`), an advantage as `function(RewardGroups, **options)`, with numpy arrays, and returns one",
        "number per rollout (see `rlrun.advantages`).",
        "`environments[].algorithm` replaces the parts for one environment, all but the models and the bounds of staleness.",
        "",
        "Notation: t, i, o and ref are the log-probabilities of a token under the policy that is trained, the engine that sampled it, the",
        "proximal and the reference policy; ρ = exp(t - i); A is the advantage; sg stops the gradient; d = e^t - e^i.",
        "",
        "## Presets",
        "",
        "| preset | advantage | loss | aggregation | filters | needs | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, preset in PRESETS.items():
        missing = algorithm_inputs("loss", preset.loss, preset.loss_options) | algorithm_inputs(
            "advantage", preset.advantage, preset.advantage_options
        )
        lines.append(
            cells(
                f"`{name}`",
                f"`{preset.advantage}`{given(preset.advantage_options)}",
                f"`{preset.loss}`{given(preset.loss_options)}",
                f"`{preset.aggregation or default_aggregation(preset.loss, preset.loss_options)}`",
                given({to_camel(key): value for key, value in preset.filters.items()}).strip(),
                ", ".join(missing),
                preset.description,
            )
        )
    for title, table in (("Advantages", ADVANTAGE_ENTRIES), ("Losses", LOSS_ENTRIES)):
        lines += ["", f"## {title}"]
        for name, entry in table.items():
            lines += _algorithm(name, entry)
    lines += _named(
        "Aggregations", "`algorithm.aggregation`: how the losses of the tokens become one number.", AGGREGATIONS
    )
    lines += _named(
        "Proximal policies",
        "`algorithm.proximal`: what `ppo`, `decoupled_ppo`, `gspo`, `cispo` and `sapo` keep near.",
        PROXIMAL_METHODS,
    )
    lines += [
        *_heading("Correction"),
        "`algorithm.correction` multiplies the loss of each token, to correct for an engine that disagrees with the trainer about the same",
        "tokens. x = o - i, or t - i without a proximal policy. A token that is masked stays in the denominator.",
        "",
    ]
    lines += option_table(CORRECTION_OPTIONS)
    return page(lines)


def _heading(title: str) -> list[str]:
    return ["", f"## {title}", ""]


def _named(title: str, text: str, table: Mapping[str, str]) -> list[str]:
    rows = [cells(f"`{name}`", meaning) for name, meaning in table.items()]
    return [*_heading(title), text, "", "| name | meaning |", "|---|---|", *rows]


def _algorithm(name: str, entry: Entry) -> Iterable[str]:
    yield from ("", f"### `{name}`", "", f"{entry.summary}.")
    if entry.needs:
        yield from ("", f"Needs a {entry.needs} model.")
    if entry.options:
        yield from ("", *option_table(entry.options))


def cli_page() -> str:
    """Return the page of command lines, the order of sources and the exit codes."""
    lines = [NOTE, "", "# Command lines", "", "## `rlrun`", "", "```text", main.usage(), "```"]
    commands = {
        "init": installation.init_parser(),
        "crd": installation.crd_parser(),
        "charts": installation.charts_parser(),
        "validate": validate.validate_parser(),
        "fit": validate.fit_parser(),
        "render": validate.render_parser(),
        "convert": convert.convert_parser(),
        "export": export.export_parser(),
        "env": env.env_parser(),
        "env try": env.try_parser(),
        "env install": env.install_parser(),
        "doctor": doctor.doctor_parser(),
        "track": export.track_parser(),
        "get": show_runs.get_parser(),
        "status": show_runs.status_parser(),
        "why": show_runs.why_parser(),
        "watch": show_runs.watch_parser(),
        "logs": logs.logs_parser(),
        "rollouts": copies.rollouts_parser(),
        "compare": plots.compare_parser(),
        "ui": web_pages.ui_parser(),
        "debug": copies.debug_parser(),
        "plot": plots.plot_parser(),
        "cost": plots.cost_parser(),
        "replay": replay_runs.replay_parser(),
        "fork": replay_runs.fork_parser(),
        "pull": copies.pull_parser(),
        "put": data_files.put_parser(),
        "suspend": change_runs.suspend_parser(),
        "resume": change_runs.resume_parser(),
        "restart": change_runs.restart_parser(),
        "scale": change_runs.scale_parser(),
        "set": change_runs.set_parser(),
        "completion": completion.completion_parser(),
        "version": version.version_parser(),
        "eval": evaluation.eval_parser(),
        "synthesize": evaluation.synthesize_parser(),
    }
    for name, parser in commands.items():
        lines += ["", f"### `rlrun {name}`", "", "```text", parser.format_help().rstrip(), "```"]
    return page([*lines, *_OTHER_SUBCOMMANDS, *_LOCAL_RUNS, *_ROLES_AND_BENCH, *_SOURCES, *_exit_codes()])


def _exit_codes() -> list[str]:
    codes = [
        (exit_codes.OK, "the run is complete, or the command succeeded"),
        (exit_codes.FAILURE, "an error that a restart may repair"),
        (exit_codes.STORAGE, "the volume refuses to write (full, read-only)"),
        (exit_codes.USAGE, "the command line is wrong"),
        (exit_codes.DATA, "data is wrong: a model folder without weights, errors that dominate"),
        (exit_codes.UNAVAILABLE, "a port is in use, or a device is missing"),
        (exit_codes.CONFIGURATION, "the configuration is wrong"),
        (exit_codes.INTERRUPTED, "a signal has ended the command (Ctrl-C)"),
    ]
    return [
        "## Exit codes",
        "",
        "| code | meaning |",
        "|---|---|",
        *(cells(str(code), meaning) for code, meaning in codes),
        "",
        "64 to 78 are permanent: a restart cannot help.",
    ]


def run(argv: Sequence[str] | None = None) -> int:
    """Write the files, or report outdated ones."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs", description="The files that follow from the models: reference pages and CRD."
    )
    parser.add_argument("--write", action="store_true", help="write the files instead of comparing them")
    parser.add_argument("--check", action="store_false", dest="write", help="compare them (the default)")
    parser.add_argument("--folder", type=Path, default=ROOT, help="root of the repository")
    options = parser.parse_args(argv)
    code = exit_codes.OK
    for name, text in generated_files().items():
        path: Path = options.folder / name
        if options.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            continue
        now = path.read_text() if path.is_file() else ""
        if now != text:
            changes = difflib.unified_diff(
                now.splitlines(), text.splitlines(), str(path), "generated", lineterm="", n=0
            )
            print(f"{path} is out of date; run python -m tools.docs --write", *list(changes)[:20], sep="\n")
            code = exit_codes.FAILURE
    return code


if __name__ == "__main__":
    sys.exit(run())
