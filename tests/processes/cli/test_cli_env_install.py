"""`rlrun env install` from a wheel, a folder and a local hub index; installed environments run an episode."""

from __future__ import annotations

import functools
import json
import sysconfig
import threading
import zipfile
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlrun.cli.main import main
from rlrun.runtime import exit_codes

COLOURS = """
import verifiers.v1 as vf
from hues import HUES


class ColourData(vf.TaskData):
    answer: str


class ColourTask(vf.Task[ColourData]):
    @vf.reward
    async def right(self, task: ColourData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class Colours(vf.Taskset[ColourTask, vf.TasksetConfig]):
    def load(self):
        for thing, colour in HUES.items():
            yield ColourTask(ColourData(prompt=f"The colour of {thing}?", answer=colour), self.config.task)


__all__ = ["Colours"]
"""
BACKEND = """
import pathlib, shutil
def build_wheel(folder, config_settings=None, metadata_directory=None):
    (wheel,) = pathlib.Path("ready").iterdir()
    shutil.copy(wheel, folder)
    return wheel.name
"""


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: str = "") -> Path:
    """Write a wheel with the given files."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        names = [*files, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in names))
    return path


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of wheels, the only source of pip. The pydantic wheel adds the packages of these tests, including verifiers, to the path."""
    folder = tmp_path / "house"
    write_wheel(folder, "pydantic", "2.99", {"lent.pth": sysconfig.get_path("purelib") + "\n"})
    write_wheel(folder, "hues", "1.0", {"hues.py": 'HUES = {"grass": "green", "snow": "white", "coal": "black"}\n'})
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("RLRUN_ENVIRONMENT_HUB", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


def write_colours_wheel(folder: Path, version: str = "0.1") -> Path:
    """Write the wheel of a verifiers environment that requires another package."""
    return write_wheel(folder, "colours", version, {"colours.py": COLOURS}, requires="hues")


def test_wheel_is_installed_with_dependencies_and_runs(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "install", str(write_colours_wheel(tmp_path))]) == exit_codes.OK
    python = tmp_path / "data/rlrun/environments/colours/bin/python"
    said = capsys.readouterr().out
    assert f"environments:\n  - id: verifiers:colours\n    python: {python}\n" in said
    assert said.startswith("installed colours 0.1 with verifiers 0.4.0\n")
    played = [
        "env",
        "try",
        "verifiers:colours",
        "--python",
        str(python),
        "--reply",
        "green",
        "--split",
        "train",
        "--json",
    ]
    assert main(played) == exit_codes.OK
    episode = json.loads(capsys.readouterr().out)
    assert episode["messages"][0]["content"].startswith("The colour of ")
    assert episode["reward"] == float("grass" in episode["messages"][0]["content"])


def test_folder_is_installed_and_replaced_only_on_request(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "envs" / "games"
    write_wheel(project / "ready", "games", "2.0", {"games/__init__.py": "", "games/cards.py": "def make(): ...\n"})
    (project / "backend.py").write_text(BACKEND)
    system = 'requires = []\nbuild-backend = "backend"\nbackend-path = ["."]'
    (project / "pyproject.toml").write_text(f'[project]\nname = "games"\nversion = "2.0"\n[build-system]\n{system}\n')
    ask = ["env", "install", "envs/games", "--into", "mine", "--json"]
    assert main(ask) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["version"]) == ("games", "2.0")
    assert found["environment"]["python"] == str(tmp_path / "mine/bin/python")
    (tmp_path / "mine" / "left").touch()
    assert main(ask) == exit_codes.CONFIGURATION
    assert "mine exists; replace it with --replace" in capsys.readouterr().err
    assert main([*ask, "--replace"]) == exit_codes.OK
    assert not (tmp_path / "mine" / "left").exists()


def test_folder_without_environment_is_never_deleted(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()
    assert (
        main(["env", "install", str(write_colours_wheel(tmp_path)), "--into", "data", "--replace"])
        == exit_codes.CONFIGURATION
    )
    assert "data exists and is not a virtual environment; choose another folder" in capsys.readouterr().err
    assert (tmp_path / "data" / "rows.jsonl").exists()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """Address of a hub with one index per owner."""
    page = tmp_path / "hub/ann/simple/colours"
    page.mkdir(parents=True)
    links = "".join(f'<a href="{write_colours_wheel(page, version).name}">x</a>' for version in ("0.1", "0.2"))
    (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    handler = functools.partial(Quiet, directory=str(tmp_path / "hub"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/{{owner}}/simple/"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return


def test_hub_environment_comes_only_from_its_owner(
    house: Path, hub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(
        house, "colours", "9.9", {"colours.py": "raise SystemExit(1)\n"}
    )  # A package with this name from another owner.
    monkeypatch.setenv("RLRUN_ENVIRONMENT_HUB", hub)
    assert main(["env", "install", "ann/colours", "--json"]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == "0.2"
    assert found["environment"]["id"] == "verifiers:colours"
    assert main(["env", "install", "ann/colours@0.7", "--into", "other"]) == exit_codes.CONFIGURATION
    said = capsys.readouterr().err
    assert "/ann/simple/ has no wheel of colours==0.7: " in said
    assert "Traceback" not in said
    assert not (tmp_path / "other").exists()


def test_failed_install_leaves_no_environment(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = write_wheel(tmp_path, "lonely", "1.0", {"lonely.py": ""}, requires="nowhere")
    assert main(["env", "install", str(package), "--into", "mine"]) == exit_codes.CONFIGURATION
    said = capsys.readouterr().err
    assert "pip cannot install" in said
    assert "nowhere" in said
    assert not (tmp_path / "mine").exists()
