"""The runner of tiers: no test file is outside of every tier, and a tier that fails or finds nothing is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests import tiers as runner
from tests.support.python_path import before
from tests.tiers import AT_LAST, LANES, THEN, TIERS, WAITING

ROOT = Path(__file__).parents[2]
BY_HAND = ("tests/gpu", "tests/controllers")
"""Run where there is a GPU, and where Kueue has been built: `make test-controllers`."""


def run(*tiers: str, options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_ADDOPTS": options}
    return subprocess.run(
        [sys.executable, "-m", "tests.tiers", *tiers], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def holds(arguments: Sequence[str], file: Path) -> bool:
    ignored = [argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--ignore=")]
    folders = [argument for argument in arguments if not argument.startswith("--")]
    inside = [any(file.is_relative_to(ROOT / folder) for folder in group) for group in (folders, ignored)]
    return inside == [True, False]


def test_every_test_file_belongs_to_exactly_one_tier_that_runs() -> None:
    tiers = [TIERS[name] for lane in (*LANES, WAITING, THEN, AT_LAST) for name in lane]
    for file in (ROOT / "tests").rglob("test_*.py"):
        if not any(file.is_relative_to(ROOT / folder) for folder in BY_HAND):
            assert sum(holds(tier, file) for tier in tiers) == 1, file


def test_no_folder_of_tests_has_a_name_that_pytest_leaves_out(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {part for file in (ROOT / "tests").rglob("test_*.py") for part in file.relative_to(ROOT).parts[:-1]}
    assert "build" in folders, "pytest's own default leaves out folders of this name"
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in left_out)] == []


def test_a_tier_in_which_nothing_runs_has_not_passed() -> None:
    result = run("unit", options="--ignore-glob=* -q")
    assert (result.returncode, "unit: FAILED (5)" in result.stdout) == (1, True), result.stdout


def test_the_last_lines_name_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def absent(): raise OSError('no such thing')\n"
        "def test_good(): pass\n"
        "def test_bad():\n"
        "    print('FAILED by its own words\\nERROR likewise')\n"
        "    assert 1 == 2, 'one is not two'\n"
        "def test_unable(absent): pass\n"
    )
    monkeypatch.setattr(runner, "TIERS", {"some": (str(tmp_path),)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "LANES", (("some",),))
    monkeypatch.setattr(runner, "WAITING", ())
    monkeypatch.setattr(runner, "THEN", ())
    monkeypatch.setattr(runner, "AT_LAST", ())
    monkeypatch.setenv("COLUMNS", "400")
    assert runner.main([]) == 1
    table, *last = capsys.readouterr().out.split("some: FAILED (1) in ")[1].splitlines()
    assert "1 failed, 1 passed, 1 error" in table
    bad, unable, alone = last
    assert alone == "[some] alone, they failed too"
    assert (bad.startswith("[some] FAILED "), "test_some.py::test_bad - AssertionError: one is not two" in bad) == (
        True,
        True,
    )
    assert (unable.startswith("[some] ERROR "), "test_some.py::test_unable - OSError: no such thing" in unable) == (
        True,
        True,
    )


def test_the_few_that_failed_are_looked_at_again_alone_and_have_failed_whatever_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(
        "from pathlib import Path\n"
        "import pytest\n"
        "runs = Path(__file__).with_name('runs')\n"
        "runs.open('a').write('.')\n"
        "@pytest.mark.parametrize('busy', [False, True])\n"
        "def test_hasty(busy): assert not busy or len(runs.read_text()) > 1, 'too slow'\n"
        "@pytest.mark.parametrize('number', range(int(Path(__file__).with_name('wrong').read_text())))\n"
        "def test_wrong(number): assert False\n"
    )
    monkeypatch.setattr(runner, "TIERS", {"some": (str(tmp_path),)})
    monkeypatch.setattr(runner, "LANES", (("some",),))
    monkeypatch.setattr(runner, "WAITING", ())
    monkeypatch.setattr(runner, "THEN", ())
    monkeypatch.setattr(runner, "AT_LAST", ())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    for wrong, runs, said in ((0, 2, "alone, all of these passed"), (1, 2, "alone, they failed too"), (3, 1, None)):
        (tmp_path / "wrong").write_text(str(wrong))
        (tmp_path / "runs").write_text("")
        assert runner.main([]) == 1
        end = capsys.readouterr().out.split("some: FAILED (1) in ")[-1]
        assert "test_some.py::test_hasty[True]" in end
        assert [said] == ([line.removeprefix("[some] ") for line in end.splitlines() if " alone, " in line] or [None])
        assert len((tmp_path / "runs").read_text()) == runs


def test_temporary_files_are_in_memory_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(
        "import tempfile\n"
        "def test_place(tmp_path):\n"
        "    tempfile.mkdtemp()\n"
        f"    open({str(tmp_path / 'place')!r}, 'w').write(str(tmp_path))\n"
    )
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(runner, "TIERS", {"some": (str(tmp_path / "test_some.py"),)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "LANES", (("some",),))
    monkeypatch.setattr(runner, "WAITING", ())
    monkeypatch.setattr(runner, "THEN", ())
    monkeypatch.setattr(runner, "AT_LAST", ())
    monkeypatch.setattr(runner, "MEMORY", memory)
    monkeypatch.setattr(runner, "ENOUGH_BYTES", 1)
    for in_memory in (True, False):
        monkeypatch.setattr(runner, "IN_MEMORY", {"some"} if in_memory else {})
        assert runner.main([]) == 0, capsys.readouterr().out
        assert Path((tmp_path / "place").read_text()).is_relative_to(memory) is in_memory
        assert list(memory.iterdir()) == []
    monkeypatch.setattr(runner, "ENOUGH_BYTES", 1 << 60)
    with runner.scratch() as folder:
        assert folder is None


def test_a_lane_that_is_through_takes_what_no_lane_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long lane ends only after all others have run, so these have run in the other one, and each of them once.

    The lane that waits is through at once, and takes nothing: the short one ends a while after it, and then begins with the rest.
    """
    names = ("long", "short", "free", "waits", "last")
    needs = {"long": ["short", "free"], "short": ["waits"]}
    for name in names:
        need = needs.get(name, [])
        (tmp_path / f"test_{name}.py").write_text(
            "import time\n"
            "from pathlib import Path\n"
            "import pytest\n"
            "pytestmark = pytest.mark.timeout(120)\n"
            "here = Path(__file__).parent\n"
            "def test_it():\n"
            f"    while not all((here / name).exists() for name in {need}): time.sleep(0.05)\n"
            f"    time.sleep({2 if name == 'short' else 0})\n"
            f"    assert {name!r} != 'free' or (here / 'short').exists()\n"
            f"    (here / '{name}').open('a').write('.')\n"
        )
    monkeypatch.setattr(runner, "TIERS", {name: (str(tmp_path / f"test_{name}.py"),) for name in names})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "LANES", (("long",), ("short",)))
    monkeypatch.setattr(runner, "WAITING", ("waits",))
    monkeypatch.setattr(runner, "THEN", ("free",))
    monkeypatch.setattr(runner, "AT_LAST", ("last",))
    assert runner.main([]) == 0, capsys.readouterr().out
    assert [(tmp_path / name).read_text() for name in names] == ["."] * len(names)
    started = [line.removeprefix("== ") for line in capsys.readouterr().out.splitlines() if line.startswith("== ")]
    assert (sorted(started), started[-1]) == (sorted(names), "last")


