"""Sources of environment packages in the forms that users write."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import installation
from rlrun.environments.installation import WORKER_REQUIREMENT, Installed, InstallError, Source, source_of

ROOT = Path(__file__).parents[3]
HUB = "https://hub.example.org/{owner}/simple/"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("word-chain", Source("word-chain", "word-chain")),
        ("word-chain==1.2", Source("word-chain", "word-chain==1.2")),
        ("word.chain[tools]>=1,<2", Source("word.chain", "word.chain[tools]>=1,<2")),
        ("word-chain @ https://x.example.org/w.whl", Source("word-chain", "word-chain @ https://x.example.org/w.whl")),
        ("ann/word-chain", Source("word-chain", "word-chain", "https://hub.example.org/ann/simple/")),
        ("ann/word-chain@1.2", Source("word-chain", "word-chain==1.2", "https://hub.example.org/ann/simple/")),
    ],
)
def test_source_becomes_pip_requirement(
    text: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word-chain").mkdir()  # a word refers to a folder only if it is written as a path
    assert source_of(text, HUB) == source


def test_files_and_folders_are_named_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wheel, folder = tmp_path / "word_chain-1.2-py3-none-any.whl", tmp_path / "envs" / "chain"
    wheel.touch()
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "word-chain"\n')
    assert source_of(wheel.name, None) == Source("word_chain", str(wheel))
    assert source_of("envs/chain", None) == Source("word-chain", str(folder))


@pytest.mark.parametrize(
    ("text", "hub", "said"),
    [
        ("ann/word-chain", None, "--hub 'https://HUB/{owner}/simple/' or in RLRUN_ENVIRONMENT_HUB"),
        ("ann/word-chain", "https://hub.example.org/simple", "expected an address with {owner}"),
        ("ann/word-chain", "hub/{owner}", "expected an address with {owner}"),
        ("./word-chain", HUB, "no file or folder './word-chain'"),
        ("word_chain-1.2-py3-none-any.whl", HUB, "no file or folder"),
        ("word chain", HUB, "got 'word chain', expected a wheel"),
        ("--index-url=x", HUB, "got '--index-url=x', expected a wheel"),
        ("", HUB, "got '', expected a wheel"),
        (".", HUB, "has no pyproject.toml"),
    ],
)
def test_invalid_source_is_refused_with_fix(
    text: str, hub: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InstallError, match=re.escape(said)):
        source_of(text, hub)


def test_project_without_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\n")
    with pytest.raises(InstallError, match="does not name its project"):
        source_of(f"{tmp_path}/", None)


def test_environment_id_is_derived_from_package_module() -> None:
    python = Path("/v/bin/python")
    assert Installed("Word-Chain", "1", python, ("letters", "word_chain"), "0.4.0").id == "verifiers:word-chain"
    assert Installed("games", "1", python, ("word_chain",), None).id == "word_chain:FUNCTION"


def test_worker_requirement_matches_project_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert WORKER_REQUIREMENT in project["dependencies"]


def test_installer_that_hangs_ends_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(InstallError, match=r"^pip failed: pip did not end within 1800 s; check the connection"):
        installation._run_installer(["pip", "install", "x"], "pip failed")
