"""Problems never contain secrets."""

from __future__ import annotations

import pytest

from rlrun.config.loading.problems import Problem

TOKEN = "hf_" + "abcdefghij" * 3


@pytest.mark.parametrize(
    ("message", "secret"),
    [
        (f'got "{TOKEN}" (a string), expected a number', TOKEN),
        ('got {"HF_TOKEN": "correcthorse"} (a mapping), expected a list', "correcthorse"),
        ("got DB_PASSWORD=correcthorse, expected a mapping", "correcthorse"),
        ("got 'ftp://me:correcthorse@host/x', expected https://", "correcthorse"),
        ("got --api-key correcthorse, expected nothing", "correcthorse"),
    ],
)
def test_problem_holds_no_secret(message: str, secret: str) -> None:
    problem = Problem("run.yaml", "spec.a", message, 3)
    assert secret not in problem.message
    assert secret not in str(problem)
    assert "expected" in problem.message


@pytest.mark.parametrize(
    "message",
    [
        "write maxTokens: 256",
        "RLRUN_API_KEY is not set; export RLRUN_API_KEY=$(openssl rand -hex 16)",
        "write env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: a-keys, key: HF_TOKEN}}}]",
        "kubectl create secret generic a-keys --from-literal=HF_TOKEN=...",
        "imagePullSecrets: got 1, expected a list",
    ],
)
def test_redaction_keeps_fix_unchanged(message: str) -> None:
    assert Problem("run.yaml", "", message).message == message


def test_path_holds_no_token() -> None:
    assert TOKEN not in str(Problem("run.yaml", f"spec.{TOKEN}", "unknown field"))
