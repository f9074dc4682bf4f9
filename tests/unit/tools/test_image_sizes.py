"""Layers of images: sizes that docker, buildah and a registry report, and the lines that `make images` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import images
from tools.image_sizes import (
    Layer,
    buildah_layers,
    docker_command,
    docker_layers,
    image_digest,
    manifest_layers,
    read_layers,
    short_step,
    size_lines,
)

INSTALL = (
    "|2 ACCELERATOR=gpu UV_SYSTEM_CERTS=1 /bin/sh -c /opt/requirements/uv.sh pip install --no-deps --require-hashes "
    "--requirement /opt/requirements/common.txt"
)
HISTORY = [
    {"CreatedBy": INSTALL, "Size": "4600000000", "ID": "<missing>"},
    {"CreatedBy": "COPY a.txt /b # buildkit", "Size": "1200", "ID": "<missing>"},
    {"CreatedBy": "ENV A=b", "Size": "0", "ID": "<missing>"},
    {"CreatedBy": "/bin/sh -c #(nop) ADD file:1 in /", "Size": "78000000", "ID": "<missing>"},
]
"""`docker history`: the newest layer first."""
LAYERS = [
    Layer(78_000_000, HISTORY[3]["CreatedBy"]),
    Layer(0, "ENV A=b"),
    Layer(1200, HISTORY[1]["CreatedBy"]),
    Layer(4_600_000_000, INSTALL),
]
IMAGE = {
    "OCIv1": {
        "rootfs": {"diff_ids": ["sha256:a", "sha256:b"]},
        "history": [{"created_by": "base"}, {"created_by": "ENV", "empty_layer": True}, {"created_by": INSTALL}],
    }
}
STORED = [
    {"id": "2", "diff-digest": "sha256:b", "diff-size": 7_000_000},
    {"id": "1", "diff-digest": "sha256:a", "diff-size": 5_000_000},
    {"id": "3"},
]


def test_docker_history_becomes_layers_from_base_on() -> None:
    assert docker_layers("\n".join(map(json.dumps, HISTORY))) == LAYERS
    with pytest.raises(ValueError, match="docker history reported no layers"):
        docker_layers("Error: no such image")


def test_buildah_layers_have_sizes_of_storage(tmp_path: Path) -> None:
    assert buildah_layers(IMAGE, STORED) == [Layer(5_000_000, "base"), Layer(7_000_000, INSTALL)]
    with pytest.raises(ValueError, match="lacks a layer"):
        buildah_layers(IMAGE, STORED[1:])
    (tmp_path / "overlay-layers").mkdir()
    (tmp_path / "overlay-layers/layers.json").write_text(json.dumps(STORED))
    answers = {
        ("buildah", "inspect", "--type", "image", "a:1"): json.dumps(IMAGE),
        ("buildah", "info"): json.dumps({"store": {"GraphRoot": str(tmp_path), "GraphDriverName": "overlay"}}),
    }
    assert read_layers("buildah", "a:1", lambda command: answers[tuple(command)])[1] == Layer(7_000_000, INSTALL)


def test_registry_manifest_gives_compressed_layers_of_the_platform() -> None:
    index = {
        "manifests": [
            {"digest": "sha256:attestation", "platform": {"os": "unknown", "architecture": "unknown"}},
            {"digest": "sha256:image", "platform": {"os": "linux", "architecture": "amd64"}},
        ]
    }
    assert image_digest(index) == "sha256:image"
    manifest = {"layers": [{"size": 30_000_000}, {"size": 2_000_000_000}]}
    assert image_digest(manifest) is None
    assert manifest_layers(manifest) == [Layer(30_000_000, ""), Layer(2_000_000_000, "")]
    with pytest.raises(ValueError, match="lists no layers"):
        manifest_layers(index)


@pytest.mark.parametrize(
    ("step", "short"),
    [
        (INSTALL, "packages of common.txt"),
        ("|1 A=b /bin/sh -c apt-get update && apt-get install --yes gcc", "system packages"),
        (
            "RUN /opt/requirements/uv.sh pip install --no-deps --no-index --no-cache /opt/requirements/dist/*.whl",
            "rlrun",
        ),
        ("/bin/sh -c #(nop) COPY file:1 in /opt ", "COPY file:1 in /opt"),
        ("/bin/sh -c #(nop) COPY dir:1 in /opt/rlrun/lib ", "packages of flash-attention-3.txt"),
        ("COPY /opt/rlrun/lib /opt/rlrun/lib # buildkit", "packages of flash-attention-3.txt"),
        ("COPY /dist /opt/requirements/dist # buildkit", "wheel of rlrun"),
        ("", "base"),
    ],
)
def test_step_is_short(step: str, short: str) -> None:
    assert short_step(step) == short


def test_sizes_are_printed_with_sum_and_small_layers_in_one_line() -> None:
    assert size_lines("rlrun-trainer", LAYERS) == [
        "rlrun-trainer: 4.68 GB unpacked",
        "      78.0 MB  base",
        "   4,600.0 MB  packages of common.txt",
        "       0.0 MB  smaller layers",
    ]
    assert size_lines("a", LAYERS[:1], compressed=True)[0] == "a: 0.08 GB compressed"


def test_make_images_prints_layers_of_each_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(command: Sequence[str], *, otherwise: str) -> str:
        history = "\n".join(map(json.dumps, HISTORY))
        return history if command == docker_command(command[-1]) and "operator" not in command[-1] else otherwise

    monkeypatch.setattr(images, "_output", answer)
    monkeypatch.setattr(images, "_run", lambda *_: None)
    monkeypatch.setattr(images.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert images.main(["--registry", "r.example.com", "--tag", "1", "--output", str(tmp_path / "images.yaml")]) == 0
    printed = capsys.readouterr()
    for image in ("trainer", "inference"):
        assert f"r.example.com/rlrun-{image}:1: 4.68 GB unpacked\n      78.0 MB  base\n" in printed.out
    assert printed.out.count("packages of common.txt") == 2
    assert "r.example.com/rlrun-operator:1: sizes of the layers are unknown" in printed.err, (
        "and the build still succeeds"
    )


def test_release_prints_compressed_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {
        "r/rlrun-trainer@sha256:index": {"manifests": [{"digest": "sha256:image", "platform": {"os": "linux"}}]},
        "r/rlrun-trainer@sha256:image": {"layers": [{"size": 30_000_000}, {"size": 2_000_000_000}]},
    }
    monkeypatch.setattr(images, "_output", lambda command, *, otherwise: json.dumps(answers[command[-1]]))
    images._print_pushed_sizes("r/rlrun-trainer@sha256:index")
    assert capsys.readouterr().out.startswith("r/rlrun-trainer@sha256:index: 2.03 GB compressed\n")
