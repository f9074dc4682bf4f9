"""The development container matches the images, the Makefile and the folders. Building it needs docker and a registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".devcontainer"
CONTAINER = json.loads((FOLDER / "devcontainer.json").read_text())


def test_dev_container_base_equals_image_base() -> None:
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile.operator").read_text(), re.MULTILINE)
    recipe = (FOLDER / CONTAINER["build"]["dockerfile"]).read_text()
    assert base is not None
    assert re.findall(r"^FROM (\S+)$", recipe, re.MULTILINE) == [base[1]]


def test_dev_container_has_programs_of_makefile() -> None:
    recipe = (FOLDER / CONTAINER["build"]["dockerfile"]).read_text()
    assert {"make", "git", "python3-venv", "gcc"} <= set(recipe.split())
    make, target = CONTAINER["postCreateCommand"].split()
    assert make == "make"
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_editor_settings_point_to_tools_and_tests() -> None:
    settings = CONTAINER["customizations"]["vscode"]["settings"]
    assert [(ROOT / folder).is_dir() for folder in settings["python.testing.pytestArgs"]] == [True]
    paths = [settings["python.defaultInterpreterPath"], *settings["ruff.path"], *settings["mypy-type-checker.path"]]
    assert all(path.startswith("${workspaceFolder}/.venv/bin/") for path in paths)
