"""The provider `kind`: Kubernetes in Docker, with the storage classes and fake nodes of the native provider.

Volumes of the class `shared` are folders of one host folder that every node mounts (local-path's shared file system).
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .base import Cluster
from .binaries import find
from .cache import clusters_root, locked
from .docker_archive import read_content
from .errors import ClusterError
from .progress import Progress

PROVIDER = "kind"
SHARED = "/var/rlrun-volumes"
KIND_TIMEOUT_S = 600.0
READY_TIMEOUT_S = 120
LOCAL_PATH = "local-path-storage"


class KindCluster(Cluster):
    """A cluster of containers."""

    provider = PROVIDER

    def down(self) -> None:
        """Take the cluster down and remove its files."""
        down(self.name)

    def load_image(self, *archives: Path) -> None:
        """Load the archives into every node."""
        for archive in archives:
            read_content(archive)
            _kind("load", "image-archive", str(archive), "--name", _kind_name(self.name))


def up(name: str, *, nodes: int, kwok: bool, images: Sequence[Path], progress: Progress) -> KindCluster:
    """Create the cluster, or attach to it if it is up.

    Raises:
        ClusterError: kind fails; the message has its output, and its containers are deleted.
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
        try:
            cluster = _create(name, nodes, images, progress)
        except BaseException:
            # Without a record, nothing else could find the containers.
            with suppress(ClusterError):
                _kind("delete", "cluster", *_named(name))
            raise
        (folder / "cluster.json").write_text(json.dumps({"provider": PROVIDER, "nodes": nodes}))
        if kwok:
            _start_kwok(commands["kwok"], folder)
        return cluster


def _create(name: str, nodes: int, images: Sequence[Path], progress: Progress) -> KindCluster:
    """Create the containers; return the cluster once its nodes are Ready and have the images."""
    folder = clusters_root() / name
    config = folder / "kind.json"
    config.write_text(json.dumps(configuration(nodes, folder / "volumes")))
    _kind("create", "cluster", *_named(name), "--config", str(config), "--wait", f"{READY_TIMEOUT_S}s")
    progress("kind cluster created")
    cluster = KindCluster(name, folder / "kubeconfig", folder / "bin", _node_names(name))
    _storage(cluster)
    # kind waits only for the control plane.
    limit = f"--timeout={READY_TIMEOUT_S}s"
    cluster.kubectl("wait", "node", "--all", "--for=condition=Ready", limit, timeout=READY_TIMEOUT_S + 30)
    cluster.load_image(*images)
    return cluster


def attach(name: str) -> KindCluster | None:
    """Return the recorded cluster, or None if kind does not have it."""
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
    _empty_volumes(name)
    _kind("delete", "cluster", *_named(name))
    shutil.rmtree(folder)
    return True


def configuration(nodes: int, volumes: Path) -> dict[str, object]:
    """Return kind's configuration: a control plane and `nodes` workers, which all mount the host folder `volumes`."""
    mounts = [{"hostPath": str(volumes), "containerPath": SHARED}]
    roles = ["control-plane", *["worker"] * nodes]
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, "extraMounts": mounts} for role in roles],
    }


def _storage(cluster: KindCluster) -> None:
    """Let local-path create volumes in the shared folder, under the names of our storage classes."""
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


def _named(name: str) -> tuple[str, ...]:
    """Return options that select the cluster and keep kind away from the user's own kubeconfig."""
    return ("--name", _kind_name(name), "--kubeconfig", str(clusters_root() / name / "kubeconfig"))


def _containers(name: str) -> list[str]:
    """Return the containers of all machines; kind names the nodes after them."""
    return sorted(_kind("get", "nodes", "--name", _kind_name(name)).split())


def _node_names(name: str) -> tuple[str, ...]:
    return tuple(node for node in _containers(name) if "control-plane" not in node)


def _empty_volumes(name: str) -> None:
    """Delete the volumes' files from inside a node: users of pods own them, and only root can delete them."""
    for container in _containers(name)[:1]:
        _run("docker", "exec", container, "find", SHARED, "-mindepth", "1", "-delete")


def _kind(*arguments: str) -> str:
    return _run("kind", *arguments)


def _run(*command: str) -> str:
    shown = " ".join(command)
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=KIND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{shown}` did not end within {KIND_TIMEOUT_S:.0f} s") from None
    if result.returncode != 0:
        raise ClusterError(f"`{shown}` failed with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
