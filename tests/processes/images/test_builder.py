"""Image builds: built images, kept archives and messages, with a builder that only records its calls."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.errors import ClusterError
from tests.cluster.images import BuiltImage, __main__, builder, engines
from tests.cluster.images.builder import build_with
from tests.cluster.progress import Progress

SILENT = Progress(lambda _: None)


class Recorder:
    """Fake engine without images."""

    def __init__(self) -> None:
        self.prepared = 0
        self.built: list[str] = []
        self.seen: list[dict[str, str]] = []
        self.removed: list[str] = []
        self.broken = ""

    def base(self) -> dict[str, str]:
        return {"BASE_IMAGE": "localhost/base:1", "SYSTEM_PACKAGES": ""}

    def prepare(self) -> None:
        self.prepared += 1

    def build(self, context: Path, reference: str, values: Mapping[str, str], log: Path) -> None:
        if self.broken == "build":
            raise ClusterError("no")
        self.built.append(reference)
        self.seen.append({path.relative_to(context).as_posix(): "" for path in context.rglob("*") if path.is_file()})
        self.values = values

    def save(self, reference: str, archive: Path, log: Path) -> None:
        archive.write_text("half")
        if self.broken == "save":
            raise ClusterError("disk full")
        archive.write_text(reference)

    def remove(self, reference: str) -> None:
        self.removed.append(reference)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("code/a.py", "unrelated/b.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("x = 1\n")
    for image in ("one", "two"):
        (root / f"Dockerfile.{image}").write_text(f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}}\nCOPY code /{image}\n")
    (root / ".dockerignore").write_text("")
    (tmp_path / "archives").mkdir()
    return root


def build_images(engine: Recorder, checkout: Path, *names: str) -> dict[str, BuiltImage]:
    return build_with(engine, names, root=checkout, archives=checkout.parent / "archives", progress=SILENT)


def test_image_is_built_once_from_its_own_files(checkout: Path) -> None:
    engine = Recorder()
    first = build_images(engine, checkout, "one", "two")
    assert build_images(engine, checkout, "one", "two") == first
    assert engine.built == [first["one"].reference, first["two"].reference]
    assert engine.prepared == 1
    assert engine.seen[0].keys() == {"Dockerfile", "code/a.py"}
    assert engine.values == {"BASE_IMAGE": "localhost/base:1"}
    assert first["one"].archive.read_text() == first["one"].reference


def test_changed_file_gives_another_image_and_archive(checkout: Path) -> None:
    engine = Recorder()
    first = build_images(engine, checkout, "one")["one"]
    (checkout / "code/a.py").write_text("x = 2\n")
    second = build_images(engine, checkout, "one")["one"]
    assert first.reference != second.reference
    assert first.archive != second.archive
    (checkout / "code/a.py").write_text("x = 1\n")
    assert build_images(engine, checkout, "one")["one"] == first
    assert len(engine.built) == 2


def test_edit_during_base_build_does_not_reach_image(checkout: Path) -> None:
    class Slow(Recorder):
        def prepare(self) -> None:
            (checkout / "code/a.py").write_text("x = 'edited meanwhile'\n")

        def build(self, context: Path, reference: str, values: Mapping[str, str], log: Path) -> None:
            self.text = (context / "code/a.py").read_text()

    engine = Slow()
    build_images(engine, checkout, "one")
    assert engine.text == "x = 1\n"


@pytest.mark.parametrize("broken", ["build", "save"])
def test_failed_build_leaves_no_archive_and_is_retried(checkout: Path, broken: str) -> None:
    engine = Recorder()
    engine.broken = broken
    with pytest.raises(ClusterError):
        build_images(engine, checkout, "one")
    assert list((checkout.parent / "archives").glob("*.tar")) == []
    engine.broken = ""
    assert build_images(engine, checkout, "one")["one"].archive.exists()


def test_two_newest_archives_of_each_image_are_kept(checkout: Path) -> None:
    engine = Recorder()
    other = build_images(engine, checkout, "two")["two"]
    made = []
    for version in range(4):
        (checkout / "code/a.py").write_text(f"x = {version + 10}\n")
        image = build_images(engine, checkout, "one")["one"]
        os.utime(image.archive, (version, version))  # The clock of a file system may be coarse.
        made.append(image)
    assert [image.archive.exists() for image in made] == [False, False, True, True]
    assert engine.removed == [made[0].reference, made[1].reference]
    assert other.archive.exists()


def test_docker_is_preferred_if_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    monkeypatch.setattr(engines.os, "geteuid", lambda: 0)
    monkeypatch.setattr(engines.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    assert isinstance(engines.choose(lambda: True, SILENT), engines.Docker)
    assert isinstance(engines.choose(lambda: False, SILENT), engines.Buildah)


def test_missing_docker_and_root_is_reported_with_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="docker, which does not work here, or by buildah as root"):
        engines.choose(lambda: False, SILENT)


def test_error_contains_last_output_of_failed_command(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"exit code 3(.|\n)*no space left"):
        engines._run(["sh", "-c", "echo no space left; exit 3"], tmp_path / "build.log", SILENT, "x")


def test_build_command_prints_images_and_copies_archives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "stub-0123.tar"
    archive.write_text("content")
    image = BuiltImage("stub", "localhost/rlrun-stub:0123", archive)
    monkeypatch.setattr(__main__, "build", lambda names, progress: {"stub": image})
    assert __main__.main(["build", "stub", "--push-to", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.split() == ["stub", image.reference, str(archive)]
    assert (tmp_path / "out" / "stub.tar").read_text() == "content"


def test_build_command_reports_errors_without_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    monkeypatch.setattr(builder, "choose", lambda works, progress: Recorder())
    assert __main__.main(["build", "nothing"]) == 1
    assert capsys.readouterr().err == "error: unknown image 'nothing'; there are trainer, inference, operator, stub\n"
