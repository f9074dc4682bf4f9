"""The provider `kubeconfig`: an existing cluster named by `RLRUN_KUBECONFIG`. It is used, and never changed."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from .base import Cluster
from .binaries import find
from .cache import clusters_root
from .errors import ClusterError
from .progress import Progress

PROVIDER = "kubeconfig"


class GivenCluster(Cluster):
    """A cluster that another system runs."""

    provider = PROVIDER

    def down(self) -> None:
        """Remove it from the records."""
        down(self.name)

    def load_image(self, *archives: Path) -> None:
        """Refuse, because the source of this cluster's images is unknown."""
        if archives:
            raise ClusterError(
                f"cannot load {', '.join(map(str, archives))} into cluster {self.name}, which RLRUN_KUBECONFIG gives: "
                "push the images to a registry that its nodes pull from"
            )


def up(name: str, *, images: Sequence[Path], progress: Progress) -> GivenCluster:
    """Check that the cluster answers, and record it as `name`.

    Raises:
        ClusterError: the kubeconfig does not exist, the cluster does not answer, or images are to be loaded.
    """
    kubeconfig = Path(os.environ["RLRUN_KUBECONFIG"]).expanduser().resolve()
    if not kubeconfig.is_file():
        raise ClusterError(f"RLRUN_KUBECONFIG: {kubeconfig} does not exist")
    folder = clusters_root() / name
    commands = find("kube", "helm", progress=progress)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for command in ("kubectl", "helm"):
        link = folder / "bin" / command
        link.unlink(missing_ok=True)
        link.symlink_to(commands[command])
    (folder / "cluster.json").write_text(json.dumps({"provider": PROVIDER, "kubeconfig": str(kubeconfig)}))
    try:
        cluster = _cluster(name, kubeconfig)
        cluster.load_image(*images)
    except ClusterError:
        shutil.rmtree(folder)
        raise
    progress(f"{kubeconfig} leads to a cluster of {len(cluster.nodes)} nodes")
    return cluster


def attach(name: str) -> GivenCluster | None:
    """Return the recorded cluster, or None if it does not answer."""
    record = json.loads((clusters_root() / name / "cluster.json").read_text())
    try:
        return _cluster(name, Path(record["kubeconfig"]))
    except ClusterError:
        return None


def down(name: str) -> bool:
    """Remove the cluster from the records; the cluster itself is unchanged."""
    shutil.rmtree(clusters_root() / name)
    return True


def _cluster(name: str, kubeconfig: Path) -> GivenCluster:
    cluster = GivenCluster(name, kubeconfig, clusters_root() / name / "bin", ())
    listed = cluster.kubectl("get", "nodes", "-o", "name", timeout=20)
    cluster.nodes = tuple(line.removeprefix("node/") for line in listed.split())
    return cluster
