"""Mistakes from a seeded walk over all fields and commands; the message for each was unhelpful when it was found."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import (
    SPEC,
    VALIDATE,
    Files,
    Mistake,
    field_of_spec,
    plain,
    text,
)

_TOKEN = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
_PASSWORD = "correct-horse-22"
_KEY = "0123456789abcdef0123456789abcdef01234567"
_Row = tuple[str, str, str, str, str] | tuple[str, str, str, str, str, tuple[str, str]]


def _make_spec_mistakes(*rows: _Row, hidden: str = "", notice: bool = False) -> list[Mistake]:
    """Mistakes in one line of `spec`: description, line, place below `spec`, value, fix, and the text that the fix replaces."""
    return [
        field_of_spec(what, line, f"spec.{place}", value, fix, *repair, hidden=hidden, notice=notice)
        for what, line, place, value, fix, *repair in rows
    ]


def _make_command_mistakes(files: Files, *rows: tuple[int, str, str, str, str, str]) -> list[Mistake]:
    """Mistakes of a command line with files: exit code, description, command line, place, value and fix."""
    return [Mistake(what, words, code, place, value, fix, files) for code, what, words, place, value, fix in rows]


_OBJECTIVE = "environments: [{id: reverse-text, algorithm: {correction: %s}}]"
_FIELDS = _make_spec_mistakes(
    (
        "a fraction in an environment's objective",
        _OBJECTIVE % "{low: 1/2}",
        "environments[0].algorithm.correction.low",
        '"1/2"',
        "expected a number",
    ),
    (
        "a word in an environment's objective",
        _OBJECTIVE % "{high: small}",
        "environments[0].algorithm.correction.high",
        '"small"',
        "expected a number",
    ),
    (
        "a typo in an environment's objective",
        _OBJECTIVE % "{action: mask, measure: raito}",
        "environments[0].algorithm.correction.measure",
        "raito",
        "measure: ratio",
        ("measure: raito", "measure: ratio"),
    ),
    (
        "a line break in a name",
        'tracking: {trackio: {project: "a\\nb"}}',
        "tracking.trackio.project",
        "a\\nb",
        "project: ab",
        ('project: "a\\nb"', "project: ab"),
    ),
    (
        "a field of a block without fields",
        "tracking: {tensorboard: {a: true}}",
        "tracking.tensorboard.a",
        "",
        "remove a",
        ("a: true", ""),
    ),
    (
        "a step without its policy",
        "checkpoint: {resume: {step: 10}}",
        "checkpoint.resume",
        "step (10)",
        "set policy to Step or remove step",
        ("step: 10", ""),
    ),
    (
        "a policy without its step",
        "checkpoint: {resume: {policy: Step}}",
        "checkpoint.resume",
        "policy Step",
        "set step, or remove policy",
        ("policy: Step", ""),
    ),
    (
        "bounds in the wrong order",
        "algorithm: {correction: {action: mask, low: 5.0, high: 0.5}}",
        "algorithm.correction",
        "low (5.0)",
        "lower low or raise high",
    ),
    (
        "an assignment as a variable's name",
        'trainer: {env: [{name: my-var=1, value: "1"}]}',
        "trainer.env[0].name",
        "my-var=1",
        "name: my-var-1",
        ("name: my-var=1", "name: my-var-1"),
    ),
    (
        "copies to a web address",
        "storage: {mirror: {url: https://s3.example.com/b}}",
        "storage.mirror.url",
        "https://s3.example.com/b",
        "url: s3://BUCKET/FOLDER",
    ),
    (
        "a tracker's host and port",
        "tracking: {mlflow: {uri: mlflow:5000}}",
        "tracking.mlflow.uri",
        "mlflow:5000",
        "uri: http://mlflow:5000",
        ("uri: mlflow:5000", "uri: http://mlflow:5000"),
    ),
    (
        "a flag and its value in one item",
        "inference: {extraArgs: [--max-logprobs 5]}",
        "inference.extraArgs[0]",
        "--max-logprobs 5",
        "--max-logprobs=5",
        ("--max-logprobs 5", "--max-logprobs=5"),
    ),
    (
        "the run as its own guest",
        "trainer: {guests: [quick], lora: {slots: 2}}",
        "trainer.guests[0]",
        "quick",
        "remove it",
        ("guests: [quick], ", ""),
    ),
    (
        "the run as its own host",
        "trainer: {sharedWith: quick, lora: {rank: 8}}",
        "trainer.sharedWith",
        "quick",
        "remove it",
        ("sharedWith: quick, ", ""),
    ),
)
_EGRESS, _TEMPLATE = "networkPolicy.extraEgress[0]", "trainer.podTemplate"
_OBJECTS = _make_spec_mistakes(
    (
        "a port by its name",
        "networkPolicy: {extraEgress: [{ports: [https]}]}",
        _EGRESS,
        "https",
        "expected a mapping with port",
    ),
    (
        "a port as a number",
        "networkPolicy: {extraEgress: [{ports: [443]}]}",
        _EGRESS,
        "443",
        "ports: [{port: 443}]",
        ("ports: [443]", "ports: [{port: 443}]"),
    ),
    (
        "one port outside a list",
        "networkPolicy: {extraEgress: [{ports: {port: 443}}]}",
        _EGRESS,
        "port: 443",
        "expected a list",
    ),
    (
        "a CIDR outside ipBlock",
        "networkPolicy: {extraEgress: [{cidr: 10.0.0.0/8}]}",
        _EGRESS,
        "cidr",
        "known: to, ports",
    ),
    (
        "a peer in small letters",
        "networkPolicy: {extraEgress: [{to: [{ipblock: {cidr: 10.0.0.0/8}}]}]}",
        _EGRESS,
        "ipblock",
        "ipBlock",
        ("ipblock", "ipBlock"),
    ),
    (
        "containers outside a template's spec",
        "trainer: {podTemplate: {containers: [{name: trainer}]}}",
        _TEMPLATE,
        "containers",
        "podTemplate: {spec: {containers: [{name: trainer}]}}",
        ("podTemplate: {containers: [{name: trainer}]}", "podTemplate: {spec: {containers: [{name: trainer}]}}"),
    ),
    (
        "a container of another name",
        "trainer: {podTemplate: {spec: {containers: [{name: main}]}}}",
        _TEMPLATE,
        "main",
        "name: trainer",
        ("name: main", "name: trainer"),
    ),
    (
        "a container without a name",
        "trainer: {podTemplate: {spec: {containers: [{image: a}]}}}",
        _TEMPLATE,
        "containers[0]",
        "is named trainer",
    ),
    (
        "volumes of a template as a mapping",
        "trainer: {podTemplate: {spec: {volumes: {a: b}}}}",
        _TEMPLATE,
        "{a: b}",
        "expected a list",
    ),
    (
        "a volume of a template by its name",
        "trainer: {podTemplate: {spec: {volumes: [scratch]}}}",
        _TEMPLATE,
        "scratch",
        "expected a mapping",
    ),
    (
        "variables of a template as a mapping",
        "trainer: {podTemplate: {spec: {containers: [{name: trainer, env: {A: b}}]}}}",
        _TEMPLATE,
        "{A: b}",
        "expected a list",
    ),
    (
        "a template's spec as a list",
        "trainer: {podTemplate: {spec: [{name: trainer}]}}",
        _TEMPLATE,
        "[{name: trainer}]",
        "expected a mapping",
    ),
)
_WITHOUT_EFFECT = _make_spec_mistakes(
    (
        "checkpoints to keep without checkpoints",
        "checkpoint: {enabled: false, keepInterval: 10}",
        "checkpoint.keepInterval",
        "10",
        "remove one of them",
    ),
    (
        "an interval without checkpoints",
        "checkpoint: {enabled: false, interval: 5}",
        "checkpoint.interval",
        "5",
        "remove one of them",
    ),
    notice=True,
)
_SECRETS = (
    *_make_spec_mistakes(
        (
            "a password in MLflow's address",
            f"tracking: {{mlflow: {{uri: 'https://me:{_PASSWORD}@mlflow:5000'}}}}",
            "tracking.mlflow.uri",
            "",
            "uri: https://mlflow:5000",
        ),
        hidden=_PASSWORD,
    ),
    *_make_spec_mistakes(
        (
            "a key in W&B's address",
            f"tracking: {{wandb: {{baseUrl: 'https://api:{_KEY}@wandb.local'}}}}",
            "tracking.wandb.baseUrl",
            "",
            "baseUrl: https://wandb.local",
        ),
        hidden=_KEY,
    ),
    Mistake(
        "a token in a manifest's address",
        f"rlrun local https://me:{_TOKEN}@host/run.yaml",
        78,
        "https://",
        "@host",
        "download it first",
        hidden=_TOKEN,
    ),
)
_TEXTS = (
    text(
        "content behind the end of a document", SPEC + "...\nmaxSteps: 3\n", "run.yaml:9", "...", "remove the line ..."
    ),
    text(
        "a directive without a separator",
        "%YAML 1.2\n" + SPEC,
        "run.yaml:1",
        "%YAML 1.2",
        "remove it",
        ("%YAML 1.2\n", ""),
    ),
    Mistake(
        "another object beside the run",
        VALIDATE,
        0,
        "run.yaml",
        "Secret",
        "is ignored",
        {"run.yaml": SPEC + "---\nkind: Secret\n"},
        notice=True,
    ),
)
_COMMANDS = (
    *plain(
        64,
        ("a manifest instead of a run", "rlrun why run.yaml", "RUN", "run.yaml", "runs/quick"),
        ("manifests instead of runs", "rlrun compare run.yaml sft.yaml", "RUN", "run.yaml", "runs/quick"),
        ("a manifest to replay", "rlrun replay run.yaml --step 1", "RUN", "run.yaml", "runs/quick"),
        ("a manifest's cost", "rlrun cost run.yaml", "RUN", "run.yaml", "runs/quick"),
        ("a manifest's logs", "rlrun logs run.yaml --role trainer", "RUN", "run.yaml", "runs/quick"),
        ("a file of another kind instead of a run", "rlrun status run.toml", "RUN", "run.toml", "runs/NAME"),
        ("a run before its file", "rlrun put quick run.yaml", "FILE", "quick", "rlrun put run.yaml quick"),
        (
            "an output before its input",
            "rlrun convert -o run.toml out.yaml",
            "out.yaml",
            "run.toml",
            "rlrun convert run.toml -o out.yaml",
        ),
        (
            "an output before its input, to be replaced",
            "rlrun convert --force -o run.toml out.yaml",
            "out.yaml",
            "run.toml",
            "rlrun convert run.toml -o out.yaml",
        ),
        ("the beginning of an option", "rlrun fit run.yaml --gpu 80Gi", "--gpu", "", "--gpu-memory or --gpu-product"),
        (
            "arguments as assignments",
            "rlrun env try reverse-text --args length=5",
            "--args",
            "length=5",
            """write --args '{"length": 5}'""",
        ),
        (
            "an export of no run",
            "rlrun export nowhere --output model.safetensors",
            "nowhere",
            "no run.json",
            "runs/NAME",
        ),
    ),
    *plain(
        78,
        ("a manifest to convert", "rlrun convert run.yaml -o out.yaml", "run.yaml", "", "rlrun validate run.yaml"),
        ("a manifest of another task", "sft run.yaml", "spec.task", "RL", "rlrun local run.yaml"),
        ("a pattern that the shell left alone", "rlrun validate 'r*.yaml'", "r*.yaml", "", "such as run.yaml"),
        (
            "a web address as manifest",
            "rlrun validate https://example.com/run.yaml",
            "https://example.com/run.yaml",
            "",
            "download it first",
        ),
    ),
    *_make_command_mistakes(
        {"stuff/mine.yaml": SPEC},
        (78, "a folder with a manifest", "rlrun eval stuff", "stuff", "is a folder", "stuff/mine.yaml"),
    ),
    *_make_command_mistakes(
        {"stuff/run.json": "{}"},
        (
            64,
            "a bundle in a folder that is not there",
            "rlrun debug stuff --file no/where.tar.gz",
            "--file",
            "no",
            "create it first",
        ),
    ),
)

NEWCOMERS: Sequence[Mistake] = (*_FIELDS, *_OBJECTS, *_WITHOUT_EFFECT, *_SECRETS, *_TEXTS, *_COMMANDS)
