"""`prepare --images`: what takes minutes is done before the tests begin, so that no test waits for an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import __main__ as command
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
