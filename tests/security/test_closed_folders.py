"""Write access of environments without their own image: refused for files that other processes read, allowed for their own."""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlrun
from rlrun.runtime.bootstrap import module_command, python_command
from tests.security.attempts import RESTRICTED, X86_64_ONLY, attempt
from tests.support.programs import run_program

pytestmark = X86_64_ONLY


@pytest.fixture
def shared_folder() -> Iterator[str]:
    """World-writable folder on a disk: `/dev/shm`, a possible place of temporary files, stays open to environments."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o777)
        yield folder


CONTAINERS = pytest.mark.parametrize("entry", ["nothing", "shared container"])
"""The orchestrator's container, and the shared container of environments."""


@CONTAINERS
def test_files_of_other_processes_are_refused(shared_folder: str, entry: str) -> None:
    found = attempt(entry, "plants_files", RESTRICTED, cwd=shared_folder)
    assert {outcome for place in found.values() for outcome in place.values()} == {"refused"}, found
    assert len(found["run's folder"]) == 8


def test_files_of_other_processes_can_be_planted_without_enclosure(shared_folder: str) -> None:
    found = attempt("nothing", "plants_files", cwd=shared_folder)
    assert {outcome for place in found.values() for outcome in place.values()} == {"done"}, found


def test_signals_to_helpers_of_the_orchestrator_are_refused() -> None:
    assert set(attempt("nothing", "signals_a_sibling", RESTRICTED).values()) == {"refused"}
    assert set(attempt("nothing", "signals_a_sibling").values()) == {"done"}


@pytest.mark.parametrize("more", [(), (RESTRICTED,)], ids=["user", "pod"])
def test_environment_cannot_connect_to_its_host(more: tuple[str, ...]) -> None:
    """Otherwise it could start processes outside of its Landlock domain with its own limits."""
    assert attempt("shared container", "connects_to_its_host", *more) == ""


@CONTAINERS
def test_honest_environment_uses_its_own_files(entry: str) -> None:
    found = attempt(entry, "uses_its_own_files", RESTRICTED)
    assert found.pop("folder").endswith("/work")
    assert found == {"program": "helper", "moved": "1", "signal": -9}


@pytest.mark.parametrize("module", ["trio", "pydantic", "json", "rlrun"])
def test_module_in_working_directory_is_not_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import os; os.write(1, b'planted'); os._exit(7)")
    for command in (module_command("rlrun.pod", ["--help"]), python_command("rlrun.pod.pod_command", ["--help"])):
        done = run_program(command, cwd=tmp_path)
        assert "usage: rlrun-pod" in done.stdout, done.stderr
        assert "planted" not in done.stdout


def test_each_program_starts_without_working_directory_on_path() -> None:
    """Checks each list of the product that starts an interpreter."""
    starts = [
        (path.name, element.lineno)
        for path in Path(rlrun.__file__).parent.rglob("*.py")
        if "sys.executable" in (text := path.read_text())  # Parsing all modules takes 1.5 s of CPU time.
        for element in ast.walk(ast.parse(text))
        if isinstance(element, ast.List | ast.Tuple) and starts_unsafely(element)
    ]
    assert starts == []


def starts_unsafely(element: ast.List | ast.Tuple) -> bool:
    words = [ast.unparse(part) for part in element.elts]
    return (
        any("sys.executable" in word for word in words) and bool({"'-m'", "'-c'"} & set(words)) and not is_safe(words)
    )


def is_safe(words: list[str]) -> bool:
    return bool({"SAFE_PATH", "'-I'"} & set(words))


def test_user_module_is_found_last(tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("def loss(): ...")
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    program = "from rlrun.custom import imported; print(imported('loss', 'my_loss:loss').__module__)"
    done = run_program([sys.executable, "-P", "-c", program], cwd=tmp_path)
    assert done.stdout.strip() == "my_loss", done.stderr
    done = run_program([sys.executable, "-P", "-c", program], cwd=tmp_path, env={"PYTHONSAFEPATH": "1"})
    assert "cannot import my_loss" in done.stderr
