"""One native cluster of two nodes for all tests of this folder, and a small image for it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, up
from tests.cluster.cache import cache_root, locked
from tests.cluster.docker_archive import write_archive
from tests.cluster.progress import Progress

NAME = "selftest"
IMAGE = "localhost/rlrun-selftest:1"


def busybox() -> Path:
    """Debian's static busybox, unpacked into the cache and not installed."""
    folder = cache_root() / "busybox"
    program = folder / "bin" / "busybox"
    with locked("busybox"):
        if not program.exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["apt-get", "download", "-q", "busybox-static"], cwd=folder, check=True)
            subprocess.run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), str(folder)], check=True)
    return program


def make_image(archive: Path, mark: str) -> Path:
    """Make an image of busybox under the name IMAGE, with a file /mark that distinguishes builds."""
    program = busybox()
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"}
    write_archive(
        archive, IMAGE, {"bin/busybox": program.read_bytes(), "mark": f"{mark}\n".encode()}, ["/bin/sh"], links
    )
    return archive


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster. It ends with the tests, also after an abort."""
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("the native cluster needs root: run these tests with sudo")
    archive = make_image(tmp_path_factory.mktemp("image") / "one.tar", "one")
    with up(NAME, nodes=2, provider="native", images=[archive], tie=True, progress=Progress()) as running:
        yield running
