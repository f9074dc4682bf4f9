"""Keys of images, which change only with the input of the build."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.errors import ClusterError
from tests.cluster.images import IMAGES
from tests.cluster.images.builder import ROOT, plan
from tests.cluster.images.inputs import Ignore, arguments, copied, parse, read, write

BASE = {"BASE_IMAGE": "localhost/base:1", "SYSTEM_PACKAGES": ""}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in [".dockerignore", "pyproject.toml", "LICENSE", *(f"Dockerfile.{image}" for image in IMAGES)]:
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for file in (
        "workloads/rlrun/a.py",
        "operator/rlrun_operator/b.py",
        "tests/cluster/images/cuda_stubs.py",
        "tools/flash_attention_3.py",
        "tools/elf_file.py",
        "tools/slim_packages.py",
        "benchmarks/gpu/zero_fatbin.py",
        "tests/support/faults/sitecustomize.py",
        "tests/support/stub/rlrun-pod",
        "docs/c.md",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x = 1\n")
    return tmp_path


def keys(root: Path, base: dict[str, str] | None = None) -> dict[str, str]:
    return {name: plan(name, base or BASE, root=root, archives=root).image.reference for name in IMAGES}


def changed(root: Path, change: Callable[[], object]) -> set[str]:
    before = keys(root)
    change()
    after = keys(root)
    return {name for name in IMAGES if before[name] != after[name]}


EVERY = set(IMAGES)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("workloads/rlrun/a.py", EVERY),
        ("workloads/rlrun/new.py", EVERY),
        ("pyproject.toml", EVERY),
        ("requirements/uv.txt", EVERY),
        ("operator/rlrun_operator/b.py", {"operator"}),
        ("requirements/operator.txt", {"operator"}),
        ("requirements/images/stub.txt", {"stub"}),
        ("requirements/images/common-cpu.txt", {"trainer", "inference"}),
        ("requirements/images/inference-cpu.txt", {"inference"}),
        ("requirements/images/trackers.txt", {"trainer"}),
        ("requirements/images/nvcc.txt", {"trainer", "inference"}),
        ("tests/cluster/images/cuda_stubs.py", {"trainer", "inference"}),
        ("tools/flash_attention_3.py", {"trainer", "inference"}),
        ("tools/slim_packages.py", {"trainer", "inference"}),
        ("benchmarks/gpu/zero_fatbin.py", {"trainer", "inference"}),
        ("tools/sbom.py", set()),
        ("Dockerfile.stub", {"stub"}),
        ("tests/support/faults/sitecustomize.py", {"stub"}),
        ("tests/support/stub/trainer.py", {"stub"}),
        ("tests/support/orchestrator/fixtures.py", set()),
        ("requirements/images/inference-gpu.txt", set()),
        ("requirements/cpu.txt", set()),
        ("docs/c.md", set()),
        ("README.md", set()),
        ("tests/cluster/images/builder.py", set()),
        ("workloads/rlrun/__pycache__/a.cpython-311.pyc", set()),
        ("workloads/rlrun.egg-info/PKG-INFO", set()),
    ],
)
def test_changed_file_changes_keys_of_its_images(checkout: Path, file: str, expected: set[str]) -> None:
    def change() -> None:
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        with (checkout / file).open("a") as handle:
            handle.write("# changed\n")

    assert changed(checkout, change) == expected


def test_removed_file_and_changed_mode_change_the_key(checkout: Path) -> None:
    assert changed(checkout, lambda: (checkout / "workloads/rlrun/a.py").chmod(0o755)) == EVERY
    (checkout / "workloads/rlrun/other.py").write_text("")
    assert changed(checkout, lambda: (checkout / "workloads/rlrun/a.py").unlink()) == EVERY


def test_times_of_files_do_not_matter(checkout: Path) -> None:
    assert changed(checkout, lambda: os.utime(checkout / "workloads/rlrun/a.py", (1, 1))) == set()


def test_another_base_is_another_image(checkout: Path) -> None:
    other = keys(checkout, {**BASE, "BASE_IMAGE": "localhost/base:2"})
    assert all(other[name] != reference for name, reference in keys(checkout).items())


def test_unknown_image_error_lists_known_images(checkout: Path) -> None:
    with pytest.raises(ClusterError, match="unknown image 'trainr'; there are trainer, inference, operator, stub"):
        plan("trainr", BASE, root=checkout, archives=checkout)


def test_ignored_copied_file_is_an_error_before_build(checkout: Path) -> None:
    with (checkout / ".dockerignore").open("a") as handle:
        handle.write("LICENSE\n")
    with pytest.raises(ClusterError, match=r"Dockerfile\.trainer: LICENSE is not there"):
        plan("trainer", BASE, root=checkout, archives=checkout)


def test_dockerfile_parser_reads_continued_lines_and_arguments() -> None:
    instructions = parse(
        '# COPY not this\nARG KIND="gpu"\nARG INDEX\nCOPY a-${KIND}.txt b \\\n    /there/\nCOPY --from=other c /c\n'
        "COPY --chown=1:1 d /d\n"
    )
    assert arguments(instructions) == {"KIND": "gpu", "INDEX": ""}
    assert copied(instructions, {}) == ["a-gpu.txt", "b", "d"]
    assert copied(instructions, {"KIND": "cpu"})[0] == "a-cpu.txt"


@pytest.mark.parametrize(
    ("path", "excluded"),
    [
        ("README.md", True),
        ("src/a.py", False),
        ("src/deep/er/a.py", False),
        ("src/deep/__pycache__/a.pyc", True),
        ("__pycache__/a", True),
        ("tools/one.py", False),
        ("tools/two.py", True),
        ("srcs/a.py", True),
    ],
)
def test_last_matching_ignore_rule_applies(path: str, excluded: bool) -> None:
    rules = Ignore("# nothing but\n*\n!src\n!tools/one.py\n\n**/__pycache__\n")
    assert rules.excludes(path) is excluded


def test_build_context_has_fixed_times_and_modes(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = ["LICENSE", "workloads/rlrun/a.py", "requirements/images/uv.sh"]
    folders = [tmp_path_factory.mktemp("context") for _ in range(2)]
    write(read(checkout, names), folders[0])
    os.utime(checkout / "LICENSE")
    (checkout / "LICENSE").chmod(0o640)
    write(read(checkout, names), folders[1])

    def look(folder: Path) -> dict[str, tuple[int, float]]:
        found = {path: path.stat() for path in folder.rglob("*")}
        return {path.relative_to(folder).as_posix(): (state.st_mode, state.st_mtime) for path, state in found.items()}

    assert look(folders[0]) == look(folders[1])
    assert os.access(folders[0] / "requirements/images/uv.sh", os.X_OK)
