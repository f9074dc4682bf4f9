"""The provider `kind`: Kubernetes in Docker, with the storage classes and fake nodes of the native provider.

Volumes of the class `shared` are folders of one host folder that every node mounts (local-path's shared file system).
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .base import Cluster
from .binaries import find
from .cache import clusters_root, locked
from .docker_archive import read_content
from .errors import ClusterError
from .progress import Progress

PROVIDER = "kind"
SHARED = "/var/rlrun-volumes"
CREATE_TIMEOUT_S = 600.0
LOCAL_PATH = "local-path-storage"


class KindCluster(Cluster):
    """A cluster of containers."""

    provider = PROVIDER

    def down(self) -> None:
        """Take the cluster down and remove what it left."""
        down(self.name)

    def load_image(self, *archives: Path) -> None:
        """Load the archives into every node."""
        for archive in archives:
            read_content(archive)
            _kind("load", "image-archive", str(archive), "--name", _kind_name(self.name))


def up(name: str, *, nodes: int, kwok: bool, images: Sequence[Path], progress: Progress) -> KindCluster:
    """Create the cluster, or attach to it when it is up.

    Raises:
        ClusterError: kind fails; its message is in the error.
    """
    with locked(f"cluster-{name}"):
        folder = clusters_root() / name
        if (folder / "cluster.json").exists() and (cluster := attach(name)):
            cluster.load_image(*images)
            progress(f"cluster {name} is up already")
            return cluster
        commands = find("kube", "helm", *(["kwok"] if kwok else []), progress=progress)
        for part in ("bin", "volumes"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "volumes").chmod(0o1777)
        for command in ("kubectl", "helm"):
            (folder / "bin" / command).unlink(missing_ok=True)
            (folder / "bin" / command).symlink_to(commands[command])
        config = folder / "kind.json"
        config.write_text(json.dumps(configuration(nodes, folder / "volumes")))
        kubeconfig = folder / "kubeconfig"
        arguments = ("--name", _kind_name(name), "--config", str(config), "--kubeconfig", str(kubeconfig))
        _kind("create", "cluster", *arguments, "--wait", "120s")
        (folder / "cluster.json").write_text(json.dumps({"provider": PROVIDER, "nodes": nodes}))
        progress("kind cluster created")
        cluster = KindCluster(name, kubeconfig, folder / "bin", _node_names(name))
        _storage(cluster)
        cluster.load_image(*images)
        if kwok:
            _start_kwok(commands["kwok"], folder)
        return cluster


def attach(name: str) -> KindCluster | None:
    """The recorded cluster; None when kind does not know it."""
    folder = clusters_root() / name
    if _kind_name(name) not in _kind("get", "clusters").split():
        return None
    return KindCluster(name, folder / "kubeconfig", folder / "bin", _node_names(name))


def down(name: str) -> bool:
    """Delete the cluster and its folder."""
    folder = clusters_root() / name
    pid_file = folder / "kwok.pid"
    if pid_file.exists() and b"kwok" in _command_line(int(pid_file.read_text())):
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
    _kind("delete", "cluster", "--name", _kind_name(name))
    shutil.rmtree(folder)
    return True


def configuration(nodes: int, volumes: Path) -> dict[str, object]:
    """kind's configuration: a control plane and `nodes` workers, which all mount the host folder `volumes`."""
    mounts = [{"hostPath": str(volumes), "containerPath": SHARED}]
    roles = ["control-plane", *["worker"] * nodes]
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, "extraMounts": mounts} for role in roles],
    }


def _storage(cluster: KindCluster) -> None:
    """Let local-path make volumes in the shared folder, under our class names."""
    settings = json.dumps({"data": {"config.json": json.dumps({"sharedFileSystemPath": SHARED})}})
    cluster.kubectl("-n", LOCAL_PATH, "patch", "configmap", "local-path-config", "--type=merge", "-p", settings)
    cluster.kubectl("-n", LOCAL_PATH, "rollout", "restart", "deployment/local-path-provisioner")
    cluster.kubectl("delete", "storageclass", "standard", "--ignore-not-found")
    for name, provisioner, default in (
        ("shared", "rancher.io/local-path", "true"),
        ("broken", "kubernetes.io/no-provisioner", "false"),
    ):
        annotations = {"storageclass.kubernetes.io/is-default-class": default}
        item = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name, "annotations": annotations},
            "provisioner": provisioner,
        }
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(item))


def _start_kwok(program: Path, folder: Path) -> None:
    command = [
        str(program),
        f"--kubeconfig={folder / 'kubeconfig'}",
        "--config=/dev/null",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
    ]
    with (folder / "kwok.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (folder / "kwok.pid").write_text(str(process.pid))


def _kind_name(name: str) -> str:
    return f"rlrun-{name}"


def _node_names(name: str) -> tuple[str, ...]:
    listed = _kind("get", "nodes", "--name", _kind_name(name)).split()
    return tuple(sorted(node for node in listed if "control-plane" not in node))


def _kind(*arguments: str) -> str:
    result = subprocess.run(["kind", *arguments], capture_output=True, text=True, timeout=CREATE_TIMEOUT_S)
    if result.returncode != 0:
        raise ClusterError(f"`kind {' '.join(arguments)}` failed with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