def test_patient_tiers_run_beside_the_others_on_what_these_leave_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both lanes end only after the patient tiers: nobody else can have run these. What is not patient is left to the lanes."""
    waits = "    while not all((here / name).exists() for name in ('calm', 'calmer')): time.sleep(0.05)\n"
    for name in ("long", "short", "free", "calm", "calmer"):
        (tmp_path / f"test_{name}.py").write_text(
            "import os, time\n"
            "from pathlib import Path\n"
            "here = Path(__file__).parent\n"
            "def test_it():\n"
            f"{waits if name in ('long', 'short') else ''}"
            f"    (here / '{name}').open('a').write(str(os.getpriority(os.PRIO_PROCESS, 0)))\n"
        )
    usual = str(os.getpriority(os.PRIO_PROCESS, 0))
    tiers = {name: (str(tmp_path / f"test_{name}.py"),) for name in ("long", "short", "free", "calm", "calmer")}
    monkeypatch.setattr(runner, "TIERS", tiers)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "LANES", (("long",), ("short",)))
    monkeypatch.setattr(runner, "WAITING", ())
    monkeypatch.setattr(runner, "THEN", ("free", "calm", "calmer"))
    monkeypatch.setattr(runner, "PATIENT", frozenset({"calm", "calmer"}))
    monkeypatch.setattr(runner, "AT_LAST", ())
    assert runner.main([]) == 0, capsys.readouterr().out
    assert [(tmp_path / name).read_text() for name in tiers] == [usual] * 3 + ["19"] * 2
    for name in tiers:
        (tmp_path / name).unlink()
    assert runner.main(["calm", "calmer"]) == 0, capsys.readouterr().out
    assert [(tmp_path / name).read_text() for name in ("calm", "calmer")] == [usual] * 2, "there is nobody to wait for"


def test_an_unknown_tier_is_named() -> None:
    result = run("units", options="")
    assert (result.returncode, "unknown tier units; there are unit, " in result.stderr) == (2, True)


def test_a_signal_ends_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text("import time; time.sleep(600)")
    environment = {**os.environ, "PYTHONPATH": before(tmp_path), "PYTEST_PLUGINS": "slow_start"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tiers", "controlplane", *THEN[:3]],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    started = {process.stdout.readline() for _ in (*LANES, *WAITING)}
    assert started == {"== controlplane\n", f"== {THEN[0]}\n", f"== {THEN[1]}\n"}
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, f"== {THEN[2]}" in output) == (1, False), output
