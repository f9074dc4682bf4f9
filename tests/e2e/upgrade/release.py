"""A release of the product: its charts and its images."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.api import Cluster
from tests.cluster.cache import cache_root, locked
from tests.cluster.deploy import INSTALL_SECONDS, RELEASE, RESTRICTED, SYSTEM
from tests.cluster.images.builder import BuiltImage, build_with
from tests.cluster.images.engines import choose, docker_works
from tests.cluster.progress import Progress

ROOT = Path(__file__).resolve().parents[3]
_PARTS = (
    *("charts", "operator", "workloads", "requirements", "pyproject.toml", "LICENSE", ".dockerignore"),
    *("Dockerfile.operator", "Dockerfile.stub"),
)


@dataclass(frozen=True)
class Release:
    """Files and images of an installation.

    Attributes:
        name: the commit, or `present`.
        root: folder with a tree of its files.
        images: references of `operator` and `stub`.
    """

    name: str
    root: Path
    images: Mapping[str, BuiltImage]

    @property
    def stub(self) -> str:
        """Reference of the image of all roles."""
        return self.images["stub"].reference

    def install_crds(self, cluster: Cluster) -> None:
        """Install the CRDs: the first step of an installation or upgrade, and the last step of a rollback."""
        chart = str(self.root / "charts" / "rlrun-crds")
        cluster.helm("upgrade", "--install", "rlrun-crds", chart, "--wait", timeout=INSTALL_SECONDS)

    def install_operator(self, cluster: Cluster, watch: tuple[str, ...], values: Mapping[str, str]) -> None:
        """Install the operator; return when it is ready."""
        settings = {
            "image": self.images["operator"].reference,
            **{f"images.{role}": self.stub for role in ("trainer", "orchestrator", "inference")},
            "watchNamespaces": "{" + ",".join(watch) + "}",
            "readNodes": "true",
            **values,
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        chart, limit = str(self.root / "charts" / "rlrun-operator"), f"{INSTALL_SECONDS:.0f}s"
        flags = ("--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", limit)
        cluster.helm("upgrade", "--install", RELEASE, chart, *flags, *sets, timeout=INSTALL_SECONDS + 30)


def present(progress: Progress) -> Release:
    """Return the release of this checkout."""
    return Release("present", ROOT, _built(ROOT, progress))


def exported(commit: str, folder: Path, progress: Progress) -> Release:
    """Return the release of a commit of this repository.

    Raises:
        subprocess.CalledProcessError: the clone does not have the commit.
    """
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, *_PARTS]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    root = folder / commit
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(root, filter="data")
    return Release(commit, root, _built(root, progress))


def _built(root: Path, progress: Progress) -> dict[str, BuiltImage]:
    """Build images in a separate folder, because the folder of the tests keeps only two archives of each image."""
    archives = cache_root() / "releases"
    archives.mkdir(parents=True, exist_ok=True)
    with locked("images"):  # one storage of the builder for all folders
        return build_with(
            choose(docker_works, progress), ("operator", "stub"), root=root, archives=archives, progress=progress
        )


def make_namespaces(cluster: Cluster, names: tuple[str, ...]) -> None:
    """Create namespaces for runs, under Pod Security `restricted`."""
    for name in names:
        if not cluster.kubectl("get", "namespace", name, "--ignore-not-found"):
            cluster.kubectl("create", "namespace", name)
        cluster.kubectl("label", "namespace", name, RESTRICTED, "--overwrite")
