"""The folder of one cluster below the cache: its content, and the record of a running cluster."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.cache import clusters_root

from .plan import Plan


@dataclass(frozen=True)
class MachineFolder:
    """Files of one machine on disk, which survive a power cycle.

    Attributes:
        lib: its /var/lib.
        log: its /var/log.
        tmp: its /tmp.
        logs: output of its daemons, one file each.
        control: pid files, and the list of daemons to stop.
    """

    folder: Path

    @property
    def lib(self) -> Path:
        return self.folder / "lib"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    @property
    def logs(self) -> Path:
        return self.folder / "out"

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    def read_images(self) -> dict[str, str]:
        """Return the keys of the archives (`docker_archive.ArchiveContent`) that a node has, by image name."""
        table: dict[str, str] = json.loads((self.folder / "images.json").read_text())
        return table

    def write_images(self, table: dict[str, str]) -> None:
        """Write the table that `read_images` returns."""
        (self.folder / "images.json").write_text(json.dumps(table, indent=1))

    def make(self) -> None:
        """Make all folders."""
        for path in (self.lib, self.log, self.tmp, self.logs, self.control):
            path.mkdir(parents=True, exist_ok=True)
        self.tmp.chmod(0o1777)


@dataclass(frozen=True)
class State:
    """The folder of the cluster `name`."""

    name: str

    @property
    def folder(self) -> Path:
        return clusters_root() / self.name

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, as the host uses it."""
        return self.folder / "kubeconfig"

    @property
    def bin(self) -> Path:
        """Folder that contains kubectl and helm."""
        return self.folder / "bin"

    @property
    def credentials(self) -> Path:
        """Certificates, keys, and a kubeconfig for each component."""
        return self.folder / "credentials"

    @property
    def volumes(self) -> Path:
        """The folder of all ReadWriteMany volumes: every machine sees it."""
        return self.folder / "volumes"

    @property
    def api_ready(self) -> Path:
        """File that exists once the API server answers: clients of it start then."""
        return self.folder / "api-ready"

    @property
    def record(self) -> Path:
        return self.folder / "cluster.json"

    def machine(self, name: str) -> MachineFolder:
        """The folder of one machine."""
        return MachineFolder(self.folder / name)

    def read_plan(self) -> Plan | None:
        """Return the plan of the cluster, or None without one."""
        try:
            record = json.loads(self.record.read_text())
        except FileNotFoundError:
            return None
        return Plan(self.name, record["net"], tuple(record["nodes"])) if record["provider"] == "native" else None

    def write_plan(self, plan: Plan) -> None:
        """Make the folder and record the plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps({"provider": "native", "net": plan.net, "nodes": plan.nodes}))


def recorded_nets() -> set[int]:
    """Return the second octets of all clusters of this cache."""
    plans = [State(folder.name).read_plan() for folder in clusters_root().glob("*/")]
    return {plan.net for plan in plans if plan}
