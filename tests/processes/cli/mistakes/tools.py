"""Mistakes of single roles, and of the commands that evaluate, export and convert."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import Mistake, plain

_KEY = {"RLRUN_API_KEY": "secret"}

ROLES: Sequence[Mistake] = (
    *plain(78, ("a role without key", "orchestrator @ run.json", "RLRUN_API_KEY", "not set", "export RLRUN_API_KEY=")),
    Mistake(
        "an attempt that is none",
        "inference @ run.json",
        78,
        "RLRUN_ATTEMPT",
        "'zero'",
        "whole number from 1",
        {},
        {**_KEY, "RLRUN_ATTEMPT": "zero"},
    ),
    Mistake(
        "a variable that names no field",
        "rl @ run.toml",
        78,
        "RLRUN_TRAINER__OPTIMISER__LR",
        "",
        "did you mean RLRUN_TRAINER__OPTIMIZER__LR",
        {},
        {"RLRUN_TRAINER__OPTIMISER__LR": "1"},
    ),
    Mistake(
        "a variable with a wrong value",
        "rl @ run.toml",
        78,
        "RLRUN_SEED",
        '"x"',
        "whole number of at least 0",
        {},
        {"RLRUN_SEED": "x"},
    ),
    Mistake(
        "recorded batches of a trainer that are not there",
        "trainer @ run.json --replay nowhere",
        64,
        "--replay",
        "nowhere",
        "there is no folder",
        variables=_KEY,
    ),
    *plain(
        64,
        (
            "a measurement's option without --bench",
            "trainer @ run.json --bench.steps 3",
            "--bench.steps",
            "",
            "needs --bench",
        ),
        ("a measurement of no steps", "sft sft.yaml --bench --bench.steps 0", "--bench.steps", "'0'", "at least 1"),
        (
            "a typo in a measurement's option",
            "sft sft.yaml --bench --bench.stesp 3",
            "--bench.stesp",
            "",
            "did you mean --bench.steps",
        ),
    ),
)

TOOLS: Sequence[Mistake] = (
    *plain(
        64,
        ("steps that are none", "eval run.yaml --steps 1,b", "--steps", "'1,b'", "such as 10,20"),
        (
            "a temperature that is none",
            "eval run.yaml --temperature hot",
            "--temperature",
            "'hot'",
            "expected a number",
        ),
        (
            "a temperature out of range",
            "eval run.yaml --temperature=-1",
            "--temperature",
            "-1",
            "expected a number from 0 to 10",
        ),
        ("a share above 1", "synthesize run.yaml --output d.jsonl --base --top-p 2", "--top-p", "'2'", "at most 1"),
        (
            "template arguments that are no JSON",
            "eval run.yaml --chat-template-arguments enable_thinking",
            "--chat-template-arguments",
            "'enable_thinking'",
            "JSON object",
        ),
        (
            "an environment that the run has not",
            "eval run.yaml --environment-ids reverse-txt",
            "--environment-ids",
            "'reverse-txt'",
            "did you mean reverse-text",
        ),
    ),
    Mistake(
        "a URL that is none",
        "eval run.yaml --base --engine-url localhost",
        64,
        "--engine-url",
        "localhost",
        "http://",
        {},
        _KEY,
    ),
    *plain(
        64,
        (
            "a split that is none",
            "synthesize run.yaml --output d.jsonl --split test",
            "--split",
            "'test'",
            "'train', 'eval'",
        ),
        (
            "a reward that is none",
            "synthesize run.yaml --output d.jsonl --min-reward best",
            "--min-reward",
            "'best'",
            "expected a number",
        ),
        (
            "rollouts in a format that is none",
            "synthesize run.yaml --output d.csv",
            "--output",
            "d.csv",
            ".jsonl or .parquet",
        ),
    ),
    Mistake(
        "rollouts over a file",
        "synthesize run.yaml --output d.jsonl",
        64,
        "--output",
        "d.jsonl",
        "choose another name",
        {"d.jsonl": ""},
    ),
    *plain(
        64,
        (
            "a step and the base model",
            "synthesize run.yaml --output d.jsonl --base --step 1",
            "--step",
            "",
            "remove one of them",
        ),
        (
            "the folder of no run",
            "rlrun export nowhere --output model",
            "nowhere",
            "no run.json",
            "not the folder of a run",
        ),
    ),
    Mistake(
        "an export over something",
        "rlrun export run --output full",
        64,
        "--output",
        "full",
        "choose a new folder",
        {"full/a": "", "run/run.json": "-> ../run.json"},
    ),
    *plain(
        64,
        (
            "a step that is no number",
            "rlrun export run --output model --step last",
            "--step",
            "'last'",
            "whole number from 1",
        ),
        ("a negative step", "rlrun export run --output model --step=-3", "--step", "-3", "whole number from 1"),
        (
            "a number format that is none",
            "rlrun export run --output model --dtype int8",
            "--dtype",
            "'int8'",
            "'float32'",
        ),
    ),
    *plain(
        65,
        (
            "rows that are not there",
            "rlrun rows --path nowhere.jsonl --output rows.jsonl",
            "--path",
            "nowhere.jsonl",
            "no file or folder",
        ),
    ),
    *plain(
        64,
        (
            "rows of two sources",
            "rlrun rows --path a.jsonl --name org/set --output rows.jsonl",
            "--name",
            "",
            "not allowed with",
        ),
        ("rows of no source", "rlrun rows --output rows.jsonl", "--path", "", "required"),
        (
            "a layout that is none",
            "rlrun rows --path a.jsonl --layout gsm8 --output rows.jsonl",
            "--layout",
            "'gsm8'",
            "gsm8k",
        ),
    ),
    Mistake(
        "a broken row to convert",
        "rlrun rows --path a.jsonl --output rows.jsonl",
        65,
        "a.jsonl",
        "line 1",
        "Expecting property name",
        {"a.jsonl": "{\n"},
    ),
    Mistake(
        "a revision of a file",
        "rlrun rows --path a.jsonl --revision main --output rows.jsonl",
        64,
        "--revision",
        "(main)",
        "remove revision",
        {"a.jsonl": "{}\n"},
    ),
    Mistake(
        "a tiny model over something", "rlrun tiny-model full", 64, "full", "", "choose a new folder", {"full/a": ""}
    ),
    *plain(
        64,
        ("a tiny model without folder", "rlrun tiny-model --layers 2", "DIR", "", "write the folder first"),
        ("a tiny model of too many layers", "rlrun tiny-model new --layers 99", "--layers", "99", "from 1 to 32"),
    ),
    *plain(
        10,
        (
            "a tiny model below a file",
            "rlrun tiny-model run.yaml/new",
            "run.yaml/new",
            "Not a directory",
            "choose another folder",
        ),
    ),
)
