"""A fixture of many tests that fails: one failure, the rest skipped, and its folder is kept."""

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
    """Outcomes, and the output, of a file of tests in a project of its own that has the plugin."""
    (folder / "test_run.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    code = (
        "import sys, pathlib, pytest; from tests import fixture_failures; "
        f"fixture_failures.KEPT = pathlib.Path({str(folder / 'kept')!r}); "
        f"sys.exit(pytest.main(['-rA', '-p', 'no:cacheprovider', {str(folder)!r}], plugins=[fixture_failures]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the plugin of Hypothesis needs 1.4 CPU seconds to load
    done = run_program([sys.executable, "-c", code], cwd=ROOT, env=environment)
    words = done.stdout.strip().splitlines()[-1].replace(",", "").split()
    return {words[i + 1].rstrip("s"): int(words[i]) for i in range(len(words) - 1) if words[i].isdigit()}, done.stdout


@pytest.mark.parametrize("scope", ["module", "session"])
def test_one_test_fails_and_the_others_are_skipped(tmp_path: Path, scope: str) -> None:
    outcomes, output = run_pytest(tmp_path, RUN.format(scope=scope, end=FAILS))
    assert outcomes == {"passed": 1, "skipped": 5, "error": 1}, output
    assert output.count('raise RuntimeError("exit code 139")') == 1, "its story is told once"
    assert "run failed in test_run.py::" in output, "a test that is skipped says which one tells why"


def test_what_it_left_is_kept_and_told(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, RUN.format(scope="module", end=FAILS))
    (kept,) = (tmp_path / "kept").iterdir()
    assert f"what run left is kept in {kept}" in output
    assert [path.name for path in (kept / "run0").iterdir()] == ["trainer.log"], "weights are not"


def test_a_fixture_that_works_or_skips_is_left_alone(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, RUN.format(scope="module", end="return folder"))[0] == {"passed": 7}
    assert run_pytest(tmp_path, RUN.format(scope="module", end='pytest.skip("no GPU")'))[0] == {
        "passed": 1,
        "skipped": 6,
    }
    assert not (tmp_path / "kept").exists()


def test_the_failure_is_never_swallowed_by_a_test_that_may_fail(tmp_path: Path) -> None:
    expected = "pytest.param(0, marks=pytest.mark.xfail), *range(1, 5)"
    text = RUN.format(scope="module", end=FAILS).replace('"part", range(5)', f'"part", [{expected}]')
    assert run_pytest(tmp_path, text)[0] == {"passed": 1, "xfailed": 1, "error": 5}, (
        "nobody is skipped for what is not red"
    )


def test_fixtures_of_one_test_fail_each_of_them(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, RUN.format(scope="function", end=FAILS))[0] == {"passed": 1, "error": 6}
