"""Runner of tiers: each test file is in one tier, a failed or empty tier fails the run, a flaky test gets a row."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests import flakes
from tests import tiers as runner
from tests.support.programs import finish, run_program
from tests.support.python_path import before
from tests.tiers import AT_LAST, LANES, THEN, TIERS, WAITING

ROOT = Path(__file__).parents[2]
Lanes = Callable[..., None]
BY_HAND = ("tests/gpu", "tests/controllers")
"""Folders outside all tiers: they need a GPU or a build of Kueue (`make test-controllers`)."""


SEED_OPTION = "def pytest_addoption(parser): parser.addoption('--hypothesis-seed')"
"""Replacement of the Hypothesis plugin, which needs 1.4 CPU seconds to load; only one test needs more than its option."""


@pytest.fixture
def lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    """Replace the tiers and lanes of the runner; tests run in an empty folder, with an empty list of flaky tests."""
    (tmp_path / "seed_option.py").write_text(SEED_OPTION)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout,seed_option")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("PYTHONPATH", before(ROOT))
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "flakes.md").write_text(flakes.PATH.read_text())
    monkeypatch.setattr(flakes, "PATH", tmp_path / "flakes.md")

    def replace(
        tiers: Mapping[str, Path],
        lanes: Sequence[Sequence[str]],
        *,
        waiting: Sequence[str] = (),
        then: Sequence[str] = (),
        at_last: Sequence[str] = (),
    ) -> None:
        monkeypatch.setattr(runner, "TIERS", {name: (str(path),) for name, path in tiers.items()})
        monkeypatch.setattr(runner, "LANES", lanes)
        monkeypatch.setattr(runner, "WAITING", waiting)
        monkeypatch.setattr(runner, "THEN", then)
        monkeypatch.setattr(runner, "AT_LAST", at_last)

    return replace


def run_tiers(*tiers: str, options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_ADDOPTS": options}
    return run_program([sys.executable, "-m", "tests.tiers", *tiers], cwd=ROOT, env=environment)


def is_in_tier(arguments: Sequence[str], file: Path) -> bool:
    ignored = [argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--ignore=")]
    folders = [argument for argument in arguments if not argument.startswith("--")]
    inside = [any(file.is_relative_to(ROOT / folder) for folder in group) for group in (folders, ignored)]
    return inside == [True, False]


def test_each_test_file_is_in_exactly_one_tier() -> None:
    tiers = [TIERS[name] for lane in (*LANES, WAITING, THEN, AT_LAST) for name in lane]
    for file in (ROOT / "tests").rglob("test_*.py"):
        if not any(file.is_relative_to(ROOT / folder) for folder in BY_HAND):
            assert sum(is_in_tier(tier, file) for tier in tiers) == 1, file


def test_no_test_folder_has_name_ignored_by_pytest(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {part for file in (ROOT / "tests").rglob("test_*.py") for part in file.relative_to(ROOT).parts[:-1]}
    assert "build" in folders, "pytest's own default leaves out folders of this name"
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in left_out)] == []


def test_tier_without_tests_fails() -> None:
    result = run_tiers("unit", options="--ignore-glob=* -q")
    assert (result.returncode, "unit: FAILED (5)" in result.stdout) == (1, True), result.stdout


def test_last_lines_name_failed_tests(tmp_path: Path, lanes: Lanes, capsys: pytest.CaptureFixture[str]) -> None:
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
    lanes({"some": tmp_path}, [["some"]])
    assert runner.main([]) == 1
    table, *last = capsys.readouterr().out.split("some: FAILED (1) in ")[1].splitlines()
    assert "1 failed, 1 passed, 1 error" in table
    assert last == [
        "[some] FAILED test_some.py::test_bad, in isolation as well",
        "[some] FAILED test_some.py::test_unable, in isolation as well",
    ]
    assert flakes.open_rows(flakes.PATH.read_text()) == []


HASTY = """
from pathlib import Path
import pytest
here = Path(__file__).parent

def run_number(name):
    with (here / name).open("a+") as file:
        file.write(".")
        return file.tell()

@pytest.mark.parametrize("number", range(int((here / "hasty").read_text())))
def test_hasty(number):
    assert run_number(f"runs-{number}") not in eval((here / "failing").read_text()), "too slow"
