"""An image archive without the layers that a containerd has.

`ctr images import` copies and hashes every layer of an archive, also those that it has: gigabytes for one changed line of code. Of an
OCI archive it reads what is there and takes the rest from its store, so this module writes one with the missing layers alone.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


def write_delta(archive: Path, delta: Path, has: Callable[[str], bool]) -> list[str]:
    """Write an OCI archive of the images in a docker archive, without the layers for which `has` is true.

    Args:
        archive: an uncompressed archive of `docker save`.
        delta: where to write.
        has: whether containerd has the content of a digest, as `sha256:...`.

    Returns:
        The digests of the layers that were written.
    """
    written: list[str] = []
    index: list[dict[str, Any]] = []
    with tarfile.open(archive, "r:") as source, tarfile.open(delta, "w") as target:
        _add(target, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        for image in json.loads(_read(source, "manifest.json")):
            config = _read(source, image["Config"])
            layers = []
            for digest, name in zip(json.loads(config)["rootfs"]["diff_ids"], image["Layers"], strict=True):
                member = _file(source, name)
                layers.append({"mediaType": LAYER_TYPE, "digest": digest, "size": member.size})
                if digest not in written and not has(digest):
                    _copy(source, member, target, digest)
                    written.append(digest)
            descriptor = {"mediaType": CONFIG_TYPE, "digest": _blob(target, config), "size": len(config)}
            manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": descriptor, "layers": layers}
            content = json.dumps(manifest).encode()
            described = {"mediaType": MANIFEST_TYPE, "digest": _blob(target, content), "size": len(content)}
            index += [
                {**described, "annotations": {"io.containerd.image.name": name}} for name in image["RepoTags"] or []
            ]
        _add(target, "index.json", json.dumps({"schemaVersion": 2, "manifests": index}).encode())
    return written


def _file(tar: tarfile.TarFile, name: str) -> tarfile.TarInfo:
    """A file of the archive; buildah writes a layer once and links to it by symbolic links."""
    member = tar.getmember(name)
    return _file(tar, normpath(f"{dirname(name)}/{member.linkname}")) if member.issym() else member


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(_file(tar, name))
    assert file is not None
    return file.read()


def _copy(source: tarfile.TarFile, member: tarfile.TarInfo, target: tarfile.TarFile, digest: str) -> None:
    file = source.extractfile(member)
    assert file is not None
    entry = tarfile.TarInfo(_path(digest))
    entry.size = member.size
    target.addfile(entry, file)


def _blob(tar: tarfile.TarFile, content: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    _add(tar, _path(digest), content)
    return digest


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
