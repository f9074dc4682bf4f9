"""Failure of a shared fixture: one test fails, the others are skipped, and its folder is kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import pytest
ATTEMPTS = []

@pytest.fixture(scope="{scope}")
def run(tmp_path_factory):
    ATTEMPTS.append(1)
    folder = tmp_path_factory.mktemp("run")
    (folder / "trainer.log").write_text("Fatal Python error")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    {end}

@pytest.fixture(scope="{scope}")
def longer(run):
    return run

@pytest.mark.parametrize("part", range(5))
def test_part(run, part):
    assert len(ATTEMPTS) == 1

def test_longer(longer):
    pass

def test_alone():
    pass
"""
FAILS = 'raise RuntimeError("exit code 139")'


def run_pytest(folder: Path, text: str) -> tuple[dict[str, int], str]:
    """Run a file of tests in its own project with the plugin, and return the outcomes and the output."""
    (folder / "test_run.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    code = (
        "import sys, pathlib, pytest; from tests import fixture_failures; "
        f"fixture_failures.KEPT = pathlib.Path({str(folder / 'kept')!r}); "
        f"sys.exit(pytest.main(['-rA', '-p', 'no:cacheprovider', {str(folder)!r}], plugins=[fixture_failures]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Hypothesis needs 1.4 CPU seconds to load
    done = run_program([sys.executable, "-c", code], cwd=ROOT, env=environment)
    words = done.stdout.strip().splitlines()[-1].replace(",", "").split()
    return {words[i + 1].rstrip("s"): int(words[i]) for i in range(len(words) - 1) if words[i].isdigit()}, done.stdout


@pytest.mark.parametrize("scope", ["module", "session"])
def test_failed_fixture_fails_one_test_and_skips_others(tmp_path: Path, scope: str) -> None:
    outcomes, output = run_pytest(tmp_path, RUN.format(scope=scope, end=FAILS))
    assert outcomes == {"passed": 1, "skipped": 5, "error": 1}, output
    assert output.count('raise RuntimeError("exit code 139")') == 1, "its story is told once"
    assert "run failed in test_run.py::" in output, "a test that is skipped says which one tells why"


def test_failed_fixture_folder_is_kept_and_reported(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, RUN.format(scope="module", end=FAILS))
    (kept,) = (tmp_path / "kept").iterdir()
    assert f"what run left is kept in {kept}" in output
    assert [path.name for path in (kept / "run0").iterdir()] == ["trainer.log"], "weights are not"


def test_fixture_that_works_or_skips_is_not_reported(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, RUN.format(scope="module", end="return folder"))[0] == {"passed": 7}
    assert run_pytest(tmp_path, RUN.format(scope="module", end='pytest.skip("no GPU")'))[0] == {
        "passed": 1,
        "skipped": 6,
    }
    assert not (tmp_path / "kept").exists()


def test_expected_failure_does_not_hide_failed_fixture(tmp_path: Path) -> None:
    expected = "pytest.param(0, marks=pytest.mark.xfail), *range(1, 5)"
    text = RUN.format(scope="module", end=FAILS).replace('"part", range(5)', f'"part", [{expected}]')
    assert run_pytest(tmp_path, text)[0] == {"passed": 1, "xfailed": 1, "error": 5}, (
        "nobody is skipped for what is not red"
    )


def test_failed_function_fixture_fails_each_test(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, RUN.format(scope="function", end=FAILS))[0] == {"passed": 1, "error": 6}
