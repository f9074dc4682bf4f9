"""StorageClasses of a cluster, and the first one whose driver is known to make `ReadWriteMany` volumes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_KUBECTL_SECONDS = 15.0
_DEFAULT = "storageclass.kubernetes.io/is-default-class"
SHARED_DRIVERS = (
    "nfs.csi.k8s.io",
    "nfs-subdir-external-provisioner",
    "cephfs.csi.ceph.com",
    "efs.csi.aws.com",
    "fsx.csi.aws.com",
    "filestore.csi.storage.gke.io",
    "lustre.csi.storage.gke.io",
    "file.csi.azure.com",
    "azurelustre.csi.azure.com",
    "fss.csi.oraclecloud.com",
    "csi.weka.io",
    "csi.vastdata.com",
    "csi.juicefs.com",
    "beegfs.csi.netapp.com",
)
"""Ends of the names of provisioners whose volumes several nodes can write: NFS, CephFS (Rook puts its namespace first), EFS, FSx, Lustre,
Filestore, Azure Files, OCI File Storage, Weka, VAST, JuiceFS, BeeGFS. The list has no drivers for which this depends on the class's
parameters or on the storage behind them (Longhorn, Trident, Portworx)."""


@dataclass(frozen=True)
class StorageClass:
    """A StorageClass of the cluster."""

    name: str
    provisioner: str
    is_default: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether the driver is known to make `ReadWriteMany` volumes."""
        return self.provisioner.endswith(SHARED_DRIVERS)


def read_storage_classes() -> list[StorageClass] | str:
    """Return the StorageClasses by name, or the last line of kubectl's error."""
    command = ("kubectl", "get", "storageclass", "--output=json", "--request-timeout=10s")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_KUBECTL_SECONDS, check=False)
        if asked.returncode:
            return (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        return parse_storage_classes(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{type(error).__name__}: no answer"


def parse_storage_classes(printed: str) -> list[StorageClass]:
    """Return the StorageClasses in the output of kubectl.

    Raises:
        ValueError: it is not a list of Kubernetes.
    """
    try:
        items = json.loads(printed)["items"]
        found = [
            StorageClass(
                item["metadata"]["name"],
                item["provisioner"],
                (item["metadata"].get("annotations") or {}).get(_DEFAULT) == "true",
            )
            for item in items
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the list of StorageClasses cannot be read ({error!r})") from None
    return sorted(found, key=lambda one: one.name)


def propose_class(classes: Sequence[StorageClass]) -> StorageClass | None:
    """Return the default class if its driver is known to share volumes, else the first such class by name, else None."""
    shared = [one for one in classes if one.is_shared]
    return next((one for one in shared if one.is_default), shared[0] if shared else None)
