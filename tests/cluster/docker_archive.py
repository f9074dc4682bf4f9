"""Image archives in Docker's format: their content, and a writer for small ones."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .binaries import ARCH
from .errors import ClusterError


@dataclass(frozen=True)
class ArchiveContent:
    """Content of an archive as its manifest describes it.

    Attributes:
        key: digest over its images' names and configurations, which name every layer by content. It needs no read of
            the layers: those of the inference image have 5 GB.
        names: the images' names in the archive.
    """

    key: str
    names: tuple[str, ...]

    def is_in(self, imported: Mapping[str, str]) -> bool:
        """Return whether all names mean this archive in a table of keys by name."""
        return all(imported.get(name) == self.key for name in self.names)


def read_content(archive: Path) -> ArchiveContent:
    """Read the manifest of an archive.

    Raises:
        ClusterError: the file does not exist, or is not an archive of `docker save`.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            manifest = json.loads(_member(tar, "manifest.json"))
            digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
            for image in manifest:
                digest.update(_member(tar, image["Config"]))
    except FileNotFoundError:
        raise ClusterError(f"image archive {archive} does not exist") from None
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise ClusterError(
            f"{archive} is no uncompressed docker archive ({error}): make it with "
            "`docker save -o FILE IMAGE` or `buildah push IMAGE docker-archive:FILE:IMAGE`"
        ) from None
    names = tuple(name for image in manifest for name in image["RepoTags"] or [])
    if not names:
        raise ClusterError(f"{archive} holds an image without a name: save it by name, not by id")
    return ArchiveContent(digest.hexdigest(), names)


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()


def write_archive(
    archive: Path, name: str, files: Mapping[str, bytes], command: Sequence[str], links: Mapping[str, str] | None = None
) -> None:
    """Write an image of one layer.

    Args:
        name: the image's name with tag.
        files: content of executable files by path in the image.
        command: the entry point.
        links: target of symbolic links by path in the image.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path, content in files.items():
            _add(tar, path, content, 0o755)
        for path, target in (links or {}).items():
            link = tarfile.TarInfo(path)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    environment = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    config = json.dumps(
        {
            "architecture": ARCH,
            "os": "linux",
            "config": {"Entrypoint": list(command), "Env": environment},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        _add(tar, config_name, config)
        _add(tar, "manifest.json", json.dumps(manifest).encode())
        _add(tar, f"{digest}/layer.tar", layer.getvalue())


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
