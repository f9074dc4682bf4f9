"""Settings of the team page, and refusal of invalid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.cli.web_pages import run_ui_team
from rlrun.ui.team.team_server import api_url, claims_of


def test_api_url_comes_from_kubernetes_environment() -> None:
    assert api_url({}) is None
    assert api_url({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) == "https://10.96.0.1:443"
    six = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert api_url(six) == "https://[fd00::1]:6443"


def test_claims_are_of_a_namespace() -> None:
    assert claims_of(["a/data=/claims/data", "b/data=/x"]) == {
        ("a", "data"): Path("/claims/data"),
        ("b", "data"): Path("/x"),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--api-server: this process does not run in a pod"),
        (["--api-server", "http://10.0.0.1"], "--api-server: http://10.0.0.1 is not a URL of an API server"),
        (
            ["--api-server", "https://10.0.0.1", "--claim", "data=/x"],
            "--claim: got data=/x, expected NAMESPACE/CLAIM=FOLDER",
        ),
        (
            ["--api-server", "https://10.0.0.1", "--claim", "a/data=x"],
            "--claim: got a/data=x, expected NAMESPACE/CLAIM=FOLDER",
        ),
        (
            ["--api-server", "https://10.0.0.1", "--trusted-proxy", "10.0.0.1/8"],
            "--trusted-proxy: 10.0.0.1/8 has host bits set; use a network such as 10.244.0.0/16, or a single address",
        ),
        (["--api-server", "https://10.0.0.1", "--root-path", "rlrun"], "--root-path: rlrun does not start with /"),
    ],
)
def test_wrong_options_are_refused_by_their_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert run_ui_team(words) == 64
    assert said in capsys.readouterr().err
