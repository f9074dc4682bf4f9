"""Mistakes in commands, arguments and options."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import Mistake, plain

COMMANDS: Sequence[Mistake] = (
    *plain(
        64,
        ("a typo in a command", "rlrun valdiate run.yaml", "'valdiate'", "valdiate", "did you mean validate"),
        ("an unknown command", "rlrun frobnicate", "'frobnicate'", "frobnicate", "known: init, validate"),
        ("an option instead of a command", "rlrun --verbose", "'--verbose'", "--verbose", "known: init, validate"),
        ("no file", "rlrun validate", "FILE", "", "see rlrun validate --help"),
        ("an argument too many", "rlrun render run.yaml two.yaml", "two.yaml", "two.yaml", "see rlrun render --help"),
        ("an argument of version", "rlrun version please", "please", "please", "see rlrun version --help"),
        (
            "a typo in an option",
            "rlrun render run.yaml --outptu-dir x",
            "--outptu-dir",
            "",
            "did you mean --output-dir",
        ),
        (
            "an option without its value",
            "rlrun render run.yaml --output-dir",
            "--output-dir",
            "",
            "needs a value after it",
        ),
        ("a value of a switch", "rlrun local run.yaml --resume=yes", "--resume", "yes", "takes no value"),
        (
            "an empty value",
            "rlrun render run.yaml --output-dir=",
            "--output-dir",
            "got ''",
            "remove --output-dir to use the default",
        ),
    ),
)

OPTIONS: Sequence[Mistake] = (
    *plain(
        64,
        ("a typo in an option of rl", "rl @ run.toml --max-stesp 5", "--max-stesp", "", "did you mean --max-steps"),
        (
            "a typo in a table",
            "rl @ run.toml --trainre.optimizer.lr 1e-5",
            "--trainre.optimizer.lr",
            "",
            "did you mean --trainer.optimizer.lr",
        ),
        ("an option of rl without its value", "rl @ run.toml --max-steps", "--max-steps", "", "needs a value"),
        (
            "an option of rl that eats no option",
            "rl @ run.toml --max-steps --plain",
            "--max-steps",
            "",
            "needs a value",
        ),
        (
            "a text for a number in an option",
            "rl @ run.toml --max-steps ten",
            "--max-steps",
            '"ten"',
            "whole number from 1",
        ),
        (
            "a number out of range in an option",
            "rl @ run.toml --max-steps=-5",
            "--max-steps",
            "-5",
            "whole number from 1",
        ),
        (
            "a comma for a point",
            "rl @ run.toml --trainer.optimizer.lr 0,001",
            "--trainer.optimizer.lr",
            '"0,001"',
            "a number greater than 0",
        ),
        (
            "broken JSON in an option",
            "rl @ run.toml --model.tiny '{layers: 2'",
            "--model.tiny",
            "'{layers: 2'",
            "expected JSON: Expecting property name",
        ),
        (
            "a list's index that is no number",
            "rl @ run.toml --environments.first.group-size 4",
            "--environments.first.group-size",
            "'first'",
            "number from 0",
        ),
        ("a value with = for a switch", "sft sft.yaml --plain=1", "--plain", "1", "takes no value"),
        (
            "a port that is none",
            "rlrun local run.yaml --trainer-port http",
            "--trainer-port",
            "'http'",
            "whole number from 1 to 65535",
        ),
        ("a port out of range", "rlrun local run.yaml --trainer-port 99999", "--trainer-port", "99999", "1 to 65535"),
        ("a negative port", "rlrun local run.yaml --metrics-port=-1", "--metrics-port", "-1", "1 to 65535"),
        ("ports that are none", "rl @ run.toml --inference-port 80,x", "--inference-port", "'80,x'", "8000,8001"),
        ("GPUs that are none", "rlrun local run.yaml --trainer-gpu-ids a", "--trainer-gpu-ids", "'a'", "nvidia-smi -L"),
    ),
    *plain(
        78,
        (
            "more ports than engines",
            "rlrun local run.yaml --inference-port 18000,18001",
            "--inference-port",
            "2 ports",
            "spec.inference.replicas is 1",
        ),
    ),
    Mistake(
        "two values for one field",
        "rl @ run.toml --trainer @ t.toml --orchestrator @ o.toml",
        78,
        "max_steps",
        "got 12",
        "remove one",
        {"t.toml": "max_steps = 11\n", "o.toml": "max_steps = 12\n"},
    ),
    *plain(
        78,
        (
            "a folder to resume that is none",
            "rlrun local run.yaml --resume",
            "--resume",
            "runs/quick",
            "remove --resume",
        ),
    ),
    Mistake(
        "an output folder that holds something",
        "rlrun local run.yaml --output-dir full",
        78,
        "full",
        "not empty",
        "choose another --output-dir",
        {"full/a": ""},
    ),
    *plain(
        10,
        (
            "an output folder that is a file",
            "rlrun local run.yaml --output-dir run.toml",
            "run.toml",
            "",
            "choose another --output-dir",
        ),
        (
            "an output folder below a file",
            "rlrun local run.yaml --output-dir run.toml/x",
            "run.toml/x",
            "",
            "choose another --output-dir",
        ),
    ),
    *plain(
        78,
        (
            "batches to replay that are not there",
            "rlrun local run.yaml --replay nowhere",
            "--replay",
            "nowhere",
            "no folder",
        ),
        ("no data set", "sft --max-steps 3 --model.tiny '{}'", "data", "is not set", "task SFT needs it"),
    ),
    *plain(
        64, ("a data set's option without its value", "sft @ run.toml --data.path", "--data.path", "", "needs a value")
    ),
)
