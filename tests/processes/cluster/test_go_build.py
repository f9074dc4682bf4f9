"""`go build` of one program, with a fake go command that prints its output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster import ClusterError, binaries
from tests.cluster.progress import Progress

GO = """#!/bin/sh
case "$1" in
env) echo go1.30.0 ;;
list)
  echo "go: downloading k8s.io/api v0.34.3" >&2
  {list}
  printf 'errors\\nfmt\\nrlrun.io/testcluster/pause\\n' ;;
build)
  while [ "$1" != -o ]; do shift; done
  printf 'errors\\nfmt\\n' >&2
  {build}
  echo program >"$2"; chmod +x "$2" ;;
esac
"""


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLRUN_KUBE_BIN", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'go'}{os.pathsep}{os.environ['PATH']}")
    install_go(tmp_path)
    return tmp_path / "cache"


def install_go(folder: Path, *, in_list: str = ":", in_build: str = ":") -> None:
    program = folder / "go" / "go"
    program.parent.mkdir(exist_ok=True)
    program.write_text(GO.format(list=in_list, build=in_build))
    program.chmod(0o755)


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "bin").iterdir())


def test_build_reports_packages_while_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go_on = tmp_path / "continue"
    install_go(tmp_path, in_build=f"while [ ! -e {go_on} ]; do sleep 0.05; done")
    monkeypatch.setattr("tests.cluster.progress.LOG_SECONDS", 0.0)
    monkeypatch.setattr("tests.cluster.progress.SCREEN_SECONDS", 0.05)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line.split(" s  ", 1)[1])
        if "pause: 2 of at most 3 packages compiled" in line:
            go_on.touch()

    program = binaries.find("pause", progress=Progress(say))["pause"]
    assert program.read_text() == "program\n"
    assert any(line.startswith("pause: 2 of at most 3 packages compiled, ") for line in lines)
    assert lines[0] == "go build pause (the first time takes minutes)"
    assert lines[-1].startswith("pause built in ")


@pytest.mark.parametrize(
    ("part", "output", "message"),
    [
        (
            "in_list",
            "go: k8s.io/api@v0.34.3: dial tcp: lookup proxy: no such host",
            r"`go list \.` failed with 1 .*GOPROXY",
        ),
        ("in_build", "write /x/_pkg_.a: no space left on device", r"`go build \.` failed with 1 .*RLRUN_CACHE"),
        ("in_build", "./main.go:3:4: undefined: x", r"undefined: x"),
    ],
    ids=["offline", "full disk", "compiler"],
)
def test_failed_build_is_one_message_and_can_be_repeated(
    empty_cache: Path, tmp_path: Path, part: str, output: str, message: str
) -> None:
    install_go(tmp_path, **{part: f"echo '{output}' >&2; exit 1"})
    with pytest.raises(ClusterError, match=rf"(?s){message}") as caught:
        binaries.find("pause", progress=Progress(lambda _: None))
    assert output in str(caught.value)
    assert "\nerrors" not in str(caught.value), "packages are no messages"
    assert left_in(empty_cache) == []
    install_go(tmp_path)
    assert binaries.find("pause", progress=Progress(lambda _: None))["pause"].exists()


def test_next_build_deletes_files_of_killed_build(empty_cache: Path) -> None:
    left = empty_cache / "bin" / ".pause-0123-go1.30.0-abc" / ".go-x"
    other = empty_cache / "bin" / ".kube-0123-go1.30.0-abc"
    for folder in (left, other):
        folder.mkdir(parents=True)
    program = binaries.find("pause", progress=Progress(lambda _: None))["pause"]
    assert left_in(empty_cache) == [other.name, program.parent.name]
