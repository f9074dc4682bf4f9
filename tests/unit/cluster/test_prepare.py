"""`prepare --images`: what takes minutes is done before the tests begin, so that no test waits for an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import __main__ as command
from tests.cluster import binaries, prometheus
from tests.cluster.images import IMAGES, BuiltImage
from tests.cluster.native import golden, lifecycle


@pytest.mark.parametrize(("options", "expected"), [([], []), (["--images"], [Path(f"/{name}.tar") for name in IMAGES])])
def test_images_are_built_and_unpacked_where_clusters_take_them_from(
    monkeypatch: pytest.MonkeyPatch, options: list[str], expected: list[Path]
) -> None:
    added: list[Path] = []

    def build(names: Sequence[str], **_: object) -> dict[str, BuiltImage]:
        return {name: BuiltImage(name, f"localhost/{name}:1", Path(f"/{name}.tar")) for name in names}

    monkeypatch.setattr(command, "build", build)
    monkeypatch.setattr(command, "detect_provider", lambda _: "native")
    monkeypatch.setattr(lifecycle, "prepare", lambda _: None)
    monkeypatch.setattr(golden, "add", lambda archives, _: added.extend(archives))
    assert command.main(["prepare", *options]) == 0
    assert added == expected


def test_no_test_builds_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold build takes longer than a test may: each tool is of a cluster, of its images, or built by `make cluster`."""
    assert set(binaries.TOOLS) == {*lifecycle.tools(2, True), "pause", *binaries.OF_TESTS, *binaries.BY_HAND}
    found: list[str] = []
    monkeypatch.setattr(command, "detect_provider", lambda _: "native")
    monkeypatch.setattr(lifecycle, "prepare", lambda _: None)
    monkeypatch.setattr(golden, "add", lambda *_: None)
    monkeypatch.setattr(binaries, "find", lambda *names, **_: found.extend(names))
    monkeypatch.setattr(prometheus, "find", lambda _, *, download: found.append("prometheus") if download else None)
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    (words,) = [line.split("tests.cluster ")[1].split() for line in makefile.splitlines() if "prepare" in line]
    monkeypatch.setattr(command, "build", lambda *_, **__: {})
    assert command.main(words) == 0
    assert found == [*binaries.OF_TESTS, "prometheus"]
