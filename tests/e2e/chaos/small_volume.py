"""A volume on both nodes that is small enough for a test to fill."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.native.cluster import NativeCluster
from tests.cluster.native.spec import VOLUMES

MEBIBYTES = 192
"""Size in MiB. A run needs 64 free MiB at its start."""
FILLER = "filler"


@contextmanager
def small_volume(cluster: NativeCluster, namespace: str, claim: str) -> Iterator[Path]:
    """Create a claim bound to a separate file system; yield its folder as a path of this machine.

    One block device is mounted in the namespaces of both nodes, which the kernel treats as one file system. It is
    mounted nowhere else, and the device is removed with its last mount, so the end of the nodes' processes leaves
    nothing.
    """
    image, path = cluster.state.folder / f"{claim}.img", f"{VOLUMES}/{claim}"
    with image.open("wb") as file:
        file.truncate(MEBIBYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    shown = subprocess.run(
        ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        for node in cluster.nodes:
            cluster.sh(node, "mkdir", "-p", path)
            cluster.sh(node, "mount", shown, path)
        cluster.sh(cluster.nodes[0], "chmod", "0777", path)
    finally:
        subprocess.run(["losetup", "--detach", shown], check=True)  # removed with its last mount
    try:
        for document in _documents(namespace, claim, path):
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))
        yield cluster.folder_of(cluster.nodes[0], path)
    finally:
        cluster.kubectl("delete", f"pv/{claim}", "--ignore-not-found", "--wait=false", check=False)
        for node in cluster.nodes:
            cluster.sh(node, "umount", "--lazy", path)
        image.unlink()


def fill(folder: Path) -> None:
    """Fill the volume completely."""
    with (folder / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def empty(folder: Path) -> None:
    """Free the space."""
    (folder / FILLER).unlink(missing_ok=True)


def _documents(namespace: str, claim: str, path: str) -> list[dict[str, Any]]:
    size = {"storage": f"{MEBIBYTES}Mi"}
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": claim}
    volume = {
        "capacity": size,
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": path},
        "claimRef": {"namespace": namespace, "name": claim},
    }
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {**shared, "resources": {"requests": size}},
        },
    ]