"""


def prepare_hasty(folder: Path, *, failing: Sequence[int], tests: int = 1) -> None:
    """Write tests that fail in the runs with the given numbers, counted from 1."""
    for old in folder.glob("runs-*"):
        old.unlink()
    (folder / "test_some.py").write_text(HASTY)
    (folder / "hasty").write_text(str(tests))
    (folder / "failing").write_text(repr(list(failing)))


def test_flaky_test_is_repeated_in_isolation_and_listed(
    tmp_path: Path, lanes: Lanes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes({"some": tmp_path}, [["some"]])
    prepare_hasty(tmp_path, failing=[1])
    assert runner.main(["--seed", "7"]) == 0
    output = capsys.readouterr().out
    assert "some: passed with flaky tests in " in output
    assert "FLAKY test_some.py::test_hasty[0] (tier some, seed 7, " in output
    assert flakes.open_rows(flakes.PATH.read_text()) == [(date.today(), "test_some.py::test_hasty[0]")]
    assert len((tmp_path / "runs-0").read_text()) == 3

    monkeypatch.setenv("CI", "true")
    flakes.PATH.write_text(text := flakes.PATH.read_text().replace("test_hasty[0]", "test_other"))
    prepare_hasty(tmp_path, failing=[1])
    assert runner.main([]) == 0
    assert f"| {date.today()} | `test_some.py::test_hasty[0]` | some | 0 | " in capsys.readouterr().out
    assert flakes.PATH.read_text() == text, "a run of CI changes no file of the checkout"


@pytest.mark.parametrize("failing", [pytest.param([1, 2], marks=pytest.mark.full), [1, 3]])
def test_second_failure_in_isolation_fails_the_run(
    tmp_path: Path, lanes: Lanes, capsys: pytest.CaptureFixture[str], failing: list[int]
) -> None:
    lanes({"some": tmp_path}, [["some"]])
    prepare_hasty(tmp_path, failing=failing)
    assert runner.main([]) == 1
    output = capsys.readouterr().out
    assert ("FLAKY" in output, "[some] FAILED test_some.py::test_hasty[0], in isolation as well" in output) == (
        False,
        True,
    )
    assert len((tmp_path / "runs-0").read_text()) == max(failing)


def test_excess_failures_are_not_run_again(tmp_path: Path, lanes: Lanes) -> None:
    lanes({"some": tmp_path}, [["some"]])
    prepare_hasty(tmp_path, failing=[1], tests=flakes.MAX_OPEN + 1)
    assert runner.main([]) == 1
    assert [len(file.read_text()) for file in tmp_path.glob("runs-*")] == [1] * (flakes.MAX_OPEN + 1)


def test_tests_skipped_by_failed_fixture_run_again(
    tmp_path: Path, lanes: Lanes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fixture fails only once, but the behavior behind it always fails. A second success of only the first test would hide that."""
    (tmp_path / "conftest.py").write_text(
        "from tests import fixture_failures\n"
        "def pytest_configure(config): config.pluginmanager.register(fixture_failures)\n"
    )
    (tmp_path / "test_some.py").write_text(
        "from pathlib import Path\n"
        "import pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def run():\n"
        "    runs = Path(__file__).with_name('runs')\n"
        "    runs.open('a').write('.')\n"
        "    assert len(runs.read_text()) > 1, 'too slow'\n"
        "def test_first(run): pass\n"
        "def test_second(run): assert False\n"
    )
    lanes({"some": tmp_path}, [["some"]])
    assert runner.main([]) == 1
    output = capsys.readouterr().out
    assert "1 skipped" in output
    assert ("FLAKY" in output, "FAILED test_some.py::test_first, in isolation as well" in output) == (False, True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(8, "test_old")], "test_old has been open since"),
        ([(1, f"test_{number}") for number in range(6)], "6 flaky tests are open, at most 5 may be"),
    ],
)
def test_long_or_old_flaky_list_fails_the_run_early(
    tmp_path: Path, lanes: Lanes, capsys: pytest.CaptureFixture[str], rows: list[tuple[int, str]], message: str
) -> None:
    lanes({"some": tmp_path}, [["some"]])
    prepare_hasty(tmp_path, failing=[])
    text = flakes.PATH.read_text()
    for age, test in rows:
        day = date.today() - timedelta(days=age)
        text = flakes.add_rows(text, [flakes.Flake(test, "unit", 0, 1.5)], day)
    flakes.PATH.write_text(text)
    assert runner.main([]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs-0").exists()
    flakes.PATH.write_text(text.replace("## Open\n", "## Closed\n"))
    assert runner.main([]) == 0, "rows of repaired tests do not count"


def test_sixth_flaky_test_fails_the_run(tmp_path: Path, lanes: Lanes, capsys: pytest.CaptureFixture[str]) -> None:
    lanes({"some": tmp_path}, [["some"]])
    prepare_hasty(tmp_path, failing=[1])
    listed = [flakes.Flake(f"test_{number}", "unit", 0, 1.5) for number in range(flakes.MAX_OPEN)]
    flakes.PATH.write_text(flakes.add_rows(flakes.PATH.read_text(), listed, date.today()))
    assert runner.main([]) == 1
    assert "6 flaky tests are open, at most 5 may be" in capsys.readouterr().out


def test_gate_excludes_full_set(tmp_path: Path, lanes: Lanes) -> None:
    (tmp_path / "test_some.py").write_text(
        "from pathlib import Path\n"
        "import pytest\n"
        "ran = Path(__file__).with_name('ran').open('a')\n"
        "def test_gate(): ran.write('gate ')\n"
        "@pytest.mark.full\n"
        "def test_sweep(): ran.write('sweep ')\n"
    )
    lanes({"some": tmp_path}, [["some"]])
    for options, ran in (([], "gate "), (["--full"], "gate sweep ")):
        (tmp_path / "ran").unlink(missing_ok=True)
        assert runner.main(options) == 0
        assert (tmp_path / "ran").read_text() == ran


def test_gate_examples_are_fixed_and_full_set_differs(
    tmp_path: Path, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin")
    (tmp_path / "test_some.py").write_text(
        "from pathlib import Path\n"
        "from hypothesis import given, settings, strategies\n"
        "drawn = Path(__file__).with_name('drawn').open('a')\n"
        "@settings(database=None)\n"
        "@given(strategies.integers())\n"
        "def test_drawn(number): drawn.write(f'{number} ')\n"
    )
    lanes({"some": tmp_path}, [["some"]])
    drawn = []
    for options in ([], ["--full"], ["--full", "--seed", "0"]):
        (tmp_path / "drawn").unlink(missing_ok=True)
        assert runner.main(options) == 0
        drawn.append((tmp_path / "drawn").read_text())
    assert drawn[0] == drawn[2] != drawn[1]


def test_temporary_files_are_in_memory_and_deleted(
    tmp_path: Path, lanes: Lanes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(
        "import tempfile\n"
        "def test_place(tmp_path):\n"
        "    tempfile.mkdtemp()\n"
        f"    open({str(tmp_path / 'place')!r}, 'w').write(str(tmp_path))\n"
    )
    memory = tmp_path / "memory"
    memory.mkdir()
    lanes({"some": tmp_path / "test_some.py"}, [["some"]])
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


def test_tiers_keep_bytecode_of_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bytecode, each of thousands of programs would compile the whole product; sandboxes and images often set the variable."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = runner.environment("tensors", runner.Settings(tmp_path, memory=str(tmp_path)))
    changed = {"PYTHONDONTWRITEBYTECODE": None, "TMPDIR": str(tmp_path), **runner.LOWEST_CAPABILITY}
    assert {name: variables.get(name) for name in changed} == changed
    assert {name: value for name, value in variables.items() if name not in changed} == {
        name: value for name, value in os.environ.items() if name not in changed
    }


def test_idle_lane_runs_unstarted_tiers_of_other_lanes(
    tmp_path: Path, lanes: Lanes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long lane ends only after all others, so the other lane must have run their tiers, each once.

    The waiting lane is idle at once and runs nothing; the short lane ends later and then starts the remaining tiers.
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
    files = {name: tmp_path / f"test_{name}.py" for name in names}
    lanes(files, [["long"], ["short"]], waiting=["waits"], then=["free"], at_last=["last"])
    assert runner.main([]) == 0, capsys.readouterr().out
    assert [(tmp_path / name).read_text() for name in names] == ["."] * len(names)
    started = [line.removeprefix("== ") for line in capsys.readouterr().out.splitlines() if line.startswith("== ")]
    assert (sorted(started), started[-1]) == (sorted(names), "last")


def test_patient_tiers_run_in_parallel_with_lowest_priority(
    tmp_path: Path, lanes: Lanes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both lanes end only after the patient tiers, so no lane can have run them. The lanes run all other tiers."""
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
    tiers = {name: tmp_path / f"test_{name}.py" for name in ("long", "short", "free", "calm", "calmer")}
    lanes(tiers, [["long"], ["short"]], then=["free", "calm", "calmer"])
    monkeypatch.setattr(runner, "PATIENT", frozenset({"calm", "calmer"}))
    assert runner.main([]) == 0, capsys.readouterr().out
    assert [(tmp_path / name).read_text() for name in tiers] == [usual] * 3 + ["19"] * 2
    for name in tiers:
        (tmp_path / name).unlink()
    assert runner.main(["calm", "calmer"]) == 0, capsys.readouterr().out
    assert [(tmp_path / name).read_text() for name in ("calm", "calmer")] == [usual] * 2, "there is nobody to wait for"


def test_unknown_tier_is_refused_by_name() -> None:
    result = run_tiers("units", options="")
    assert (result.returncode, "unknown tier units; there are unit, " in result.stderr) == (2, True)


def test_signal_ends_running_tiers_and_starts_no_others(tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text("import time; time.sleep(600)")
    environment = {**os.environ, "PYTHONPATH": before(tmp_path), "PYTEST_PLUGINS": "slow_start"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tiers", "controlplane", *THEN[:3]],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "gate, seed 0\n"
    started = {process.stdout.readline() for _ in (*LANES, *WAITING)}
    assert started == {"== controlplane\n", f"== {THEN[0]}\n", f"== {THEN[1]}\n"}
    process.terminate()
    output, _ = finish(process)
    assert (process.returncode, f"== {THEN[2]}" in output) == (1, False), output
