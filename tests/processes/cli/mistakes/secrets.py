"""Secrets in manifests and on command lines: no message shows one, and each names the right place for it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import SPEC, Mistake, field_of_spec

TOKEN = "hf_" + "abcdefghij" * 3
"""Text in the format of a token; not a real token."""


def _secret(
    what: str,
    line: str,
    place: str,
    value: str,
    fix: str,
    repair: tuple[str, str] | None = None,
    *,
    notice: bool = False,
    hidden: str = TOKEN,
) -> Mistake:
    return field_of_spec(what, line, place, value, fix, repair, hidden=hidden, notice=notice)


SECRETS: Sequence[Mistake] = (
    _secret(
        "a token in a mapping of variables",
        f"trainer: {{env: {{HF_TOKEN: {TOKEN}}}}}",
        "spec.trainer.env",
        "HF_TOKEN",
        "env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: quick-keys, key: HF_TOKEN}}}]",
        (
            f"env: {{HF_TOKEN: {TOKEN}}}",
            "env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: quick-keys, key: HF_TOKEN}}}]",
        ),
    ),
    _secret(
        "a password in a mapping of variables",
        "trainer: {env: {DB_PASSWORD: correcthorse}}",
        "spec.trainer.env",
        "DB_PASSWORD",
        "secretKeyRef",
        hidden="correcthorse",
    ),
    _secret(
        "a password in an assignment",
        "trainer: {env: [DB_PASSWORD=correcthorse]}",
        "spec.trainer.env[0]",
        "DB_PASSWORD",
        "secretKeyRef",
        hidden="correcthorse",
    ),
    _secret(
        "a token by its name",
        f"trainer: {{env: [{{HF_TOKEN: {TOKEN}}}]}}",
        "spec.trainer.env[0]",
        "HF_TOKEN",
        "secretKeyRef",
    ),
    _secret(
        "a token as a list",
        f"trainer: {{env: [{{name: HF_TOKEN, value: [{TOKEN}]}}]}}",
        "spec.trainer.env[0].value",
        "",
        "secretKeyRef",
    ),
    _secret(
        "a number for a password",
        "trainer: {env: [{name: DB_PASSWORD, value: 73519224}]}",
        "spec.trainer.env[0].value",
        "DB_PASSWORD",
        "valueFrom",
        hidden="73519224",
    ),
    _secret(
        "a token instead of a Secret's name",
        f"trainer: {{env: [{{name: HF_TOKEN, valueFrom: {{secretKeyRef: {{name: {TOKEN}, key: token}}}}}}]}}",
        "secretKeyRef.name",
        "",
        "the name of a Kubernetes object",
    ),
    _secret(
        "a token instead of valueFrom",
        f"trainer: {{env: [{{name: HF_TOKEN, valueFrom: {TOKEN}}}]}}",
        "valueFrom",
        "",
        "secretKeyRef",
    ),
    _secret("a token as an unknown field", f"hfToken: {TOKEN}", "spec.hfToken", "", "env"),
    _secret("a token as a field's name", f"{TOKEN}: 1", "spec", "", "unknown field"),
    _secret("a token as a number of steps", f"maxSteps: {TOKEN}", "spec.maxSteps", "", "a whole number"),
    _secret(
        "a token in a model's address",
        f"model: {{name: https://user:{TOKEN}@huggingface.co/a/b}}",
        "spec.model.name",
        "",
        "name: a/b",
    ),
    _secret(
        "a password in a tracker's address",
        "tracking: {wandb: {baseUrl: 'ftp://user:correcthorse@host'}}",
        "spec.tracking.wandb.baseUrl",
        "",
        "https://",
        hidden="correcthorse",
    ),
    _secret(
        "a token in an engine's argument",
        f"inference: {{extraArgs: ['--api-key', {TOKEN}]}}",
        "spec.inference",
        "extraArgs[0] (--api-key)",
        "remove",
    ),
    _secret(
        "a token in clear text",
        f"trainer: {{env: [{{name: HF_TOKEN, value: {TOKEN}}}]}}",
        "spec.trainer.env[0]",
        "HF_TOKEN",
        "valueFrom: {secretKeyRef: {name: quick-keys, key: HF_TOKEN}}",
        (f"value: {TOKEN}", "valueFrom: {secretKeyRef: {name: quick-keys, key: HF_TOKEN}}"),
        notice=True,
    ),
    _secret(
        "a token under a harmless name",
        f"orchestrator: {{env: [{{name: EXTRA, value: {TOKEN}}}]}}",
        "spec.orchestrator.env[0]",
        "EXTRA",
        "valueFrom: {secretKeyRef: {name: quick-keys, key: EXTRA}}",
        (f"value: {TOKEN}", "valueFrom: {secretKeyRef: {name: quick-keys, key: EXTRA}}"),
        notice=True,
    ),
    Mistake(
        "a token as an option's value",
        f"rl @ run.toml --max-steps {TOKEN}",
        64,
        "--max-steps",
        "",
        "whole number",
        hidden=TOKEN,
    ),
    Mistake(
        "a token as an unknown option",
        f"rlrun validate run.yaml --hf-token {TOKEN}",
        64,
        "--hf-token",
        "",
        "unknown option",
        hidden=TOKEN,
    ),
    Mistake(
        "a token in a variable",
        "rl @ run.toml",
        78,
        "RLRUN_SEED",
        "",
        "whole number",
        {},
        {"RLRUN_SEED": TOKEN},
        hidden=TOKEN,
    ),
    Mistake(
        "a token in a broken file",
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        "",
        "hf_token: ",
        {"run.yaml": SPEC + f"  hf_token={TOKEN}\n"},
        hidden=TOKEN,
    ),
)
