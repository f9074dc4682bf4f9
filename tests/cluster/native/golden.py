"""The golden containerd root: every image archive is imported and unpacked once, and nodes link to it.

A node's copy costs 2 MB and some hundredths of a second: copies of the two databases, hard links for the blobs, one
symbolic link for each unpacked layer. Containers write into their own layers, so nothing changes the targets of the
links. An image's name means the archive that was imported last.

While any cluster exists, an import only adds. The first import without clusters removes builds that have a later build
of the same repository, and all layers without an image.
"""

import json
import os
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.binaries import find
from tests.cluster.cache import cache_root, clusters_root, full_disk_advice, locked
from tests.cluster.docker_archive import ArchiveContent, read_content, write_archive
from tests.cluster.errors import ClusterError
from tests.cluster.preparation import commands
from tests.cluster.preparation.output import is_disk_full
from tests.cluster.progress import Progress

from . import components
from .namespaces import ENVIRONMENT

SNAPSHOTTER = "io.containerd.snapshotter.v1.overlayfs"
METADATA = "io.containerd.metadata.v1.bolt"
CONTENT = "io.containerd.content.v1.content"
IMPORT_TIMEOUT_S = 1800.0
LOCK = "golden"


def golden_root() -> Path:
    """Return the folder of the golden root and its records."""
    return cache_root() / "golden"


def add(archives: Sequence[Path], progress: Progress) -> None:
    """Import the missing archives and the pause image.

    Raises:
        ClusterError: an archive cannot be read, or containerd refuses it.
    """
    contents = [(archive.resolve(), read_content(archive)) for archive in archives]
    with locked(LOCK, waiting=progress.step("images: wait for another process that imports some")):
        imported = _imported()
        missing = [(archive, content) for archive, content in contents if not content.is_in(imported)]
        pause = find("pause", progress=progress)["pause"]
        pause_archive = golden_root() / "pause.tar"
        golden_root().mkdir(parents=True, exist_ok=True)
        write_archive(pause_archive, components.PAUSE_IMAGE, {"pause": pause.read_bytes()}, ["/pause"])
        pause_content = read_content(pause_archive)
        if not pause_content.is_in(imported):
            missing.insert(0, (pause_archive, pause_content))
        if not missing:
            return
        table = imported
        for _, content in missing:
            table = with_newest(table, content)
        collect = not any(clusters_root().glob("*/"))
        requested = {name for _, content in contents for name in content.names}
        drop = [name for name in outdated(table, requested) if name in imported] if collect else []
        # An import that fails half-way may have dropped names already, which must not stay in the table.
        _write_table({name: key for name, key in imported.items() if name not in drop})
        _import(Request(collect, drop, [str(archive) for archive, _ in missing]), progress)
        _write_table({name: key for name, key in table.items() if name not in drop})
        for archive, content in missing:
            progress(f"image {', '.join(content.names)} imported from {archive}")


def with_newest(imported: dict[str, str], content: ArchiveContent) -> dict[str, str]:
    """Return the table of keys by image name after one more import; the newest entries come last."""
    others = {name: key for name, key in imported.items() if name not in content.names}
    return others | dict.fromkeys(content.names, content.key)


def outdated(imported: dict[str, str], requested: Collection[str]) -> list[str]:
    """Return images with a later build of their repository, without the requested ones."""
    newest = {name.rpartition(":")[0]: name for name in imported}
    return [name for name in imported if name not in newest.values() and name not in requested]


def _table() -> Path:
    return golden_root() / "images.json"


def _imported() -> dict[str, str]:
    if not _table().exists():
        return {}
    table: dict[str, str] = json.loads(_table().read_text())
    return table


def _write_table(table: dict[str, str]) -> None:
    new = _table().with_suffix(".new")
    new.write_text(json.dumps(table, indent=1))
    new.rename(_table())


@dataclass(frozen=True)
class Request:
    """Request to `golden_import`.

    Attributes:
        collect: whether to delete layers without an image name.
        drop: names to delete.
        archives: archives to import.
    """

    collect: bool
    drop: list[str]
    archives: list[str]


def _import(request: Request, progress: Progress) -> None:
    folder = golden_root()
    config = folder / "containerd.toml"
    config.write_text(components.containerd_config(str(folder / "root"), cri=False))
    script = Path(__file__).with_name("golden_import.py")
    log = folder / "containerd.log"
    log.write_text("")
    command = [
        *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-I", "-S", str(script), str(config), str(log), json.dumps(asdict(request))),
    ]
    output = folder / "import.log"
    output.write_text("")
    name = f"import of {len(request.archives)} images"
    code = commands.run(
        command, output, progress=progress, name=name, environment=ENVIRONMENT, timeout=IMPORT_TIMEOUT_S
    )
    if code != 0:
        text = output.read_text(errors="replace").strip()
        fix = f": {full_disk_advice()}" if is_disk_full(text) else ""
        raise ClusterError(f"importing {', '.join(request.archives)} failed{fix}\n{text}\nsee {log}")


def furnish(root: Path) -> dict[str, str]:
    """Make the containerd root of a node with every golden image.

    Returns:
        The keys of their archives by image name.
    """
    with locked(LOCK, shared=True):
        golden = golden_root() / "root"
        for part, database in ((SNAPSHOTTER, "metadata.db"), (METADATA, "meta.db")):
            (root / part).mkdir(parents=True)
            shutil.copy(golden / part / database, root / part / database)
        for layer in (golden / SNAPSHOTTER / "snapshots").iterdir():
            link = root / SNAPSHOTTER / "snapshots" / layer.name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(layer)
        blobs = root / CONTENT / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for blob in (golden / CONTENT / "blobs" / "sha256").iterdir():
            os.link(blob, blobs / blob.name)
        return _imported()
