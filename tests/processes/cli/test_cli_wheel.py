"""Wheel: its contents, and packages for its extras on the index for each Python. Reads metadata, installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.programs import finish, run_program

ROOT = Path(__file__).parents[3]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "workloads", "operator", "charts", "crds", "examples")
CASES = [("3.11", "local"), ("3.12", "local"), ("3.13", "local"), ("3.12", "local,gpu"), ("3.13", "operator")]
UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel of a copy of the sources, because a build leaves files next to them."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "node_modules")
            )
        else:
            shutil.copy(ROOT / name, source)
    words = [
        "build",
        "--quiet",
        "--wheel",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--out-dir",
        str(target),
    ]
    done = run_program([UV, *words, str(source)])
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_wheel_contains_charts_crd_and_examples(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("charts/rlrun-operator/values.yaml", "crds/rlrun.io_rlruns.yaml", "examples/quickstart.yaml"):
        assert f"rlrun-0.1.0.data/data/share/rlrun/{name}" in names
    assert "rlrun/cli/installation.py" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]


def test_wheel_contains_web_page_without_sources(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("rlrun/ui/")}
    static = ROOT / "workloads/rlrun/ui/static"
    assert {f"rlrun/ui/static/{file.relative_to(static)}" for file in static.rglob("*") if file.is_file()} <= names
    assert not [name for name in names if name.startswith("rlrun/ui/web")]


@pytest.mark.full
def test_each_python_resolves_all_extras(wheel: Path, tmp_path: Path) -> None:
    running = []
    for python, extra in CASES:
        asked = tmp_path / f"{python}-{extra}.in"
        asked.write_text(f"rlrun[{extra}] @ {wheel.as_uri()}\n")
        output = tmp_path / f"{python}-{extra}.txt"
        words = [
            "pip",
            "compile",
            "--quiet",
            "--no-header",
            "--python",
            sys.executable,
            "--python-version",
            python,
            "--output-file",
            output,
            asked,
        ]
        running.append(
            subprocess.Popen([UV, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)
        )
    for (python, extra), process in zip(CASES, running, strict=True):
        error = finish(process)[1]
        assert process.returncode == 0, f"rlrun[{extra}] cannot be installed with Python {python}:\n{error}"
        chosen = (tmp_path / f"{python}-{extra}.txt").read_text()
        assert ("torch==2.13.0" in chosen, "\nvllm==" in chosen) == (extra != "operator", "gpu" in extra)
        assert "+cpu" not in chosen


def test_editable_installation_is_found_next_to_clone(tmp_path: Path) -> None:
    """Folders on `sys.path` precede the namespace package of a clone named `rlrun`; an import hook does not."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("workloads/rlrun", "operator/rlrun_operator"):
        (source / folder).mkdir(parents=True)
        shutil.copy(ROOT / folder / "__init__.py", source / folder)
    (source / "workloads/rlrun/runtime").mkdir()
    shutil.copy(ROOT / "workloads/rlrun/runtime/editable_install.py", source / "workloads/rlrun/runtime")
    words = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"]
    done = run_program(words, cwd=source)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(built).extractall(site)
    (tmp_path / "clones" / "rlrun").mkdir(parents=True)
    asked = f"import site; site.addsitedir({str(site)!r}); import rlrun; print(rlrun.__file__)"
    found = run_program([sys.executable, "-S", "-c", asked], cwd=tmp_path / "clones")
    assert found.stdout == f"{source / 'workloads/rlrun/__init__.py'}\n", found.stderr
