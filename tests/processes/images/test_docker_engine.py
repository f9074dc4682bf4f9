"""Docker commands of image builds, against a fake docker program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.images.engines import INDEX_ARGUMENTS, Docker
from tests.cluster.progress import Progress
from tools import images


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """File that receives one line per call of `docker` or `kind`: the attestations' variable and the arguments."""
    log = tmp_path / "calls"
    for program in ("docker", "kind"):
        stand_in = tmp_path / "programs" / program
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f'#!/bin/sh\necho "${{BUILDX_NO_DEFAULT_ATTESTATIONS:-0}} {program} $*" >>{log}\n')
        stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    for name in ("BUILDX_NO_DEFAULT_ATTESTATIONS", *INDEX_ARGUMENTS):
        monkeypatch.delenv(name, raising=False)
    return log


def test_image_is_built_without_attestation_and_saved(calls: Path, tmp_path: Path) -> None:
    engine = Docker(Progress())
    engine.build(tmp_path, "localhost/a:1", {"ACCELERATOR": "cpu"}, tmp_path / "log")
    engine.save("localhost/a:1", tmp_path / "a.tar", tmp_path / "log")
    assert calls.read_text().splitlines() == [
        f"1 docker build --tag localhost/a:1 --build-arg ACCELERATOR=cpu {tmp_path}",
        f"0 docker save --output {tmp_path / 'a.tar'} localhost/a:1",
    ]


@pytest.mark.parametrize(("place", "without"), [(["--kind", "kind"], "1"), (["--registry", "r.example.com"], "0")])
def test_only_images_for_kind_are_built_without_attestation(
    calls: Path, tmp_path: Path, place: list[str], without: str
) -> None:
    assert images.main([*place, "--accelerator", "cpu", "--output", str(tmp_path / "images.yaml")]) == 0
    builds = [line for line in calls.read_text().splitlines() if " docker build " in line]
    assert [line[0] for line in builds] == [without] * len(images.IMAGES)
