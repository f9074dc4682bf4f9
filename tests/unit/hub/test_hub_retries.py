"""Requests to an unreachable hub: a run retries, a check of a manifest does not."""

from __future__ import annotations

import time
from pathlib import Path

import huggingface_hub
import pytest

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments.dataset_rows import download_set
from rlrun.environments.process.process_output import passed_variables
from rlrun.hub import fetch
from rlrun.hub.repository import QUICK_VARIABLE
from rlrun.local import user_code
from rlrun.protocol.files.failures import RoleError


@pytest.mark.parametrize(("quick", "requests", "timeout"), [(True, 1, fetch.QUICK_SECONDS), (False, fetch.TRIES, None)])
def test_check_sends_one_request_and_run_retries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: bool, requests: int, timeout: float | None
) -> None:
    timeouts: list[object] = []

    def refuse(*_: object, **options: object) -> None:
        timeouts.append(options["timeout"])
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.delenv(QUICK_VARIABLE, raising=False)
    if quick:
        monkeypatch.setenv(QUICK_VARIABLE, "1")
    with pytest.raises(RoleError, match="cannot be reached"):
        download_set("org/rows", "data.sources[0]")
    assert timeouts == [timeout] * requests


@pytest.mark.parametrize("here", [False, True])
def test_only_checks_for_pods_are_quick(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    variables: list[dict[str, str]] = []

    def load(subjects: list, _notice: object) -> list[None]:
        variables.extend(command.passed({**(command.given or {})}) for command, _ in subjects)
        return [None] * len(subjects)

    monkeypatch.setattr(user_code, "check_subjects", load)
    tiny = TinyModelConfig(warmup_environment="reverse-text")
    user_code.check_user_code([EnvironmentConfig(id="dataset")], AlgorithmConfig(), tiny, here=here)
    assert [QUICK_VARIABLE in given for given in variables] == [not here] * 2
    assert passed_variables({QUICK_VARIABLE: "1"}, ()) == {QUICK_VARIABLE: "1"}
