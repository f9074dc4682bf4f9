"""`prepare` completes all slow work, so that no test waits for a program or an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import __main__ as command
from tests.cluster import api, binaries, demo, prometheus
from tests.cluster.images import IMAGES, BuiltImage
from tests.cluster.native import golden, lifecycle
from tests.cluster.preparation import prepare


class Machine:
    """Fake machine that records the requested programs and images."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
        self.packages = 0
        self.programs: list[str] = []
        self.built: list[str] = []
        self.unpacked: list[Path] = []
        monkeypatch.setattr(prepare, "detect_provider", lambda _: provider)
        monkeypatch.setattr(prepare, "build", self._build)
        monkeypatch.setattr(lifecycle, "prepare_packages", self._install)
        monkeypatch.setattr(golden, "add", lambda archives, _: self.unpacked.extend(archives))
        monkeypatch.setattr(binaries, "find", lambda *names, **_: self.programs.extend(names))
        monkeypatch.setattr(prometheus, "find", lambda _, *, download: self.programs.append("prometheus"))

    def _install(self, _: object) -> None:
        self.packages += 1

    def _build(self, names: Sequence[str], **_: object) -> dict[str, BuiltImage]:
        assert self.packages or not self.unpacked
        self.built += names
        return {name: BuiltImage(name, f"localhost/{name}:1", Path(f"/{name}.tar")) for name in names}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch, "native")


@pytest.mark.parametrize(("options", "expected"), [([], []), (["--images"], [Path(f"/{name}.tar") for name in IMAGES])])
def test_prepare_builds_and_unpacks_images_for_clusters(
    native: Machine, options: list[str], expected: list[Path]
) -> None:
    assert command.main(["prepare", *options]) == 0
    assert native.unpacked == expected
    assert native.packages


def test_prepare_builds_all_tools_of_tests(native: Machine) -> None:
    """A cold build exceeds the time limit of a test, so each tool belongs to a cluster, to its images or to `make cluster`."""
    assert set(binaries.TOOLS) == {*lifecycle.tools(2, True), "pause", *binaries.OF_TESTS, *binaries.BY_HAND}
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    (words,) = [
        line.split("tests.cluster ")[1].split() for line in makefile.splitlines() if "tests.cluster prepare" in line
    ]
    assert command.main(words) == 0
    assert native.programs == [*lifecycle.tools(2, True), *binaries.OF_TESTS, "prometheus"]


def test_longest_build_is_the_first() -> None:
    assert lifecycle.tools(2, True)[0] == "kube"


def test_demo_skips_programs_of_tests(monkeypatch: pytest.MonkeyPatch, native: Machine) -> None:
    class UpError(Exception):
        pass

    def up(name: str, *, kwok: bool, **_: object) -> None:
        assert not kwok
        raise UpError

    monkeypatch.setattr(api, "up", up)
    with pytest.raises(UpError):
        demo.main([])
    assert native.programs == [*lifecycle.tools(2, False)]
    assert not {"kwok", "gitops", "prometheus"} & set(native.programs)
    assert native.built == list(demo.REAL_IMAGES)


def test_cluster_of_others_needs_kubectl_and_helm(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "kubeconfig")
    assert command.main(["prepare", "--images"]) == 0
    assert (machine.programs, machine.unpacked, machine.packages) == (["kube", "helm"], [], 0)
    assert machine.built == list(IMAGES)
