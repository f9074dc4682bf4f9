"""Environment variables that an environment's process receives, in real processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.config.environment_variables import BASICS
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments import EpisodeError, Message, Reply
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.talk import StartError
from rlrun.environments.process.user_code_check import check_subjects
from rlrun.environments.stage import TaskRef
from tests.support.programs import run_program
from tests.support.python_path import before
from tests.support.waiting import UNREACHED_SECONDS

FOLDER = str(Path(__file__).parent / "intruder")
sys.path.insert(0, FOLDER)
from intruder import DEEDS  # noqa: E402

SECRETS = {
    "RLRUN_API_KEY": "k1",
    "RLRUN_PROGRESS_LEASE": "lease",
    "OPENAI_API_KEY": "k2",
    "HF_TOKEN": "k3",
    "HUGGING_FACE_HUB_TOKEN": "k4",
    "AWS_SECRET_ACCESS_KEY": "k5",
    "AWS_REGION": "eu",
    "KUBECONFIG": "/k",
    "TEAM_TOKEN": "k6",
    "SSH_AUTH_SOCK": "/s",
    "PYTHON_KEYRING_TOKEN": "k7",
    "NVIDIA_API_KEY": "k8",
    "HTTP_PROXY_PASSWORD": "k9",
}
USUAL = ("PATH", "HOME", "PYTHONPATH", "LC_ALL", "TZ", "OMP_NUM_THREADS", "HF_HOME", "https_proxy", "VIRTUAL_ENV")


class Echo:
    """Model that returns the prompt."""

    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        return Reply(str(messages[-1]["content"]), "stop")


async def run_deed(name: str, args: Mapping[str, Any] | None = None, variables: tuple[str, ...] = ()) -> Any:
    """Return the result of a deed of the intruder."""
    life = Life(
        Command("intruder:intruder", args or {}, variables=variables),
        Limits(start_seconds=UNREACHED_SECONDS),
        Log(None),
    )
    try:
        await life.start()
        task = TaskRef("train", list(DEEDS).index(name))
        played = await life.play(task, Echo(), timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)
        return played.episode.info["found"]
    finally:
        life.end()


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", before(FOLDER))
    for name in USUAL[3:]:
        monkeypatch.setenv(name, "1")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("who", ["own", "child", "keeper"])
async def test_environment_cannot_read_orchestrator_variables(who: str) -> None:
    found = (await run_deed("variables"))[who]
    if found == "PermissionError":  # Even the allowed variables are unreadable.
        return
    assert set(USUAL) <= set(found)
    assert set(SECRETS) & set(found) == set()


async def test_only_variables_of_the_manifest_are_passed() -> None:
    found = (await run_deed("variables", variables=("AWS_*", "TEAM_TOKEN")))["own"]
    assert set(SECRETS) & set(found) == {"AWS_SECRET_ACCESS_KEY", "AWS_REGION", "TEAM_TOKEN"}


@pytest.mark.parametrize("name", ["RLRUN_API_KEY", "RLRUN_*", "R*", "RL*"])
async def test_api_key_is_never_passed(name: str) -> None:
    found = (await run_deed("variables", {"api_key_env": "RLRUN_API_KEY"}, variables=(name,)))["own"]
    assert set(SECRETS) & set(found) == set()


async def test_key_named_by_an_argument_is_passed() -> None:
    found = (await run_deed("variables", {"judges": [{"reward_args": {"api_key_env": "TEAM_TOKEN"}}]}))["own"]
    assert set(SECRETS) & set(found) == {"TEAM_TOKEN"}


@pytest.mark.parametrize(
    ("id", "args", "expected"),
    [
        ("dataset", {"path": "x", "reward": "judge"}, {"OPENAI_API_KEY"}),
        ("dataset", {"name": "x"}, {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}),
        ("gsm8k", {}, {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}),
        ("gsm8k", {"source": "bundled"}, set()),
        ("gsm8k", {"path": "x"}, set()),
        ("reverse-text", {}, set()),
        ("my.module:dataset", {"name": "x", "reward": "judge"}, set()),
    ],
)
def test_shipped_environments_get_variables_of_their_arguments(
    id: str, args: dict[str, Any], expected: set[str]
) -> None:
    assert Command(id, args).passed(SECRETS).keys() == expected


async def test_error_about_withheld_variable_names_the_field() -> None:
    field = r"TEAM_TOKEN.*environments\[\]\.variables: \[TEAM_TOKEN\]"
    with pytest.raises(EpisodeError, match=field):
        await run_deed("needs_a_variable")
    life = Life(Command("intruder:needy", {}), Limits(start_seconds=UNREACHED_SECONDS), Log(None))
    with pytest.raises(StartError, match=field):
        await life.start()
    life.end()


def test_command_line_check_withholds_same_variables() -> None:
    needy = Command("intruder:needy", {})
    [refusal] = check_subjects([(needy, Limits(start_seconds=UNREACHED_SECONDS))])
    assert refusal is not None
    assert "environments[].variables: [TEAM_TOKEN]" in refusal.message
    [named] = check_subjects(
        [(Command("intruder:needy", {}, variables=("TEAM_TOKEN",)), Limits(start_seconds=UNREACHED_SECONDS))]
    )
    assert named is None


async def test_unset_variable_is_an_error_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEAM_TOKEN")
    with pytest.raises(EpisodeError) as caught:
        await run_deed("needs_a_variable")
    assert "TEAM_TOKEN" in str(caught.value)
    assert "environments[]" not in str(caught.value)


def test_usual_variables_contain_no_secret() -> None:
    kept = Command("reverse-text", {}).passed(
        dict.fromkeys([*SECRETS, *(f"{name}_TOKEN" for name in BASICS if name[-1] != "*")], "x")
    )
    assert kept == {}


def test_worker_starts_with_empty_environment() -> None:
    """A scheduler that sets no variables may start the command line."""
    code = (
        "from rlrun.environments.process.user_code_check import check_subjects\n"
        "from rlrun.environments.process.life import Command, Limits\n"
        "print(check_subjects([(Command('reverse-text', {}), Limits(start_seconds=60))]))"
    )
    done = run_program([sys.executable, "-c", code], env={})
    assert done.stdout.strip() == "[None]", done.stderr


@pytest.mark.parametrize("name", ["RLRUN_API_KEY", "RLRUN_*", "*", "A*B", "TEAM-TOKEN", "A=b", "", "9A", "A\n"])
def test_variable_name_that_exposes_the_key_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"variables\.0"):
        EnvironmentConfig.model_validate({"id": "reverse-text", "variables": [name]})
