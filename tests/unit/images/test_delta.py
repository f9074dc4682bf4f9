"""An archive for a containerd that has some of the layers already."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.cluster.images.delta import write_delta

NAME = "localhost/rlrun-trainer:0123"
LAYERS = [b"base" * 1000, b"torch" * 1000, b"code"]
DIGESTS = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in LAYERS]
CONFIG = json.dumps({"os": "linux", "rootfs": {"type": "layers", "diff_ids": DIGESTS}}).encode()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """As buildah writes it: layers at the top, found by symbolic links in folders."""
    file = tmp_path / "image.tar"
    with tarfile.open(file, "w") as tar:
        names = []
        for index, layer in enumerate(LAYERS):
            entry = tarfile.TarInfo(f"{index}.tar")
            entry.size = len(layer)
            tar.addfile(entry, io.BytesIO(layer))
            link = tarfile.TarInfo(f"folder{index}/layer.tar")
            link.type, link.linkname = tarfile.SYMTYPE, f"../{index}.tar"
            tar.addfile(link)
            names.append(link.name if index else entry.name)
        manifest = json.dumps([{"Config": "config.json", "RepoTags": [NAME], "Layers": names}]).encode()
        for name, content in (("config.json", CONFIG), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return file


def contents(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        return {entry.name: content.read() for entry in tar if (content := tar.extractfile(entry)) is not None}


@pytest.mark.parametrize("has", [[], DIGESTS[:2], DIGESTS])
def test_the_delta_holds_what_containerd_lacks_and_names_the_rest(
    archive: Path, tmp_path: Path, has: list[str]
) -> None:
    delta = tmp_path / "delta.tar"
    assert write_delta(archive, delta, has.__contains__) == [digest for digest in DIGESTS if digest not in has]
    files = contents(delta)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    blobs = {
        f"sha256:{name.rpartition('/')[2]}": content
        for name, content in files.items()
        if name.startswith("blobs/sha256/")
    }
    assert all(digest == f"sha256:{hashlib.sha256(content).hexdigest()}" for digest, content in blobs.items())
    (image,) = json.loads(files["index.json"])["manifests"]
    assert image["annotations"] == {"io.containerd.image.name": NAME}
    manifest = json.loads(blobs[image["digest"]])
    assert [(layer["digest"], layer["size"]) for layer in manifest["layers"]] == [
        (digest, len(layer)) for digest, layer in zip(DIGESTS, LAYERS, strict=True)
    ]
    assert blobs[manifest["config"]["digest"]] == CONFIG
    assert blobs.keys() - {image["digest"], manifest["config"]["digest"]} == set(DIGESTS) - set(has)
